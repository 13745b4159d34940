"""A real daemon, raw sockets to it and real client processes, for the tests of the wire.

Everything here is a child process on a Unix socket in a temporary directory. Leaving a `Daemon` proves that its ledger
agrees with what its sessions hold, that it ends by itself on SIGTERM with exit code 0, and that it logged no fault of
its own; leaving a `Peer` ends the process.
"""

from __future__ import annotations

import array
import ctypes
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message

from kvtier.client.api import WHOLE, Client, RegisteredNamespace
from kvtier.errors import KvtierError, from_code
from kvtier.format.identity import CHAIN, Description, HashScheme
from kvtier.format.layout import Layout, opaque
from kvtier.protocol import frames
from kvtier.protocol.frames import Verb
from kvtier.protocol.v1 import kvtier_pb2 as pb
from tests.support.paths import ROOT

KiB, MiB = 1024, 1 << 20
PATIENCE = 30.0  # seconds: what a test waits for anything on a busy machine; no test waits so long when all is well
T = TypeVar("T")

_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """For preexec_fn: a test runner that is killed takes its children along."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def until(condition: Callable[[], T], what: str, within: float = PATIENCE) -> T:
    """Polls until `condition` is true and returns what it said. Fails after `within` seconds."""
    end = time.monotonic() + within
    while True:
        said = condition()
        if said:
            return said
        assert time.monotonic() < end, f"{what}: not within {within:g} s (last: {said!r})"
        time.sleep(0.002)


# What is stored: opaque blocks whose bytes follow from a number, so that every mix-up shows


def description(
    nbytes: int = 1024, *, model: str = "org/m", revision: str = "1" * 40, layout: Layout | None = None, **fields: Any
) -> Description:
    """A namespace of opaque blocks of `nbytes`, or of another layout."""
    scheme = HashScheme(CHAIN, "0", 16)
    return Description(model, revision, layout or opaque(nbytes, "ab" * 32, engine_tokens=16), scheme, **fields)


def content_hash(n: int) -> bytes:
    return n.to_bytes(32, "little")


def hashes(numbers: Sequence[int]) -> bytes:
    """Content hashes of these blocks, concatenated."""
    return b"".join(map(content_hash, numbers))


def body(n: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Byte i of block n: the number in the first 8 bytes, then (31 n + i) mod 113, so no NaN code and no poison."""
    made = ((31 * n + np.arange(nbytes)) % 113).astype(np.uint8)
    made[:8] = np.frombuffer(n.to_bytes(8, "little"), np.uint8)[: len(made)]
    return made


def is_body(view: np.ndarray[Any, Any], n: int) -> bool:
    return bool(np.array_equal(view, body(n, view.size)))


