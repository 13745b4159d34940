"""The number format against an independent definition: e4m3fn from its formula, attention in float64. Cases KVB-01,
KVB-02 and KVB-03.
"""

from __future__ import annotations

import itertools
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvtier.errors import Invalid
from kvtier.format import layout
from kvtier.format.identity import CHAIN, NO_CONTEXT, Description, HashScheme, derive_keys, namespace_digest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from kvtier_kernels import reference as ref  # noqa: E402
from kvtier_kernels.reference import Attended, Tile, attention, dequantize, merge, quantize  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

GRANULARITIES = ("tensor", "head", "block-head", "token-head", "channel")
DYNAMIC = ("block-head", "token-head", "channel")


# ---- the format, from its definition


def decode_table() -> np.ndarray:
    """Value of each of the 256 codes: sign, 4 bits of exponent (bias 7), 3 of mantissa; S.1111.111 is NaN and there is
    no Inf.
    """
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(math.copysign(math.nan if code & 0x7F == 0x7F else value, -1 if code & 0x80 else 1))
    return np.array(values)


TABLE = decode_table()


def encode(y: np.ndarray) -> np.ndarray:
    """The nearest code of each value, ties to the even one, saturating, in float64; NaN is 0x7F."""
    positive = TABLE[:0x7F]
    magnitude = np.minimum(np.abs(y.astype(np.float64)), 448.0)
    high = np.clip(np.searchsorted(positive, magnitude), 1, 0x7E)
    below, above = magnitude - positive[high - 1], positive[high] - magnitude
    codes = np.where((below < above) | ((below == above) & (high % 2 == 1)), high - 1, high)
    codes = np.where(np.signbit(y), codes | 0x80, codes)
    return np.where(np.isnan(y), 0x7F, codes).astype(np.uint8)


def expected(x: np.ndarray, granularity: str, static: np.ndarray | None, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) by the rules of the codec, in numpy f32 with loops and no cleverness."""
    heads, tokens, width = x.shape
    size = tokens // blocks
    codes = np.zeros(x.shape, np.uint8)
    rows = []
    for head in range(heads):
        scales = []
        regions: list[Any] = {
            "tensor": [np.s_[:, :]],
            "head": [np.s_[:, :]],
            "block-head": [np.s_[b * size : (b + 1) * size, :] for b in range(blocks)],
            "token-head": [np.s_[t : t + 1, :] for t in range(tokens)],
            "channel": [np.s_[b * size : (b + 1) * size, c : c + 1] for b in range(blocks) for c in range(width)],
        }[granularity]
        for region in regions:
            part = x[head][region]
            if static is not None:
                scale = np.float32(static[head if len(static) > 1 else 0])
            else:
                amax = np.float32(max((abs(v) for v in part.ravel() if np.isfinite(v)), default=0.0))
                scale = np.float32(min(max(amax * np.float32(1 / 448), np.float32(2.0**-64)), np.float32(2.0**119)))
            with np.errstate(over="ignore", invalid="ignore"):
                y = part * (np.float32(1) / scale)
            assert y.dtype == np.float32
            codes[head][region] = encode(y)
            scales.append(scale)
        rows.append(scales)
    return codes, np.array(rows, np.float32)


def code_bytes(codes: torch.Tensor) -> np.ndarray:
    return codes.contiguous().view(torch.uint8).numpy()


def static_for(granularity: str, heads: int, value: float = 0.02) -> torch.Tensor | None:
    if granularity == "tensor":
        return torch.tensor([value])
    return torch.linspace(value, 2 * value, heads) if granularity == "head" else None


def block(
    seed: int, heads: int, tokens: int, width: int, granularity: str, blocks: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of random normal content."""
    x = torch.randn(heads, tokens, width, generator=torch.Generator().manual_seed(seed))
    return quantize(x, granularity, static_for(granularity, heads), engine_blocks=blocks)[:2]


# ---- quantize


def test_every_code_decodes_to_the_value_of_its_definition() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(1, 1, 256)
    decoded = dequantize(codes, torch.ones(1, 1), "head").numpy().ravel()
    np.testing.assert_array_equal(decoded, TABLE.astype(np.float32))
    assert np.signbit(decoded[0x80])


