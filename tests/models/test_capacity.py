"""Sizes and capacities worked out by hand for four models, break-even lengths, and what is refused.

The comparison with an engine's own report is in tests/connectors/vllm/test_capacity.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import Invalid
from kvtier.models import capacity
from kvtier.models.advice import advise
from kvtier.models.model_config import caches_of
from tests.models.configs import DEEPSEEK, FP8, GEMMA, GPT_OSS, LLAMA, NATIVE, GiB, MiB, model


def test_llama_by_hand() -> None:
    """K and V of 8 heads x 128 in 32 layers: 2 * 1024 * 32 = 65,536 elements a token; a block of 16 tokens is 2 MiB in
    BF16 and 1 MiB in FP8."""
    caches = model(LLAMA)
    (native,), (fp8,) = capacity.group_sizes(caches, NATIVE), capacity.group_sizes(caches, FP8)
    assert (native.payload_bytes, native.page_bytes) == (131072, 65536)
    assert (fp8.payload_bytes, fp8.page_bytes, fp8.scale_bytes) == (65536, 32768, 0)
    found = capacity.pool(caches, NATIVE, 40 * GiB, 8192)
    assert (found.block_bytes, found.blocks, found.request, found.tokens, found.concurrency) == (
        2 * MiB,
        20480,
        512,
        327680,
        40.0,
    )
    found = capacity.pool(caches, FP8, 40 * GiB, 8192)
    assert (found.block_bytes, found.blocks, found.tokens, found.concurrency) == (MiB, 40960, 655360, 80.0)
    # 1,000 tokens need 63 blocks = 1,008 tokens of room: 8 of them stay empty, and 40960 / 63 = 650.16 requests fit.
    found = capacity.pool(caches, FP8, 40 * GiB, 1000)
    assert (found.request, int(found.concurrency), found.tokens) == (63, 650, 650158)
    assert found.remainder == pytest.approx(8 / 1008)
    # A block of ours: for each of 8 heads and 32 layers 16 bytes of scales and 2 * 2048 of codes, then 256 of header;
    # slots are whole pages.
    ((extents, ranks),) = capacity.rank_blocks(caches, FP8)
    assert (extents.body_bytes, extents.slot_bytes, ranks) == (8 * 32 * 4112, 258 * 4096, 1)
    assert capacity.stored_bytes(caches, FP8) == (8 * 32 * 4112 + 256) / 16
    # 64 GiB are 1,020 slabs of 64.25 MiB, each of 63 such slots: 1020 * 63 * 16 tokens.
    assert capacity.arena_tokens(caches, FP8, 64 * GiB) == pytest.approx(1020 * 63 * 16, abs=1)
    assert capacity.static_scale_bytes(caches, FP8) == 32 * 2 * 8 * 4
    assert capacity.static_scale_bytes(caches, replace(FP8, granularity="tensor")) == 32 * 2 * 4
    assert capacity.exclusion_bytes(caches, FP8, 31) == 2048  # 2,048 elements, one byte more each


def test_llama_with_excluded_layers_and_tensor_parallelism_by_hand() -> None:
    """Layers 0 and 31 native: 30 * 2048 + 2 * 4096 = 69,632 bytes a token, and an effective ratio of 131072 / 69632."""
    caches, choice = model(LLAMA), replace(FP8, excluded=frozenset((0, 31)))
    assert sum(group.payload_bytes for group in capacity.group_sizes(caches, choice)) == 69632
    found = capacity.pool(caches, choice, 40 * GiB, 8192)
    assert (found.block_bytes, found.blocks) == (16 * 69632, 40 * GiB // (16 * 69632))
    assert found.concurrency / capacity.pool(caches, NATIVE, 40 * GiB, 8192).concurrency == pytest.approx(
        131072 / 69632, rel=1e-4
    )
    assert capacity.exclusion_bytes(caches, choice, 31) == 0, "it is native already"
    # 8 ranks have one head each, 16 share heads in twos: the same bytes a rank, and stored once.
    for tp, heads in ((1, 8), (2, 4), (8, 1), (16, 1)):
        (group,) = capacity.group_sizes(caches, replace(FP8, tp=tp))
        assert (group.heads, group.payload_bytes) == (heads, 8192 * heads)
    one, sixteen = (capacity.stored_bytes(caches, replace(FP8, tp=tp)) for tp in (8, 16))
    assert one == sixteen == 8 * (32 * 4112 + 256) / 16


def test_gpt_oss_by_hand() -> None:
    """12 full layers in FP8 (1,024 bytes a token each), 12 with a window of 128, native (2,048). Pages of one size:
    32,768 bytes are 16 tokens natively and 32 in FP8. 8,192 tokens: 512 blocks of full layers natively, 256 in FP8; a
    window holds ceil(127 / 16) + 1 = 9."""
    caches = model(GPT_OSS)
    sizes = capacity.group_sizes(caches, FP8)
    assert [(size.dtype, len(size.layers), size.window, size.page_bytes) for size in sizes] == [
        ("bf16", 12, 128, 32768),
        ("e4m3fn", 12, None, 16384),
    ]
    native, fp8 = (capacity.pool(caches, choice, 10 * GiB, 8192) for choice in (NATIVE, FP8))
    assert (native.block_bytes, native.request) == (12 * 32768, 512 + 9)
    assert (fp8.block_bytes, fp8.request) == (12 * 32768, 256 + 9)
    assert native.blocks == fp8.blocks == 27306
    assert (int(native.concurrency), int(fp8.concurrency)) == (52, 103)
    assert fp8.concurrency / native.concurrency == pytest.approx(521 / 265)
    # With 2,048 tokens in flight a window holds min(127 + 2048, 8192) of them.
    assert capacity.pool(caches, replace(FP8, in_flight=2048), 10 * GiB, 8192).request == 256 + (-(-2175 // 16) + 1)
    # All layers quantized: pages are equal without more tokens, and the windows' blocks halve in bytes, not in number.
    everything = capacity.pool(caches, replace(FP8, sliding=True), 10 * GiB, 8192)
    assert (everything.block_bytes, everything.request) == (12 * 16384, 512 + 9)
    assert capacity.exclusion_bytes(caches, FP8, 0) == 0 and capacity.exclusion_bytes(caches, FP8, 1) == 1024


def test_gemma_with_a_head_dim_of_256_by_hand() -> None:
    """21 of 42 layers are full: 2 * 8 * 256 = 4,096 elements a token and layer. In FP8 with native windows: 21 * 4096 +
    21 * 8192 bytes."""
    caches = model(GEMMA)
    sliding, full = capacity.group_sizes(caches, FP8)
    assert (full.layers, sliding.layers) == (tuple(range(1, 42, 2)), tuple(range(0, 42, 2)))
    assert (full.payload_bytes, sliding.payload_bytes) == (21 * 4096, 21 * 8192)
    found = capacity.pool(caches, FP8, 8 * GiB, 8192)
    assert (found.block_bytes, found.request) == (21 * 131072, 8192 // 32 + 4096 // 16 + 1)
    native = capacity.pool(caches, NATIVE, 8 * GiB, 8192)
    assert native.request == 512 + 257
    assert found.concurrency / native.concurrency == pytest.approx(769 / 513)
    assert {one.topic for one in advise(caches, FP8, 8192, 769 / 513, None, False)} == {
        "wide heads",
        "sliding windows",
        "effective ratio",
    }


def test_mla_by_hand() -> None:
    """One latent of 512 + 64 elements in 27 layers, whatever the heads: 31,104 bytes a token in BF16, 15,552 in FP8, on
    every rank whole."""
    caches = model(DEEPSEEK)
    for tp in (1, 8):
        (native,), (fp8,) = (capacity.group_sizes(caches, replace(choice, tp=tp)) for choice in (NATIVE, FP8))
        assert (native.kind, native.payload_bytes, fp8.payload_bytes) == ("latent", 31104, 15552)
    found = capacity.pool(caches, FP8, 20 * GiB, 32768)
    assert (found.block_bytes, found.request, found.blocks) == (27 * 9216, 2048, 20 * GiB // (27 * 9216))
    # A block of ours, 16 tokens: per layer 16 bytes of scales and 16 * 576 of codes; one rank stores it for all.
    assert capacity.stored_bytes(caches, replace(FP8, tp=8)) == (27 * (16 + 9216) + 256) / 16
    assert "MLA" in {one.topic for one in advise(caches, FP8, 32768, 2.0, None, False)}


def test_scales_that_come_with_tokens_cost_bytes() -> None:
    """token-head: 4 bytes for each token, head and part; block-head: 4 for each block, head and part; channel: 4 for
    each channel of a block."""
    caches = model(LLAMA)
    for granularity, per_block in (
        ("token-head", 16 * 8 * 2 * 4),
        ("block-head", 8 * 2 * 4),
        ("channel", 8 * 2 * 128 * 4),
    ):
        (group,) = capacity.group_sizes(caches, replace(FP8, granularity=granularity))
        assert group.page_bytes == 32768 + per_block
        assert group.scale_bytes == 32 * per_block / 16
    channel = capacity.pool(caches, replace(FP8, granularity="channel"), 40 * GiB, 8192)
    assert channel.tokens < 1.7 * capacity.pool(caches, NATIVE, 40 * GiB, 8192).tokens, (
        "channel scales in f32 are no small thing"
    )


def test_padding_of_unequal_hybrid_groups_follows_the_engines_rule() -> None:
    """52 sliding and 10 full layers make groups of 10: 6 tables for the windows, of which one is padded; 13 and 12 make
    one group of 13 each."""
    types = (["sliding_attention"] * 5 + ["full_attention"]) * 10 + ["sliding_attention"] * 2
    caches = model(LLAMA, num_hidden_layers=62, layer_types=types, sliding_window=1024)
    found = capacity.pool(caches, NATIVE, 8 * GiB, 4096)
    assert (found.block_bytes, found.request) == (10 * 65536, 256 + 6 * 65)
    caches = model(GPT_OSS, num_hidden_layers=25, layer_types=[*GPT_OSS["layer_types"], "full_attention"])
    assert capacity.pool(caches, NATIVE, 8 * GiB, 4096).block_bytes == 13 * 32768


def test_what_cannot_be_planned_is_refused() -> None:
    caches = model(LLAMA)
    for call, message in (
        (lambda: capacity.pool(caches, FP8, 1000, 16), "not even one block"),
        (lambda: capacity.pool(caches, FP8, GiB, 0), "context"),
        (lambda: capacity.group_sizes(caches, replace(FP8, excluded=frozenset((32,)))), "excluded layer 32"),
        (lambda: capacity.group_sizes(caches, replace(FP8, tp=3)), "8 KV heads cannot be shared by 3 ranks"),
        (lambda: capacity.rank_blocks(caches, replace(FP8, tp=3)), "8 KV heads cannot be shared by 3 ranks"),
        (lambda: capacity.rank_blocks(caches, replace(FP8, tp=12)), "8 KV heads cannot be shared by 12 ranks"),
        (lambda: capacity.exclusion_bytes(caches, FP8, 40), "layer 40"),
        (lambda: capacity.rank_blocks(caches, replace(FP8, engine_blocks=64)), "largest"),
        (lambda: capacity.arena_tokens(caches, FP8, 4 * MiB), "too few"),
        (lambda: capacity.line([(1.0, 2.0)]), "two context lengths"),
        (lambda: capacity.prefill_curve([(0.0, 1.0)]), "greater than 0"),
        (lambda: capacity.restore_break_even(1.0, 0.0, 0.0, capacity.prefill_seconds(1.0)), "greater than 0"),
    ):
        with pytest.raises(Invalid, match=message):
            call()


@given(
    layers=st.integers(1, 80),
    heads=st.integers(1, 16),
    width=st.sampled_from((64, 96, 128, 192, 256)),
    block=st.sampled_from((16, 32, 128)),
    context=st.integers(1, 200_000),
    nbytes=st.integers(GiB, 80 * GiB),
)
def test_no_plan_promises_more_than_there_is(
    layers: int, heads: int, width: int, block: int, context: int, nbytes: int
) -> None:
    caches = caches_of({"num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": width}, "m")
    choice = replace(FP8, block=block)
    found = capacity.pool(caches, choice, nbytes, context)
    assert int(found.concurrency) * found.request * found.block_bytes <= nbytes
    assert 0 <= found.remainder < 1 and found.request * block >= context
    assert int(found.concurrency) * context * 2 * layers * heads * width <= nbytes


def test_break_even_of_restore_by_hand() -> None:
    """10,000 tokens a second against 65,536 bytes over 25 GB/s (2.62 us): 2 ms of overhead pay after 2e-3 / (100 -
    2.62) us = 20.5 tokens."""
    found = capacity.restore_break_even(65536, 25e9, 2e-3, capacity.prefill_seconds(10_000))
    assert found == pytest.approx(2e-3 / (1e-4 - 65536 / 25e9), rel=1e-6)
    assert capacity.restore_break_even(65536, 25e9, 0.0, capacity.prefill_seconds(10_000)) == pytest.approx(0, abs=1.1)
    slow = 65536 / 1e-4 / 2  # a link at half of what a prefill saves
    assert capacity.restore_break_even(65536, slow, 2e-3, capacity.prefill_seconds(10_000)) is None
    # With attention's quadratic part even that link pays, from where n * q = 1e-4 on (and a little more for the
    # overhead).
    found = capacity.restore_break_even(65536, slow, 0.0, capacity.prefill_seconds(10_000, 1e-9))
    assert found == pytest.approx(1e-4 / 1e-9, rel=1e-6)


def test_break_even_of_decode_by_hand() -> None:
    """0.9 ms more at the start, 54 % of the slope: (8.9 - 8.0) / (2e-4 * 0.46) tokens."""
    assert capacity.decode_break_even((8.0, 2e-4), (8.9, 1.08e-4)) == pytest.approx(0.9 / 0.92e-4)
    assert capacity.decode_break_even((8.0, 2e-4), (8.0, 1e-4)) == 0
    assert capacity.decode_break_even((8.0, 2e-4), (9.0, 2e-4)) is None
    assert capacity.decode_break_even((8.0, 1e-4), (7.0, 2e-4)) is None
    assert capacity.line([(1000, 8.2), (2000, 8.4), (4000, 8.8)]) == pytest.approx((8.0, 2e-4))
    curve = capacity.prefill_curve([(1000, 0.1 + 0.001), (2000, 0.2 + 0.004), (4000, 0.4 + 0.016)])
    assert [curve(n) for n in (1000, 8000)] == pytest.approx([0.101, 0.864])
    assert capacity.prefill_curve([(1000, 0.1)])(5000) == pytest.approx(0.5)
