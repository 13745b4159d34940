"""Calls that overlap on one socket, releases that nobody waits for, and the copies that are made meanwhile.

The rules under test: answers come in the order of the calls; a release that may not have arrived is said again; what a
batch could not finish it gives back; and what is counted as stored is stored.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np
import pytest

from kvtier.client.unix_socket import MAX_POSTED, UnixSocket
from kvtier.errors import Invalid, NotFound
from kvtier.protocol import frames
from kvtier.protocol.frames import QUIET, Verb
from kvtier.protocol.v1 import kvtier_pb2 as pb
from tests.support.daemon import Daemon, MiB, Patient, Raw, body, description, hashes, is_body, put, until

NBYTES = 60_000


def space() -> Any:
    return description(NBYTES, model="overlap")


def test_calls_sent_together_are_answered_in_their_order(client: Patient, daemon: Daemon) -> None:
    ns = client.register(space())
    put(client, ns, range(3))
    with Raw(daemon.socket) as raw:
        handle = pb.RegisterReply.FromString(
            raw.call(Verb.REGISTER, pb.RegisterRequest(description=ns.canonical))[1]
        ).handle
        asked = [
            pb.Keys(handle=handle, layer_hi=1, head_hi=1, hashes=hashes(range(n)), id=n).SerializeToString()
            for n in (1, 2, 3)
        ]
        stream = b"".join(frames.pack(Verb.LEASE, 100 + n, 1000, one) for n, one in enumerate(asked))
        stream += frames.pack(Verb.LOOKUP, 200, 1000, b"\xff")  # an error takes its turn too
        stream += frames.pack(Verb.LEASE, 201, 1000, asked[0])
        for cut in (len(stream) // 3, 24 + len(asked[0]) + 10, 24 + len(asked[0]), len(stream)):
            raw.send(stream[:cut])
            time.sleep(0.02)  # so that frames come torn, too
            raw.send(stream[cut:])
            first = [raw.receive() for _ in range(5)]
            assert [request for _, request, _, _ in first] == [100, 101, 102, 200, 201]
            assert [status for status, *_ in first][3:] == [Invalid.code, Invalid.code], (
                "garbage, and an id used before"
            )
            if not first[0][0]:
                assert [len(pb.Slots.FromString(reply).offset) for *_, reply in first[:3]] == [1, 2, 3]
        assert [raw.call(Verb.RELEASE, pb.Held(id=n))[0] for n in (1, 2, 3)] == [0] * 3


def test_a_quiet_release_has_no_answer_and_works(client: Patient, daemon: Daemon) -> None:
    ns = client.register(space())
    put(client, ns, range(3))
    with Raw(daemon.socket) as raw:
        handle = pb.RegisterReply.FromString(
            raw.call(Verb.REGISTER, pb.RegisterRequest(description=ns.canonical))[1]
        ).handle
        keys = pb.Keys(handle=handle, layer_hi=1, head_hi=1, hashes=hashes(range(3)), id=1)
        assert raw.call(Verb.LEASE, keys)[0] == 0
        held = daemon.status()["held_bytes"]
        for id_ in (1, 1, 99):  # again, and one that was never given: an error that nobody hears
            raw.send(frames.pack(Verb.RELEASE | QUIET, 5, 1000, pb.Held(id=id_).SerializeToString()))
        assert raw.call(Verb.RELEASE, pb.Held(id=99))[0] == NotFound.code, "the next answer is the next call's"
        assert held > 0 and daemon.status()["held_bytes"] == 0
        for verb in (Verb.LEASE, Verb.SEAL, Verb.STATUS):
            assert raw.call(verb | QUIET, keys)[0] == Invalid.code, "nothing else may go without an answer"


def test_a_release_that_may_be_lost_is_said_again(
    client: Patient, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns = client.register(space())
    put(client, ns, range(4))
    with client.lease(ns, hashes(range(4))) as blocks:
        assert len(blocks) == 4
        attachment = client._connection.attach(1)
        for wire in list(attachment.idle):
            wire.sock.shutdown(socket.SHUT_WR)  # the release cannot be sent
    until(lambda: daemon.status()["held_bytes"] == 0, "the debt is paid")

    wires = lose_a_release(client, ns, monkeypatch)
    until(lambda: daemon.status()["held_bytes"] == 0, "what the broken socket had been given to say is said again")
    assert len(wires) == 1 and client._connection.attach(1) is attachment


def test_a_release_lost_before_the_client_is_closed_leaves_nothing_held(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where this process lives on: the daemon would keep the slots for it."""
    with daemon.client() as client:
        ns = client.register(space())
        put(client, ns, range(4))
        assert len(lose_a_release(client, ns, monkeypatch)) == 1
    daemon.quiet()


