"""Tables and figures of the documents, made from what is kept in bench/results: `python -m bench.docs [--check]`.

One rule: a figure in a document is a row of a result. Between `<!-- table ... -->` and `<!-- end -->` stands what this
makes; the words around are written by hand. All rows also go to bench/results/rows.csv, each with commit, date, machine
and command; `bench.chart` draws docs/restore.svg. A test runs --check.

    <!-- table marks FILE -->                                the marks of bench/results/FILE.json, met and missed
    <!-- table rows FILE "CASE" ["METRIC" ...] -->           rows whose case and metric match these patterns; a CASE may
                                                             be several, between |
    <!-- table grid FILE "CASE" "METRIC" ["METRIC" ...] -->  a line a case, a column a metric
    <!-- fig FILE "CASE" "METRIC" FORMAT -->                 one value within a sentence; FORMAT as in Python (.2f), its
                                                             ratio with a leading r (r.2f)
"""

from __future__ import annotations

import csv
import fnmatch
import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bench import chart

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = ("README.md", "docs/benchmarks.md")
MARKER = re.compile(r"<!-- (table|fig) (.*?) -->(.*?)<!-- end -->", re.DOTALL)
COLUMNS = (
    "file",
    "commit",
    "date",
    "machine",
    "command",
    "case",
    "metric",
    "value",
    "unit",
    "ceiling",
    "ratio",
    "mark",
    "met",
)
Kept = dict[str, Any]


class Wrong(ValueError):
    """A marker that says nothing this can make."""


class Absent(Wrong):
    """There is no result of this name."""


@cache
def kept(name: str) -> Kept:
    """What bench/results/NAME.json holds."""
    try:
        found: Kept = json.loads((RESULTS / f"{name}.json").read_text())
    except OSError:
        raise Absent(name) from None
    return found


def machine(result: Kept) -> str:
    """The machine in a few words."""
    about = result["machine"]
    return f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, Python {about['python']}"


def origin(result: Kept) -> str:
    """Where the figures come from: the line above a table."""
    when = ", ".join(
        part
        for part in (result.get("date", "")[:10], f"commit {result['commit']}" if "commit" in result else "")
        if part
    )
    return (
        f"`{result['command']}`: {machine(result)}, load {result['machine']['load_1m']:.1f} at the "
        f"start{f'; {when}' if when else ''}."
    )


def number(value: float | None) -> str:
    """Three significant digits; thousands in full."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def matching(name: str, case: str, metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Rows by patterns, spreads left out. Raises Wrong if there are none."""
    found = [
        row
        for row in kept(name)["rows"]
        if " of the ratio" not in row["metric"]
        and any(fnmatch.fnmatchcase(row["case"], one) for one in case.split("|"))
        and any(fnmatch.fnmatchcase(row["metric"], metric) for metric in metrics)
    ]
    if not found:
        raise Wrong(f"no row of {name} is {case!r}, {list(metrics)}")
    return found


def marks(name: str) -> str:
    """The table of marks, with its last line."""
    result = kept(name)
    lines = [
        (m["case"], m["metric"], number(m["value"]), f"{m['sign']} {m['mark']:g}", "met" if m["met"] else "**missed**")
        for m in result["marks"]
    ]
    met = sum(m["met"] for m in result["marks"])
    return f"{origin(result)} {met} of {len(lines)} marks are met.\n\n" + table(
        ("case", "figure", "measured", "mark", ""), lines
    )


def rows(name: str, case: str, *metrics: str) -> str:
    """A line a row, with ceiling, ratio and its spread."""
    spread = {(row["case"], row["metric"]): row["value"] for row in kept(name)["rows"]}
    lines = []
    for row in matching(name, case, metrics or ("*",)):
        low, high = (spread.get((row["case"], f"{row['metric']}, p{p} of the ratio")) for p in (10, 90))
        between = f"{number(low)} to {number(high)}" if low is not None else ""
        lines.append(
            (
                row["case"],
                row["metric"],
                f"{number(row['value'])} {row['unit']}",
                number(row["ceiling"]),
                number(row["ratio"]),
                between,
            )
        )
    return table(("case", "figure", "measured", "ceiling", "ratio", "p10 to p90"), lines)


