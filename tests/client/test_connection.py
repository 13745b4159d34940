"""A client's sockets, session and mapping while the daemon dies, comes back, stops and is replaced."""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvtier.client.api import Client
from kvtier.server.sessions import MAX_SOCKETS
from tests.support.daemon import (
    Daemon,
    MiB,
    Patient,
    Peer,
    body,
    description,
    hashes,
    is_body,
    put,
    until,
)
from tests.support.fake_server import fake_server

NBYTES = 60_000
TENFOLD = 10.0  # a deadline is met if the answer comes within ten times it


@pytest.fixture
def mortal() -> Iterator[Daemon]:
    """One of the test's own, to kill."""
    with Daemon() as daemon:
        yield daemon


def space(model: str = "org/m") -> Any:
    return description(NBYTES, model=model)


def room(daemon: Daemon) -> int:
    """Blocks that fill the arena."""
    return int(daemon.status()["arena_bytes"]) // space().layout.extents().slot_bytes


def turn_over(daemon: Daemon, first: int = 10**6) -> None:
    """Another client fills the arena twice: whatever may be reused is reused."""
    with daemon.client() as client:
        ns = client.register(space("flood"))
        for n in range(first, first + 2 * room(daemon), 20):
            put(client, ns, range(n, n + 20))


# A client's death


# Sessions by hand


# The daemon's death

SURVIVOR = """
client = Patient(ADDRESS)
ns = client.register(description(60_000))
put(client, ns, range(20))
def arenas():
    return sum("memfd:kvtier-arena" in line for line in open("/proc/self/maps"))
lease = None
while True:
    match hear():
        case "lookup":
            answer = client.lookup(ns, hashes([0]))
            say([int(answer), answer.reason])
        case "put":
            say(int(client.put(ns, hashes([0]), [body(0, 60_000)])))
        case "lease":
            lease = client.lease(ns, hashes(range(20)))
            say(len(lease.__enter__()))
        case "whole":
            say([is_body(view, n) for n, view in enumerate(lease)] == [True] * 20)
        case "exit":
            lease.__exit__(None, None, None)
            say("done")
        case "arenas":
            say(arenas())
"""


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_a_client_outlives_the_daemon_and_finds_the_next_one(mortal: Daemon, how: str) -> None:
    with Peer(SURVIVOR, mortal) as peer:
        assert peer.ask("lookup") == [1, ""]
        assert peer.ask("arenas") == 1
        getattr(mortal, how)()
        for _ in range(20):
            missed, reason = peer.ask("lookup")
            assert missed == 0 and reason
            assert peer.ask("put") == 0
        until(lambda: peer.ask("arenas") == 0, "the old arena is unmapped before there is a new one")
        mortal.start()
        until(lambda: peer.ask("put") == 1, "puts work again", within=TENFOLD * 5.0)
        assert peer.ask("lookup") == [1, ""], "the namespace was registered again by itself"
        assert peer.ask("arenas") == 1


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_a_lease_stays_readable_when_the_daemon_goes_and_no_second_arena_is_mapped(mortal: Daemon, how: str) -> None:
    with Peer(SURVIVOR, mortal) as peer:
        assert peer.ask("lease") == 20
        getattr(mortal, how)()
        assert peer.ask("whole") is True
        mortal.start()
        turn_over(mortal)
        for _ in range(5):
            missed, reason = peer.ask("lookup")
            assert missed == 0 and reason
            assert peer.ask("arenas") == 1, "never two"
        assert peer.ask("whole") is True
        assert peer.ask("exit") == "done"
        until(lambda: peer.ask("put") == 1, "puts work again", within=TENFOLD * 5.0)
        assert peer.ask("arenas") == 1


def test_a_fill_across_a_restart_seals_nothing(mortal: Daemon) -> None:
    with mortal.client() as client:
        ns = client.register(space())
        with client.fill(ns, hashes(range(3))) as slots:
            for n, slot in enumerate(slots):
                slot[:] = body(n, NBYTES)
            mortal.kill()
            mortal.start()
            slots[0][:] = body(0, NBYTES)
        assert slots.sealed == 0 and slots.reason
        until(lambda: client.put(ns, hashes([9]), [body(9, NBYTES)]), "puts work again")
        assert client.lookup(ns, hashes(range(3))) == 0


def test_a_view_that_was_kept_after_its_lease_is_void_and_keeps_nobody_from_the_next_daemon(mortal: Daemon) -> None:
    with mortal.client() as client:
        ns = client.register(space())
        put(client, ns, range(3))
        with client.lease(ns, hashes(range(3))) as blocks:
            kept = blocks[1]
        assert is_body(kept, 1), "nothing has changed yet"
        mortal.kill()
        until(lambda: not kept.any(), "the arena is given up under the view")
        mortal.start()
        until(lambda: client.put(ns, hashes([5]), [body(5, NBYTES)]), "puts work again", within=TENFOLD * 5.0)
        turn_over(mortal)
        assert not kept.any(), "it does not show another daemon's blocks"
    with mortal.client() as client:
        ns = client.register(space())
        put(client, ns, range(3))
        with client.lease(ns, hashes(range(3))) as blocks:
            kept = blocks[1]
        client.close()
        turn_over(mortal, 3 * 10**6)
        assert not kept.any(), "nor, of a closed client, what came into its slot later"


