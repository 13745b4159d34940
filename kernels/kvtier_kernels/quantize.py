"""Quantize blocks as they leave: gather pages, scale, round to e4m3fn, count, and write the block's bytes, in one pass
over the KV.

    amax  = max |x| of the finite x under one scale           scale = min(max(amax * f32(1/448), 2^-64), 2^119), or
                                                              given
            (with `powers` rounded up to a power of two)
    code  = e4m3fn(clamp(x * (1 / scale), -448, 448))         one true division a scale, one multiplication an element
    counts per block, layer, part and head: finite x with |x / scale| > 464 (clipped), NaN and Inf (nonfinite), amax
                                                              over the finite x

Codes, scales and counts equal `reference.quantize` bit for bit. Small scales (bf16) are rounded to nearest even before
1 / scale is taken, so what is stored is what was used. A program owns one engine block of one head and part; nothing is
atomic. Native parts (excluded layers) are copied and counted the same way. Padding is written too: equal KV makes equal
bytes. Runs on the current stream; returns at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.errors import Invalid
from kvtier.format.layout import STATIC
from kvtier_kernels import batch_plan, fp8, reference, tuning
from kvtier_kernels.batch_plan import DATA_AT, FIELDS, INDEX, NATIVE_AT, SCALES_AT, BatchPlan, Sort
from kvtier_kernels.fp8 import encode
from kvtier_kernels.gather import gather
from kvtier_kernels.paged import Side

_CLIP, _FP8_MAX = tl.constexpr(reference.CLIP), fp8.FP8_MAX
_MIN_SCALE, _MAX_SCALE = tl.constexpr(reference.MIN_SCALE), tl.constexpr(reference.MAX_SCALE)
_RECIPROCAL = tl.constexpr(reference.RECIPROCAL)
_F32_MAX = tl.constexpr(3.4028234663852886e38)
# Granularities inside the kernel: none (native), given, one an engine block, one a token, one a channel.
KIND = {"none": 0, "tensor": 1, "head": 1, "block-head": 2, "token-head": 3, "channel": 4}


class QuantizeCounts(NamedTuple):
    """What a launch saw, [blocks, layers, parts, heads] on the device: clipped and nonfinite are int32 element counts,
    amax f32 over finite elements.

    A block with a non-finite value must not be sealed. Pages that were FP8 already count their NaN codes as nonfinite,
    nothing else.
    """

    clipped: Tensor
    nonfinite: Tensor
    amax: Tensor


@triton.jit
def _load(
    source, page_of, first, at, rows, d,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Elements [TILE, .] of tokens from `at` of the engine block that starts at token `first`; zeros outside."""
    t = at + tl.arange(0, TILE)
    live = t < TOKENS
    offsets = batch_plan.token_rows(page_of, first + t, live, rows, PAGE)
    return tl.load(source + offsets[:, None] + d[None, :], mask=live[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def _magnitude(x):
    """|x| of the finite elements, 0 for the others: what amax is taken over."""
    a = tl.abs(x.to(tl.float32))
    return tl.where(a <= _F32_MAX, a, 0.0)


@triton.jit
def _widen(amax, x, KIND: tl.constexpr):
    """amax of one scale each, grown by the elements of a tile."""
    if KIND == 2:
        return tl.maximum(amax, tl.max(tl.max(_magnitude(x), axis=1), axis=0))
    if KIND == 4:
        return tl.maximum(amax, tl.max(_magnitude(x), axis=0))
    return amax


@triton.jit
def _scale(amax, SMALL: tl.constexpr, POWERS: tl.constexpr):
    scale = tl.minimum(tl.maximum(amax * _RECIPROCAL, _MIN_SCALE), _MAX_SCALE)
    if POWERS:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale.to(tl.bfloat16).to(tl.float32) if SMALL else scale


@triton.jit
def _block_inverse(
    x, source, page_of, first, e, rows, scales, given, d,
    KIND: tl.constexpr, SMALL: tl.constexpr, POWERS: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """1 / scale of what a whole engine block scales, else 1; stores the scale. `x`: first tile, others read here."""
    inverse = 1.0
    if KIND == 1:
        scale = tl.load(given)
        inverse = tl.div_rn(1.0, scale)
        tl.store(scales, scale, mask=e == 0)
    elif KIND == 2 or KIND == 4:
        amax = tl.zeros([WIDE], tl.float32) if KIND == 4 else 0.0
        amax = _widen(amax, x, KIND)
        for at in range(TILE, TOKENS, TILE):
            amax = _widen(amax, _load(source, page_of, first, at, rows, d, TOKENS, WIDTH, PAGE, TILE), KIND)
        scale = _scale(amax, SMALL, POWERS)
        inverse = tl.div_rn(1.0, scale)
        if KIND == 2:
            tl.store(scales + e, scale.to(scales.dtype.element_ty))
        else:
            tl.store(scales + e * WIDTH + d, scale.to(scales.dtype.element_ty), mask=d < WIDTH)
    return inverse


@triton.jit
def _scaled(wide, most, inverse, scales, live, KIND: tl.constexpr, SMALL: tl.constexpr, POWERS: tl.constexpr):
    """x times 1 / scale of a tile. Scales of tokens are made of `most`, the largest of each row, and stored here."""
    if KIND == 3:
        scale = _scale(most, SMALL, POWERS)
        tl.store(scales, scale.to(scales.dtype.element_ty), mask=live)
        return wide * tl.div_rn(1.0, scale)[:, None]
    if KIND == 4:
        return wide * inverse[None, :]
    return wide * inverse


@triton.jit
def _quantize(
    side, bodies, body_scales, body_bytes, statics, clipped, nonfinite, amaxes, pages, flags, table, pitch, scale_pitch,
    byte_pitch, head_stride, scale_head_stride, byte_head_stride,
    KIND: tl.constexpr, SMALL: tl.constexpr, POWERS: tl.constexpr, BITS: tl.constexpr, FLAGGED: tl.constexpr,
    TOKENS: tl.constexpr, BLOCKS: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, HEADS: tl.constexpr, INDICES: tl.constexpr,
):  # fmt: skip
    """One engine block of one head and part. The body pointers are one memory as codes (or native), scales, bytes."""
    one, row, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    block, e = one // BLOCKS, one % BLOCKS
    first = e * TOKENS
    page_of = pages + block * (BLOCKS * TOKENS // PAGE)
    if FLAGGED:  # noqa: SIM102
        if tl.load(flags + tl.load(page_of + first // PAGE)) != 0:
            return  # holds FP8 already: gathered as it is
    entry = table + row * FIELDS
    d = tl.arange(0, WIDE)
    source = side.native.start + tl.multiple_of(tl.load(entry + NATIVE_AT), 8) + head * side.native.head
    at_data = tl.multiple_of(tl.load(entry + DATA_AT), 8 if KIND == 0 else 16)
    data = bodies + block * pitch + head * head_stride + at_data
    scales = body_scales + block * scale_pitch + head * scale_head_stride + tl.load(entry + SCALES_AT)
    index = tl.load(entry + INDEX)
    x = _load(source, page_of, first, 0, side.native, d, TOKENS, WIDTH, PAGE, TILE)
    given = statics + index * HEADS + head
    inverse = _block_inverse(
        x, source, page_of, first, e, side.native, scales, given, d, KIND, SMALL, POWERS, TOKENS, PAGE, WIDTH, WIDE,
        TILE
    )  # fmt: skip
    clips, odd = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    tops = tl.zeros([TILE], tl.float32)
    for at in range(0, TOKENS, TILE):
        if TOKENS > TILE:
            x = _load(source, page_of, first, at, side.native, d, TOKENS, WIDTH, PAGE, TILE)
        t = at + tl.arange(0, TILE)
        target = data + (first + t)[:, None] * WIDTH + d[None, :]
        inside = (t < TOKENS)[:, None] & (d < WIDTH)[None, :]
        wide = x.to(tl.float32)
        finite = tl.abs(wide) <= _F32_MAX
        most = tl.max(_magnitude(wide), axis=1)
        tops = tl.maximum(tops, most)
        odd += tl.sum(1 - finite.to(tl.int32), axis=1)
        if KIND == 0:
            tl.store(target, x, mask=inside)
        else:
            y = _scaled(wide, most, inverse, scales + first + t, t < TOKENS, KIND, SMALL, POWERS)
            clips += tl.sum(((tl.abs(y) > _CLIP) & finite).to(tl.int32), axis=1)
            tl.store(target, encode(y, wide, BITS), mask=inside)
    count = (one * INDICES + index) * HEADS + head
    tl.store(clipped + count, tl.sum(clips, axis=0))
    tl.store(nonfinite + count, tl.sum(odd, axis=0))
    tl.store(amaxes + count, tl.max(tops, axis=0))
    batch_plan.zero_padding(body_bytes + block * byte_pitch + head * byte_head_stride, entry, e == 0)


def quantize(
    plan: BatchPlan, pages: Tensor, bodies: Tensor, statics: Tensor | None = None, *, powers: bool = False
) -> QuantizeCounts:
    """Writes the bodies of blocks from the engine's pages: one launch per sort of parts, for all layers, heads and
    blocks.

    pages     int32 or int64 [blocks, pages of a block]: each block's pages in the order of its tokens; every id must be
              valid
    bodies    uint8 [blocks, >= body_bytes], on multiples of 16 bytes; everything but what lies behind body_bytes is
              overwritten
    statics   f32 [layers, 2, heads]: the scales of parts of granularity "tensor" or "head" (other entries are not
              read), else None
    powers    scales that come from the block are powers of two

    A page whose flag says FP8 is copied as it is, codes and scales, and never quantized again; the pages of one engine
    block agree in their flag. Static scales are not checked here: they must be within the codec's bounds, as
    `reference` and the artifact check. Raises Invalid for shapes.
    """
    blocks = plan.check(pages, bodies)
    per_part = (plan.layers, plan.parts, plan.heads)
    if statics is not None and (statics.shape != per_part or statics.dtype != torch.float32):
        raise Invalid(f"statics must be f32 of shape {per_part}, not {statics.dtype} of {tuple(statics.shape)}")
    if statics is not None and statics.device != plan.device:
        raise Invalid(f"statics must be on {plan.device}, not on {statics.device}")
    if statics is None and any(sort.part.granularity in STATIC for sort in plan.sorts):
        raise Invalid("parts of static granularity need their scales")
    shape = (blocks * plan.engine_blocks, *per_part)
    clipped, nonfinite = (torch.zeros(shape, dtype=torch.int32, device=plan.device) for _ in range(2))
    seen = QuantizeCounts(clipped, nonfinite, torch.zeros(shape, dtype=torch.float32, device=plan.device))
    for sort in plan.sorts:
        if sort.first.native is None:
            raise Invalid("an FP8 cache has nothing to quantize: gather it")
        if blocks:
            _launch(plan, sort, pages, bodies, statics, seen, powers)
    if plan.flags is not None and blocks:
        gather(plan, pages, bodies, nonfinite=seen.nonfinite)
    if plan.engine_blocks == 1:
        return seen
    apart = [x.unflatten(0, (blocks, plan.engine_blocks)) for x in seen]
    return QuantizeCounts(apart[0].sum(1, dtype=torch.int32), apart[1].sum(1, dtype=torch.int32), apart[2].amax(1))


def _launch(
    plan: BatchPlan,
    sort: Sort,
    pages: Tensor,
    bodies: Tensor,
    statics: Tensor | None,
    seen: QuantizeCounts,
    powers: bool,
) -> None:
    part = sort.part
    native = sort.first.native
    assert native is not None
    data = bodies.view(native.dtype) if part.native else bodies
    scales = sort.scales(bodies)
    stride, wide = plan.extents.head_stride, triton.next_power_of_2(part.width)
    tune = tuning.copying(plan.tokens, wide)
    # An excluded layer is native whatever the flags say of its page.
    flags = None if part.native or sort.first.codes is None else plan.flags
    _quantize[(len(pages) * plan.engine_blocks, sort.rows, plan.heads)](
        Side(*sort.first.side(False)), data, scales, bodies, seen.amax if statics is None else statics, seen.clipped,
        seen.nonfinite, seen.amax, pages, pages if flags is None else flags, sort.table, data.stride(0),
        scales.stride(0), bodies.stride(0), stride // data.element_size(), stride // scales.element_size(), stride,
        KIND=KIND[part.granularity], SMALL=part.scale_dtype == "bf16", POWERS=powers,
        BITS=not tuning.casts_directly(plan.device), FLAGGED=flags is not None, TOKENS=plan.tokens,
        BLOCKS=plan.engine_blocks, PAGE=plan.page, WIDTH=part.width, WIDE=wide, TILE=tune.tile, HEADS=plan.heads,
        INDICES=plan.layers * plan.parts, num_warps=tune.warps, enable_fp_fusion=False,
    )  # fmt: skip
