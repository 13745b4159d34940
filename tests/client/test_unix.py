"""Leases and fills as views of the mapped arena: what they show, and that nothing stays held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtier.errors import Invalid
from kvtier.format.layout import attention
from kvtier.format.views import part_view
from kvtier.protocol.frames import Verb
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

ARENA = 192 * MiB
NBYTES = 1024


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with Daemon(ARENA) as daemon:
        yield daemon


def slot_bytes(nbytes: int) -> int:
    return description(nbytes).layout.extents().slot_bytes


# One client


def test_a_fill_seals_on_a_clean_exit_and_aborts_on_an_exception(client: Patient) -> None:
    ns = client.register(description(NBYTES, model="fill"))
    put(client, ns, [1])
    with pytest.raises(RuntimeError, match="the writer's own"), client.fill(ns, hashes([1, 2, 3])) as slots:
        assert [slot is None for slot in slots] == [True, False, False], "block 1 is present"
        slots[1][:] = 5
        raise RuntimeError("the writer's own")
    assert slots.sealed == 0 and client.lookup(ns, hashes([2])) == 0
    with client.fill(ns, hashes([1, 2, 3])) as slots:
        assert len(slots) == 3 and slots.reason == ""
        for n, slot in zip([1, 2, 3], slots, strict=True):
            if slot is not None:
                assert slot.flags.writeable and slot.shape == (NBYTES,)
                slot[:] = body(n, NBYTES)
        assert client.lookup(ns, hashes([2])) == 0, "nothing is visible before it is sealed"
    assert slots.sealed == 3
    assert all(is_body(one, n) for n, one in enumerate(client.get(ns, hashes([1, 2, 3])), 1))


def test_leases_are_read_only_views_of_the_leading_part(client: Patient, daemon: Daemon) -> None:
    ns = client.register(description(NBYTES, model="lease"))
    put(client, ns, range(4))
    with client.lease(ns, hashes([0, 1, 2, 3, 4, 0])) as blocks:
        assert len(blocks) == 4 and blocks.reason == "miss"
        for n, view in enumerate(blocks):
            assert is_body(view, n)
            assert not view.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 1
        assert is_body(blocks[-1], 3) and [is_body(view, n) for n, view in zip([1, 2], blocks[1:3], strict=True)] == [
            True,
            True,
        ]
        with pytest.raises(IndexError):
            blocks[4]
        assert daemon.status()["leased_blocks"] == 4
    until(lambda: daemon.status()["leased_blocks"] == 0, "the release has come")
    for touch in (lambda: blocks[0], lambda: list(blocks)):
        with pytest.raises(Invalid, match="the lease has ended"):
            touch()
    with client.lease(ns, hashes([1, 1, 1])) as blocks:
        assert len(blocks) == 3 and daemon.status()["leased_blocks"] == 1, (
            "a block asked for three times is pinned once"
        )


def test_part_views_reach_into_a_leased_block(client: Patient) -> None:
    layout = attention(2, 3, 8, engine_tokens=16, dtype="bf16")
    ns = client.register(description(model="views", layout=layout))
    extents = ns.extents()
    with client.fill(ns, hashes([7])) as slots:
        slots[0][:] = 0
        for layer in range(2):
            for part in range(2):
                part_view(slots[0], extents, layer, part)[...] = 10 * layer + part + 1
    with client.lease(ns, hashes([7])) as blocks:
        view = part_view(blocks[0], extents, 1, 1)
        assert view.shape == (3, 16, 8) and np.all(view == 12) and not view.flags.writeable
        assert np.all(part_view(blocks[0], extents, 0, 0) == 1)


# Sizes


# Mistakes, limits, absence


def test_a_closed_client_answers_nothing_and_its_leases_end_when_they_exit(daemon: Daemon) -> None:
    client = daemon.client()
    ns = client.register(description(NBYTES, model="closed"))
    put(client, ns, range(3))
    lease = client.lease(ns, hashes(range(3)))
    with lease as blocks:
        fill = client.fill(ns, hashes([50]))
        with fill as slots:
            slots[0][:] = 1
            client.close()
            assert [is_body(view, n) for n, view in enumerate(blocks)] == [True] * 3
            limbo = until(lambda: (s := daemon.status())["limbo_sessions"] == 1 and s, "the session goes to limbo")
            assert limbo["leased_blocks"] == 3 and limbo["reserved_blocks"] == 1
        assert slots.sealed == 0 and slots.reason
        assert daemon.status()["leased_blocks"] == 3, "one of two users is left"
    until(lambda: daemon.status()["leased_blocks"] == 0, "the closed client says that it is done")
    status = daemon.status()
    assert status["limbo_sessions"] == status["reserved_blocks"] == 0
    answer = client.lookup(ns, hashes([1]))
    assert (answer, answer.reason) == (0, "the client is closed")
    client.close()


def test_an_interruption_leaves_nothing_held(client: Patient, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at any call: between two parts of a long lease or fill, and inside a seal."""
    ns = client.register(description(256, model="interrupted"))
    many = range(2500)
    put(client, ns, many)
    connection = client._connection
    call = type(connection).call

    def interrupt_at(number: int) -> None:
        left = iter(range(number, -1, -1))

        def counted(self: Any, attachment: Any, verb: int, *arguments: Any) -> bytes:
            if verb in (Verb.LEASE, Verb.RESERVE, Verb.SEAL) and next(left, 1) == 0:  # other threads ask for the status
                raise KeyboardInterrupt
            return call(self, attachment, verb, *arguments)

        monkeypatch.setattr(type(connection), "call", counted)

    for number in range(3):
        interrupt_at(number)
        with pytest.raises(KeyboardInterrupt), client.lease(ns, hashes(many)):
            raise AssertionError("not reached")
    for number in range(4):
        interrupt_at(number)
        with (
            pytest.raises(KeyboardInterrupt),
            client.fill(ns, hashes(range(10_000 * number + 10_000, 10_000 * number + 12_500))),
        ):
            assert number == 3, "in the seal"
    monkeypatch.undo()
    until(lambda: daemon.status()["held_bytes"] == 0, "the releases have come")
    status = daemon.status(check_integrity=True)
    assert status["leased_blocks"] == status["reserved_blocks"] == 0
    until(lambda: connection.attach(1).users == 0, "nobody uses the mapping")


# Many at once


HOLDER = """
client = Patient(ADDRESS)
ns = client.register(description(ARGS[0], model=ARGS[1]))
with client.lease(ns, hashes(range(ARGS[2]))) as blocks:
    first = [hashlib.sha256(view).hexdigest() for view in blocks]
    say(first)
    while hear():
        say([hashlib.sha256(view).hexdigest() for view in blocks] == first)
say("released")
"""


def test_leased_bytes_stay_while_the_arena_is_turned_over(daemon: Daemon) -> None:
    nbytes, held = 250_000, 100
    with daemon.client() as client:
        ns = client.register(description(nbytes, model="turn"))
        put(client, ns, range(held))
        with Peer(HOLDER, daemon, nbytes, "turn", held) as holder:
            assert len(holder.hear()) == held
            before = daemon.status()["evicted_blocks_total"]
            room = ARENA // slot_bytes(nbytes)
            for turn in range(1, 3):
                numbers = range(10_000 * turn, 10_000 * turn + room)
                put(client, ns, numbers)
                assert holder.ask(True) is True
            assert daemon.status()["evicted_blocks_total"] - before > room - held
            assert client.lookup(ns, hashes(range(held))) == held, "what is leased is not evicted"
            assert holder.ask(False) == "released"
        until(lambda: daemon.status()["leased_blocks"] == 0, "nobody holds it any more, so it may go")
