"""One evaluation from end to end: texts, lengths, schemes, the outlier twin, retrieval and tasks; then a verdict on
every scheme.

The verdict is made of the numbers alone: nobody says beforehand which scheme is good. Its limits are constants here,
with where they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvtier.errors import Invalid
from kvtier.format.artifact import Artifact
from kvtier.format.layout import Group, Layer, Layout, Part
from kvtier.models.advice import Advice, beyond_calibration, uncalibrated
from kvtier.models.model_config import ModelCaches
from kvtier.quality import calibrate, compare, outlier_twin, retrieval, standard_schemes, tasks, texts
from kvtier.quality.compare import Result
from kvtier.quality.loaded_model import LoadedModel
from kvtier.quality.schemes import BLOCK, Scheme
from kvtier.quality.texts import Sample

# Nats of KL per token. On SmolLM2-135M calibrated schemes stay below 0.03 up to 4,096 tokens; 0.1 already costs 10 % of
# perplexity.
BAD_KL = 0.1
NOTABLE_KL = 0.03
APART = 5.0  # times the best quantized scheme of the same cell
DRIFT = 3.0  # times the first bucket's KL in a later one: it gets worse with position
GOOD, DOUBTFUL, BAD = "good", "doubtful", "bad"

Step = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(frozen=True, slots=True)
class Cell:
    """The results of all schemes on one model (natural or twin), text and length."""

    model: str
    text: str
    length: int
    results: list[Result]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be thought of a scheme on one model; `reasons` name the cells."""

    scheme: str
    model: str
    word: str
    reasons: list[str]


@dataclass(slots=True)
class Evaluation:
    """Everything that was found; `report` writes it."""

    loaded: LoadedModel
    settings: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)
    retrievals: list[retrieval.Retrieval] = field(default_factory=list)
    answered: list[tasks.TaskAnswers] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[Advice] = field(default_factory=list)
    bytes_per_token: dict[str, float] = field(default_factory=dict)

    @property
    def verdicts(self) -> list[Verdict]:
        return judge(self.cells)


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """What to run.

    schemes      names of `standard_schemes`; an artifact stands before them
    lengths      context lengths; `sequences` pieces of each length and text
    factor       of the outlier twin, which is run at the first length; 0 for none
    without      layers that are each left native once, beside the first static scheme
    passages     hidden passages and needles of the retrieval, at the largest length; 0 for none
    temperature  of free-running answers, 0 for greedy; seed for it and for what is drawn
    """

    schemes: tuple[str, ...] = standard_schemes.NAMES
    lengths: tuple[int, ...] = (512, 2048)
    sequences: int = 2
    factor: int = 512
    without: tuple[int, ...] = ()
    passages: int = 8
    contexts: int = 1
    temperature: float = 0.0
    seed: int = 0


