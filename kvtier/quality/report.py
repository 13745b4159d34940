"""An evaluation on disk: report.md, CSV, plots where matplotlib is installed. Overwrites its own files only."""

from __future__ import annotations

import csv
import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvtier.quality.compare import Result
from kvtier.quality.evaluate import BAD, DOUBTFUL, Cell, Evaluation
from kvtier.quality.standard_schemes import MEANING

FILES = ("report.md", "comparison.csv", "layers.csv", "retrieval.csv", "answers.csv")


def write(made: Evaluation, directory: Path) -> list[Path]:
    """Writes everything; the files in the order they should be read. Raises OSError if the disk refuses."""
    directory.mkdir(parents=True, exist_ok=True)
    write_csv(directory / "comparison.csv", comparison_rows(made))
    write_csv(directory / "layers.csv", layer_rows(made))
    write_csv(directory / "retrieval.csv", retrieval_rows(made))
    write_csv(directory / "answers.csv", made.answers)
    plots = plot(made, directory)
    (directory / "report.md").write_text(markdown(made, [path.name for path in plots]), "utf-8")
    return [directory / name for name in FILES] + plots


def markdown(made: Evaluation, plots: Sequence[str] = ()) -> str:
    """The report as one text: the verdict first."""
    loaded = made.loaded
    note = f" {loaded.note}." if loaded.note else ""
    lines = [f"# Quality of quantized KV: {loaded.name}", "", f"Revision `{loaded.revision}`.{note}", ""]
    for one in made.warnings:
        found, do = (text[:1].upper() + text[1:] for text in (one.found, one.do))
        lines.append(f"**Warning: {one.topic}.** {found}. {do}.\n")
    lines += ["## Verdict", "", "| model | scheme | verdict | why |", "|---|---|---|---|"]
    order = {BAD: 0, DOUBTFUL: 1}
    for verdict in sorted(made.verdicts, key=lambda v: (v.model, order.get(v.word, 2))):
        word = f"**{verdict.word}**" if verdict.word == BAD else verdict.word
        why = "; ".join(verdict.reasons) or "no limit exceeded"
        lines.append(f"| {verdict.model} | {_label(made, verdict.scheme)} | {word} | {why} |")
    interval = "± is half of a 95 % interval over sequences; one sequence gives none."
    lines += ["", f"KL is KL(native ‖ scheme) in nats per token, teacher-forced. {interval}"]
    for cell in made.cells:
        edges = cell.results[0].buckets()
        heads = "".join(f" KL {low:,}-{high:,} |" for low, high in edges)
        native, sequences = cell.results[0].native_perplexity, len(cell.results[0].kl)
        lines += ["", f"## {cell.model}, {cell.text}, {cell.length:,} tokens", ""]
        lines += [f"Native perplexity {native:.3f}; sequences: {sequences}.", ""]
        lines.append(f"| scheme | perplexity | KL |{heads} top-1 equal | clipped |")
        lines.append("|---|---|---|" + "---|" * (len(edges) + 2))
        for result in cell.results:
            buckets = "".join(f" {result.over(result.kl, low, high)} |" for low, high in edges)
            label, kl, top1 = _label(made, result.scheme.name), result.over(result.kl), result.over(result.top1)
            lines.append(f"| {label} | {result.perplexity:.3f} | {kl} |{buckets} {top1} | {result.clipped:.2%} |")
    if made.retrievals:
        lines += ["", "## Retrieval", "", "| kind | scheme | answer NLL | right tokens | right as a whole |"]
        lines.append("|---|---|---|---|---|")
        for r in made.retrievals:
            lines.append(f"| {r.kind} | {_label(made, r.scheme)} | {r.nll} | {r.correct} | {r.exact} |")
    if made.answered:
        lines += ["", "## Answers", ""]
        lines.append("| stratum | scheme | passed | whole JSON | repeated 4-grams | first tokens equal |")
        lines.append("|---|---|---|---|---|---|")
        for a in made.answered:
            passed = f"{a.passed} of {a.tasks} | {a.json} of {a.tasks} | {a.repetition:.2f} | {a.same_tokens:.2f}"
            lines.append(f"| {a.stratum} | {_label(made, a.scheme)} | {passed} |")
        equal = "How long the first tokens stay equal separates nothing: any change ends it."
        lines += ["", f"{equal} It is information only."]
    if made.bytes_per_token:
        lines += ["", "## Bytes", "", "| scheme | bytes per token in kvtier |", "|---|---|"]
        lines += [f"| {_label(made, name)} | {value:,.0f} |" for name, value in made.bytes_per_token.items()]
    names = _names(made)
    lines += ["", "## Schemes", "", *(f"- {name}: {meaning}" for name, meaning in MEANING.items() if name in names)]
    lines += ["", *([f"![{name}]({name})" for name in plots] or ["No plots: matplotlib is not installed."])]
    return "\n".join(lines) + "\n"


