"""Frames over a socket pair: whole, in pieces, too large, and cut off. Hostile ones: tests/server/test_bad_input.py."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from kvtier.errors import Full, Invalid
from kvtier.protocol import frames
from kvtier.protocol.frames import HEADER, MAX_BODY, SMALL, Buffer, Verb, pack, receive


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        for end in (a, b):
            frames.set_timeouts(end, 0.3, 5)
        yield a, b


def test_a_frame_has_24_bytes_and_its_body() -> None:
    raw = pack(Verb.LOOKUP, 7, 50, b"body")
    assert raw == b"Kv\x01\x03\x04\0\0\0" + (7).to_bytes(8, "little") + (50).to_bytes(8, "little") + b"body"
    assert HEADER.size == 24


def test_frames_come_whole_however_they_are_cut(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = ends
    buffer = Buffer()
    for body in (b"", b"x", bytes(SMALL), bytes(range(256)) * (MAX_BODY // 256)):
        sender = threading.Thread(target=a.sendall, args=(pack(3, 9, 1, body),))
        sender.start()
        kind, request, extra, got = buffer.receive(b, 5)
        assert (kind, request, extra, bytes(got)) == (3, 9, 1, body)
        sender.join()
        del got
        buffer.done()


def test_a_frame_that_came_with_the_one_before_is_kept(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = ends
    a.sendall(pack(1, 1, 0, b"first") + pack(2, 2, 0, b"second")[:30])
    buffer = Buffer()
    assert bytes(buffer.receive(b, 1)[3]) == b"first"
    buffer.done()
    a.sendall(pack(2, 2, 0, b"second")[30:])
    assert bytes(buffer.receive(b, 1)[3]) == b"second"


def test_a_plain_buffer_takes_one_frame_at_a_time(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = ends
    a.sendall(pack(1, 1, 0, b"first") + b"more")
    with pytest.raises(Invalid, match="bytes after the frame"):
        receive(b, memoryview(bytearray(100)), 1)


@pytest.mark.parametrize("raw", [b"GET / HTTP/1.1\r\n\r\n......", HEADER.pack(frames.MAGIC, 2, 1, 0, 0, 0)])
def test_another_protocol_is_invalid(ends: tuple[socket.socket, socket.socket], raw: bytes) -> None:
    ends[0].sendall(raw)
    with pytest.raises(Invalid, match="not a frame"):
        Buffer().receive(ends[1], 1)


def test_how_a_wait_ends(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = ends
    with pytest.raises(frames.Idle):
        Buffer().receive(b, 1)
    a.sendall(pack(1, 1, 0, b"body")[:-1])
    with pytest.raises(TimeoutError):
        Buffer().receive(b, 1)
    a.sendall(pack(1, 1, 0, b"body")[:-1])
    a.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError):
        Buffer().receive(b, 1)
    with pytest.raises(frames.Closed):
        Buffer().receive(b, 1)


def test_large_frames_take_places_and_give_them_back(ends: tuple[socket.socket, socket.socket]) -> None:
    gate = threading.Semaphore(1)
    a, b = ends
    sender = threading.Thread(target=a.sendall, args=(pack(1, 1, 0, bytes(SMALL + 1)) * 2,))
    sender.start()
    first, second = Buffer(gate), Buffer(gate)
    first.receive(b, 5)
    with pytest.raises(Full, match="too many large messages"):
        second.receive(b, 0.05)
    second.done()
    first.done()
    assert gate.acquire(blocking=False), "the place is free again"
    b.close()
    sender.join()


def test_a_frame_above_the_limit_is_refused_by_its_header(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(HEADER.pack(frames.MAGIC, frames.VERSION, 1, MAX_BODY + 1, 0, 0))
    with pytest.raises(Invalid, match=f"the limit is {MAX_BODY}"):
        Buffer().receive(ends[1], 1)
