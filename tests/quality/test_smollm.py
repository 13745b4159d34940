"""The must-shows on a real model, SmolLM2-135M (decoded from 4 bits): the twin tells scale 1.0 from calibrated scales,
and the report says so.

One load of the model serves all; about 40 s of one core. The figures in docs/quality.md come from bench/quality.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

from kvtier.models.advice import beyond_calibration  # noqa: E402
from kvtier.quality import calibrate, compare, outlier_twin, report, smollm, standard_schemes, texts  # noqa: E402
from kvtier.quality.evaluate import BAD, GOOD, Cell, Evaluation, judge  # noqa: E402
from kvtier.quality.loaded_model import SMOLLM, LoadedModel, load  # noqa: E402
from kvtier.quality.texts import Sample  # noqa: E402

FACTOR = 512
LENGTH = 384


@pytest.fixture(scope="module")
def plain() -> smollm.SmolLM:
    """The model in plain torch, loaded once."""
    return smollm.load()


@pytest.fixture(scope="module")
def loaded(plain: smollm.SmolLM) -> Iterator[LoadedModel]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smollm, "load", lambda path: plain)
        yield load(SMOLLM)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def found(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluation, str]:
    """The twin, calibrated on one text, compared on another; and its report."""
    calibration = [Sample("manual", tuple(loaded.encode(texts.calibration_text())[:LENGTH]))]
    tokens = loaded.encode(texts.evaluation_text())[20_000 : 20_000 + LENGTH + 1]
    with outlier_twin.outliers(loaded, FACTOR):
        schemes = standard_schemes.from_observer(("one", "head"), calibrate.observe(loaded, calibration))
        made = Evaluation(
            loaded, {}, [Cell(f"twin {FACTOR}", "manual", LENGTH, compare.compare(loaded, [tokens], schemes))]
        )
    files = report.write(made, tmp_path_factory.mktemp("report"))
    return made, Path(files[0]).read_text("utf-8")


@pytest.mark.long
def test_the_twin_tells_scale_one_from_calibrated_scales(found: tuple[Evaluation, str]) -> None:
    one, head = found[0].cells[0].results
    kl = [result.over(result.kl) for result in (one, head)]
    assert kl[0] is not None and kl[0].mean > 0.3
    assert kl[1] is not None and kl[1].mean < 0.03
    assert one.clipped > 0.005 and head.clipped < 1e-4


def test_the_report_says_which_is_bad_without_being_told(found: tuple[Evaluation, str]) -> None:
    made, said = found
    assert {one.scheme: one.word for one in judge(made.cells)} == {"one": BAD, "head": GOOD}
    assert (
        f"| twin {FACTOR} | one (uncalibrated: scale 1.0) | **bad** | manual, {LENGTH} tokens: KL " in said
        and "of the values clip" in said
    )
    assert f"| twin {FACTOR} | head | good | no limit exceeded |" in said
    assert "4-bit weights, decoded to f32; not the original bf16 weights" in said


@pytest.mark.long
def test_the_natural_model_and_its_twin_are_one_function(loaded: LoadedModel) -> None:
    tokens = torch.tensor(loaded.encode(texts.evaluation_text())[:48])
    natural = loaded.logits(tokens, loaded.empty_cache())
    with outlier_twin.outliers(loaded, FACTOR):
        twins = loaded.logits(tokens, loaded.empty_cache())
    assert torch.allclose(natural, twins, atol=1e-2)


@pytest.mark.long
def test_scales_of_512_tokens_used_at_2048_are_warned_of(loaded: LoadedModel) -> None:
    pieces = [Sample("manual", tuple(loaded.encode(texts.calibration_text())[:512]))]
    made = calibrate.export(loaded, calibrate.observe(loaded, pieces), pieces)
    assert made.calibrated_position == 511 and beyond_calibration(made, 512) is None
    warning = beyond_calibration(made, 2048)
    assert warning is not None and warning.found == "calibrated on 512 tokens, used up to 2,048"


def test_both_forms_of_the_model_compute_the_same(loaded: LoadedModel, plain: smollm.SmolLM) -> None:
    """transformers' Llama with the converted weights against the plain torch model that the demo runs."""

    def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], is_causal=True, enable_gqa=True
        )[0]

    tokens = torch.tensor(loaded.encode("The quick brown fox jumps over the lazy dog. " * 4)[:32])
    ours = plain.run(tokens, 0, attend, len(tokens))
    theirs = loaded.logits(tokens, loaded.empty_cache())
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert torch.allclose(ours, theirs, atol=1e-2, rtol=1e-3)
