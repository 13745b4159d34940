"""kvtier as an L2 tier of LMCache against LMCache's own: its `lmcache bench l2` over fs, fs_native, resp (Redis, in
C++) and kvtier, in turns.

`.venv-lmcache/bin/python -m bench.lmcache_l2 [--quick] [--strict] [--rounds N] [--json FILE] [--dir DIR]`, after `make
test-lmcache` has made that environment; needs redis-server. A round is one process of LMCache's benchmark per tier, on
an empty store, everything verified; its figure is LMCache's own p50. What is judged is the median over the rounds of
kvtier's figure over the best of the others *in that round*. Nothing is synced: fs writes into the page cache, Redis
into its memory, kvtier into its arena. Neither fs nor Redis checks bytes; nor does kvtier those in memory. Takes up to
0.5 GiB in DIR, as much in Redis, and an arena of 2.5 GiB."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.harness import ROOT, Child, KiB, MiB, end_cleanly, median, now, percentile, progress, turns
from bench.report import Report
from kvtier.client.api import Client
from kvtier.format.identity import CHAIN, Description, HashScheme, f32_hex
from kvtier.format.layout import attention

MODEL = "bench-model"  # what `lmcache bench l2` calls its model
TIERS = ("kvtier", "fs", "fs_native", "resp")
SIZES = {256 * KiB: 64, 2 * MiB: 16, 8 * MiB: 4}  # bytes of an object -> objects of a task
TASKS, WARM_UP = 8, 2
MARKS = {"store": 1.3, "load": 0.95}  # at least, of the best of the others
JUDGED = (2 * MiB, 8 * MiB)
ARENA = "2560MiB"  # an eighth of it, which lookups may hold, is all of one round
WORKERS = 2  # of fs_native and resp: as many as this machine has cores, and as many threads as kvtier copies with


@dataclass(frozen=True, slots=True)
class Bench:
    """Where things are: LMCache's command, a directory for files, the port of Redis, the daemon's socket."""

    lmcache: Path
    directory: Path
    redis: int
    socket: Path
    tasks: int

    def run(self, tier: str, nbytes: int, number: int) -> dict[str, float]:
        """One process on an empty store: p50 of store and load as GB/s, of lookup as seconds."""
        folder = self.directory / f"{tier}-{number}"
        folder.mkdir()
        try:
            with self._emptied(tier, folder, number) as adapter:
                said = (
                    f"--num-keys {SIZES[nbytes]} --data-size-kb {nbytes // KiB} --rounds {self.tasks} "
                    f"--warmup-rounds {WARM_UP}"
                )
                said += " --l1-align-bytes 4096 --no-skip-verify --lookup-max-hit-rate 1.0 --format json"
                quiet = {
                    "LMCACHE_TRACK_USAGE": "false",
                    "LMCACHE_DISABLE_BANNER": "1",
                    "LMCACHE_LOG_LEVEL": "ERROR",
                    "OMP_NUM_THREADS": "1",
                }
                done = subprocess.run(
                    [self.lmcache, "bench", "l2", "--l2-adapter", json.dumps(adapter), *said.split()],
                    env={**os.environ, **quiet, "PYTHONPATH": str(ROOT)},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=300,
                    check=False,
                )
        finally:
            shutil.rmtree(folder)
        if done.returncode or "data verified OK" not in done.stdout or "TIMEOUT" in done.stdout:
            raise RuntimeError(f"{tier}, {nbytes} bytes: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return figures(done.stdout, nbytes * SIZES[nbytes])

    @contextmanager
    def _emptied(self, tier: str, folder: Path, number: int) -> Iterator[dict[str, Any]]:
        """The adapter's configuration, over a store that has nothing of it."""
        if tier == "kvtier":
            description = described(number)
            (folder / "model.json").write_bytes(description.canonical)
            params = {"namespaces": {MODEL: str(folder / "model.json")}, "socket": str(self.socket)}
            loaded = {
                "module_path": "bench.lmcache_settled",
                "class_name": "Settled",
                "config_class_name": "KvtierL2AdapterConfig",
            }
            yield {"type": "plugin", **loaded, "adapter_params": params}
            with Client(f"unix:{self.socket}") as client:
                for info in client.list_namespaces():
                    client.drop(info.namespace.hex())
        elif tier == "resp":
            redis(self.redis, "FLUSHALL")
            yield {"type": "resp", "host": "127.0.0.1", "port": self.redis, "num_workers": WORKERS}
            redis(self.redis, "FLUSHALL")
        else:
            yield {"type": tier, "base_path": str(folder), **({"num_workers": WORKERS} if tier == "fs_native" else {})}


def described(number: int) -> Description:
    """A namespace that no round before has used."""
    scales = {f"0.{part}": f32_hex(0.05) * 8 for part in "kv"}
    layout = attention(1, 8, 128, engine_tokens=16)
    return Description(
        MODEL, f"{number + 1:040x}", layout, HashScheme(CHAIN, "0", 16), rule="checkpoint", scales=scales
    )


def figures(said: str, nbytes: int) -> dict[str, float]:
    """LMCache's own p50, out of the JSON behind its log lines."""
    start = said.index("\n{") + 1
    metrics = json.loads(said[start : said.rindex("}") + 1])["metrics"]
    found = {}
    for name, section in metrics.items():
        if name.startswith("op_"):
            (p50,) = (value for key, value in section.items() if "p50" in key.lower() and "ms" in key.lower())
            operation = section["operation"].lower()
            found[operation] = p50 / 1e3 if operation == "lookup" else nbytes / p50 / 1e6
    if not found.keys() >= {"store", "load", "lookup"}:
        raise RuntimeError(f"LMCache's benchmark says nothing of some operation: {said[-2000:]}")
    return found


