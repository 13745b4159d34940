"""How cost grows: with the number of blocks that are known, with clients, with the size of a block and of a batch.

`python -m bench.scaling blocks|clients|sizes|batches|all [--quick] [--strict] [--json FILE]`.

blocks    four daemons that know 10^3 to 10^6 blocks, in turns: a lookup of 1,000 and a zero-copy lease of 32, each a
          random run. The growth exponent is the slope of log cost over log blocks, trial by trial: 0 is a cost that
          does not grow, 1 one that grows as the store does
clients   1 to 16 processes that put or get 32 blocks of 256 KiB a call without a pause, and as many that only copy
sizes     32 MiB a call in blocks of 64 KiB to 16 MiB, beside plain copies
batches   1 to 64 blocks of 1 MiB a call
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from bench.harness import (
    Effort,
    KiB,
    MiB,
    cpu_seconds,
    end_cleanly,
    interleave,
    median,
    now,
    percentile,
    progress,
    ratios,
    turns,
)
from bench.live import BATCH, BODY, DEADLINE, HASH, Live, arena_for, fresh
from bench.pools import endless, pool_bytes, private
from bench.report import Report
from bench.workers import Worker

EXPONENT = ("<=", 0.1)
BLOCKS, QUICK_BLOCKS = (1_000, 10_000, 100_000, 1_000_000), (1_000, 2_000)
CROWDS, QUICK_CROWDS = (1, 2, 4, 8, 16), (1, 2)
SIZES, QUICK_SIZES = (64 * KiB, 256 * KiB, 1 * MiB, 4 * MiB, 16 * MiB), (64 * KiB, 1 * MiB)
BATCHES, QUICK_BATCHES = (1, 4, 16, 64), (1, 4)
CROWD_BLOCK = 256 * KiB


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Slope of the straight line through (log size, log cost), by least squares."""
    return float(np.polyfit(np.log(np.asarray(sizes, float)), np.log(np.asarray(costs, float)), 1)[0])


# Blocks


