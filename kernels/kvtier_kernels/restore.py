"""Put blocks back where attention reads them: FP8 stays FP8. One scatter for a batch of blocks that lie in device
memory, all layers and heads.

    FP8 cache         codes into the cache ("passthrough"; the scales are the engine's own and part of the namespace)
    native cache      codes and scales into the native slots' own bytes ("dual", byte layout in `paged`), then the
                      pages' flags := 1
    native parts      (excluded layers, or a native namespace) elements as they are; the flags of a native namespace :=
                      0

Data first, then flags, on one stream. The engine's stream must wait for this one before it reads, and this one for the
engine's before it writes: a page may have been handed on while an earlier step still reads it. A page id below 0 is
skipped (null blocks of sliding windows). Returns at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtier_kernels import paged, tuning
from kvtier_kernels.batch_plan import CODES_AT, DATA_AT, FIELDS, NATIVE_AT, SCALES_AT, SLOT_SCALES_AT, BatchPlan, Sort
from kvtier_kernels.paged import SCALES, Side

_CHANNEL_ROWS = tl.constexpr(paged.CHANNEL_ROWS)


@triton.jit
def _restore(
    rows, scale_rows, bodies, body_scales, pages, table, pitch, scale_pitch, head_stride, scale_head_stride, data_field,
    scale_field,
    SCALES: tl.constexpr, PER_BLOCK: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, PAGE: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One page of one head and part. `rows` are the native elements or the codes to write; SCALES 0: there are none to
    write; ALIGN: 16 bytes in elements."""
    one, row, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    per: tl.constexpr = BLOCKS * TOKENS // PAGE
    block, first = one // per, (one % per) * PAGE
    page = tl.load(pages + one).to(tl.int64)
    if page < 0:
        return
    entry = table + row * FIELDS
    d = tl.arange(0, WIDE)
    target = rows.start + tl.multiple_of(tl.load(entry + data_field), ALIGN) + page * rows.page + head * rows.head
    data = bodies + block * pitch + head * head_stride + tl.multiple_of(tl.load(entry + DATA_AT), ALIGN)
    for at in range(0, PAGE, TILE):
        t = at + tl.arange(0, TILE)
        inside = (t < PAGE)[:, None] & (d < WIDTH)[None, :]
        x = tl.load(data + (first + t)[:, None] * WIDTH + d[None, :], mask=inside)
        tl.store(target + tl.multiple_of(t * rows.token, 16)[:, None] + d[None, :], x, mask=inside)
    if SCALES > 0:
        slots = scale_rows.start + tl.load(entry + scale_field) + page * scale_rows.page + head * scale_rows.head
        scales = body_scales + block * scale_pitch + head * scale_head_stride + tl.load(entry + SCALES_AT)
        e = first // TOKENS
        if SCALES == 1:
            tl.store(slots, tl.load(scales + (e if PER_BLOCK else 0)).to(tl.float32))
        elif SCALES == 2:
            for at in range(0, PAGE, TILE):
                t = at + tl.arange(0, TILE)
                scale = tl.load(scales + first + t, mask=t < PAGE)
                tl.store(slots + t * scale_rows.token, scale.to(tl.float32), mask=t < PAGE)
        else:
            each: tl.constexpr = WIDTH // _CHANNEL_ROWS
            scale = tl.load(scales + e * WIDTH + d, mask=d < WIDTH).to(tl.float32)
            tl.store(slots + (d // each) * scale_rows.token + d % each, scale, mask=d < WIDTH)


def restore(plan: BatchPlan, bodies: torch.Tensor, pages: torch.Tensor) -> None:
    """Scatters bodies [blocks, >= body_bytes] to their pages [blocks, pages of a block], as the module says."""
    if not plan.check(pages, bodies):
        return
    for sort in plan.sorts:
        _launch(plan, sort, bodies, pages)
    plan.mark(pages, any(not sort.part.native for sort in plan.sorts))


def _launch(plan: BatchPlan, sort: Sort, bodies: torch.Tensor, pages: torch.Tensor) -> None:
    part, side = sort.part, Side(*sort.first.side(False))
    native = sort.first.native if part.native else None
    data = bodies if native is None else bodies.view(native.dtype)
    scales = sort.scales(bodies)
    stride, wide = plan.extents.head_stride, triton.next_power_of_2(part.width)
    tune = tuning.copying(plan.page, wide)
    own = sort.first.native is None  # an FP8 engine's cache: its scales are elsewhere
    _restore[(pages.numel(), sort.rows, plan.heads)](
        side.native if part.native else side.codes, side.scales, data, scales, pages, sort.table, data.stride(0),
        scales.stride(0), stride // data.element_size(), stride // scales.element_size(),
        (NATIVE_AT if part.native else CODES_AT).value, SLOT_SCALES_AT.value,
        SCALES=0 if own else SCALES[part.granularity], PER_BLOCK=part.granularity == "block-head", TOKENS=plan.tokens,
        BLOCKS=plan.engine_blocks, PAGE=plan.page, WIDTH=part.width, WIDE=wide, TILE=tune.tile,
        ALIGN=16 // data.element_size(), num_warps=tune.warps,
    )  # fmt: skip