def grid(name: str, case: str, *metrics: str) -> str:
    """A line a case, a column a metric."""
    found = matching(name, case, metrics)
    units = {row["metric"]: row["unit"] for row in found}
    names = [metric for pattern in metrics for metric in units if fnmatch.fnmatchcase(metric, pattern)]
    values = {(row["case"], row["metric"]): number(row["value"]) for row in found}
    cases = dict.fromkeys(row["case"] for row in found)
    head = ["", *(f"{one}, {units[one]}" for one in names)]
    return table(head, [[one, *(values.get((one, metric), "") for metric in names)] for one in cases])


def figure(name: str, case: str, metric: str, form: str) -> str:
    """One value, or its ratio."""
    (row,) = [row for row in kept(name)["rows"] if (row["case"], row["metric"]) == (case, metric)] or [None]
    if row is None:
        raise Wrong(f"no row of {name} is {case!r}, {metric!r}")
    return f"{row['ratio']:{form[1:]}}" if form.startswith("r") else f"{row['value']:{form}}"


KINDS: dict[str, Callable[..., str]] = {"marks": marks, "rows": rows, "grid": grid}


def render(text: str) -> str:
    """A document with every table and figure made anew. Raises Wrong."""

    def one(found: re.Match[str]) -> str:
        what, said, _ = found.groups()
        words = shlex.split(said)
        try:
            made = figure(*words) if what == "fig" else f"\n{KINDS[words[0]](*words[1:])}\n"
        except Absent as absent:
            if what == "fig":
                raise
            made = f"\nNot measured yet: `python -m bench.{absent} --json bench/results/{absent}.json`.\n"
        except (KeyError, TypeError, ValueError) as error:
            raise Wrong(f"<!-- {what} {said} -->: {error}") from None
        return f"<!-- {what} {said} -->{made}<!-- end -->"

    return MARKER.sub(one, text)


def exported() -> str:
    """Every row of every result as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for path in sorted(RESULTS.glob("*.json")):
        result = kept(path.stem)
        judged = {(m["case"], m["metric"]): m for m in result["marks"]}
        for row in result["rows"]:
            mark = judged.get((row["case"], row["metric"]))
            verdict = (f"{mark['sign']} {mark['mark']:g}", "yes" if mark["met"] else "no") if mark else ("", "")
            about = (path.stem, result.get("commit", ""), result.get("date", ""), machine(result), result["command"])
            writer.writerow(
                [*about, *(row[name] for name in ("case", "metric", "value", "unit", "ceiling", "ratio")), *verdict]
            )
    return out.getvalue()


def outputs() -> dict[Path, str]:
    """Every file that is made from results, with its text."""
    found = {ROOT / name: render((ROOT / name).read_text("utf-8")) for name in DOCUMENTS}
    found[RESULTS / "rows.csv"] = exported()
    if (RESULTS / "vllm_restore.json").exists():
        result = kept("vllm_restore")
        found[ROOT / "docs" / "restore.svg"] = chart.restore(result, machine(result))
    return found


def stale() -> list[str]:
    """Files that are not what the results make of them."""
    return [
        path.relative_to(ROOT).as_posix()
        for path, text in outputs().items()
        if not path.exists() or path.read_text("utf-8") != text
    ]


def main(arguments: Sequence[str]) -> int:
    """Entry point: 0, or with --check 1 if something is stale."""
    if list(arguments) not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    if arguments:
        found = stale()
        print("\n".join(f"{name} is stale: say make benchdocs" for name in found) or "documents and results agree")
        return 1 if found else 0
    for path, text in outputs().items():
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
