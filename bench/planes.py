"""The store against the machine's ceilings: every figure the lane promises, one case a command.

`python -m bench.planes copy|zerocopy|batches|million|beside|killed|all [--quick] [--strict] [--json FILE]`. Each case
starts a daemon of its own, measures through the public client unless a row says "raw", and is judged by `marks`. A
missed mark is reported and changes the exit code under --strict only."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from bench.copies import copy
from bench.empty import EmptyLane
from bench.harness import (
    Effort,
    MiB,
    Phase,
    end_cleanly,
    interleave,
    median,
    memory,
    now,
    percentile,
    pinned,
    placements,
    progress,
    ratios,
)
from bench.live import BATCH, BODY, HASH, Calls, Live, Peer, arena_for, measure_calls
from bench.marks import MARKS
from bench.report import Report

# Calls


def zerocopy(report: Report, quick: bool) -> None:
    """Get of 32 blocks without a copy (lease, views, release) against the empty pair; wherever the kernel puts the
    processes, then pinned."""
    with Live(arena_for(4096, BODY), BODY) as live, EmptyLane(live.options) as empty:
        hashes = live.fill(BATCH)
        calls = measure_calls(live)
        phases = {
            "get": live.getter(hashes),
            "raw": live.raw_getter(hashes),
            "empty": empty.pair(calls.lease, calls.release),
        }
        servers = (live.pid, empty.server.pid)
        for where, client_cores, server_cores in placements():
            with pinned(client_cores, *servers, cores=server_cores):
                done = interleave(phases, Effort.of(quick), {"daemon": live.pid})
            _zerocopy_rows(report, done, where)


def _zerocopy_rows(report: Report, done: dict[str, Phase], where: str) -> None:
    pair = done["empty"]
    for name, what in (("get", "zero-copy get"), ("raw", "zero-copy get, raw calls")):
        phase, case = done[name], what + where
        mark = MARKS["zero-copy p50"] if (name, where) == ("get", "") else None
        report.add(case, "p50, 32 blocks", phase.p(50) * 1e6, "us", pair.p(50) * 1e6, phase.p(50) / pair.p(50))
        report.add(case, "p50 over the empty pair's p50", phase.p(50) / pair.p(50), "times", mark=mark)
        report.add(case, "p99, 32 blocks", phase.p(99) * 1e6, "us", pair.p(99) * 1e6, phase.p(99) / pair.p(99))
        report.add(case, "worst", phase.worst * 1e3, "ms", pair.worst * 1e3, phase.worst / pair.worst)
        for who in ("client", "daemon"):
            report.add(case, f"CPU of the {who} a get", phase.cpu_per_call(who) * 1e6, "us")


def batches(report: Report, quick: bool) -> None:
    """Reserve + seal of 32 fresh blocks against empty pairs: into a store with room, then into a full one that evicts,
    then the same pinned."""
    room = 4_000 if quick else 600_000
    with Live(arena_for(room, BODY), BODY) as live, EmptyLane(live.options) as empty:
        calls = measure_calls(live)
        phases = {"put": live.putter(), "empty": empty.pair(calls.reserve, calls.seal)}

        def measure(case: str, marked: bool) -> None:
            before = live.status()["evicted_blocks_total"]
            done = interleave(phases, Effort.of(quick), {"daemon": live.pid})
            evicted = live.status()["evicted_blocks_total"] - before
            put, pair = done["put"], done["empty"]
            report.add(
                case,
                "reserve + seal a second",
                put.rate,
                "1/s",
                pair.rate,
                ratios(put, pair),
                MARKS["batches a second"] if marked else None,
            )
            report.share(case, "share of empty pairs", ratios(put, pair), MARKS["batches share"] if marked else None)
            report.add(case, "worst", put.worst * 1e3, "ms", pair.worst * 1e3, put.worst / pair.worst)
            report.add(case, "blocks evicted meanwhile", evicted, "blocks")
            for who in ("client", "daemon"):
                report.add(case, f"CPU of the {who} a batch", put.cpu_per_call(who) * 1e6, "us")

        measure("batches of 32", marked=True)
        live.fill_up()
        for where, client_cores, server_cores in placements():
            with pinned(client_cores, live.pid, empty.server.pid, cores=server_cores):
                measure("batches of 32, evicting" + where, marked=False)


# A million blocks


def million(report: Report, quick: bool) -> None:
    """A live lane that knows a million blocks of 4 KiB slots: lookup, zero-copy get against a small store, memory, and
    eviction through it."""
    known = 4_000 if quick else 1_000_000
    step, prefix = (500, 200) if quick else (1000, 1000)
    with Live(arena_for(64, BODY), BODY) as idle:
        baseline = memory(idle.pid)["RssAnon"]
    with (
        Live(arena_for(4_000, BODY), BODY) as small,
        Live(arena_for(known, BODY), BODY) as big,
        EmptyLane(big.options) as empty,
    ):
        calls = measure_calls(big)
        few = [small.fill(BATCH) for _ in range(1000 // BATCH)]
        many = big.fill_up(step)
        stored = big.status()["known_blocks"]
        report.add("million", "blocks known", stored, "blocks")
        anonymous = memory(big.pid)["RssAnon"]
        report.add(
            "million",
            "anonymous bytes a known block",
            (anonymous - baseline) / stored,
            "bytes",
            mark=MARKS["million bytes a block"],
        )
        report.add(
            "million", "anonymous memory of the daemon", anonymous / MiB, "MiB", baseline / MiB, anonymous / baseline
        )
        order = random.Random(1)
        runs = [hashes[: prefix * HASH] for hashes in many]
        parts = [hashes[at * HASH : (at + BATCH) * HASH] for hashes in many for at in range(0, step - BATCH, step // 4)]
        order.shuffle(runs)
        order.shuffle(parts)
        phases = {
            "lookup": big.lookups(runs),
            "get of a million": big.getter(*parts),
            "get of a thousand": small.getter(*few),
            "empty": empty.pair(calls.lease, calls.release),
        }
        done = interleave(phases, Effort.of(quick, 31, 0.25), {"daemon": big.pid})
        _million_rows(report, done)
        _evictions(report, big, empty, calls, known)


def _million_rows(report: Report, done: dict[str, Phase]) -> None:
    look, get, few, pair = (done[name] for name in ("lookup", "get of a million", "get of a thousand", "empty"))
    report.add(
        "million", "lookup of a prefix of 1,000, p50", look.p(50) * 1e3, "ms", pair.p(50) * 1e3, look.p(50) / pair.p(50)
    )
    report.add(
        "million",
        "lookup of a prefix of 1,000, p99",
        look.p(99) * 1e3,
        "ms",
        pair.p(99) * 1e3,
        look.p(99) / pair.p(99),
        MARKS["million lookup p99 ms"],
    )
    report.add("million", "zero-copy get p50", get.p(50) * 1e6, "us", few.p(50) * 1e6, get.p(50) / few.p(50))
    report.add("million", "zero-copy get p99", get.p(99) * 1e6, "us", few.p(99) * 1e6, get.p(99) / few.p(99))
    report.add(
        "million",
        "zero-copy get p99 over that of a thousand",
        get.p(99) / few.p(99),
        "times",
        mark=MARKS["million zero-copy p99"],
    )
    report.add("million", "empty pair p99", pair.p(99) * 1e6, "us")


def _evictions(report: Report, big: Live, empty: EmptyLane, calls: Calls, known: int) -> None:
    """Worst single call while 60 % of the store is evicted through it, three times; beside each run the worst empty
    call of the same window."""
    reserve, seal = empty.call(calls.reserve), empty.call(calls.seal)
    nbatches = known * 6 // 10 // BATCH
    worst: list[tuple[float, float]] = []
    for run in range(3):
        taken, hollow = [0.0], [0.0]
        before = big.status()["evicted_blocks_total"]
        with progress(f"eviction, run {run + 1} of 3", 20) as tick:
            for n in range(nbatches):
                taken += big.timed_put()
                for call in (reserve, seal):
                    start = now()
                    call()
                    hollow.append(now() - start)
                if n % max(1, nbatches // 20) == 0:
                    tick()
        case = f"million, eviction run {run + 1}"
        report.add(case, "blocks evicted", big.status()["evicted_blocks_total"] - before, "blocks")
        report.add(case, "p99 of one call", percentile(taken, 99) * 1e3, "ms", percentile(hollow, 99) * 1e3)
        report.add(case, "worst call", max(taken) * 1e3, "ms", max(hollow) * 1e3, max(taken) / max(hollow))
        worst.append((max(taken), max(hollow)))
    best = min(worst)
    report.add(
        "million",
        "worst call while evicting, best run of three",
        best[0] * 1e3,
        "ms",
        best[1] * 1e3,
        best[0] / best[1],
        MARKS["million worst call ms"],
    )


# Other clients


def beside(report: Report, quick: bool) -> None:
    """Zero-copy get of 32 blocks alone, and beside another process that looks 1,024 keys up without pause."""
    with Live(arena_for(8_000, BODY), BODY) as live, EmptyLane(live.options) as empty:
        hashes = live.fill(1024)
        calls = measure_calls(live)
        phases = {"get": live.getter(hashes[: BATCH * HASH]), "empty": empty.pair(calls.lease, calls.release)}
        effort = Effort.of(quick, 31, 0.25)
        alone = interleave(phases, effort)
        with Peer("lookups", live.path, hashes):
            shared_ = interleave(phases, effort)
    for case, done, mark in (
        ("zero-copy get alone", alone, None),
        ("zero-copy get beside lookups", shared_, MARKS["beside p99 ms"]),
    ):
        get, pair = done["get"], done["empty"]
        report.add(case, "p50", get.p(50) * 1e3, "ms", pair.p(50) * 1e3, get.p(50) / pair.p(50))
        report.add(case, "p99", get.p(99) * 1e3, "ms", pair.p(99) * 1e3, get.p(99) / pair.p(99), mark)
        report.add(case, "worst", get.worst * 1e3, "ms", pair.worst * 1e3, get.worst / pair.worst)


def killed(report: Report, quick: bool) -> None:
    """Seconds until everything is back that a client held when it was killed: 100 reservations and 100 leases of 32
    blocks."""
    seconds = []
    with Live(arena_for(40_000, BODY), BODY) as live:
        hashes = live.fill(BATCH)
        rounds = 2 if quick else 5
        with progress("killed", rounds) as tick:
            for _ in range(rounds):
                with Peer("holder", live.path, hashes) as holder:
                    held = live.status()
                    assert held["reserved_blocks"] == 100 * BATCH and held["leased_blocks"] == BATCH, (
                        f"the holder holds {held}"
                    )
                    start = now()
                    os.kill(holder.pid, signal.SIGKILL)
                    while (status := live.status())["reserved_blocks"] or status["leased_blocks"]:
                        if now() - start > 30:
                            raise RuntimeError(f"not all is back after 30 s: {status}")
                        time.sleep(0.0005)
                    seconds.append(now() - start)
                tick()
    report.add("killed client", "until all is back, median", median(seconds) * 1e3, "ms")
    report.add("killed client", "until all is back, worst", max(seconds), "s", mark=MARKS["killed s"])


CASES: dict[str, Callable[[Report, bool], None]] = {
    "copy": copy,
    "zerocopy": zerocopy,
    "batches": batches,
    "million": million,
    "beside": beside,
    "killed": killed,
}


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    case: Annotated[str, typer.Argument(help="one of " + ", ".join(CASES) + ", or all")] = "all",
    quick: Annotated[bool, typer.Option(help="walk through everything, measure nothing worth reading")] = False,
    strict: Annotated[bool, typer.Option(help="exit 1 if a mark is missed")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="keep the rows in this file")] = None,
) -> None:
    """Measure the store against the machine's ceilings."""
    if case not in CASES and case != "all":
        raise typer.BadParameter(f"{case} is none of {', '.join(CASES)}, all")
    end_cleanly()
    report = Report("bench.planes", sys.argv[1:])
    for name, measure in CASES.items():
        if case in (name, "all"):
            measure(report, quick)
    raise typer.Exit(report.finish(json_file, strict))


if __name__ == "__main__":
    app()