def test_many_restarts_leave_nothing_behind(mortal: Daemon) -> None:
    with mortal.client() as client:
        ns = client.register(space())
        put(client, ns, [1])
        mine = len(os.listdir("/proc/self/fd"))
        for n in range(4):
            (mortal.kill if n % 2 else mortal.terminate)()
            assert client.lookup(ns, hashes([1])) == 0
            mortal.start()
            until(lambda: client.put(ns, hashes([1]), [body(1, NBYTES)]), "puts work again")
            assert is_body(client.get(ns, hashes([1]))[0], 1)
        until(lambda: len(os.listdir("/proc/self/fd")) <= mine, "no descriptor is left behind")


def test_a_daemon_that_took_the_path_over_is_found(daemon: Daemon) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-test-") as name,
        Daemon(64 * MiB, directory=Path(name)) as other,
        other.client() as client,
    ):
        ns = client.register(space())
        put(client, ns, [1])
        other.socket.unlink()
        other.socket.symlink_to(
            daemon.socket
        )  # as when another daemon is put in its place while the old one still runs
        for sock in list(client._connection.attach(1).idle):
            sock.sock.shutdown(socket.SHUT_RDWR)
        until(lambda: client.put(ns, hashes([2]), [body(2, NBYTES)]), "it works with the other daemon")
        assert daemon.status()["known_blocks"] == 1
        client.close()
        other.socket.unlink()
        other.kill()
        other.start()  # with its path, for its farewell


# Silence


def test_a_stopped_daemon_costs_misses_within_the_deadline_and_every_debt_is_paid(daemon: Daemon) -> None:
    with Client(daemon.address) as client, Patient(daemon.address) as patient:
        ns = client.register(space())
        put(patient, ns, range(8))
        until(lambda: client.lookup(ns, hashes(range(8))) == 8, "the client is attached")
        with ExitStack() as stack:
            leases = [stack.enter_context(patient.lease(ns, hashes(range(n, n + 1)))) for n in range(6)]
            mine = [until(lambda: _entered(client, ns), "a lease") for _ in range(6)]
            assert daemon.status()["held_bytes"] > 0 and all(len(lease) == 1 for lease in leases)
            with daemon.stopped():
                calls: list[tuple[float, Callable[[], Any]]] = [
                    (0.05, lambda: client.lookup(ns, hashes([1]))),
                    (0.25, lambda: client.delete(ns, hashes([1]))),
                    (0.25, lambda: client.prefetch(ns, hashes([1]))),
                    (0.2, lambda: client.flush(ns, hashes([1]), deadline=0.2)),
                    (0.2, lambda: client.put(ns, hashes([99]), [body(99, NBYTES)], deadline=0.2)),
                    (0.3, lambda: client.get(ns, hashes([1]), deadline=0.3)),
                ]
                for deadline, call in calls:
                    began = time.monotonic()
                    answer = call()
                    assert time.monotonic() - began < TENFOLD * deadline
                    assert not answer and answer.reason, "a miss that says why"
                began = time.monotonic()
                with client.lease(ns, hashes([1])) as blocks, client.fill(ns, hashes([77])) as slots:
                    assert list(blocks) == [] and blocks.reason and list(slots) == [None] and slots.reason
                for lease in mine:
                    lease.__exit__(None, None, None)
                assert time.monotonic() - began < TENFOLD * (2 * 0.25 + 2 * 0.25 + len(mine) * 0.25)
            stack.close()
        status = until(lambda: (s := daemon.status())["held_bytes"] == 0 and s, "every release arrives in the end")
        assert status["limbo_sessions"] == status["reserved_blocks"] == 0 and status["sessions"] == 3
        until(lambda: client.lookup(ns, hashes([0])) == 1, "hits come back")
        put(patient, ns, [500])


def _entered(client: Client, ns: Any) -> Any:
    lease = client.lease(ns, hashes([3]))
    return lease if len(lease.__enter__()) else lease.__exit__(None, None, None)


def test_a_long_silence_costs_the_session_no_sockets(daemon: Daemon) -> None:
    with Client(daemon.address) as client:
        ns = client.register(space())
        until(lambda: client.put(ns, hashes([1]), [body(1, NBYTES)]) == 1, "the client is attached")
        session = client._connection.attach(1.0).session
        with daemon.stopped():
            for _ in range(MAX_SOCKETS + 20):
                assert client.lookup(ns, hashes([1]), deadline=0.01) == 0
        until(lambda: client.lookup(ns, hashes([1])) == 1, "hits come back")
        until(lambda: daemon.status()["sockets"] <= 4, "sockets that timed out are gone")
        # `status` has a session of its own each time, and the daemon may not have seen the end of the last one yet.
        until(lambda: daemon.status()["sessions"] == 2, "the client's session and the one that asks")
        assert client._connection.attach(1.0).session == session, "the same session"


def test_attempts_to_connect_are_bounded_and_jittered() -> None:
    with fake_server(lambda sock: sock.close()) as (path, moments), Client(path) as client:
        ns = client.register(space())
        end = time.monotonic() + 3.0
        calls = 0
        while time.monotonic() < end:
            assert client.lookup(ns, hashes([1])) == 0
            calls += 1
        pauses = [b - a for a, b in itertools.pairwise(moments)]
        assert calls > 10 * len(moments), "calls in between fail at once"
        assert 4 <= len(moments) <= 16, "3 s of pauses that double from 50 ms to 1 s, each shortened by up to a half"
        assert max(pauses) < TENFOLD * 1.0
        assert pauses[-1] > pauses[0]
