"""The wire format of the Unix transport: a header of 24 bytes, then one protobuf message. Both ends use this file.

request  magic u16 | version u8 | verb u8   | length u32 | request id u64 | deadline in ms u64
reply    magic u16 | version u8 | status u8 | length u32 | request id u64 | boot id u64

All numbers are little-endian; status is 0 or an error's code. An error's body is its message as UTF-8. Frames have at
most 4 KiB before the hello is answered and 1 MiB after it. After the hello a client may send the next call before it
has read the last answer: answers come in the order of the calls. A release whose verb carries QUIET has no answer.
Sockets are blocking with SO_RCVTIMEO and SO_SNDTIMEO (settimeout() would poll before each call and cost 40 us a pair).
"""

from __future__ import annotations

import mmap
import socket
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum

from kvtier.errors import Full, Invalid

HEADER = struct.Struct("<HBBIQQ")
MAGIC, VERSION = 0x764B, 1
MAX_HELLO = 4096
MAX_BODY = 1 << 20
SMALL = 72 * 1024  # bytes of a frame that stay in memory between frames: 1,024 hashes of 64 bytes
QUIET = 0x80  # added to the verb of a release: the client does not wait for an answer, and none is sent
_TIMEVAL = struct.Struct("ll")


class Verb(IntEnum):
    """What a request frame asks for: the number on the wire."""

    HELLO = 1
    REGISTER = 2
    LOOKUP = 3
    PREFETCH = 4
    RESERVE = 5
    SEAL = 6
    ABORT = 7
    LEASE = 8
    RELEASE = 9
    FLUSH = 10
    DELETE = 11
    EXPLAIN = 12
    STATUS = 13
    LIST = 14
    SHOW = 15
    DIFF = 16
    DROP = 17
    PIN = 18
    UNPIN = 19
    TTL = 20


class Closed(Exception):
    """The peer closed the socket between two frames."""


class Idle(Exception):
    """No byte of a next frame came within the socket's receive timeout."""


def set_timeouts(sock: socket.socket, receive: float, send: float) -> None:
    """Kernel timeouts of a blocking socket, in seconds; what runs into one raises BlockingIOError."""
    for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
        micros = max(1, int(seconds * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000))


def pack(kind: int, request: int, extra: int, body: bytes) -> bytes:
    """One frame; `kind` is a verb or a status, `extra` a deadline or a boot id."""
    return HEADER.pack(MAGIC, VERSION, kind, len(body), request, extra) + body


class Buffer:
    """Space for one frame of the largest size.

    Only what frames have filled of it is in memory, because most sockets are idle. At most as many large frames are in
    memory at a time as `gate` has places, if there is a gate; others wait for a place.
    """

    def __init__(self, gate: threading.Semaphore | None = None) -> None:
        self._map = mmap.mmap(-1, HEADER.size + MAX_BODY, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._map)
        self._small = self._view[:SMALL]
        self._gate = gate
        self._large = self._inside = False
        self._next = self._after = 0  # bytes of the next frame that came with the last one, and where they lie

    def receive(self, sock: socket.socket, within: float) -> tuple[int, int, int, memoryview]:
        """`receive` into this buffer, which keeps the bytes of the next frame that came with this one.

        `done` must follow, also after an error. Raises Full as well, if a large frame found no place `within` seconds.
        """
        have, self._next = self._next, 0
        if have:
            self._view[:have] = self._view[self._after : self._after + have]
        else:
            have = _first(sock, self._small)
        kind, request, extra, end, have = _whole(sock, self._view, have, within, self._enter)
        if have > end:  # of a large frame no more was received than itself
            self._next, self._after = have - end, end
        return kind, request, extra, self._view[HEADER.size : end]

    def done(self) -> None:
        """Ends the use of the body: gives the memory of a large frame back, and its place."""
        if self._large:
            self._large = False
            self._map.madvise(mmap.MADV_DONTNEED)
        if self._inside and self._gate is not None:
            self._inside = False
            self._gate.release()

    def _enter(self, end: int, within: float) -> None:
        if end > SMALL:
            self._large = True
            if self._gate is not None:
                if not self._gate.acquire(timeout=within):
                    raise Full("full, retry: too many large messages at once")
                self._inside = True


def receive(sock: socket.socket, buffer: memoryview, within: float) -> tuple[int, int, int, memoryview]:
    """One frame, usually by one recv: (verb or status, request id, deadline or boot id, body).

    The body lies in `buffer`. Raises Closed or Idle between frames; TimeoutError if a frame that has begun is not
    whole `within` seconds; ConnectionError if the peer goes away inside one; Invalid for a wrong magic or version, a
    frame larger than the buffer or bytes after the frame.
    """
    return continue_receive(sock, buffer, _first(sock, buffer), within)


def _first(sock: socket.socket, buffer: memoryview) -> int:
    try:
        have = sock.recv_into(buffer)
    except BlockingIOError:
        raise Idle from None
    if not have:
        raise Closed
    return have


def continue_receive(
    sock: socket.socket, buffer: memoryview, have: int, within: float
) -> tuple[int, int, int, memoryview]:
    """The rest of `receive` for a frame whose first `have` bytes are in the buffer."""
    kind, request, extra, end, have = _whole(sock, buffer, have, within)
    if have > end:
        raise Invalid("bytes after the frame: its answer comes first")
    return kind, request, extra, buffer[HEADER.size : end]


def _whole(
    sock: socket.socket, buffer: memoryview, have: int, within: float, enter: Callable[[int, float], None] | None = None
) -> tuple[int, int, int, int, int]:
    """(verb or status, request id, deadline or boot id, where the frame ends, bytes received).

    `enter` is called with the end before the rest is received.
    """
    until = 0.0
    if have < HEADER.size:
        until = time.monotonic() + within
        have = _receive_until(sock, buffer, have, HEADER.size, until)
    magic, version, kind, length, request, extra = HEADER.unpack_from(buffer)
    if magic != MAGIC or version != VERSION:
        raise Invalid(f"not a frame of version {VERSION}: it begins with {bytes(buffer[:4]).hex()}")
    end = HEADER.size + length
    if end > len(buffer):
        raise Invalid(f"a frame with a body of {length} bytes; the limit is {len(buffer) - HEADER.size}")
    if have < end:
        if enter is not None:
            enter(end, within)
        have = _receive_until(sock, buffer, have, end, until or time.monotonic() + within)
    return kind, request, extra, end, have


def _receive_until(sock: socket.socket, buffer: memoryview, have: int, end: int, until: float) -> int:
    while have < end:
        if time.monotonic() > until:
            raise TimeoutError("a frame came too slowly")
        try:
            got = sock.recv_into(buffer[have:end])
        except BlockingIOError:
            raise TimeoutError("a frame stopped half-way") from None
        if not got:
            raise ConnectionError("the peer went away inside a frame")
        have += got
    return have
