"""The main job, short: a real model, a real daemon, two engine processes, one of them killed. And that the demo can
fail."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.quality.demo.driver import promises
from tests.quality.demo.model import needs_model

needs_torch = pytest.mark.torch

HELD: dict[str, Any] = {
    "prompt": 400,
    "block": 64,
    "stored": {"blocks": 6},
    "engine_a_exit": -9,
    "daemon_exit": 0,
    "result": {"blocks_restored": 6, "restored": {"top1": 0.88}, "control": {"top1": 0.43}, "kernels": {"top1": 1.0}},
    "same": {"hits": 6, "answered": True, "differences": []},
    "other_revision": {
        "hits": 0,
        "answered": True,
        "differences": ["artifact: a stored, b live", "revision: c stored, d live"],
    },
    "other_scales": {"hits": 0, "answered": True, "differences": ["k_scale of layer 17, head 2: 1 stored, 2 live"]},
    "changed_scale": "k_scale of layer 17, head 2",
}


def test_the_driver_needs_no_torch() -> None:
    code = "import sys, kvtier.quality.demo.driver; assert not {'torch', 'kvtier_kernels.reference'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_figures_that_hold_fulfil_every_promise() -> None:
    assert all(promises(HELD).values())


def test_a_prompt_of_whole_blocks_keeps_one_token_to_predict_from() -> None:
    """Engine A stores all six blocks, engine B restores five: the sixth ends with the token that makes the first
    prediction."""
    figures = copy.deepcopy(HELD) | {"prompt": 384}
    assert [promise for promise, held in promises(figures).items() if not held] == [
        "a fresh process restored the 5 that end before the prompt's last token"
    ]
    figures["result"]["blocks_restored"] = 5
    assert all(promises(figures).values())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("stored", "blocks"), 5),
        (("engine_a_exit",), 1),
        (("result", "blocks_restored"), 5),
        (("result", "restored", "top1"), 0.8799),
        (("result", "control", "top1"), 0.44),
        (("result", "kernels", "top1"), 0.99),
        (("same", "hits"), 0),
        (("other_revision", "hits"), 1),
        (("other_revision", "answered"), False),
        (("other_revision", "differences"), ["artifact: a stored, b live"]),
        (("other_scales", "hits"), 6),
        (("other_scales", "answered"), False),
        (("other_scales", "differences"), ["k_scale of layer 16, head 2: 1 stored, 2 live"]),
        (("daemon_exit",), -15),
    ],
    ids=str,
)
def test_one_figure_that_does_not_hold_breaks_exactly_its_promise(path: tuple[str, ...], value: Any) -> None:
    figures = copy.deepcopy(HELD)
    place = figures
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    broken = [promise for promise, held in promises(figures).items() if not held]
    # the control is measured against it, but 0.43 stays below half of 0.8799
    if path == (
        "result",
        "restored",
        "top1",
    ):
        assert broken == ["top-1 agreement with native KV is at least 0.88"]
    assert len(broken) == 1


def demo(*arguments: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """One run; if it hangs, everything that it started is killed with it."""
    command = [sys.executable, "-m", "kvtier.quality.demo", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@needs_torch
@needs_model
@pytest.mark.timeout(300)
def test_a_short_run_of_the_main_job(tmp_path: Path) -> None:
    figures_file = tmp_path / "figures.json"
    done = demo("--prompt", "400", "--positions", "96", "--threads", "1", "--json", str(figures_file))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(figures_file.read_text())
    result = figures["result"]
    assert result["tokens_restored"] == 384
    assert result["bytes_bf16"] == 384 * 23_040  # 30 layers, K and V, 3 heads of 64, 2 bytes
    assert result["bytes_codes"] * 2 == result["bytes_bf16"]
    # per block, layer and head: two scales padded to 16 bytes
    assert result["bytes_bodies"] - result["bytes_codes"] == 6 * 30 * 3 * 16
    assert figures["ratio"] > 1.99
    assert result["positions"] == 96
    assert 0 <= result["restored"]["kl"] < 0.1 < result["control"]["kl"]
    assert any(line.startswith("revision: fingerprint:") for line in figures["other_revision"]["differences"])
    assert any(line.startswith("k_scale of layer 17, head 2: ") for line in figures["other_scales"]["differences"])
    for shown in ("tokens restored", "effective ratio", "top-1 agreement", "control: scales x 20"):
        assert shown in done.stdout


@pytest.mark.long
@needs_torch
@needs_model
@pytest.mark.timeout(300)
def test_an_engine_that_fails_fails_the_demo_and_says_why() -> None:
    done = demo("--prompt", "9000")
    assert done.returncode == 1
    assert "engine A ended with 1" in done.stdout
    assert "prompt and positions are together at most" in done.stdout
