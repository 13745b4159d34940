"""What a broken or hostile client costs the others: another client's zero-copy get of 32 blocks, alone and beside each
kind of abuse.

`python -m bench.abuse KIND|all [--quick] [--strict] [--json FILE]`. The abuser is a process of its own (`python -m
bench.abuse --abuser KIND SOCKET`) that does its worst without a break; it is stopped and continued by signals, so that
both windows lie side by side. Whatever needs a core also slows who has nothing to do with the daemon: so the empty pair
is timed in the same windows, and a process that only counts is one of the kinds."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from bench.empty import EmptyLane
from bench.harness import Child, Effort, Phase, end_cleanly, interleave, memory
from bench.live import BATCH, BODY, HASH, Live, arena_for, description, measure_calls
from bench.report import Report
from kvtier.protocol import frames
from kvtier.protocol.frames import HEADER, MAGIC, MAX_BODY, Verb
from kvtier.protocol.v1 import kvtier_pb2 as pb

MARK = ("<=", 2.0)  # p99 of the other client, beside over alone


# What an abuser does, over and over


def connect(path: str, greet: bool = True) -> socket.socket:
    """A lane socket, after its hello unless told not to. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        frames.set_timeouts(sock, 5.0, 5.0)
        sock.connect(path)
        if greet:
            sock.sendall(frames.pack(Verb.HELLO, 0, 0, pb.HelloRequest(protocol=1).SerializeToString()))
            if not sock.recv(4096):
                raise ConnectionError("refused")
    except BaseException:
        sock.close()
        raise
    return sock


def handle(sock: socket.socket) -> int:
    """That of the benchmark's namespace."""
    sock.sendall(
        frames.pack(
            Verb.REGISTER, 0, 0, pb.RegisterRequest(description=description(BODY).canonical).SerializeToString()
        )
    )
    return pb.RegisterReply.FromString(sock.recv(4096)[HEADER.size :]).handle


def until_closed(sock: socket.socket) -> None:
    try:
        while sock.recv(1 << 16):
            pass
    except OSError:
        pass  # closed with bytes unread, or not closed in time


def noise(path: str) -> None:
    """4 KiB of noise on a fresh connection."""
    with connect(path, greet=False) as sock:
        sock.sendall(b"\xff" * 4096)
        until_closed(sock)


def strangers(path: str) -> None:
    """As many silent connections as are let in, held until they are closed."""
    held = [connect(path, greet=False) for _ in range(80)]
    for sock in held:
        until_closed(sock)
        sock.close()