def test_a_socket_that_a_call_had_meanwhile_is_left_alone(client: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its releases may be answered between the look at it and its turn; the watcher must not end of that."""
    assert client.lookup(client.register(space()), hashes([1])) == 0
    connection = client._connection
    attachment, lock = connection.attach(1), connection._lock

    class CallsComeFirst:
        def __enter__(self) -> Any:
            for sock in attachment.idle:
                sock.posted.clear()
            return lock.__enter__()

        def __exit__(self, *error: Any) -> Any:
            return lock.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(lock, name)

    for sock in attachment.idle:
        sock.posted.append((0, 1))
    monkeypatch.setattr(connection, "_lock", CallsComeFirst())
    connection.pay(attachment)
    assert not attachment.gone


def lose_a_release(client: Patient, ns: Any, monkeypatch: pytest.MonkeyPatch) -> list[UnixSocket]:
    """A lease whose release is said into the air, on a socket that breaks then and that no call need use again."""
    wires: list[UnixSocket] = []

    def into_the_air(wire: UnixSocket, id_: int, deadline: float) -> None:
        wires.append(wire)
        wire.posted.append((10**6, id_))
        wire.sock.shutdown(socket.SHUT_RDWR)

    lease = client.lease(ns, hashes(range(4)))
    assert len(lease.__enter__()) == 4
    monkeypatch.setattr(UnixSocket, "post", into_the_air)
    lease.__exit__(None, None, None)
    monkeypatch.undo()
    return wires


def test_many_releases_in_a_row_are_answered_now_and_then(client: Patient, daemon: Daemon) -> None:
    ns = client.register(description(256, model="many"))
    put(client, ns, range(2))
    leases = [client.lease(ns, hashes(range(2))) for _ in range(3 * MAX_POSTED)]
    assert all(len(lease.__enter__()) == 2 for lease in leases)
    for lease in leases:
        lease.__exit__(None, None, None)
        assert all(len(wire.posted) <= MAX_POSTED for wire in client._connection.attach(1).idle)
    until(lambda: daemon.status()["held_bytes"] == 0, "all releases have come")


def test_get_copies_into_the_callers_memory(client: Patient) -> None:
    ns = client.register(space())
    put(client, ns, range(5))
    staging = [np.zeros(NBYTES, np.uint8) for _ in range(7)]
    bodies = client.get(ns, hashes(range(7)), into=staging)
    assert len(bodies) == 5 and bodies.reason == "miss"
    assert all(
        body_ is buffer and is_body(buffer, n) for n, (body_, buffer) in enumerate(zip(bodies, staging, strict=False))
    )
    assert not staging[5].any()
    readonly = np.zeros(NBYTES, np.uint8)
    readonly.flags.writeable = False
    for wrong in (
        staging[:6],
        [*staging[:6], np.zeros(NBYTES - 1, np.uint8)],
        [*staging[:6], np.zeros(NBYTES, np.int8)],
        [*staging[:6], readonly],
    ):
        with pytest.raises(Invalid):
            client.get(ns, hashes(range(7)), into=wrong)


def test_batches_of_many_pieces_go_in_and_out_whole(client: Patient, daemon: Daemon) -> None:
    ns = client.register(description(MiB, model="pieces"))
    n = 3 * 8 - 1
    put(client, ns, [4, 5, 20])  # present already, in the middle of pieces
    assert client.put(ns, hashes(range(n)), [body(i, MiB) for i in range(n)]) == n
    bodies = client.get(ns, hashes(range(n + 1)))
    assert len(bodies) == n and bodies.reason == "miss" and all(is_body(one, i) for i, one in enumerate(bodies))
    client.delete(ns, hashes([13]))
    bodies = client.get(ns, hashes(range(n)))
    assert len(bodies) == 13 and bodies.reason == "miss" and all(is_body(one, i) for i, one in enumerate(bodies))
    until(lambda: daemon.status()["held_bytes"] == 0, "nothing stays held")


def test_a_batch_that_fails_half_way_gives_back_what_it_held(
    client: Patient, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of its sends and answers: the connection breaks, or the caller is interrupted. Then it is done again."""
    ns = client.register(description(MiB, model="broken"))
    n, send, answer = 2 * 8, UnixSocket.send, UnixSocket.answer
    assert client.put(ns, hashes(range(n)), [body(i, MiB) for i in range(n)]) == n
    for read in (False, True):
        for fault in (OSError, KeyboardInterrupt):
            for at in range(0, 2 * 8, 3):
                left = iter(range(at, -1, -1))
                first = 1000 * (at + 1) + (500 if fault is OSError else 0)

                def failing(wire: UnixSocket, *arguments: Any, left: Any = left, fault: Any = fault) -> Any:
                    if next(left, 1) == 0:
                        if fault is KeyboardInterrupt:
                            raise KeyboardInterrupt
                        wire.sock.shutdown(socket.SHUT_RDWR)
                    return send(wire, *arguments) if arguments else answer(wire)

                monkeypatch.setattr(UnixSocket, "send", failing)
                monkeypatch.setattr(UnixSocket, "answer", failing)
                try:
                    if read:
                        said: Any = client.get(ns, hashes(range(n)))
                        assert all(is_body(one, i) for i, one in enumerate(said)) and (len(said) == n or said.reason)
                    else:
                        said = client.put(
                            ns, hashes(range(first, first + n)), [body(i, MiB) for i in range(first, first + n)]
                        )
                        assert said == n or said.reason
                except KeyboardInterrupt:
                    assert fault is KeyboardInterrupt
                    said = None
                finally:
                    monkeypatch.undo()
                until(lambda: daemon.status()["held_bytes"] == 0, "nothing stays held")
                if not read:
                    known = until(
                        lambda: client.lookup(ns, hashes(range(first, first + n)), deadline=5) or 1,  # noqa: B023
                        "it answers again",  # noqa: B023, RUF100
                    )
                    assert said is None or said <= known, "what is counted as stored is stored"
                    client.delete(ns, hashes(range(first, first + n)))
                    put(client, ns, range(n))
    daemon.status(check_integrity=True)


def test_a_full_session_ends_a_batch_and_what_came_before_is_counted(client: Patient, daemon: Daemon) -> None:
    ns = client.register(description(MiB, model="full"))
    cap = daemon.status()["arena_bytes"] // 4 // ns.extents().slot_bytes
    bodies = [body(n, MiB) for n in range(30)]
    for free, known in ((1, 30), (0, 0)):  # two pieces at once do not fit into one slot, but one after the other does
        with client.fill(ns, hashes(range(1000 + 500 * free, 1000 + 500 * free + cap - free))) as held:
            assert held.reason == ""
            said = client.put(ns, hashes(range(30)), bodies)
            assert said == known and said.reason.startswith("" if known else "full, retry")
            assert client.lookup(ns, hashes(range(30))) == known
            client.delete(ns, hashes(range(30)))
    with client.fill(ns, hashes(range(2000, 2000 + cap - 1))), daemon.client() as other:
        put(other, ns, [2])
        with client.fill(ns, hashes([5000])):  # from here on nothing is free
            said = client.put(ns, hashes([2, 3]), [body(2, MiB), body(3, MiB)])
            assert said == 1 and said.reason.startswith("full, retry"), "what is there already needs no room"
