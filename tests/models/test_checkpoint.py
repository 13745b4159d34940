"""The description of a namespace from a checkpoint's files: formats, scales, windows, rotary settings, what is refused.

That it equals what a real engine says is in tests/connectors/vllm/test_engine.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import Invalid
from kvtier.format.identity import Description, f32_hex, f64_hex
from kvtier.models.checkpoint import Assumed, describe, settings_of
from tests.models.checkpoints import HEADS, f32, scales, write

FP8_SCHEME = {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}}


def described(root: Path, assumed: Assumed | None = None) -> Description:
    return describe(str(root), assumed or Assumed())[0]


def test_a_native_model(tmp_path: Path) -> None:
    root = write(tmp_path / "m", {"model.safetensors": {}}, dtype="float16", sliding_window=512)
    found, notes = describe(str(root), Assumed(block_tokens=32, engine_blocks=4))
    (group,) = found.layout.groups
    assert (group.heads, group.engine_tokens, group.engine_blocks, group.window) == (HEADS, 32, 4, 512)
    assert {(part.name, part.width, part.dtype) for layer in group.layers for part in layer.parts} == {
        ("k", 64, "fp16"),
        ("v", 64, "fp16"),
    }
    assert (found.rule, found.backend, found.hashing.block_tokens) == ("none", "K | V (plain)", 32) and not found.scales
    assert "blocks of 32 tokens, 4 to a kvtier block" in notes[0] and any("not known" in note for note in notes)
    unused = write(tmp_path / "n", {"model.safetensors": {}}, sliding_window=512, use_sliding_window=False)
    assert described(unused).layout.groups[0].window is None


def test_scales_make_the_identity(tmp_path: Path) -> None:
    root = write(tmp_path / "m", {"model.safetensors": scales()}, **FP8_SCHEME)
    found = described(root)
    assert found.rule == "checkpoint" and found.backend == "K | V (FLASH_ATTN)"
    assert dict(found.scales) == {
        f"{n}.{part}": f32_hex(0.02 if part == "k" else 0.03) for n in range(4) for part in "kv"
    }
    write(root, {"model.safetensors": scales(**{"2_k": f32(0.021)})}, **FP8_SCHEME)
    assert described(root).digest != found.digest
    write(root, {"model.safetensors": scales(**{"2_k": None})}, **FP8_SCHEME)
    assert described(root).scales["2.k"] == f32_hex(1.0), "a missing scale is 1, as in vLLM"
    plain = write(tmp_path / "plain", {"model.safetensors": {}})
    assert set(described(plain, Assumed(kv_dtype="fp8")).scales.values()) == {f32_hex(1.0)}


def test_scales_per_head_are_one_on_a_cpu(tmp_path: Path) -> None:
    values = [0.01 * n for n in range(1, HEADS + 1)]
    tensors = scales(2, **{f"{n}_{part}": f32(*values) for n in range(2) for part in "kv"})
    root = write(tmp_path / "m", {"model.safetensors": tensors}, 2, **FP8_SCHEME)
    gpu, cpu = described(root), described(root, Assumed(cpu="amx"))
    assert gpu.scales["1.v"] == "".join(map(f32_hex, values)) and cpu.scales["1.v"] == f32_hex(values[-1])
    assert {part.granularity for part in gpu.layout.groups[0].layers[0].parts} == {"head"}
    assert {part.granularity for part in cpu.layout.groups[0].layers[0].parts} == {"tensor"}
    assert cpu.packing == f"CPU_ATTN amx, e4m3fn, {HEADS} heads of 64, 16 tokens"


@pytest.mark.parametrize(
    ("config", "assumed", "message"),
    [
        ({"kv_lora_rank": 512}, Assumed(), "kv_lora_rank: the caches of such a model differ"),
        ({"layer_types": ["sliding_attention"] * 4}, Assumed(), "layer_types: the caches of such a model differ"),
        ({"text_config": {"a": 1}}, Assumed(), "text_config"),
        ({"num_hidden_layers": "many"}, Assumed(), "how many layers and heads"),
        ({"dtype": "float8"}, Assumed(), "float8 is none of"),
        ({}, Assumed(kv_dtype="fp8_per_token_head"), "cannot be told from a checkpoint"),
    ],
)
def test_what_only_an_engine_can_tell_is_refused(
    tmp_path: Path, config: dict[str, Any], assumed: Assumed, message: str
) -> None:
    root = write(tmp_path / "m", {"model.safetensors": {}}, **config)
    with pytest.raises(Invalid, match=message):
        described(root, assumed)


def test_files_that_are_no_configuration_are_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "m", {"model.safetensors": {}})
    for text, message in (("[1]", r"config\.json: not an object"), ("{", r"config\.json: not JSON")):
        (root / "config.json").write_text(text)
        with pytest.raises(Invalid, match=message):
            described(root)


def test_rotary_settings_have_one_form() -> None:
    old = settings_of({"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 4096, {"dtype": "d"})
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    assert settings_of(new, 4096, {"dtype": "d"}) == old
    assert old == {"rope_type": "linear", "factor": f64_hex(2.0), "rope_theta": f64_hex(10000.0), "model.dtype": "d"}
    dynamic = {"rope_parameters": {"full": {"rope_type": "dynamic", "rope_theta": 1e6}}}
    assert settings_of(dynamic, 8192, {})["max_position"] == 8192, "this kind depends on the longest context served"
    assert settings_of({}, None, {}) == {"rope_type": "default", "rope_theta": f64_hex(10000.0)}
    factors = [{"rope_parameters": {"rope_type": "x", "long_factor": [1.0, by]}} for by in (2.0, 3.0)]
    assert settings_of(factors[0], 1, {}) != settings_of(factors[1], 1, {}), "every factor counts"


def test_assumptions_are_part_of_the_identity(tmp_path: Path) -> None:
    root = write(tmp_path / "m", {"model.safetensors": {}})
    base = Assumed()
    others = [
        replace(base, seed="7"),
        replace(base, algorithm="xxhash"),
        replace(base, block_tokens=32),
        replace(base, physical="LBNHC"),
    ]
    assert len({described(root, one).digest for one in (base, *others)}) == 1 + len(others)
