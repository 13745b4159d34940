"""What a scheme does to K and V on their way into a model's cache: the number format of `kvtier_kernels.reference`, and
controls.

A scheme quantizes and decodes at once; attention then reads values that are exactly what FP8 blocks decode to. Formats
whose scales come from a whole engine block act when a block is full, as in kvtier, where the open tail of a sequence
stays native. Native layers are not touched at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from kvtier_kernels.reference import dequantize, quantize

from kvtier.errors import Invalid
from kvtier.format.artifact import Artifact
from kvtier.format.layout import DYNAMIC, STATIC
from kvtier.quality.loaded_model import LoadedModel

BLOCK = 16  # tokens of an engine block
WHOLE = frozenset(("block-head", "channel"))  # granularities that need a block's tokens together
# (layer, part): f32 [heads] or [1]; [heads, width] for the control "channel-static"
StaticScales = Mapping[tuple[int, str], torch.Tensor]


@dataclass(slots=True)
class Tally:
    """What was seen of one layer and part: elements, finite ones clipped, non-finite ones, largest magnitude a head."""

    elements: int = 0
    clipped: int = 0
    nonfinite: int = 0
    amax: np.ndarray[Any, np.dtype[np.float32]] | None = None

    def add(self, elements: int, clipped: int, nonfinite: int, amax: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """Counts more of the same part."""
        self.elements += elements
        self.clipped += clipped
        self.nonfinite += nonfinite
        self.amax = amax if self.amax is None else np.maximum(self.amax, amax)


@dataclass(frozen=True, slots=True)
class Scheme:
    """k, v        granularity of each part; "bf16" rounds to bf16 (the noise floor), "channel-static" is a control that
                   kvtier does not offer
    scales      of the static parts
    excluded    layers that stay native
    block       tokens of an engine block
    """

    name: str
    k: str
    v: str
    scales: StaticScales = field(default_factory=dict)
    excluded: frozenset[int] = frozenset()
    block: int = BLOCK

    def __post_init__(self) -> None:
        for part in (self.k, self.v):
            if part not in STATIC | DYNAMIC | {"bf16", "channel-static"}:
                raise Invalid(f"{self.name}: {part!r:.80} is no granularity")

    @property
    def whole_blocks(self) -> bool:
        return bool({self.k, self.v} & WHOLE)

    @property
    def uncalibrated(self) -> bool:
        """Whether every static scale is 1.0."""
        return bool(self.scales) and all(bool((values == 1.0).all()) for values in self.scales.values())


def from_artifact(artifact: Artifact, name: str = "artifact") -> Scheme:
    """The scheme that an artifact describes."""
    formats = {part: form.granularity for part, form in artifact.parts.items()}
    if set(formats) != {"k", "v"}:
        raise Invalid(f"an artifact for {', '.join(sorted(formats))}: this compares K and V")
    scales = {key: torch.from_numpy(np.array(values)) for key, values in artifact.scales.items()}
    return Scheme(name, formats["k"], formats["v"], scales, frozenset(artifact.excluded))


class Quantizer:
    """Does to one sequence's cache what a scheme says, and keeps tallies. `attach` once per cache; not for threads."""

    def __init__(self, scheme: Scheme | None) -> None:
        self.scheme = scheme
        self.tallies: dict[tuple[int, str], Tally] = {}

    def new_cache(self, loaded: LoadedModel) -> Any:
        """An empty cache of this model with the scheme in all its layers that keep K and V."""
        return self.attach(loaded.empty_cache(), [layer.index for layer in loaded.caches.kv_layers()])

    def attach(self, cache: Any, layers: Iterable[int]) -> Any:
        """Changes the `update` of these layers of a transformers cache; returns the cache. Raises Invalid for a cache
        that drops tokens, under a scheme of whole blocks."""
        scheme = self.scheme
        for index in layers if scheme is not None else ():
            if scheme is None or index in scheme.excluded:
                continue
            layer = cache.layers[index]
            if scheme.whole_blocks and getattr(layer, "is_sliding", False):
                where = f"{scheme.name}: layer {index} has a sliding window"
                raise Invalid(f"{where}, whose blocks are not kept whole here: exclude it")
            layer.update = self._update(layer, index, layer.update)
            layer.kvtier_open = 0
        return cache

    def _update(self, layer: Any, index: int, original: Any) -> Any:
        scheme = self.scheme
        assert scheme is not None

        def at_once(keys: torch.Tensor, values: torch.Tensor, *rest: Any, **more: Any) -> Any:
            k, v = self._apply(index, "k", keys, scheme.k), self._apply(index, "v", values, scheme.v)
            return original(k, v, *rest, **more)

        def whole(keys: torch.Tensor, values: torch.Tensor, *rest: Any, **more: Any) -> Any:
            original(keys, values, *rest, **more)
            pending = layer.kvtier_open + keys.shape[-2]  # tokens at the end that are native yet
            full = pending // scheme.block * scheme.block
            layer.kvtier_open = pending - full
            if full:
                for name, part, granularity in (("keys", "k", scheme.k), ("values", "v", scheme.v)):
                    held = getattr(layer, name)
                    start = held.shape[-2] - pending
                    done = self._apply(index, part, held[..., start : start + full, :], granularity)
                    setattr(layer, name, torch.cat([held[..., :start, :], done, held[..., start + full :, :]], dim=-2))
            return layer.keys, layer.values

        return whole if scheme.whole_blocks else at_once

    def _apply(self, index: int, part: str, x: torch.Tensor, granularity: str) -> torch.Tensor:
        """Quantized and decoded [1, heads, tokens, width], in the dtype it came in."""
        assert self.scheme is not None
        if granularity == "bf16":
            return x.bfloat16().to(x.dtype)
        tally = self.tallies.setdefault((index, part), Tally())
        given = x[0]
        static = None
        if granularity in STATIC or granularity == "channel-static":
            static = self.scheme.scales.get((index, part))
            if static is None:
                missing = f"{part}_scale of layer {index} is missing"
                raise Invalid(f"{self.scheme.name}: {missing}; exclude the layer or calibrate it")
            static = static.to(x.device)
        if granularity == "channel-static":
            assert static is not None
            given, granularity, channels, static = given / static[:, None, :], "tensor", static, torch.ones(1)
        else:
            channels = None
        blocks = given.shape[1] // self.scheme.block if granularity in WHOLE else 1
        found = quantize(given, granularity, static, engine_blocks=blocks)
        clipped, nonfinite = (int(each.sum()) for each in (found.counts.clipped, found.counts.nonfinite))
        tally.add(given.numel(), clipped, nonfinite, found.counts.amax.cpu().numpy())
        decoded = dequantize(found.codes, found.scales, granularity)
        return (decoded if channels is None else decoded * channels[:, None, :]).to(x.dtype)[None]
