"""The Redis tier against redis-py on the same socket, and memory's readers while Redis is stopped or stands still.

`python -m bench.redis [--quick] [--strict] [--json FILE]`. Starts redis-servers of its own on Unix sockets, full and
evicting, as one is in use. The ceiling of a put is SET of the same bytes from memory, that of a get GET into bytes, one
by one or pipelined by 8, whichever is faster in the trial. The tier's put leaves the checksum out (settling computes it
once for all tiers); its get has it in, with the way into the slot."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, cycle
from pathlib import Path
from typing import Annotated

import redis
import typer

from bench.harness import Child, Effort, KiB, MiB, Phase, end_cleanly, interleave, now, percentile, ratios
from bench.live import HASH, description, leases
from bench.report import Report
from bench.tiers import Blocks
from kvtier.client.api import Client
from kvtier.format.block import digest
from kvtier.store.namespaces import Namespaces
from kvtier.tiers.redis.location import make
from kvtier.tiers.redis.redis import Redis
from kvtier.tiers.tier import Outgoing

MARKS: dict[str, tuple[str, float]] = {
    "1024 KiB": (">=", 0.9),
    "4096 KiB": (">=", 0.9),
    "p99": ("<=", 2.0),
    "back": ("<=", 10.0),
}
BATCH = 8  # blocks of a call, and of a pipeline
LEASED = 32  # blocks of a lease
STALL = 20.0  # seconds


@contextmanager
def server(directory: Path, maxmemory: int) -> Iterator[tuple[Callable[[], subprocess.Popen[bytes]], Path]]:
    """(what starts one, its Unix socket). All that it started are ended."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise SystemExit("no redis-server and no valkey-server here: run tests/support/redis.sh, or install either")
    socket, started = directory / "r.sock", []
    command = [
        binary,
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        str(directory),
    ]
    command += ["--maxmemory", str(maxmemory), "--maxmemory-policy", "allkeys-lru"]

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
        end = now() + 30
        while True:
            try:
                with redis.Redis(unix_socket_path=str(socket), socket_timeout=5) as client:
                    client.ping()
                return started[-1]
            except (redis.ConnectionError, redis.TimeoutError):
                if now() > end:
                    raise
                time.sleep(0.01)

    try:
        yield start, socket
    finally:
        for process in started:
            process.kill()
            process.wait(10)


class Pair:
    """The tier and a plain client of redis-py on one server, with blocks of one size."""

    def __init__(self, socket: Path, body_bytes: int, stack: ExitStack) -> None:
        self.blocks = Blocks(Namespaces(set, lambda _: 0), body_bytes, 64)
        self.tier = Redis(make(f"unix://{socket}", {"timeout": 10.0}))
        stack.callback(self.tier.close)
        self.client = stack.enter_context(redis.Redis(unix_socket_path=str(socket), socket_timeout=10))
        self.values = [bytes(slot[: self.blocks.nbytes]) for slot in self.blocks.slots[:BATCH]]
        self._turn = count()

    def put(self, checked: bool = False) -> list[bytes]:
        """A batch of fresh blocks through the tier; their keys."""
        keys, slots = self.blocks.batch()
        sums = [digest(slot[: self.blocks.nbytes]) if checked else 1 for slot in slots[:BATCH]]
        out = [
            Outgoing(k, self.blocks.namespace, s, self.blocks.nbytes, n)
            for k, s, n in zip(keys[:BATCH], slots[:BATCH], sums, strict=True)
        ]
        assert all(self.tier.write(out)), self.tier.gauges()
        return keys[:BATCH]

    def raw_put(self) -> None:
        for value in self.values:
            self.client.set(b"raw:%d" % next(self._turn), value)

    def pipelined_put(self) -> None:
        with self.client.pipeline(transaction=False) as pipe:
            for value in self.values:
                pipe.set(b"raw:%d" % next(self._turn), value)
            pipe.execute()

    def gets(self) -> dict[str, Callable[[], None]]:
        """Phases that get what is put here."""
        self.client.flushall()
        kept = cycle([self.put(checked=True) for _ in range(2)])
        for i, value in enumerate(self.values * 2):
            self.client.set(b"raw:%d" % i, value)
        names = cycle([[b"raw:%d" % (half * BATCH + i) for i in range(BATCH)] for half in range(2)])
        target, nbytes = self.blocks.slots[0], self.blocks.nbytes

        def tier_get() -> None:
            for key in next(kept):
                self.tier.read(key, target, nbytes)

        def raw_get() -> None:
            for one in next(names):
                assert len(self.client.get(one)) == nbytes

        def pipelined_get() -> None:
            with self.client.pipeline(transaction=False) as pipe:
                for one in next(names):
                    pipe.get(one)
                assert len(pipe.execute()) == BATCH

        return {"tier": tier_get, "single": raw_get, "pipelined": pipelined_get}