def hellos(path: str) -> None:
    """Hellos whose answer nobody waits for."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)
        sock.sendall(frames.pack(Verb.HELLO, 0, 0, pb.HelloRequest(protocol=1, map=True).SerializeToString()))


def overlong(path: str) -> None:
    """A frame that claims 2 GiB."""
    with connect(path) as sock:
        sock.sendall(HEADER.pack(MAGIC, 1, Verb.LOOKUP, 2**31, 1, 0))
        until_closed(sock)


def half(path: str) -> None:
    """Large frames on 32 sockets that stop before their end."""
    held = [connect(path) for _ in range(32)]
    try:
        for sock in held:
            frames.set_timeouts(sock, 5.0, 0.05)
            try:
                sock.sendall(frames.pack(Verb.LOOKUP, 1, 0, bytes(MAX_BODY))[:-1])
            except OSError:
                pass  # it has to wait for its turn
        for sock in held:
            until_closed(sock)
    finally:
        for sock in held:
            sock.close()


def _calls(path: str, verb: int, body: Callable[[socket.socket], bytes]) -> None:
    """One call again and again, on one socket."""
    with connect(path) as sock:
        frame = frames.pack(verb, 1, 0, body(sock))
        while True:
            sock.sendall(frame)
            if not sock.recv(1 << 16):
                return


def unknown(path: str) -> None:
    """A verb that does not exist."""
    _calls(path, 200, lambda sock: b"")


def malformed(path: str) -> None:
    """A body that is no message."""
    _calls(path, Verb.LOOKUP, lambda sock: b"\xff" * 1000)


def keys(path: str) -> None:
    """16,385 keys in a call."""
    run = pb.Run(layer_hi=1, head_hi=1, hashes=bytes(16_385 * HASH))
    _calls(path, Verb.LOOKUP, lambda sock: pb.LookupRequest(handle=handle(sock), run=[run]).SerializeToString())


def runs(path: str) -> None:
    """Half a million runs in a call."""
    _calls(path, Verb.LOOKUP, lambda sock: b"\x1a\x00" * 500_000)


def deep(path: str) -> None:
    """A description of 250,000 brackets."""
    _calls(path, Verb.REGISTER, lambda sock: pb.RegisterRequest(description=b"[" * 250_000).SerializeToString())


def deaf(path: str) -> None:
    """Calls whose answers nobody takes."""
    with connect(path) as sock:
        frame = frames.pack(Verb.STATUS, 1, 0, b"")
        while True:
            sock.sendall(frame)
            time.sleep(0.0005)  # one call at a time


def counting(path: str) -> None:
    """Nothing with the daemon: what any busy process costs."""
    for _ in range(100_000):
        pass


KINDS: dict[str, Callable[[str], None]] = {
    do.__name__: do
    for do in (counting, noise, strangers, hellos, overlong, half, unknown, malformed, keys, runs, deep, deaf)
}


def abuse(kind: str, path: str) -> None:
    """Does it for ever; what the daemon refuses is done again."""
    print("ready", flush=True)
    while True:
        try:
            KINDS[kind](path)
        except OSError:
            time.sleep(0.001)  # closed or refused


# What it costs


class Abuser(Child):
    """An abuser that can be stopped and continued. Stopped at first."""

    def __init__(self, kind: str, path: Path) -> None:
        super().__init__(["-m", "bench.abuse", "--abuser", kind, str(path)])
        self.goes = True

    def let(self, go: bool) -> None:
        """Goes on, or stops."""
        if self.goes != go:
            self.goes = go
            os.kill(self.pid, signal.SIGCONT if go else signal.SIGSTOP)

    def stop(self) -> None:
        self.let(True)
        super().stop()


def measure(report: Report, kind: str, quick: bool) -> None:
    """One kind: alone and beside it, the get and the empty pair each."""
    with Live(arena_for(4096, BODY), BODY) as live, EmptyLane(live.options) as empty:
        calls = measure_calls(live)
        get, pair = live.getter(live.fill(BATCH)), empty.pair(calls.lease, calls.release)
        before = memory(live.pid)["RssAnon"]
        with Abuser(kind, live.path) as abuser:

            def phase(go: bool, call: Callable[[], None]) -> Callable[[], None]:
                def one() -> None:
                    abuser.let(go)
                    call()

                return one

            phases = {
                "alone": phase(False, get),
                "beside": phase(True, get),
                "empty alone": phase(False, pair),
                "empty beside": phase(True, pair),
            }
            done = interleave(phases, Effort.of(quick, 31, 0.1))
            grown = memory(live.pid)["RssAnon"] - before
    _rows(report, kind, done, grown)


def _rows(report: Report, kind: str, done: dict[str, Phase], grown: int) -> None:
    alone, beside = done["alone"], done["beside"]
    empty = done["empty beside"].p(99) / done["empty alone"].p(99)
    case = f"beside {kind}"
    for name, phase in (("alone", alone), ("beside", beside)):
        report.add(case, f"zero-copy get {name}, p50", phase.p(50) * 1e6, "us", done[f"empty {name}"].p(50) * 1e6)
        report.add(case, f"zero-copy get {name}, p99", phase.p(99) * 1e6, "us", done[f"empty {name}"].p(99) * 1e6)
        report.add(case, f"zero-copy get {name}, worst", phase.worst * 1e3, "ms", done[f"empty {name}"].worst * 1e3)
    report.add(
        case,
        "p99 beside over alone",
        beside.p(99) / alone.p(99),
        "times",
        empty,
        mark=None if kind == "counting" else MARK,
    )
    report.add(case, "anonymous memory of the daemon, growth", grown / 2**20, "MiB")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    kind: Annotated[str, typer.Argument(help="one of " + ", ".join(KINDS) + ", or all")] = "all",
    path: Annotated[str, typer.Argument(hidden=True)] = "",
    abuser: Annotated[bool, typer.Option(hidden=True)] = False,
    quick: Annotated[bool, typer.Option(help="walk through everything, measure nothing worth reading")] = False,
    strict: Annotated[bool, typer.Option(help="exit 1 if a mark is missed")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="keep the rows in this file")] = None,
) -> None:
    """Measure what a hostile client costs another one."""
    if kind not in KINDS and kind != "all":
        raise typer.BadParameter(f"{kind} is none of {', '.join(KINDS)}, all")
    if abuser:
        abuse(kind, path)
    end_cleanly()
    report = Report("bench.abuse", sys.argv[1:])
    for name in KINDS:
        if kind in (name, "all"):
            measure(report, name, quick)
    raise typer.Exit(report.finish(json_file, strict))


if __name__ == "__main__":
    app()
