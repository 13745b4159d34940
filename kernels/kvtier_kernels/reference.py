"""What the number format means, in plain torch: quantize, dequantize, and attention over FP8 blocks as they lie. Also
the CPU path.

Codec 1, bit for bit. Every kernel must equal `quantize` in codes, scales and counts. All arithmetic is IEEE f32,
rounding to nearest even:

    x       the input, upcast exactly (bf16, fp16) or taken as it is (f32)
    amax    largest |x| of the *finite* elements under one scale; 0 if there is none
    scale   given (static), or min(max(amax * f32(1/448), 2^-64), 2^119); small scales (bf16) are rounded to nearest
            even here, before they are used;
            by the rule "amax-pow2" it is rounded up to a power of two, so that code * scale is exact in bf16
    y       x * (1 / scale): one division per scale, one multiplication per element
    code    NaN -> 0x7F; else e4m3fn(min(max(y, -448), 448)), to nearest even, subnormals kept, -0 and negative
            underflow -> 0x80

Why so. A multiplication rounds the same everywhere, whereas Triton's `/` is an approximate division (div.full.f32, 2
ulp) and can specify nothing; the one division per scale is `tl.div_rn` there. The bounds keep scale and 1/scale normal
numbers (a GPU may flush others) and 448 * scale finite, so a finite input never decodes to Inf; 2^-64 is far below
anything attention notices, makes the scale of an all-zero row positive, and sends every subnormal x to code 0, flushed
or not. The clamp stands before the cast, because casts of values above 464 differ between machines (NaN here, 448
there). NaN has one code, because its sign survives some casts only.

One answer each:  all zero -> codes 0x00 (0x80 for -0), scale 2^-64 (dynamic), decodes to exactly 0
                  NaN      -> 0x7F, counted as non-finite, in no amax; stays NaN
                  +-Inf    -> 0x7E / 0xFE, counted as non-finite, in no amax: it spoils itself alone, never its
                           neighbours' scale
                  |y| > 464 and finite -> 0x7E / 0xFE, counted as clipped (up to 464 saturating *is* rounding to
                           nearest)

Tensors may be on any device and are not modified. Nothing here keeps state; any thread may call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvtier.errors import Invalid
from kvtier.format.layout import DYNAMIC, GRANULARITIES, STATIC

CODEC = 1  # version of the rules above: `identity.Description.codec` of every quantized namespace
FP8_MAX = 448.0
CLIP = 464.0  # half a step above FP8_MAX; the tie rounds down to it
MIN_SCALE = 2.0**-64
MAX_SCALE = 2.0**119
RECIPROCAL = float(torch.tensor(1.0 / FP8_MAX, dtype=torch.float32))  # f32(1/448), bits 0x3B124925
NAN_CODE = 0x7F


class Counts(NamedTuple):
    """What one quantization saw, per head: [heads]. clipped, nonfinite: int64 counts; amax: f32, of finite elements."""

    clipped: torch.Tensor
    nonfinite: torch.Tensor
    amax: torch.Tensor


class Quantized(NamedTuple):
    """codes float8_e4m3fn [heads, tokens, width]; scales f32 [heads, scale_count] in the order of `layout`: engine
    block, then token or channel."""

    codes: torch.Tensor
    scales: torch.Tensor
    counts: Counts


def quantize(
    x: torch.Tensor,
    granularity: str,
    scales: torch.Tensor | None = None,
    *,
    engine_blocks: int = 1,
    dtype: str = "e4m3fn",
    scale_dtype: str = "fp32",
    powers: bool = False,
) -> Quantized:
    """K or V [heads, tokens, width] of one block as FP8 by the rules of the module.

    granularity   "tensor", "head": static, `scales` given (f32, [1] or [heads]; repeated per head in the result)
                  "block-head", "token-head", "channel": amax of one engine block of a head, of one token of a head, of
                  one channel of an engine block
    engine_blocks engine blocks in `tokens`; matters to "block-head" and "channel"
    scale_dtype   "fp32", or "bf16" for scales that come from the block: what is returned, in f32, is exact in it. fp16
                  cannot hold the bounds
    powers        scales that come from the block are powers of two (rule "amax-pow2")

    Raises Invalid for another number format, shape or dtype, and for static scales that are not finite, not positive or
    out of bounds.
    """
    if dtype != "e4m3fn":
        raise Invalid(f"kvtier writes e4m3fn only, not {dtype}: the formats share bytes but not their meaning")
    if x.dim() != 3 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise Invalid(f"quantize takes f32, bf16 or fp16 of shape [heads, tokens, width], not {described(x)}")
    if scale_dtype != "fp32" and (scale_dtype != "bf16" or granularity not in DYNAMIC):
        kept = "fp32, or bf16 where they come from the block"
        raise Invalid(f"scales of granularity {granularity} are not kept in {scale_dtype}: {kept}")
    heads, tokens, width = x.shape
    _check_blocks(tokens, engine_blocks)
    x = x.float().reshape(heads, engine_blocks, tokens // engine_blocks, width)
    finite = x.isfinite()
    magnitude = torch.where(finite, x.abs(), 0.0)
    if granularity in STATIC:
        scales = _static(scales, granularity, heads).to(x.device)
    elif granularity in DYNAMIC:
        if scales is not None:
            raise Invalid(f"scales of granularity {granularity} come from the block and cannot be given")
        over = {"block-head": (2, 3), "token-head": (3,), "channel": (2,)}[granularity]
        scales = scale_from_amax(magnitude.amax(dim=over), powers).reshape(heads, -1)
        if scale_dtype == "bf16":
            scales = scales.bfloat16().float()
    else:
        raise Invalid(f"granularity must be one of {sorted(STATIC | DYNAMIC)}, not {granularity!r}")
    y = x * _spread(1.0 / scales, granularity, engine_blocks, tokens, width)
    counts = Counts(
        clipped=((y.abs() > CLIP) & finite).sum(dim=(1, 2, 3)),
        nonfinite=(~finite).sum(dim=(1, 2, 3)),
        amax=magnitude.amax(dim=(1, 2, 3)),
    )
    codes = y.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(x.isnan(), NAN_CODE, codes).to(torch.uint8).view(torch.float8_e4m3fn)
    return Quantized(codes.reshape(heads, tokens, width), scales, counts)


def scale_from_amax(amax: torch.Tensor, powers: bool = False) -> torch.Tensor:
    """The scale under which `amax` (f32, finite, >= 0) lands on the largest code: the rule "amax", within the codec's
    bounds. `powers`: rounded up to a power of two, the rule "amax-pow2"."""
    scale = (amax.float() * RECIPROCAL).clamp(MIN_SCALE, MAX_SCALE)
    if powers:  # both bounds are powers of two themselves
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return scale


def dequantize(codes: torch.Tensor, scales: torch.Tensor, granularity: str) -> torch.Tensor:
    """f32 [heads, tokens, width]: the exact value of each code times its scale, rounded once. A hop through memory that
    attention does not need: for tests, tools and engines whose attention reads nothing else."""
    heads, tokens, width = codes.shape
    blocks = _check_part("codes", codes, scales, granularity)
    values = codes.float().reshape(heads, blocks, tokens // blocks, width)
    return (values * _spread(scales, granularity, blocks, tokens, width)).reshape(heads, tokens, width)


@dataclass(frozen=True, slots=True)
class Tile:
    """K and V of one layer of one block, as they lie in the block; or a run of native KV of any length.

    keys, values   [kv_heads, tokens, width]: float8_e4m3fn codes, or native f32, bf16 or fp16. K and V may differ in
                   width and format
    key_scales, value_scales               f32 [kv_heads, scale_count]; None for a native part
    key_granularity, value_granularity     as in `layout`; "none" for a native part
    start          position of the first token
    used           tokens that hold content, from the first on; None for all. What stands behind them, scales included,
                   is never looked at: it may be anything, NaN too
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    key_granularity: str = "none"
    value_granularity: str = "none"
    start: int = 0
    used: int | None = None


