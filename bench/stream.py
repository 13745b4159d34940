"""The ceiling of every copied byte: blocks over a plain Unix stream socket, read straight into memory that exists
already, checked by nobody.

`python -m bench.stream SOCKET BLOCKS BYTES` is the server, a process of its own with a pool of BLOCKS blocks. A call is
a byte ("p" or "g") and the numbers of first block and blocks; then the blocks, one way or the other; a put is answered
by one byte."""

from __future__ import annotations

import socket
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from bench.harness import Child
from bench.pools import Bytes, private

CALL = struct.Struct("<cII")


class Stream:
    """A server process and a connection to it. A context manager."""

    def __init__(self, nblocks: int, nbytes: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvtier-bench-")
        self.path = Path(self._directory.name) / "stream.sock"
        self.server = Child(["-m", "bench.stream", str(self.path), str(nblocks), str(nbytes)])

    def __enter__(self) -> Stream:
        self.server.__enter__()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.connect(str(self.path))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()
        self.server.stop()
        self._directory.cleanup()

    def put(self, first: int, blocks: Sequence[Bytes]) -> None:
        """Sends these blocks to places `first` and on, and waits for the answer."""
        self._sock.sendall(CALL.pack(b"p", first, len(blocks)))
        for block in blocks:
            self._sock.sendall(block.data)
        if self._sock.recv(1) != b"k":
            raise RuntimeError("the stream server is gone")

    def get(self, first: int, into: Sequence[Bytes]) -> None:
        """Receives the blocks from place `first` on."""
        self._sock.sendall(CALL.pack(b"g", first, len(into)))
        for block in into:
            read_into(self._sock, block)


def read_into(sock: socket.socket, block: Bytes) -> None:
    """Exactly this block. Raises EOFError."""
    view, have = block.data, 0
    while have < len(view):
        got = sock.recv_into(view[have:])
        if not got:
            raise EOFError
        have += got


def serve(path: str, nblocks: int, nbytes: int) -> None:
    pool = private(nblocks, nbytes)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(1)
    print("ready", flush=True)
    sock, _ = listener.accept()
    while len(head := sock.recv(CALL.size, socket.MSG_WAITALL)) == CALL.size:
        verb, first, n = CALL.unpack(head)
        for block in pool[first : first + n]:
            if verb == b"p":
                read_into(sock, block)
            else:
                sock.sendall(block.data)
        if verb == b"p":
            sock.sendall(b"k")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