def redis(port: int, command: str) -> None:
    """One command without arguments, answered with +OK."""
    with socket.create_connection(("127.0.0.1", port), 30) as sock:
        sock.sendall(f"{command}\r\n".encode())
        if not sock.recv(64).startswith((b"+OK", b"+PONG")):
            raise RuntimeError(f"Redis refuses {command}")


@contextmanager
def redis_server(directory: Path) -> Iterator[int]:
    """A Redis of our own on a free port, without a word to any disk; yields the port."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("bench.lmcache_l2 needs redis-server. On Debian and Ubuntu: apt-get install redis-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    said = f"--port {port} --bind 127.0.0.1 --dir {directory} --appendonly no --daemonize no"
    process = subprocess.Popen(
        [program, *said.split(), "--save", ""], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        end = now() + 30
        while True:
            try:
                redis(port, "PING")
                break
            except OSError:
                if now() > end or process.poll() is not None:
                    raise
        yield port
    finally:
        process.terminate()
        process.wait(30)


def wait_backed(path: Path) -> None:
    """Until the daemon's whole arena is memory."""
    end = now() + 300
    with Client(f"unix:{path}") as client:
        while (status := client.status())["arena_ready_bytes"] < status["arena_bytes"]:
            if now() > end:
                raise RuntimeError(f"the arena is not backed by memory: {status}")
            time.sleep(0.1)


def measure(bench: Bench, rounds: int) -> dict[tuple[int, str, str], list[float]]:
    """(bytes, operation, tier) -> a figure a round."""
    found: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    number = 0
    with progress("rounds", rounds * len(SIZES) * len(TIERS)) as tick:
        for trial in range(rounds):
            for nbytes in SIZES:
                for tier in turns(TIERS, trial):
                    number += 1
                    for operation, figure in bench.run(tier, nbytes, number).items():
                        found[nbytes, operation, tier].append(figure)
                    tick()
    return found


def judge(report: Report, found: dict[tuple[int, str, str], list[float]]) -> None:
    """Rows: each tier's figure, and kvtier's over the best of the others, round by round."""
    for nbytes in SIZES:
        size = f"{nbytes // MiB} MiB" if nbytes >= MiB else f"{nbytes // KiB} KiB"
        for operation in ("store", "load"):
            case = f"{operation}, {SIZES[nbytes]} objects of {size}"
            rates = {tier: found[nbytes, operation, tier] for tier in TIERS}
            for tier, values in rates.items():
                report.add(case, f"{tier}, median", median(values), "GB/s")
                report.add(case, f"{tier}, p10", percentile(values, 10), "GB/s")
                report.add(case, f"{tier}, p90", percentile(values, 90), "GB/s")
            best = [max(others) for others in zip(*(rates[tier] for tier in TIERS if tier != "kvtier"), strict=True)]
            against = [ours / other for ours, other in zip(rates["kvtier"], best, strict=True)]
            mark = (">=", MARKS[operation]) if nbytes in JUDGED else None
            report.share(case, "kvtier over the best of the others", against, mark)
            for tier in TIERS[1:]:
                report.share(
                    case,
                    f"kvtier over {tier}",
                    [ours / other for ours, other in zip(rates["kvtier"], rates[tier], strict=True)],
                )
        for tier in TIERS:
            report.add(
                f"lookup, {SIZES[nbytes]} objects of {size}",
                f"{tier}, median",
                1e3 * median(found[nbytes, "lookup", tier]),
                "ms",
            )


def main(
    quick: Annotated[bool, typer.Option(help="Walk through everything, measure nothing worth reading.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a mark is missed.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Processes of each tier and size.")] = 9,
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep the rows in this file.")] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="Where fs and fs_native write.")] = None,
) -> None:
    """LMCache's bench of its L2 tiers, kvtier among them."""
    end_cleanly()
    arguments = [
        *(["--quick"] if quick else []),
        *(["--strict"] if strict else []),
        *(["--rounds", str(rounds)] if rounds != 9 else []),
        *(["--json", str(json_file)] if json_file else []),
    ]
    beside = Path(sys.executable).parent / "lmcache"
    lmcache = beside if beside.exists() else ROOT / ".venv-lmcache" / "bin" / "lmcache"
    if not lmcache.exists():
        raise SystemExit("bench.lmcache_l2 needs LMCache: `make test-lmcache` makes its environment")
    report = Report("bench.lmcache_l2", arguments)
    version = re.search(
        r"\d[\w.]*", subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=False).stdout
    )
    report.machine |= {"redis": version[0] if version else "absent", "lmcache": "0.5.6"}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory)))
        port = stack.enter_context(redis_server(folder))
        path = folder / "kvtier.sock"
        stack.enter_context(
            Child(["-m", "kvtier.server", "--socket", str(path), "--arena-bytes", ARENA, "--grpc", "off"])
        )
        wait_backed(path)
        bench = Bench(lmcache, folder, port, path, 2 if quick else TASKS)
        judge(report, measure(bench, 1 if quick else rounds))
    raise SystemExit(report.finish(json_file, strict))


if __name__ == "__main__":
    typer.run(main)
