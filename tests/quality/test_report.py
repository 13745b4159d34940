"""Files of an evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from kvtier.quality import evaluate, report  # noqa: E402
from kvtier.quality.evaluate import Cell  # noqa: E402
from tests.quality.small_model import make, result  # noqa: E402


def test_an_empty_table_is_a_file_too(tmp_path: Path) -> None:
    made = evaluate.Evaluation(make(), {}, cells=[Cell("natural", "t", 512, [result("a", 0.01, sequences=1)])])
    files = report.write(made, tmp_path / "r")
    assert all(file.exists() for file in files) and (tmp_path / "r" / "answers.csv").read_text() == "nothing\n"
