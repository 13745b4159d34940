"""`quantizing` on a GPU, by the Triton kernels: a copy a block over the link, a scatter a batch of blocks, on streams
of its own.

Saving waits for the step that filled the blocks, restoring for whatever the engine had given its stream when the load
was planned: a block that is restored may have had a reader until then. Both wait for their own stream before they
return, so the engine reads what is there. Each of the mover's threads has a stream and a staging of its own per group,
16 bodies on the device. Needs triton. Not run on a GPU yet: on Triton's interpreter it equals the CPU's way, bit for
bit.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from kvtier_kernels.batch_plan import plan
from kvtier_kernels.expand import Expander
from kvtier_kernels.quantize import quantize
from kvtier_kernels.restore import restore

from kvtier.client.answers import Body
from kvtier.client.torch_views import body_tensor
from kvtier.connectors.common.quantizing import QuantizedCaches, Written
from kvtier.format.layout import Extents

BATCH = 16  # blocks of one scatter, and bodies in a loader's staging


class DeviceCaches(QuantizedCaches):
    """The caches of a GPU engine."""

    batch = BATCH

    def bind(self, extents: Extents) -> None:
        """`GroupCaches.bind`. Raises Invalid also for what no kernel reads."""
        QuantizedCaches.bind(self, extents)
        self._plan, self._own = plan(extents, self.paged), threading.local()

    def write(self, ready: Any, blocks: Sequence[int], slot: Body) -> Written:
        began = time.perf_counter()
        pages = torch.tensor([[page for block in blocks for page in self.pages_of(block)]])
        with self._stream(ready):
            staging = self._staging()[:1]
            ids = pages.to(self._plan.device)
            seen = quantize(self._plan, ids, staging, powers=True)
            body_tensor(slot, self.extents).copy_(staging[0, : self.extents.body_bytes])
            bad = (seen.nonfinite[0] > 0).flatten(1).any(1).tolist()
            flagged = self._plan.flags is not None and bool(self._plan.flags[ids[0, 0]])
        self.count("quantize_seconds", time.perf_counter() - began, "")
        self.count("verbatim_blocks", int(flagged), "")
        return Written(self.layers[bad.index(True)][0] if any(bad) else "")

    def read(self, ready: Any, entries: Sequence[Sequence[int]], bodies: Sequence[Body]) -> None:
        """`Cache.read`, at most `batch` entries."""
        wanted = [[page if block else -1 for block in blocks for page in self.pages_of(block)] for blocks in entries]
        expander = Expander(enabled=not self.in_place)
        with self._stream(ready):
            staging = self._staging()
            for place, body in zip(staging, bodies, strict=False):
                place[: self.extents.body_bytes].copy_(body_tensor(body, self.extents), non_blocking=True)
            pages = torch.tensor(wanted).to(self._plan.device)
            if self.in_place:
                restore(self._plan, staging, pages)
            else:
                expander.expand(self._plan, staging, pages)
        if not self.in_place:
            self.count("expand_seconds", expander.seconds, "")
            self.count("expand_bytes", expander.bytes_written, "")
            self.count("expand_blocks", expander.blocks, "")

    def _staging(self) -> torch.Tensor:
        """This thread's bodies on the device."""
        if not hasattr(self._own, "staging"):
            self._own.staging = torch.zeros(BATCH, self.extents.slot_bytes, dtype=torch.uint8, device=self._plan.device)
        staging: torch.Tensor = self._own.staging
        return staging

    @contextlib.contextmanager
    def _stream(self, ready: Any) -> Iterator[None]:
        """What is started inside runs on this thread's stream, after `ready`, and is done at the exit."""
        if self._plan.device.type != "cuda":
            yield
            return
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._plan.device)
        with torch.cuda.device(self._plan.device), torch.cuda.stream(self._own.stream):
            if ready is not None:
                self._own.stream.wait_event(ready)
            yield
            self._own.stream.synchronize()
