"""How every benchmark here times and counts, and how it starts and ends the processes it needs.

One rule: a figure is given as a share of a ceiling measured in the same run. Phases that are compared run in turns, in
changing order, and what is reported is the median of the per-trial ratios with its p10 and p90: a machine that drifts
moves both sides. A worst case stands beside the worst empty call of the same window. Nothing here judges a figure;
`report` does."""

from __future__ import annotations

import ctypes
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

KiB = 1024
MiB = 1 << 20
GiB = 1 << 30
ROOT = Path(__file__).resolve().parent.parent

now = time.perf_counter


# Statistics


def percentile(values: Sequence[float], p: float) -> float:
    """The nearest-rank percentile: a value that was measured, never one between two."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))]


def median(values: Sequence[float]) -> float:
    """The middle value; of an even number the mean of the middle two, so that a ratio and its inverse have inverse
    medians as near as can be."""
    return float(np.median(np.asarray(values)))


@dataclass(slots=True)
class Window:
    """One trial of one phase: how long it took in all, each call's seconds, and CPU seconds spent by this process and
    by each watched one."""

    elapsed: float
    calls: list[float]
    cpu: dict[str, float]

    @property
    def rate(self) -> float:
        """Calls a second."""
        return len(self.calls) / self.elapsed


@dataclass(slots=True)
class Phase:
    """All trials of one phase."""

    windows: list[Window] = field(default_factory=list)

    @property
    def calls(self) -> list[float]:
        return [seconds for window in self.windows for seconds in window.calls]

    @property
    def rate(self) -> float:
        """Median over the trials of the calls a second."""
        return median([window.rate for window in self.windows])

    def p(self, percent: float) -> float:
        """Percentile of one call's seconds over all trials."""
        return percentile(self.calls, percent)

    @property
    def worst(self) -> float:
        return max(self.calls)

    def cpu_per_call(self, who: str) -> float:
        """CPU seconds a call. Ticks are 10 ms, so a sum below a second is coarse."""
        return sum(window.cpu[who] for window in self.windows) / sum(len(window.calls) for window in self.windows)


def ratios(phase: Phase, base: Phase) -> list[float]:
    """Rate of `phase` over rate of `base`, trial by trial."""
    return [a.rate / b.rate for a, b in zip(phase.windows, base.windows, strict=True)]


