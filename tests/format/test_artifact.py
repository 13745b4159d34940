"""The KV artifact and the reading of safetensors files: whole or refused, from raw bytes, every refusal naming the
place."""

from __future__ import annotations

import json
import os
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import Invalid
from kvtier.format import artifact as module
from kvtier.format.artifact import Artifact, PartFormat, diff, load
from kvtier.format.identity import HashScheme
from kvtier.format.layout import Layer, Layout, Part, attention
from kvtier.format.tensors import read_safetensors
from tests.format.test_tensors import entry, safetensors_bytes

HASHING = HashScheme("sha256_cbor", "0", 16)


def scales(layers: int = 3, heads: int = 2) -> dict[tuple[int, str], np.ndarray]:
    return {
        (layer, part): np.array(
            [0.01 * (1 + layer) + 0.001 * head + (part == "v") for head in range(heads)], np.float32
        )
        for layer in range(layers)
        for part in ("k", "v")
    }


def build(**changes: Any) -> Artifact:
    arguments: dict[str, Any] = {
        "model": "org/model",
        "revision": "a" * 40,
        "parts": {"k": PartFormat("e4m3fn", "head"), "v": PartFormat("e4m3fn", "head")},
        "rule": "amax",
        "codec": 1,
        "backend": "plain-1",
        "calibration": "topics-1",
        "scales": scales(),
        "excluded": (3,),
        "calibrated_position": 2047,
        "report": {"kl": "0.0144", "tokens": 2048},
    }
    return Artifact(**{**arguments, **changes})


# --- saving and loading


def test_round_trip_is_exact_and_canonical(tmp_path: Path) -> None:
    odd = {**scales(), (0, "k"): np.array([1e-45, 3.4028235e38], np.float32)}
    saved = build(scales=odd)
    saved.save(tmp_path / "new" / "artifact")
    found = load(tmp_path / "new" / "artifact")
    assert found == saved and found.digest == saved.digest and hash(found) == hash(saved)
    assert diff(saved, found) == []
    for key, values in odd.items():
        assert found.scales[key].tobytes() == values.tobytes()
    raw = (tmp_path / "new" / "artifact" / "manifest.json").read_bytes()
    assert raw == saved.canonical and json.loads(raw)["scales"] == saved.scales_digest
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["artifact"], "nothing is left aside"
    assert sorted(p.name for p in (tmp_path / "new" / "artifact").iterdir()) == ["manifest.json", "scales.safetensors"]


def test_no_number_with_a_fraction_stands_in_the_manifest() -> None:
    def refuse(text: str) -> None:
        raise AssertionError(f"a float in the manifest: {text}")

    json.loads(build().canonical, parse_float=refuse, parse_constant=refuse)


def test_an_artifact_without_static_scales_round_trips(tmp_path: Path) -> None:
    form = PartFormat("e4m3fn", "block-head")
    saved = build(parts={"k": form, "v": form}, scales={}, excluded=(), calibrated_position=None, report={})
    saved.save(tmp_path / "a")
    assert load(tmp_path / "a") == saved


