"""The schemes that are compared as a matter of course: calibrated and not, static and with the tokens, the noise floor,
and a control.

Static ones come from one calibration, so that they differ in granularity alone. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from kvtier_kernels.reference import FP8_MAX

from kvtier.errors import Invalid
from kvtier.format.artifact import Artifact
from kvtier.quality.calibrate import HEADROOM, choose
from kvtier.quality.observe import Observer, bounded
from kvtier.quality.schemes import Scheme, StaticScales, from_artifact

Scales = Callable[[str], StaticScales]  # of a granularity
NAMES = ("bf16", "one", "tensor", "head", "block-head", "token-head", "kivi", "channel-static")
MEANING = {
    "bf16": "K and V rounded to bf16: the noise floor",
    "one": "scale 1.0 everywhere, uncalibrated",
    "tensor": "calibrated, one scale per layer and part",
    "head": "calibrated, one scale per KV head",
    "block-head": "a scale per engine block and head, from the block",
    "token-head": "a scale per token and head, from the token",
    "kivi": "KIVI's form: K per channel of a block, V per token and head",
    "channel-static": "control, not offered: K per channel, calibrated; V per token and head",
}


def from_observer(
    names: tuple[str, ...], observer: Observer, excluded: frozenset[int] = frozenset(), headroom: float = HEADROOM
) -> list[Scheme]:
    """These schemes with scales from a calibration, rule amax. Raises Invalid for an unknown name."""
    keys = [key for key in observer.seen if key[0] not in excluded]

    def scales(kind: str) -> StaticScales:
        return {key: torch.from_numpy(choose(observer.seen[key], kind, "amax", headroom)) for key in keys}

    return [_scheme(name, excluded, scales, observer) for name in names]


def from_scales(names: tuple[str, ...], artifact: Artifact) -> list[Scheme]:
    """The artifact, then these schemes with its scales; one per layer is the largest of its heads'. Raises Invalid."""
    own = from_artifact(artifact)

    def scales(kind: str) -> StaticScales:
        if kind == "tensor":
            return {key: values.max().reshape(1) for key, values in own.scales.items()}
        if any(form.granularity != "head" for form in artifact.parts.values()):
            raise Invalid("the artifact has no scales per head")
        return own.scales

    rest = [name for name in names if not (name == own.k == own.v)]
    return [own, *(_scheme(name, own.excluded, scales, None) for name in rest)]


def _scheme(name: str, excluded: frozenset[int], scales: Scales, observer: Observer | None) -> Scheme:
    if name == "bf16":
        return Scheme(name, "bf16", "bf16", {}, excluded)
    if name == "one":
        return Scheme(name, "tensor", "tensor", {key: torch.ones(1) for key in scales("tensor")}, excluded)
    if name in ("tensor", "head"):
        return Scheme(name, name, name, scales(name), excluded)
    if name in ("block-head", "token-head"):
        return Scheme(name, name, name, {}, excluded)
    if name == "kivi":
        return Scheme(name, "channel", "token-head", {}, excluded)
    if name == "channel-static" and observer is not None:
        keys = {key: seen for key, seen in observer.seen.items() if key[1] == "k" and key[0] not in excluded}
        channels = {key: torch.from_numpy(bounded(seen.channels / FP8_MAX)) for key, seen in keys.items()}
        return Scheme(name, "channel-static", "token-head", channels, excluded)
    which = "" if observer is not None or name not in NAMES else " that an artifact gives"
    raise Invalid(f"scheme {name!r:.80} is none of {', '.join(NAMES)}{which}")
