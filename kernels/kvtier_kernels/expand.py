"""The one fallback that dequantizes: blocks into native pages, for engines whose attention reads nothing else. Off
unless asked for, timed and counted.

    x = native(f32(code) * scale)          the product rounded to f32, then to bf16 or fp16:
                                           `reference.dequantize(...).to(native)`, bit for bit

It reads a block once and writes twice its bytes, a hop through memory that `restore` avoids; what it costs is in
`Expander`'s counters. Pages whose ids are below 0 are skipped; flags become 0. Runs on the current stream. An Expander
belongs to one thread.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import triton
import triton.language as tl

from kvtier.errors import Invalid
from kvtier_kernels import tuning
from kvtier_kernels.batch_plan import DATA_AT, FIELDS, NATIVE_AT, SCALES_AT, BatchPlan, Sort
from kvtier_kernels.fp8 import decode
from kvtier_kernels.paged import SCALES, rows

PENDING = 256  # launches whose time is not read yet; more wait for the oldest


@triton.jit
def _expand(
    native, bodies, body_scales, pages, table, pitch, scale_pitch, head_stride, scale_head_stride,
    SCALES: tl.constexpr, PER_BLOCK: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, PAGE: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One page of one head and part. SCALES 0: a native part, copied."""
    one, row, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    per: tl.constexpr = BLOCKS * TOKENS // PAGE
    block, first = one // per, (one % per) * PAGE
    page = tl.load(pages + one).to(tl.int64)
    if page < 0:
        return
    entry = table + row * FIELDS
    d = tl.arange(0, WIDE)
    target = native.start + tl.multiple_of(tl.load(entry + NATIVE_AT), 8) + page * native.page + head * native.head
    at_data = tl.multiple_of(tl.load(entry + DATA_AT), 8 if SCALES == 0 else 16)
    data = bodies + block * pitch + head * head_stride + at_data
    scales = body_scales + block * scale_pitch + head * scale_head_stride + tl.load(entry + SCALES_AT)
    e = first // TOKENS
    for at in range(0, PAGE, TILE):
        t = at + tl.arange(0, TILE)
        inside = (t < PAGE)[:, None] & (d < WIDTH)[None, :]
        x = tl.load(data + (first + t)[:, None] * WIDTH + d[None, :], mask=inside, other=0.0)
        if SCALES > 0:
            wide = decode(x).to(tl.float32)
            if SCALES == 1:
                x = wide * tl.load(scales + (e if PER_BLOCK else 0)).to(tl.float32)
            elif SCALES == 2:
                x = wide * tl.load(scales + first + t, mask=t < PAGE, other=0.0).to(tl.float32)[:, None]
            else:
                x = wide * tl.load(scales + e * WIDTH + d, mask=d < WIDTH, other=0.0).to(tl.float32)[None, :]
        to = target + tl.multiple_of(t * native.token, 16)[:, None] + d[None, :]
        tl.store(to, x.to(native.start.dtype.element_ty), mask=inside)


class Expander:
    """Expands blocks, if `enabled`, and counts launches, blocks, bytes read and written, seconds on the device."""

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self.launches = self.blocks = self.bytes_read = self.bytes_written = 0
        self._seconds = 0.0
        self._pending: list[tuple[Any, Any]] = []

    def expand(self, plan: BatchPlan, bodies: torch.Tensor, pages: torch.Tensor) -> None:
        """Scatters the bodies [blocks, >= body_bytes] as native elements to their pages [blocks, pages of a block].

        Raises Invalid if expanding was not asked for, and for shapes. Returns at once.
        """
        if not self.enabled:
            raise Invalid(
                "expand is off: it dequantizes through memory. Ask for it by name (Expander(enabled=True)), or use "
                "restore"
            )
        blocks = plan.check(pages, bodies)
        if not blocks:
            return
        cuda = plan.device.type == "cuda"
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if cuda else (None, None)
        began = time.perf_counter()
        if before is not None:
            before.record()
        for sort in plan.sorts:
            _launch(plan, sort, bodies, pages)
        plan.mark(pages, False)
        if after is not None:
            after.record()
            self._pending.append((before, after))
            self._settle(PENDING)
        else:
            self._seconds += time.perf_counter() - began
        widths = sum(sort.rows * sort.part.width for sort in plan.sorts)
        self.launches += len(plan.sorts)
        self.blocks += blocks
        self.bytes_read += blocks * plan.extents.body_bytes
        self.bytes_written += blocks * plan.heads * plan.extents.group.tokens * widths * 2

    @property
    def seconds(self) -> float:
        """Time on the device of all launches so far. May wait for the device."""
        self._settle(0)
        return self._seconds

    def _settle(self, most: int) -> None:
        while len(self._pending) > most:
            before, after = self._pending.pop(0)
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1e3


def _launch(plan: BatchPlan, sort: Sort, bodies: torch.Tensor, pages: torch.Tensor) -> None:
    part, native = sort.part, sort.first.native
    if native is None:
        raise Invalid("an FP8 cache has no native pages to expand into")
    data = bodies.view(native.dtype) if part.native else bodies
    if not part.native and tuning.knows_e4m3(plan.device):
        data = bodies.view(torch.float8_e4m3fn)
    scales = sort.scales(bodies)
    stride, wide = plan.extents.head_stride, triton.next_power_of_2(part.width)
    tune = tuning.copying(plan.page, wide)
    _expand[(pages.numel(), sort.rows, plan.heads)](
        rows(native), data, scales, pages, sort.table, data.stride(0), scales.stride(0), stride // data.element_size(),
        stride // scales.element_size(),
        SCALES=SCALES[part.granularity], PER_BLOCK=part.granularity == "block-head", TOKENS=plan.tokens,
        BLOCKS=plan.engine_blocks, PAGE=plan.page, WIDTH=part.width, WIDE=wide, TILE=tune.tile, num_warps=tune.warps,
        enable_fp_fusion=False,
    )  # fmt: skip
