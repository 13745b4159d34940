"""Traffic end to end: requests replayed by simulated engines against a real daemon, and what their readers would feel.

`python -m bench.trace formats|engines|restart|failing|all [--trace FILE] [--requests N] [--quick] [--strict] [--json
FILE]`.

formats   three mixes (or the trace), cold and warm: BF16 with least recently used against FP8 with kvtier's order, in
          the same bytes
engines   1 to 16 engines at once
restart   the daemon is stopped half-way and started again, with an SSD tier and without
failing   the SSD tier hangs during the second third

Lookup, load and save are real calls, every byte scaled down by 256; how many blocks an arena holds is worked out at
full size. Times to the first token, between tokens and to the end come from `bench.timing`, a model with stated rates.
A trace is Mooncake's JSON lines: --trace or KVTIER_TRACE."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import mixes
from bench.harness import KiB, MiB, end_cleanly, percentile, progress
from bench.mixes import TOKENS, Request
from bench.node import Node, Result
from bench.report import Report
from bench.timing import Device, Served, play, waiting_starts
from kvtier.cli.simulator import POLICIES, blocks_held, hit_ratio
from kvtier.format.layout import HEADER_BYTES, attention

PARTS = 8  # blocks of the store in a block of a trace: 64 tokens each
SCALE = 256
SHARE = 10  # percent of the trace's distinct blocks that BF16 holds
BODIES = {"BF16": 32 * KiB - HEADER_BYTES, "FP8": 16 * KiB - HEADER_BYTES}
DTYPES = {"BF16": "bf16", "FP8": "e4m3fn"}
CROWDS, QUICK_CROWDS = (1, 2, 4, 8, 16), (1, 2)
DEVICE = Device()


def capacities(requests: Sequence[Request]) -> dict[str, int]:
    """Blocks of the store that the same bytes hold in each format, headers, scales and slots counted."""
    shape = (DEVICE.model.layers, DEVICE.model.kv_heads, DEVICE.model.width)
    extents = {
        name: attention(*shape, engine_tokens=TOKENS // PARTS, dtype=dtype).extents() for name, dtype in DTYPES.items()
    }
    distinct = len({block for r in requests for block in r.blocks})
    nbytes = max(1, distinct * PARTS * SHARE // 100) * extents["BF16"].slot_bytes
    return {name: max(PARTS, blocks_held(nbytes, one)) for name, one in extents.items()}


def predicted(requests: Sequence[Request], blocks: int, name: str) -> float:
    """The share of blocks that the replay of `kvtier replay` finds, for one engine and a store that knows trace blocks
    as wholes."""
    return hit_ratio([list(r.blocks) for r in requests], POLICIES[name](max(1, blocks // PARTS)))


def tokens_of(request: Request, result: Result) -> int:
    """Tokens of the input that need not be computed; one always is."""
    return min(result.loaded * (TOKENS // PARTS), request.tokens - 1)


def served(requests: Sequence[Request], results: Sequence[Result]) -> list[Served]:
    """What the model of timing needs."""
    start = requests[0].at
    pairs = zip(requests, results, strict=True)
    return [Served(r.at - start, r.tokens, r.output, tokens_of(r, one), one.lookup + one.load) for r, one in pairs]


def traffic(
    report: Report,
    case: str,
    requests: Sequence[Request],
    results: Sequence[Result],
    before: Any,
    after: Any,
    node: Node,
) -> None:
    """Rows of one replay that were measured: tokens, bytes, blocks, and the store's own latencies."""
    tokens = sum(r.tokens for r in requests)
    hits = sum(tokens_of(*pair) for pair in zip(requests, results, strict=True))
    loaded = sum(one.loaded for one in results) * node.body_bytes * SCALE
    saved = sum(one.blocks - one.loaded for one in results) * node.body_bytes * SCALE
    report.add(case, "tokens from the store", hits, "tokens", tokens, hits / tokens)
    report.add(case, "tokens computed", tokens - hits, "tokens")
    report.add(case, "bytes loaded, at full size", loaded / 1e9, "GB")
    report.add(case, "bytes saved, at full size", saved / 1e9, "GB")
    report.add(case, "blocks evicted", after["evicted_blocks_total"] - before["evicted_blocks_total"], "blocks")
    report.add(
        case,
        "arena in use at the end",
        after["known_blocks"],
        "blocks",
        node.capacity,
        after["known_blocks"] / node.capacity,
    )
    latencies(report, case, results)