def run(
    loaded: LoadedModel,
    settings: EvaluationSettings,
    calibration: Sequence[Sample],
    evaluation: Callable[[int, int], list[Sample]],
    artifact: Artifact | None = None,
    asked: Sequence[tasks.Task] = (),
    step: Step | None = None,
) -> Evaluation:
    """Runs everything. `evaluation(length, number)` gives texts that the calibration did not see. Without an artifact,
    and on the twin, scales come from `calibration`. Raises Invalid for an artifact of another model."""
    tell = step or (lambda *_: None)
    if artifact is not None and artifact.revision != loaded.revision:
        raise Invalid(f"the artifact belongs to revision {artifact.revision}, the model is {loaded.revision}")
    if max(settings.lengths) > loaded.longest:
        raise Invalid(f"the model sees {loaded.longest} tokens, not {max(settings.lengths)}")
    made = Evaluation(
        loaded, {"schemes": ", ".join(settings.schemes), "lengths": settings.lengths, "sequences": settings.sequences}
    )
    natural = _schemes(loaded, settings, calibration, artifact, tell)
    made.warnings += _warnings(artifact, natural, calibration, max(settings.lengths))
    made.bytes_per_token = {
        scheme.name: bytes_per_token(loaded.caches, scheme)
        for scheme in natural
        if not scheme.k.startswith(("bf16", "channel-s"))
    }
    made.cells += _cells(loaded, "natural", settings, settings.lengths, natural, evaluation, tell)
    if settings.passages:
        _retrieve(loaded, settings, natural, evaluation, made, tell)
    if asked:
        shown = [None, *(scheme for scheme in natural if not scheme.k.startswith("channel-s"))]
        made.answered, made.answers = tasks.answer_all(
            loaded,
            asked,
            shown,
            temperature=settings.temperature,
            seed=settings.seed,
            step=lambda done, total: tell("answers", done, total),
        )
    if settings.factor:
        with outlier_twin.outliers(loaded, settings.factor, settings.seed):
            schemes = _schemes(loaded, replace(settings, without=()), calibration, None, tell)
            made.cells += _cells(
                loaded, f"twin {settings.factor}", settings, settings.lengths[:1], schemes, evaluation, tell
            )
    return made


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    """A verdict per scheme and model, from KL, its course over positions, and the distance from the best scheme."""
    found: dict[tuple[str, str], Verdict] = {}
    for cell in cells:
        quantized = [result for result in cell.results if result.scheme.k != "bf16"]
        best = min((_mean(result) for result in quantized), default=0.0)
        for result in quantized:
            verdict = found.setdefault(
                (result.scheme.name, cell.model), Verdict(result.scheme.name, cell.model, GOOD, [])
            )
            word, reason = _one(result, best)
            if word != GOOD:
                verdict.reasons.append(f"{cell.text}, {cell.length:,} tokens: {reason}")
                worst = BAD if BAD in (word, verdict.word) else DOUBTFUL
                found[result.scheme.name, cell.model] = replace(verdict, word=worst)
    return list(found.values())


def _one(result: Result, best: float) -> tuple[str, str]:
    kl = _mean(result)
    clip = f", {result.clipped:.2%} of the values clip" if result.clipped > 1e-4 else ""
    if kl > BAD_KL:
        return BAD, f"KL {kl:.3f}{clip}"
    if kl > NOTABLE_KL and kl > APART * best:
        return BAD, f"KL {kl:.3f}, {kl / best:.0f} times the best scheme's{clip}"
    first, *later = [
        interval.mean for low, high in result.buckets() if (interval := result.over(result.kl, low, high)) is not None
    ]
    if later and max(later) > NOTABLE_KL and max(later) > DRIFT * first:
        return (
            BAD if max(later) > BAD_KL else DOUBTFUL
        ), f"KL grows from {first:.3f} to {max(later):.3f} with position{clip}"
    return (DOUBTFUL, f"KL {kl:.3f}{clip}") if kl > NOTABLE_KL else (GOOD, "")


def bytes_per_token(caches: ModelCaches, scheme: Scheme) -> float:
    """Bytes of one token in kvtier's blocks under this scheme: codes, scales, native layers, alignment and headers."""
    total = 0.0
    kinds: dict[tuple[int, int | None], list[Layer]] = {}
    for layer in caches.cached:
        out = layer.index in scheme.excluded
        parts = [
            Part(name, width, caches.dtype if out else "e4m3fn", "none" if out else granularity)
            for name, width, granularity in zip("kv", layer.widths, (scheme.k, scheme.v), strict=True)
        ]
        kinds.setdefault((layer.heads, layer.window), []).append(Layer(layer.index, tuple(parts)))
    for (heads, window), layers in kinds.items():
        total += Layout((Group("attention", heads, BLOCK, tuple(layers), 1, window),)).extents().block_bytes / BLOCK
    return total


def _mean(result: Result) -> float:
    found = result.over(result.kl)
    return found.mean if found is not None else 0.0


