"""Free-running answers, task files, repetition."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from kvtier.errors import Invalid  # noqa: E402
from kvtier.quality import tasks  # noqa: E402
from kvtier.quality.loaded_model import LoadedModel  # noqa: E402
from tests.quality.small_model import text  # noqa: E402


def test_answers_depend_on_seed_and_scheme_alone(loaded: LoadedModel) -> None:
    prompt = text(20)
    greedy = tasks.generate(loaded, prompt, None, 12)
    assert greedy == tasks.generate(loaded, prompt, None, 12) and len(greedy) == 12
    drawn = [tasks.generate(loaded, prompt, None, 12, 1.0, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    cache = loaded.empty_cache()
    logits = loaded.logits(torch.tensor(prompt), cache)[-1]
    assert greedy[0] == int(logits.argmax())
    ends = replace(loaded, end=frozenset((greedy[3],)))
    assert tasks.generate(ends, prompt, None, 12) == greedy[: greedy.index(greedy[3])]


def test_task_files(tmp_path: Path) -> None:
    good = {"prompt": "p", "checker": {"kind": "exact", "value": "x"}}
    (tmp_path / "t.jsonl").write_text(
        json.dumps(good) + "\n\n" + json.dumps(good | {"name": "n", "max_tokens": 3, "stratum": "s"}) + "\n"
    )
    found = tasks.read(tmp_path / "t.jsonl")
    assert [(one.name, one.max_tokens, one.stratum) for one in found] == [("line 1", 64, "tasks"), ("n", 3, "s")]
    for bad, message in (
        ("{", "line 1: not JSON"),
        ("[1]", "a task is an object"),
        (json.dumps(good | {"temperature": 1}), "unknown fields: temperature"),
        (json.dumps(good | {"prompt": ""}), "prompt"),
        (json.dumps(good | {"max_tokens": 0}), "max_tokens"),
        (json.dumps(good | {"checker": {"kind": "regex", "value": "["}}), "line 1: not a pattern"),
        ("", "0 tasks"),
    ):
        (tmp_path / "bad.jsonl").write_text(bad)
        with pytest.raises(Invalid, match=message):
            tasks.read(tmp_path / "bad.jsonl")
    assert len({one.stratum for one in tasks.built_in()}) == 4


def test_repetition() -> None:
    assert tasks.repetition([1, 2, 3]) == 0 == tasks.repetition(list(range(50)))
    assert tasks.repetition([1, 2] * 50) > 0.9
