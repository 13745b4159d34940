"""Rules, the artifact of a calibration, and gaps that are refused, on a small random model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from kvtier_kernels.reference import CODEC, MAX_SCALE, MIN_SCALE, dequantize, quantize  # noqa: E402

from kvtier.errors import Invalid  # noqa: E402
from kvtier.format import artifact  # noqa: E402
from kvtier.format.artifact import LEAST_SCALE, MOST_SCALE  # noqa: E402
from kvtier.models import scale_import  # noqa: E402
from kvtier.models.model_config import LayerCache  # noqa: E402
from kvtier.quality import calibrate, compare, observe, texts  # noqa: E402
from kvtier.quality.loaded_model import LoadedModel  # noqa: E402
from kvtier.quality.schemes import from_artifact  # noqa: E402
from tests.quality.small_model import WIDTH, make, samples, text  # noqa: E402


def test_constants_agree() -> None:
    assert CODEC == scale_import.CODEC
    assert (MIN_SCALE, MAX_SCALE) == (LEAST_SCALE, MOST_SCALE)


def test_rules() -> None:
    seen = observe.Magnitudes(2, 4)
    x = torch.randn(2, 4000, 4, generator=torch.Generator().manual_seed(1))
    x[0, 0, 0] = 400.0  # one outlier
    seen.add(x, "s")
    top = seen.top
    assert calibrate.choose(seen, "head", "amax", 1.0) == pytest.approx(top / 448)
    assert calibrate.choose(seen, "head", "amax", 2.0) == pytest.approx(2 * top / 448)
    assert calibrate.choose(seen, "tensor", "amax", 1.0) == pytest.approx([400 / 448])
    assert calibrate.choose(seen, "head", "percentile", 1.0, 99.9)[0] < 0.1 * top[0] / 448
    errors = {}
    for rule in calibrate.RULES:
        scales = torch.from_numpy(calibrate.choose(seen, "head", rule, 1.0))
        found = quantize(x, "head", scales)
        errors[rule] = float(((dequantize(found.codes, found.scales, "head") - x) ** 2).mean())
    assert errors["least-error"] <= 1.02 * min(errors.values()), errors
    zero = observe.Magnitudes(2, 4)
    zero.add(torch.stack([torch.zeros(8, 4), torch.ones(8, 4)]), "s")
    assert calibrate.choose(zero, "head", "amax", 1.0) == pytest.approx([1 / 448, 1 / 448]), (
        "a head of zeros gets the scale of the others"
    )
    for options, message in (
        (("channel", "amax"), "per tensor or per head"),
        (("head", "median"), "rule is one of"),
        (("head", "amax", 0.5), "headroom"),
        (("head", "percentile", 1.0, 20.0), "percentile"),
    ):
        with pytest.raises(Invalid, match=message):
            calibrate.choose(seen, *options)


def test_an_artifact_records_where_it_comes_from(loaded: LoadedModel, tmp_path: Path) -> None:
    observer = calibrate.observe(loaded, samples())
    made = calibrate.export(loaded, observer, samples())
    assert (made.model, made.revision, made.rule, made.calibrated_position) == ("tiny", "b" * 40, "amax", 63)
    assert (
        made.calibration == f"texts:{texts.digest(samples())}"
        and made.report["mix"] == "chat 1, code 2"
        and made.report["tokens"] == 192
    )
    assert not made.uncalibrated and set(made.scales) == {(layer, part) for layer in (0, 1) for part in "kv"}
    assert made == calibrate.export(loaded, calibrate.observe(loaded, samples()), samples()), (
        "the same data makes the same artifact"
    )
    assert made != calibrate.export(loaded, calibrate.observe(loaded, samples(2)), samples(2))
    made.save(tmp_path / "a")
    assert artifact.load(tmp_path / "a") == made
    result = compare.compare(loaded, [text(64, 9)], [from_artifact(made)])[0]
    assert result.clipped == 0 and result.over(result.kl).mean < 0.1  # type: ignore[union-attr]
    half = calibrate.export(loaded, observer, samples(), excluded=[1], granularity="tensor")
    assert half.excluded == (1,) and set(half.scales) == {(0, "k"), (0, "v")}
    with pytest.raises(Invalid, match="excluded layer 7"):
        calibrate.export(loaded, observer, samples(), excluded=[7])


def test_kvb_04_a_layer_that_saw_nothing_is_not_exported(loaded: LoadedModel) -> None:
    """The model has two layers; its configuration speaks of three, so the third's cache is never called."""
    longer = transformers.LlamaConfig(**{**loaded.model.config.to_dict(), "num_hidden_layers": 3})
    caches = replace(loaded.caches, layers=(*loaded.caches.layers, LayerCache(2, "attention", 2, (WIDTH, WIDTH))))
    short = make()
    short.model.config.num_hidden_layers = longer.num_hidden_layers
    gap = replace(short, caches=caches)
    observer = calibrate.observe(gap, samples())
    with pytest.raises(Invalid, match="nothing is exported: k of layer 2 saw nothing; v of layer 2 saw nothing"):
        calibrate.export(gap, observer, samples())
    assert calibrate.export(gap, observer, samples(), excluded=[2]).excluded == (2,)


def test_values_that_are_not_finite_or_all_zero_are_not_exported(loaded: LoadedModel) -> None:
    observer = calibrate.observe(loaded, samples())
    observer.seen[1, "v"].add(torch.tensor([float("nan"), float("inf")])[:, None, None].expand(2, 1, WIDTH), "chat")
    with pytest.raises(Invalid, match="v of layer 1 saw 32 values that are not finite"):
        calibrate.export(loaded, observer, samples())
    zero = observe.Observer(loaded.caches.kv_layers())
    for seen in zero.seen.values():
        seen.add(torch.zeros(2, 4, WIDTH), "chat")
    with pytest.raises(Invalid, match="k of layer 0 saw only zeros"):
        calibrate.refuse_gaps(zero)


def test_the_layer_that_costs_most_is_proposed_with_its_price() -> None:
    deep = make(6)
    made = calibrate.export(deep, calibrate.observe(deep, samples()), samples())
    spoilt = {key: np.array(values) for key, values in made.scales.items()}
    spoilt[3, "k"] = np.full(2, 1e-5, np.float32)  # everything clips
    costs = calibrate.sensitivity(deep, replace(made, scales=spoilt), text(48, 7))
    proposed = calibrate.propose(costs, deep.caches)
    assert set(costs) == set(range(6)) and max(costs, key=costs.__getitem__) == 3
    assert proposed[0] == (3, costs[3], 2 * (16 + 16)), "two bytes instead of one for K and V of two heads"
    assert calibrate.propose(dict.fromkeys(range(6), 0.001), deep.caches) == [] == calibrate.propose({}, deep.caches)
    assert calibrate.sensitivity_report(costs).keys() == {f"sensitivity.{layer}" for layer in range(6)}
