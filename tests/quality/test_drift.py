"""Live values against their scales: counts, windows, bounded labels, Prometheus text, and alert rules that ask for what
exists."""

from __future__ import annotations

import re

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.connectors.common.counters import COUNTERS
from kvtier.errors import Invalid
from kvtier.quality.drift import MAX_RANGES, METRICS, PREFIX, Drift
from tests.support.paths import ROOT

ALERTS = ROOT / "packaging" / "alerts-quality.yml"


def values(drift: Drift, name: str) -> dict[tuple[str, ...], float]:
    return {tuple(value for _, value in one.labels): one.value for one in drift.metrics() if one.name == PREFIX + name}


def scales(layers: int = 2, *of_heads: float) -> dict[tuple[int, str], np.ndarray]:
    return {(layer, part): np.array(of_heads or (0.5, 0.25), np.float32) for layer in range(layers) for part in "kv"}


def test_what_is_counted() -> None:
    drift = Drift(scales())
    drift.add(0, "k", 1000, 3, 0, np.array([112.0, 28.0]))
    drift.add(0, "k", 500, 0, 2, np.array([10.0, 10.0]))
    drift.add(1, "v", 10, 10, 0, np.array([224.0, 224.0]))
    assert values(drift, "values_total") == {("0", "k"): 1500, ("1", "v"): 10}
    assert values(drift, "clipped_values_total") == {("0", "k"): 3, ("1", "v"): 10}
    assert values(drift, "nonfinite_values_total") == {("0", "k"): 2, ("1", "v"): 0}
    # Head 0 holds 448 * 0.5 = 224, head 1 holds 112.
    assert values(drift, "amax_share") == {("0", "k"): 0.5, ("1", "v"): 2.0}
    assert values(drift, "uncalibrated") == {(): 0.0}


def test_a_maximum_is_of_the_last_two_windows() -> None:
    drift = Drift(scales())
    drift.add(0, "k", 1, 0, 0, np.array([224.0, 0.0]))
    drift.rotate()
    drift.add(0, "k", 1, 0, 0, np.array([22.4, 0.0]))
    assert values(drift, "amax_share") == {("0", "k"): 1.0}
    drift.rotate()
    assert values(drift, "amax_share") == {("0", "k"): pytest.approx(0.1)}
    drift.rotate()
    assert values(drift, "amax_share") == {("0", "k"): 0.0}
    assert values(drift, "values_total") == {("0", "k"): 2}, "counters go on"


def test_labels_are_bounded() -> None:
    drift = Drift(scales(200, 1.5))
    for layer in range(200):
        for part in "kv":
            drift.add(layer, part, 1, 0, 0, np.array([1.0]))
    found = values(drift, "values_total")
    assert len(found) <= 2 * MAX_RANGES and sum(found.values()) == 400
    assert {layers for layers, _ in found} == {f"{i}-{min(i + 6, 199)}" for i in range(0, 200, 7)}
    for layer, part in ((200, "k"), (0, "k\n"), (0, "x" * 40)):
        with pytest.raises(Invalid, match="not quantized here"):
            drift.add(layer, part, 1, 0, 0, np.array([1.0]))
    with pytest.raises(Invalid, match="which layers"):
        Drift({})


def test_scales_that_come_with_tokens_have_no_share() -> None:
    drift = Drift({}, [3, 4])
    drift.add(3, "k", 7, 0, 0, np.array([1.0]))
    assert values(drift, "amax_share") == {} and values(drift, "values_total") == {("3", "k"): 7}
    assert values(Drift(scales(2, 1.0)), "uncalibrated") == {(): 1.0}


def test_the_text_is_prometheus() -> None:
    drift = Drift(scales())
    drift.add(1, "v", 10, 1, 0, np.array([1.0, 100.0]))
    families = {family.name: family for family in text_string_to_metric_families(drift.exposition())}
    assert set(families) == {(PREFIX + name).removesuffix("_total") for name in METRICS}
    (sample,) = families["kvtier_kv_amax_share"].samples
    assert sample.labels == {"layers": "1", "part": "v"} and sample.value == pytest.approx(100 / 112)
    assert all(family.documentation for family in families.values())


def test_alerts_ask_for_what_exists() -> None:
    text = ALERTS.read_text()
    expressions = "\n".join(re.findall(r"expr: (.*)", text))
    asked = set(re.findall(r"\b(?:vllm:)?kvtier_[a-z_]+", expressions))
    assert (
        asked == {PREFIX + name for name in METRICS} | {"vllm:kvtier_clipped_codes_total"}
        and "clipped_codes" in COUNTERS
    )
    alerts = text.split("- alert: ")[1:]
    assert len(alerts) == len({alert.split("\n")[0] for alert in alerts}) == 6
    for alert in alerts:
        assert all(f"{word}:" in alert for word in ("expr", "labels", "summary", "action")), alert.split("\n")[0]


def test_a_launch_of_the_kernel_at_once() -> None:
    shape = (3, 2, 2, 2)  # blocks, layers, parts, heads
    clipped, nonfinite, amax = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    clipped[1, 0, 1, 0], clipped[2, 0, 1, 1], nonfinite[0, 1, 0, 1] = 5, 2, 1
    amax[2, 1, 0] = (112.0, 112.0)
    drift = Drift(scales())
    drift.add_launch([0, 1], ["k", "v"], [256, 128], clipped, nonfinite, amax)
    assert values(drift, "values_total") == {("0", "k"): 768, ("0", "v"): 384, ("1", "k"): 768, ("1", "v"): 384}
    assert (
        values(drift, "clipped_values_total")[("0", "v")] == 7
        and sum(values(drift, "clipped_values_total").values()) == 7
    )
    assert values(drift, "nonfinite_values_total")[("1", "k")] == 1
    assert values(drift, "amax_share")[("1", "k")] == 1.0, "head 1 holds 112"
    drift.add_launch([0, 1], ["k", "v"], [256, 128], clipped[:0], nonfinite[:0], amax[:0])
    for bad in ([0], [0, 1, 2]):
        with pytest.raises(Invalid, match="blocks, layers, parts, heads"):
            drift.add_launch(bad, ["k", "v"], [256, 128], clipped, nonfinite, amax)


@pytest.mark.torch
def test_what_the_quantizer_counts_goes_in_as_it_is() -> None:
    torch = pytest.importorskip("torch")
    from kvtier_kernels.reference import quantize

    x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))
    x[1, 0, 0], x[0, 0, 0] = 1000.0, float("nan")
    counts = quantize(x, "head", torch.tensor([0.5, 0.25])).counts
    drift = Drift(scales())
    drift.add(0, "k", x.numel(), int(counts.clipped.sum()), int(counts.nonfinite.sum()), counts.amax.numpy())
    assert values(drift, "clipped_values_total") == {("0", "k"): 1} == values(drift, "nonfinite_values_total")
    assert values(drift, "amax_share") == {("0", "k"): pytest.approx(1000 / 112)}
