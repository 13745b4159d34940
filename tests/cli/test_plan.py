"""`kvtier plan`: what it prints follows from config.json, an artifact and the figures given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier.cli.app import app, load_commands
from tests.models.configs import LLAMA, GiB, bundle

load_commands()


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
