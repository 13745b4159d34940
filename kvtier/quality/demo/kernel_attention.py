"""The demo's attention through the Triton kernels, as an engine in mode `dual` runs it: on a GPU, or on Triton's
corrected interpreter without one.

A cache of native slots, one tensor a layer. Leased blocks go into it by `transfer` and `restore`, FP8 codes and scales
into the slots' own bytes; K and V of the pass itself are written natively behind them; `prefill` reads each page by its
flag. Needs triton. Not for threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.errors import Unavailable
from kvtier.format.layout import Extents
from kvtier.quality.smollm import Attend

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read once, when triton is first imported
    import kvtier_kernels.interpreter  # noqa: F401

from kvtier_kernels import paged, selftest
from kvtier_kernels.batch_plan import plan
from kvtier_kernels.prefill import prefill
from kvtier_kernels.transfer import BlockTransfer, RegisteredArena

DEADLINE = 120.0  # seconds for the blocks to arrive


class DualCache:
    """Slots for `prefix` blocks and `extra` tokens behind them, of a layout of K and V of one width in every layer."""

    def __init__(self, extents: Extents, prefix: int, extra: int) -> None:
        group = extents.group
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        part, self._page, self._prefix = group.layers[0].parts[0], group.tokens, prefix
        report = selftest.run(self.device, part.width, self._page, part.granularity)
        if not report.usable:
            raise Unavailable(f"the kernels may not be used here: {report.reasons}")
        pages = prefix + -(-extra // self._page)
        self.flags = torch.zeros(pages, dtype=torch.uint8, device=self.device)
        shape, kinds = (pages, group.heads, self._page, 2 * part.width), (part.granularity, part.granularity)
        self._kv = [torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in group.layers]
        self.layers = [paged.interleaved(kv, part.width, self.flags, kinds) for kv in self._kv]
        self._plan = plan(extents, self.layers)
        self._table = torch.arange(pages, dtype=torch.int32, device=self.device)[None]

    def load(self, arena: NDArray[np.uint8], bodies: Sequence[NDArray[np.uint8]]) -> None:
        """Restores leased bodies, which lie in `arena`, into the first pages. Waits; the lease may end afterwards."""
        registered = RegisteredArena(arena, self.device)
        try:
            ids = torch.arange(len(bodies))[:, None]
            if not BlockTransfer(self._plan, registered).load(bodies, ids).wait(DEADLINE):
                raise Unavailable("the blocks did not arrive in time")
        finally:
            registered.close()

    def attend(self) -> Attend:
        """Attention of a pass that starts behind the prefix."""
        start = self._prefix * self._page

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            count, device = queries.shape[1], self.device
            own: Any = torch.cat([keys, values], dim=2).bfloat16().to(device)
            for at in range(0, count, self._page):
                piece = own[:, at : at + self._page]
                self._kv[layer][self._prefix + at // self._page, :, : piece.shape[1]] = piece
            lengths = torch.tensor([start + count], dtype=torch.int32, device=device)
            starts = torch.tensor([0, count], dtype=torch.int32, device=device)
            q = queries.transpose(0, 1).contiguous().to(device)
            out, _ = prefill(q, self.layers[layer], self._table, starts, lengths, count)
            return out.transpose(0, 1).to(queries.device)

        return attend
