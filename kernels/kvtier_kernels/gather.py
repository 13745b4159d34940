"""Copy blocks that are FP8 already out of an engine's pages, codes and scales as they are: into the block's bytes,
nothing is quantized twice.

Two users: a page whose native slot holds restored FP8 ("dual", by its flag), saved again verbatim; and an FP8 engine's
own cache ("passthrough"), whose static scales are repeated per head in the block. There codes at the top (0x7E, 0xFE)
are counted as clipped: more cannot be known of a value that somebody else quantized. NaN codes (0x7F, 0xFF) count as
nonfinite. One program per engine block, head and part; runs on the current stream.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels import batch_plan, paged, tuning
from kvtier_kernels.batch_plan import CODES_AT, DATA_AT, FIELDS, INDEX, SCALES_AT, SLOT_SCALES_AT, BatchPlan, Sort
from kvtier_kernels.paged import SCALES, Side

_CHANNEL_ROWS = tl.constexpr(paged.CHANNEL_ROWS)


@triton.jit
def _gather(
    side, bodies, body_scales, clipped, nonfinite, pages, flags, table, pitch, scale_pitch, head_stride,
    scale_head_stride,
    SCALES: tl.constexpr, PER_BLOCK: tl.constexpr, FLAGGED: tl.constexpr, TOPS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, INDICES: tl.constexpr,
):  # fmt: skip
    """One engine block of one head and part. SCALES as in `paged`; PER_BLOCK: scales of each engine block, else one."""
    one, row, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    block, e = one // BLOCKS, one % BLOCKS
    first = e * TOKENS
    page_of = pages + block * (BLOCKS * TOKENS // PAGE)
    page = tl.load(page_of + first // PAGE).to(tl.int64)
    if FLAGGED:  # noqa: SIM102
        if tl.load(flags + page) == 0:
            return  # native: quantized by `quantize`
    entry = table + row * FIELDS
    d = tl.arange(0, WIDE)
    source = side.codes.start + tl.multiple_of(tl.load(entry + CODES_AT), 16) + head * side.codes.head
    slot_scales = side.scales.start + tl.load(entry + SLOT_SCALES_AT) + head * side.scales.head
    data = bodies + block * pitch + head * head_stride + tl.multiple_of(tl.load(entry + DATA_AT), 16)
    scales = body_scales + block * scale_pitch + head * scale_head_stride + tl.load(entry + SCALES_AT)
    if SCALES == 1:
        scale = tl.load(slot_scales + page * side.scales.page)
        tl.store(scales + (e if PER_BLOCK else 0), scale.to(scales.dtype.element_ty))
    elif SCALES == 3:
        each: tl.constexpr = WIDTH // _CHANNEL_ROWS
        at = page * side.scales.page + (d // each) * side.scales.token + d % each
        scale = tl.load(slot_scales + at, mask=d < WIDTH, other=0.0)
        tl.store(scales + e * WIDTH + d, scale.to(scales.dtype.element_ty), mask=d < WIDTH)
    clips, odd = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for at in range(0, TOKENS, TILE):
        t = at + tl.arange(0, TILE)
        live = t < TOKENS
        inside = live[:, None] & (d < WIDTH)[None, :]
        at = batch_plan.token_rows(page_of, first + t, live, side.codes, PAGE)
        codes = tl.load(source + at[:, None] + d[None, :], mask=inside, other=0)
        tl.store(data + (first + t)[:, None] * WIDTH + d[None, :], codes, mask=inside)
        if SCALES == 2:
            spot = tl.load(page_of + (first + t) // PAGE, mask=live, other=0).to(tl.int64) * side.scales.page
            scale = tl.load(slot_scales + spot + ((first + t) % PAGE) * side.scales.token, mask=live, other=0.0)
            tl.store(scales + first + t, scale.to(scales.dtype.element_ty), mask=live)
        odd += tl.sum(((codes & 0x7F) == 0x7F).to(tl.int32), axis=1)
        if TOPS:
            clips += tl.sum(((codes & 0x7F) == 0x7E).to(tl.int32), axis=1)
    count = (one * INDICES + tl.load(entry + INDEX)) * HEADS + head
    tl.store(nonfinite + count, tl.sum(odd, axis=0))
    if TOPS:
        tl.store(clipped + count, tl.sum(clips, axis=0))
    batch_plan.zero_padding(bodies + block * pitch + head * head_stride, entry, e == 0)


def gather(plan: BatchPlan, pages: Tensor, bodies: Tensor, nonfinite: Tensor, clipped: Tensor | None = None) -> None:
    """Writes the bodies of blocks whose pages hold FP8; pages whose flag says native are left out, as are native parts.

    pages and bodies as in `quantize`, padding included. nonfinite and clipped: int32 [blocks * engine blocks, layers,
    parts, heads], of which the entries of gathered parts are set; codes at the top are counted if `clipped` is given.
    """
    if not plan.check(pages, bodies):
        return
    for sort in plan.sorts:
        if sort.part.native or sort.first.codes is None:
            continue
        _launch(plan, sort, pages, bodies, nonfinite, clipped)


def _launch(
    plan: BatchPlan, sort: Sort, pages: Tensor, bodies: Tensor, nonfinite: Tensor, clipped: Tensor | None
) -> None:
    part, scales = sort.part, sort.scales(bodies)
    stride, wide = plan.extents.head_stride, triton.next_power_of_2(part.width)
    tune = tuning.copying(plan.tokens, wide)
    _gather[(len(pages) * plan.engine_blocks, sort.rows, plan.heads)](
        Side(*sort.first.side(False)), bodies, scales, nonfinite if clipped is None else clipped, nonfinite, pages,
        pages if plan.flags is None else plan.flags, sort.table, bodies.stride(0), scales.stride(0), stride,
        stride // scales.element_size(),
        SCALES=SCALES[part.granularity], PER_BLOCK=part.granularity == "block-head", FLAGGED=plan.flags is not None,
        TOPS=clipped is not None, TOKENS=plan.tokens, BLOCKS=plan.engine_blocks, PAGE=plan.page, WIDTH=part.width,
        WIDE=wide, TILE=tune.tile, HEADS=plan.heads, INDICES=plan.layers * plan.parts, num_warps=tune.warps,
    )  # fmt: skip
