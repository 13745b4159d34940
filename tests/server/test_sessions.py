"""Sessions: ids, repeats, subsets, caps of what is open; what a socket's or a process's end does; limbo.

And KVB-18 as far as it reaches here.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvtier.errors import Denied, Full, Invalid, KvtierError, Lost, NotFound
from kvtier.format.block import digest
from kvtier.protocol.stops import PRESENT, Stop
from kvtier.server import sessions as module
from kvtier.server.sessions import ADMIN, MAX_FINISHED, READ, WRITE, Peer, Session, Sessions
from tests.support.daemon import until
from tests.support.inside import Inside, KiB, Space

SLOT = 4 * KiB


@pytest.fixture
def inside() -> Iterator[Inside]:
    with Inside() as made:  # 256 slots of 4 KiB; a session may hold 64
        yield made


@pytest.fixture
def space(inside: Inside) -> Space:
    return inside.space()


def known(inside: Inside, space: Space, numbers: Sequence[int]) -> list[int]:
    return [n for n, here in zip(numbers, inside.store.lookup_each(space.keys(numbers)), strict=True) if here]


def used(inside: Inside) -> int:
    return inside.store.gauges()["used_bytes"] // SLOT


def in_threads(*works: Callable[[], None]) -> None:
    """Runs these at the same moment and waits for all; what one raises fails the test."""
    start = threading.Barrier(len(works))
    faults: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        start.wait(10)
        try:
            work()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if faults:
        raise faults[0]


# --- ids


@pytest.mark.parametrize("id_", [0, -1, 2**64, 2**70])
def test_an_id_outside_u64_or_zero_is_refused(inside: Inside, space: Space, id_: int) -> None:
    session = inside.session()
    with pytest.raises(Invalid, match="is 0 or was used before"):
        session.reserve(id_, *space.asked([1]))
    with pytest.raises(Invalid):
        session.lease(id_, space.keys([1]))
    assert used(inside) == 0


def test_an_id_is_used_once_whatever_for(inside: Inside, space: Space) -> None:
    session = inside.session()
    session.reserve(2**64 - 1, *space.asked([1]))
    inside.put(session, 2, space, [2])
    session.lease(3, space.keys([2]))
    session.lease(4, space.keys([99]))  # a miss: nothing is open, but the id is taken
    session.reserve(5, *space.asked([2]))  # all present
    for id_ in (2**64 - 1, 2, 3, 4, 5):
        with pytest.raises(Invalid, match=f"id {id_} is 0 or was used before"):
            session.reserve(id_, *space.asked([7]))
        with pytest.raises(Invalid, match=f"id {id_} is 0 or was used before"):
            session.lease(id_, space.keys([2]))
    inside.session().reserve(2**64 - 1, *space.asked([8]))


def test_two_sockets_that_use_one_id_at_once_lose_no_slot(inside: Inside, space: Space) -> None:
    """The second one comes while the first is inside the store: it must not overwrite what the first holds."""
    session = inside.session()
    reserve, lease = inside.store.reserve, inside.store.lease
    inside.put(session, 100, space, [50])

    def interrupted(verb: Callable[..., object], again: Callable[[], object]) -> Callable[..., object]:
        def call(*asked: object) -> object:
            answer = verb(*asked)
            setattr(inside.store, verb.__name__, verb)
            again()
            return answer

        return call

    for id_, first, second in (
        (1, "reserve", "reserve"),
        (2, "reserve", "lease"),
        (3, "lease", "reserve"),
        (4, "lease", "lease"),
    ):
        verbs: dict[str, Callable[[], object]] = {
            "reserve": lambda id_=id_: session.reserve(id_, *space.asked([id_])),  # type: ignore[misc]
            "lease": lambda id_=id_: session.lease(id_, space.keys([50])),  # type: ignore[misc]
        }
        store_verb = {"reserve": reserve, "lease": lease}[first]
        setattr(inside.store, first, interrupted(store_verb, verbs[second]))
        with pytest.raises(Invalid, match=f"id {id_} is 0 or was used before"):
            verbs[first]()
        inside.check()
    session.end()
    assert used(inside) == 1 and session.held_bytes == 0


def test_many_threads_on_one_id_open_it_once(inside: Inside, space: Space) -> None:
    session = inside.session()
    inside.put(session, 10_000, space, range(8))
    opened: list[int] = []

    def work(tag: int) -> None:
        for id_ in range(1, 60):
            try:
                if (tag + id_) % 2:
                    session.lease(id_, space.keys(range(8)))
                else:
                    session.reserve(id_, *space.asked([100 + tag]))
                opened.append(id_)
            except Invalid:
                pass
            except Full:
                continue

    in_threads(*[lambda tag=tag: work(tag) for tag in range(6)])  # type: ignore[misc]
    assert len(opened) == len(set(opened))
    inside.check()
    session.end()
    assert session.held_bytes == 0


def test_what_a_session_may_have_open_is_limited(inside: Inside, space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 4)
    session = inside.session()
    inside.put(session, 1, space, [1])
    session.lease(2, space.keys([1]))
    session.lease(3, space.keys([1]))
    session.reserve(4, *space.asked([4]))
    session.reserve(5, *space.asked([5]))
    for verb in (lambda: session.lease(6, space.keys([1])), lambda: session.reserve(6, *space.asked([6]))):
        with pytest.raises(Full, match="4 reservations and leases open"):
            verb()
    session.release(2, ())
    session.lease(6, space.keys([1]))


@pytest.mark.parametrize("verb", ["seal", "abort", "release"])
def test_an_id_that_was_never_given_is_told(inside: Inside, space: Space, verb: str) -> None:
    session, other = inside.session(), inside.session()
    other.reserve(7, *space.asked([1]))
    with pytest.raises(NotFound, match="id 7 was not given in this session"):
        getattr(session, verb)(7, ())


# --- repeats


def test_repeating_a_seal_an_abort_or_a_release_is_harmless(inside: Inside, space: Space) -> None:
    session = inside.session()
    for n in range(3):
        assert inside.put(session, 10 + n, space, range(4)) == 4
        assert [session.seal(10 + n, ()) for _ in range(3)] == [4, 4, 4]
        assert session.abort(10 + n, ()) == 0
        assert known(inside, space, range(4)) == [0, 1, 2, 3]
    session.reserve(20, *space.asked([9, 10]))
    assert [session.abort(20, ()) for _ in range(3)] == [2, 0, 0]
    assert session.seal(20, ()) == 0
    session.lease(30, space.keys(range(4)))
    assert [session.release(30, ()) for _ in range(3)] == [4, 0, 0]
    assert session.held_bytes == 0


def test_a_repeated_seal_answers_for_the_entries_it_names(inside: Inside, space: Space) -> None:
    session = inside.session()
    inside.put(session, 1, space, [0])
    session.reserve(2, *space.asked([0, 1, 2, 3]))
    assert session.seal(2, [0, 1]) == 2
    assert session.abort(2, [2]) == 1
    assert session.seal(2, [3]) == 1, "that ends it"
    assert session.seal(2, [0, 1]) == 2
    assert session.seal(2, [2]) == 0
    assert session.seal(2, [1, 2, 3]) == 2
    assert session.seal(2, ()) == 3
    with pytest.raises(Invalid, match="outside the 4 entries"):
        session.seal(2, [4])


def test_of_finished_ids_the_last_4096_are_remembered(inside: Inside, space: Space) -> None:
    session = inside.session()
    inside.put(session, 1, space, [1])
    for id_ in range(2, MAX_FINISHED + 1):
        session.lease(id_, space.keys([1]))
        session.release(id_, ())
    assert session.seal(1, ()) == 1
    session.lease(MAX_FINISHED + 1, space.keys([77]))
    with pytest.raises(NotFound, match="finished long ago"):
        session.seal(1, ())
    assert session.release(2, ()) == 0
    with pytest.raises(Invalid):
        session.lease(2, space.keys([1]))
    assert session.lease(1, space.keys([1]))[1] == Stop.END, "a forgotten id is like a new one"
    assert len(session._finished) == MAX_FINISHED


def test_a_seal_that_lost_a_block_is_not_an_answer_for_it_later(inside: Inside, space: Space) -> None:
    session = inside.session()
    offsets = session.reserve(1, *space.asked([1, 2, 3]))
    inside.write(offsets, space, [1, 2, 3])
    inside.arena.array[offsets[1] + 40] ^= 1
    with pytest.raises(Lost):
        session.seal(1, ())
    assert session.seal(1, ()) == 2 and session.seal(1, [1]) == 0 and session.abort(1, ()) == 0
    assert known(inside, space, [1, 2, 3]) == [1, 3] and session.held_bytes == 0


# --- subsets


@pytest.mark.parametrize("indices", [[3], [-1], [0, 3], [2**31], [0, 1, 2, 3]])
@pytest.mark.parametrize("verb", ["seal", "abort", "release"])
def test_an_index_outside_is_refused_and_changes_nothing(
    inside: Inside, space: Space, verb: str, indices: list[int]
) -> None:
    session = inside.session()
    inside.put(session, 1, space, [1, 2, 3])
    session.lease(2, space.keys([1, 2, 3])) if verb == "release" else session.reserve(2, *space.asked([4, 5, 6]))
    before = session.held_bytes
    with pytest.raises(Invalid, match="outside the 3 entries"):
        getattr(session, verb)(2, indices)
    assert session.held_bytes == before == 3 * SLOT
    assert known(inside, space, [4, 5, 6]) == []


def test_an_index_given_twice_counts_once(inside: Inside, space: Space) -> None:
    session = inside.session()
    session.reserve(1, *space.asked([1, 2, 3]))
    assert session.abort(1, [1, 1, 1]) == 1
    assert session.seal(1, [0, 0, 2, 0]) == 2
    session.lease(2, space.keys([1]))
    assert session.release(2, [0, 0]) == 1


def test_release_of_some_entries(inside: Inside, space: Space) -> None:
    session = inside.session()
    inside.put(session, 1, space, range(5))
    session.lease(2, space.keys(range(5)))
    assert session.release(2, [0, 4]) == 2 and session.held_bytes == 3 * SLOT
    assert session.release(2, [0, 1]) == 1
    assert session.release(2, ()) == 2 and session.held_bytes == 0
    assert session.release(2, [3]) == 0


def test_a_block_leased_under_two_entries_is_held_until_both_are_released(inside: Inside, space: Space) -> None:
    session = inside.session()
    inside.put(session, 1, space, [1, 2])
    session.lease(2, space.keys([1, 2, 1]))
    assert session.held_bytes == 2 * SLOT
    assert session.release(2, [0]) == 1 and session.held_bytes == 2 * SLOT
    inside.check()
    assert session.release(2, [2]) == 1 and session.held_bytes == SLOT
    assert session.release(2, [1]) == 1 and session.held_bytes == 0
    session.lease(3, space.keys([1, 1, 1]))
    assert session.release(3, ()) == 3 and session.held_bytes == 0


def test_two_leases_of_one_block_are_two_holds(inside: Inside, space: Space) -> None:
    session = inside.session()
    inside.put(session, 1, space, [1])
    session.lease(2, space.keys([1]))
    session.lease(3, space.keys([1]))
    assert session.held_bytes == 2 * SLOT, "a session's cap counts every hold"
    session.release(2, ())
    inside.store.delete(space.keys([1]))
    assert used(inside) == 1
    session.release(3, ())
    assert used(inside) == 0


def test_an_empty_answer_opens_nothing(inside: Inside, space: Space) -> None:
    session = inside.session()
    assert session.lease(1, space.keys([1])) == ([], Stop.MISS)
    assert session.release(1, ()) == 0
    assert session.lease(2, []) == ([], Stop.END)
    inside.put(session, 3, space, [1])
    assert session.reserve(4, *space.asked([1, 1])) == [PRESENT, PRESENT]
    assert session.abort(4, ()) == 0 and session.seal(4, ()) == 2
    assert session.held_bytes == 0


def test_an_answer_that_could_not_be_delivered_is_taken_back(inside: Inside, space: Space) -> None:
    session = inside.session()
    inside.put(session, 1, space, [1])
    session.reserve(2, *space.asked([2]))
    session.lease(3, space.keys([1]))
    for id_ in (2, 3, 1, 99, 2, 3):
        session.undo(id_)
    assert session.held_bytes == 0 and used(inside) == 1


def test_a_digest_is_computed_once(inside: Inside, space: Space) -> None:
    session = inside.session()
    inside.put(session, 1, space, [1])
    (offset,), _ = session.lease(2, space.keys([1]))
    block = inside.arena.memory[offset : offset + space.block_bytes]
    assert session.checksum(2, 0, block) == digest(block)
    assert session.checksum(2, 0, memoryview(b"not read again")) == digest(block)


def test_roles() -> None:
    for role, allowed in ((READ, 1), (WRITE, 2), (ADMIN, 3)):
        with Inside() as inside:
            session = inside.session(role=role)
            for wanted in range(allowed):
                session.allow(wanted)
            for wanted in range(allowed, 3):
                with pytest.raises(Denied, match=f"this needs role {module.ROLES[wanted]}"):
                    session.allow(wanted)


# --- the end of a session


def test_the_end_returns_everything_once(inside: Inside, space: Space) -> None:
    session, other = inside.session(), inside.session()
    inside.put(session, 1, space, range(10))
    session.lease(2, space.keys([*range(10), 3]))
    session.release(2, [4])
    other.lease(1, space.keys(range(5)))
    session.reserve(3, *space.asked(range(20, 30)))
    session.seal(3, [0])
    inside.store.delete(space.keys([7]))
    session.end()
    assert session.held_bytes == 0 and used(inside) == 10
    session.end()
    assert other.held_bytes == 5 * SLOT, "what others hold stays held"
    inside.check()
    for verb in (
        lambda: session.reserve(9, *space.asked([1])),
        lambda: session.lease(9, space.keys([1])),
        lambda: session.seal(3, ()),
    ):
        with pytest.raises(NotFound):
            verb()
    session.undo(2)


def test_a_reserve_or_lease_under_way_at_the_end_is_given_back(inside: Inside, space: Space) -> None:
    for verb in ("reserve", "lease"):
        session = inside.session()
        inside.put(session, 1, space, [1])
        real = getattr(inside.store, verb)

        def ending(
            *asked: object, session: Session = session, verb: str = verb, real: Callable[..., object] = real
        ) -> object:
            answer = real(*asked)
            setattr(inside.store, verb, real)
            session.end()
            return answer

        setattr(inside.store, verb, ending)
        with pytest.raises(NotFound, match="the session has ended"):
            session.reserve(2, *space.asked([5])) if verb == "reserve" else session.lease(2, space.keys([1]))
        assert session.held_bytes == 0
        inside.check()
    assert used(inside) == 1


@pytest.mark.parametrize("seed", range(20))
def test_calls_that_race_with_the_end_leave_nothing_held(inside: Inside, space: Space, seed: int) -> None:
    """Sockets of one session in all verbs while it ends: each call is whole or undone."""
    session, ids = inside.session(), iter(range(1000, 10**6))
    inside.put(session, 1, space, range(20))
    pause = random.Random(seed).uniform(0.0, 0.02)

    def work(turn: int) -> None:
        try:
            while True:
                id_ = next(ids)
                if turn:
                    session.lease(id_, space.keys(range(turn, turn + 10)))
                    session.release(id_, [0, 1])
                    session.release(id_, ())
                else:
                    session.reserve(id_, *space.asked(range(100, 104)))
                    session.abort(id_, [0])
                    session.seal(id_, ())
                    inside.store.delete(space.keys(range(100, 104)))
        except NotFound:
            return

    def end() -> None:
        time.sleep(pause)
        session.end()

    in_threads(lambda: work(0), lambda: work(1), lambda: work(5), end)
    assert session.held_bytes == 0
    inside.check()


@pytest.mark.parametrize("seed", range(10))
def test_of_a_seal_and_an_abort_at_once_each_entry_has_one_fate(inside: Inside, space: Space, seed: int) -> None:
    session = inside.session()
    for id_ in range(1, 40):
        numbers = range(100 * id_, 100 * id_ + 8)
        offsets = session.reserve(id_, *space.asked(numbers))
        inside.write(offsets, space, numbers)
        sealed: list[int] = []
        aborted: list[int] = []
        order = random.Random(seed + id_).sample(range(8), 8)
        in_threads(
            lambda: sealed.append(session.seal(id_, order[:6])),  # noqa: B023
            lambda: aborted.append(session.abort(id_, order[2:])),  # noqa: B023
        )
        rest = session.seal(id_, ())
        assert rest == len(known(inside, space, numbers)) and aborted[0] + rest == 8
        assert sealed[0] >= rest - 2
        assert session.abort(id_, ()) == 0
        inside.store.delete(space.keys(numbers))
    assert session.held_bytes == 0 and used(inside) == 0


# --- sockets, limbo, processes


def test_sockets_join_and_the_last_one_ends_it(inside: Inside, space: Space) -> None:
    child = inside.process()
    session = inside.session_of(child)
    assert inside.sessions.join(session.id, inside.peer_of(child)) is session
    assert inside.sessions.gauges() == {
        "sessions": 1,
        "sockets": 2,
        "limbo_sessions": 0,
        "limbo_bytes": 0,
        "held_bytes": 0,
    }
    inside.put(session, 1, space, [1])
    inside.sessions.leave(session)
    assert inside.sessions.watched(session)
    inside.sessions.leave(session)
    assert inside.sessions.gauges()["sessions"] == 0, "it held nothing, so there is no limbo"
    assert not inside.sessions.watched(session)
    with pytest.raises(NotFound):
        inside.sessions.join(session.id, inside.peer_of(child))
    assert known(inside, space, [1]) == [1]


def test_only_the_same_user_and_process_may_join(inside: Inside) -> None:
    child, stranger = inside.process(), inside.process()
    session = inside.session_of(child)
    for peer in (inside.peer_of(stranger), Peer("t", WRITE, os.getuid() + 1, child.pid), Peer("t", WRITE)):
        with pytest.raises(Denied, match="another user or process"):
            inside.sessions.join(session.id, peer)
    with pytest.raises(NotFound):
        inside.sessions.join(bytes(16), inside.peer_of(child))
    assert session.sockets == 1


def test_sockets_and_sessions_are_limited(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SOCKETS", 3)
    monkeypatch.setattr(module, "MAX_SESSIONS", 2)
    child = inside.process()
    session = inside.session_of(child)
    inside.sessions.join(session.id, inside.peer_of(child))
    inside.sessions.join(session.id, inside.peer_of(child))
    with pytest.raises(Full, match="3 sockets"):
        inside.sessions.join(session.id, inside.peer_of(child))
    inside.session()
    pidfd = os.pidfd_open(child.pid)
    with pytest.raises(Full, match="2 sessions are open"):
        inside.sessions.open(inside.peer_of(child), pidfd)
    with pytest.raises(OSError):
        os.fstat(pidfd)


def test_without_a_process_to_watch_the_last_socket_is_the_end(inside: Inside, space: Space) -> None:
    session = inside.session()
    session.reserve(1, *space.asked([1, 2]))
    assert not inside.sessions.watched(session)
    inside.sessions.leave(session)
    assert session.held_bytes == 0 == used(inside)
    assert inside.sessions.gauges()["sessions"] == 0


def test_in_limbo_nothing_is_reused_while_the_process_lives(inside: Inside, space: Space) -> None:
    child, writer = inside.process(), inside.session()
    session = inside.session_of(child)
    inside.put(session, 1, space, range(20))
    leased, _ = session.lease(2, space.keys(range(20)))
    reserved = session.reserve(3, *space.asked(range(100, 120)))
    inside.write(reserved, space, range(100, 120))
    inside.store.delete(space.keys(range(10)))
    inside.sessions.leave(session)
    gauges = inside.sessions.gauges()
    assert (gauges["limbo_sessions"], gauges["limbo_bytes"], gauges["sockets"]) == (1, 40 * SLOT, 1)
    inside.check()
    for round_ in range(10):
        inside.put(writer, 10 + round_, space, range(1000 + 50 * round_, 1050 + 50 * round_))
        assert all(inside.holds(offset, space, n) for n, offset in enumerate(leased))
        assert all(inside.holds(offset, space, n) for n, offset in enumerate(reserved, 100))
    child.kill()
    until(
        lambda: not inside.sessions.gauges()["limbo_sessions"] and not session.held_bytes, "limbo ends with its process"
    )
    inside.check()
    assert known(inside, space, range(20)) == list(range(10, 20)) and known(inside, space, range(100, 120)) == []


def test_a_session_comes_back_from_limbo(inside: Inside, space: Space) -> None:
    child = inside.process()
    session = inside.session_of(child)
    offsets = session.reserve(1, *space.asked([1, 2]))
    inside.sessions.leave(session)
    assert session.limbo
    assert inside.sessions.join(session.id, inside.peer_of(child)) is session and not session.limbo
    inside.write(offsets, space, [1, 2])
    assert session.seal(1, ()) == 2
    inside.sessions.leave(session)
    assert inside.sessions.gauges()["sessions"] == 0


def test_a_client_that_is_done_with_its_copies_leaves_limbo(inside: Inside, space: Space) -> None:
    child, stranger = inside.process(), inside.process()
    session = inside.session_of(child)
    session.reserve(1, *space.asked([1, 2]))
    inside.sessions.leave(session)
    with pytest.raises(Denied):
        inside.sessions.drained(session.id, inside.peer_of(stranger))
    assert session.held_bytes == 2 * SLOT
    inside.sessions.drained(session.id, inside.peer_of(child))
    assert session.held_bytes == 0 == used(inside)
    inside.sessions.drained(session.id, inside.peer_of(child))
    inside.sessions.drained(bytes(16), inside.peer_of(child))


def test_a_client_that_is_done_before_all_its_sockets_are_seen_to_close_leaves_no_limbo(
    inside: Inside, space: Space
) -> None:
    child = inside.process()
    session, again = inside.session_of(child), inside.session_of(child)
    for one in (session, again):
        one.reserve(1, *space.asked([1, 2]))
        inside.sessions.drained(one.id, inside.peer_of(child))
        assert one.held_bytes == 2 * SLOT, "not while it has a socket: its calls are not over"
    inside.sessions.leave(session)
    assert session.held_bytes == 0 and not session.limbo
    inside.sessions.join(again.id, inside.peer_of(child))  # it has changed its mind: copies may be under way again
    inside.sessions.leave(again)
    inside.sessions.leave(again)
    assert again.held_bytes == 2 * SLOT and again.limbo
    inside.sessions.drained(again.id, inside.peer_of(child))
    assert again.held_bytes == 0 == used(inside)


def test_the_end_of_a_process_returns_what_all_its_sessions_held(inside: Inside, space: Space) -> None:
    child, other = inside.process(), inside.process()
    sessions = [inside.session_of(child) for _ in range(3)]
    survivor = inside.session_of(other)
    for n, session in enumerate([*sessions, survivor]):
        inside.put(session, 1, space, range(10 * n, 10 * n + 10))
        session.lease(2, space.keys(range(10 * n, 10 * n + 10)))
        session.reserve(3, *space.asked([1000 + n]))
    inside.sessions.leave(sessions[1])
    os.kill(child.pid, signal.SIGKILL)
    until(
        lambda: inside.sessions.gauges()["held_bytes"] == 11 * SLOT and not any(s.held_bytes for s in sessions),
        "all is back",
    )
    inside.check()
    assert survivor.held_bytes == 11 * SLOT and inside.sessions.watched(survivor)
    inside.sessions.leave(sessions[0])  # the thread of its socket finds out later
    inside.sessions.leave(survivor)
    assert survivor.limbo and inside.sessions.alive()


def test_the_number_of_a_dead_processs_pidfd_cannot_end_a_living_session(inside: Inside, space: Space) -> None:
    """The watcher wakes for a dead process.

    Before it can look, the last socket leaves, the pidfd is closed, and its number names a new process.
    """
    dying, living = inside.process(), inside.process()
    session = inside.session_of(dying)
    number = inside.sessions._pidfds[session.id]
    with inside.sessions._lock:
        dying.kill()
        dying.wait()
        time.sleep(0.2)  # the watcher has its event and waits for the lock
        inside.sessions._forget(session)
        fresh = Session(b"f" * 16, inside.peer_of(living), inside.store)
        fresh.sockets = 1
        pidfd = os.pidfd_open(living.pid)
        if pidfd != number:
            os.dup2(pidfd, number, inheritable=False)
            os.close(pidfd)
        inside.sessions._poll.register(number)
        inside.sessions._by_id[fresh.id] = inside.sessions._by_pidfd[number] = fresh
        inside.sessions._pidfds[fresh.id] = number
    session.end()
    fresh.reserve(1, *space.asked([1]))
    third = inside.process()
    proof = inside.session_of(third)
    third.kill()
    until(lambda: not inside.sessions.watched(proof), "the watcher has been round")
    assert inside.sessions.watched(fresh) and fresh.held_bytes == SLOT
    living.kill()
    until(lambda: not fresh.held_bytes, "and it ends with its own process")


def test_a_fault_in_one_end_does_not_keep_the_others_slots(
    inside: Inside, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = inside.process()
    broken, fine = inside.session_of(child), inside.session_of(child)
    for session in (broken, fine):
        session.reserve(1, *space.asked([1]))
    end = Session.end

    def fails(self: Session) -> None:
        if self is broken:
            raise RuntimeError("a fault of ours")
        end(self)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "end", fails)
        child.kill()
        until(lambda: not fine.held_bytes, "the other one is returned")
    assert inside.sessions.alive()
    broken.end()


def test_sessions_may_be_left_after_the_registry_is_closed(inside: Inside, space: Space) -> None:
    child, sessions = inside.process(), Sessions(inside.store)
    holding, idle = [sessions.open(inside.peer_of(child), os.pidfd_open(child.pid)) for _ in range(2)]
    holding.reserve(1, *space.asked([1]))
    sessions.close()
    assert not sessions.alive()
    before = set(os.listdir("/proc/self/fd"))
    sessions.leave(holding)
    sessions.leave(idle)
    assert set(os.listdir("/proc/self/fd")) == before, "no descriptor is closed twice: its number may be somebody's"
    holding.end()


# --- KVB-18: looked up, pinned, never fetched


@pytest.fixture
def budget() -> Iterator[Inside]:
    """A memory of 64 blocks, all filled with blocks 0 to 63; a session may hold 16."""
    with Inside(64 * SLOT) as made:
        filler = made.session()
        for first in range(0, 64, 16):
            made.put(filler, first + 1, made.space(), range(first, first + 16))
        assert made.store.gauges()["known_blocks"] == 64
        yield made


def pin_all(inside: Inside) -> tuple[Session, subprocess.Popen[bytes], list[int]]:
    child = inside.process()
    client = inside.session_of(child)
    offsets, stop = client.lease(1, inside.space().keys(range(64)))
    assert (len(offsets), stop) == (16, Stop.CAP), "no session holds more than its share"
    return client, child, offsets


def put_64_more(inside: Inside) -> None:
    """Client D: 64 new blocks, a session's share a call. Each call succeeds at once."""
    space, other = inside.space(), inside.session()
    for first in range(100, 164, 16):
        assert inside.put(other, first, space, range(first, first + 16)) == 16


