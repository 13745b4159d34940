"""Parts of an engine's KV cache as torch views, and their way into a block and back. No engine is imported here.

A group's caches are laid over a block once its place there is known (`bind`). Whatever does not fit is refused then,
never at a transfer. Copies run in the mover's threads, one block at a time; the mover decides who may touch which
engine block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from kvtier.client.answers import Body
from kvtier.client.torch_views import body_tensor, run_view
from kvtier.errors import Invalid
from kvtier.format.identity import f32_hex
from kvtier.format.layout import Extents, Part

_TOP = {"e4m3fn": 0x7E, "e5m2": 0x7B}  # the largest finite code: where a quantizer that saturates clips to
_NOT_FINITE = {"e4m3fn": 0x7F, "e5m2": 0x7C}  # codes from here on, the sign aside
_EXPONENT = {"bf16": 0x7F80, "fp16": 0x7C00}


@dataclass(slots=True)
class PartCache:
    """A part of a layer. `cells`: uint8 [kernel blocks, heads, tokens, bytes], the engine's; `scales`: live, static."""

    part: Part
    cells: torch.Tensor
    scales: list[float] = field(default_factory=list)


@dataclass(slots=True)
class GroupCaches:
    """A KV cache group on this rank. `shape`: what all its layers share; `ratio`: kernel blocks in an engine block."""

    batch: ClassVar[int] = 1  # entries that one `read` takes
    shape: dict[str, Any]
    saver: bool
    ratio: int
    layers: list[tuple[str, list[PartCache]]] = field(default_factory=list)
    extents: Extents = field(init=False)
    gaps: bool = field(init=False, default=True)  # whether a body has padding between its parts

    def bind(self, extents: Extents) -> None:
        """The place of each part in a block, once the namespace is known. Raises Invalid unless it fits."""
        for (name, parts), places in zip(self.layers, extents.places, strict=True):
            for part, place in zip(parts, places, strict=True):
                cell = part.cells[0].numel() * self.ratio * extents.group.engine_blocks
                if place.data_bytes * extents.head_count != cell:
                    wanted = f"{place.data_bytes} for each of {extents.head_count} heads"
                    raise Invalid(f"layer {name}: {cell} bytes of {part.part.name} do not fit {wanted}")
        self.extents, self.gaps = extents, extents.padded

    def write(self, ready: Any, blocks: Sequence[int], slot: Body) -> torch.Tensor:
        """`Cache.write`. On a GPU the block is put together there, so that one run of bytes crosses the link."""
        with _Stage(self, slot, ready) as body:
            if self.gaps:
                body.zero_()
            for target, cell in _pairs(self, blocks, body):
                _copy(target, cell)
            for (_, parts), places in zip(self.layers, self.extents.places, strict=True):
                for part, place in zip(parts, places, strict=True):
                    if part.scales:
                        values = torch.tensor(part.scales, dtype=torch.float32, device=body.device)
                        run_view(body, self.extents, place.scales, 4).copy_(values.view(torch.uint8).view(-1, 4))
            if body.device.type != "cpu":
                body_tensor(slot, self.extents).copy_(body)
        return body

    def read(self, ready: Any, entries: Sequence[Sequence[int]], bodies: Sequence[Body]) -> None:
        for blocks, body in zip(entries, bodies, strict=True):
            with _Stage(self, body, ready) as staged:
                for target, cell in _pairs(self, blocks, staged):
                    _copy(cell, target)

    def look(self, written: torch.Tensor) -> tuple[int, str]:
        """`Cache.look`: FP8 codes at the top of their range are counted as clipped."""
        clipped = 0
        for (name, parts), places in zip(self.layers, self.extents.places, strict=True):
            for part, place in zip(parts, places, strict=True):
                dtype = part.part.dtype
                if dtype not in _EXPONENT and dtype not in _NOT_FINITE:
                    continue
                cells = run_view(written, self.extents, place.data, place.data_bytes)
                if dtype in _EXPONENT:
                    bad = (cells.view(torch.int16) & _EXPONENT[dtype]).eq(_EXPONENT[dtype])
                else:
                    magnitude = cells & 0x7F
                    clipped += int(magnitude.eq(_TOP[dtype]).sum())
                    bad = magnitude.ge(_NOT_FINITE[dtype])
                if bool(bad.any()):
                    return clipped, name
        return clipped, ""

    def to_json(self) -> dict[str, Any]:
        """Plain data for the report."""
        layers = []
        for name, parts in self.layers:
            formats = [[p.part.name, p.part.width, p.part.dtype, p.part.granularity] for p in parts]
            layers.append([name, formats, [list(map(f32_hex, p.scales)) for p in parts]])
        return {**self.shape, "layers": layers}


def _copy(to: torch.Tensor, from_: torch.Tensor) -> None:
    """Between bytes of one device. On a CPU by numpy, on this thread alone: torch would share each piece out to OpenMP
    threads of its own, which wait for the cores that the engine's hold (a load took a quarter longer)."""
    if to.device.type == "cpu":
        np.copyto(to.numpy(), from_.numpy())
    else:
        to.copy_(from_)


class _Stage:
    """A body on the engine's device: the slot itself, or a copy on a GPU, on a stream of its own, done at the exit."""

    def __init__(self, group: GroupCaches, body: Body, ready: Any) -> None:
        self._host, self._ready = body_tensor(body, group.extents), ready
        self._device = group.layers[0][1][0].cells.device

    def __enter__(self) -> torch.Tensor:
        if self._device.type == "cpu":
            return self._host
        self._stream = torch.cuda.Stream(self._device)
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()
        if self._ready is not None:
            self._stream.wait_event(self._ready)
        return self._host.to(self._device)

    def __exit__(self, *failure: Any) -> None:
        if self._device.type != "cpu":
            self._stream.synchronize()
            self._context.__exit__(*failure)


def _pairs(
    group: GroupCaches, blocks: Sequence[int], body: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(place in the body, kernel block in the engine's cache) of every part and wanted block: uint8 of equal shape."""
    extents, ratio = group.extents, group.ratio
    for (_, parts), places in zip(group.layers, extents.places, strict=True):
        for part, place in zip(parts, places, strict=True):
            heads, tokens, nbytes = part.cells.shape[1:]
            row, step = extents.head_stride, tokens * nbytes
            if extents.group.kind == "opaque":
                row, step = step, heads * step
            start = body.storage_offset() + place.data
            for position, block in enumerate(blocks):
                for kernel in range(ratio) if block else ():
                    at = start + (position * ratio + kernel) * step
                    target = body.as_strided((heads, tokens, nbytes), (row, nbytes, 1), at)
                    yield target, part.cells[block * ratio + kernel]
