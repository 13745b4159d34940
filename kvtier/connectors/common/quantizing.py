"""A BF16 or FP16 engine's caches whose blocks become FP8 as they leave ("dual", "expand"), and their way back.

    save      native pages are quantized, one scale an engine block, part and head, a power of two; a page that is FP8
              already goes as it is
    restore   "dual": codes and scales into the native slot's own bytes (`kvtier_kernels.paged`), then the page's flag
              := 1
              "expand": native elements, native(code * scale), then the flag := 0 where there are flags

Powers of two make code * scale exact in bf16: attention over a block restored in place and over the same block expanded
sees the same numbers, so both modes share a namespace. Here is the CPU's way, in numpy on the mover's threads: torch
would wait for the engine's OpenMP threads there. Under one scale FP8 is a function of 65,536 elements, or of 256 codes:
both ways are tables, made by `reference`. A GPU's way is `quantizing_gpu`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from kvtier_kernels import reference
from kvtier_kernels.paged import Paged, Plane
from numpy.typing import NDArray

from kvtier.client.answers import Body
from kvtier.connectors.common.pages import GroupCaches
from kvtier.errors import Invalid
from kvtier.format.layout import Extents
from kvtier.format.views import part_view, scale_view

KIND = "block-head"  # what one scale covers
RULE, CODEC = "amax-pow2", reference.CODEC
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NOT_FINITE = {"bf16": 0x7F80, "fp16": 0x7C00}  # magnitudes from here on
_TABLES = 128  # encoders kept, 64 KiB each: scales differ by powers of two, so a model needs a dozen


@dataclass(slots=True)
class QuantizedCaches(GroupCaches):
    """One KV cache group on this rank. `native`: the engine's number format. `paged`: K and V of each layer; with flags
    where they may hold FP8 in place. `count(name, value, label)` as the mover's."""

    native: str = "bf16"
    in_place: bool = False
    paged: list[Paged] = field(default_factory=list)
    count: Callable[[str, float, str], None] = lambda name, value, label: None

    def bind(self, extents: Extents) -> None:
        heads, group = extents.head_count, extents.group
        for (name, _), cache, places in zip(self.layers, self.paged, extents.places, strict=True):
            for plane, placed in zip(cache, (place.part for place in places), strict=True):
                there = (plane.any.shape[1], plane.any.shape[2] * self.ratio * group.engine_blocks, plane.width, KIND)
                block = (heads, group.tokens, placed.width, placed.granularity)
                if there != block:
                    raise Invalid(f"layer {name}: a cache of {there} does not fit blocks of {block}")
        self.extents, self.gaps = extents, extents.padded

    def look(self, written: Any) -> tuple[int, str]:
        """`Cache.look`: scales are those of the largest magnitude, so nothing clips."""
        return 0, written.layer

    def pages_of(self, block: int) -> range:
        """The kernel's pages of an engine block."""
        return range(block * self.ratio, (block + 1) * self.ratio)


@dataclass(frozen=True, slots=True)
class Written:
    """What a save saw: the first layer with a value that is not finite, or ""."""

    layer: str = ""


class HostCaches(QuantizedCaches):
    """The caches of a CPU engine."""

    def bind(self, extents: Extents) -> None:
        QuantizedCaches.bind(self, extents)
        self._planes = [[_Host(plane) for plane in cache] for cache in self.paged]
        flags = self.paged[0].flags
        self._flags = None if flags is None else flags.numpy()

    def write(self, ready: Any, blocks: Sequence[int], slot: Body) -> Written:
        began, bad = time.perf_counter(), ""
        if self.gaps:
            slot.fill(0)
        verbatim = [self._flags is not None and bool(self._flags[self.pages_of(block)[0]]) for block in blocks]
        size = self.extents.group.engine_tokens
        for layer, planes in enumerate(self._planes):
            for part, plane in enumerate(planes):
                codes, scales = part_view(slot, self.extents, layer, part), scale_view(slot, self.extents, layer, part)
                for at, block in enumerate(blocks):
                    place = codes[:, at * size : (at + 1) * size]
                    if verbatim[at]:
                        fine = plane.gather(self.pages_of(block), place, scales[:, at])
                    else:
                        fine = _encode(plane.read(self.pages_of(block)), self.native, place, scales[:, at])
                    if not fine and not bad:
                        bad = self.layers[layer][0]
        self.count("quantize_seconds", time.perf_counter() - began, "")
        self.count("verbatim_blocks", sum(verbatim), "")
        return Written(bad)

    def read(self, ready: Any, entries: Sequence[Sequence[int]], bodies: Sequence[Body]) -> None:
        began, size, expanded = time.perf_counter(), self.extents.group.engine_tokens, 0
        for blocks, body in zip(entries, bodies, strict=True):
            wanted = [(at, block) for at, block in enumerate(blocks) if block]
            for layer, planes in enumerate(self._planes):
                for part, plane in enumerate(planes):
                    where = (body, self.extents, layer, part)
                    codes, scales = part_view(*where), scale_view(*where)
                    for at, block in wanted:
                        one = codes[:, at * size : (at + 1) * size]
                        if self.in_place:
                            plane.scatter(self.pages_of(block), one, scales[:, at])
                        else:
                            plane.write(self.pages_of(block), _decode(one, scales[:, at], self.native))
                            expanded += one.size * 2
            if self._flags is not None:  # last: what a flag says is there
                for _, block in wanted:
                    self._flags[block * self.ratio : (block + 1) * self.ratio] = self.in_place
        if not self.in_place:
            self.count("expand_seconds", time.perf_counter() - began, "")
            self.count("expand_bytes", expanded, "")
            self.count("expand_blocks", len(entries), "")


