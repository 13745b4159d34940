"""What watching costs: a scrape of a daemon with many blocks in many namespaces, what lane callers feel of it, what
counting a call costs.

`python -m bench.scrape [--quick] [--strict] [--json FILE]`. The scrape is timed against the health page of the same
daemon (the same HTTP, nothing read), lookups beside a scraper that never pauses against lookups alone, and one
`Series.add` against an empty loop."""

from __future__ import annotations

import http.client
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from bench.harness import Child, Effort, Phase, end_cleanly, interleave, now, progress, ratios
from bench.live import arena_for
from bench.report import Report
from kvtier.client.api import Client, RegisteredNamespace
from kvtier.format.identity import CHAIN, Description, HashScheme
from kvtier.format.layout import opaque
from kvtier.server.meters import Meters

BLOCKS, NAMESPACES = 100_000, 200
BODY = 64  # bytes: the count of blocks is what matters here
BATCH = 32
MARKS = {"scrape ms": ("<=", 50.0), "count us": ("<=", 2.0)}


def namespace(n: int) -> Description:
    return Description(f"bench/{n}", "0" * 40, opaque(BODY, "0" * 64, engine_tokens=16), HashScheme(CHAIN, "0", 16))


class Watched:
    """A daemon with `/metrics` and `blocks` blocks spread over `namespaces` namespaces. A context manager."""

    def __init__(self, blocks: int, namespaces: int) -> None:
        self.blocks, self.namespaces = blocks, namespaces

    def __enter__(self) -> Watched:
        with ExitStack() as stack:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "k.sock"
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.port = int(free.getsockname()[1])
            arena = arena_for(self.blocks * 11 // 10, BODY)
            arguments = [
                "--socket",
                str(path),
                "--arena-bytes",
                str(arena),
                "--grpc",
                "off",
                "--metrics",
                str(self.port),
            ]
            self.daemon = stack.enter_context(Child(["-m", "kvtier.server", *arguments]))
            self.client = stack.enter_context(Client(f"unix:{path}"))
            self._fill()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _fill(self) -> None:
        each = self.blocks // self.namespaces
        with progress("storing", self.namespaces) as tick:
            for n in range(self.namespaces):
                ns = self.client.register(namespace(n))
                raw = os.urandom(32 * each)
                for at in range(0, len(raw), 32 * 250):
                    with self.client.fill(ns, raw[at : at + 32 * 250], deadline=5.0) as slots:
                        pass
                    assert slots.sealed == min(250, len(raw[at:]) // 32), slots.reason
                self.last: tuple[RegisteredNamespace, bytes] = (ns, raw[: 32 * BATCH])
                tick()

    def page(self, path: str) -> Callable[[], bytes]:
        """A function that fetches a page once."""

        def fetch() -> bytes:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                assert answer.status == 200, answer.status
                return answer.read()
            finally:
                connection.close()

        return fetch

    def lookup(self) -> None:
        ns, hashes = self.last
        assert self.client.lookup(ns, hashes, deadline=5.0) == BATCH


def scrapes(report: Report, quick: bool) -> None:
    """Scrapes against health pages, then lookups with and without a scraper beside them."""
    blocks, namespaces = (2_000, 20) if quick else (BLOCKS, NAMESPACES)
    case = f"{blocks:,} blocks, {namespaces} namespaces"
    with Watched(blocks, namespaces) as watched:
        body = watched.page("/metrics")()
        done = interleave(
            {"scrape": watched.page("/metrics"), "live": watched.page("/live")},
            Effort.of(quick, 15, 0.25),
            {"daemon": watched.daemon.pid},
        )
        scrape, live = done["scrape"], done["live"]
        report.add(case, "scrape p50", scrape.p(50) * 1e3, "ms", live.p(50) * 1e3, scrape.p(50) / live.p(50))
        report.add(
            case,
            "scrape p99",
            scrape.p(99) * 1e3,
            "ms",
            live.p(99) * 1e3,
            scrape.p(99) / live.p(99),
            MARKS["scrape ms"],
        )
        report.add(case, "scrape worst", scrape.worst * 1e3, "ms", live.worst * 1e3, scrape.worst / live.worst)
        report.add(case, "scrapes timed", len(scrape.calls), "scrapes")
        report.add(case, "lines of a scrape", body.count(b"\n"), "lines")
        report.add(case, "CPU of the daemon a scrape", scrape.cpu_per_call("daemon") * 1e3, "ms")
        with Scraper(watched.page("/metrics")) as scraper:
            beside = interleave(
                {"scraped": scraper.beside(watched.lookup), "alone": scraper.without(watched.lookup)},
                Effort.of(quick, 15, 0.25),
            )
        _beside(report, beside["scraped"], beside["alone"])


def _beside(report: Report, scraped: Phase, alone: Phase) -> None:
    case = f"lookup of {BATCH} while someone scrapes without a pause"
    report.add(case, "lookups a second", scraped.rate, "1/s", alone.rate, ratios(scraped, alone))
    report.add(case, "p50", scraped.p(50) * 1e6, "us", alone.p(50) * 1e6, scraped.p(50) / alone.p(50))
    report.add(case, "p99", scraped.p(99) * 1e3, "ms", alone.p(99) * 1e3, scraped.p(99) / alone.p(99))
    report.add(case, "worst", scraped.worst * 1e3, "ms", alone.worst * 1e3, scraped.worst / alone.worst)


class Scraper:
    """A thread that fetches a page again and again while it is let. A context manager."""

    def __init__(self, fetch: Callable[[], bytes]) -> None:
        self._fetch = fetch
        self._go = threading.Event()
        self._idle = threading.Event()
        self._end = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Scraper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end = True
        self._go.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._end:
            self._idle.set()
            self._go.wait(30)
            self._idle.clear()
            while self._go.is_set() and not self._end:
                self._fetch()

    def beside(self, call: Callable[[], None]) -> Callable[[], None]:
        def with_scraper() -> None:
            self._go.set()
            call()

        return with_scraper

    def without(self, call: Callable[[], None]) -> Callable[[], None]:
        def alone() -> None:
            if self._go.is_set():
                self._go.clear()
                self._idle.wait(30)
            call()

        return alone


def counting(report: Report, quick: bool) -> None:
    """One `Series.add` as the lane does it, two readings of the clock included, against the same loop with nothing in
    it."""
    series, n = Meters().series("lane", "lookup"), 100 if quick else 10_000

    def counted() -> None:
        for _ in range(n):
            began = now()
            series.add(now() - began, 0, 1000, 100)

    def empty() -> None:
        for _ in range(n):
            pass

    done = interleave({"counted": counted, "empty": empty}, Effort.of(quick))
    cost = (done["counted"].p(50) - done["empty"].p(50)) / n
    report.add("counting one call", "p50", cost * 1e6, "us", mark=MARKS["count us"])


def main(
    quick: Annotated[bool, typer.Option(help="Walk through everything, measure nothing worth reading.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a mark is missed.")] = False,
    json: Annotated[Path | None, typer.Option(help="Keep the rows in this file.")] = None,
) -> None:
    """What watching a daemon costs."""
    end_cleanly()
    arguments = [
        *(["--quick"] if quick else []),
        *(["--strict"] if strict else []),
        *(["--json", str(json)] if json else []),
    ]
    report = Report("bench.scrape", arguments)
    counting(report, quick)
    scrapes(report, quick)
    raise SystemExit(report.finish(json, strict))


if __name__ == "__main__":
    typer.run(main)