# Timing


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: at least `trials` windows of at least `seconds` each."""

    trials: int = 31
    seconds: float = 0.060

    @classmethod
    def of(cls, quick: bool, trials: int = 31, seconds: float = 0.060) -> Effort:
        """`quick` is for smoke tests: enough to walk through everything, too little to believe."""
        return cls(2, 0.005) if quick else cls(trials, seconds)


def interleave(
    phases: Mapping[str, Callable[[], object]], effort: Effort, watch: Mapping[str, int] | None = None
) -> dict[str, Phase]:
    """Time the phases in turns. Each phase is a function that makes one call (a batch, a copy, a pair of calls).

    A window repeats its phase until `effort.seconds` are over, so every window is long enough whatever the machine
    does. `watch` names processes whose CPU seconds are counted beside our own ("client")."""
    names = list(phases)
    result = {name: Phase() for name in names}
    for name in names:
        phases[name]()  # first use of anything lazy is not what is measured
    with progress(" / ".join(names), effort.trials) as tick:
        for trial in range(effort.trials):
            for name in turns(names, trial):
                _end_if_told()
                result[name].windows.append(_window(phases[name], effort.seconds, watch or {}))
            tick()
    return result


def turns(names: Sequence[str], trial: int) -> list[str]:
    """The order of the phases in a trial: rotated by one every second trial, and every second time backwards."""
    shift = trial // 2 % len(names)
    order = [*names[shift:], *names[:shift]]
    return order if trial % 2 == 0 else order[::-1]


def _window(call: Callable[[], object], seconds: float, watch: Mapping[str, int]) -> Window:
    before = _cpu(watch)
    calls: list[float] = []
    start = last = now()
    end = start + seconds
    while last < end:
        begin = now()
        call()
        last = now()
        calls.append(last - begin)
    after = _cpu(watch)
    return Window(last - start, calls, {who: after[who] - before[who] for who in after})


def _cpu(watch: Mapping[str, int]) -> dict[str, float]:
    return {"client": cpu_seconds(os.getpid()), **{who: cpu_seconds(pid) for who, pid in watch.items()}}


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr; yields the function that moves it by one. Drawn only when it moves: no thread of ours runs
    inside a window."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), auto_refresh=False, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(what, total=total)

        def tick() -> None:
            _end_if_told()
            bar.advance(task)
            bar.refresh()

        yield tick


# Processes


def cpu_seconds(pid: int) -> float:
    """User and system seconds of a process and all its threads, in steps of a clock tick (10 ms)."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    user, system = stat[stat.rindex(")") + 2 :].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> dict[str, int]:
    """{"RssAnon": bytes, "RssShmem": bytes}: memory of its own, and pages of shared mappings it has touched."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * KiB for words in lines if words[0] in ("RssAnon:", "RssShmem:")}


@contextmanager
def pinned(ours: set[int], *servers: int, cores: set[int]) -> Iterator[None]:
    """This process on the cores `ours`, the server processes on `cores`, all their threads; afterwards on every core
    again."""
    everywhere = os.sched_getaffinity(0)
    try:
        _pin(os.getpid(), ours)
        for pid in servers:
            _pin(pid, cores)
        yield
    finally:
        for pid in (os.getpid(), *servers):
            _pin(pid, everywhere)


def placements() -> list[tuple[str, set[int], set[int]]]:
    """(suffix of the case, the client's cores, the servers' cores): free, a core each, and one core for both.

    Where the kernel puts two processes that call each other decides what a call costs (an empty pair 25 us on one core,
    57 us over two of an AMD EPYC virtual machine: the waking of an idle core), and it decides anew with the load of the
    machine. So the free figure stands beside both pinned ones."""
    cores = sorted(os.sched_getaffinity(0))
    everywhere = set(cores)
    if len(cores) < 2:
        return [("", everywhere, everywhere)]
    return [
        ("", everywhere, everywhere),
        (", a core each", {cores[0]}, {cores[1]}),
        (", one core", {cores[0]}, {cores[0]}),
    ]


def _pin(pid: int, cores: set[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cores)


class Child:
    """A child process that says "ready ..." on stdout. A context manager: leaving it ends the process, and so does our
    own death.

    Output after the ready line is not read: children here say nothing more.
    """

    def __init__(self, arguments: Sequence[str], deadline: float = 30.0) -> None:
        self.arguments = [sys.executable, *arguments]
        self.deadline = deadline

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self.arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            preexec_fn=_die_with_parent,
            start_new_session=True,
        )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait_ready(self) -> None:
        assert self.process.stdout is not None
        end = now() + self.deadline
        said = b""
        while not said.endswith(b"\n"):
            if not select.select([self.process.stdout], [], [], max(0.0, end - now()))[0]:
                raise RuntimeError(f"{shlex.join(self.arguments)} was not ready within {self.deadline:.0f} s")
            byte = os.read(self.process.stdout.fileno(), 1)
            if not byte:
                raise RuntimeError(
                    f"{shlex.join(self.arguments)} ended with {self.process.wait(self.deadline)} before it was ready"
                )
            said += byte
        if not said.startswith(b"ready"):
            raise RuntimeError(f"{shlex.join(self.arguments)} said {said!r} instead of ready")

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what has not ended in 10 s."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


_LIBC = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


_stop = threading.Event()


def end_cleanly() -> None:
    """SIGTERM ends the benchmark before its next window or the next move of a progress bar, so that every `with` above
    ends its child.

    The handler raises nothing itself: an exception that lands inside a destructor is swallowed.
    """
    signal.signal(signal.SIGTERM, lambda *_: _stop.set())


def _end_if_told() -> None:
    if _stop.is_set():
        raise SystemExit(128 + signal.SIGTERM)


def llc_bytes() -> int:
    """Size of the last-level cache; 32 MiB where the kernel does not say."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": KiB, "M": MiB}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=32 * MiB)