@pytest.mark.parametrize("exponent", [-130, -64, -20, -1, 0, 3, 70])
def test_every_bf16_value_gets_the_nearest_code(exponent: int) -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(1, 256, 256)
    scale = np.float32(2.0 ** min(max(exponent, -64), 119))
    got = quantize(patterns, "head", torch.tensor([float(scale)]))
    x = patterns.float().numpy()
    codes, _ = expected(x, "head", np.array([scale]), 1)
    np.testing.assert_array_equal(code_bytes(got.codes), codes)
    finite = np.isfinite(x)
    assert got.counts.nonfinite.tolist() == [int((~finite).sum())]
    assert got.counts.clipped.tolist() == [
        int((np.abs(x[finite].astype(np.float64)) / scale > 464).sum())
    ]  # a power of two divides exactly


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    ("heads", "tokens", "width", "blocks"), [(2, 16, 128, 1), (3, 64, 64, 4), (1, 544, 80, 1), (5, 6, 7, 3)]
)
def test_codes_scales_and_counts_equal_the_definition_bit_for_bit(
    heads: int, tokens: int, width: int, blocks: int, granularity: str, dtype: str
) -> None:
    generator = torch.Generator().manual_seed(heads * tokens)
    spread = torch.exp(3 * torch.randn(heads, 1, width, generator=generator))  # outlier channels
    x = (torch.randn(heads, tokens, width, generator=generator) * spread).to(getattr(torch, dtype))
    static = static_for(granularity, heads)
    got = quantize(x, granularity, static, engine_blocks=blocks)
    plain = x.float().numpy()
    codes, scales = expected(plain, granularity, None if static is None else static.numpy(), blocks)
    np.testing.assert_array_equal(code_bytes(got.codes), codes)
    assert got.scales.numpy().tobytes() == scales.tobytes()
    np.testing.assert_array_equal(got.counts.amax.numpy(), np.abs(plain).max(axis=(1, 2)))
    assert got.counts.nonfinite.tolist() == [0] * heads
    if granularity in DYNAMIC:
        assert got.counts.clipped.tolist() == [0] * heads, "a dynamic scale clips nothing"
    else:
        inverse = np.float32(1) / scales[:, :, None]
        assert got.counts.clipped.tolist() == (np.abs(plain * inverse) > 464).sum(axis=(1, 2)).tolist()
        assert sum(got.counts.clipped.tolist()) > 0, "the case must clip"
    restored = dequantize(got.codes, got.scales, granularity).numpy()
    spread_scales = np.zeros_like(plain)
    size = tokens // blocks
    for h, t, c in itertools.product(range(heads), range(tokens), range(width)):
        index = {"block-head": t // size, "token-head": t, "channel": t // size * width + c}.get(granularity, 0)
        spread_scales[h, t, c] = scales[h, index]
    np.testing.assert_array_equal(restored, TABLE.astype(np.float32)[codes] * spread_scales)


@given(
    x=hnp.arrays(np.float32, hnp.array_shapes(min_dims=3, max_dims=3, max_side=6), elements=st.floats(width=32)),
    granularity=st.sampled_from(DYNAMIC),
)
@settings(max_examples=300, deadline=None)
def test_any_input_has_finite_positive_scales_and_bounded_error(x: np.ndarray, granularity: str) -> None:
    got = quantize(torch.from_numpy(x), granularity)
    codes, scales = expected(x, granularity, None, 1)
    np.testing.assert_array_equal(code_bytes(got.codes), codes)
    assert got.scales.numpy().tobytes() == scales.tobytes()
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    restored = dequantize(got.codes, got.scales, granularity).numpy()
    finite = np.isfinite(x)
    np.testing.assert_array_equal(np.isnan(restored), np.isnan(x))
    assert np.isfinite(restored[~np.isnan(x)]).all(), "even the largest f32 decodes to a finite value"
    if not got.counts.clipped.any():
        step = dequantize(
            torch.full(x.shape, 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn), got.scales, granularity
        ).numpy()  # code of 1.0
        # Half a step: 2^-4 of the value, or half the smallest subnormal under the scale; 1e-6 for the roundings in f32.
        bound = np.maximum(np.abs(x[finite].astype(np.float64)) * 2**-4, step[finite].astype(np.float64) * 2**-10) * (
            1 + 1e-6
        )
        assert (np.abs(restored[finite].astype(np.float64) - x[finite]) <= bound).all()


def test_kvb_01_zero_and_equal_rows() -> None:
    for name, seed in (("k", 0), ("v", 1)):
        x = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()
        x[0, 0], x[1, 3], x[0, 5] = 0, 0.5, -0.5
        for content in (x, torch.zeros_like(x)):
            for granularity in GRANULARITIES:
                got = quantize(content, granularity, static_for(granularity, 2, 0.01))
                codes = code_bytes(got.codes)
                assert not np.isin(codes, (0x7F, 0xFF)).any(), (name, granularity)
                assert set(codes[0, 0].tolist()) <= {0x00, 0x80}
                assert bool(got.scales.isfinite().all())
                assert bool((got.scales > 0).all())
                restored = dequantize(got.codes, got.scales, granularity)
                assert not restored[0, 0].any(), "a zero row comes back as exactly 0"
                if not content.any():
                    assert not restored.any()
                    if granularity in DYNAMIC:
                        assert set(got.scales.flatten().tolist()) == {ref.MIN_SCALE}
                elif granularity == "token-head":
                    assert set(codes[1, 3].tolist()) == {0x7E}
                    assert set(codes[0, 5].tolist()) == {0xFE}
                    for row in (restored[1, 3], -restored[0, 5]):
                        assert bool(((row - 0.5).abs() <= 0.5e-6).all())


SATURATION = [
    (448.0, 0x7E), (464.0, 0x7E), (465.0, 0x7E), (480.0, 0x7E), (1e9, 0x7E), (-1e9, 0xFE), (240.0, 0x77), (241.0, 0x77),
    (1.0, 0x38), (2.0**-9, 0x01), (2.0**-10, 0x00), (1.5 * 2.0**-9, 0x02), (0.1, 0x1D), (-0.0, 0x80),
    (math.inf, 0x7E), (-math.inf, 0xFE), (math.nan, 0x7F), (math.copysign(math.nan, -1), 0x7F),
    (-(2.0**-10), 0x80), (3.4028234e38, 0x7E),
]  # fmt: skip


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_kvb_02_saturation_and_rounding(granularity: str) -> None:
    x = torch.tensor([value for value, _ in SATURATION]).reshape(1, 1, -1)
    got = quantize(x, granularity, torch.ones(1))
    assert [f"{code:02X}" for code in code_bytes(got.codes).ravel()] == [f"{code:02X}" for _, code in SATURATION]
    assert got.counts.nonfinite.tolist() == [4]
    assert got.counts.clipped.tolist() == [5]  # 465, 480, +-1e9, the largest f32; 464 rounds to 448 anyway
    assert got.counts.amax.tolist() == [float(np.float32(3.4028234e38))]


@pytest.mark.parametrize("dtype", ["e4m3fnuz", "e5m2", "bf16", "fp8"])
def test_kvb_02_another_format_is_refused_by_name(dtype: str) -> None:
    with pytest.raises(Invalid, match=f"e4m3fn only, not {dtype}"):
        quantize(torch.zeros(1, 4, 4), "block-head", dtype=dtype)


def test_kvb_02_formats_that_share_bytes_share_no_key() -> None:
    """FIX of the cases, stored in one format and asked for in the other, either way: another namespace, so a miss."""
    keys = {}
    for dtype in ("e4m3fn", "e4m3fnuz", "e5m2"):
        fix = layout.attention(1, 2, 8, engine_tokens=16, dtype=dtype, granularity="token-head")
        description = Description("m", "a" * 40, fix, HashScheme(CHAIN, "0", 16), rule="amax", codec=ref.CODEC)
        keys[dtype] = derive_keys(
            namespace_digest(description, "local"), fix.resolve(layout.Range()), NO_CONTEXT, bytes(32), 32
        )[0]
    assert len(set(keys.values())) == 3


@pytest.mark.parametrize("wrong", ["float8_e4m3fnuz", "float8_e5m2", "uint8"])
def test_kvb_02_codes_of_another_format_are_never_read(wrong: str) -> None:
    codes, scales = block(0, 1, 4, 8, "head")
    other = codes.view(getattr(torch, wrong))
    with pytest.raises(Invalid, match="float8_e4m3fn"):
        dequantize(other, scales, "head")
    for tile in (
        Tile(other, codes, scales, scales, "head", "head"),
        Tile(codes, other, scales, scales, "head", "head"),
        Tile(codes, codes),
    ):
        with pytest.raises(Invalid):
            attention(torch.zeros(1, 1, 8), [tile], start=9)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_one_bad_element_spoils_itself_alone(granularity: str, bad: float) -> None:
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    x[1, 3, 5] = 0
    clean = quantize(x, granularity, static_for(granularity, 2), engine_blocks=4)
    x[1, 3, 5] = bad
    got = quantize(x, granularity, static_for(granularity, 2), engine_blocks=4)
    assert got.scales.numpy().tobytes() == clean.scales.numpy().tobytes()
    differing = np.argwhere(code_bytes(got.codes) != code_bytes(clean.codes))
    assert differing.tolist() == [[1, 3, 5]]
    assert got.counts.nonfinite.tolist() == [0, 1]
    assert got.counts.amax.tolist() == clean.counts.amax.tolist()
    assert code_bytes(got.codes)[1, 3, 5] == {math.inf: 0x7E, -math.inf: 0xFE}.get(bad, 0x7F)


def test_the_constants_have_the_bits_that_the_docstring_states() -> None:
    assert struct.pack(">f", ref.RECIPROCAL).hex() == "3b124925"
    assert ref.CODEC == 1
    assert float(np.float32(ref.MAX_SCALE) * np.float32(448)) < float(np.finfo(np.float32).max)
    smallest_normal = float(np.finfo(np.float32).tiny)
    assert min(ref.MIN_SCALE, ref.MAX_SCALE, 1 / ref.MIN_SCALE, 1 / ref.MAX_SCALE) >= smallest_normal


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e-45, 2.0**-65, 2.0**120])
def test_static_scales_out_of_bounds_are_refused(value: float) -> None:
    with pytest.raises(Invalid, match="static scales must be finite"):
        quantize(torch.zeros(2, 4, 4), "head", torch.tensor([1.0, value]))