def transfers(report: Report, body_bytes: int, quick: bool) -> None:
    """Batches through the tier and through redis-py."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        maxmemory = (256 if quick else 1024) * MiB
        start, socket = stack.enter_context(server(Path(name), maxmemory))
        start()
        pair = Pair(socket, body_bytes, stack)
        version = pair.client.info("server")["redis_version"]
        report.machine["libraries"] |= {
            "redis": importlib.metadata.version("redis"),
            "hiredis": importlib.metadata.version("hiredis"),
            "server": version,
        }
        for _ in range(maxmemory // (BATCH * body_bytes) + 1):
            pair.raw_put()  # until it is full: what is measured evicts
        puts = {"tier": pair.put, "single": pair.raw_put, "pipelined": pair.pipelined_put}
        _share(report, body_bytes, "put", interleave(puts, Effort.of(quick, 21, 0.3)))
        _share(report, body_bytes, "get", interleave(pair.gets(), Effort.of(quick, 21, 0.3)))


def _share(report: Report, body_bytes: int, what: str, done: dict[str, Phase]) -> None:
    case, gigabytes = f"{body_bytes // KiB} KiB", BATCH * body_bytes / 1e9
    best = max(done["single"].rate, done["pipelined"].rate)
    report.add(case, f"{what} rate", done["tier"].rate * gigabytes, "GB/s", best * gigabytes)
    report.add(case, f"{what} rate, redis-py one by one", done["single"].rate * gigabytes, "GB/s")
    report.add(case, f"{what} rate, redis-py pipelined", done["pipelined"].rate * gigabytes, "GB/s")
    trials = list(map(min, ratios(done["tier"], done["single"]), ratios(done["tier"], done["pipelined"])))
    report.share(case, f"{what} over the best of redis-py", trials, MARKS[case])


def stalled(report: Report, quick: bool, how: str) -> None:
    """Leases of 32 blocks in memory, while others are put, before, while and after Redis is away; then how long the
    tier takes to be back."""
    seconds = 1.0 if quick else STALL
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        start, below = stack.enter_context(server(Path(name), 256 * MiB))
        process, socket = start(), Path(name) / "k.sock"
        arguments = [
            "-m",
            "kvtier.server",
            "--config",
            os.devnull,
            "--socket",
            str(socket),
            "--arena-bytes",
            "256MiB",
            "--grpc",
            "off",
        ]
        stack.enter_context(Child([*arguments, "--redis", f"url=unix://{below}"]))
        client, writer = (stack.enter_context(Client(f"unix:{socket}")) for _ in range(2))
        ns, hashes, stop = client.register(description(64 * KiB)), os.urandom(LEASED * HASH), threading.Event()

        def puts() -> None:
            mine = writer.register(description(64 * KiB))
            while not stop.is_set():
                with writer.fill(mine, os.urandom(4 * HASH), deadline=5.0):
                    pass
                time.sleep(0.01)

        def measure() -> list[float]:
            return leases(client, ns, hashes, int(seconds), f"leases, {how}")

        with client.fill(ns, hashes, deadline=5.0):
            pass
        thread = threading.Thread(target=puts, daemon=True)
        thread.start()
        try:
            before = measure()
            if how == "hanging":
                os.kill(process.pid, signal.SIGSTOP)
            else:
                process.kill()
                process.wait(10)
            during = measure()
            if how == "hanging":
                os.kill(process.pid, signal.SIGCONT)
            else:
                start()
            back = _back(client)
            calm = [*before, *measure()]
        finally:
            stop.set()
            thread.join(10)
        _rows(report, f"Redis {how} for {seconds:.0f} s", calm, during, back)


def _back(client: Client) -> float:
    """Seconds until blocks go down again."""
    begin, settled = now(), client.status()["settled_blocks_total"]
    while client.status()["settled_blocks_total"] == settled:
        assert now() - begin < 120, client.status()
        time.sleep(0.02)
    return now() - begin


def _rows(report: Report, case: str, calm: Sequence[float], during: Sequence[float], back: float) -> None:
    ratio = percentile(during, 99) / percentile(calm, 99)
    report.add(case, "lease p99", percentile(during, 99) * 1e3, "ms", percentile(calm, 99) * 1e3, ratio)
    report.add(case, "lease p99 over undisturbed", ratio, "ratio", mark=MARKS["p99"])
    report.add(case, "worst lease", max(during) * 1e3, "ms", max(calm) * 1e3)
    report.add(case, "leases", len(during), "calls")
    report.add(case, "blocks go down again after", back, "s", mark=MARKS["back"])


def main(
    quick: Annotated[bool, typer.Option(help="Walk through everything, measure nothing worth reading.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a mark is missed.")] = False,
    json: Annotated[Path | None, typer.Option(help="Keep the rows in this file.")] = None,
) -> None:
    """What the Redis tier costs beside redis-py, and what a Redis that fails costs the others."""
    end_cleanly()
    report = Report(
        "bench.redis",
        [*(["--quick"] if quick else []), *(["--strict"] if strict else []), *(["--json", str(json)] if json else [])],
    )
    for body_bytes in (MiB, 4 * MiB):
        transfers(report, body_bytes, quick)
    for how in ("stopped", "hanging"):
        stalled(report, quick, how)
    raise SystemExit(report.finish(json, strict))


if __name__ == "__main__":
    typer.run(main)
