"""Magnitudes of K and V: exact where they are said to be."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


from kvtier.quality import calibrate, observe  # noqa: E402
from kvtier.quality.loaded_model import LoadedModel  # noqa: E402
from tests.quality.small_model import filled, samples  # noqa: E402


def test_what_is_seen_is_exact_where_it_is_said_to_be(loaded: LoadedModel) -> None:
    observer = calibrate.observe(loaded, samples())
    caches = [(sample, filled(loaded, None, list(sample.tokens))) for sample in samples()]
    for (layer, part), seen in observer.seen.items():
        tensors = {
            i: (c.layers[layer].keys if part == "k" else c.layers[layer].values)[0] for i, (_, c) in enumerate(caches)
        }
        everything = torch.cat(list(tensors.values()), dim=1).abs()
        assert seen.top.tolist() == everything.amax(dim=(1, 2)).tolist()
        assert seen.channels.tolist() == everything.amax(dim=1).tolist()
        assert seen.amax["chat"].tolist() == tensors[1].abs().amax(dim=(1, 2)).tolist()
        assert seen.samples == 3 and seen.elements == everything.numel() and seen.nonfinite == 0
        for percent in (50.0, 99.0):
            exact = np.percentile(everything.reshape(2, -1).numpy(), percent, axis=1, method="higher")
            assert observe.percentile(seen, percent) == pytest.approx(exact, rel=0.03)
        assert (observe.percentile(seen, 100.0) <= seen.top).all()
        curve = observe.clip_curve(seen, seen.top / np.float32(448))
        assert (
            curve[0] == (1.0, 0.0)
            and [share for _, share in curve] == sorted(share for _, share in curve)
            and curve[-1][1] > 0.1
        )
    assert observer.position == 63
