"""An artifact of scale 1.0 everywhere, without any calibration, for who asks for it. Needs no torch.

An artifact made here says so in its rule, and whatever shows it says so again: `Artifact.uncalibrated`. A pure
function.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvtier.format.artifact import Artifact, PartFormat
from kvtier.models.model_config import ModelCaches
from kvtier.models.scale_import import CODEC


def uncalibrated(
    caches: ModelCaches, name: str, revision: str, granularity: str = "tensor", excluded: Iterable[int] = ()
) -> Artifact:
    """Scale 1.0 everywhere, for who asks for it. It says so wherever it is shown."""
    out = frozenset(excluded)
    counts = {layer.index: 1 if granularity == "tensor" else layer.heads for layer in caches.kv_layers()}
    scales = {(i, part): np.ones(n, np.float32) for i, n in counts.items() if i not in out for part in "kv"}
    form = PartFormat("e4m3fn", granularity)
    made = ("uncalibrated", CODEC, "plain", "none: scale 1.0", scales, tuple(sorted(out)))
    return Artifact(name, revision, {"k": form, "v": form}, *made)
