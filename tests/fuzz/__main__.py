"""Runs targets and prints what came of it. Exit code 1 if an input failed; it is kept, and named."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from tests.fuzz import calls, files
from tests.fuzz.mutate import Mutator
from tests.fuzz.target import FOUND, Broken, Target, keep, kept

TARGETS: dict[str, type[Target]] = {
    kind.name: kind
    for kind in (
        calls.LaneFrames,
        calls.Messages,
        calls.GrpcRequests,
        files.Headers,
        files.Artifacts,
        files.Descriptions,
        files.Settings,
        files.TokenFiles,
        files.Http,
    )
}
SLOW = 10.0  # seconds for one input: a hang
GROWTH = 96 * 2**20  # bytes of the process beyond what it had after the first inputs
WARM = 2000  # inputs until growth counts


@dataclass(slots=True)
class Result:
    """What one target did."""

    target: str
    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    slowest: float = 0.0
    growth: int = 0
    failure: str = ""


class Faults(logging.Handler):
    """Errors that the code under test logs are failures: it caught something that should not have happened."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() not in ("reload failed",) and len(self.lines) < 100:
            self.lines.append(self.format(record))


def fuzz(name: str, inputs: int, seed: int) -> Result:
    """Runs one target over its kept inputs and `inputs` in all. Never raises for what an input did: says it in
    `failure`.
    """
    rng = random.Random(f"{seed}/{name}")
    result = Result(name)
    faults = Faults()
    logging.getLogger("kvtier").addHandler(faults)
    descriptors, threads, baseline = 0, 0, 0
    began = time.monotonic()
    target = TARGETS[name]()
    data = b""
    try:
        seeds = kept(name)
        assert seeds, "no seeds: run python -m tests.fuzz --write-seeds"
        mutator = Mutator(rng, seeds, target.words)
        while result.inputs < max(inputs, len(seeds)):
            if result.inputs % target.check_every == 0:
                faulthandler.dump_traceback_later(12 * SLOW, exit=True)
                target.check()
            made = target.make(rng) if rng.random() < 0.4 else None
            data = seeds[result.inputs] if result.inputs < len(seeds) else made or mutator.next()
            start = time.perf_counter()
            result.outcomes[target.run(data)] += 1
            took = time.perf_counter() - start
            result.slowest = max(result.slowest, took)
            result.inputs += 1
            if took > SLOW:
                raise Broken(f"one input took {took:.1f} s")
            if faults.lines:
                raise Broken(f"a fault was logged: {faults.lines[0]}")
            if result.inputs == WARM:
                gc.collect()
                descriptors, threads, baseline = _descriptors(), threading.active_count(), _memory()
        target.check()
        if baseline:
            gc.collect()
            result.growth = _memory() - baseline
            if result.growth > GROWTH:
                raise Broken(f"grew by {result.growth} bytes")
            open_now, running = _descriptors(), threading.active_count()
            if open_now > descriptors + 8 or running > threads + 8:
                raise Broken(f"{open_now} descriptors after {descriptors}, {running} threads after {threads}")
    except Exception:
        path = keep(name, data, FOUND)
        result.failure = f"{path}\n{traceback.format_exc()}"
    finally:
        faulthandler.cancel_dump_traceback_later()
        try:
            target.close()
        except Exception:
            result.failure = result.failure or traceback.format_exc()
        logging.getLogger("kvtier").removeHandler(faults)
    result.seconds = time.monotonic() - began
    return result


def share(inputs: int, name: str) -> int:
    """How many of a run's inputs a target gets."""
    return -(-inputs * TARGETS[name].weight // sum(kind.weight for kind in TARGETS.values()))


def _memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def write_seeds() -> None:
    """Writes the first seeds of every target that has none yet."""
    for name, kind in TARGETS.items():
        if not kept(name):
            target = kind()
            try:
                for data in target.first_seeds():
                    print(keep(name, data, "seed-"))
            finally:
                target.close()


def main(
    inputs: Annotated[int, typer.Option(help="How many, over all targets or for the one.")] = 100_000,
    target: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(TARGETS)}; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="What the inputs follow from.")] = 0,
    seeds: Annotated[bool, typer.Option("--write-seeds", help="Write first seeds where there are none.")] = False,
) -> None:
    """Fuzz what reads bytes from strangers."""
    if seeds:
        write_seeds()
        return
    names = target or list(TARGETS)
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        print(f"there is no target {unknown[0]}: {', '.join(TARGETS)}", file=sys.stderr)
        raise SystemExit(2)
    print(f"seed {seed}")
    print(f"{'target':<12} {'inputs':>9} {'seconds':>8} {'slowest ms':>11} {'growth MiB':>11}  outcomes", flush=True)
    failed, total = False, 0
    for name in names:
        found = fuzz(name, inputs if target and len(target) == 1 else share(inputs, name), seed)
        outcomes = ", ".join(f"{word} {n}" for word, n in found.outcomes.most_common())
        figures = f"{found.seconds:>8.1f} {found.slowest * 1e3:>11.1f} {found.growth / 2**20:>11.1f}"
        print(f"{name:<12} {found.inputs:>9} {figures}  {outcomes}", flush=True)
        total += found.inputs
        if found.failure:
            failed = True
            print(f"FAILED: {found.failure}", file=sys.stderr)
    print(f"{total} inputs in all{', NOT all well' if failed else ': no crash, no hang, no growth beyond the limit'}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
