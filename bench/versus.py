"""kvtier beside what else one would use on the same host: 32 blocks of 1 MiB a call, put and got, each peer in a run of
its own beside kvtier.

`python -m bench.versus [PEER ...] [--quick] [--strict] [--json FILE] [--dir DIR]`. A pair is one peer, kvtier and plain
copies, each in a process of its own; they take turns, window by window, and what is judged is the median of the
per-trial ratios. Two pairs never run at once, so no peer's idle threads disturb another's figures. A peer that cannot
run here is skipped, and the reason is kept with the rows. `bench/peers.sh` makes the environment of Mooncake and NIXL;
vLLM's is that of `make test-vllm`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from bench.harness import ROOT, Effort, KiB, MiB, Phase, Window, cpu_seconds, end_cleanly, progress, ratios, turns
from bench.pools import pool_bytes
from bench.report import Report
from bench.workers import Failed, Worker

BATCH = 32
PEERS, VLLM = ROOT / ".venv-peers" / "bin" / "python", ROOT / ".venv-vllm" / "bin" / "python"
CUDA = {
    "LD_LIBRARY_PATH": os.pathsep.join(
        [str(PEERS.parent.parent / "lib" / "cuda"), os.environ.get("LD_LIBRARY_PATH", "")]
    ).rstrip(os.pathsep)
}
MARKS: dict[str, tuple[str, float]] = {"redis": (">=", 5.0), "mooncake-dummy": (">=", 1.5)}
JUDGED = MiB


@dataclass(frozen=True, slots=True)
class Pair:
    """A peer, and what of kvtier does the same: the lane for what is kept in memory, the SSD tier for files."""

    key: str
    name: str
    ours: str = "kvtier"
    python: Path = Path(sys.executable)
    sizes: tuple[int, ...] = (MiB,)
    environment: Mapping[str, str] = field(default_factory=dict)

    def absent(self) -> str:
        """Why it cannot run here; empty if it may."""
        if not self.python.exists():
            made = "bench/peers.sh .venv-peers" if self.python == PEERS else "make test-vllm"
            return f"there is no {self.python.parent.parent.name}: say {made}"
        if self.key == "redis" and not (shutil.which("redis-server") or shutil.which("valkey-server")):
            return "there is no redis-server and no valkey-server: say tests/support/redis.sh"
        return ""


PAIRS = (
    Pair("redis", "Redis, Unix socket"),
    Pair("mooncake-dummy", "Mooncake, shared-memory client", "kvtier", PEERS, (256 * KiB, MiB, 4 * MiB), CUDA),
    Pair("mooncake-shm", "Mooncake, MC_FORCE_SHM", python=PEERS, environment=CUDA),
    Pair("mooncake-tcp", "Mooncake, TCP", python=PEERS, environment=CUDA),
    Pair("nixl", "NIXL POSIX, page cache", python=PEERS),
    Pair("nixl-direct", "NIXL POSIX, O_DIRECT", "kvtier-ssd", PEERS),
    Pair(
        "vllm-files",
        "vLLM's file tier",
        "kvtier-ssd",
        VLLM,
        environment={"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"},
    ),
)

Turn = tuple[str, str]  # contestant, verb


class Match:
    """The processes of one pair at one block size, and their phases."""

    def __init__(self, pair: Pair, size: int, quick: bool, where: Path, stack: ExitStack) -> None:
        self.pair, self.size = pair, size
        self.gigabytes = BATCH * size / 1e9
        batches = pool_bytes(quick, BATCH * size) // (BATCH * size)
        self.workers: dict[str, Worker] = {}
        for name in ("copy", pair.ours, pair.key):
            python, environment = (pair.python, pair.environment) if name == pair.key else (Path(sys.executable), {})
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=where))
            arguments = [
                "-m",
                "bench.contest",
                name,
                "--batches",
                str(batches),
                "--batch",
                str(BATCH),
                "--size",
                str(size),
                "--dir",
                directory,
            ]
            self.workers[name] = stack.enter_context(Worker(arguments, python=str(python), environment=environment))
            self.workers[name].ask("warm", 300.0)

    def phases(self, verb: str) -> list[Turn]:
        """Who takes turns at "put", "get" or "get without a copy"; a peer may have several ways."""
        kinds = [(name, one) for name, worker in self.workers.items() for one in worker.ready["verbs"]]
        return [
            (name, one) for name, one in kinds if one == verb or (one.startswith(f"{verb} ") and "without" not in one)
        ]

    def window(self, turn: Turn, seconds: float) -> Window:
        """One trial of one phase. CPU seconds are those of the contestant and its servers."""
        worker = self.workers[turn[0]]
        if turn[1].startswith("put"):
            worker.ask("room")
        pids = {"client": worker.pid, **worker.ready["servers"]}
        before = {who: cpu_seconds(pid) for who, pid in pids.items()}
        found = worker.ask("window", 120.0, verb=turn[1], seconds=seconds)
        return Window(
            found["elapsed"], found["calls"], {who: cpu_seconds(pid) - before[who] for who, pid in pids.items()}
        )

    def play(self, verb: str, effort: Effort) -> dict[Turn, Phase]:
        """All trials of a verb."""
        done = {turn: Phase() for turn in self.phases(verb)}
        for name, how in done:
            if how.startswith("get"):
                for _ in range(2):
                    self.workers[name].ask("touch", verb=how)
        with progress(f"{verb} {self.size // KiB} KiB, {self.pair.name}", effort.trials) as tick:
            for trial in range(effort.trials):
                for name in turns([str(i) for i in range(len(done))], trial):
                    turn = list(done)[int(name)]
                    done[turn].windows.append(self.window(turn, effort.seconds))
                tick()
        return done

    def check(self) -> None:
        """Each contestant gives back what it took."""
        for worker in self.workers.values():
            worker.ask("check", 120.0)


def best(phases: Iterable[Phase]) -> list[float]:
    """The best rate of each trial, of a peer that has several ways."""
    return [
        max(window.rate for window in windows) for windows in zip(*(phase.windows for phase in phases), strict=True)
    ]


def rows(report: Report, match: Match, verb: str, done: dict[Turn, Phase]) -> None:
    """What a verb of a match gives: speeds, ratios, CPU seconds a GB."""
    pair, gigabytes = match.pair, match.gigabytes
    case = f"{verb}, {BATCH} x {match.size // KiB} KiB, {pair.name}"
    ours, copy = done[pair.ours, verb], done.get(("copy", verb))
    theirs = {turn: phase for turn, phase in done.items() if turn[0] == pair.key}
    ceiling = (copy.rate * gigabytes, ratios(ours, copy)) if copy else (None, None)
    report.add(case, pair.ours, ours.rate * gigabytes, "GB/s", *ceiling)
    for (_, how), phase in theirs.items():
        report.add(
            case,
            f"{pair.name}{how.removeprefix(verb)}",
            phase.rate * gigabytes,
            "GB/s",
            ceiling[0],
            ratios(phase, copy) if copy else None,
        )
    other = best(theirs.values())
    against = [window.rate / rate for window, rate in zip(ours.windows, other, strict=True)]
    mark = MARKS.get(pair.key) if match.size == JUDGED and verb in ("put", "get") else None
    report.share(case, f"{pair.ours} over {pair.name}", against, mark)
    quickest = max(theirs, key=lambda turn: theirs[turn].rate)
    for name, phase in ((pair.ours, ours), (pair.name, theirs[quickest])):
        for who in phase.windows[0].cpu:
            report.add(case, f"CPU of {name}, {who}", phase.cpu_per_call(who) / gigabytes, "s/GB")


def idle(report: Report, match: Match) -> None:
    """CPU seconds a second that the peer's processes take while nobody asks anything: they take it from everyone else
    on few cores."""
    import time

    worker = match.workers[match.pair.key]
    pids = [worker.pid, *worker.ready["servers"].values()]
    before, start = sum(map(cpu_seconds, pids)), time.monotonic()
    time.sleep(1.0)
    spent = (sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - start)
    report.add(f"idle, {match.pair.name}", "CPU of all its processes", spent, "cores")


def compete(report: Report, pair: Pair, size: int, quick: bool, where: Path) -> None:
    """One pair at one block size."""
    with ExitStack() as stack:
        match = Match(pair, size, quick, where, stack)
        report.machine["libraries"] |= match.workers[pair.key].ready["versions"]
        for verb in ("put", "get", "get without a copy"):
            turns_ = match.phases(verb)
            if {pair.ours, pair.key} <= {name for name, _ in turns_}:
                rows(report, match, verb, match.play(verb, Effort.of(quick, 15 if size == JUDGED else 7, 0.12)))
        match.check()
        if size == JUDGED:
            idle(report, match)


def main(
    peers: Annotated[
        list[str] | None,
        typer.Argument(help="Which peers: " + ", ".join(pair.key for pair in PAIRS) + ". [default: all]"),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Walk through everything, measure nothing worth reading.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a mark is missed.")] = False,
    json: Annotated[Path | None, typer.Option(help="Keep the rows in this file.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where files go. [default: the temporary directory]")
    ] = None,
) -> None:
    """kvtier beside its peers on this host."""
    end_cleanly()
    unknown = set(peers or ()) - {pair.key for pair in PAIRS}
    if unknown:
        raise typer.BadParameter(f"no such peer: {', '.join(sorted(unknown))}")
    report = Report("bench.versus", sys.argv[1:])
    skipped = {}
    for pair in PAIRS:
        if peers and pair.key not in peers:
            continue
        reason = pair.absent()
        for size in () if reason else pair.sizes:
            if quick and size != JUDGED:
                continue
            try:
                compete(report, pair, size, quick, directory or Path(tempfile.gettempdir()))
            except Failed as error:
                if pair.key not in error.worker.arguments:
                    raise  # ours may not fail
                reason = str(error)
                break
        if reason:
            skipped[pair.name] = reason.strip().splitlines()[-1]
            print(f"SKIPPED {pair.name}: {reason}", file=sys.stderr)
    report.machine["skipped"] = skipped
    report.add("pairs", "skipped", len(skipped), "pairs")
    raise SystemExit(report.finish(json, strict))


if __name__ == "__main__":
    typer.run(main)
