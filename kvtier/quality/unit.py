"""Scale 1.0 without calibration, for who asks for it; and which layers keep K and V. Needs no torch.

An artifact made here says so in its rule, and whatever shows it says so again: `Artifact.uncalibrated`. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvtier.errors import Invalid
from kvtier.format.artifact import Artifact, PartFormat
from kvtier.models.model_config import ModelCaches

CODEC = 1  # of `kvtier_kernels.reference`, which needs torch


def layers_of(caches: ModelCaches) -> list[tuple[int, int, tuple[int, ...]]]:
    """(index, heads, widths) of the layers that keep K and V. Raises Invalid for a model that keeps a latent
    instead."""
    if any(layer.kind == "latent" for layer in caches.layers):
        raise Invalid("MLA keeps one latent instead of K and V: it is not calibrated here")
    return [(layer.index, layer.heads, layer.widths) for layer in caches.cached]


def windows(caches: ModelCaches) -> frozenset[int]:
    """The layers that look back a window, where others look back over everything: they stay native unless somebody
    wants otherwise."""
    found = frozenset(layer.index for layer in caches.cached if layer.window is not None)
    return found if len(found) < len(caches.cached) else frozenset()


def uncalibrated(
    caches: ModelCaches, name: str, revision: str, granularity: str = "tensor", excluded: Iterable[int] = ()
) -> Artifact:
    """Scale 1.0 everywhere, for who asks for it. It says so wherever it is shown."""
    out = frozenset(excluded)
    scales = {
        (index, part): np.ones(1 if granularity == "tensor" else heads, np.float32)
        for index, heads, _ in layers_of(caches)
        if index not in out
        for part in "kv"
    }
    form = PartFormat("e4m3fn", granularity)
    return Artifact(
        name,
        revision,
        {"k": form, "v": form},
        "uncalibrated",
        CODEC,
        "plain",
        "none: scale 1.0",
        scales,
        tuple(sorted(out)),
    )
