"""The ceiling of every lane figure: a pair of calls on a Unix stream socket that nobody parses.

`python -m bench.empty SOCKET` is the server, a process of its own with a thread a connection, as the lane's is. Frames
have the lane's header; where a request's deadline would stand is the number of bytes to answer with. `EmptyLane` is the
client: it sends and receives frames of the sizes and with the socket options of the real calls, so what lies between it
and the real lane is the work of parsing, storing and answering."""

from __future__ import annotations

import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from bench.harness import Child
from kvtier.protocol.frames import HEADER, MAX_BODY, pack, set_timeouts

MAX_FRAME = MAX_BODY + HEADER.size
TIMEOUT = struct.Struct("ll")
PATIENCE = 2.0  # seconds: the lane's own, whose sockets have kernel timeouts too


@dataclass(frozen=True, slots=True)
class Frames:
    """Bytes of a call's body and of the body of its answer."""

    request: int
    reply: int


@dataclass(frozen=True, slots=True)
class Options:
    """Socket options that cost time: a Python timeout polls before every receive, a kernel one (SO_RCVTIMEO) does
    not."""

    python_timeout: float | None
    receive_timeout: bytes
    send_timeout: bytes

    @classmethod
    def of(cls, sock: socket.socket) -> Options:
        """Those of a live socket."""
        kernel = (
            sock.getsockopt(socket.SOL_SOCKET, option, TIMEOUT.size)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
        )
        return cls(sock.gettimeout(), *kernel)

    def apply(self, sock: socket.socket) -> None:
        sock.settimeout(self.python_timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, self.receive_timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, self.send_timeout)


def _read_frame(sock: socket.socket, buffer: memoryview) -> tuple[int, int] | None:
    """(bytes to answer with, length of the body) of the next frame, whose bytes are then in `buffer`; None at the end.
    Mostly one receive."""
    have = sock.recv_into(buffer)
    while 0 < have < HEADER.size:
        more = sock.recv_into(buffer[have:])
        have = have + more if more else 0
    if not have:
        return None
    _, _, _, length, _, answer = HEADER.unpack_from(buffer)
    while have < HEADER.size + length:
        more = sock.recv_into(buffer[have : HEADER.size + length])
        if not more:
            return None
        have += more
    return answer, length


class EmptyLane:
    """Client of the empty server, one connection. Not thread-safe. A context manager that also starts and ends the
    server."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def __enter__(self) -> EmptyLane:
        self.directory = tempfile.TemporaryDirectory(prefix="kvtier-bench-")
        path = Path(self.directory.name) / "empty.sock"
        try:
            self.server = Child(["-m", "bench.empty", str(path)]).__enter__()
        except BaseException:
            self.directory.cleanup()
            raise
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(path))
        self.options.apply(self.sock)
        self.buffer = memoryview(bytearray(MAX_FRAME))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()
        self.server.stop()
        self.directory.cleanup()

    def call(self, frames: Frames) -> Callable[[], None]:
        """A function that makes one call of these sizes. The body is joined to the header at every call, as a client
        must."""
        body = bytes(frames.request)
        buffer, sock = self.buffer, self.sock

        def one() -> None:
            sock.sendall(pack(0, 0, frames.reply, body))
            got = _read_frame(sock, buffer)
            if got is None or got[1] != frames.reply:
                raise RuntimeError(f"the empty server answered {got} instead of {frames.reply} bytes")

        return one

    def pair(self, first: Frames, second: Frames) -> Callable[[], None]:
        """A function that makes both calls, one after the other."""
        one, two = self.call(first), self.call(second)

        def both() -> None:
            one()
            two()

        return both


def _serve(connection: socket.socket) -> None:
    buffer = memoryview(bytearray(MAX_FRAME))
    body = bytes(MAX_FRAME)
    set_timeouts(connection, PATIENCE, PATIENCE)
    with connection:
        while True:
            try:
                frame = _read_frame(connection, buffer)
            except BlockingIOError:
                continue  # between calls, as on the lane
            if frame is None:
                return
            connection.sendall(pack(0, 0, 0, body[: frame[0]]))


def main(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(16)
        print("ready", flush=True)
        while True:
            threading.Thread(target=_serve, args=(listener.accept()[0],), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
