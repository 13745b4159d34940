"""One step of attention over a tile of paged K and V: what decode and prefill share. Formulas, for queries of one KV
head and the tile's tokens t:

    s_t  = scale * (q . k_t) * K scale of t
    s_t  = cap * tanh(s_t / cap)                         with a soft cap
    s_t  = -Inf                                          where the query must not see t
    p_t  = exp(s_t - max so far)                         all earlier sums decay by exp(old max - new max)
    acc += sum_t p_t * V scale of t * v_t

K and V are read as they lie, by the flag of their page, and upcast to fp16 in registers; never more than a tile of them
exists. Scales of a tensor, head, block or token never touch an element. Channel scales multiply the tile in registers,
relative to the page's largest, which then is the scale of t. Weights are kept in fp16 as p * (V scale / largest V scale
so far) * 2^15, so that neither small scales nor long tails fall out of it; the accumulator's unit follows. Logarithms
are to base 2 inside. Every load of K, V or a scale is masked by what is visible at all, so unused slots may hold
anything. Called in kernels only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels import paged
from kvtier_kernels.fp8 import FP8_MAX, decode, to_fp16

NATIVE, FP8, MIXED = tl.constexpr(paged.NATIVE), tl.constexpr(paged.FP8), tl.constexpr(paged.MIXED)
_CHANNEL_ROWS = tl.constexpr(paged.CHANNEL_ROWS)
LOG2E = tl.constexpr(1.4426950408889634)
WEIGHT = tl.constexpr(32768.0)  # 2^15: weights of 1 to 2^-29 are normal fp16 numbers
UNIT = tl.constexpr(2.0**-64)  # the accumulator's first unit: the smallest scale there is
UNDO = tl.constexpr(1.0 / 448.0)  # of the largest code
NONE = tl.constexpr(float("-inf"))


@triton.jit
def places(j, table, end, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Tile j of a sequence of `end` tokens: its tokens t [TILE], its page ids [n], the places `within` each page."""
    span: tl.constexpr = TILE if TILE < PAGE else PAGE
    pages = (j * TILE) // PAGE + tl.arange(0, TILE // span)
    page = tl.load(table + pages, mask=pages * PAGE < end, other=0).to(tl.int64)
    return j * TILE + tl.arange(0, TILE), page, (j * TILE) % PAGE + tl.arange(0, span)


@triton.jit
def offsets(rows, page, within, head, TILE: tl.constexpr):
    """Offsets [TILE] of the rows `within` each of the pages [n]. The reshape loses what is known of alignment; without
    the hint, which `paged.Plane` guarantees, every load becomes one of single bytes."""
    starts = page * rows.page + head * rows.head
    return tl.multiple_of(tl.reshape(starts[:, None] + (within * rows.token)[None, :], [TILE]), 16)


@triton.jit
def spread(of_page, within, TILE: tl.constexpr):
    """A value of each page [n], for each of the tile's tokens [TILE]."""
    return tl.reshape(of_page[:, None] + within[None, :] * 0, [TILE])


@triton.jit
def elements(side, page, within, head, live, restored, d, WIDTH: tl.constexpr, TILE: tl.constexpr, FORM: tl.constexpr):
    """K or V [TILE, d] as fp16, without scales (a native cache in its own format); zeros where not `live`. restored
    [TILE]: FP8 by the page's flag."""
    wide = (d < WIDTH)[None, :]
    if FORM == FP8:
        at = offsets(side.codes, page, within, head, TILE)
        x = decode(tl.load(side.codes.start + at[:, None] + d[None, :], mask=live[:, None] & wide, other=0.0))
    elif FORM == NATIVE:
        at = offsets(side.native, page, within, head, TILE)
        x = tl.load(side.native.start + at[:, None] + d[None, :], mask=live[:, None] & wide, other=0.0)
    else:
        # Two loads under complementary masks: masked lanes cost no traffic, and unlike a branch they can be pipelined
        at = offsets(side.codes, page, within, head, TILE)
        codes = tl.load(side.codes.start + at[:, None] + d[None, :], mask=(live & restored)[:, None] & wide, other=0.0)
        at = offsets(side.native, page, within, head, TILE)
        inside = (live & (restored == 0))[:, None] & wide
        plain = tl.load(side.native.start + at[:, None] + d[None, :], mask=inside, other=0.0)
        x = tl.where(restored[:, None], decode(codes), to_fp16(plain))
    return x


