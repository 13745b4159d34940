"""Merge attention over disjoint sets of keys: parts of a split, FP8 and native pools, our attention and the engine's.

    lse = ln sum_i exp(lse_i)          out = sum_i exp(lse_i - lse) out_i

A part that saw no key (out 0, lse -Inf) is neutral; if all are, the result is 0 and -Inf. A sink belongs to exactly one
part. Order does not matter but for rounding. Sums in f32; one program per row; runs on the current stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.errors import Invalid

MOST = 64  # parts of one row, all read at once


@triton.jit
def _merge(
    outputs, lses, out, lse, PARTS: tl.constexpr, MANY: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part, d = tl.arange(0, MANY), tl.arange(0, WIDE)
    each = tl.load(lses + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    top = tl.max(each, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(each - top)
    total = tl.sum(weight, axis=0)
    safe = tl.where(total > 0, total, 1.0)
    inside = (part < PARTS)[:, None] & (d < WIDTH)[None, :]
    x = tl.load(outputs + (row * PARTS + part)[:, None] * WIDTH + d[None, :], mask=inside, other=0.0)
    merged = tl.sum(x * (weight / safe)[:, None], axis=0)
    tl.store(out + row * WIDTH + d, merged.to(out.dtype.element_ty), mask=d < WIDTH)
    tl.store(lse + row, tl.where(total > 0, top + tl.log(safe), float("-inf")))


def merge(outputs: Tensor, lses: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """outputs f32 [..., parts, width] and lses f32 [..., parts] of the same queries, contiguous -> out `dtype` [...,
    width] and lse f32 [...].

    At most MOST parts. Raises Invalid for shapes and formats.
    """
    parts, width = outputs.shape[-2:]
    f32 = outputs.dtype == lses.dtype == torch.float32
    if outputs.shape[:-1] != lses.shape or not f32 or not 1 <= parts <= MOST:
        found = f"{tuple(outputs.shape)} and {tuple(lses.shape)}"
        raise Invalid(f"merge takes f32 outputs [..., 1 to {MOST} parts, width] and lses, not {found}")
    if not (outputs.is_contiguous() and lses.is_contiguous()):
        raise Invalid("merge takes contiguous tensors")
    out = torch.empty((*outputs.shape[:-2], width), dtype=dtype, device=outputs.device)
    lse = torch.empty(outputs.shape[:-2], dtype=torch.float32, device=outputs.device)
    many, wide = triton.next_power_of_2(parts), triton.next_power_of_2(width)
    if lse.numel():
        _merge[(lse.numel(),)](outputs, lses, out, lse, PARTS=parts, MANY=many, WIDTH=width, WIDE=wide, num_warps=4)
    return out, lse
