"""How a command speaks: one JSON object or a table on stdout, everything else on stderr, progress on a terminal's
stderr only, and an exit code.

Exit codes mean the same for every command, so that a script need not read text. One command a process: no state beside
the arguments."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from kvtier.errors import Deadline, Denied, Full, Invalid, KvtierError, NotFound, Unavailable
from kvtier.models.advice import Advice


class Exit(IntEnum):
    """What an exit code says."""

    OK = 0
    NEGATIVE = 1  # the answer is no: a miss, nothing found, a difference, a finding of the doctor
    USAGE = 2  # the command line or a file it names is wrong
    UNREACHABLE = 3  # no daemon, or no answer in time
    REFUSED = 4  # not allowed, or no room: another role or another time
    FAULT = 5  # a fault of the service, or bytes that failed their check


_CODES: dict[type[KvtierError], Exit] = {
    Invalid: Exit.USAGE,
    NotFound: Exit.NEGATIVE,
    Unavailable: Exit.UNREACHABLE,
    Deadline: Exit.UNREACHABLE,
    Denied: Exit.REFUSED,
    Full: Exit.REFUSED,
}


def code_of(error: KvtierError) -> Exit:
    """The exit code of an error."""
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), Exit.FAULT)


def message(text: str) -> None:
    """A line for people, on stderr."""
    print(f"kvtier: {text}", file=sys.stderr)


def result(data: dict[str, Any], as_json: bool, show: Callable[[], None]) -> None:
    """The answer on stdout: `data` as one JSON object, or whatever `show` prints."""
    if as_json:
        print(json.dumps(data, indent=None, sort_keys=True))
    else:
        show()


def failure(error: KvtierError, as_json: bool) -> Exit:
    """Says an error: text on stderr, and under --json an object on stdout as well."""
    if as_json:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}, sort_keys=True))
    message(str(error))
    return code_of(error)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """A table on stdout; numbers stand right. Wide enough for a pipe, too: nothing is cut where no terminal is."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    listed = [list(row) for row in rows]
    for place, name in enumerate(columns):
        numbers = bool(listed) and all(isinstance(row[place], int | float) for row in listed)
        made.add_column(name, justify="right" if numbers else "left", no_wrap=True)
    for row in listed:
        made.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 400, highlight=False, markup=False).print(made)


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def warn(advice: Iterable[Advice]) -> None:
    """Warnings of an artifact or an evaluation, on stderr."""
    for one in advice:
        message(f"warning: {one.topic}: {one.found}: {one.do}")


def _quiet() -> bool:
    """Whether no bar is drawn: stderr is no terminal that can."""
    return not sys.stderr.isatty() or os.environ.get("TERM") == "dumb"


@contextmanager
def progress(what: str, total: int, unit: str = "") -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where that is a terminal, of bytes or of what `unit` says. Yields the function that moves it."""
    counted = (
        (TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit),)
        if unit
        else (DownloadColumn(binary_units=True), TransferSpeedColumn())
    )
    columns = (TextColumn("{task.description}"), BarColumn(), *counted, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=_quiet()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda n: bar.advance(task, n)


@contextmanager
def steps() -> Iterator[Callable[[str, int, int], None]]:
    """A bar per step on stderr, where that is a terminal. Yields (what, done, total) -> None."""
    share, times = TextColumn("{task.percentage:>3.0f}%"), (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), share, *times)
    with Progress(*columns, console=Console(stderr=True), disable=_quiet()) as bars:
        tasks: dict[str, TaskID] = {}

        def step(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield step
