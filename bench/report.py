"""Rows, marks, the table people read and the JSON that is kept.

One rule: every kept result begins with the command that made it, then commit, date and machine, and a row has exactly
the fields of `Row`. Marks are judged here and never raised: a missed mark is a line in the report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.harness import ROOT, llc_bytes, median, percentile


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `ceiling` is in the unit of `value`, from the same run; `ratio` is the median of per-trial ratios
    where there are trials."""

    case: str
    metric: str
    value: float
    unit: str
    ceiling: float | None
    ratio: float | None
    command: str


@dataclass(frozen=True, slots=True)
class Mark:
    """What the value of a row should be: at most ("<=") or at least (">=") `mark`."""

    case: str
    metric: str
    value: float
    sign: str
    mark: float
    met: bool


class Report:
    """Rows and marks of one command. Prints a table whose last line says what was met; keeps JSON if asked."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self.command = shlex.join(["python", "-m", module, *arguments])
        self.commit = commit()
        self.date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
        self.machine = machine()
        self.rows: list[Row] = []
        self.marks: list[Mark] = []

    def add(
        self,
        case: str,
        metric: str,
        value: float,
        unit: str,
        ceiling: float | None = None,
        ratio: float | Sequence[float] | None = None,
        mark: tuple[str, float] | None = None,
    ) -> None:
        """One row. A list of per-trial ratios becomes its median, and two rows with its p10 and p90. `mark` is judged
        against `value`."""
        if isinstance(ratio, Sequence):
            middle = median(ratio)
            self._row(case, metric, value, unit, ceiling, middle)
            for p in (10, 90):
                self._row(case, f"{metric}, p{p} of the ratio", percentile(ratio, p), "ratio", None, None)
        else:
            self._row(case, metric, value, unit, ceiling, ratio)
        if mark is not None:
            sign, number = mark
            self.marks.append(
                Mark(case, metric, value, sign, number, value <= number if sign == "<=" else value >= number)
            )

    def share(self, case: str, metric: str, trials: Sequence[float], mark: tuple[str, float] | None = None) -> None:
        """A figure that is itself a ratio of trials: the median is the value, 1 the ceiling."""
        self.add(case, metric, median(trials), "ratio", 1.0, trials, mark)

    def _row(self, case: str, metric: str, value: float, unit: str, ceiling: float | None, ratio: float | None) -> None:
        short = [None if number is None else float(f"{number:.7g}") for number in (value, ceiling, ratio)]
        assert short[0] is not None
        self.rows.append(Row(case, metric, short[0], unit, short[1], short[2], self.command))

    @property
    def missed(self) -> list[Mark]:
        return [mark for mark in self.marks if not mark.met]

    def print(self) -> None:
        """The table on stdout, and one plain last line."""
        judged = {(mark.case, mark.metric): mark for mark in self.marks}
        spread = {(row.case, row.metric): row.value for row in self.rows}
        table = Table(title=self.command, title_justify="left")
        for name in ("case", "metric"):
            table.add_column(name)
        for name in ("value", "unit", "ceiling", "ratio", "p10-p90", "mark", ""):
            table.add_column(name, justify="left" if name == "unit" else "right", no_wrap=True)
        for row in self.rows:
            if " of the ratio" in row.metric:
                continue
            low, high = (spread.get((row.case, f"{row.metric}, p{p} of the ratio")) for p in (10, 90))
            mark = judged.get((row.case, row.metric))
            table.add_row(
                row.case,
                row.metric,
                _text(row.value),
                row.unit,
                _text(row.ceiling),
                _text(row.ratio),
                "" if low is None or high is None else f"{low:.2f}-{high:.2f}",
                "" if mark is None else f"{mark.sign} {mark.mark:g}",
                "" if mark is None else "pass" if mark.met else "MISS",
            )
        Console(width=None if sys.stdout.isatty() else 150).print(table)
        print(self.last_line())

    def last_line(self) -> str:
        if not self.marks:
            return f"{self.command}: {len(self.rows)} rows, no marks"
        missed = "; ".join(
            f"{mark.case}: {mark.metric} {mark.value:.3g} (mark {mark.sign} {mark.mark:g})" for mark in self.missed
        )
        return f"{len(self.marks) - len(self.missed)} of {len(self.marks)} marks met" + (
            f"; missed: {missed}" if missed else ""
        )

    def write(self, path: Path) -> None:
        """JSON: the command first, then commit, date, machine, marks, and one row a line. Written aside and renamed:
        never half a file."""
        said = {"command": self.command, "commit": self.commit, "date": self.date, "machine": self.machine}
        head = [f' "{name}": {json.dumps(value)},' for name, value in said.items()]
        marks, rows = (
            ",\n".join("  " + json.dumps(asdict(item)) for item in items) for items in (self.marks, self.rows)
        )
        text = "\n".join(["{", *head, f' "marks": [\n{marks}\n ],', f' "rows": [\n{rows}\n ]', "}", ""])
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with aside.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def finish(self, json_file: Path | None, strict: bool) -> int:
        """Print, keep, and the exit code: 0, or 1 with `strict` when a mark was missed."""
        self.print()
        if json_file is not None:
            self.write(json_file)
        return 1 if strict and self.missed else 0


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def commit() -> str:
    """What is checked out, with a "+" if what runs differs from it; "unknown" outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            "+" if git("status", "--porcelain", "--", "kvtier", "kernels", "bench/*.py") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def machine() -> dict[str, Any]:
    """What the figures hang on. The load is what others did to the machine before we began."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    libraries = {}
    for name in ("numpy", "protobuf", "grpcio", "xxhash"):
        try:
            libraries[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # bench.kernels needs few of them
            libraries[name] = "absent"
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "llc_bytes": llc_bytes(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libraries": libraries,
        "load_1m": os.getloadavg()[0],
    }
