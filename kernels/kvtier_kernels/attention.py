"""Decode: attention of one query a sequence over its paged KV, native and FP8 pages mixed, split over the keys and
merged.

    out = sum_t softmax_t(s)_t v_t,  lse = ln sum_t exp(s_t) (+ exp(sink));  s, k and v as in `tile`

FP8 is upcast to fp16 in registers and multiplied by f16 tensor cores: at M = 16 an FP8 dot becomes just that on sm_90
(mma.sync after F2FP), costs accuracy (3e-2 against 2e-4) and wins nothing. A purely native cache is multiplied in its
own format. A program owns one sequence, one KV head with the query heads of its group (any number), and one part of the
keys; heads of a group share every load. Runs on the current stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtier.errors import Invalid
from kvtier_kernels import tile, tuning
from kvtier_kernels.merge import merge
from kvtier_kernels.paged import SCALES, Paged, Rows
from kvtier_kernels.reference import described
from kvtier_kernels.tile import LOG2E, MIXED, NATIVE, NONE, UNIT, WEIGHT


@triton.jit
def step(
    j, q, acc, top, total, unit, first_seen, last_seen, keys, values, flags, table, end, head, factor, cap,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, FORM: tl.constexpr,
    KEY_SCALES: tl.constexpr, VALUE_SCALES: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """Attends to tokens [j * TILE, (j + 1) * TILE) before `end`. Row m sees first_seen[m] to last_seen[m]."""
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    t, page, within = tile.places(j, table, end, PAGE, TILE)
    live = t < end
    if WINDOWED:
        live = live & (t >= tl.min(first_seen, axis=0))
    restored = live
    if FORM == MIXED:
        restored = tile.spread(tl.load(flags + page).to(tl.int32), within, TILE) != 0
    k = tile.elements(keys, page, within, head, live, restored, d, WIDTH, TILE, FORM)
    scale = tile.token_scales(keys, page, within, head, live, restored, TILE, KEY_SCALES, FORM)
    if KEY_SCALES == 3 and FORM != NATIVE:
        k, most = tile.by_channel(keys, k, page, head, restored, d, WIDTH)
        scale = scale * most
    s = tl.dot(q, tl.trans(k)) * (scale * factor)[None, :]
    visible = live[None, :] & (t[None, :] <= last_seen[:, None])
    if WINDOWED:
        visible = visible & (t[None, :] >= first_seen[:, None])
    p, decay, top, total = tile.softmax(s, visible, top, total, cap, CAPPED)
    v = tile.elements(values, page, within, head, live, restored, dv, VALUE_WIDTH, TILE, FORM)
    if FORM == NATIVE:
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None])
    else:
        scale = tile.token_scales(values, page, within, head, live, restored, TILE, VALUE_SCALES, FORM)
        if VALUE_SCALES == 3:
            v, most = tile.by_channel(values, v, page, head, restored, dv, VALUE_WIDTH)
            scale = scale * most
        higher = tl.maximum(unit, tl.max(tl.where(live, scale, 0.0), axis=0))
        weights = p * tl.where(live, scale * (WEIGHT / higher), 0.0)[None, :]
        acc = tl.dot(weights.to(tl.float16), v, acc * (decay * (unit / higher))[:, None])
        unit = higher
    return acc, top, total, unit


@triton.jit
def _decode(
    queries, keys, values, flags, tables, lengths, sinks, outputs, lses, factor, cap, table_stride, kv_heads, window,
    GROUP: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, FORM: tl.constexpr, KEY_SCALES: tl.constexpr, VALUE_SCALES: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One sequence, KV head and part of the keys. queries: Rows (page = sequence); outputs, lses: as `merge` takes."""
    sequence, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    m, d, dv = tl.arange(0, M), tl.arange(0, D), tl.arange(0, DV)
    end = tl.load(lengths + sequence)
    first = 0
    if WINDOWED:
        first = tl.maximum(end - window, 0)
    begin = first // TILE
    each = tl.cdiv(tl.cdiv(end, TILE) - begin, SPLITS)
    low = begin + part * each
    high = tl.minimum(low + each, tl.cdiv(end, TILE))
    rows = queries.start + sequence * queries.page + (head * GROUP + m)[:, None] * queries.head
    q = tl.load(rows + d[None, :], mask=(m < GROUP)[:, None] & (d < WIDTH)[None, :], other=0.0)
    q = q.to(keys.native.start.dtype.element_ty if FORM == NATIVE else tl.float16)
    acc = tl.zeros([M, DV], tl.float32)
    top = tl.full([M], NONE, tl.float32)
    total = tl.zeros([M], tl.float32)
    unit = 1.0 if FORM == NATIVE else UNIT
    unit = unit + tl.sum(total, axis=0)  # a tensor, as the loop carries it
    first_seen, last_seen = tl.zeros([M], tl.int32) + first, tl.zeros([M], tl.int32) + (end - 1)
    for j in range(low, high):
        acc, top, total, unit = step(
            j, q, acc, top, total, unit, first_seen, last_seen, keys, values, flags, tables + sequence * table_stride,
            end, head, factor, cap, WIDTH, VALUE_WIDTH, PAGE, TILE, FORM, KEY_SCALES, VALUE_SCALES, CAPPED, WINDOWED, D,
            DV,
        )  # fmt: skip
    if FORM != NATIVE:
        unit = unit * (1.0 / WEIGHT)
    sink = tl.full([M], NONE, tl.float32)
    if SINKS:
        sink = tl.load(sinks + head * GROUP + m, mask=m < tl.where(part == 0, GROUP, 0), other=NONE)
    output, lse = tile.finish(acc, top, total, unit, sink, SINKS)
    row = ((sequence * kv_heads + head) * GROUP + m) * SPLITS + part
    inside = (m < GROUP)[:, None] & (dv < VALUE_WIDTH)[None, :]
    tl.store(outputs + row[:, None] * VALUE_WIDTH + dv[None, :], output, mask=inside)
    tl.store(lses + row, lse, mask=m < GROUP)


