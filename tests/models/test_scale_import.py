"""Scales of a checkpoint: every name, shape and format that is understood, every bad value refused by name, nothing
half done.

Checkpoints really written by llm-compressor are in tests/llmcompressor; what they hold is repeated here from
`tests/data`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvtier.cli.app import app, load_commands
from kvtier.errors import Invalid
from kvtier.format import artifact
from kvtier.format.artifact import rank_heads, rank_scales
from kvtier.format.fingerprint import fingerprint
from kvtier.format.identity import f32_hex
from kvtier.format.scale_names import odd, parse
from kvtier.models.scale_import import import_scales
from tests.models.checkpoints import HEADS, Entry, f32, scales, write

load_commands()


def kv(*layers: dict[str, Entry]) -> dict[str, Entry]:
    """Tensors by full name, one dict for each layer, with `N` in the name standing for its number."""
    return {
        name.replace("N", str(layer)): entry for layer, tensors in enumerate(layers) for name, entry in tensors.items()
    }


def refused(root: Path, match: str = ".", **options: Any) -> str:
    with pytest.raises(Invalid, match=match) as failure:
        import_scales(root, **options)
    return str(failure.value)


def test_kvb_04_zero_scales_are_refused_each_by_name(tmp_path: Path) -> None:
    half = scales(**{f"{layer}_{part}": f32(0.0) for layer in (2, 3) for part in "kv"})
    said = refused(write(tmp_path / "half", {"model.safetensors": half}))
    for layer in (2, 3):
        for part in "kv":
            assert (
                f"model.layers.{layer}.self_attn.{part}_scale in model.safetensors (layer {layer}): the value is 0.0"
                in said
            )
    assert "layers.0" not in said and "4 things are wrong, nothing was imported" in said
    zero = {f"{layer}_{part}": f32(0.0) for layer in range(4) for part in "kv"}
    assert refused(write(tmp_path / "zero", {"model.safetensors": scales(**zero)})).count("the value is 0.0") == 8


def test_kvb_04_an_absent_and_an_extra_layer_are_errors_unless_allowed(tmp_path: Path) -> None:
    absent = write(tmp_path / "absent", {"a.safetensors": scales(3)})
    refused(absent, r"layers without any scale: 3 \(leave them native with --allow-missing\)")
    made, notes = import_scales(absent, allow_missing=True)
    assert made.excluded == (3,) and "layers without scales stay native: 3" in notes
    extra = write(tmp_path / "extra", {"a.safetensors": scales(5)})
    said = refused(extra)
    assert "model.layers.4.self_attn.k_scale in a.safetensors: the model has no layer 4" in said
    made, _ = import_scales(extra, allow_extra=True)
    assert {layer for layer, _ in made.scales} == {0, 1, 2, 3}


def test_kvb_04_nothing_is_half_imported(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad", {"model.safetensors": scales(**{"3_v": f32(float("nan"))})})
    runner = CliRunner()
    target = tmp_path / "artifact"
    done = runner.invoke(app, ["import-scales", str(bad), "--save", str(target)])
    assert done.exit_code == 2 and "model.layers.3.self_attn.v_scale" in done.output
    assert not target.exists() and sorted(path.name for path in tmp_path.iterdir()) == ["bad"]
    good = write(tmp_path / "good", {"model.safetensors": scales()})
    assert runner.invoke(app, ["import-scales", str(good), "--save", str(target)]).exit_code == 0
    digest = artifact.load(target).digest
    assert runner.invoke(app, ["import-scales", str(bad), "--save", str(target)]).exit_code == 2
    other = write(tmp_path / "other", {"model.safetensors": scales(**{"0_k": f32(0.5)})})
    assert runner.invoke(app, ["import-scales", str(other), "--save", str(target)]).exit_code == 2, (
        "an artifact is never overwritten"
    )
    assert artifact.load(target).digest == digest


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (np.nan, "nan"),
        (np.inf, "inf"),
        (-np.inf, "-inf"),
        (-1.0, "-1.0"),
        (0.0, "0.0"),
        (1e-45, "1e-45"),
        (3e38, "3e\\+38"),
        (-0.0, "-0.0"),
    ],
)
@pytest.mark.parametrize("part", ["k", "v"])
def test_kvb_05_bad_values_are_refused_by_name(tmp_path: Path, value: float, shown: str, part: str) -> None:
    # the other part of the layer is good
    root = write(tmp_path / "m", {"model.safetensors": scales(**{f"1_{part}": f32(value)})})
    refused(
        root,
        f"model.layers.1.self_attn.{part}_scale in model.safetensors .layer 1.: the value is {shown}: a scale is "
        "finite",
    )
    per_head = {f"{layer}_{p}": f32(*[0.1] * HEADS) for layer in range(4) for p in "kv"} | {
        f"1_{part}": f32(*[0.1] * 5, value, 0.1, 0.1)
    }
    refused(write(tmp_path / "h", {"model.safetensors": scales(**per_head)}), f"the value of head 5 is {shown}")


@pytest.mark.parametrize(
    ("shape", "heads"),
    [
        ([], 1),
        ([1], 1),
        ([1, 1, 1], 1),
        ([8], 8),
        ([8, 1], 8),
        ([8, 1, 1], 8),
        ([1, 8, 1, 1], 8),
        ([7], 0),
        ([2, 4], 0),
        ([8, 2], 0),
        ([0], 0),
    ],
)
def test_kvb_05_shapes(tmp_path: Path, shape: list[int], heads: int) -> None:
    count = int(np.prod(shape))
    entry = f32(*[(i + 1) / 100 for i in range(count)], shape=shape)
    root = write(
        tmp_path / "m",
        {"model.safetensors": scales(**{f"{layer}_{part}": entry for layer in range(4) for part in "kv"})},
    )
    if not heads:
        said = refused(root)
        assert (
            f"shape {shape} is neither one scale nor one for each of 8 KV heads" in said
            and said.count("is neither") == 8
        )
        return
    made, _ = import_scales(root)
    assert made.parts["k"].granularity == ("tensor" if heads == 1 else "head")
    assert made.scales[2, "v"].tobytes() == entry[2]


@pytest.mark.parametrize("dtype", ["I8", "U8", "F64", "F8_E4M3"])
def test_kvb_05_formats_that_hold_no_scales_are_refused(tmp_path: Path, dtype: str) -> None:
    entry = (dtype, [1], bytes([1] * (8 if dtype == "F64" else 1)))
    refused(write(tmp_path / "m", {"model.safetensors": scales(**{"0_k": entry})}), f"F32, F16 or BF16, not {dtype}")


def test_kvb_05_bf16_and_fp16_keep_every_bit(tmp_path: Path) -> None:
    for dtype, raw, value in (
        ("BF16", bytes([0x83, 0x3C]), 0x3C830000),
        ("F16", np.array([0.0173], "<f2").tobytes(), None),
    ):
        root = write(tmp_path / dtype, {"model.safetensors": scales(**{"0_k": (dtype, [1], raw)})})
        made, _ = import_scales(root)
        expected = (
            np.array([value], np.uint32).view(np.float32)
            if value is not None
            else np.frombuffer(raw, "<f2").astype(np.float32)
        )
        assert made.scales[0, "k"].tobytes() == expected.tobytes()


def test_kvb_05_one_part_alone_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "m", {"model.safetensors": scales(**{"2_k": None})})
    refused(root, r"layer 2 has model\.layers\.2\.self_attn\.v_scale in model\.safetensors, but no k_scale")
    refused(root, "no k_scale", allow_missing=True)


def test_kvb_05_a_fused_scale_fills_both_and_is_reported(tmp_path: Path) -> None:
    fused = kv(*[{"model.layers.N.self_attn.kv_scale": f32(0.25)}] * 4)
    made, notes = import_scales(write(tmp_path / "m", {"model.safetensors": fused}))
    assert {float(value[0]) for value in made.scales.values()} == {0.25} and len(made.scales) == 8
    assert sum("one scale for both" in note for note in notes) == 4
    assert any("one scale for both" in str(value) for value in made.report.values())
    unequal = fused | {"model.layers.1.self_attn.k_scale": f32(0.5)}
    refused(
        write(tmp_path / "u", {"a.safetensors": unequal}),
        r"layers\.1\.self_attn\.kv_scale in a.* and model\.layers\.1\.self_attn\.k_scale in a.*differ",
    )
    equal = fused | {"model.layers.1.self_attn.k_scale": f32(0.25)}
    assert import_scales(write(tmp_path / "e", {"a.safetensors": equal}))[0].scales[1, "k"][0] == 0.25


def test_kvb_05_the_scale_of_queries_falls_back_to_k(tmp_path: Path) -> None:
    both = kv(*[{"model.layers.N.self_attn.k_scale": f32(0.25), "model.layers.N.self_attn.v_scale": f32(0.5)}] * 4)
    made, notes = import_scales(write(tmp_path / "m", {"model.safetensors": both}))
    assert made.report["q_scale"] == "k" and any("no q_scale" in note for note in notes)
    made.save(tmp_path / "artifact")
    shown = json.loads(CliRunner().invoke(app, ["artifact", "show", str(tmp_path / "artifact"), "--json"]).stdout)
    assert shown["queries"] == {str(layer): [0.25] for layer in range(4)}
    assert "k_scale" in CliRunner().invoke(app, ["artifact", "show", str(tmp_path / "artifact")]).output
    own = both | kv(*[{"model.layers.N.self_attn.q_scale": f32(0.125)}] * 4)
    made, notes = import_scales(write(tmp_path / "q", {"model.safetensors": own}))
    assert made.report["q_scale.3"] == f32_hex(0.125) and not any("no q_scale" in note for note in notes)
    made.save(tmp_path / "own")
    shown = json.loads(CliRunner().invoke(app, ["artifact", "show", str(tmp_path / "own"), "--json"]).stdout)
    assert shown["queries"]["3"] == [0.125]


@pytest.mark.parametrize(
    "names",
    [
        ("model.layers.N.self_attn.k_scale", "model.layers.N.self_attn.v_scale"),
        ("model.layers.N.self_attn.k_proj.k_scale", "model.layers.N.self_attn.v_proj.v_scale"),
        ("model.layers.N.self_attn.qkv_proj.k_scale", "model.layers.N.self_attn.qkv_proj.v_scale"),
        ("model.layers.N.self_attn.k_cache.scale", "model.layers.N.self_attn.v_cache.scale"),
        ("model.layers.N.self_attn.attn.k_scale", "model.layers.N.self_attn.attn.v_scale"),
        ("model.layers.N.self_attn.k_proj.output_scale", "model.layers.N.self_attn.v_proj.output_scale"),
        ("transformer.h.N.attn.k_scale", "transformer.h.N.attn.v_scale"),
        ("language_model.model.layers.N.self_attn.k_scale", "language_model.model.layers.N.self_attn.v_scale"),
    ],
)
def test_names_that_are_understood(tmp_path: Path, names: tuple[str, str]) -> None:
    tensors = kv(
        *[{names[0]: f32(0.1), names[1]: f32(0.2), "model.layers.N.self_attn.k_proj.weight_scale": f32(7.0)}] * 4
    )
    made, _ = import_scales(write(tmp_path / "m", {"model.safetensors": tensors}))
    assert {key: float(value[0]) for key, value in made.scales.items()} == {
        (layer, part): float(np.float32(value)) for layer in range(4) for part, value in (("k", 0.1), ("v", 0.2))
    }


def test_names_that_look_like_scales_and_are_not_understood_are_refused(tmp_path: Path) -> None:
    for name in (
        "model.layers.0.mixer.k_scale",
        "k_scale",
        "model.layers.0.self_attn.k_proj.v_scale",
        "model.layers.00.self_attn.k_scale",
    ):
        assert odd(name) and parse(name) is None
        refused(
            write(tmp_path / name, {"model.safetensors": scales() | {name: f32(0.5)}}),
            f"{name} in model.safetensors looks like a KV scale",
        )
    for name in (
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.layers.0.self_attn.o_proj.input_scale",
        "model.layers.0.self_attn.k_proj.weight",
    ):
        assert not odd(name) and parse(name) is None


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    twice = scales() | {"model.layers.1.self_attn.k_proj.k_scale": f32(0.02)}
    assert import_scales(write(tmp_path / "same", {"model.safetensors": twice}))[0].scales[1, "k"][0] == np.float32(
        0.02
    )
    twice["model.layers.1.self_attn.k_proj.k_scale"] = f32(0.021)
    refused(write(tmp_path / "other", {"model.safetensors": twice}), "layer 1. differ")
    refused(
        write(tmp_path / "files", {"a.safetensors": scales(), "b.safetensors": scales(1)}),
        "in b.safetensors stands in a.safetensors as well",
    )


def test_zero_points(tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.k_zero_point"
    made, notes = import_scales(write(tmp_path / "m", {"model.safetensors": scales() | {name: ("I8", [1], b"\0")}}))
    assert len(made.scales) == 8 and any(name in note for note in notes)
    refused(
        write(tmp_path / "n", {"model.safetensors": scales() | {name: ("I8", [1], b"\3")}}),
        f"{name} in .* zero point other than 0",
    )


def test_scales_may_lie_in_several_files_beside_weights(tmp_path: Path) -> None:
    all_ = scales()
    files = {
        f"model-0000{i}-of-00002.safetensors": dict(list(all_.items())[i - 1 :: 2])
        | {f"w{i}": ("BF16", [64, 64], bytes(8192))}
        for i in (1, 2)
    }
    assert len(import_scales(write(tmp_path / "m", files))[0].scales) == 8


def test_granularity_is_one_per_part(tmp_path: Path) -> None:
    head = f32(*[0.1] * HEADS)
    root = write(tmp_path / "m", {"model.safetensors": scales(**{f"{layer}_k": head for layer in range(4)})})
    made, _ = import_scales(root)
    assert (made.parts["k"].granularity, made.parts["v"].granularity) == ("head", "tensor")
    refused(
        write(tmp_path / "n", {"model.safetensors": scales(**{"0_k": head})}),
        "k_scale is one number in layers 1-3 and one for each head",
    )


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"num_bits": 4, "type": "float"}, "num_bits is 4"),
        ({"num_bits": 8, "type": "int"}, "type is 'int'"),
        ({"dynamic": True}, "dynamic is True"),
        ({"symmetric": False}, "symmetric is False"),
        ({"strategy": "channel"}, "strategy is 'channel'"),
    ],
)
def test_schemes_of_other_kinds_are_refused(tmp_path: Path, scheme: dict[str, Any], message: str) -> None:
    root = write(tmp_path / "m", {"model.safetensors": scales()}, quantization_config={"kv_cache_scheme": scheme})
    refused(root, f"config.json: kv_cache_scheme.{message}")


def test_other_refusals(tmp_path: Path) -> None:
    root = write(tmp_path / "nvfp4", {"model.safetensors": scales()})
    (root / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "NVFP4"}}')
    refused(root, "kv_cache_quant_algo is 'NVFP4'")
    refused(write(tmp_path / "none", {"model.safetensors": {"w": f32(1.0)}}), "no KV scales in any safetensors file")
    refused(write(tmp_path / "empty", {}), "0 safetensors files")
    refused(write(tmp_path / "mla", {"model.safetensors": scales()}, kv_lora_rank=512, qk_rope_head_dim=64), "MLA")
    ones = {f"{layer}_{part}": f32(1.0) for layer in range(4) for part in "kv"}
    root = write(tmp_path / "ones", {"model.safetensors": scales(**ones)})
    refused(root, "every scale is 1.0.*--uncalibrated")
    assert import_scales(root, uncalibrated=True)[0].uncalibrated


def test_an_edited_scale_of_any_name_changes_the_fingerprint(tmp_path: Path) -> None:
    prints = set()
    for number, value in enumerate((0.25, 0.5)):
        weights = {"w": ("U8", [4 << 20], bytes(4 << 20))}
        tensors = (
            weights | {"model.layers.0.self_attn.k_cache.scale": f32(value)} | {"x": ("U8", [4 << 20], bytes(4 << 20))}
        )
        prints.add(fingerprint(write(tmp_path / str(number), {"model.safetensors": tensors})))
    assert len(prints) == 2


def test_kvb_05_ranks_take_their_heads_and_never_a_cut_of_one(tmp_path: Path) -> None:
    values = [float(np.float32((i + 1) / 100)) for i in range(8)]
    entry = f32(*values)
    root = write(
        tmp_path / "m",
        {"model.safetensors": scales(**{f"{layer}_{part}": entry for layer in range(4) for part in "kv"})},
    )
    made, _ = import_scales(root)
    for tp, share in ((1, 8), (2, 4), (8, 1)):
        for rank in range(tp):
            found = rank_scales(made, tp, rank)[3, "k"]
            assert found.tolist() == values[rank * share : (rank + 1) * share]
    assert rank_scales(made, 2, 1)[0, "v"].tolist() == values[4:]
    for rank in range(16):
        assert rank_scales(made, 16, rank)[0, "k"].tolist() == [values[rank // 2]]
    for tp, rank in ((3, 0), (12, 0), (2, 2), (0, 0)):
        with pytest.raises(Invalid):
            rank_heads(8, tp, rank)
    assert rank_scales(made, 1, 0).keys() == made.scales.keys()
    single, _ = import_scales(write(tmp_path / "t", {"model.safetensors": scales()}))
    assert rank_scales(single, 16, 5)[0, "k"].tolist() == [float(np.float32(0.02))], (
        "one for the tensor is one for every rank"
    )
    made.save(tmp_path / "artifact")
    shown = CliRunner().invoke(
        app, ["artifact", "show", str(tmp_path / "artifact"), "--tp", "2", "--rank", "1", "--json"]
    )
    assert json.loads(shown.stdout)["scales"]["0.k"] == values[4:]