@triton.jit
def token_scales(side, page, within, head, live, stored, TILE: tl.constexpr, SCALES: tl.constexpr, FORM: tl.constexpr):
    """Scale of each token [TILE], f32: 1 where the page is native, 0 or 1 where not `live`."""
    if FORM == NATIVE or SCALES == 3:
        return tl.where(live, 1.0, 0.0)
    read = live & stored if FORM == MIXED else live
    rows = side.scales
    starts = page * rows.page + head * rows.head
    step = rows.token if SCALES == 2 else 0
    at = tl.reshape(starts[:, None] + (within * step)[None, :], [TILE])
    return tl.load(rows.start + at, mask=read, other=1.0).to(tl.float32)


@triton.jit
def by_channel(side, x, page, head, restored, d, WIDTH: tl.constexpr):
    """A tile of one page times its channel scales, relative to the largest of them, and that one: both stay in range of
    fp16. A native page: x, 1.

    The tile is multiplied, not the queries or the sum, as it is the smallest of them: with queries and sum prefill
    spills for head dim 256.
    """
    each: tl.constexpr = WIDTH // _CHANNEL_ROWS
    start = tl.sum(page, axis=0) * side.scales.page + head * side.scales.head
    stored = tl.max(restored.to(tl.int32), axis=0) > 0
    at = (d // each) * side.scales.token + d % each  # 32 bits: a pointer a channel would cost 64
    channels = tl.load(side.scales.start + start + at, mask=d < tl.where(stored, WIDTH, 0), other=1.0).to(tl.float32)
    most = tl.max(tl.where(d < WIDTH, channels, 0.0), axis=0)
    return (x.to(tl.float32) * (channels * (1.0 / most))[None, :]).to(tl.float16), most


@triton.jit
def rounded(x):
    """Rows of f32 as e4m3fn by the largest of each row, and the factor that undoes it: queries and weights of FP8 dots.
    Nothing is to be clamped: no product is above 448 * (1 + 2^-21), which rounds to 448."""
    top = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-30)
    return (x * ((1.0 / top) * FP8_MAX)[:, None]).to(tl.float8e4nv), top * UNDO


@triton.jit
def softmax(s, visible, top, total, CAP, CAPPED: tl.constexpr):
    """One step of the running softmax of logits s, to base 2: weights, decay of earlier sums, new maximum and total."""
    if CAPPED:  # cap * tanh(s / cap); CAP comes in the same base
        s = CAP * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / CAP)) + 1.0))
    s = tl.where(visible, s, NONE)  # replaces what unused slots gave, NaN too
    higher = tl.maximum(top, tl.max(s, axis=1))
    shift = tl.where(higher == NONE, 0.0, higher)
    p = tl.exp2(s - shift[:, None])
    decay = tl.exp2(top - shift)
    return p, decay, higher, total * decay + tl.sum(p, axis=1)


@triton.jit
def finish(acc, top, total, unit, sink, SINKS: tl.constexpr):
    """Output rows and natural log-sum-exp. A sink is one more logit, of no value. A query that saw nothing: 0 and -Inf,
    or the sink alone."""
    if SINKS:
        higher = tl.maximum(top, sink * LOG2E)
        shift = tl.where(higher == NONE, 0.0, higher)  # a part of a split that saw nothing and has no sink either
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.exp2(sink * LOG2E - shift)
        acc = acc * shrink[:, None]
        top = higher
    live = total > 0
    output = acc * (unit / tl.where(live, total, 1.0))[:, None]
    lse = tl.where(live, (tl.where(live, top, 0.0) + tl.log2(tl.where(live, total, 1.0))) / LOG2E, NONE)
    return output, lse
