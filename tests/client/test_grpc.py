"""Blocks over gRPC as a client sees them: a daemon that dies, no arena mapped, bytes that change on the way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.client.api import Client
from tests.support.daemon import Daemon, KiB, MiB, Peer, body, description, hashes, is_body, until
from tests.support.listeners import ListeningDaemon


@pytest.fixture(scope="module")
def listening() -> Iterator[ListeningDaemon]:
    with ListeningDaemon(256 * MiB) as daemon:
        yield daemon


# A client that goes away in the middle


# Sizes


# A daemon that comes and goes


def test_puts_recover_after_a_kill_with_one_client_all_along() -> None:
    """KVB-11 a, scaled: puts at 50 a second, kill -9, a while without a daemon, start on the same port.

    Nothing succeeds in between, every call keeps its deadline, attempts to connect stay few, and puts succeed again
    within 5 s.
    """
    with ListeningDaemon() as daemon, daemon.client_by("grpc-tcp") as client:
        ns = client.register(description(4096))
        done: list[tuple[float, float, int, str]] = []  # began, took, stored, reason
        stop = threading.Event()

        def loop() -> None:
            n = 0
            while not stop.wait(0.02):
                n += 1
                began = time.monotonic()
                answer = client.put(ns, hashes([n]), [body(n, 4096)], deadline=0.5)
                done.append((began, time.monotonic() - began, int(answer), answer.reason))

        looping = threading.Thread(target=loop)
        looping.start()
        try:
            until(lambda: len(done) > 20, "puts run")
            daemon.kill()
            dead = time.monotonic()
            attempts = closing_listener(daemon.port, 1.5)
            starting = time.monotonic()
            daemon.start()
            started = time.monotonic()
            until(lambda: any(began > started and stored for began, _, stored, _ in done), "puts succeed again", 5)
        finally:
            stop.set()
            looping.join(30)
        assert all(stored == 1 for began, took, stored, _ in done if began + took < dead - 0.1)
        between = [
            (took, stored, reason) for began, took, stored, reason in done if dead < began and began + took < starting
        ]
        assert len(between) > 10
        assert all(took < 5 and stored == 0 and reason for took, stored, reason in between)
        assert 1 <= attempts <= 12  # pauses of 0.1 s that grow to 1 s, with jitter


def closing_listener(port: int, seconds: float) -> int:
    """Listens in the daemon's place and hangs up on everyone: how many came."""
    came = 0
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                break
            came += 1
            sock.close()
    return came


# Forks


# An arena that cannot be mapped


_NO_ROOM = """
import logging, resource
logging.basicConfig(level=logging.WARNING)
client = Client(ADDRESS)
ns = client.register(description(4096))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))  # an arena of 4 GiB does not fit
put(client, ns, range(4), deadline=10)
with client.lease(ns, hashes(range(5))) as blocks:
    seen = [is_body(view, n) for n, view in enumerate(blocks)]
say([seen, client._grpc is not None, client.status()["sessions"]])
hear()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
client._unix_again = 0.0  # what a minute would do
got = client.get(ns, hashes(range(4)))
say([[is_body(one, n) for n, one in enumerate(got)], client._grpc is not None])
client.close()
"""


def test_an_arena_that_cannot_be_mapped_gives_way_to_grpc_and_is_tried_again() -> None:
    with Daemon(f"{4 * 1024}MiB") as daemon, Peer(_NO_ROOM, daemon) as peer:
        seen, remote, _ = peer.hear()
        assert seen == [True] * 4 and remote
        seen, remote = peer.ask("room again")
        assert seen == [True] * 4 and not remote
    # the sparse arena of the daemon goes with it


# Bytes that change on their way


class Tampering:
    """A TCP relay that flips one bit in the first run of 64 equal bytes that comes from the daemon while `armed`.

    A context manager.
    """

    def __init__(self, port: int) -> None:
        self.armed = threading.Event()
        self.flipped = 0
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Tampering:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed already
        for thread in self._threads:
            thread.join(10)
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [client, server]
            for pair in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._relay, args=pair)
                self._threads.append(thread)
                thread.start()

    def _relay(self, source: socket.socket, target: socket.socket, back: bool) -> None:
        try:
            while data := bytearray(source.recv(65536)):
                if back and self.armed.is_set() and (at := data.find(b"\xa5" * 64)) >= 0:
                    data[at + 32] ^= 4
                    self.flipped += 1
                    self.armed.clear()
                target.sendall(data)
        except OSError:
            pass  # the other side is gone
        try:
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def test_a_block_that_changes_on_its_way_is_a_miss_and_is_counted(listening: ListeningDaemon) -> None:
    """TCP's own checksum does not see a broken relay; ours does.

    What came before the broken block is kept, the rest is asked for again.
    """
    nbytes = 64 * KiB
    with (
        Tampering(listening.port) as relay,
        Client(f"grpc://127.0.0.1:{relay.port}", token=listening.tokens["acme-write"]) as client,
    ):
        ns = client.register(description(nbytes, model="org/tampered"))
        marked = [body(0, nbytes), body(1, nbytes), np.full(nbytes, 0xA5, np.uint8), body(3, nbytes)]
        assert client.put(ns, hashes(range(4)), marked, deadline=30) == 4
        relay.armed.set()
        got = client.get(ns, hashes(range(4)), deadline=30)
        assert relay.flipped == 1
        assert [is_body(one, n) for n, one in enumerate(got)] == [True, True] and "checksum" in got.reason
        assert client.lost_blocks == 1
        again = client.get(ns, hashes(range(4)), deadline=30)
        assert all(np.array_equal(one, want) for one, want in zip(again, marked, strict=True))
        assert client.lost_blocks == 1


# Other languages: stubs that know nothing of our framing
