"""Advice follows from the numbers; what is said beyond the calibrated length."""

from __future__ import annotations

from kvtier.models.advice import advise, beyond_calibration, uncalibrated
from tests.models.configs import FP8, LLAMA, NATIVE, bundle, model


def test_the_advice_follows_from_the_numbers() -> None:
    caches = model(LLAMA)
    assert {one.topic for one in advise(caches, FP8, 2048, 2.0, None, False)} == {"short contexts"}
    assert {one.topic for one in advise(caches, FP8, 65536, 2.0, 9000.0, True)} == {"long contexts"}
    assert "at no length" in advise(caches, FP8, 8192, 2.0, None, True)[0].found
    assert not advise(caches, NATIVE, 2048, 1.0, None, False)
    assert "effective ratio" in {one.topic for one in advise(caches, FP8, 16384, 1.2, None, False)}
    states = model(LLAMA, layer_types=["linear_attention"] * 24 + ["full_attention"] * 8)
    assert "24 of 32" in next(
        one.found for one in advise(states, FP8, 16384, 2.0, None, False) if one.topic == "recurrent layers"
    )


def test_the_calibrated_length_guard() -> None:
    assert beyond_calibration(bundle(position=511), 512) is None
    assert beyond_calibration(bundle(position=511), 2048).found == "calibrated on 512 tokens, used up to 2,048"  # type: ignore[union-attr]
    assert "nobody knows" in beyond_calibration(bundle(position=None), 1).found  # type: ignore[union-attr]
    assert uncalibrated(bundle()) is None
    assert "nothing was calibrated" in uncalibrated(bundle(1.0)).found  # type: ignore[union-attr]
