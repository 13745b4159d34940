"""Native against quantized on a small random model."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


from kvtier.quality import calibrate, compare  # noqa: E402
from kvtier.quality.loaded_model import LoadedModel  # noqa: E402
from kvtier.quality.schemes import Scheme, from_artifact  # noqa: E402
from tests.quality.small_model import samples, text  # noqa: E402


def test_the_same_thing_twice_is_no_difference(loaded: LoadedModel) -> None:
    (result,) = compare.compare(
        loaded, [text(300, 1), text(300, 2)], [Scheme("s", "token-head", "token-head", {}, frozenset((0, 1)))]
    )
    assert result.over(result.kl).mean == pytest.approx(0, abs=1e-6) and result.over(result.top1).mean == 1  # type: ignore[union-attr]
    assert result.perplexity == pytest.approx(result.native_perplexity)
    plain = loaded.logits(torch.tensor(text(300, 1)[:-1]), loaded.empty_cache())
    nll = torch.nn.functional.cross_entropy(plain, torch.tensor(text(300, 1)[1:]), reduction="none")
    assert result.native_nll[0] == pytest.approx(nll.numpy(), abs=1e-4)


def test_worse_scales_are_worse(loaded: LoadedModel) -> None:
    made = calibrate.export(loaded, calibrate.observe(loaded, samples()), samples())
    good = from_artifact(made, "good")
    bad = Scheme("bad", "head", "head", {key: values / 200 for key, values in good.scales.items()})
    floor = Scheme("bf16", "bf16", "bf16")
    floor_, good_, bad_ = compare.compare(loaded, [text(128, i) for i in (1, 2)], [floor, good, bad])
    assert 0 < floor_.over(floor_.kl).mean < good_.over(good_.kl).mean < bad_.over(bad_.kl).mean  # type: ignore[union-attr]
    assert good_.clipped == 0 < bad_.clipped


def test_intervals_are_over_sequences() -> None:
    assert compare.interval([]) is None
    assert str(compare.interval([0.5])) == "0.5000"
    two = compare.interval([1.0, 3.0])
    assert two is not None and two.half == pytest.approx(12.706 * np.sqrt(2) / np.sqrt(2)) and two.sequences == 2
    many = compare.interval([0.0, 1.0] * 20)
    assert many is not None and many.half == pytest.approx(2.0 * np.std([0, 1] * 20, ddof=1) / np.sqrt(40))
    result = compare.Result(Scheme("s", "token-head", "token-head"))
    result.kl = [np.r_[np.zeros(512), np.ones(100)].astype(np.float32), np.zeros(300, np.float32)]
    assert result.buckets() == [(0, 512), (512, 612)]
    late = result.over(result.kl, 512, 612)
    assert late is not None and (late.mean, late.half, late.sequences) == (1.0, None, 1), (
        "one sequence reaches there: no interval"
    )