def test_saving_again_is_a_no_op_and_another_artifact_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()  # an empty directory may be filled
    build().save(tmp_path / "a")
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "a").iterdir()}
    build().save(tmp_path / "a")
    with pytest.raises(Invalid, match="another artifact"):
        build(codec=2).save(tmp_path / "a")
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "a").iterdir()} == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(Invalid, match="cannot be created"):
        build().save(tmp_path / "file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "file"]


@pytest.mark.parametrize("failing", ["scales.safetensors", "manifest.json"])
def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    write = module._write

    def full(path: Path, raw: bytes) -> None:
        if path.name == failing:
            path.write_bytes(raw[: len(raw) // 2])
            raise OSError(28, "No space left on device")
        write(path, raw)

    monkeypatch.setattr(module, "_write", full)
    with pytest.raises(OSError, match="No space"):
        build().save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_the_digest_does_not_depend_on_the_order_of_tensors_in_the_file(tmp_path: Path) -> None:
    saved = build()
    saved.save(tmp_path / "a")
    path = tmp_path / "a" / "scales.safetensors"
    before = path.read_bytes()
    header: dict[str, Any] = {"__metadata__": {"written_by": "another program"}}
    data = b""
    for name, tensor in sorted(read_safetensors(path).items(), reverse=True):
        header[name] = entry("F32", list(tensor.shape), len(data), len(data) + len(tensor.data))
        data += tensor.data
    path.write_bytes(safetensors_bytes(header, data))
    assert path.read_bytes() != before
    assert load(tmp_path / "a") == saved


CHANGES: dict[str, Any] = {
    "model": "org/other",
    "revision": "b" * 40,
    "parts": {"k": PartFormat("e4m3fn", "head"), "v": PartFormat("e5m2", "head")},
    "rule": "percentile",
    "codec": 2,
    "backend": "plain-2",
    "calibration": "topics-2",
    "scales": {**scales(), (2, "v"): np.nextafter(scales()[2, "v"], np.float32(9), dtype=np.float32)},
    "excluded": (3, 4),
    "calibrated_position": 2048,
    "report": {"kl": "0.0145", "tokens": 2048},
}


def test_every_field_is_in_the_digest_and_in_the_difference() -> None:
    assert set(CHANGES) == {field.name for field in dataclass_fields(Artifact)}, "a field this test does not change"
    digests = {build().digest}
    for name, value in CHANGES.items():
        changed = build(**{name: value})
        assert diff(build(), changed), name
        digests.add(changed.digest)
    assert len(digests) == len(CHANGES) + 1


def test_a_difference_is_told_in_words() -> None:
    stored = build(scales={(17, "k"): np.array([1, 1, 0.0312], np.float32), (17, "v"): np.ones(3, np.float32)})
    live = build(scales={(17, "k"): np.ones(3, np.float32), (17, "v"): np.ones(3, np.float32)})
    assert [str(d) for d in diff(stored, live)] == ["k_scale of layer 17, head 2: 0.0311999992 stored, 1 live"]
    assert [str(d) for d in diff(build(), build(revision="b" * 40, excluded=()))] == [
        "excluded: [3] stored, [] live",
        f"revision: {'a' * 40} stored, {'b' * 40} live",
    ]
    lacking = {key: value for key, value in scales().items() if key[0] != 2}
    assert [str(d) for d in diff(build(), build(scales=lacking))] == [
        "k_scale of layer 2: 2 values stored, absent live",
        "v_scale of layer 2: 2 values stored, absent live",
    ]


def test_an_artifact_cannot_be_changed_through_what_it_was_made_from() -> None:
    mine = scales()
    report = {"kl": "1"}
    made = build(scales=mine, report=report)
    digest = made.digest
    mine[0, "k"][0] = 99
    report["kl"] = "2"
    assert made.digest == digest
    with pytest.raises(ValueError, match="read-only"):
        made.scales[0, "k"][0] = 1
    with pytest.raises(TypeError):
        made.report["kl"] = "3"  # type: ignore[index]


# --- bad scales


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0])
def test_a_scale_that_is_not_finite_and_positive_is_named(tmp_path: Path, bad: float) -> None:
    build().save(tmp_path / "a")
    broken = {**scales(), (1, "v"): np.array([0.5, bad], np.float32)}
    with pytest.raises(Invalid, match="v_scale of layer 1, head 1 must be finite and greater than 0"):
        build(scales=broken)
    path = tmp_path / "a" / "scales.safetensors"
    path.write_bytes(safetensors_bytes(*raw_scales(broken)))
    with pytest.raises(Invalid, match=r"scales\.safetensors: v_scale of layer 1, head 1 must be finite"):
        load(tmp_path / "a")


def raw_scales(
    values: dict[tuple[int, str], np.ndarray], rename: dict[str, str] | None = None, dtype: str = "F32"
) -> tuple[dict[str, Any], bytes]:
    header, data = {}, b""
    for (layer, part), vector in values.items():
        raw = vector.astype("<f4").tobytes()
        name = f"layers.{layer}.{part}_scale"
        header[(rename or {}).get(name, name)] = entry(dtype, list(vector.shape), len(data), len(data) + len(raw))
        data += raw
    return header, data


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({k: v for k, v in scales().items() if k != (2, "v")}, "v_scale of layer 2 is missing"),
        (
            {**scales(), (3, "k"): np.ones(2, np.float32), (3, "v"): np.ones(2, np.float32)},
            "layer 3: the layer is excluded",
        ),
        ({**scales(), (0, "q"): np.ones(2, np.float32)}, "q has no static scales"),
        ({**scales(), (0, "v"): np.ones(3, np.float32)}, "unequal numbers of heads"),
        ({**scales(), (0, "v"): np.ones((2, 1), np.float32)}, "vector of f32"),
        ({**scales(), (0, "v"): np.ones(0, np.float32)}, "vector of f32"),
        ({**scales(), (0, "v"): np.ones(2, np.float64)}, "vector of f32"),
        ({**scales(), (70000, "k"): np.ones(2, np.float32)}, "from 0 to 65535"),
        ({}, "no scales"),
    ],
)
def test_scales_that_do_not_fit_are_refused(values: dict[tuple[int, str], np.ndarray], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        build(scales=values)


def test_a_tensor_scale_is_one_number() -> None:
    forms = {"k": PartFormat("e4m3fn", "tensor"), "v": PartFormat("e4m3fn", "head")}
    mixed = {(0, "k"): np.ones(1, np.float32), (0, "v"): np.ones(4, np.float32)}
    assert build(parts=forms, scales=mixed).scales[0, "k"].size == 1
    with pytest.raises(Invalid, match="must be the one of the tensor"):
        build(parts=forms, scales={**mixed, (0, "k"): np.ones(4, np.float32)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "model"),
        ({"model": "a\nb"}, "model"),
        ({"model": "x" * 1025}, "model"),
        ({"revision": "main"}, "revision must be a commit"),
        ({"parts": {}}, "at least one part"),
        ({"parts": {"k scale": PartFormat("e4m3fn", "head")}}, "identifier"),
        ({"codec": True}, "codec"),
        ({"codec": 65536}, "codec"),
        ({"excluded": (4, 3)}, "ascending"),
        ({"excluded": (3, 3)}, "ascending"),
        ({"excluded": (-1,)}, "excluded layer"),
        ({"calibrated_position": -1}, "calibrated_position"),
        ({"calibrated_position": 1.0}, "calibrated_position"),
        ({"report": {"kl": 0.5}}, r"report\.kl must be text or an integer"),
        ({"report": {"kl": True}}, r"report\.kl"),
        ({"report": {"": "x"}}, "report field"),
        ({"report": {f"field{i}": "x" * 1024 for i in range(300)}}, "at most 262144 bytes"),
    ],
)
def test_fields_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        build(**changes)


