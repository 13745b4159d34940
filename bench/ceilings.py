"""What this machine can do at all: the ceilings that every other benchmark is read against.

`python -m bench.ceilings [--quick] [--json FILE]`. Copies by block size between private memory and a shared mapping,
first touch of a mapping, a hash over a block, and the empty pair of lane calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import xxhash

from bench.empty import EmptyLane
from bench.harness import (
    Effort,
    GiB,
    KiB,
    MiB,
    Phase,
    end_cleanly,
    interleave,
    median,
    now,
    pinned,
    placements,
    progress,
    ratios,
)
from bench.live import BATCH, BODY, Live, arena_for, measure_calls
from bench.pools import POPULATE_READ, POPULATE_WRITE, Bytes, endless, memfd, pool_bytes, populate, private, shared
from bench.report import Report

SIZES = (64 * KiB, 128 * KiB, 256 * KiB, 1 * MiB, 4 * MiB, 16 * MiB)
QUICK_SIZES = (64 * KiB, 1 * MiB)


def copier(source: list[Bytes], target: list[Bytes], batch: int) -> Callable[[], None]:
    """A function that copies the next `batch` blocks of one pool into the next of the other."""
    from_, to = endless(len(source), batch), endless(len(target), batch)

    def copy() -> None:
        for i, j in zip(next(from_), next(to), strict=True):
            np.copyto(target[j], source[i])

    return copy


def hasher(blocks: list[Bytes], batch: int) -> Callable[[], None]:
    """A function that hashes the next `batch` blocks of a pool."""
    numbers = endless(len(blocks), batch)

    def digest() -> None:
        for i in next(numbers):
            xxhash.xxh3_64_intdigest(blocks[i].data)

    return digest


def copies(report: Report, quick: bool) -> None:
    """np.copyto by block size: private to private, into and out of a mapping laid out as an arena's slots are; xxh3
    over the same blocks."""
    for size in QUICK_SIZES if quick else SIZES:
        batch = max(1, min(BATCH, 64 * MiB // size))
        nblocks = pool_bytes(quick, batch * size) // size
        source, target, mapped = private(nblocks, size, fill=True), private(nblocks, size), shared(nblocks, size)
        phases: dict[str, Callable[[], object]] = {
            "private to private": copier(source, target, batch),
            "private to mapping": copier(source, mapped, batch),
            "mapping to private": copier(mapped, target, batch),
            "xxh3": hasher(source, batch),
        }
        done = interleave(phases, Effort.of(quick))
        base = done["private to private"]
        scale = batch * size / 1e9
        for name, phase in done.items():
            report.add(
                f"copy {size // KiB} KiB", name, phase.rate * scale, "GB/s", base.rate * scale, ratios(phase, base)
            )


def first_touch(report: Report, quick: bool) -> None:
    """The first touch of a mapping: a byte a page, madvise with one thread and two, and a second mapping of the same
    memory."""
    nbytes = 16 * MiB if quick else 1 * GiB

    def touch() -> float:
        view = np.frombuffer(memfd(nbytes)[0], np.uint8)
        start = now()
        view[::4096] = 1
        return now() - start

    def advise(threads: int) -> float:
        mapping = memfd(nbytes)[0]
        start = now()
        populate(mapping, POPULATE_WRITE, threads)
        return now() - start

    def second() -> float:
        first, other = memfd(nbytes, 2)
        populate(first, POPULATE_WRITE, threads=2)
        start = now()
        populate(other, POPULATE_READ)
        return now() - start

    ways: dict[str, Callable[[], float]] = {
        "a byte a page": touch,
        "MADV_POPULATE_WRITE, 1 thread": lambda: advise(1),
        "MADV_POPULATE_WRITE, 2 threads": lambda: advise(2),
        "second mapping, MADV_POPULATE_READ": second,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    trials = 2 if quick else 7
    with progress("first touch", trials) as tick:
        for trial in range(trials):
            for name in list(ways) if trial % 2 == 0 else list(ways)[::-1]:
                seconds[name].append(ways[name]())
            tick()
    base = seconds["a byte a page"]
    for name, taken in seconds.items():
        speed, ceiling = (nbytes / GiB / median(times) for times in (taken, base))
        report.add("first touch", name, speed, "GiB/s", ceiling, [b / t for b, t in zip(base, taken, strict=True)])


def empty_pairs(report: Report, quick: bool) -> None:
    """Empty pairs of the real calls' frame sizes: back to back, pinned, and after a copy of 32 MiB (cold caches, a core
    that has slept)."""
    with Live(arena_for(1024, BODY), BODY) as live:
        calls, options = measure_calls(live), live.options
    copy = copier(private(BATCH, MiB), private(BATCH, MiB), BATCH)
    with EmptyLane(options) as empty:
        get, put = empty.pair(calls.lease, calls.release), empty.pair(calls.reserve, calls.seal)

        def copy_then_get() -> None:
            copy()
            get()

        phases: dict[str, Callable[[], object]] = {"lease + release": get, "reserve + seal": put}
        for where, client_cores, server_cores in placements():
            with pinned(client_cores, empty.server.pid, cores=server_cores):
                done = interleave(phases, Effort.of(quick), {"server": empty.server.pid})
            for name, phase in done.items():
                _pair_rows(report, f"empty pair, {name}{where}", phase)
        done = interleave({"copy": copy, "copy + pair": copy_then_get}, Effort.of(quick))
    gap = [
        1 / both.rate - 1 / alone.rate
        for both, alone in zip(done["copy + pair"].windows, done["copy"].windows, strict=True)
    ]
    report.add("empty pair, lease + release", "after a copy of 32 MiB", median(gap) * 1e6, "us")
    for name in ("reserve", "seal", "lease", "release"):
        frames = getattr(calls, name)
        report.add("frames of 32 blocks", f"{name}, request", frames.request, "bytes")
        report.add("frames of 32 blocks", f"{name}, reply", frames.reply, "bytes")


def _pair_rows(report: Report, case: str, phase: Phase) -> None:
    report.add(case, "p50", phase.p(50) * 1e6, "us")
    report.add(case, "p99", phase.p(99) * 1e6, "us")
    report.add(case, "worst", phase.worst * 1e3, "ms")
    report.add(case, "pairs a second", phase.rate, "1/s")
    report.add(case, "CPU of the client a pair", phase.cpu_per_call("client") * 1e6, "us")
    report.add(case, "CPU of the server a pair", phase.cpu_per_call("server") * 1e6, "us")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    quick: Annotated[bool, typer.Option(help="walk through everything, measure nothing worth reading")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="keep the rows in this file")] = None,
) -> None:
    """Measure the ceilings of this machine."""
    end_cleanly()
    report = Report("bench.ceilings", sys.argv[1:])
    empty_pairs(report, quick)
    copies(report, quick)
    first_touch(report, quick)
    raise typer.Exit(report.finish(json_file, strict=False))


if __name__ == "__main__":
    app()
