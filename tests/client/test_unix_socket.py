"""One socket of a client: whatever answers there, the call ends in its time and says what it met."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from kvtier.client.api import Client
from kvtier.errors import Denied, NotFound, Unavailable
from kvtier.protocol import frames
from kvtier.protocol.frames import Verb
from kvtier.protocol.v1 import kvtier_pb2 as pb
from tests.support.daemon import (
    PATIENCE,
    Daemon,
    Patient,
    Raw,
    body,
    description,
    hashes,
    until,
)
from tests.support.fake_server import fake_server

NBYTES = 60_000
TENFOLD = 10.0  # a deadline is met if the answer comes within ten times it


def space(model: str = "org/m") -> Any:
    return description(NBYTES, model=model)


# A client's death


# Sessions by hand


# The daemon's death


# Silence


def hello_reply(**fields: Any) -> bytes:
    return frames.pack(
        0, 0, 7, pb.HelloReply(**{"session": b"s" * 16, "arena_bytes": 4096, **fields}).SerializeToString()
    )


def _send_memfd(sock: socket.socket, size: int, **fields: Any) -> None:
    sock.recv(4096)
    fd = os.memfd_create("not-an-arena")
    os.ftruncate(fd, size)
    socket.send_fds(sock, [hello_reply(**fields)], [fd])
    os.close(fd)


NONSENSE: dict[str, Callable[[socket.socket], None]] = {
    "accepts and never answers": lambda sock: None,
    "closes at once": lambda sock: sock.close(),
    "answers noise": lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4),
    "half a header": lambda sock: sock.sendall(frames.pack(0, 0, 7, b"")[:9]),
    "half a frame": lambda sock: sock.sendall(frames.pack(0, 0, 7, b"x" * 100)[:60]),
    "a body that is no message": lambda sock: sock.sendall(frames.pack(0, 0, 7, b"\xff" * 64)),
    "a huge frame": lambda sock: sock.sendall(frames.HEADER.pack(frames.MAGIC, 1, 0, 2**32 - 1, 0, 7)),
    "no descriptor": lambda sock: sock.sendall(hello_reply()),
    "an error": lambda sock: sock.sendall(frames.pack(5, 0, 7, b"full, retry: no")),
    "an error nobody knows": lambda sock: sock.sendall(frames.pack(200, 0, 7, b"\xff\xfe")),
    "an arena of no bytes": lambda sock: _send_memfd(sock, 4096, arena_bytes=0),
    "an arena larger than its file": lambda sock: _send_memfd(sock, 4096, arena_bytes=2**62),
    "an arena of more than all bytes": lambda sock: _send_memfd(sock, 4096, arena_bytes=2**64 - 1),
    "an arena and then silence": lambda sock: _send_memfd(sock, 4096),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_whatever_answers_on_the_path_is_a_miss_within_the_deadline(kind: str) -> None:
    with fake_server(NONSENSE[kind]) as (path, moments), Client(path) as client:
        ns = client.register(space())
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(4):
            began = time.monotonic()
            answer = client.lookup(ns, hashes([1]))
            assert time.monotonic() - began < TENFOLD * 0.05
            assert answer == 0 and answer.reason
            time.sleep(0.03)
        client.close()
        until(
            lambda: len(os.listdir("/proc/self/fd")) <= before + len(moments),
            "no more than what the server itself holds",
        )


def test_a_daemon_of_another_version_is_refused(daemon: Daemon) -> None:
    """A proxy changes the digest that the daemon computed.

    Client and daemon must not disagree about what a namespace is.
    """

    def proxy(near: socket.socket) -> None:
        with (
            suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as far,
        ):  # whoever closes first ends it
            far.connect(str(daemon.socket))
            data, fds, _, _ = socket.recv_fds(near, 4096, 4)
            socket.send_fds(far, [data], fds)
            data, arena, _, _ = socket.recv_fds(far, 4096, 4)
            socket.send_fds(near, [data], arena)
            for fd in (*fds, *arena):
                os.close(fd)
            while request := near.recv(1 << 20):
                far.sendall(request)
                answer = far.recv(1 << 20)
                if request[3] == Verb.REGISTER:
                    reply = pb.RegisterReply.FromString(answer[frames.HEADER.size :])
                    reply.description = b"another digest".ljust(32)
                    _, _, status, _, number, boot = frames.HEADER.unpack_from(answer)
                    answer = frames.pack(status, number, boot, reply.SerializeToString())
                near.sendall(answer)

    threads = []

    def serve(near: socket.socket) -> None:
        thread = threading.Thread(target=proxy, args=(near,))
        thread.start()
        threads.append(thread)

    with fake_server(serve) as (path, _):
        with Patient(path) as client:
            ns = client.register(space())
            answer = client.lookup(ns, hashes([1]))
            assert answer == 0 and "differ in version" in answer.reason
            assert client.put(ns, hashes([1]), [body(1, NBYTES)]) == 0
        for thread in threads:
            thread.join(PATIENCE)


def test_errors_come_back_as_what_they_are(daemon: Daemon) -> None:
    with pytest.raises(Unavailable):
        Client(f"unix:{daemon.directory}/nobody").status()
    with Raw(daemon.socket) as connection:
        assert connection.call(Verb.SEAL, pb.Held(id=5))[0] == NotFound.code
        assert connection.call(Verb.DROP, pb.DropRequest(name="abcd"))[0] in (NotFound.code, Denied.code)