@pytest.mark.parametrize(
    ("dtype", "granularity"), [("e4m3fn", "none"), ("bf16", "head"), ("int8", "head"), ("e4m3fn", "row"), (8, "head")]
)
def test_part_formats_are_checked(dtype: Any, granularity: str) -> None:
    with pytest.raises(Invalid):
        PartFormat(dtype, granularity)


# --- manifests that save would not have written


def broken_manifest(directory: Path, change: Any) -> None:
    build().save(directory)
    path = directory / "manifest.json"
    raw = path.read_bytes()
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        data = json.loads(raw)
        change(data)
        path.write_bytes(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (b"", "not JSON"),
        (b"\x80\x04K\x01.", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "must be an object"),
        (b"{}", "lacks format"),
        (b"x" * (256 * 1024 + 1), "more than 262144 bytes"),
        (lambda d: d.pop("rule", None) or d["encoding"].pop("rule"), "encoding lacks rule"),
        (lambda d: d.update(extra=1), "unknown fields: extra"),
        (lambda d: d.update(format=2), "format 1, not 2"),
        (lambda d: d.update(format=True), "format 1, not True"),
        (lambda d: d.update(report=[]), "report must be an object"),
        (lambda d: d["encoding"].update(parts=[]), "parts must be an object"),
        (lambda d: d["encoding"]["parts"].update(k=3), "format of k must be an object"),
        (lambda d: d["report"].update(kl=0.5), "report.kl"),
        (lambda d: d.update(model=5), "model"),
        (lambda d: d.update(excluded=3), "excluded must be a list"),
        (lambda d: d.update(excluded=["3"]), "excluded layer"),
        (lambda d: d.update(scales="0" * 64), "belongs to scales with digest"),
        (lambda d: d.update(scales=None), "belongs to scales with digest"),
    ],
)
def test_a_broken_manifest_is_refused_by_name(tmp_path: Path, change: Any, message: str) -> None:
    broken_manifest(tmp_path / "a", change)
    with pytest.raises(Invalid, match=message) as caught:
        load(tmp_path / "a")
    assert "manifest.json" in str(caught.value)


@pytest.mark.parametrize(
    "rewrite", [lambda raw: raw + b"\n", lambda raw: raw.replace(b":", b": ", 1), lambda raw: b'{"codec":1,' + raw[1:]]
)
def test_a_manifest_has_one_form(tmp_path: Path, rewrite: Any) -> None:
    build().save(tmp_path / "a")
    path = tmp_path / "a" / "manifest.json"
    path.write_bytes(rewrite(path.read_bytes()))
    with pytest.raises(Invalid, match=r"manifest\.json"):
        load(tmp_path / "a")


