"""`kvtier import-scales` and `kvtier artifact`: show, diff, verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvtier.cli.app import app, load_commands
from kvtier.format.artifact import Artifact, PartFormat
from kvtier.format.identity import HashScheme, f32_hex
from kvtier.format.layout import attention
from tests.models.checkpoints import f32, scales, write

load_commands()


def bundle(**changes: Any) -> Artifact:
    form = PartFormat("e4m3fn", "head")
    values = {(layer, part): np.array([0.0312, 0.5], np.float32) for layer in range(3) for part in "kv"}
    arguments: dict[str, Any] = {
        "scales": values,
        "excluded": (3,),
        "calibrated_position": 511,
        "report": {"note": "x"},
    }
    return Artifact("org/m", "a" * 40, {"k": form, "v": form}, "amax", 1, "plain", "texts", **arguments | changes)


def call(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == code, done.output
    return done.output


def test_show_warns_of_what_nobody_calibrated(tmp_path: Path) -> None:
    bundle().save(tmp_path / "a")
    said = call("artifact", "show", tmp_path / "a", "--scales", "--context", "2048")
    assert "calibrated on 512 tokens, used up to 2,048" in said and bundle().digest in said and "0.0312 0.5" in said
    assert "UNCALIBRATED" not in said
    assert "warning" not in call("artifact", "show", tmp_path / "a", "--context", "512")
    ones = {(layer, part): np.ones(2, np.float32) for layer in range(3) for part in "kv"}
    bundle(scales=ones).save(tmp_path / "ones")
    assert "UNCALIBRATED: every scale is 1.0" in call("artifact", "show", tmp_path / "ones")


def test_show_reads_reports_that_hold_anything(tmp_path: Path) -> None:
    report: dict[str, Any] = {
        "q_scale.0": "not hex",
        "q_scale.1": 3,
        "q_scale.2": f32_hex(0.75),
        "sensitivity.1": "zz",
        "sensitivity.2": f32_hex(0.5),
    }
    bundle(report=report).save(tmp_path / "a")
    shown = json.loads(call("artifact", "show", tmp_path / "a", "--json"))
    assert shown["queries"] == {"0": pytest.approx([0.0312, 0.5]), "1": pytest.approx([0.0312, 0.5]), "2": [0.75]}
    assert "layer 2: 0.50000" in call("artifact", "show", tmp_path / "a")


def test_diff_names_fields_and_scales(tmp_path: Path) -> None:
    bundle().save(tmp_path / "a")
    changed = {key: np.array(values) for key, values in bundle().scales.items()}
    changed[2, "k"][0] = 1.0
    bundle(scales=changed, calibrated_position=4095).save(tmp_path / "b")
    said = call("artifact", "diff", tmp_path / "a", tmp_path / "b", code=1)
    assert (
        "k_scale of layer 2, head 0: 0.0311999992 stored, 1 live" in said
        and "calibrated_position: 511 stored, 4095 live" in said
    )
    assert "the same artifact" in call("artifact", "diff", tmp_path / "a", tmp_path / "a")
    call("artifact", "diff", tmp_path / "a", tmp_path / "nowhere", code=2)


def test_verify_against_a_live_namespace(tmp_path: Path) -> None:
    one = bundle()
    one.save(tmp_path / "a")
    layout = attention(4, 2, 64, engine_tokens=16, granularity="head", excluded=(3,))
    live = one.describe(layout, HashScheme("sha256", "0", 16))
    (tmp_path / "live.json").write_text(json.dumps(live.to_json()))
    assert "are those of the artifact" in call("artifact", "verify", tmp_path / "a", tmp_path / "live.json")
    data = live.to_json()
    data["scales"]["1.v"] = f32_hex(1.0) + data["scales"]["1.v"][8:]
    (tmp_path / "other.json").write_text(json.dumps(data))
    said = call("artifact", "verify", tmp_path / "a", tmp_path / "other.json", code=1)
    assert said.strip() == "v_scale of layer 1, head 0: 0.0311999992 stored, 1 live"
    data["artifact"] = "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(data))
    assert "artifact: " in call("artifact", "verify", tmp_path / "a", tmp_path / "other.json", code=1)


def test_verify_against_a_checkpoint(tmp_path: Path) -> None:
    root = write(tmp_path / "m", {"model.safetensors": scales()})
    call("import-scales", root, "--save", tmp_path / "a")
    assert "are those of the artifact" in call("artifact", "verify", tmp_path / "a", root)
    write(root, {"model.safetensors": scales(**{"3_k": f32(1.0)})})
    said = call("artifact", "verify", tmp_path / "a", root, code=1)
    assert "k_scale of layer 3: 0.0199999996 stored, 1 live" in said and "revision" in said
