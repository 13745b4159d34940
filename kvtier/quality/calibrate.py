"""Scales from data: passes over a calibration mix, a rule that turns what was seen into scales, and the artifact that
records all of it.

Wrong scales are wrong loudly: a layer that saw nothing, or something that is not a number, is never exported. e4m3
floats, so a scale that is too large costs next to nothing (1,000 times was not measurable on SmolLM2-135M) while one 20
times too small destroyed the model by clipping: the default leaves room. Keeps no state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from kvtier_kernels.reference import CODEC, FP8_MAX

from kvtier.errors import Invalid
from kvtier.format.artifact import Artifact, PartFormat
from kvtier.format.identity import f32_hex
from kvtier.models import capacity
from kvtier.models.model_config import ModelCaches
from kvtier.quality.loaded_model import LoadedModel
from kvtier.quality.observe import Magnitudes, Observer, Vector, bounded, clip_curve, least_error, percentile
from kvtier.quality.schemes import Quantizer, Scheme
from kvtier.quality.texts import Sample, digest, mix

RULES = ("amax", "percentile", "least-error")
HEADROOM = 2.0
NOTABLE = 0.002  # nats of KL below which no layer is worth excluding
APART = 5.0  # times the median layer's KL that a layer must cost to be proposed

Step = Callable[[int, int], None]  # (done, total)


def observe(loaded: LoadedModel, samples: Sequence[Sample], step: Step | None = None) -> Observer:
    """Runs the model over all samples, each from position 0."""
    observer = Observer(loaded.caches.kv_layers())
    total, done = sum(len(sample.tokens) for sample in samples), 0
    for sample in samples:
        cache = observer.attach(loaded.empty_cache(), sample.stratum)
        for logits in loaded.passes(torch.tensor(sample.tokens), cache):
            done += len(logits)
            if step is not None:
                step(done, total)
        observer.position = max(observer.position, len(sample.tokens) - 1)
    return observer


def choose(seen: Magnitudes, granularity: str, rule: str, headroom: float = HEADROOM, percent: float = 99.99) -> Vector:
    """Scales of one part of one layer: one per head, or one. A head that saw only zeros gets the largest scale of the
    others.

    amax         largest magnitude / 448, times headroom
    percentile   the magnitude that `percent` % do not exceed / 448, times headroom: outliers clip
    least-error  the smallest squared error over what was seen; headroom does not apply
    """
    if granularity not in ("tensor", "head"):
        raise Invalid(f"static scales are per tensor or per head, not {granularity!r:.80}")
    if rule not in RULES:
        raise Invalid(f"the rule is one of {', '.join(RULES)}, not {rule!r:.80}")
    if not 1 <= headroom <= 1024 or not 50 <= percent <= 100:
        raise Invalid("headroom is a factor from 1 to 1024, a percentile is from 50 to 100")
    top = seen.top
    if rule == "least-error":
        one = (seen.counts.sum(axis=0, keepdims=True), top.max(keepdims=True))
        scales = least_error(*(one if granularity == "tensor" else (seen.counts, top)))
    else:
        values = top if rule == "amax" else percentile(seen, percent)
        values = values if granularity == "head" else values.max(keepdims=True)
        scales = bounded(values.astype(np.float64) * headroom / FP8_MAX)
    if granularity == "head" and (top == 0).any():
        scales = np.where(top == 0, scales.max(), scales).astype(np.float32)
    return scales


def refuse_gaps(observer: Observer, excluded: Iterable[int] = ()) -> None:
    """Raises Invalid, naming each, if a layer not excluded saw nothing, only zeros, or something not finite."""
    wrong = []
    for (layer, part), seen in sorted(observer.seen.items()):
        if layer in set(excluded):
            continue
        if not seen.samples:
            wrong.append(f"{part} of layer {layer} saw nothing")
        elif seen.nonfinite:
            wrong.append(f"{part} of layer {layer} saw {seen.nonfinite} values that are not finite")
        elif not seen.top.any():
            wrong.append(f"{part} of layer {layer} saw only zeros")
    if wrong:
        advice = "exclude a layer that keeps no KV, or give texts that reach it"
        raise Invalid(f"nothing is exported: {'; '.join(wrong)} ({advice})")


def export(
    loaded: LoadedModel,
    observer: Observer,
    samples: Sequence[Sample],
    *,
    granularity: str = "head",
    rule: str = "amax",
    headroom: float = HEADROOM,
    percent: float = 99.99,
    excluded: Iterable[int] = (),
    report: Mapping[str, str | int] | None = None,
) -> Artifact:
    """The artifact of what was observed. Raises Invalid as `refuse_gaps` does."""
    out = frozenset(excluded)
    capacity.group_sizes(loaded.caches, capacity.Choice(excluded=out))  # refuses layers that the model lacks
    refuse_gaps(observer, out)
    kept = {key: seen for key, seen in observer.seen.items() if key[0] not in out}
    scales = {key: choose(seen, granularity, rule, headroom, percent) for key, seen in kept.items()}
    elements = sum(seen.elements for seen in kept.values())
    clipped = sum(clip_curve(seen, scales[key])[0][1] * seen.elements for key, seen in kept.items())
    parameters = {"amax": f"x{headroom:g}", "percentile": f"{percent:g} x{headroom:g}", "least-error": ""}[rule]
    told: dict[str, str | int] = {
        "rule": f"{rule} {parameters}".strip(),
        "samples": len(samples),
        "tokens": sum(len(sample.tokens) for sample in samples),
        "mix": mix(samples)[:1000],
        "tokenizer": loaded.tokenizer,
        "clipped share": f"{clipped / max(1, elements):.3g}",
        **({"model note": loaded.note} if loaded.note else {}),
        **(report or {}),
    }
    form = PartFormat("e4m3fn", granularity)
    made = (rule, CODEC, "plain", f"texts:{digest(samples)}", scales, tuple(sorted(out)), observer.position, told)
    return Artifact(loaded.name, loaded.revision, {"k": form, "v": form}, *made)


def statistics(observer: Observer, scales: Mapping[tuple[int, str], Vector]) -> list[dict[str, Any]]:
    """A row per layer, part and head: amax of every stratum, percentiles over all, chosen scale (empty if native)."""
    rows = []
    strata = sorted({stratum for seen in observer.seen.values() for stratum in seen.amax})
    for (layer, part), seen in sorted(observer.seen.items()):
        percents = (50.0, 99.0, 99.9, 99.99) if seen.counts.size else ()
        points = {percent: percentile(seen, percent) for percent in percents}
        chosen = scales.get((layer, part))
        for head in range(seen.heads):
            row: dict[str, Any] = {"layer": layer, "part": part, "head": head}
            row |= {"samples": seen.samples, "amax": seen.top[head]}
            row |= {f"amax {stratum}": seen.amax[stratum][head] if stratum in seen.amax else 0.0 for stratum in strata}
            row |= {f"p{percent:g}": values[head] for percent, values in points.items()}
            rows.append(row | {"scale": "" if chosen is None else np.broadcast_to(chosen, seen.heads)[head]})
    return rows


def sensitivity(
    loaded: LoadedModel, artifact: Artifact, tokens: Sequence[int], step: Step | None = None
) -> dict[int, float]:
    """{layer: mean KL(native || native but for this layer)} over one text: what quantizing each layer alone costs."""
    scales = {key: torch.from_numpy(np.array(values)) for key, values in artifact.scales.items()}
    layers = sorted({layer for layer, _ in scales})
    kinds = {part: form.granularity for part, form in artifact.parts.items()}
    text = torch.tensor(tokens)
    base = _log_probabilities(loaded, text, None)
    found = {}
    for done, layer in enumerate(layers, 1):
        others = frozenset(other.index for other in loaded.caches.kv_layers() if other.index != layer)
        quantized = _log_probabilities(loaded, text, Scheme("one layer", kinds["k"], kinds["v"], scales, others))
        found[layer] = float((base.exp() * (base - quantized)).sum(dim=-1).mean())
        if step is not None:
            step(done, len(layers))
    return found


def propose(costs: Mapping[int, float], caches: ModelCaches) -> list[tuple[int, float, int]]:
    """(layer, KL, bytes per token that leaving it native costs) of the layers that stand out, the worst first."""
    if not costs:
        return []
    limit = max(NOTABLE, APART * median(costs.values()))
    choice = capacity.Choice(sliding=True)
    worst = sorted(((cost, layer) for layer, cost in costs.items() if cost > limit), reverse=True)
    return [(layer, cost, capacity.exclusion_bytes(caches, choice, layer)) for cost, layer in worst]


def sensitivity_report(costs: Mapping[int, float]) -> dict[str, str | int]:
    """Per-layer costs as fields of an artifact's report."""
    return {f"sensitivity.{layer}": f32_hex(cost) for layer, cost in sorted(costs.items())}


def _log_probabilities(loaded: LoadedModel, tokens: torch.Tensor, scheme: Scheme | None) -> torch.Tensor:
    passes = loaded.passes(tokens, Quantizer(scheme).new_cache(loaded))
    return torch.cat([logits.float().log_softmax(-1) for logits in passes])
