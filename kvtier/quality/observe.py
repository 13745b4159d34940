"""What a model's K and V are like: per layer, part and head the largest magnitude, how often which magnitude, and how
that differs by stratum.

Magnitudes are counted in 32 bins an octave, so percentiles and errors are good to 1.1 % in the value; amax is exact.
Not for threads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from kvtier_kernels.reference import FP8_MAX, MAX_SCALE, MIN_SCALE, dequantize, quantize
from numpy.typing import NDArray

from kvtier.errors import Invalid
from kvtier.models.model_config import LayerCache

LOW, HIGH, PER_OCTAVE = -40, 24, 32  # powers of two that the bins cover; what lies outside counts in the outermost
BINS = (HIGH - LOW) * PER_OCTAVE
CENTERS = 2.0 ** (LOW + (np.arange(BINS) + 0.5) / PER_OCTAVE)
BOTTOMS, TOPS = (2.0 ** (LOW + (np.arange(BINS) + end) / PER_OCTAVE) for end in (0, 1))
STEPS = 2.0 ** (np.arange(-24, 9) / 4)  # factors on amax / 448 that the rule "least-error" tries: 1/64 to 4

Vector = NDArray[np.float32]


@dataclass(slots=True)
class Magnitudes:
    """One part of one layer. samples counts passes, elements includes zeros and non-finite ones."""

    heads: int
    width: int
    samples: int = 0
    elements: int = 0
    nonfinite: int = 0
    amax: dict[str, Vector] = field(default_factory=dict)  # by stratum
    channels: Vector = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # [heads, width]
    # [heads, BINS], without zeros
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    @property
    def top(self) -> Vector:
        """amax per head over all strata."""
        return np.max(np.stack(list(self.amax.values())), axis=0) if self.amax else np.zeros(self.heads, np.float32)

    def add(self, x: torch.Tensor, stratum: str) -> None:
        """Counts one pass, x [heads, tokens, width]."""
        x = x.float()
        finite = x.isfinite()
        magnitude = torch.where(finite, x.abs(), 0.0)
        self.samples += 1
        self.elements += x.numel()
        self.nonfinite += int((~finite).sum())
        top = magnitude.amax(dim=(1, 2)).cpu().numpy()
        self.amax[stratum] = np.maximum(self.amax.get(stratum, top), top)
        channels = magnitude.amax(dim=1).cpu().numpy()
        self.channels = np.maximum(self.channels, channels) if self.channels.size else channels
        if not self.counts.size:
            self.counts = np.zeros((self.heads, BINS), np.int64)
        bins = ((torch.log2(magnitude) - LOW) * PER_OCTAVE).floor().clamp(0, BINS - 1)
        for head in range(self.heads):
            nonzero = bins[head][magnitude[head] > 0].long()
            self.counts[head] += torch.bincount(nonzero, minlength=BINS).cpu().numpy()


class Observer:
    """Watches the K and V that go into caches. `seen` has an entry for every layer it was told of, used or not."""

    def __init__(self, layers: Iterable[LayerCache]) -> None:
        parts = [(layer, *pair) for layer in layers for pair in zip("kv", layer.widths, strict=True)]
        self.seen = {(layer.index, part): Magnitudes(layer.heads, width) for layer, part, width in parts}
        self.position = -1  # the largest that was seen

    def attach(self, cache: Any, stratum: str) -> Any:
        """Changes the `update` of a fresh transformers cache so that it is watched; returns it."""
        for index in sorted({index for index, _ in self.seen}):
            layer = cache.layers[index]
            layer.update = self._update(index, layer.update, stratum)
        return cache

    def _update(self, index: int, original: Any, stratum: str) -> Any:
        def update(keys: torch.Tensor, values: torch.Tensor, *rest: Any, **more: Any) -> Any:
            for part, x in (("k", keys), ("v", values)):
                seen = self.seen[index, part]
                if x.shape[1] != seen.heads or x.shape[3] != seen.width:
                    wanted = f"the configuration says {seen.heads} of {seen.width}"
                    raise Invalid(f"{part} of layer {index} is {x.shape[1]} heads of {x.shape[3]}; {wanted}")
                seen.add(x[0], stratum)
            return original(keys, values, *rest, **more)

        return update


def percentile(seen: Magnitudes, percent: float) -> Vector:
    """Per head: the magnitude that `percent` % of the non-zero elements do not exceed, to a bin; never above amax."""
    found = np.zeros(seen.heads, np.float32)
    for head in range(seen.heads):
        total = np.cumsum(seen.counts[head])
        if total[-1]:
            found[head] = TOPS[int(np.searchsorted(total, percent / 100 * total[-1]))]
    return np.minimum(found, seen.top).astype(np.float32)


def clip_curve(seen: Magnitudes, scales: Vector) -> list[tuple[float, float]]:
    """(factor, share of elements above 448 * factor * scale, to a bin) over all heads, for factors from 1 to 1/64."""
    elements = max(1, seen.elements)
    each = np.broadcast_to(scales, seen.heads)
    curve = []
    for power in range(7):
        factor = 2.0**-power
        counted = zip(seen.counts, each, strict=False)  # no rows where nothing was seen
        above = sum(int(counts[FP8_MAX * factor * scale < BOTTOMS].sum()) for counts, scale in counted)
        curve.append((factor, above / elements))
    return curve


def least_error(counts: NDArray[np.int64], top: Vector) -> Vector:
    """Per row of counts [rows, BINS]: the scale, of amax / 448 times `STEPS`, whose squared error after rounding and
    clipping is the smallest. Equal errors: the largest scale, which leaves the most room."""
    rows = len(counts)
    centers = torch.from_numpy(CENTERS.astype(np.float32))
    x = centers.expand(rows, BINS)[:, :, None].contiguous()
    errors = []
    for step in STEPS:
        scales = torch.from_numpy(bounded(top / FP8_MAX * step))
        found = quantize(x, "head", scales)
        error = (dequantize(found.codes, found.scales, "head") - x)[:, :, 0].double() ** 2
        errors.append((error * torch.from_numpy(counts).double()).sum(dim=1).numpy())
    table = np.stack(errors)[::-1]  # the largest scale first, which argmin prefers
    return bounded(top / FP8_MAX * STEPS[::-1][np.argmin(table, axis=0)])


def bounded(scales: Any) -> Vector:
    """Scales as f32 within the quantizer's bounds."""
    return np.clip(np.asarray(scales, np.float32), np.float32(MIN_SCALE), np.float32(MAX_SCALE)).astype(np.float32)