def latencies(report: Report, case: str, results: Sequence[Result]) -> None:
    """Lookup, load and save as they were measured. Loads of nothing are none."""
    for what, values in (
        ("lookup", [one.lookup for one in results]),
        ("load", [one.load for one in results if one.loaded]),
        ("save", [one.save for one in results if one.loaded < one.blocks]),
    ):
        for p in (50, 99):
            report.add(case, f"{what}, p{p}", percentile(values or [0.0], p) * 1e3, "ms")


def feelings(
    report: Report, case: str, requests: Sequence[Request], results: Sequence[Result], fp8: bool, rate: float
) -> None:
    """Rows of the model at `rate` requests a second."""
    given = served(requests, results)
    base = len(given) / (given[-1].at or 1.0)
    felt = play(given, DEVICE, fp8, rate / base)
    for what, values in (
        ("TTFT", [one.first for one in felt]),
        ("ITL", [one.between for one in felt]),
        ("E2E", [one.last for one in felt]),
        ("wait", [one.waited for one in felt]),
    ):
        for p in (50, 99):
            report.add(case, f"{what} by the model, p{p}", percentile(values, p) * 1e3, "ms")
    report.add(case, "requests a second in the model", rate, "1/s")


def sources(trace: Path | None, requests: int) -> dict[str, list[Request]]:
    """The requests of each mix, or of the trace."""
    if trace is not None:
        return {trace.stem: mixes.load(trace, requests)}
    return {name: make(requests) for name, make in mixes.MIXES.items()}


@contextmanager
def node_of(capacity: int, name: str, **options: Any) -> Any:
    """A daemon for this format whose arena is memory."""
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-") as where,
        Node(capacity, BODIES[name], PARTS, Path(where), **options) as node,
    ):
        node.settle()
        yield node


def formats(report: Report, found: dict[str, list[Request]]) -> None:
    """BF16 with LRU against FP8 with kvtier's order at equal bytes, cold and warm."""
    for mix, requests in found.items():
        held = capacities(requests)
        runs: dict[tuple[str, str], list[Result]] = {}
        for name, module, order in (("BF16", "bench.lru", "lru"), ("FP8", "kvtier.server", "kvtier")):
            with (
                progress(f"{mix}, {name}", 2 * len(requests)) as tick,
                node_of(held[name], name, module=module) as node,
            ):
                for state in ("cold", "warm"):
                    before = node.status()
                    results = runs[name, state] = node.replay(requests, 1, lambda n: [tick() for _ in range(n)])
                    case = f"{mix}, {name}, {state}"
                    traffic(report, case, requests, results, before, node.status(), node)
                    if state == "cold":
                        blocks = sum(one.loaded for one in results) / sum(one.blocks for one in results)
                        report.add(
                            case,
                            "blocks hit, beside the replay's",
                            blocks,
                            "ratio",
                            predicted(requests, node.capacity, order),
                        )
        for state in ("cold", "warm"):
            starts = {
                name: waiting_starts(served(requests, runs[name, state]), DEVICE, name == "FP8") for name in BODIES
            }
            for name in BODIES:
                feelings(
                    report, f"{mix}, {name}, {state}", requests, runs[name, state], name == "FP8", 0.8 * starts["BF16"]
                )
                report.add(
                    f"{mix}, {name}, {state}", "waiting starts at, by the model", starts[name], "1/s", starts["BF16"]
                )
            compare(report, f"{mix}, FP8 over BF16, {state}", requests, runs["FP8", state], runs["BF16", state], starts)


def compare(
    report: Report,
    case: str,
    requests: Sequence[Request],
    ours: Sequence[Result],
    native: Sequence[Result],
    starts: dict[str, float],
) -> None:
    """What the two formats differ by."""
    hits = [sum(tokens_of(*pair) for pair in zip(requests, one, strict=True)) for one in (ours, native)]
    total = sum(r.tokens for r in requests)
    report.add(case, "tokens from the store", hits[0] / max(1, hits[1]), "times")
    report.add(case, "tokens computed", (total - hits[0]) / max(1, total - hits[1]), "times")
    report.add(case, "requests a second until waiting starts", starts["FP8"] / max(1e-9, starts["BF16"]), "times")


def engines(report: Report, found: dict[str, list[Request]], quick: bool) -> None:
    """More and more engines at once on the last of the mixes: what the store's answers take, and requests a second of
    all together."""
    mix, requests = list(found.items())[-1]
    held = capacities(requests)["FP8"]
    for n in QUICK_CROWDS if quick else CROWDS:
        with progress(f"{mix}, {n} engines", len(requests)) as tick, node_of(held, "FP8") as node:
            node.start_engines(n)
            before = node.status()
            results = node.replay(requests, n, lambda k: [tick() for _ in range(k)])
            case = f"{mix}, FP8, {n} engines"
            traffic(report, case, requests, results, before, node.status(), node)
            busy = sum(one.lookup + one.load + one.save for one in results)
            report.add(case, "requests a second, all engines", n * len(results) / busy, "1/s")