def test_kvb_18_a_lookup_pins_nothing(budget: Inside) -> None:
    assert budget.store.lookup(budget.space().keys(range(64))) == 64
    assert budget.store.gauges()["leased_blocks"] == 0
    put_64_more(budget)
    assert known(budget, budget.space(), range(100, 164)) == list(range(100, 164))


def test_kvb_18_i_never_fetched(budget: Inside) -> None:
    client, child, offsets = pin_all(budget)
    put_64_more(budget)
    assert len(known(budget, budget.space(), range(100, 164))) == 48, "as far as the cap leaves room"
    assert all(budget.holds(offset, budget.space(), n) for n, offset in enumerate(offsets))
    child.kill()
    until(
        lambda: not budget.store.gauges()["leased_blocks"] and not client.held_bytes,
        "the pinned gauge is 0 when the process ends",
    )


def test_kvb_18_ii_killed(budget: Inside) -> None:
    client, child, _ = pin_all(budget)
    child.kill()
    until(
        lambda: not budget.store.gauges()["leased_blocks"] and not client.held_bytes,
        "the pinned gauge is 0 when the process ends",
    )
    put_64_more(budget)
    assert known(budget, budget.space(), range(164)) == list(range(100, 164))


def test_kvb_18_iii_fetched_ten_and_cancelled(budget: Inside) -> None:
    client, _, offsets = pin_all(budget)
    assert all(budget.holds(offset, budget.space(), n) for n, offset in enumerate(offsets[:10]))
    client.release(1, list(range(10)))
    client.release(1, ())
    assert budget.store.gauges()["leased_blocks"] == 0
    put_64_more(budget)
    assert len(known(budget, budget.space(), range(100, 164))) == 64


