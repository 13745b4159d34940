"""`kvtier calibrate` and `kvtier evaluate`: scales from data, and what quantized KV costs. Need the extra `torch`."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from kvtier.cli import output
from kvtier.cli.app import Common, command
from kvtier.cli.inputs import Exclude, Revision, layers
from kvtier.cli.output import Exit, message
from kvtier.errors import Invalid
from kvtier.format import artifact as bundle
from kvtier.format.fingerprint import resolve_revision
from kvtier.models import capacity
from kvtier.models.model_config import read_caches

Texts = Annotated[
    list[str] | None,
    Option("--text", help="stratum=FILE (.txt, .jsonl, .tokens); may be repeated. [default: a built-in text]"),
]
Model = Annotated[str, Argument(help="Directory of a Hugging Face model, or smollm2.")]
Device = Annotated[str, Option("--device", help="cpu, or another device of torch, e.g. cuda.")]
Dtype = Annotated[
    str, Option("--dtype", help="What the model computes in; float32 measures the format and nothing else.")
]
Threads = Annotated[int, Option("--threads", min=0, max=1024, help="Threads that torch may use. [default: all]")]


@command()
def calibrate(
    common: Common,
    model: Model,
    save: Annotated[Path, Option("--save", help="Directory to write the artifact to.")],
    text: Texts = None,
    length: Annotated[
        int, Option("--length", min=2, max=2**20, help="Tokens of a piece: as long as the contexts you serve.")
    ] = 2048,
    samples: Annotated[int, Option("--samples", min=1, max=100_000, help="Pieces of each stratum.")] = 8,
    granularity: Annotated[str, Option("--granularity", help="tensor or head.")] = "head",
    rule: Annotated[str, Option("--rule", help="amax, percentile or least-error.")] = "amax",
    headroom: Annotated[float, Option("--headroom", help="Factor on amax and percentile.")] = 2.0,
    percentile: Annotated[float, Option("--percentile", help="For that rule.")] = 99.99,
    exclude: Exclude = "",
    sliding: Annotated[
        bool,
        Option("--sliding", help="Also layers with a sliding window, which stay native beside full ones otherwise."),
    ] = False,
    sensitivity: Annotated[
        int, Option("--sensitivity", min=0, help="Tokens to measure each layer's cost on; 0: not measured.")
    ] = 0,
    statistics: Annotated[
        Path | None, Option("--statistics", help="CSV of what was seen, by layer, part, head and stratum.")
    ] = None,
    one: Annotated[bool, Option("--uncalibrated", help="Scale 1.0 everywhere, without looking at any data.")] = False,
    revision: Revision = "",
    device: Device = "cpu",
    dtype: Dtype = "float32",
    threads: Threads = 0,
) -> Exit:
    """Calibrate scales on texts and write the artifact. Refuses to export a layer that saw nothing."""
    out = layers(exclude)
    if one:
        return _uncalibrated(common, model, save, granularity, out, revision)
    quality = _workbench(threads)
    with output.steps() as step:
        step("load the model", 0, 1)
        loaded = quality.loaded_model.load(model, revision or None, dtype, device)
        step("load the model", 1, 1)
        out = sorted({*out, *(() if sliding else loaded.caches.windowed)})
        pieces = quality.texts.read(text or [], loaded.encode, length, samples)
        observer = quality.calibrate.observe(loaded, pieces, partial(step, "calibrate"))
        rules = {"granularity": granularity, "rule": rule, "headroom": headroom, "percent": percentile}
        export = partial(quality.calibrate.export, loaded, observer, pieces, **rules, excluded=out)
        made = export()
        costs: dict[int, float] = {}
        if sensitivity:
            tokens = quality.texts.read(text or [], loaded.encode, sensitivity, 1)[0].tokens
            costs = quality.calibrate.sensitivity(loaded, made, tokens, partial(step, "each layer alone"))
            made = export(report=quality.calibrate.sensitivity_report(costs))
    made.save(save)
    if statistics is not None:
        quality.report.write_csv(statistics, quality.calibrate.statistics(observer, made.scales))
    proposed = quality.calibrate.propose(costs, loaded.caches)
    _say(common, save, made, costs, proposed, _strata(observer), _curve(observer, made))
    return Exit.OK


def _say(
    common: Common,
    save: Path,
    made: bundle.Artifact,
    costs: dict[int, float],
    proposed: list[tuple[int, float, int]],
    strata: dict[str, int],
    curve: list[tuple[float, float]],
) -> None:
    """What a calibration has to say."""
    data: dict[str, Any] = {"digest": made.digest, "manifest": made.to_json(), "strata": strata}
    data |= {"clip_curve": curve, "sensitivity": costs}
    columns = ("layer", "kl", "bytes_per_token")
    data["proposed_exclusions"] = [dict(zip(columns, one, strict=True)) for one in proposed]

    def show() -> None:
        print(f"artifact {made.digest}")
        print(f"{save}: {len(made.scales)} scales, positions up to {made.calibrated_position}, {made.report['mix']}")
        output.table(("stratum", "layers and parts whose largest value it has"), list(strata.items()))
        shares = [(f"1/{1 / factor:.0f}", f"{share:.2e}") for factor, share in curve]
        output.table(("scale times", "share that clips"), shares)
        for layer, cost, nbytes in proposed:
            native = f"leaving it native costs {nbytes:,} bytes a token: --exclude {layer}"
            print(f"layer {layer} alone costs KL {cost:.4f}; {native}")
        if costs and not proposed:
            print("no layer stands out: nothing to exclude")

    output.result(data, common.json, show)


@command()
def evaluate(
    common: Common,
    model: Model,
    report: Annotated[Path, Option("--report", help="Directory for report.md, CSV and plots.")],
    artifact: Annotated[
        Path | None, Option("--artifact", help="The artifact to judge. [default: calibrate here]")
    ] = None,
    text: Texts = None,
    calibration: Annotated[
        list[str] | None, Option("--calibration", help="stratum=FILE to calibrate on, where that is done here.")
    ] = None,
    calibration_length: Annotated[
        int, Option("--calibration-length", min=2, max=2**20, help="Tokens of a piece of it.")
    ] = 2048,
    schemes: Annotated[str, Option("--schemes", help="Comma-separated. [default: all of them]")] = "",
    lengths: Annotated[str, Option("--lengths", help="Context lengths, ascending.")] = "512,2048",
    sequences: Annotated[int, Option("--sequences", min=1, max=10_000, help="Pieces of each text and length.")] = 2,
    factor: Annotated[int, Option("--twin", min=0, max=65536, help="Factor of the outlier twin; 0: none.")] = 512,
    without: Annotated[str, Option("--without", help="Layers to leave native one at a time.")] = "",
    passages: Annotated[
        int, Option("--passages", min=0, max=16, help="Hidden passages and needles; 0: no retrieval.")
    ] = 8,
    tasks: Annotated[Path | None, Option("--tasks", help="JSONL of prompts and checkers.")] = None,
    built_in: Annotated[
        bool, Option("--answers/--no-answers", help="The built-in JSON, tool-call and repetition tasks.")
    ] = True,
    temperature: Annotated[float, Option("--temperature", min=0, max=10, help="Of free-running answers.")] = 0.0,
    seed: Annotated[int, Option("--seed", min=0, help="For whatever is drawn.")] = 0,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    threads: Threads = 0,
) -> Exit:
    """Compare native with quantized KV on the same texts and judge each scheme. Exit code 1 if the artifact (else: a
    calibrated scheme) is bad."""
    quality = _workbench(threads)
    found = layers(lengths)
    if not found:
        raise Invalid("--lengths needs a number at least")
    names = tuple(name.strip() for name in schemes.split(",") if name.strip()) or quality.standard_schemes.NAMES
    settings = quality.evaluate.EvaluationSettings(
        names, tuple(found), sequences, factor, tuple(layers(without)), passages, temperature=temperature, seed=seed
    )
    asked = [*(quality.tasks.built_in() if built_in else []), *(quality.tasks.read(tasks) if tasks is not None else [])]
    given = bundle.load(artifact) if artifact is not None else None
    with output.steps() as step:
        step("load the model", 0, 1)
        loaded = quality.loaded_model.load(model, None, dtype, device)
        step("load the model", 1, 1)
        pieces = quality.texts.read(calibration or [], loaded.encode, calibration_length, 4)

        def texts(length: int, number: int) -> Any:
            return quality.texts.read(text or [], loaded.encode, length, number, evaluation=True)

        made = quality.evaluate.run(loaded, settings, pieces, texts, given, asked, step)
    files = quality.report.write(made, report)
    verdicts = made.verdicts
    output.warn(made.warnings)
    data: dict[str, Any] = {"verdicts": [asdict(v) for v in verdicts], "files": [str(file) for file in files]}
    data["warnings"] = [asdict(one) for one in made.warnings]

    def show() -> None:
        rows = [(v.model, v.scheme, v.word, "; ".join(v.reasons)) for v in verdicts]
        output.table(("model", "scheme", "verdict", "why"), rows)
        print(f"report: {files[0]}")

    output.result(data, common.json, show)
    judged = {"artifact"} if given is not None else {"tensor", "head"}
    return Exit.NEGATIVE if any(v.word == "bad" and v.scheme in judged for v in verdicts) else Exit.OK


def _uncalibrated(common: Common, model: str, save: Path, granularity: str, excluded: list[int], revision: str) -> Exit:
    """Scale 1.0, which needs the configuration only."""
    from kvtier.quality.uncalibrated import uncalibrated

    name, exact = resolve_revision(model, revision or None)
    caches = read_caches(model)
    capacity.group_sizes(caches, capacity.Choice(excluded=frozenset(excluded)))
    made = uncalibrated(caches, name, exact, granularity, excluded)
    made.save(save)
    message("UNCALIBRATED: every scale is 1.0; values beyond 448 will be clipped")
    data = {"digest": made.digest, "manifest": made.to_json(), "uncalibrated": True}
    output.result(data, common.json, lambda: print(f"artifact {made.digest}"))
    return Exit.OK


def _workbench(threads: int) -> Any:
    """The torch side, imported when it is needed. Raises Invalid where torch or transformers are missing."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that wait should sleep
    if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        raise Invalid(f"{missing[0]} is not installed: pip install 'kvtier[torch]'")
    for name in ("calibrate", "evaluate", "loaded_model", "report", "standard_schemes", "tasks", "texts"):
        importlib.import_module(f"kvtier.quality.{name}")
    quality: Any = importlib.import_module("kvtier.quality")
    quality.loaded_model.set_threads(threads)
    return quality


def _strata(observer: Any) -> dict[str, int]:
    """{stratum: for how many layers and parts it has the largest magnitude}: what the mix must contain."""
    counts: dict[str, int] = {}
    for seen in observer.seen.values():
        if seen.amax:
            first = max(seen.amax, key=lambda name: float(seen.amax[name].max()))
            counts[first] = counts.get(first, 0) + 1
    return counts


def _curve(observer: Any, made: bundle.Artifact) -> list[tuple[float, float]]:
    """The clip curve over the whole model: (factor on the scales, share of values that would clip)."""
    from kvtier.quality.observe import clip_curve

    both = [(observer.seen[key], scales) for key, scales in made.scales.items()]
    curves = [(seen.elements, clip_curve(seen, scales)) for seen, scales in both]
    total = sum(elements for elements, _ in curves)
    shares = [sum(n * points[place][1] for n, points in curves) / total for place in range(len(curves[0][1]))]
    return [(factor, share) for (factor, _), share in zip(curves[0][1], shares, strict=True)]
