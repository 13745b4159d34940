"""Live values against the scales they are stored with: what the quantizer counts while it runs, as metrics with few
labels.

A calibration ages: other prompts, a longer context, an adapter. The quantize kernel and its reference count clipped and
non-finite values and the largest magnitude of every layer and head; an engine hands these numbers to one `Drift`, and
scrapes read it. packaging/alerts-quality.yml has rules. Thread-safe by one lock, held for microseconds; imports no
torch and no metrics library."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import Invalid
from kvtier.format.identity import all_one, pack_scales

FP8_MAX = 448.0
MAX_RANGES = 32  # values of the label "layers": a model with more layers has several layers in one
PREFIX = "kvtier_kv_"

_SHARE = "Largest magnitude of the last minutes as a share of what its scale can hold; above 1 it clips."
# name -> (kind, what it means)
METRICS: dict[str, tuple[str, str]] = {
    "values_total": ("counter", "K and V values that were quantized."),
    "clipped_values_total": ("counter", "Of these, finite values beyond what their scale can hold."),
    "nonfinite_values_total": ("counter", "Of these, NaN and Inf; their blocks are not stored."),
    "amax_share": ("gauge", f"{_SHARE} Static scales only."),
    "uncalibrated": ("gauge", "1 where every static scale is 1.0."),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One value of one metric; `labels` are bounded: part, and a range of layers."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


@dataclass(slots=True)
class _Sums:
    values: int = 0
    clipped: int = 0
    nonfinite: int = 0
    share: float = 0.0  # in the present window
    before: float = 0.0  # in the one before it


class Drift:
    """Counters of one engine.

    scales   the static scales in use, {(layer, part): f32 [heads] or [1]}, as in an artifact; empty where scales come
             with the tokens
    layers   layers of the model that are quantized
    """

    def __init__(self, scales: Mapping[tuple[int, str], NDArray[np.float32]], layers: list[int] | None = None) -> None:
        self._limits = {key: FP8_MAX * np.asarray(values, np.float64) for key, values in scales.items()}
        numbers = sorted({layer for layer, _ in scales} if layers is None else set(layers))
        if not numbers:
            raise Invalid("say which layers are quantized")
        each = -(-len(numbers) // MAX_RANGES)
        chunks = [numbers[i : i + each] for i in range(0, len(numbers), each)]
        named = {str(chunk[0]) if len(chunk) == 1 else f"{chunk[0]}-{chunk[-1]}": chunk for chunk in chunks}
        self._range = {layer: name for name, chunk in named.items() for layer in chunk}
        self._sums: dict[tuple[str, str], _Sums] = {}
        self._uncalibrated = all_one(pack_scales(scales))
        self._lock = threading.Lock()

    def add(self, layer: int, part: str, values: int, clipped: int, nonfinite: int, amax: NDArray[Any]) -> None:
        """What one quantization saw of a part of a layer: numbers of elements, and the largest magnitude per head (or
        of all, one number). Raises Invalid for a layer that is not quantized."""
        if layer not in self._range or not part.isidentifier() or len(part) > 32:
            raise Invalid(f"{part!r:.40} of layer {layer} is not quantized here")
        limits = self._limits.get((layer, part))
        share = float(np.max(np.asarray(amax, np.float64) / limits)) if limits is not None else 0.0
        with self._lock:
            sums = self._sums.setdefault((self._range[layer], part), _Sums())
            sums.values += values
            sums.clipped += clipped
            sums.nonfinite += nonfinite
            sums.share = max(sums.share, share)

    def add_launch(
        self,
        layers: Sequence[int],
        parts: Sequence[str],
        values: Sequence[int],
        clipped: NDArray[Any],
        nonfinite: NDArray[Any],
        amax: NDArray[Any],
    ) -> None:
        """The counts of one launch of the quantize kernel, [blocks, layers, parts, heads] each
        (`kvtier_kernels.quantize.Seen`, copied to the host). `values`: elements of one block of each part, over its
        heads. Raises Invalid for arrays of another shape."""
        shape = (len(clipped), len(layers), len(parts))
        odd = any(array.ndim != 4 or array.shape[:3] != shape for array in (clipped, nonfinite, amax))
        if odd or len(values) != len(parts):
            wanted = f"counts of {len(layers)} layers and {len(parts)} parts have the shape"
            raise Invalid(f"{wanted} [blocks, layers, parts, heads], not {clipped.shape}")
        if not shape[0]:
            return
        for i, layer in enumerate(layers):
            for j, part in enumerate(parts):
                sums = int(clipped[:, i, j].sum()), int(nonfinite[:, i, j].sum())
                self.add(layer, part, values[j] * shape[0], *sums, amax[:, i, j].max(axis=0))

    def rotate(self) -> None:
        """Begins another window of `amax_share`, the larger of the present and the last; called every few minutes."""
        with self._lock:
            for sums in self._sums.values():
                sums.before, sums.share = sums.share, 0.0

    def metrics(self) -> Iterator[Metric]:
        """Everything as of now."""
        with self._lock:
            rows = [(key, replace(sums)) for key, sums in sorted(self._sums.items())]
        for (layers, part), sums in rows:
            labels = (("layers", layers), ("part", part))
            yield Metric(f"{PREFIX}values_total", labels, sums.values)
            yield Metric(f"{PREFIX}clipped_values_total", labels, sums.clipped)
            yield Metric(f"{PREFIX}nonfinite_values_total", labels, sums.nonfinite)
            if self._limits:
                yield Metric(f"{PREFIX}amax_share", labels, max(sums.share, sums.before))
        yield Metric(f"{PREFIX}uncalibrated", (), float(self._uncalibrated))

    def exposition(self) -> str:
        """The same as Prometheus text."""
        rows = list(self.metrics())
        lines = []
        for name, (kind, meaning) in METRICS.items():
            mine = [row for row in rows if row.name == PREFIX + name]
            if mine:
                family = PREFIX + name
                lines += [f"# HELP {family} {meaning}", f"# TYPE {family} {kind}"]
                for row in mine:
                    labels = ",".join(f'{key}="{value}"' for key, value in row.labels)
                    lines.append(f"{family}{{{labels}}} {row.value!r}" if labels else f"{family} {row.value!r}")
        return "\n".join(lines) + "\n"