def test_kvb_18_iv_a_release_names_a_lease_so_another_salt_cannot_occur(budget: Inside) -> None:
    """Keys, ranges and salts are given when a lease is made.

    A release gives its id: a wrong one is an error, and frees nothing of anybody's.
    """
    client, _, _ = pin_all(budget)
    other = budget.session()
    other.lease(2, budget.space().keys([0]))
    for id_ in (2, 3, 2**64 - 1, 0):
        with pytest.raises(NotFound):
            client.release(id_, ())
    assert budget.store.gauges()["leased_blocks"] == 16
    client.release(1, ())
    other.release(2, ())
    put_64_more(budget)
    assert len(known(budget, budget.space(), range(100, 164))) == 64


def test_kvb_18_v_released_twice(budget: Inside) -> None:
    client, _, _ = pin_all(budget)
    other = budget.session()
    other.lease(1, budget.space().keys(range(4)))
    assert [client.release(1, ()) for _ in range(3)] == [16, 0, 0]
    assert budget.store.gauges()["leased_blocks"] == 4, "another client's pins stay"
    budget.check()
    other.release(1, ())
    assert budget.store.gauges()["leased_blocks"] == 0
    put_64_more(budget)
    assert len(known(budget, budget.space(), range(100, 164))) == 64


def test_kvb_18_a_thousand_requests_given_up_in_every_state_hold_nothing(budget: Inside) -> None:
    space, client = budget.space(), budget.session()
    for n in range(1000):
        state, id_ = n % 7, 2 * n + 1
        numbers = range(n % 48, n % 48 + 16)
        budget.store.lookup(space.keys(numbers))
        if state == 1:
            client.lease(id_, space.keys(numbers))
            client.undo(id_)
        elif state >= 2:
            offsets, _ = client.lease(id_, space.keys(numbers))
            if state >= 3 and offsets:
                client.release(id_, range(min(state, len(offsets))))
            if state == 6:
                budget.put(client, id_ + 1, space, [500 + n % 5])
            client.release(id_, ())
            client.release(id_, ())
    assert client.held_bytes == 0 == budget.store.gauges()["leased_blocks"]


