"""Scale 1.0 says so wherever it is shown."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


from kvtier.quality.loaded_model import LoadedModel  # noqa: E402
from kvtier.quality.schemes import Scheme, from_artifact  # noqa: E402
from kvtier.quality.uncalibrated import uncalibrated  # noqa: E402


def test_scale_one_says_so(loaded: LoadedModel) -> None:
    made = uncalibrated(loaded.caches, "tiny", "b" * 40, "head", [0])
    assert (
        made.uncalibrated
        and made.rule == "uncalibrated"
        and made.calibrated_position is None
        and set(made.scales) == {(1, "k"), (1, "v")}
    )
    assert from_artifact(made).uncalibrated and not Scheme("s", "token-head", "token-head").uncalibrated
