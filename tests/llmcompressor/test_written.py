"""Checkpoints really written by llm-compressor: what is imported is what its model held in memory, to the last bit.

`data` is what `write.py` made with the versions in data/seen.json; it is read in every run. Where KVTIER_LLMCOMPRESSOR
names an interpreter that has llm-compressor (`make test-llmcompressor` sees to it), both checkpoints are also written
afresh, and must be the same.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from kvtier.format.identity import pack_scales
from kvtier.format.tensors import read_header
from kvtier.models.scale_import import import_scales

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).resolve().parent.parent.parent
INTERPRETER = os.environ.get("KVTIER_LLMCOMPRESSOR", "")


def check(root: Path) -> None:
    """Both checkpoints under `root` against what was in memory."""
    seen = json.loads((root / "seen.json").read_text())
    for strategy, granularity, shape in (("tensor", "tensor", (1,)), ("attn_head", "head", (2, 1, 1))):
        spans, _ = read_header(root / strategy / "model.safetensors")
        scales = {name: span for name, span in spans.items() if name.endswith("_scale")}
        assert (
            len(scales) == 4
            and {span.shape for span in scales.values()} == {shape}
            and {span.dtype for span in scales.values()} == {"BF16"}
        )
        made, notes = import_scales(root / strategy)
        assert made.parts["k"].granularity == made.parts["v"].granularity == granularity
        assert pack_scales(made.scales) == {key: "".join(values) for key, values in seen[strategy].items()}
        assert made.rule == "checkpoint" and made.calibrated_position is None and not made.uncalibrated
        assert notes == ["no q_scale: a kernel that quantizes queries uses the layer's k_scale"]


def test_the_kept_checkpoints_are_imported_to_the_last_bit() -> None:
    assert json.loads((DATA / "seen.json").read_text())["versions"]["llmcompressor"].startswith("0.14.")
    check(DATA)


@pytest.mark.skipif(not INTERPRETER, reason="no llm-compressor here: make test-llmcompressor")
@pytest.mark.timeout(400)
def test_checkpoints_written_now_are_imported_to_the_last_bit(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [INTERPRETER, "-m", "tests.llmcompressor.write", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=360,
    )
    check(tmp_path)