def test_calls_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 4, 4)
    for call, message in (
        (lambda: quantize(x, "head"), "needs 2 static scales"),
        (lambda: quantize(x, "tensor", torch.ones(2)), "needs 1 static scales"),
        (lambda: quantize(x, "head", torch.ones(2, dtype=torch.float64)), "in f32"),
        (lambda: quantize(x, "block-head", torch.ones(2)), "cannot be given"),
        (lambda: quantize(x, "none"), "granularity must be"),
        (lambda: quantize(x, "channel", engine_blocks=3), "engine blocks of one size"),
        (lambda: quantize(x, "channel", engine_blocks=0), "engine blocks of one size"),
        (lambda: quantize(x[0], "block-head"), "shape"),
        (lambda: quantize(x.double(), "block-head"), "f32, bf16 or fp16"),
        (lambda: dequantize(block(0, 2, 4, 4, "head")[0], torch.ones(2, 3), "token-head"), "cannot have 3 scales"),
        (lambda: dequantize(block(0, 2, 4, 4, "head")[0], torch.ones(2, 6), "channel"), "cannot have 6 scales"),
    ):
        with pytest.raises(Invalid, match=message):
            call()


# ---- attention


def exact(
    queries: torch.Tensor,
    tiles: list[Tile],
    start: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention over the decoded content in float64: one row at a time, one softmax over all its keys. (output, lse)"""
    q = queries.double().numpy()
    keys, values, positions = [], [], []
    for tile in tiles:
        used = tile.keys.shape[1] if tile.used is None else tile.used
        for out, data, scales, granularity in (
            (keys, tile.keys, tile.key_scales, tile.key_granularity),
            (values, tile.values, tile.value_scales, tile.value_granularity),
        ):
            out.append(decoded(data, scales, granularity)[:, :used])
        positions += range(tile.start, tile.start + used)
    k, v, at = np.concatenate(keys, 1), np.concatenate(values, 1), np.array(positions)
    group = q.shape[0] // k.shape[0]
    output, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf)
    for h, i in itertools.product(*map(range, q.shape[:2])):
        seen = np.ones(len(at), bool)
        if causal:
            seen &= at <= start + i
        if window is not None:
            seen &= at > start + i - window
        if seen.any():
            logits = k[h // group][seen] @ q[h, i] * (q.shape[2] ** -0.5 if scale is None else scale)
            weights = np.exp(logits - logits.max())
            output[h, i] = weights @ v[h // group][seen] / weights.sum()
            lse[h, i] = logits.max() + np.log(weights.sum())
    return output, lse


def decoded(data: torch.Tensor, scales: torch.Tensor | None, granularity: str) -> np.ndarray:
    """float64 [heads, tokens, width] by table and loops."""
    if scales is None:
        return data.double().numpy()
    heads, tokens, width = data.shape
    count = scales.shape[1]
    out = TABLE[code_bytes(data)]
    for h, t in itertools.product(range(heads), range(tokens)):
        if granularity == "channel":
            row = t // (tokens * width // count) * width
            out[h, t] *= scales[h, row : row + width].double().numpy()
        else:
            out[h, t] *= float(scales[h, t * count // tokens])
    return out


def assert_close(got: Attended, wanted: tuple[np.ndarray, np.ndarray], label: object = "") -> None:
    """f32 against float64. A dot product of 256 terms errs by at most 256 * 2^-24 = 1.5e-5 of the sum of its terms'
    magnitudes, here below 10 for logits; exp turns an absolute error of a logit into a relative one of a weight. Seen:
    2e-6.
    """
    np.testing.assert_allclose(
        got.output.numpy(), wanted[0], rtol=0, atol=2e-5 * max(1.0, float(np.abs(wanted[0]).max())), err_msg=str(label)
    )
    np.testing.assert_allclose(got.lse.numpy(), wanted[1], rtol=2e-6, atol=2e-5, err_msg=str(label))


def quantized_tiles(
    seed: int, lengths: list[int], heads: int, width: int, value_width: int, key: str, value: str, blocks: int = 1
) -> Iterator[Tile]:
    start = 0
    for i, length in enumerate(lengths):
        keys, key_scales = block(seed + 2 * i, heads, length, width, key, blocks)
        values, value_scales = block(seed + 2 * i + 1, heads, length, value_width, value, blocks)
        yield Tile(keys, values, key_scales, value_scales, key, value, start)
        start += length


def queries_for(seed: int, heads: int, tokens: int, width: int) -> torch.Tensor:
    return torch.randn(heads, tokens, width, generator=torch.Generator().manual_seed(1000 + seed))


@pytest.mark.parametrize("key", GRANULARITIES)
@pytest.mark.parametrize("value", GRANULARITIES)
def test_attention_over_blocks_equals_attention_over_decoded_content(key: str, value: str) -> None:
    tiles = list(quantized_tiles(7, [16, 16, 16], heads=2, width=64, value_width=32, key=key, value=value, blocks=2))
    queries = queries_for(7, 6, 5, 64)
    for start in (47, 20, 0):  # all keys seen; the causal edge inside the tiles; the first token
        assert_close(attention(queries, tiles, start=start), exact(queries, tiles, start), start)


@pytest.mark.parametrize("width", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_any_group_size_and_head_width(group: int, width: int) -> None:
    tiles = list(
        quantized_tiles(width, [16, 16], heads=2, width=width, value_width=width, key="head", value="token-head")
    )
    queries = queries_for(group, 2 * group, 3, width)
    assert_close(attention(queries, tiles, start=30), exact(queries, tiles, 30))


def native_tile(seed: int, heads: int, tokens: int, width: int, start: int, dtype: Any = None) -> Tile:
    generator = torch.Generator().manual_seed(seed)
    parts = (torch.randn(heads, tokens, width, generator=generator).to(dtype or torch.bfloat16) for _ in "kv")
    return Tile(*parts, start=start)


def test_native_and_fp8_mixed_in_one_sequence() -> None:
    first = list(quantized_tiles(3, [16, 16], heads=3, width=64, value_width=64, key="head", value="head"))
    keys, key_scales = block(50, 3, 16, 64, "channel", 2)
    half = Tile(keys, torch.randn(3, 16, 64).half(), key_scales, None, "channel", "none", 32)
    tiles = [*first, half, native_tile(4, 3, 16, 64, 48), native_tile(5, 3, 21, 64, 64, torch.float32)]
    queries = queries_for(3, 9, 21, 64)
    assert_close(attention(queries, tiles, start=64), exact(queries, tiles, 64))
    # The order of disjoint tiles is no matter of meaning: positions are.
    assert_close(attention(queries, tiles[::-1], start=64), exact(queries, tiles, 64))


@pytest.mark.parametrize("window", [1, 5, 16, 40, 1000])
@pytest.mark.parametrize("causal", [True, False])
def test_window_and_causal(window: int, causal: bool) -> None:
    tiles = list(
        quantized_tiles(
            9, [16, 16, 16], heads=1, width=64, value_width=64, key="block-head", value="block-head", blocks=2
        )
    )
    queries = queries_for(9, 2, 7, 64)
    for start in (0, 17, 41, 60):
        got = attention(queries, tiles, start=start, causal=causal, window=window)
        assert_close(got, exact(queries, tiles, start, causal=causal, window=window), start)


def test_scale_of_the_logits() -> None:
    tiles = list(quantized_tiles(2, [16], heads=1, width=64, value_width=64, key="head", value="head"))
    queries = queries_for(2, 1, 2, 64)
    assert_close(attention(queries, tiles, start=20, scale=0.3), exact(queries, tiles, 20, scale=0.3))


def test_a_query_that_sees_nothing_gives_zero_and_minus_infinity() -> None:
    tile = next(quantized_tiles(1, [16], heads=1, width=64, value_width=64, key="head", value="head"))
    for tiles in (
        [Tile(tile.keys, tile.values, tile.key_scales, tile.value_scales, "head", "head", 100)],
        [Tile(tile.keys.float(), tile.values.float(), used=0)],
    ):
        got = attention(queries_for(1, 2, 3, 64), tiles, start=5)
        assert not got.output.any()
        assert got.lse.flatten().tolist() == [-math.inf] * 6


@pytest.mark.parametrize("split", [0, 1, 2, 3])
def test_a_merged_split_equals_no_split(split: int) -> None:
    tiles = list(quantized_tiles(11, [16, 16, 16], heads=2, width=64, value_width=64, key="head", value="channel"))
    queries = queries_for(11, 4, 20, 64)
    nothing = Tile(tiles[0].keys.float(), tiles[0].values.float(), used=0)
    for start in (47, 20, 0):  # at 0 and 20 some queries see nothing of the second part
        parts = [attention(queries, [nothing, *side], start=start) for side in (tiles[:split], tiles[split:])]
        whole = attention(queries, tiles, start=start)
        for merged in (merge(*parts), merge(*parts[::-1])):
            assert bool(merged.output.isfinite().all())
            # Two sums of f32 in another order: a few ulp of values below 4.
            torch.testing.assert_close(merged.output, whole.output, rtol=0, atol=4e-6)
            torch.testing.assert_close(merged.lse, whole.lse, rtol=0, atol=4e-6)


def test_merge_of_two_nothings_is_nothing() -> None:
    nothing = Attended(torch.zeros(1, 2, 4), torch.full((1, 2), -math.inf))
    merged = merge(nothing, nothing)
    assert not merged.output.any()
    assert merged.lse.flatten().tolist() == [-math.inf] * 2


@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
@pytest.mark.parametrize(
    ("key", "value", "blocks"),
    [("token-head", "token-head", 1), ("head", "head", 1), ("channel", "block-head", 4), ("block-head", "channel", 4)],
)
def test_kvb_03_unused_slots_never_reach_the_output(key: str, value: str, blocks: int, length: int, width: int) -> None:
    whole = -(-length // 16) + 1  # and one block in the table that is unused altogether
    clean = list(
        quantized_tiles(
            length, [16] * whole, heads=2, width=width, value_width=width, key=key, value=value, blocks=blocks
        )
    )
    queries = queries_for(length, 8, 2, width)

    def run(filler: int, scale: float) -> Attended:
        tiles = []
        for tile in clean:
            used = min(max(length - tile.start, 0), 16)
            parts = []
            for codes, scales, granularity in (
                (tile.keys, tile.key_scales, key),
                (tile.values, tile.value_scales, value),
            ):
                raw, scales = codes.view(torch.uint8).clone(), scales.clone()
                raw[:, used:] = filler
                if granularity == "token-head":
                    scales[:, used:] = scale
                elif granularity != "head" or not used:
                    per_block = scales.reshape(2, blocks if granularity != "head" else 1, -1)
                    per_block[:, -(-used * blocks // 16) if granularity != "head" else 0 :] = scale
                    scales = per_block.reshape(2, -1)
                parts.append((raw.view(torch.float8_e4m3fn), scales))
            (keys, key_scales), (values, value_scales) = parts
            tiles.append(Tile(keys, values, key_scales, value_scales, key, value, tile.start, used))
        return attention(queries, tiles, start=length - 1)

    plain = run(0x00, 1.0)
    assert bool(plain.output.isfinite().all())
    assert plain.output.any()
    for scale in (math.nan, math.inf):
        dirty = run(0x7F, scale)
        assert torch.equal(dirty.output, plain.output)
        assert torch.equal(dirty.lse, plain.lse)


def test_kvb_03_a_shape_that_does_not_fit_is_a_named_error() -> None:
    keys, scales = block(0, 2, 16, 64, "head")
    good = Tile(keys, keys, scales, scales, "head", "head")
    narrow, narrow_scales = block(0, 2, 16, 32, "head")
    for queries, tiles, message in (
        (torch.zeros(4, 1, 96), [good], "does not fit 2 heads, 96"),
        (torch.zeros(3, 1, 64), [good], "3 query heads cannot share 2"),
        (torch.zeros(4, 64), [good], "queries have the shape"),
        (torch.zeros(4, 1, 64), [], "no tiles"),
        (
            torch.zeros(4, 1, 64),
            [good, Tile(narrow, narrow, narrow_scales, narrow_scales, "head", "head")],
            "does not fit",
        ),
        (torch.zeros(4, 1, 64), [Tile(keys, keys[:, :8], scales, scales, "head", "head")], "must be"),
        (torch.zeros(4, 1, 64), [Tile(keys, keys, scales, scales, "head", "rowwise")], "granularity of values"),
        (torch.zeros(4, 1, 64), [Tile(keys, keys, scales, None, "head", "head")], "scales of values"),
        (torch.zeros(4, 1, 64), [Tile(keys, keys, scales, scales, "head", "head", used=17)], "17 used"),
    ):
        with pytest.raises(Invalid, match=message):
            attention(queries, tiles, start=20)


class Largest(TorchDispatchMode):  # type: ignore[misc]
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_attention_never_materialises_the_context() -> None:
    tiles = list(quantized_tiles(5, [16] * 64, heads=2, width=64, value_width=64, key="head", value="head"))
    with Largest() as largest:
        attention(queries_for(5, 6, 1, 64), tiles, start=2000)
    assert largest.elements == 2 * 16 * 64, "one tile upcast is the largest thing there may be"


def test_the_package_imports_without_torch_and_triton() -> None:
    code = (
        "import sys, kvtier_kernels; assert not {'torch', 'triton'} & set(sys.modules); "
        "import kvtier_kernels.reference; assert 'torch' in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