def _schemes(
    loaded: LoadedModel,
    settings: EvaluationSettings,
    calibration: Sequence[Sample],
    artifact: Artifact | None,
    tell: Step,
) -> list[Scheme]:
    if artifact is not None:
        lacking = {"channel-static"} | (
            {"head"} if any(form.granularity != "head" for form in artifact.parts.values()) else set()
        )
        schemes = standard_schemes.from_scales(
            tuple(name for name in settings.schemes if name not in lacking), artifact
        )
    else:
        observer = calibrate.observe(loaded, calibration, lambda done, total: tell("calibrate", done, total))
        calibrate.refuse_gaps(observer)
        schemes = standard_schemes.from_observer(settings.schemes, observer)
    windows = loaded.caches.windowed  # whose blocks are not kept whole
    schemes = [
        replace(scheme, excluded=scheme.excluded | windows) if scheme.whole_blocks else scheme for scheme in schemes
    ]
    static = next((scheme for scheme in schemes if scheme.scales and not scheme.uncalibrated), None)
    if static is not None:
        schemes += [
            replace(static, name=f"{static.name}, layer {layer} native", excluded=static.excluded | {layer})
            for layer in settings.without
        ]
    return schemes


def _cells(
    loaded: LoadedModel,
    model: str,
    settings: EvaluationSettings,
    lengths: Sequence[int],
    schemes: Sequence[Scheme],
    evaluation: Callable[[int, int], list[Sample]],
    tell: Step,
) -> list[Cell]:
    cells = []
    for length in lengths:
        samples = evaluation(length + 1, settings.sequences)
        for text in dict.fromkeys(sample.stratum for sample in samples):
            sequences = [sample.tokens for sample in samples if sample.stratum == text]
            what = f"{model}, {text}, {length:,} tokens"
            cells.append(Cell(model, text, length, compare.compare(loaded, sequences, schemes, partial(tell, what))))
    return cells


def _retrieve(
    loaded: LoadedModel,
    settings: EvaluationSettings,
    schemes: Sequence[Scheme],
    evaluation: Callable[[int, int], list[Sample]],
    made: Evaluation,
    tell: Step,
) -> None:
    """Copy and needles at the largest length, in filler of the first text."""
    length = max(settings.lengths)
    filler = [list(sample.tokens) for sample in evaluation(length, settings.contexts)][: settings.contexts]
    vocabulary = sorted(
        {
            word
            for word in texts.evaluation_text().split()
            if word.isascii() and word.isalpha() and word.islower() and 3 < len(word) < 10
        }
    )
    words, newline = [loaded.encode(f" {word}") for word in vocabulary], loaded.encode("\n\n")
    copies = [
        retrieval.copies(newline, text, words, len(text), settings.passages, settings.seed + i)
        for i, text in enumerate(filler)
    ]
    hidden = [
        retrieval.needles(loaded.encode, text, len(text), settings.passages, settings.seed + i)
        for i, text in enumerate(filler)
    ]
    for kind, contexts in (("copy", copies), ("needles", hidden)):
        made.retrievals += retrieval.measure(loaded, kind, contexts, [None, *schemes], partial(tell, kind))


def _warnings(
    artifact: Artifact | None, schemes: Sequence[Scheme], calibration: Sequence[Sample], length: int
) -> list[Advice]:
    """What is said beyond the calibrated length, and the mark of scale 1.0, for whatever gave the scales."""
    if artifact is not None:
        return [one for one in (beyond_calibration(artifact, length), uncalibrated(artifact)) if one is not None]
    position = max((len(sample.tokens) for sample in calibration), default=0)
    static = any(scheme.scales and not scheme.uncalibrated for scheme in schemes)
    if not static or position >= length:
        return []
    return [
        Advice(
            "calibrated length",
            f"calibrated on {position:,} tokens, used up to {length:,}",
            "calibrate on texts as long as those you serve",
        )
    ]