class _Host:
    """K or V of one layer in numpy: native elements as 16 bits, codes as bytes."""

    def __init__(self, plane: Plane) -> None:
        assert plane.native is not None
        self._native: NDArray[np.uint16] = plane.native.view(torch.int16).numpy().view(np.uint16)
        self._codes = None if plane.codes is None else plane.codes.numpy()
        self._scales = None if plane.scales is None else plane.scales.numpy()
        self._tokens = plane.native.shape[2]

    def read(self, pages: range) -> NDArray[np.uint16]:
        """[heads, tokens, width] of an engine block; a view where it is one page."""
        if len(pages) == 1:
            return self._native[pages[0]]
        return np.concatenate(self._native[pages.start : pages.stop], axis=1)

    def write(self, pages: range, elements: NDArray[np.uint16]) -> None:
        """The inverse of `read`."""
        for number, page in enumerate(pages):
            self._native[page] = elements[:, number * self._tokens : (number + 1) * self._tokens]

    def gather(self, pages: range, codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> bool:
        """Codes [heads, tokens, width] and scales [heads] out of FP8 pages, as they are; whether all are finite."""
        assert self._codes is not None and self._scales is not None
        for number, page in enumerate(pages):
            codes[:, number * self._tokens : (number + 1) * self._tokens] = self._codes[page]
        scales[:] = self._scales[pages[0], :, 0, 0]
        return not bool(((codes & 0x7F) == reference.NAN_CODE).any())

    def scatter(self, pages: range, codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> None:
        """The inverse of `gather`."""
        assert self._codes is not None and self._scales is not None
        for number, page in enumerate(pages):
            self._codes[page] = codes[:, number * self._tokens : (number + 1) * self._tokens]
            self._scales[page, :, 0, 0] = scales


def _encode(elements: NDArray[np.uint16], native: str, codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> bool:
    """Quantizes [heads, tokens, width] head by head as `reference.quantize` with `powers`; whether all are finite."""
    fine = True
    for head, bits in enumerate(elements):
        magnitude = bits & 0x7FFF
        top = int(magnitude.max())
        if top >= _NOT_FINITE[native]:
            fine, top = False, int(magnitude[magnitude < _NOT_FINITE[native]].max(initial=0))
        scales[head] = scale = scale_of(top, native)
        codes[head] = encoder(native, float(scale))[bits]
    return fine


def _decode(codes: NDArray[np.uint8], scales: NDArray[np.float32], native: str) -> NDArray[np.uint16]:
    """Elements [heads, tokens, width] of codes: `reference.dequantize(...).to(native)`."""
    elements = np.empty(codes.shape, np.uint16)
    for head, scale in enumerate(scales):
        elements[head] = decoder(native, float(scale))[codes[head]]
    return elements


def scale_of(top: int, native: str) -> np.float32:
    """`reference.scale_from_amax(..., powers=True)` of the largest finite magnitude, given as bits of `native`."""
    f32 = np.float32
    amax = np.uint32(top << 16).view(f32) if native == "bf16" else np.uint16(top).view(np.float16).astype(f32)
    scale = np.clip(f32(amax * f32(reference.RECIPROCAL)), f32(reference.MIN_SCALE), f32(reference.MAX_SCALE))
    return np.uint32((int(scale.view(np.uint32)) + 0x7FFFFF) & 0x7F800000).view(np.float32)


@lru_cache(maxsize=_TABLES)
def encoder(native: str, scale: float) -> NDArray[np.uint8]:
    """Code of each of the 65,536 native elements under a scale."""
    elements = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int16)).view(TORCH[native])
    made = reference.quantize(elements.reshape(1, 1, -1), "tensor", torch.tensor([scale], dtype=torch.float32))
    table: NDArray[np.uint8] = made.codes.view(torch.uint8).flatten().numpy()
    return table


@lru_cache(maxsize=16 * _TABLES)
def decoder(native: str, scale: float) -> NDArray[np.uint16]:
    """Native element, as bits, of each of the 256 codes under a scale."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(1, 1, -1)
    values = reference.dequantize(codes, torch.full((1, 1), scale), "tensor").to(TORCH[native])
    table: NDArray[np.uint16] = values.view(torch.int16).flatten().numpy().view(np.uint16)
    return table
