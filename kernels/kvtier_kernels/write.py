"""New K and V into an engine's pages as they are computed, and the pages' flags to 0 in the same launch: the writer of
`dual`.

    slot = page * tokens of a page + place in it            below 0: padding of a captured graph, skipped whole

The only writer of native elements, so the only place that clears a flag: never at allocation, since a failed load is
followed by writes without a new one. A token is never written into the middle of an FP8 page; the first one of a page
clears it for all layers, those after it clear it again. A program owns some tokens of one head; flags are stored by
head 0, every time the same value. Runs on the current stream; returns at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtier.errors import Invalid
from kvtier_kernels.paged import Paged, Rows, rows
from kvtier_kernels.reference import described

ROWS = 16  # tokens of one program: 16 bytes a thread at head dim 64 with 4 warps


@triton.jit
def _write(
    keys, values, key_rows, value_rows, flags, slots, count,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    N: tl.constexpr, FLAGGED: tl.constexpr,
):  # fmt: skip
    """`keys` and `values` are Rows of the new tokens (page = token), `key_rows` and `value_rows` those of the cache."""
    n, head = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1)
    slot = tl.load(slots + n, mask=n < count, other=-1).to(tl.int64)
    real = slot >= 0  # -1 // PAGE is the last page, whose flag would go
    page, place = tl.where(real, slot // PAGE, 0), tl.where(real, slot % PAGE, 0)
    token = tl.where(real, n, 0).to(tl.int64)
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    source = tl.multiple_of(token * keys.page + head * keys.head, 8)
    target = tl.multiple_of(page * key_rows.page + head * key_rows.head + place * key_rows.token, 16)
    inside = real[:, None] & (d < WIDTH)[None, :]
    x = tl.load(keys.start + source[:, None] + d[None, :], mask=inside)
    tl.store(key_rows.start + target[:, None] + d[None, :], x.to(key_rows.start.dtype.element_ty), mask=inside)
    source = tl.multiple_of(token * values.page + head * values.head, 8)
    target = tl.multiple_of(page * value_rows.page + head * value_rows.head + place * value_rows.token, 16)
    inside = real[:, None] & (dv < VALUE_WIDTH)[None, :]
    x = tl.load(values.start + source[:, None] + dv[None, :], mask=inside)
    tl.store(value_rows.start + target[:, None] + dv[None, :], x.to(value_rows.start.dtype.element_ty), mask=inside)
    if FLAGGED:
        tl.store(flags + page, tl.zeros([N], tl.uint8), mask=real & (n < tl.where(head == 0, count, 0)))


def write(cache: Paged, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Stores the first len(slots) of `keys` and `values` [tokens, heads, width] in their slots, int64 or int32, and
    clears the flags of these pages.

    Slots below 0 are skipped. Two tokens never share a slot. Raises Invalid for shapes and formats.
    """
    native = (cache.keys.native, cache.values.native)
    if native[0] is None or native[1] is None:
        raise Invalid("an FP8 cache has no native slots to write")
    for name, x, view in (("keys", keys, native[0]), ("values", values, native[1])):
        row = (cache.heads, view.shape[3])
        if x.dim() != 3 or x.shape[0] < slots.shape[0] or x.shape[1:] != row or x.stride(2) != 1:
            wanted = f"[>= {slots.shape[0]}, {row[0]}, {row[1]}] with contiguous rows"
            raise Invalid(f"{name} must be {wanted}, not {tuple(x.shape)}")
        if x.element_size() == 2 and (any(stride % 8 for stride in x.stride()[:2]) or x.data_ptr() % 16):
            raise Invalid(f"rows of {name} must start on multiples of 8 elements; strides are {x.stride()}")
        if x.device != cache.device:
            raise Invalid(f"{name} must be on {cache.device}, not on {x.device}")
    whole = slots.dtype in (torch.int32, torch.int64)
    if not whole or slots.dim() != 1 or slots.stride(0) != 1 or slots.device != cache.device:
        raise Invalid(f"slots must be int32 or int64 of one dimension beside the cache, not {described(slots)}")
    count, widths = slots.shape[0], (native[0].shape[3], native[1].shape[3])
    if not count:
        return
    _write[(-(-count // ROWS), cache.heads)](
        Rows(keys, keys.stride(0), keys.stride(1), 0), Rows(values, values.stride(0), values.stride(1), 0),
        rows(native[0]), rows(native[1]), slots if cache.flags is None else cache.flags, slots, count,
        PAGE=cache.tokens, WIDTH=widths[0], VALUE_WIDTH=widths[1], D=triton.next_power_of_2(widths[0]),
        DV=triton.next_power_of_2(widths[1]), N=ROWS, FLAGGED=cache.flags is not None,
        num_warps=max(1, min(4, ROWS * min(widths) // 256)),
    )  # fmt: skip