def restart(report: Report, found: dict[str, list[Request]]) -> None:
    """The second half of the requests: after no restart, after one with an SSD tier, after one without."""
    mix, requests = list(found.items())[-1]
    held, middle = capacities(requests)["FP8"], len(requests) // 2
    size = 4 * held * (BODIES["FP8"] + HEADER_BYTES) + 64 * MiB
    for how, ssd_bytes, again in (
        ("no restart", size, False),
        ("restart, SSD tier", size, True),
        ("restart, memory only", 0, True),
    ):
        with progress(f"{mix}, {how}", len(requests)) as tick, node_of(held, "FP8", ssd_bytes=ssd_bytes) as node:
            node.replay(requests[:middle], 1, lambda n: [tick() for _ in range(n)])
            case = f"{mix}, second half, {how}"
            if again:
                report.add(case, "until it has drained and ended", node.stop(), "s")
                report.add(case, "until it accepts calls again", node.start(), "s")
            rest = requests[middle:]
            results = node.replay(rest, 1, lambda n: [tick() for _ in range(n)])
            tokens, hits = (
                sum(r.tokens for r in rest),
                sum(tokens_of(*pair) for pair in zip(rest, results, strict=True)),
            )
            report.add(case, "tokens from the store", hits, "tokens", tokens, hits / tokens)
            latencies(report, case, results)


def failing(report: Report, found: dict[str, list[Request]]) -> None:
    """Three thirds: the SSD tier hangs during the second. What is in memory must be served on, and nothing may fail."""
    mix, requests = list(found.items())[-1]
    held, third = capacities(requests)["FP8"], len(requests) // 3
    size = 4 * held * (BODIES["FP8"] + HEADER_BYTES) + 64 * MiB
    with (
        progress(f"{mix}, SSD tier hangs", 3 * third) as tick,
        node_of(held, "FP8", module="bench.stalled", ssd_bytes=size) as node,
    ):
        for n, (how, number) in enumerate(
            (("before", None), ("SSD tier hangs", signal.SIGUSR1), ("after", signal.SIGUSR2))
        ):
            if number is not None:
                assert node.daemon is not None
                os.kill(node.daemon.pid, number)
            part = requests[n * third : (n + 1) * third]
            results = node.replay(part, 1, lambda k: [tick() for _ in range(k)])
            tokens, hits = (
                sum(r.tokens for r in part),
                sum(tokens_of(*pair) for pair in zip(part, results, strict=True)),
            )
            report.add(f"{mix}, {how}", "tokens from the store", hits, "tokens", tokens, hits / tokens)
            report.add(
                f"{mix}, {how}", "known and not loaded", sum(one.known - one.loaded for one in results), "blocks"
            )
            latencies(report, f"{mix}, {how}", results)


CASES = ("formats", "engines", "restart", "failing")


def main(
    case: Annotated[str, typer.Argument(help="one of " + ", ".join(CASES) + ", or all")] = "all",
    trace: Annotated[
        Path | None, typer.Option(envvar="KVTIER_TRACE", help="Mooncake's JSON lines, instead of the three mixes.")
    ] = None,
    requests: Annotated[int, typer.Option(min=20, help="How many.")] = 600,
    quick: Annotated[bool, typer.Option(help="Walk through everything, measure nothing worth reading.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a mark is missed (there are none).")] = False,
    json: Annotated[Path | None, typer.Option(help="Keep the rows in this file.")] = None,
) -> None:
    """Replay requests against a real daemon."""
    if case not in CASES and case != "all":
        raise typer.BadParameter(f"{case} is none of {', '.join(CASES)}, all")
    end_cleanly()
    report = Report("bench.trace", sys.argv[1:])
    report.machine["model"] = (
        f"{DEVICE.model.name}: prefill {DEVICE.prefill:,.0f} tokens/s, memory {DEVICE.bandwidth / 1e12:.1f} TB/s"
    )
    found = sources(trace, 30 if quick else requests)
    measures: dict[str, Callable[[], None]] = {
        "formats": lambda: formats(report, found),
        "engines": lambda: engines(report, found, quick),
        "restart": lambda: restart(report, found),
        "failing": lambda: failing(report, found),
    }
    for name, measure in measures.items():
        if case in (name, "all"):
            measure()
    raise SystemExit(report.finish(json, strict))


if __name__ == "__main__":
    typer.run(main)
