"""What happens when either end goes: sessions, limbo, restarts, silence and fork, with real processes.

The rule under test: a slot that a process could still read or write is never reused, and everything it held comes back,
once, when its process ends or says that it is done. A client meets the daemon's death, restart or silence with misses,
never with an error, a stall or someone else's bytes.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import ExitStack
from typing import Any

import pytest

from kvtier.errors import Full, NotFound
from kvtier.protocol import frames
from kvtier.protocol.frames import Verb
from kvtier.protocol.v1 import kvtier_pb2 as pb
from kvtier.server.sessions import MAX_SOCKETS
from tests.support.daemon import (
    PATIENCE,
    Daemon,
    MiB,
    Peer,
    Raw,
    description,
    hashes,
    is_body,
    put,
    until,
)

NBYTES = 60_000
TENFOLD = 10.0  # a deadline is met if the answer comes within ten times it


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

HOLDER = """
client = Patient(ADDRESS)
ns = client.register(description(60_000))
put(client, ns, range(40))
lease = client.lease(ns, hashes(range(40))).__enter__()
fill = client.fill(ns, hashes(range(1000, 1040))).__enter__()
assert len(lease) == 40 and fill.reason == ""
for n, slot in enumerate(fill, 1000):
    slot[:] = body(n, 60_000)
say("holding")
def whole():
    read = all(is_body(view, n) for n, view in enumerate(lease))
    return read and all(is_body(slot, n) for n, slot in enumerate(fill, 1000))
def cut():
    attachment = client._connection.attach(1)
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink("/proc/self/fd/" + name).startswith("socket:"):
                one = socket.socket(fileno=os.dup(int(name)))
                one.shutdown(socket.SHUT_RDWR)
                one.close()
        except OSError:
            pass
    until(lambda: attachment.gone, "the client notices: before, a call would join the session anew")
    return True
while True:
    match hear():
        case "whole":
            say(whole())
        case "cut":
            say(cut())
        case "lookup":
            answer = client.lookup(ns, hashes([0]))
            say([int(answer), answer.reason])
        case "exit lease":
            lease.__exit__(None, None, None)
            say("done")
        case "exit fill":
            fill.__exit__(None, None, None)
            say(fill.sealed)
