"""Chunked prefill: attention of a run of new queries a sequence over its paged KV, their own K and V among it, native
and FP8 pages mixed.

    out = sum_t softmax_t(s)_t v_t,  lse = ln sum_t exp(s_t) (+ exp(sink));  s, k and v as in `tile`; a query sees t up
    to its own position

A program owns `rows` rows: a run of tokens times the query heads of one KV head (any number). FP8 is upcast to fp16 in
registers and multiplied by f16 tensor cores. `dots` may ask for FP8 tensor cores instead, on sm_90 and newer, over the
leading FP8 pages of a sequence:

    "qk"      queries are rounded to e4m3fn in the kernel, a row by its largest
    "qk+pv"   also the weights, a row of a tile by its largest:  acc += (p8 . v8) * factor of the row, an FP32 operation
              between any two dots

The tensor core's FP8 accumulator keeps about 13 fraction bits on sm_90: summed in it alone, coherent parts shrink (gain
.966 at 8k tokens, .640 at 128k). The form above promotes to FP32 every tile, at most 128 tokens, by construction; no
compiler option is involved. Off by default until a needle test on a GPU has passed. Runs on the current stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtier.errors import Invalid
from kvtier_kernels import paged, tile, tuning
from kvtier_kernels.attention import check, step
from kvtier_kernels.merge import merge
from kvtier_kernels.paged import SCALES, Paged, Rows
from kvtier_kernels.reference import described
from kvtier_kernels.tile import FP8, LOG2E, NATIVE, NONE, UNIT, WEIGHT

DOTS = ("fp16", "qk", "qk+pv")
PROMOTED = 128  # tokens after which an FP8 sum must be in FP32


@triton.jit
def _fp8_step(
    j, q8, q_scale, acc, top, total, first_seen, last_seen, keys, values, table, end, head, factor, cap,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr, PV: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """`attention.step` over a tile whose pages are all FP8, with FP8 dots; acc is in units of 1."""
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    t, page, within = tile.places(j, table, end, PAGE, TILE)
    live = t < end
    at = tile.offsets(keys.codes, page, within, head, TILE)
    k = tl.load(keys.codes.start + at[:, None] + d[None, :], mask=live[:, None] & (d < WIDTH)[None, :], other=0.0)
    scale = tile.token_scales(keys, page, within, head, live, live, TILE, KEY_SCALES, FP8)
    s = tl.dot(q8, tl.trans(k)) * q_scale[:, None] * (scale * factor)[None, :]
    visible = live[None, :] & (t[None, :] <= last_seen[:, None])
    if WINDOWED:
        visible = visible & (t[None, :] >= first_seen[:, None])
    p, decay, top, total = tile.softmax(s, visible, top, total, cap, CAPPED)
    at = tile.offsets(values.codes, page, within, head, TILE)
    inside = live[:, None] & (dv < VALUE_WIDTH)[None, :]
    v = tl.load(values.codes.start + at[:, None] + dv[None, :], mask=inside, other=0.0)
    scale = tl.where(live, tile.token_scales(values, page, within, head, live, live, TILE, VALUE_SCALES, FP8), 0.0)
    if PV:
        p8, undo = tile.rounded(p * scale[None, :])
        acc = acc * decay[:, None] + tl.dot(p8, v) * undo[:, None]
    else:
        most = tl.maximum(tl.max(scale, axis=0), UNIT)
        weights = (p * (scale * (WEIGHT / most))[None, :]).to(tl.float16)
        acc = acc * decay[:, None] + tl.dot(weights, v.to(tl.float16)) * (most * (1.0 / WEIGHT))
    return acc, top, total


@triton.jit
def _prefill(
    queries, keys, values, flags, tables, starts, lengths, leading, sinks, outputs, lses, factor, cap, table_stride,
    out_token, out_head, lse_token, lse_head, window,
    GROUP: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, FORM: tl.constexpr, KEY_SCALES: tl.constexpr, VALUE_SCALES: tl.constexpr, SPLIT: tl.constexpr,
    QK: tl.constexpr, PV: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """M // GROUP tokens of one sequence and the heads of one KV head. queries are Rows (page = token).

    SPLIT: over the leading FP8 pages alone (QK: FP8 dots), or (not QK) over the rest alone. Two loops in one kernel
    spill: each kernel has one.
    """
    each: tl.constexpr = M // GROUP
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    if block * each >= count:
        return
    end = tl.load(lengths + sequence)
    m, d, dv = tl.arange(0, M), tl.arange(0, D), tl.arange(0, DV)
    token, q_head = block * each + m // GROUP, head * GROUP + m % GROUP
    used = (token < count) & (m < each * GROUP)
    row = (start + token).to(tl.int64)
    q = tl.load(
        queries.start + (row * queries.page + q_head * queries.head)[:, None] + d[None, :],
        mask=used[:, None] & (d < WIDTH)[None, :],
        other=0.0,
    )
    # Rows that are not used see what the last used one sees: nothing is NaN, and no bound grows.
    last_seen = end - count + tl.minimum(token, count - 1)
    first_seen = tl.zeros([M], tl.int32)
    if WINDOWED:
        first_seen = tl.maximum(last_seen - window + 1, 0)
    low, high = tl.min(first_seen, axis=0) // TILE, tl.cdiv(tl.max(last_seen, axis=0) + 1, TILE)
    acc, total = tl.zeros([M, DV], tl.float32), tl.zeros([M], tl.float32)
    top = tl.full([M], NONE, tl.float32)
    table = tables + sequence * table_stride
    unit = 1.0 if FORM == NATIVE or QK else UNIT
    unit = unit + tl.sum(total, axis=0)  # a tensor, as the loop carries it
    if SPLIT:
        whole = tl.minimum(tl.load(leading + sequence) * PAGE // TILE, high)
    if QK:
        q8, q_scale = tile.rounded(q.to(tl.float32))
        for j in range(low, whole):
            acc, top, total = _fp8_step(
                j, q8, q_scale, acc, top, total, first_seen, last_seen, keys, values, table, end, head, factor, cap,
                WIDTH, VALUE_WIDTH, PAGE, TILE, KEY_SCALES, VALUE_SCALES, PV, CAPPED, WINDOWED, D, DV,
            )  # fmt: skip
    else:
        if SPLIT:
            low = tl.maximum(low, whole)
        q = q.to(keys.native.start.dtype.element_ty if FORM == NATIVE else tl.float16)
        for j in range(low, high):
            acc, top, total, unit = step(
                j, q, acc, top, total, unit, first_seen, last_seen, keys, values, flags, table, end, head, factor, cap,
                WIDTH, VALUE_WIDTH, PAGE, TILE, FORM, KEY_SCALES, VALUE_SCALES, CAPPED, WINDOWED, D, DV,
            )  # fmt: skip
    if FORM != NATIVE and not QK:
        unit = unit * (1.0 / WEIGHT)
    sink = tl.full([M], NONE, tl.float32)
    if SINKS:
        sink = tl.load(sinks + q_head, mask=used, other=NONE)
    output, lse = tile.finish(acc, top, total, unit, sink, SINKS)
    inside = used[:, None] & (dv < VALUE_WIDTH)[None, :]
    tl.store(outputs + (row * out_token + q_head * out_head)[:, None] + dv[None, :], output, mask=inside)
    tl.store(lses + row * lse_token + q_head * lse_head, lse, mask=used)


def prefill(
    queries: torch.Tensor,
    cache: Paged,
    table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    most: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    dots: str = "fp16",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of the last tokens of each sequence over its keys: (out [tokens, heads, width of V], lse f32 [tokens,
    heads]).

    queries   [tokens, heads, width] bf16, fp16 or f32, sequence after sequence
    starts    int32 [sequences + 1]: where each sequence's queries begin; they are its last tokens, and their K and V
              stand in the cache already
    most      an upper bound of the queries of one sequence, known on the host
    dots      "fp16", or FP8 dots over the leading FP8 pages: "qk" or "qk+pv", see the module. Refused below sm_90, with
              channel scales, and for head dims above 128, where every tile that was tried spills on sm_90

    The rest is as in `attention.decode`. Raises Invalid for shapes, formats, head dims and settings that no kernel was
    checked for.
    """
    group = check(queries, cache, table, lengths, sinks)
    width, value_width = queries.shape[2], cache.values.width
    modes = [SCALES[plane.granularity] for plane in cache]
    if starts.dtype != torch.int32 or starts.shape != (lengths.shape[0] + 1,) or starts.device != queries.device:
        raise Invalid(f"starts must be int32 [{lengths.shape[0] + 1}] beside the queries, not {described(starts)}")
    _check_dots(dots, cache, max(width, value_width), 3 in modes)
    tune = tuning.prefill(max(width, value_width), 3 in modes, dots, queries.device)
    assert tune.tile <= PROMOTED
    if group > tune.rows:
        raise Invalid(f"a group has at most {tune.rows} query heads here, not {group}")
    split = dots != "fp16"
    dtype = dtype or queries.dtype
    shape = (*queries.shape[:2], 2, value_width) if split else (*queries.shape[:2], 1, value_width)
    out = torch.empty(shape, dtype=torch.float32 if split else dtype, device=queries.device)
    lse = torch.empty(shape[:3], dtype=torch.float32, device=queries.device)
    known = tuning.knows_e4m3(queries.device)
    first = leading(cache, table, lengths) if split else lengths
    for part in range(shape[2]):  # of two: FP8 dots over the leading FP8 pages, and the rest with the sinks
        fp8_dots = split and part == 0
        _prefill[(-(-most // (tune.rows // group)), cache.heads, lengths.shape[0])](
            Rows(queries, queries.stride(0), queries.stride(1), 0), cache.keys.side(known), cache.values.side(known),
            table if cache.flags is None else cache.flags, table, starts, lengths, first,
            lse if sinks is None else sinks, out[:, :, part], lse[:, :, part],
            (width**-0.5 if scale is None else scale) * LOG2E.value, cap * LOG2E.value, table.stride(0), out.stride(0),
            out.stride(1), lse.stride(0), lse.stride(1), window or 0,
            GROUP=group, M=tune.rows, WIDTH=width, VALUE_WIDTH=value_width, PAGE=cache.tokens, TILE=tune.tile,
            FORM=cache.form, KEY_SCALES=modes[0], VALUE_SCALES=modes[1], SPLIT=split, QK=fp8_dots,
            PV=fp8_dots and dots == "qk+pv", CAPPED=cap > 0, WINDOWED=window is not None,
            SINKS=sinks is not None and not fp8_dots, D=triton.next_power_of_2(width),
            DV=triton.next_power_of_2(value_width), num_warps=tune.warps, num_stages=tune.stages,
        )  # fmt: skip
    return merge(out, lse, dtype) if split else (out[:, :, 0], lse[:, :, 0])


def leading(cache: Paged, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """How many whole pages at each sequence's start hold FP8, int32 [sequences]; on the device, without waiting."""
    whole = torch.arange(table.shape[1], device=table.device)[None, :] < (lengths // cache.tokens)[:, None]
    if cache.flags is not None:
        whole &= cache.flags[torch.where(whole, table, 0).long()] != 0
    return whole.int().cumprod(1).sum(1, dtype=torch.int32)


def _check_dots(dots: str, cache: Paged, width: int, channel: bool) -> None:
    if dots not in DOTS:
        raise Invalid(f"dots must be one of {DOTS}, not {dots!r}")
    if width == 256:
        found = "has a setting of its own, compiled and checked but expected to be slow"
        tuning.warn(f"prefill with head dim 256 {found}: engines' own kernels regress here")
    if channel and width > 128:
        why = "every setting tried above spills. Use scales of heads, blocks or tokens"
        raise Invalid(f"prefill over channel scales has a head dim of at most 128: {why}")
    if dots == "fp16":
        return
    chip = tuning.capability(cache.device)
    if chip is not None and chip < (9, 0):
        raise Invalid(f"FP8 dots need sm_90 or newer, not sm_{chip[0]}{chip[1]}")
    if channel or width > 128 or cache.form == paged.NATIVE:
        raise Invalid("FP8 dots need an FP8 cache without channel scales and a head dim of at most 128")
