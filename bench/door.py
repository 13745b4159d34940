"""Bytes through the public door beside the lane and a plain socket: put and get of whole calls, and what they cost both
processes in CPU time.

`python -m bench.door [--quick] [--json FILE]`. One run, phases in turns. Every store phase goes through the public
client, whose `get` makes fresh private copies; beside it the lane's own way, a lease that is copied into memory that
exists already. The plain socket reads into such memory too and checks nothing, so it is the ceiling of sent bytes. No
marks: gRPC is for callers who have no lane, and the figures say what that costs."""

from __future__ import annotations

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = (
    "0"  # else a child of this process may abort before it runs (docs/transports.md)
)

import shutil
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench.harness import Effort, KiB, MiB, Phase, end_cleanly, interleave, ratios
from bench.live import DEADLINE, Live, arena_for, description, fresh
from bench.pki import Authority
from bench.pools import endless, pool_bytes, private
from bench.report import Report
from bench.stream import Stream
from kvtier.client.api import Client
from kvtier.server.access import issue

SIZES = (1 * MiB, 4 * MiB)


def call_bytes(quick: bool) -> int:
    """Bytes of one call."""
    return 8 * MiB if quick else 32 * MiB


class Mover:
    """Puts and gets of `batch` blocks by one client. `recent` holds what was put last."""

    def __init__(self, client: Client, size: int, quick: bool) -> None:
        self.client, self.size, self.batch = client, size, call_bytes(quick) // size
        self.namespace = client.register(description(size))
        nblocks = pool_bytes(quick, call_bytes(quick)) // size // self.batch * self.batch
        self.source, self.target = private(nblocks, size, fill=True), private(self.batch, size)
        self.turns = endless(nblocks, self.batch)
        self.recent: deque[tuple[bytes, range]] = deque(maxlen=4)
        self.turn = 0

    def put(self) -> None:
        hashes, blocks = fresh(self.batch), next(self.turns)
        stored = self.client.put(self.namespace, hashes, [self.source[i] for i in blocks], deadline=DEADLINE)
        assert stored == self.batch, f"{stored} of {self.batch} blocks were put: {stored.reason}"
        self.recent.append((hashes, blocks))

    def get(self) -> None:
        self.turn += 1
        hashes, _ = self.recent[self.turn % len(self.recent)]
        bodies = self.client.get(self.namespace, hashes, deadline=DEADLINE)
        assert len(bodies) == self.batch, f"{len(bodies)} of {self.batch} blocks: {bodies.reason}"

    def lease(self) -> None:
        """`get` into memory that exists already."""
        self.turn += 1
        hashes, _ = self.recent[self.turn % len(self.recent)]
        with self.client.lease(self.namespace, hashes, deadline=DEADLINE) as blocks:
            assert len(blocks) == self.batch, f"{len(blocks)} of {self.batch} blocks: {blocks.reason}"
            for target, body in zip(self.target, blocks, strict=True):
                np.copyto(target, body)

    def check(self) -> None:
        """What comes back is what was put."""
        hashes, blocks = self.recent[-1]
        for i, body in zip(blocks, self.client.get(self.namespace, hashes, deadline=DEADLINE), strict=True):
            assert np.array_equal(self.source[i], body), "the store gave back other bytes than were put"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def doors(directory: Path) -> tuple[list[str], Callable[[Path], dict[str, Client]]]:
    """(arguments of a daemon that listens everywhere, what makes the clients). One daemon has TLS on all its TCP
    listeners or on none: TLS it is."""
    token, line = issue("bench", "local", "write")
    tokens = directory / "tokens"
    tokens.write_text(line + "\n")
    tokens.chmod(0o600)
    authority = Authority(directory)
    cert, key = authority.issue("server")
    port = free_port()
    arguments = [
        f"--token-file={tokens}",
        f"--tls-cert={cert}",
        f"--tls-key={key}",
        f"--grpc=127.0.0.1:{port}",
        f"--grpc=unix:{directory}/door.sock",
    ]

    def clients(lane: Path) -> dict[str, Client]:
        return {
            "lane": Client(f"unix:{lane}"),
            "gRPC, Unix": Client(f"grpc+unix:{directory}/door.sock"),
            "gRPC, TCP, TLS": Client(f"grpcs://127.0.0.1:{port}", token=token, ca=str(authority.ca)),
        }

    return arguments, clients


def measure(report: Report, size: int, quick: bool) -> None:
    """All phases of one block size."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-")))
        arguments, clients = doors(directory)
        call = call_bytes(quick)
        live = stack.enter_context(Live(arena_for(40 * call // size, size), size, arguments))
        stream = stack.enter_context(Stream(4 * call // size, size))
        movers = {name: Mover(stack.enter_context(client), size, quick) for name, client in clients(live.path).items()}
        plain_source, plain_target = private(4 * call // size, size, fill=True), private(4 * call // size, size)
        batch = call // size
        turns = endless(4 * batch, batch)

        def plain_put() -> None:
            blocks = next(turns)
            stream.put(blocks[0], [plain_source[i] for i in blocks])

        def plain_get() -> None:
            blocks = next(turns)
            stream.get(blocks[0], [plain_target[i] for i in blocks])

        watch = {"daemon": live.pid, "plain": stream.server.pid}
        effort = Effort.of(quick, 15, 0.1)
        for verb, plain in (("put", plain_put), ("get", plain_get)):
            phases: dict[str, Callable[[], object]] = {"plain socket": plain}
            phases |= {name: getattr(mover, verb) for name, mover in movers.items()}
            if verb == "get":
                phases["lane, lease and copy"] = movers["lane"].lease
            _rows(report, size, verb, call, interleave(phases, effort, watch))
        for mover in movers.values():
            mover.check()


def _rows(report: Report, size: int, verb: str, call: int, done: dict[str, Phase]) -> None:
    gigabytes = call / 1e9
    plain = done["plain socket"]
    for name, phase in done.items():
        case = f"{verb} {size // KiB} KiB, {name}"
        server = "plain" if name == "plain socket" else "daemon"
        report.add(
            case,
            f"speed, {call // MiB} MiB a call",
            phase.rate * gigabytes,
            "GB/s",
            plain.rate * gigabytes,
            ratios(phase, plain),
        )
        report.add(case, "CPU of both", (phase.cpu_per_call("client") + phase.cpu_per_call(server)) / gigabytes, "s/GB")
        report.add(case, "CPU of the server", phase.cpu_per_call(server) / gigabytes, "s/GB")
        report.add(case, "worst call", phase.worst * 1e3, "ms", plain.worst * 1e3, phase.worst / plain.worst)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    quick: Annotated[bool, typer.Option(help="walk through everything, measure nothing worth reading")] = False,
    strict: Annotated[bool, typer.Option(help="exit 1 if a mark is missed (there are none)")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="keep the rows in this file")] = None,
) -> None:
    """Measure the public door beside the lane and a plain socket."""
    if shutil.which("openssl") is None:
        raise typer.BadParameter("the openssl command is needed to make certificates")
    end_cleanly()
    report = Report("bench.door", sys.argv[1:])
    for size in SIZES[:1] if quick else SIZES:
        measure(report, size, quick)
    raise typer.Exit(report.finish(json_file, strict))


if __name__ == "__main__":
    app()
