"""Verdicts from numbers alone: they are those measured on SmolLM2-135M."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


from kvtier.quality.evaluate import BAD, DOUBTFUL, GOOD, Cell, judge  # noqa: E402
from tests.quality.small_model import result  # noqa: E402


@pytest.mark.parametrize(
    ("name", "kl", "word"),
    [
        ("one on the twin", (0.45,), BAD),
        ("skipping half of the layers", (0.24,), BAD),
        ("calibrated", (0.0085,), GOOD),
        ("calibrated, far", (0.012, 0.019, 0.021, 0.021), GOOD),
        ("channel-static beyond its length", (0.013, 0.11, 0.11, 0.11), BAD),
        ("drifting", (0.01, 0.012, 0.011, 0.09), DOUBTFUL),
        ("dull", (0.04, 0.04, 0.04, 0.04), DOUBTFUL),
    ],
)
def test_a_verdict_needs_no_hint(name: str, kl: tuple[float, ...], word: str) -> None:
    best = result("best", *(min(value, 0.02) for value in kl))
    verdicts = {
        one.scheme: one
        for one in judge([Cell("natural", "t", 2048, [result("bf16", *(0.0 for _ in kl)), best, result(name, *kl)])])
    }
    assert set(verdicts) == {"best", name}, "the noise floor is not judged"
    assert verdicts[name].word == word, verdicts[name]
    assert bool(verdicts[name].reasons) == (word != GOOD)


def test_one_bad_cell_is_enough_and_models_are_judged_apart() -> None:
    cells = [
        Cell("natural", "t", 512, [result("a", 0.01), result("b", 0.01)]),
        Cell("natural", "u", 512, [result("a", 0.01), result("b", 0.3)]),
        Cell("natural", "v", 512, [result("a", 0.01), result("b", 0.01)]),
        Cell("twin 512", "t", 512, [result("a", 0.5), result("b", 0.01)]),
    ]
    words = {(one.scheme, one.model): one.word for one in judge(cells)}
    assert words == {("a", "natural"): GOOD, ("b", "natural"): BAD, ("a", "twin 512"): BAD, ("b", "twin 512"): GOOD}
    (reason,) = next(one.reasons for one in judge(cells) if one.word == BAD and one.scheme == "b")
    assert reason.startswith("u, 512 tokens: KL 0.300")
    relative = judge([Cell("natural", "t", 512, [result("a", 0.005), result("b", 0.04)])])
    assert relative[1].word == BAD and "8 times the best" in relative[1].reasons[0]