class Attended(NamedTuple):
    """output f32 [q_heads, q_tokens, width of V]; lse f32 [q_heads, q_tokens], the natural log of the softmax's
    denominator. A query that sees no key has output 0 and lse -Inf, the neutral element of `merge`."""

    output: torch.Tensor
    lse: torch.Tensor


def attention(
    queries: torch.Tensor,
    tiles: Iterable[Tile],
    *,
    start: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Attended:
    """Attention of queries [q_heads, q_tokens, width] over tiles, softmax in f32, one pass over the tiles in the order
    given.

    FP8 is read as it lies: codes are upcast tile by tile (exact), the K scale is folded into the logits ("channel":
    into the query), the V scale into the probabilities ("channel": into the tile's sum). No upcast K or V of more than
    one tile ever exists.

    start    position of the first query; the others follow. A key is seen if causal: key position <= query position,
             and with a window additionally > query position - window
    scale    of the logits, width ** -0.5 if None

    Any group size: query head h reads KV head h // (q_heads / kv_heads). Raises Invalid for shapes and formats that do
    not fit.
    """
    if queries.dim() != 3:
        raise Invalid(f"queries have the shape [heads, tokens, width], not {tuple(queries.shape)}")
    q_heads, q_tokens, width = queries.shape
    tiles = list(tiles)
    if not tiles:
        raise Invalid("attention over no tiles: the width of the result is unknown")
    kv_heads, _, value_width = tiles[0].values.shape
    if q_heads % kv_heads:
        raise Invalid(f"{q_heads} query heads cannot share {kv_heads} KV heads")
    group, device = q_heads // kv_heads, queries.device
    positions = torch.arange(start, start + q_tokens, device=device)
    rows = (queries.float() * (width**-0.5 if scale is None else scale)).reshape(kv_heads, group * q_tokens, width)
    top = torch.full((kv_heads, group * q_tokens), -math.inf, device=device)
    total = torch.zeros_like(top)
    mixed = torch.zeros(*top.shape, value_width, device=device)
    for tile in tiles:
        used = _check_tile(tile, kv_heads, width, value_width)
        if not used:
            continue
        logits = _logits(rows, tile)
        hidden = _hidden(positions, tile, used, causal, window)
        if hidden is not None:
            # also replaces whatever unused slots produced, NaN too
            logits = logits.masked_fill(hidden.repeat(group, 1), -math.inf)
        higher = torch.maximum(top, logits.amax(dim=2))
        shift = torch.where(higher == -math.inf, 0.0, higher)  # no key seen yet: exp(-Inf - 0) = 0, not NaN
        weights = torch.exp(logits - shift[:, :, None])
        decay = torch.exp(top - shift)
        total = total * decay + weights.sum(dim=2)
        mixed = mixed * decay[:, :, None] + _mix(weights, tile, used)
        top = higher
    output = mixed / torch.where(total == 0, 1.0, total)[:, :, None]
    lse = torch.where(top == -math.inf, 0.0, top) + torch.log(total)
    return Attended(output.reshape(q_heads, q_tokens, -1), lse.reshape(q_heads, q_tokens))


def merge(first: Attended, second: Attended) -> Attended:
    """Attention over the union of two disjoint sets of keys, from the attention over each (split-KV, mixed pools).
    Order does not matter."""
    lse = torch.logaddexp(first.lse, second.lse)
    shift = torch.where(lse == -math.inf, 0.0, lse)
    one, other = (part.output * torch.exp(part.lse - shift)[..., None] for part in (first, second))
    return Attended(one + other, lse)


def _logits(rows: torch.Tensor, tile: Tile) -> torch.Tensor:
    """[kv_heads, rows, tokens] of queries [kv_heads, rows, width] that carry the softmax scale already."""
    keys, scales, granularity = tile.keys, tile.key_scales, tile.key_granularity
    if scales is None:
        return rows @ keys.float().mT
    heads, tokens, width = keys.shape
    if granularity != "channel":
        return (rows @ keys.float().mT) * _per_token(scales, granularity, tokens)[:, None, :]
    blocks = scales.shape[1] // width
    scaled = rows[:, None] * scales.reshape(heads, blocks, 1, width)
    logits = scaled @ keys.float().reshape(heads, blocks, tokens // blocks, width).mT
    return logits.transpose(1, 2).reshape(heads, -1, tokens)


def _mix(weights: torch.Tensor, tile: Tile, used: int) -> torch.Tensor:
    """[kv_heads, rows, width of V]: values under unnormalized weights. Unused slots are zeroed, as 0 * NaN is NaN."""
    values, scales, granularity = tile.values, tile.value_scales, tile.value_granularity
    heads, tokens, width = values.shape
    live = torch.arange(tokens, device=values.device) < used
    plain = values.float()
    if used < tokens:
        plain = torch.where(live[:, None], plain, 0.0)
    if scales is None:
        return weights @ plain
    if granularity != "channel":
        return (weights * torch.where(live, _per_token(scales, granularity, tokens), 0.0)[:, None, :]) @ plain
    blocks = scales.shape[1] // width
    of_block = weights.reshape(heads, -1, blocks, tokens // blocks).transpose(1, 2)
    sums = of_block @ plain.reshape(heads, blocks, -1, width)
    begun = live[:: tokens // blocks]  # engine blocks whose first token is used; others' scales may be anything
    return (sums * torch.where(begun[:, None], scales.reshape(heads, blocks, width), 0.0)[:, :, None, :]).sum(dim=1)


def _hidden(positions: torch.Tensor, tile: Tile, used: int, causal: bool, window: int | None) -> torch.Tensor | None:
    """[q_tokens, tokens], True where a query must not see a key; None if it may see all."""
    tokens = tile.keys.shape[1]
    first, last = int(positions[0]), int(positions[-1])
    past = not causal or tile.start + tokens - 1 <= first
    if used == tokens and past and (window is None or tile.start > last - window):
        return None
    keys = torch.arange(tile.start, tile.start + tokens, device=positions.device)
    hidden = (keys >= tile.start + used)[None, :].repeat(len(positions), 1)
    if causal:
        hidden |= keys[None, :] > positions[:, None]
    if window is not None:
        hidden |= keys[None, :] <= positions[:, None] - window
    return hidden


def described(x: torch.Tensor) -> str:
    """Format and shape of a tensor, for messages."""
    return f"{x.dtype} of shape {tuple(x.shape)}"


def _per_token(scales: torch.Tensor, granularity: str, tokens: int) -> torch.Tensor:
    """[heads, tokens], or [heads, 1] for one scale a head."""
    return scales.repeat_interleave(tokens // scales.shape[1], dim=1) if granularity == "block-head" else scales


def _spread(scales: torch.Tensor, granularity: str, blocks: int, tokens: int, width: int) -> torch.Tensor:
    """Scales [heads, scale_count] in a shape that broadcasts over [heads, engine blocks, tokens of one, width]."""
    heads = scales.shape[0]
    if granularity == "token-head":
        return scales.reshape(heads, blocks, tokens // blocks, 1)
    if granularity == "channel":
        return scales.reshape(heads, blocks, 1, width)
    return scales.reshape(heads, -1, 1, 1)


def _static(scales: torch.Tensor | None, granularity: str, heads: int) -> torch.Tensor:
    """Given scales as f32 [heads, 1], checked."""
    wanted = 1 if granularity == "tensor" else heads
    if scales is None or scales.dtype != torch.float32 or scales.numel() != wanted:
        given = "none" if scales is None else f"{scales.dtype} of shape {tuple(scales.shape)}"
        raise Invalid(f"granularity {granularity} needs {wanted} static scales in f32; given: {given}")
    if not bool(((scales >= MIN_SCALE) & (scales <= MAX_SCALE)).all()):
        raise Invalid(f"static scales must be finite and from 2^-64 to 2^119, not {scales.flatten().tolist()}")
    return scales.reshape(-1, 1).expand(heads, 1).contiguous()


def _check_blocks(tokens: int, engine_blocks: int) -> None:
    if engine_blocks < 1 or tokens < 1 or tokens % engine_blocks:
        raise Invalid(f"{tokens} tokens are not {engine_blocks} engine blocks of one size")


def _check_part(name: str, codes: torch.Tensor, scales: torch.Tensor | None, granularity: str) -> int:
    """Raises Invalid unless all three fit together. Returns the engine blocks the scales tell apart (1 if none)."""
    if granularity not in GRANULARITIES:
        raise Invalid(f"granularity of {name} must be one of {sorted(GRANULARITIES)}, not {granularity!r}")
    heads, tokens, width = codes.shape
    if granularity == "none":
        if codes.dtype not in (torch.float32, torch.bfloat16, torch.float16) or scales is not None:
            raise Invalid(f"native {name} are f32, bf16 or fp16 without scales, not {codes.dtype}")
        return 1
    if codes.dtype != torch.float8_e4m3fn:
        raise Invalid(f"{name} must be float8_e4m3fn, not {codes.dtype}: the formats share bytes but not their meaning")
    if scales is None or scales.dtype != torch.float32 or scales.dim() != 2 or scales.shape[0] != heads:
        raise Invalid(f"scales of {name} must be f32 of shape [{heads}, scale_count]")
    count = scales.shape[1]
    blocks = {"block-head": count, "channel": count // width}.get(granularity, 1)
    expected = {"token-head": tokens, "block-head": blocks, "channel": blocks * width}.get(granularity, 1)
    if count != expected or blocks < 1:
        part = f"{name} of {tokens} tokens and width {width}"
        raise Invalid(f"{part} cannot have {count} scales a head of granularity {granularity}")
    _check_blocks(tokens, blocks)
    return blocks


def _check_tile(tile: Tile, kv_heads: int, width: int, value_width: int) -> int:
    """Raises Invalid unless the tile fits its own scales and the first tile. Returns its used tokens."""
    keys, values = tuple(tile.keys.shape), tuple(tile.values.shape)
    if len(keys) != 3 or len(values) != 3 or keys[:2] != values[:2]:
        raise Invalid(f"keys {keys} and values {values} must be [kv_heads, tokens, width]")
    if (keys[0], keys[2], values[2]) != (kv_heads, width, value_width):
        found = f"a tile of {keys[0]} heads, key width {keys[2]} and value width {values[2]}"
        raise Invalid(f"{found} does not fit {kv_heads} heads, {width} and {value_width}")
    _check_part("keys", tile.keys, tile.key_scales, tile.key_granularity)
    _check_part("values", tile.values, tile.value_scales, tile.value_granularity)
    tokens = keys[1]
    used = tokens if tile.used is None else tile.used
    if not 0 <= used <= tokens:
        raise Invalid(f"a tile of {tokens} tokens cannot have {used} used ones")
    return used