def blocks(report: Report, quick: bool) -> None:
    """Lookup and lease over stores of growing size, all of them alive at once."""
    known, prefix = (QUICK_BLOCKS, 200) if quick else (BLOCKS, 1000)
    order = random.Random(1)
    with ExitStack() as stack:
        phases: dict[str, Callable[[], object]] = {}
        for n in known:
            live = stack.enter_context(Live(arena_for(n, BODY), BODY))
            filled = b"".join(live.fill_up(min(500, n // 8)))
            count = len(filled) // HASH
            starts = [order.randrange(count - prefix + 1) for _ in range(64)]
            phases[f"lookup {n}"] = live.lookups([filled[at * HASH : (at + prefix) * HASH] for at in starts])
            starts = [order.randrange(count - BATCH + 1) for _ in range(1024)]
            phases[f"lease {n}"] = live.getter(*(filled[at * HASH : (at + BATCH) * HASH] for at in starts))
        done = interleave(phases, Effort.of(quick, 31, 0.06))
    for verb, keys in (("lookup", prefix), ("lease", BATCH)):
        costs = {n: done[f"{verb} {n}"] for n in known}
        for n, phase in costs.items():
            report.add(f"{verb} of {keys}, {n:,} blocks known", "a block", 1e6 / phase.rate / keys, "us")
            report.add(f"{verb} of {keys}, {n:,} blocks known", "p99 of a call", phase.p(99) * 1e3, "ms")
        trials = [
            exponent(known, [1 / window.rate for window in windows])
            for windows in zip(*(p.windows for p in costs.values()), strict=True)
        ]
        case = f"{verb} of {keys}, {known[0]:,} to {known[-1]:,} blocks"
        report.add(case, "growth exponent of the cost a block", median(trials), "exponent", mark=EXPONENT)
        for p in (10, 90):
            report.add(
                case, f"growth exponent of the cost a block, p{p} of the trials", percentile(trials, p), "exponent"
            )


# Clients


class Clients:
    """As many client processes as work at once at most, of which the first few are told to work at once."""

    def __init__(self, live: Live, most: int, stack: ExitStack) -> None:
        self.live = live
        arguments = ["-m", "bench.client_process", str(live.path), str(CROWD_BLOCK)]
        self.workers = [stack.enter_context(Worker(arguments)) for _ in range(most)]

    def work(self, n: int, verb: str, seconds: float) -> dict[str, Any]:
        """Calls a second of `n` clients together, seconds of each call, CPU seconds of clients and daemon a call."""
        if verb == "get":  # what others put meanwhile may have taken the place of theirs
            self._all(n, "prepare")
        pids = [worker.pid for worker in self.workers[:n]]
        before = [sum(map(cpu_seconds, pids)), cpu_seconds(self.live.pid)]
        start = now() + 0.02
        found = self._all(n, "work", verb=verb, start=start, seconds=seconds)
        spent = [sum(map(cpu_seconds, pids)) - before[0], cpu_seconds(self.live.pid) - before[1]]
        calls = [seconds for one in found for seconds in one["calls"]]
        return {
            "rate": len(calls) / (max(one["end"] for one in found) - start),
            "calls": calls,
            "clients": spent[0],
            "daemon": spent[1],
        }

    def _all(self, n: int, what: str, **arguments: Any) -> list[Any]:
        for worker in self.workers[:n]:
            worker.tell(what, **arguments)
        return [worker.answer() for worker in self.workers[:n]]


def clients(report: Report, quick: bool) -> None:
    """Puts and gets of more and more processes at once; beside each, as many processes that copy the same blocks in
    private memory."""
    crowds = QUICK_CROWDS if quick else CROWDS
    trials, seconds = (1, 0.05) if quick else (7, 0.3)
    found: dict[tuple[int, str], list[dict[str, Any]]] = {
        (n, verb): [] for n in crowds for verb in ("put", "get", "copy")
    }
    with ExitStack() as stack:
        live = stack.enter_context(Live(arena_for(12 * BATCH * crowds[-1], CROWD_BLOCK), CROWD_BLOCK))
        crowd = Clients(live, crowds[-1], stack)
        with progress("clients", trials) as tick:
            for trial in range(trials):
                for n in turns([str(n) for n in crowds], trial):
                    for verb in ("put", "get", "copy"):
                        found[int(n), verb].append(crowd.work(int(n), verb, seconds))
                tick()
    gigabytes = BATCH * CROWD_BLOCK / 1e9
    for verb in ("put", "get"):
        alone = [one["rate"] for one in found[crowds[0], verb]]
        for n in crowds:
            mine, copy, case = (
                found[n, verb],
                found[n, "copy"],
                f"{verb} {BATCH} x {CROWD_BLOCK // KiB} KiB, {n} clients",
            )
            calls = [seconds for one in mine for seconds in one["calls"]]
            rates, copies = ([one["rate"] for one in some] for some in (mine, copy))
            over = [a / b for a, b in zip(rates, copies, strict=True)]
            report.add(case, "all together", median(rates) * gigabytes, "GB/s", median(copies) * gigabytes, over)
            report.share(case, "over one client", [a / b for a, b in zip(rates, alone, strict=True)])
            report.add(case, "p50 of a call", percentile(calls, 50) * 1e3, "ms")
            report.add(case, "p99 of a call", percentile(calls, 99) * 1e3, "ms")
            for who in ("clients", "daemon"):
                report.add(case, f"CPU of {who}", sum(one[who] for one in mine) / (len(calls) * gigabytes), "s/GB")


# Sizes and batches


def copying(report: Report, quick: bool, size: int, batch: int, case: str) -> None:
    """Put, get into memory that exists, and plain copies, `batch` blocks of `size` a call."""
    nblocks = max(4 * batch, pool_bytes(quick, batch * size) // size // batch * batch)
    source, target = private(nblocks, size, fill=True), private(nblocks, size)
    with Live(arena_for(3 * nblocks, size), size) as live:
        ahead, recent = endless(nblocks, batch), dict[int, bytes]()
        behind, copies = endless(nblocks, batch), endless(nblocks, batch)

        def put() -> None:
            where, hashes = next(ahead), fresh(batch)
            done = live.client.put(live.namespace, hashes, [source[i] for i in where], deadline=DEADLINE)
            assert done == batch, f"{done} of {batch} blocks were put: {done.reason}"
            recent[where[0]] = hashes

        def get() -> None:
            where = next(behind)
            found = live.client.get(
                live.namespace, recent[where[0]], deadline=DEADLINE, into=[target[i] for i in where]
            )
            assert len(found) == batch, f"{len(found)} of {batch} blocks: {found.reason}"

        def copy() -> None:
            for i in next(copies):
                np.copyto(target[i], source[i])

        for _ in range(4 * nblocks // batch):
            put()
        effort, watch = Effort.of(quick, 15, 0.06), {"daemon": live.pid}
        puts = interleave({"put": put, "copy": copy}, effort, watch)
        # apart: blocks that were used outlive those that were only put
        gets = interleave({"get": get, "copy": copy}, effort, watch)
        for i in range(nblocks):
            target[i].fill(0)
        for _ in range(nblocks // batch):
            get()
        assert all(np.array_equal(*pair) for pair in zip(source, target, strict=True)), (
            "the store gave back other bytes than were put"
        )
    gigabytes = batch * size / 1e9
    for verb, done in (("put", puts), ("get", gets)):
        phase, plain = done[verb], done["copy"]
        report.add(
            f"{verb}, {case}", "speed", phase.rate * gigabytes, "GB/s", plain.rate * gigabytes, ratios(phase, plain)
        )
        for who in ("client", "daemon"):
            report.add(f"{verb}, {case}", f"CPU of the {who}", phase.cpu_per_call(who) / gigabytes, "s/GB")


def sizes(report: Report, quick: bool) -> None:
    """The same bytes a call in blocks of different size."""
    call = (4 if quick else 32) * MiB
    for size in QUICK_SIZES if quick else SIZES:
        copying(report, quick, size, call // size, f"{call // MiB} MiB in blocks of {size // KiB} KiB")


def batches(report: Report, quick: bool) -> None:
    """Blocks of one size, more and more of them a call."""
    for batch in QUICK_BATCHES if quick else BATCHES:
        copying(report, quick, MiB, batch, f"{batch} blocks of 1 MiB a call")


CASES: dict[str, Callable[[Report, bool], None]] = {
    "blocks": blocks,
    "clients": clients,
    "sizes": sizes,
    "batches": batches,
}


def main(
    case: Annotated[str, typer.Argument(help="one of " + ", ".join(CASES) + ", or all")] = "all",
    quick: Annotated[bool, typer.Option(help="Walk through everything, measure nothing worth reading.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a mark is missed.")] = False,
    json: Annotated[Path | None, typer.Option(help="Keep the rows in this file.")] = None,
) -> None:
    """How cost grows with blocks, clients, sizes and batches."""
    if case not in CASES and case != "all":
        raise typer.BadParameter(f"{case} is none of {', '.join(CASES)}, all")
    end_cleanly()
    report = Report("bench.scaling", sys.argv[1:])
    for name, measure in CASES.items():
        if case in (name, "all"):
            measure(report, quick)
    raise SystemExit(report.finish(json, strict))


if __name__ == "__main__":
    typer.run(main)
