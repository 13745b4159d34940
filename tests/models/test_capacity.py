"""`kvtier plan`: sizes and capacities worked out by hand for four models, break-even lengths, advice, and what is
refused.

The comparison with an engine's own report is in tests/connectors/vllm/test_capacity.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvtier.cli.app import app, load_commands
from kvtier.errors import Invalid
from kvtier.format.artifact import Artifact, PartFormat
from kvtier.models import capacity
from kvtier.models.advice import advise, guard, uncalibrated
from kvtier.models.capacity import Choice
from kvtier.models.model_config import ModelCaches, caches_of, read_caches

load_commands()

GiB, MiB, KiB = 2**30, 2**20, 2**10
LLAMA: dict[str, Any] = {  # Llama-3.1-8B
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
GPT_OSS: dict[str, Any] = {  # gpt-oss-20b
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
}
GEMMA: dict[str, Any] = {  # gemma-2-9b, whose config does not list its layers
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "hidden_size": 3584,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}
DEEPSEEK: dict[str, Any] = {  # DeepSeek-V2-Lite
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}
FP8 = Choice()
NATIVE = Choice(dtype="bf16", granularity="none")


def model(config: dict[str, Any], **changes: Any) -> ModelCaches:
    return caches_of({**config, **changes}, "m")


# --- by hand


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


# --- what a config says


def test_a_config_is_read_or_refused_by_name(tmp_path: Path) -> None:
    assert {layer.window for layer in model(LLAMA, sliding_window=4096, use_sliding_window=False).layers} == {None}
    assert {layer.window for layer in model(LLAMA, sliding_window=4096).layers} == {4096}
    assert [layer.window for layer in model(LLAMA, sliding_window=512, sliding_window_pattern=4).layers][:5] == [
        512,
        512,
        512,
        None,
        512,
    ]
    assert [
        layer.window
        for layer in model(GPT_OSS, layer_types=["chunked_attention"] * 24, attention_chunk_size=8192).layers
    ][:1] == [8192]
    assert model(LLAMA, torch_dtype="torch.float16").dtype == "fp16"
    assert model({"text_config": LLAMA, "vision_config": {}}).layers == model(LLAMA).layers
    assert len(model(LLAMA, num_kv_shared_layers=10).layers) == 22
    qwen = model(LLAMA, layer_types=["linear_attention"] * 3 * 8 + ["full_attention"] * 8)
    assert (
        len(qwen.cached) == 8 and sum(group.payload_bytes for group in capacity.group_sizes(qwen, NATIVE)) == 8 * 4096
    )
    wide = model(
        LLAMA,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=2,
        layer_types=GPT_OSS["layer_types"] + ["full_attention"] * 8,
        sliding_window=64,
    )
    assert (wide.layers[0].widths, wide.layers[1].widths, wide.layers[1].heads) == ((256, 256), (512, 512), 2)
    for config, message in (
        ({**LLAMA, "num_hidden_layers": None}, "num_hidden_layers"),
        ({**LLAMA, "torch_dtype": "float8"}, "dtype"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "32 layers"),
        ({**LLAMA, "layer_types": ["cross_attention"] * 32}, "cross_attention"),
        ({**LLAMA, "layer_types": ["mamba"] * 32}, "no layer keeps bytes"),
        ({**LLAMA, "hybrid_override_pattern": "M*M*"}, "hybrid_override_pattern"),
        ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads"),
    ):
        with pytest.raises(Invalid, match=message.replace("*", r"\*")):
            caches_of(config, "m")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(Invalid, match=r"config\.json: not an object"):
        read_caches(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_caches(tmp_path).model == tmp_path.name


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


# --- break-even lengths


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


# --- advice and the command


def bundle(value: float = 0.5, position: int | None = 511, excluded: tuple[int, ...] = (31,)) -> Artifact:
    form = PartFormat("e4m3fn", "tensor")
    scales = {
        (layer, part): np.array([value], np.float32) for layer in range(32) for part in "kv" if layer not in excluded
    }
    return Artifact("m", "a" * 40, {"k": form, "v": form}, "amax", 1, "plain", "none", scales, excluded, position)


def test_the_advice_follows_from_the_numbers() -> None:
    caches = model(LLAMA)
    assert {one.topic for one in advise(caches, FP8, 2048, 2.0, None, False)} == {"short contexts"}
    assert {one.topic for one in advise(caches, FP8, 65536, 2.0, 9000.0, True)} == {"long contexts"}
    assert "at no length" in advise(caches, FP8, 8192, 2.0, None, True)[0].found
    assert not advise(caches, NATIVE, 2048, 1.0, None, False)
    assert "effective ratio" in {one.topic for one in advise(caches, FP8, 16384, 1.2, None, False)}
    states = model(LLAMA, layer_types=["linear_attention"] * 24 + ["full_attention"] * 8)
    assert "24 of 32" in next(
        one.found for one in advise(states, FP8, 16384, 2.0, None, False) if one.topic == "recurrent layers"
    )


def test_the_calibrated_length_guard() -> None:
    assert guard(bundle(position=511), 512) is None
    assert guard(bundle(position=511), 2048).found == "calibrated on 512 tokens, used up to 2,048"  # type: ignore[union-attr]
    assert "nobody knows" in guard(bundle(position=None), 1).found  # type: ignore[union-attr]
    assert uncalibrated(bundle()) is None
    assert "nothing was calibrated" in uncalibrated(bundle(1.0)).found  # type: ignore[union-attr]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"TERM": "dumb"})


def test_the_command_plans(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    bundle().save(tmp_path / "artifact")
    common = (tmp_path, "--kv-bytes", "40GiB", "--context", "1000,8192", "--block-size", "16")
    done = run(
        *common,
        "--arena",
        "64GiB",
        "--redis",
        "10GiB",
        "--link",
        "25",
        "--prefill",
        "4096:0.4",
        "--artifact",
        tmp_path / "artifact",
        "--json",
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    blocks = 40 * GiB // (16 * (31 * 2048 + 4096))  # layer 31 is native
    assert [row["fp8"]["sequences"] for row in found["capacity"]] == [blocks // 63, blocks // 512] == [630, 77]
    assert found["capacity"][1]["native"]["sequences"] == 40
    assert found["capacity"][1]["ratio"] == pytest.approx(131072 / (65536 + 2048), rel=1e-3), (
        "the artifact's excluded layer counts"
    )
    assert found["exclusion_bytes_per_token"]["0"] == 2048 and found["exclusion_bytes_per_token"]["31"] == 0
    assert found["restore"]["fp8"] < found["restore"]["native"]
    assert [tier["tier"] for tier in found["tiers"]] == ["arena", "redis"]
    assert found["decode"] is None
    assert "calibrated on 512 tokens, used up to 8,192" in [one["found"] for one in found["advice"]]
    done = run(*common, "--itl-native", "1000:8.0,2000:9.0", "--itl-fp8", "1000:8.4,2000:8.9")
    assert done.exit_code == 0 and "FP8 decode instead of native: pays from 1,800 tokens on" in done.output
    assert "restore instead of recompute: not worked out; give --link and --prefill" in done.output


def test_the_command_finds_the_memory_for_kv(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert "--weights" in run(tmp_path, "--memory", "80GiB").output
    done = run(tmp_path, "--memory", "80GiB", "--weights", "16GiB", "--tp", "2", "--reserve", "1GiB", "--json")
    assert json.loads(done.stdout)["pool_bytes"] == 72 * GiB - 8 * GiB - GiB
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(10 * GiB)
    done = run(tmp_path, "--memory", "24GiB", "--json", "--utilization", "1")
    assert json.loads(done.stdout)["pool_bytes"] == 24 * GiB - 10 * GiB - 2 * GiB
    for wrong in (
        ("--memory", "8GiB"),
        (),
        ("--kv-bytes", "1GiB", "--context", "x"),
        ("--kv-bytes", "1GiB", "--prefill", "3", "--link", "1"),
    ):
        assert run(tmp_path, *wrong).exit_code == 2