"""


def test_what_a_killed_client_held_comes_back_at_once(daemon: Daemon) -> None:
    with Peer(HOLDER, daemon) as holder:
        assert holder.hear() == "holding"
        held = daemon.status()
        assert (held["leased_blocks"], held["reserved_blocks"], held["sessions"]) == (40, 40, 2)
        holder.kill()
        until(lambda: daemon.status()["held_bytes"] == 0, "everything it held is back", within=TENFOLD * 1.0)
    status = daemon.quiet()
    assert status["known_blocks"] == 40, "what it had sealed stays, what it had reserved never was"
    with daemon.client() as client:
        ns = client.register(space())
        assert all(is_body(one, n) for n, one in enumerate(client.get(ns, hashes(range(40)))))
        assert client.lookup(ns, hashes([1000])) == 0


def test_slots_of_a_process_that_lives_without_sockets_are_in_limbo(daemon: Daemon) -> None:
    with Peer(HOLDER, daemon) as holder:
        assert holder.hear() == "holding"
        holder.ask("cut")
        limbo = until(lambda: (s := daemon.status())["limbo_sessions"] and s, "its session goes to limbo")
        assert (limbo["leased_blocks"], limbo["reserved_blocks"]) == (40, 40)
        assert limbo["limbo_bytes"] == limbo["held_bytes"] == 80 * space().layout.extents().slot_bytes
        turn_over(daemon)
        assert holder.ask("whole") is True, "nothing of it was reused"
        missed, reason = holder.ask("lookup")
        assert missed == 0 and "still open" in reason, "no second arena is mapped while views of the first are in use"
        assert daemon.status()["limbo_bytes"] == limbo["limbo_bytes"]
        holder.kill()
        until(lambda: daemon.status()["held_bytes"] == 0, "the process's end gives it back", within=TENFOLD * 1.0)
    daemon.quiet()


def test_a_client_that_is_done_with_a_lost_session_says_so(daemon: Daemon) -> None:
    with Peer(HOLDER, daemon) as holder:
        assert holder.hear() == "holding"
        holder.ask("cut")
        until(lambda: daemon.status()["limbo_sessions"], "its session goes to limbo")
        assert holder.ask("exit fill") == 0, "nothing can be sealed any more"
        assert holder.ask("exit lease") == "done"
        assert daemon.status()["limbo_sessions"] == 1, "not before it says so"
        found = until(lambda: (a := holder.ask("lookup"))[0] and a, "it connects again")
        assert found == [1, ""]
        status = daemon.status()
        assert status["limbo_sessions"] == status["held_bytes"] == 0
        turn_over(daemon)


def test_a_lost_socket_is_not_a_lost_session(daemon: Daemon) -> None:
    with daemon.client() as client:
        ns = client.register(space())
        put(client, ns, range(4))
        with client.lease(ns, hashes(range(4))) as blocks:
            attachment = client._connection.attach(1)
            cut = list(attachment.idle)
            for sock in cut:
                sock.sock.shutdown(socket.SHUT_RDWR)
            answers = [client.lookup(ns, hashes([0])) for _ in range(len(cut) + 2)]
            assert answers == [0] * len(cut) + [1, 1]
            assert all(answer.reason.startswith("the connection broke") for answer in answers[: len(cut)])
            status = daemon.status()
            assert (status["sessions"], status["limbo_sessions"], status["leased_blocks"]) == (2, 0, 4)
            assert client._connection.attach(1) is attachment
            assert [is_body(view, n) for n, view in enumerate(blocks)] == [True] * 4
        until(lambda: daemon.status()["leased_blocks"] == 0, "the release has come")


# Sessions by hand


def reserve(connection: Raw, handle: int, id_: int, numbers: range) -> tuple[int, bytes]:
    extents = space().layout.extents()
    return connection.call(
        Verb.RESERVE,
        pb.Keys(handle=handle, layer_hi=1, head_hi=1, hashes=hashes(numbers), id=id_, nbytes=extents.block_bytes),
    )


def register(connection: Raw) -> int:
    status, reply = connection.call(Verb.REGISTER, pb.RegisterRequest(description=space().canonical))
    assert status == 0
    return pb.RegisterReply.FromString(reply).handle


def test_the_same_process_joins_its_session_and_brings_it_back_from_limbo(daemon: Daemon) -> None:
    with Raw(daemon.socket, pb.HelloRequest(protocol=1, map=True)) as first:
        assert first.fd is not None and os.fstat(first.fd).st_size == first.arena_bytes
        handle = register(first)
        assert reserve(first, handle, 1, range(3))[0] == 0
    until(lambda: daemon.status()["limbo_sessions"] == 1, "the session goes to limbo")
    with Raw(daemon.socket, pb.HelloRequest(protocol=1, session=first.session)) as second:
        assert second.session == first.session and second.boot == first.boot and second.fd is None
        status = daemon.status()
        assert status["limbo_sessions"] == 0 and status["reserved_blocks"] == 3
        assert second.call(Verb.SEAL, pb.Held(id=1))[0] == 0
    daemon.quiet()


def test_a_drained_session_leaves_limbo(daemon: Daemon) -> None:
    with Raw(daemon.socket) as first:
        reserve(first, register(first), 1, range(3))
    until(lambda: daemon.status()["limbo_sessions"] == 1, "the session goes to limbo")
    with Raw(daemon.socket, pb.HelloRequest(protocol=1, drained=[os.urandom(16), first.session])):
        assert daemon.status()["held_bytes"] == 0
    with pytest.raises(NotFound):
        Raw(daemon.socket, pb.HelloRequest(protocol=1, session=first.session))


def test_a_session_that_is_drained_while_it_has_a_socket_ends_with_that(daemon: Daemon) -> None:
    with Raw(daemon.socket) as first:
        reserve(first, register(first), 1, range(3))
        with Raw(daemon.socket, pb.HelloRequest(protocol=1, drained=[first.session])):
            assert daemon.status()["reserved_blocks"] == 3, "it still has a socket"
    until(lambda: daemon.status()["held_bytes"] == 0, "the session ends")
    assert daemon.status()["limbo_sessions"] == 0


STRANGER = """
from kvtier.errors import Denied
from kvtier.protocol.v1 import kvtier_pb2 as pb
os.setgid(ARGS[2])
os.setuid(ARGS[2])
session = bytes.fromhex(ARGS[0])
for hello in (pb.HelloRequest(protocol=1, session=session), pb.HelloRequest(protocol=1, drained=[session])):
    for _ in range(ARGS[1]):
        try:
            Raw(Path(ADDRESS.removeprefix("unix:")), hello).close()
            say("let in")
        except Denied:
            say("denied")
