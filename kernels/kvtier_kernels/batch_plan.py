"""Which bytes of a block belong to which rows of an engine's caches: `layout` and `paged` joined into tables that one
launch walks.

A plan is made once per layout and set of caches. Its *sorts* are the parts (layer, K or V) that agree in width, formats
and strides, so a kernel is launched once per sort, mostly once in all, for every layer of every block of a batch. What
differs between the parts of a sort is in its table, int64 [rows, FIELDS] on the device; addresses count from the sort's
first part. Immutable; any thread may use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvtier.errors import Invalid
from kvtier.format.layout import ITEM_BYTES, SCALE_BYTES, Extents, pad
from kvtier.format.layout import Part as LayoutPart
from kvtier_kernels.paged import Paged, Plane
from kvtier_kernels.reference import described

# Fields of a table's row. Offsets of the caches count elements of the view concerned, those of the body elements of
# what is written there.
NATIVE_AT, CODES_AT, SLOT_SCALES_AT, DATA_AT, SCALES_AT, PAD_AT, PAD_BYTES, INDEX = map(tl.constexpr, range(8))
FIELDS = tl.constexpr(8)
_NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@triton.jit
def token_rows(page_of, t, live, rows, PAGE: tl.constexpr):
    """Offsets of tokens `t` of a block with page ids from `page_of` in a head's rows; 64 bits: caches exceed 2^31."""
    page = tl.load(page_of + t // PAGE, mask=live, other=0).to(tl.int64)
    return tl.multiple_of(page * rows.page + (t % PAGE) * rows.token, 16)


@triton.jit
def zero_padding(body_bytes, entry, active):
    """Zeros behind the scales of a head's run at `body_bytes`, if `active`: equal KV makes equal bytes, padding too."""
    i = tl.arange(0, 16)
    nbytes = tl.where(active, tl.load(entry + PAD_BYTES), 0)
    tl.store(body_bytes + tl.load(entry + PAD_AT) + i, tl.zeros([16], tl.uint8), mask=i < nbytes)


@triton.jit
def _mark(flags, pages, count, FP8: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    page = tl.load(pages + i, mask=i < count, other=-1).to(tl.int64)
    tl.store(flags + page, tl.full([N], FP8, tl.uint8), mask=page >= 0)


@dataclass(frozen=True, slots=True)
class Sort:
    """Parts of one launch. `first`: the plane that offsets count from; the table's `index`: layer * parts + part."""

    part: LayoutPart
    first: Plane
    table: torch.Tensor
    rows: int

    def scales(self, bodies: torch.Tensor) -> torch.Tensor:
        """Bodies as elements of the parts' scales; as they are for native parts, which have none."""
        return bodies if self.part.native else bodies.view(SCALE_TYPES[self.part.scale_dtype])


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """See `plan`. `flags` are those of the caches, None where none of them may hold either form."""

    extents: Extents
    sorts: tuple[Sort, ...]
    heads: int
    layers: int
    parts: int
    page: int
    flags: torch.Tensor | None
    device: torch.device

    @property
    def tokens(self) -> int:
        """Of one engine block."""
        return self.extents.group.engine_tokens

    @property
    def engine_blocks(self) -> int:
        return self.extents.group.engine_blocks

    @property
    def pages(self) -> int:
        """Pages of one block."""
        return self.extents.group.tokens // self.page

    def check(self, pages: torch.Tensor, bodies: torch.Tensor) -> int:
        """Raises Invalid unless these are page ids [blocks, pages of a block] and bodies [blocks, >= body_bytes] on 16
        bytes; returns the blocks."""
        ids = pages.dtype in (torch.int32, torch.int64) and pages.is_contiguous()
        if not ids or pages.shape[1:] != (self.pages,):
            raise Invalid(f"page ids must be int32 or int64 [blocks, {self.pages}], contiguous, not {described(pages)}")
        blocks, nbytes = pages.shape[0], self.extents.body_bytes
        if bodies.dim() != 2 or bodies.dtype != torch.uint8 or bodies.shape[0] < blocks or bodies.shape[1] < nbytes:
            raise Invalid(f"bodies must be uint8 [{blocks}, {nbytes}], not {described(bodies)}")
        if bodies.stride(1) != 1 or bodies.stride(0) % 16 or bodies.data_ptr() % 16:
            raise Invalid("bodies must be contiguous runs on multiples of 16 bytes")
        if pages.device != self.device or bodies.device != self.device:
            found = f"the caches are on {self.device}, page ids on {pages.device} and bodies on {bodies.device}"
            raise Invalid(f"{found}: all must be on one device")
        return blocks

    def mark(self, pages: torch.Tensor, fp8: bool) -> None:
        """Sets the flags of these pages, if there are any; ids below 0 are skipped. Launched on the current stream."""
        if self.flags is not None and pages.numel():
            _mark[(-(-pages.numel() // 256),)](self.flags, pages, pages.numel(), FP8=int(fp8), N=256, num_warps=1)


def plan(extents: Extents, caches: Sequence[Paged]) -> BatchPlan:
    """The plan of one layout range over one cache per layer of it.

    Every cache has the same page size, which divides an engine block, and exactly the heads of the range (slice it). An
    excluded layer is a native part; its cache may be native or MIXED. Raises Invalid for what does not fit together,
    and for formats that the kernels do not write: e5m2, e4m3fnuz, fp32 elements, fp16 scales (they cannot hold the
    codec's bounds) and static scales in less than fp32.
    """
    group = extents.group
    layers, heads = extents.range_layers, extents.head_count
    if group.kind != "attention" or len(caches) != len(layers):
        wanted = f"an attention group and one cache for each of its {len(layers)} layers"
        raise Invalid(f"a plan needs {wanted}, not {len(caches)}")
    page = caches[0].tokens
    if any(cache.tokens != page or cache.heads != heads for cache in caches) or group.engine_tokens % page:
        raise Invalid(f"caches must have {heads} heads and one page size that divides {group.engine_tokens} tokens")
    flags = {id(cache.flags): cache.flags for cache in caches if cache.flags is not None}
    if len(flags) > 1:
        raise Invalid("one flag per page holds for all layers: caches share the tensor")
    sorts: dict[tuple[object, ...], list[tuple[Plane, list[int]]]] = {}
    parts: dict[tuple[object, ...], LayoutPart] = {}
    for i, (layer, places, cache) in enumerate(zip(layers, extents.places, caches, strict=True)):
        if len(layer.parts) != 2:
            raise Invalid(f"layer {layer.index} has {len(layer.parts)} parts, not K and V")
        for j, (place, plane) in enumerate(zip(places, cache, strict=True)):
            part = place.part
            _check(part, plane)
            key = (part.width, part.dtype, part.granularity, part.scale_dtype, *_strides(plane))
            parts.setdefault(key, part)
            last, scale_size = place.scales + place.scale_bytes, SCALE_BYTES[part.scale_dtype]
            if not part.native and place.scales % scale_size:
                where = f"scales of {part.name} in layer {layer.index} start at byte {place.scales}"
                raise Invalid(f"{where}, not on a multiple of their size")
            starts = place.data // ITEM_BYTES[part.dtype], place.scales // scale_size
            sorts.setdefault(key, []).append((plane, [*starts, last, (pad(last) - last) * (j == 1), i * 2 + j]))
    device = caches[0].device
    made = tuple(_sort(parts[key], found, device) for key, found in sorts.items())
    return BatchPlan(extents, made, heads, len(layers), 2, page, next(iter(flags.values()), None), device)


def _sort(part: LayoutPart, found: list[tuple[Plane, list[int]]], device: torch.device) -> Sort:
    first = found[0][0]
    table = [[*_offsets(plane, first), *row] for plane, row in found]
    return Sort(part, first, torch.tensor(table, dtype=torch.int64, device=device), len(table))


def _views(plane: Plane) -> tuple[torch.Tensor | None, ...]:
    return (plane.native, plane.codes, plane.scales)


def _strides(plane: Plane) -> tuple[object, ...]:
    """What must agree within a sort: dtypes and strides of the views."""
    return tuple(None if view is None else (view.dtype, view.stride()) for view in _views(plane))


def _offsets(plane: Plane, first: Plane) -> list[int]:
    """Distances of the views from those of the first plane, in elements. They may lie in separate allocations."""
    distances = []
    for view, base in zip(_views(plane), _views(first), strict=True):
        distance = 0 if view is None or base is None else view.data_ptr() - base.data_ptr()
        size = 1 if view is None else view.element_size()
        if distance % (16 if view is not plane.scales else size):
            raise Invalid("caches must start on multiples of 16 bytes")
        distances.append(distance // size)
    return distances


def _check(part: LayoutPart, plane: Plane) -> None:
    if part.width != plane.width or part.width % 16:
        widths = f"{part.name} has width {part.width} in the layout and {plane.width} in the cache"
        raise Invalid(f"{widths}; both must be one multiple of 16")
    if part.native:
        if part.dtype not in _NATIVE or plane.native is None or plane.native.dtype != _NATIVE[part.dtype]:
            raise Invalid(f"native {part.name} of dtype {part.dtype} needs a cache of that format")
        return
    if part.dtype != "e4m3fn":
        why = "the formats share bytes but not their meaning"
        raise Invalid(f"kvtier's kernels read and write e4m3fn only, not {part.dtype}: {why}")
    if part.scale_dtype not in SCALE_TYPES or (part.granularity in ("tensor", "head") and part.scale_dtype != "fp32"):
        wanted = "fp32, or bf16 where they come from the block"
        raise Invalid(f"scales of {part.name} must be {wanted}, not {part.scale_dtype}")
    if plane.granularity not in ("none", part.granularity) and (plane.codes is not None or plane.scales is not None):
        found = f"{part.granularity} in the layout and {plane.granularity} in the cache"
        raise Invalid(f"{part.name} has granularity {found}")