def decode(
    queries: torch.Tensor,
    cache: Paged,
    table: torch.Tensor,
    lengths: torch.Tensor,
    most: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query a sequence over its keys: (out [sequences, heads, width of V], lse f32 [sequences, heads]).

    queries   [sequences, heads, width] bf16, fp16 or f32, the query of the sequence's last token
    table     int32 [sequences, pages]: page ids in the order of tokens; entries beyond a sequence's length are not used
    lengths   int32 [sequences]: tokens of each sequence, that of the query among them; 0 gives out 0 and lse -Inf
    most      an upper bound of the lengths, known on the host: launches depend on it alone, so a captured graph stays
              right as sequences grow
    scale     of the logits, width ** -0.5 if None. window: a query sees that many last tokens. cap: of the logits, 0
              for none
    sinks     f32 [heads]: one more logit a head, of no value, in the softmax and in the lse
    dtype     of the output, that of the queries if None
    splits    parts that the keys are cut into, chosen by `tuning.splits` if None

    Raises Invalid for shapes, formats and head dims that no kernel was checked for.
    """
    group = check(queries, cache, table, lengths, sinks)
    sequences, heads, width = queries.shape
    value_width, kv_heads = cache.values.width, cache.heads
    modes = [SCALES[plane.granularity] for plane in cache]
    tune = tuning.decode(max(width, value_width), cache.tokens, 3 in modes)
    parts = splits or tuning.splits(queries.device, sequences * kv_heads, -(-most // tune.tile))
    dtype = dtype or queries.dtype
    shape, device = (sequences, heads, parts), queries.device
    outputs = torch.empty((*shape, value_width), dtype=dtype if parts == 1 else torch.float32, device=device)
    lses = torch.empty(shape, dtype=torch.float32, device=device)
    known = tuning.knows_e4m3(device)
    flags = cache.flags if cache.flags is not None else table
    _decode[(sequences, kv_heads, parts)](
        Rows(queries, queries.stride(0), queries.stride(1), 0), cache.keys.side(known), cache.values.side(known), flags,
        table, lengths, lses if sinks is None else sinks, outputs, lses,
        (width**-0.5 if scale is None else scale) * LOG2E.value, cap * LOG2E.value, table.stride(0), kv_heads,
        window or 0,
        GROUP=group, M=max(16, triton.next_power_of_2(group)), WIDTH=width, VALUE_WIDTH=value_width, PAGE=cache.tokens,
        TILE=tune.tile, SPLITS=parts, FORM=cache.form, KEY_SCALES=modes[0], VALUE_SCALES=modes[1], CAPPED=cap > 0,
        WINDOWED=window is not None, SINKS=sinks is not None, D=triton.next_power_of_2(width),
        DV=triton.next_power_of_2(value_width), num_warps=tune.warps, num_stages=tune.stages,
    )  # fmt: skip
    return (outputs[:, :, 0], lses[:, :, 0]) if parts == 1 else merge(outputs, lses, dtype)


def check(
    queries: torch.Tensor, cache: Paged, table: torch.Tensor, lengths: torch.Tensor, sinks: torch.Tensor | None
) -> int:
    """Raises Invalid unless all fit together, and returns the query heads of one KV head. Shared with `prefill`."""
    width, strides = cache.keys.width, queries.stride()
    if queries.dim() != 3 or strides[2] != 1 or queries.shape[2] != width or queries.shape[1] % cache.heads:
        raise Invalid(f"queries {tuple(queries.shape)} do not fit {cache.heads} KV heads of width {width}")
    if queries.dtype not in (torch.bfloat16, torch.float16, torch.float32) or strides[0] % 16 or strides[1] % 16:
        wanted = "bf16, fp16 or f32 with rows on multiples of 16 elements"
        raise Invalid(f"queries are {wanted}, not {queries.dtype} of strides {strides}")
    if cache.device != queries.device or (sinks is not None and sinks.device != queries.device):
        raise Invalid(f"cache and sinks must be on {queries.device}, like the queries")
    for plane in cache:
        tuning.check_width(plane.width)
        if plane.codes is not None and plane.scales is None:
            raise Invalid("attention over FP8 needs its scales")
    if cache.tokens < 16 or cache.tokens & (cache.tokens - 1):
        raise Invalid(f"a page must have 16 tokens or a larger power of two, not {cache.tokens}")
    for name, x, dims in (("table", table, 2), ("lengths", lengths, 1)):
        if x.dtype != torch.int32 or x.dim() != dims or x.stride(dims - 1) != 1 or x.device != queries.device:
            raise Invalid(f"{name} must be int32 of {dims} dimensions beside the queries, not {described(x)}")
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (queries.shape[1],)):
        raise Invalid(f"sinks must be f32 [{queries.shape[1]}], not {described(sinks)}")
    if table.shape[0] != lengths.shape[0]:
        raise Invalid(f"{table.shape[0]} tables for {lengths.shape[0]} sequences")
    return queries.shape[1] // cache.heads