"""


@pytest.mark.parametrize("uid", [os.getuid(), 65534])
def test_another_process_or_user_can_neither_join_nor_drain_a_session(uid: int) -> None:
    if uid != os.getuid() and os.getuid() != 0:
        pytest.skip("needs root to become another user")
    with Daemon(64 * MiB, "--socket-mode", "666") as daemon:
        daemon.directory.chmod(0o755)
        with Raw(daemon.socket) as mine:
            reserve(mine, register(mine), 1, range(3))
            before = daemon.descriptors()
            with Peer(STRANGER, daemon, mine.session.hex(), 20, uid) as stranger:
                assert [stranger.hear() for _ in range(40)] == ["denied"] * 40
            assert daemon.status()["reserved_blocks"] == 3
            until(lambda: daemon.descriptors() <= before, "no descriptor is left behind")


def test_a_session_has_a_limit_of_sockets(daemon: Daemon) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(Raw(daemon.socket))
        for _ in range(MAX_SOCKETS - 1):
            stack.enter_context(Raw(daemon.socket, pb.HelloRequest(protocol=1, session=first.session)))
        with pytest.raises(Full, match="full, retry"):
            Raw(daemon.socket, pb.HelloRequest(protocol=1, session=first.session))
        assert first.call(Verb.STATUS, b"")[0] == 0
    daemon.quiet()


def test_hellos_that_nobody_waits_for_leave_no_session(daemon: Daemon) -> None:
    before = daemon.descriptors()
    with Raw(daemon.socket) as mine:
        for hello in (pb.HelloRequest(protocol=1, map=True), pb.HelloRequest(protocol=1, session=mine.session)):
            for _ in range(150):
                connection = Raw(daemon.socket, greet=False)
                connection.send(frames.pack(Verb.HELLO, 0, 0, hello.SerializeToString()))
                connection.close()
        until(
            lambda: (s := daemon.status())["sessions"] == 2 and s["sockets"] == 2, "only mine and the asker's are left"
        )
        with Raw(daemon.socket, pb.HelloRequest(protocol=1, session=mine.session)):
            pass
    daemon.quiet()
    until(lambda: daemon.descriptors() <= before + 1, "no descriptor is left behind")


def test_sockets_that_use_one_id_at_the_same_time_lose_no_slot(daemon: Daemon) -> None:
    with Raw(daemon.socket) as a:
        handle = register(a)
        extents = space().layout.extents()
        with Raw(daemon.socket, pb.HelloRequest(protocol=1, session=a.session)) as b:
            for id_ in range(1, 200):
                for connection, first in ((a, 1000), (b, 2000)):
                    keys = pb.Keys(
                        handle=handle,
                        layer_hi=1,
                        head_hi=1,
                        hashes=hashes(range(first, first + 40)),
                        id=id_,
                        nbytes=extents.block_bytes,
                    )
                    connection.send(frames.pack(Verb.RESERVE, id_, 0, keys.SerializeToString()))
                codes = sorted(connection.receive()[0] for connection in (a, b))
                assert codes == [0, 2], "one wins, the other made a mistake"
                b.request = a.request = id_
                assert a.call(Verb.ABORT, pb.Held(id=id_))[0] == 0
                assert daemon.status()["reserved_blocks"] == 0 or id_ % 20
    assert daemon.quiet()["reserved_blocks"] == 0


def test_connections_come_and_go_without_trace(daemon: Daemon) -> None:
    def once() -> None:
        with daemon.client() as client:
            ns = client.register(space())
            put(client, ns, range(5))
            with client.lease(ns, hashes(range(5))):
                threads = [threading.Thread(target=client.lookup, args=(ns, hashes(range(5)))) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(PATIENCE)

    once()
    daemon.quiet()
    descriptors, threads, memory = daemon.descriptors(), daemon.threads(), daemon.rss_anon()
    mine = len(os.listdir("/proc/self/fd"))
    for _ in range(40):
        once()
    daemon.quiet()
    until(
        lambda: daemon.descriptors() <= descriptors and daemon.threads() <= threads, "descriptors and threads are back"
    )
    assert daemon.rss_anon() - memory < 4 * MiB
    assert len(os.listdir("/proc/self/fd")) <= mine and threading.active_count() < 10


# The daemon's death


# Silence