def comparison_rows(made: Evaluation) -> list[dict[str, Any]]:
    """One row per cell, scheme and bucket of positions; bucket "all" first."""
    rows = []
    for cell in made.cells:
        for result in cell.results:
            longest = max(len(trace) for trace in result.kl)
            for low, high in [(0, longest), *result.buckets()]:
                kl, top1 = result.over(result.kl, low, high), result.over(result.top1, low, high)
                nll, native = result.over(result.nll, low, high), result.over(result.native_nll, low, high)
                assert kl is not None and top1 is not None and nll is not None and native is not None
                row = _place(cell, result) | {"from": low, "to": high, "sequences": kl.sequences}
                row |= {"kl": kl.mean, "kl_half": kl.half, "nll": nll.mean, "native_nll": native.mean}
                rows.append(row | {"top1": top1.mean, "top1_half": top1.half, "clipped_share": result.clipped})
    return rows


def layer_rows(made: Evaluation) -> list[dict[str, Any]]:
    """What the quantizer saw, per cell, scheme, layer and part: the drift of live values against the scales."""
    rows = []
    for cell in made.cells:
        for result in cell.results:
            for (layer, part), tally in sorted(result.tallies.items()):
                top = float(tally.amax.max()) if tally.amax is not None else 0.0
                scales = result.scheme.scales.get((layer, part))
                limit = 448 * float(scales.max()) if scales is not None and scales.dim() == 1 else None
                row = _place(cell, result) | {"layer": layer, "part": part, "amax": top}
                row["amax_over_limit"] = None if limit is None else top / limit
                rows.append(row | {"clipped_share": tally.clipped / max(1, tally.elements)})
    return rows


def _place(cell: Cell, result: Result) -> dict[str, Any]:
    return {"model": cell.model, "text": cell.text, "length": cell.length, "scheme": result.scheme.name}


def retrieval_rows(made: Evaluation) -> list[dict[str, Any]]:
    """One row per kind of retrieval and scheme."""
    rows = []
    for r in made.retrievals:
        row = {"kind": r.kind, "scheme": r.scheme, "contexts": r.nll.sequences, "nll": r.nll.mean}
        rows.append(row | {"nll_half": r.nll.half, "correct": r.correct.mean, "exact": r.exact.mean})
    return rows


def plot(made: Evaluation, directory: Path) -> list[Path]:
    """KL over positions, one picture per model, text and length; nothing where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    figures = importlib.import_module("matplotlib.figure")
    paths = []
    for cell in made.cells:
        figure = figures.Figure(figsize=(8, 5))
        axes = figure.subplots()
        for result in cell.results:
            means = [(low, result.over(result.kl, low, high)) for low, high in _steps(result.kl)]
            points = [(low, max(mean.mean, 1e-6)) for low, mean in means if mean is not None]
            axes.plot([x for x, _ in points], [y for _, y in points], label=result.scheme.name)
        axes.set(title=f"{cell.model}, {cell.text}, {cell.length:,} tokens", xlabel="position")
        axes.set(yscale="log", ylabel="KL(native || scheme), nats")
        axes.legend(fontsize="small")
        name = "".join(c if c.isalnum() else "-" for c in f"kl-{cell.model}-{cell.text}-{cell.length}")
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=120)
        paths.append(path)
    return paths


def _steps(traces: Sequence[Any]) -> list[tuple[int, int]]:
    longest = max(len(trace) for trace in traces)
    width = max(1, longest // 16)
    return [(low, min(low + width, longest)) for low in range(0, longest, width)]


def _names(made: Evaluation) -> set[str]:
    return {result.scheme.name for cell in made.cells for result in cell.results}


def _label(made: Evaluation, name: str) -> str:
    """A scheme's name, with the mark of scale 1.0 wherever it is shown."""
    scheme = next((result.scheme for cell in made.cells for result in cell.results if result.scheme.name == name), None)
    return f"{name} (uncalibrated: scale 1.0)" if scheme is not None and scheme.uncalibrated else name


def write_csv(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A CSV of rows that have the same fields; a header alone where there is none."""
    listed = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(listed[0]) if listed else ["nothing"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(listed)