def test_errors_are_ours(inside: Inside, space: Space) -> None:
    """Whatever a client sends as ids and indices, the answer is a named error or a number."""
    session = inside.session()
    inside.put(session, 1, space, [1, 2])
    session.lease(2, space.keys([1, 2]))
    session.reserve(3, *space.asked([3, 4]))
    rng = random.Random(0)
    answers = 0
    for _ in range(2000):
        verb = rng.choice([session.seal, session.abort, session.release])
        try:
            verb(
                rng.choice([0, 1, 2, 3, 4, 5, 2**32, 2**64 - 1]),
                [rng.choice([0, 1, 2, 7, 2**32 - 1]) for _ in range(rng.randrange(3))],
            )
            answers += 1
        except KvtierError:
            pass
    inside.check()
    assert 0 < answers < 2000


def test_an_id_that_was_given_up_before_it_was_given_can_be_given_no_more(inside: Inside, space: Space) -> None:
    """The abort or release of a call that its client has given up may overtake that call."""
    session = inside.session()
    inside.put(session, 1, space, [1])
    for give_up, id_ in ((session.abort, 2), (session.release, 3)):
        with pytest.raises(NotFound):
            give_up(id_, ())
    with pytest.raises(Invalid, match="used before"):
        session.reserve(2, *space.asked([2]))
    with pytest.raises(Invalid, match="used before"):
        session.lease(3, space.keys([1]))
    assert session.held_bytes == 0
    with pytest.raises(NotFound):
        session.abort(2, ())