def test_one_changed_scale_in_the_file_is_refused(tmp_path: Path) -> None:
    build().save(tmp_path / "a")
    path = tmp_path / "a" / "scales.safetensors"
    path.write_bytes(safetensors_bytes(*raw_scales({**scales(), (0, "k"): np.array([0.5, 0.5], np.float32)})))
    with pytest.raises(Invalid, match=r"belongs to scales with digest .*, those in scales\.safetensors have"):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.k_scales",
        "layers.00.k_scale",
        "layers.+1.k_scale",
        "layers.0._scale",
        "0.k",
        "",
        "layers.123456.k_scale",
    ],
)
def test_unknown_tensor_names_are_refused(tmp_path: Path, name: str) -> None:
    build().save(tmp_path / "a")
    path = tmp_path / "a" / "scales.safetensors"
    path.write_bytes(safetensors_bytes(*raw_scales(scales(), {"layers.0.k_scale": name})))
    with pytest.raises(Invalid, match=r"scales\.safetensors: tensor .* is not called"):
        load(tmp_path / "a")


def test_only_f32_vectors_are_scales(tmp_path: Path) -> None:
    build().save(tmp_path / "a")
    path = tmp_path / "a" / "scales.safetensors"
    for dtype, shape, nbytes in (("BF16", [2], 4), ("F32", [2, 1], 8), ("F32", [], 4), ("I32", [2], 8)):
        path.write_bytes(safetensors_bytes({"layers.0.k_scale": entry(dtype, shape, 0, nbytes)}, b"\x3f" * nbytes))
        with pytest.raises(Invalid, match=r"layers\.0\.k_scale must be a vector of F32, not " + dtype):
            load(tmp_path / "a")


def test_what_is_missing_or_not_a_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"manifest\.json: No such file"):
        load(tmp_path / "nothing")
    build().save(tmp_path / "a")
    path = tmp_path / "a" / "scales.safetensors"
    path.unlink()
    with pytest.raises(Invalid, match=r"scales\.safetensors: No such file"):
        load(tmp_path / "a")
    os.mkfifo(path)  # opening it would wait for a writer for ever
    with pytest.raises(Invalid, match="not a regular file"):
        load(tmp_path / "a")
    path.unlink()
    path.mkdir()
    with pytest.raises(Invalid, match="not a regular file"):
        load(tmp_path / "a")
    with pytest.raises(Invalid, match="embedded null"):
        load("a\0b")


# --- the description that follows from an artifact


def test_describe_carries_everything_over() -> None:
    layout = attention(4, 2, 64, engine_tokens=16, excluded=(3,))
    description = build().describe(layout, HASHING, rope={"theta": 10000}, physical="NHD", packing="avx512")
    assert description.artifact == build().digest
    assert description.scales["2.v"] == "".join(f"{bits:08x}" for bits in build().scales[2, "v"].view(np.uint32))
    assert (description.model, description.revision, description.rule, description.codec, description.backend) == (
        "org/model",
        "a" * 40,
        "amax",
        1,
        "plain-1",
    )
    assert (dict(description.rope), description.physical, description.packing) == ({"theta": 10000}, "NHD", "avx512")
    changed = build(report={}).describe(layout, HASHING)
    assert changed.digest != build().describe(layout, HASHING).digest


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (attention(4, 2, 64, engine_tokens=16), "k of layer 3: the layout says e4m3fn head, the artifact native none"),
        (
            attention(4, 2, 64, engine_tokens=16, excluded=(2, 3)),
            "k of layer 2: the layout says bf16 none, the artifact e4m3fn head",
        ),
        (attention(4, 2, 64, engine_tokens=16, excluded=(3,), granularity="tensor"), "the layout says e4m3fn tensor"),
        (attention(3, 3, 64, engine_tokens=16), "scales of 0.k must be 3 times"),
        (attention(2, 2, 64, engine_tokens=16), "odd: 2.k, 2.v"),
        (attention(5, 2, 64, engine_tokens=16, excluded=(3,)), "odd: 4.k, 4.v"),
    ],
)
def test_describe_refuses_a_layout_of_another_format(layout: Layout, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        build().describe(layout, HASHING)


def test_parts_the_artifact_does_not_speak_of_are_native() -> None:
    plain = attention(3, 2, 64, engine_tokens=16)
    group = plain.groups[0]
    with_index = replace(
        group, layers=tuple(Layer(layer.index, (*layer.parts, Part("index", 32, "bf16"))) for layer in group.layers)
    )
    assert build().describe(Layout((with_index,)), HASHING).scales == build().describe(plain, HASHING).scales