class Patient(Client):
    """The client library with deadlines that no busy machine misses: for tests that ask what the answer is, not how
    soon it comes.

    Connects at once: a daemon has to be there.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        until(self._attached, f"the daemon at {address} answers")
        for name in (
            "lookup",
            "lookup_runs",
            "lease",
            "get",
            "fill",
            "put",
            "delete",
            "prefetch",
            "flush",
            "status",
            "explain",
        ):
            setattr(self, name, functools.partial(getattr(self, name), deadline=PATIENCE))

    def _attached(self) -> bool:
        try:
            self.status()
        except KvtierError:
            return False
        return True


def put(client: Client, ns: RegisteredNamespace, numbers: Sequence[int], **options: Any) -> int:
    """Stores these blocks; asserts that all of them are known then."""
    nbytes = ns.extents(options.get("range_", WHOLE)).body_bytes
    answer = client.put(ns, hashes(numbers), [body(n, nbytes) for n in numbers], **options)
    assert answer == len(numbers), answer.reason
    return answer


# The daemon


class Daemon:
    """`kvtier-server` as a child process. A context manager; `start`, `kill`, `terminate` and `restart` may be called
    inside it.
    """

    def __init__(
        self,
        arena_bytes: int | str = 64 * MiB,
        *arguments: str,
        environment: dict[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="kvtier-test-") if directory is None else None
        self.directory = Path(self._own.name) if self._own else directory or Path()
        self.socket = self.directory / "kvtier.sock"
        self.address = f"unix:{self.socket}"
        self.arguments = ["--arena-bytes", str(arena_bytes), "--poison", *arguments]
        self.environment = environment
        self.log = self.directory / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        """One more server process on this socket, with these arguments instead of ours; its output is its caller's."""
        return subprocess.Popen(
            [sys.executable, "-m", "kvtier.server", "--socket", str(self.socket), *(arguments or self.arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=self.environment,
            preexec_fn=die_with_parent,
        )

    def start(self) -> None:
        """Starts it and waits for its `ready` line."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvtier.server", "--socket", str(self.socket), *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=self.environment,
                preexec_fn=die_with_parent,
            )
        assert self.process.stdout is not None
        ready = read_line(self.process.stdout.fileno(), PATIENCE)
        assert ready.startswith(f"ready: {self.address} "), (ready, self.log.read_text())

    def __enter__(self) -> Daemon:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.process is not None:
                self.process.send_signal(signal.SIGCONT)
            if kind is None and self.process is not None:
                end = time.monotonic() + 2.0  # sessions that are just ending; a test may leave something held, too
                while self.status()["held_bytes"] and time.monotonic() < end:
                    time.sleep(0.02)
                self.status(check_integrity=True)
                assert self.terminate() == 0
                assert not self.socket.exists()
            if kind is None:
                assert self.faults() == []
        finally:
            self.close()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def faults(self) -> list[str]:
        """Lines of the daemon's log that tell of a fault of its own."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if "level=error" in line or "Traceback" in line]

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(PATIENCE)
        self._close_output()
        self.process = None

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(PATIENCE)
        self._close_output()
        self.process = None
        return code

    def close(self) -> None:
        """Ends it whatever happened, and removes its directory."""
        if self.process is not None:
            self.kill()
        if self._own is not None:
            self._own.cleanup()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP for a while: it holds everything and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: _state(self.pid) == "T", "the daemon stops")
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def client(self) -> Patient:
        return Patient(self.address)

    def status(self, check_integrity: bool = False) -> dict[str, Any]:
        """Gauges and counters, asked on a connection of its own (counted in `sessions` and `sockets`)."""
        if check_integrity:
            time.sleep(0.05)  # it is exact while no call is under way, and a release may be: nobody waits for its end
        with Raw(self.socket) as connection:
            status, reply = connection.call(Verb.STATUS, pb.StatusRequest(check_integrity=check_integrity))
        assert status == 0, f"{from_code(status, reply.decode())!r}; log: {self.log.read_text()[-4000:]}"
        answer: dict[str, Any] = json.loads(pb.StatusReply.FromString(reply).json)
        return answer

    def stored(self) -> dict[str, Any]:
        """The part of the status that no refused call may change, once releases that are under way have come."""
        time.sleep(0.05)
        status = self.status()
        return {
            name: status[name]
            for name in (
                "namespaces",
                "used_bytes",
                "known_blocks",
                "held_bytes",
                "limbo_sessions",
                "sealed_blocks_total",
            )
        }

    def quiet(self) -> dict[str, Any]:
        """Waits until nobody but the asker is connected and nothing is held; the status then."""
        return until(lambda: (s := self.status())["sessions"] == 1 and s["held_bytes"] == 0 and s, "all sessions end")

    def empty(self) -> None:
        """Forgets every namespace and all blocks, for the next test of a daemon that several share. Waits for `quiet`
        and checks integrity first.
        """
        self.quiet()
        self.status(check_integrity=True)
        with Raw(self.socket) as connection:
            for info in pb.ListReply.FromString(connection.call(Verb.LIST, b"")[1]).namespace:
                status, reply = connection.call(Verb.DROP, pb.DropRequest(name=info.namespace.hex()))
                assert status == 0, reply
        left = self.status(check_integrity=True)
        assert left["known_blocks"] == left["used_bytes"] == left["namespaces"] == 0
        assert self.faults() == []

    def rss_anon(self) -> int:
        """Bytes of memory of its own (the arena is shared memory and not in it)."""
        return _field(self.pid, "RssAnon") * KiB

    def threads(self) -> int:
        return _field(self.pid, "Threads")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def _close_output(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        self.process.stdout.close()


def _field(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def read_line(fd: int, within: float) -> str:
    """One line of a pipe. Fails if it does not come in time or the writer ends."""
    end, said = time.monotonic() + within, b""
    while not said.endswith(b"\n"):
        left = end - time.monotonic()
        assert left > 0 and select.select([fd], [], [], left)[0], f"no line within {within:g} s, only {said!r}"
        byte = os.read(fd, 1)
        assert byte, f"the process ended after {said!r}"
        said += byte
    return said.decode()


# Raw sockets


class Raw:
    """One socket of the Unix transport, spoken by hand.

    Reads have a deadline of `PATIENCE`; nothing is checked but what the caller checks.
    """

    def __init__(self, path: Path, hello: pb.HelloRequest | None = None, *, greet: bool = True) -> None:
        """Connects; says hello (a new session that maps nothing) unless told not to.

        `fd` is the arena's, if it came.
        """
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        frames.set_timeouts(self.sock, PATIENCE, PATIENCE)
        self.buffer = frames.Buffer()
        self.fd: int | None = None
        self.request = 0
        self.boot = 0
        self.session = b""
        self.arena_bytes = 0
        try:
            self.sock.connect(str(path))
            if greet:
                status, reply = self.hello(hello or pb.HelloRequest(protocol=1))
                if status:
                    raise from_code(status, reply.decode())
                made = pb.HelloReply.FromString(reply)
                self.session, self.arena_bytes = made.session, made.arena_bytes
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hello(self, message: Message, fds: Sequence[int] = ()) -> tuple[int, bytes]:
        """Sends a hello with these file descriptors: (status, body of the answer). Keeps the one that comes back."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([frames.pack(Verb.HELLO, 0, 1000, message.SerializeToString())], rights)
        data, ancillary, _, _ = self.sock.recvmsg(frames.MAX_HELLO, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)
        for _, _, payload in ancillary:
            self.fd = array.array("i", payload[:4])[0]
        if not data:
            raise frames.Closed
        buffer = memoryview(bytearray(frames.HEADER.size + frames.MAX_HELLO))
        buffer[: len(data)] = data
        status, _, self.boot, answer = frames.continue_receive(self.sock, buffer, len(data), PATIENCE)
        return status, bytes(answer)

    def call(self, verb: int, message: Message | bytes) -> tuple[int, bytes]:
        """One call: (status, body of the answer). Raises Closed if the daemon closed instead."""
        self.request += 1
        self.send(
            frames.pack(
                verb, self.request, 1000, message if isinstance(message, bytes) else message.SerializeToString()
            )
        )
        status, request, _, answer = self.receive()
        assert request == self.request
        return status, answer

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def receive(self) -> tuple[int, int, int, bytes]:
        """One frame: (status, request id, boot id, body). Raises Closed, ConnectionError, or Idle after `PATIENCE`. The
        next frame may have come with it."""
        status, request, boot, answer = self.buffer.receive(self.sock, PATIENCE)
        answer = bytes(answer)
        self.buffer.done()
        return status, request, boot, answer

    def close(self) -> None:
        self.sock.close()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


# Client processes

_PRELUDE = """
import gc, hashlib, json, os, signal, socket, sys, threading, time
import numpy as np
import kvtier
from kvtier.client import connection
from kvtier.client.api import Client
from tests.support.daemon import *
connection.HELLO_DEADLINE = PATIENCE # a busy machine may let a second pass between a connection and its answer
def say(value):
    print(json.dumps(value), flush=True)
def hear():
    line = sys.stdin.readline()
    return json.loads(line) if line else sys.exit(0)
ADDRESS = sys.argv[1]
"""


class Peer:
    """A client process that runs `code`: it has `ADDRESS` and `ARGS` and talks in JSON lines by `say(value)` and
    `hear()`. A context manager.
    """

    def __init__(self, code: str, daemon: Daemon, *arguments: Any, **options: Any) -> None:
        program = f"{_PRELUDE}ARGS = json.loads({json.dumps(json.dumps(arguments))})\n{code}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, daemon.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            preexec_fn=die_with_parent,
            **options,
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None and kind is not None:
            self.process.kill()
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it is gone, as the test meant it
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(PATIENCE)
            raise
        finally:
            self.process.stdout.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self, within: float = PATIENCE) -> Any:
        """The next value it says."""
        assert self.process.stdout is not None
        return json.loads(read_line(self.process.stdout.fileno(), within))

    def say(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, value: Any, within: float = PATIENCE) -> Any:
        self.say(value)
        return self.hear(within)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(PATIENCE)

    def wait(self, within: float = PATIENCE) -> int:
        return self.process.wait(within)
