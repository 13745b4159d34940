"""Strata, pieces and digests of texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import Invalid
from kvtier.quality import texts


def test_texts_of_strata(tmp_path: Path) -> None:
    encode = lambda line: list(line.encode())  # noqa: E731
    (tmp_path / "a.txt").write_text("x" * 100)
    (tmp_path / "b.jsonl").write_text('{"text": "hello there"}\n\n{"tokens": [1, 2, 3], "stratum": "ids"}\n')
    (tmp_path / "c.tokens").write_text("1, 2 3\n4")
    found = texts.read(
        [f"long={tmp_path}/a.txt", f"chat={tmp_path}/b.jsonl", f"raw={tmp_path}/c.tokens"], encode, 30, 2
    )
    assert [(one.stratum, len(one.tokens)) for one in found] == [
        ("long", 30),
        ("long", 30),
        ("chat", 11),
        ("ids", 3),
        ("raw", 4),
    ]
    assert texts.mix(found) == "chat 1, ids 1, long 2, raw 1"
    assert texts.digest(found) != texts.digest(found[::-1]) and texts.digest(found) == texts.digest(list(found))
    built_in = [texts.read([], encode, 200, 3, evaluation=which) for which in (False, True)]
    assert all(len(part) == 3 for part in built_in) and not set(built_in[0]) & set(built_in[1])
    for name, content, message in (
        ("d.jsonl", "{", "line 1: not JSON"),
        ("e.jsonl", '{"text": "a", "tokens": [1]}', "line 1: write"),
        ("f.tokens", "1 x", "token ids are numbers"),
        ("g.jsonl", '{"tokens": [-1]}', "token id"),
        ("h.txt", "", "no piece of 2 tokens"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(Invalid, match=message):
            texts.read([f"s={tmp_path / name}"], encode, 30, 2)
    with pytest.raises(Invalid, match="stratum=FILE"):
        texts.read(["nothing"], encode, 30, 2)


def test_calibration_and_evaluation_share_no_text() -> None:
    calibration, evaluation = texts.calibration_text(), texts.evaluation_text()
    assert min(len(calibration), len(evaluation)) > 60_000
    sentences = [{" ".join(p.split()) for p in text.split("\n\n")} for text in (calibration, evaluation)]
    assert not sentences[0] & sentences[1]
    wrapped = " ".join(evaluation.split())
    assert not [p for p in sentences[0] if len(p) > 80 and p in wrapped], "nor inside a longer paragraph"
