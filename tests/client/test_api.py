"""The client library against a real daemon: every verb, what it answers when it cannot, and several clients, threads
and processes at once.

Blocks carry their number, so bytes of another block, of a freed slot (the daemon poisons them) or of no block at all
show. After every test the daemon holds nothing for anyone and its ledger agrees with its sessions.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from kvtier.client.api import Answer, Client
from kvtier.errors import Invalid, Unavailable
from kvtier.format.identity import request_context
from kvtier.format.layout import MAX_BLOCK_BYTES, Group, Layer, Layout, Part, Range
from tests.support.daemon import (
    PATIENCE,
    Daemon,
    MiB,
    Patient,
    Peer,
    body,
    content_hash,
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


def test_what_is_put_comes_back_and_nothing_else(client: Patient) -> None:
    ns = client.register(description(NBYTES, model="roundtrip"))
    assert client.lookup(ns, hashes(range(8))) == 0
    assert put(client, ns, range(8)) == 8
    found = client.lookup(ns, hashes(range(10)))
    assert (found, found.reason) == (8, "miss")
    whole = client.lookup(ns, hashes(range(8)))
    assert (whole, whole.reason) == (8, "")
    bodies = client.get(ns, hashes(range(10)))
    assert len(bodies) == 8 and bodies.reason == "miss"
    assert all(is_body(one, n) for n, one in enumerate(bodies))
    assert all(one.flags.writeable and one.flags.owndata for one in bodies), "private copies"
    assert client.lookup(ns, hashes([3, 99, 4])) == 1, "a leading part"
    assert len(client.get(ns, hashes([99, 3]))) == 0
    assert [int(n) for n in (client.lookup(ns, b""), client.put(ns, b"", []), client.delete(ns, []))] == [0, 0, 0]
    assert client.get(ns, []) == []


def test_hashes_may_be_a_list_or_one_run_of_bytes(client: Patient) -> None:
    ns = client.register(description(NBYTES, model="forms"))
    numbers = range(5)
    assert client.put(ns, [content_hash(n) for n in numbers], [body(n, NBYTES).tobytes() for n in numbers]) == 5
    assert (
        client.lookup(ns, hashes(numbers))
        == client.lookup(ns, bytearray(hashes(numbers)))
        == client.lookup(ns, memoryview(hashes(numbers)))
        == 5
    )


def test_delete_forgets_at_once_and_spares_what_is_leased(client: Patient, daemon: Daemon) -> None:
    ns = client.register(description(NBYTES, model="delete"))
    put(client, ns, range(4))
    with client.lease(ns, hashes(range(2))) as blocks:
        assert client.delete(ns, hashes([0, 2, 9])) == 2
        assert [client.lookup(ns, hashes([n])) for n in range(4)] == [0, 1, 0, 1]
        put(client, ns, [0])  # a new block under the deleted key, in another slot
        assert is_body(blocks[0], 0) and is_body(blocks[1], 1)
    until(lambda: daemon.status()["leased_blocks"] == 0, "the release has come")
    assert is_body(client.get(ns, hashes([0]))[0], 0)


def test_without_a_lower_tier_prefetch_and_flush_say_so(client: Patient) -> None:
    ns = client.register(description(NBYTES, model="tiers"))
    put(client, ns, range(3))
    for answer in (client.prefetch(ns, hashes(range(3))), client.flush(ns, hashes(range(3)))):
        assert (answer, answer.reason) == (0, "there is no lower tier")


def test_explain_names_the_field_that_differs(client: Patient) -> None:
    stored = description(NBYTES, model="explain")
    assert client.explain(stored) == [], "nothing of this model is known"
    put(client, client.register(stored), [1])
    assert client.explain(stored) == []
    lines = client.explain(description(NBYTES, model="explain", revision="2" * 40))
    assert lines == [f"revision: {'1' * 40} stored, {'2' * 40} live"]


def test_status_counts(client: Patient) -> None:
    before = client.status()
    ns = client.register(description(NBYTES, model="status"))
    put(client, ns, range(3))
    client.lookup(ns, hashes(range(4)))
    after = client.status(check_integrity=True)
    assert after["sealed_blocks_total"] - before["sealed_blocks_total"] == 3
    assert after["lookup_keys_total"] - before["lookup_keys_total"] == 4
    assert after["lookup_hits_total"] - before["lookup_hits_total"] == 3
    assert after["known_blocks"] - before["known_blocks"] == 3
    assert after["arena_bytes"] <= ARENA and after["boot"] == before["boot"]


def test_lookup_runs_answers_per_run_across_ranges_and_groups(client: Patient) -> None:
    groups = (
        Group("attention", 4, 16, (Layer(0, (Part("k", 8, "bf16"),)), Layer(1, (Part("k", 8, "bf16"),)))),
        Group("attention", 2, 16, (Layer(2, (Part("k", 24, "fp16"),)),)),
    )
    ns = client.register(description(model="runs", layout=Layout(groups)))
    ranges = [Range(), Range(0, (0, 1)), Range(0, (1, None), (1, 3)), Range(1), Range(1, (0, 1), (0, 1))]
    for i, range_ in enumerate(ranges):
        put(client, ns, range(i + 1), range_=range_)
    answers = client.lookup_runs(ns, [(range_, hashes(range(8))) for range_ in ranges] + [(Range(), b"")])
    assert [int(answer) for answer in answers] == [1, 2, 3, 4, 5, 0]
    assert [answer.reason for answer in answers] == ["miss"] * 5 + [""]
    assert client.lookup(ns, hashes([0]), range_=Range(0, (0, None), (0, 1))) == 0, (
        "a range nobody stored, inside one that is"
    )
    for i, range_ in enumerate(ranges):
        assert all(is_body(one, n) for n, one in enumerate(client.get(ns, hashes(range(i + 1)), range_=range_)))


def test_request_contexts_are_worlds_of_their_own(client: Patient) -> None:
    ns = client.register(description(NBYTES, model="contexts"))
    contexts = [
        request_context(),
        request_context(adapter=b"A" * 32),
        request_context(salt="t1"),
        request_context(adapter=b"A" * 32, salt="t1"),
    ]
    for n, context in enumerate(contexts):
        assert client.put(ns, hashes([5]), [body(n, NBYTES)], context=context) == 1
    for n, context in enumerate(contexts):
        assert is_body(client.get(ns, hashes([5]), context=context)[0], n)
        assert client.delete(ns, hashes([5]), context=context) == 1
        assert [client.lookup(ns, hashes([5]), context=other) for other in contexts] == [0] * (n + 1) + [1] * (3 - n)


# Sizes


@pytest.mark.parametrize("nbytes", [16, 240, 256, 4096 - 256, 4096 - 240, 100_000, MiB, 16 * MiB])
def test_blocks_of_any_size(client: Patient, nbytes: int) -> None:
    ns = client.register(description(nbytes, model="sizes"))
    few = [1, 2] if nbytes > MiB else [1, 2, 3, 4, 5]
    put(client, ns, few)
    bodies = client.get(ns, hashes(few))
    assert [is_body(one, n) for n, one in zip(few, bodies, strict=True)] == [True] * len(few)
    with client.lease(ns, hashes(few[:1])) as blocks:
        assert blocks[0].ctypes.data % 4096 == 256, "a slot begins on a page, its body after the header"


def test_a_block_above_16_MiB_is_a_callers_mistake(client: Patient) -> None:
    ns = client.register(description(MAX_BLOCK_BYTES, model="too large"))
    with pytest.raises(Invalid, match="the largest is"):
        client.put(ns, hashes([1]), [b""])


def test_block_sizes_share_the_arena_and_push_each_other_out(client: Patient, daemon: Daemon) -> None:
    spaces = {nbytes: client.register(description(nbytes, model="mixed")) for nbytes in (3000, 70_000, MiB, 5 * MiB)}
    for turn in range(2):
        for nbytes, ns in spaces.items():
            numbers = range(1000 * turn, 1000 * turn + min(2000, 60 * MiB // slot_bytes(nbytes)))
            put(client, ns, numbers)
            for n in numbers[:: max(1, len(numbers) // 20)]:
                found = client.get(ns, hashes([n]))
                assert not found or is_body(found[0], n)
    status = daemon.status(check_integrity=True)
    assert status["evicted_blocks_total"] > 0 and status["used_bytes"] <= status["arena_bytes"]
    for nbytes, ns in spaces.items():
        for n in range(0, 2000, 50):
            assert all(is_body(one, n) for one in client.get(ns, hashes([n]))), f"{nbytes}: whole or absent"


def test_lists_longer_than_a_call_are_split(client: Patient) -> None:
    total = 17_000
    ns = client.register(description(256, model="long"))
    numbers = range(total)
    raw = hashes(numbers)
    bodies = [body(n, 256) for n in numbers]
    assert client.put(ns, raw, bodies) == total
    assert client.lookup(ns, raw) == total
    assert client.lookup(ns, raw[: 1025 * 32]) == 1025
    assert client.lookup(ns, hashes([*range(1100), 10**6, *range(1100, 1200)])) == 1100
    got = client.get(ns, raw)
    assert len(got) == total and all(np.array_equal(a, b) for a, b in zip(got, bodies, strict=True))
    with client.lease(ns, raw) as blocks:
        cap = client.status()["arena_bytes"] // 4 // 4096
        assert len(blocks) == cap and blocks.reason.startswith("full, retry"), (
            "no session holds more than a quarter of the arena"
        )
        assert is_body(blocks[cap - 1], cap - 1)
    with client.lease(ns, raw[: 3000 * 32]) as blocks:
        assert len(blocks) == 3000 and blocks.reason == ""
    assert client.delete(ns, raw) == total
    with client.fill(ns, raw[: 2500 * 32]) as slots:
        for n, slot in enumerate(slots):
            slot[:] = bodies[n]
    assert slots.sealed == 2500


# Mistakes, limits, absence


def test_a_callers_mistakes_raise_invalid(client: Patient) -> None:
    ns = client.register(description(NBYTES, model="mistakes"))
    for call in (
        lambda: client.lookup(ns, b"x" * 33),
        lambda: client.lookup(ns, [b"x" * 31]),
        lambda: client.lookup(ns, hashes([1]), context=b"short"),
        lambda: client.lookup(ns, hashes([1]), range_=Range(1)),
        lambda: client.lookup(ns, hashes([1]), range_=Range(0, (1, 1))),
        lambda: client.lookup(ns, hashes([1]), range_=Range(0, (0, 1), (0, 2))),
        lambda: client.put(ns, hashes([1, 2]), [body(1, NBYTES)]),
        lambda: client.put(ns, hashes([1]), [body(1, NBYTES - 1)]),
        lambda: client.put(ns, hashes([1]), [np.zeros((2, 2 * NBYTES), np.uint8)[:, :NBYTES:2]]),
        lambda: client.get(ns, [b""]),
        lambda: client.delete(ns, b"x"),
        lambda: client.prefetch(ns, b"x"),
        lambda: client.flush(ns, b"x"),
        lambda: client.fill(ns, b"x").__enter__(),
        lambda: client.lease(ns, b"x").__enter__(),
        lambda: Client("tcp:localhost:1"),
        lambda: Client(""),
    ):
        with pytest.raises(Invalid):
            call()
    assert client.lookup(ns, hashes([1])) == 0


def test_a_full_session_hears_so_at_once_and_others_go_on(client: Patient, daemon: Daemon) -> None:
    ns = client.register(description(MiB, model="full"))
    cap = client.status()["arena_bytes"] // 4 // slot_bytes(MiB)
    with ExitStack() as stack:
        held = stack.enter_context(client.fill(ns, hashes(range(cap))))
        assert held.reason == ""
        with client.fill(ns, hashes([10_000])) as more:
            assert more[0] is None and more.reason.startswith("full, retry: this session holds")
        assert more.sealed == 0
        answer = client.put(ns, hashes([10_000]), [body(1, MiB)])
        assert answer == 0 and answer.reason.startswith("full, retry")
        with daemon.client() as other:
            put(other, ns, range(20_000, 20_000 + cap))
    assert client.lookup(ns, hashes(range(cap))) == cap, "what the full session had reserved was sealed"


def test_nobody_there_is_a_miss_and_never_an_error(tmp_path: Any) -> None:
    with Client(f"unix:{tmp_path}/nobody.sock") as client:
        ns = client.register(description(NBYTES))
        for _ in range(3):
            for answer in (
                client.lookup(ns, hashes([1])),
                client.put(ns, hashes([1]), [body(1, NBYTES)]),
                client.delete(ns, hashes([1])),
                client.prefetch(ns, hashes([1])),
                client.flush(ns, hashes([1])),
            ):
                assert answer == 0 and answer.reason.startswith("no daemon at")
            bodies = client.get(ns, hashes([1]))
            assert bodies == [] and bodies.reason.startswith("no daemon at")
            with client.lease(ns, hashes([1])) as blocks:
                assert list(blocks) == [] and len(blocks) == 0 and blocks.reason.startswith("no daemon at")
            with client.fill(ns, hashes([1, 2])) as slots:
                assert list(slots) == [None, None] and slots.reason.startswith("no daemon at")
            assert slots.sealed == 0
            for answer in client.lookup_runs(ns, [(Range(), hashes([1])), (Range(), hashes([2]))]):
                assert answer == 0 and answer.reason.startswith("no daemon at")
        with pytest.raises(Unavailable):
            client.status()
        with pytest.raises(Unavailable):
            client.explain(description(NBYTES))


def test_a_client_that_is_forgotten_gives_everything_back(daemon: Daemon) -> None:
    client = daemon.client()
    ns = client.register(description(NBYTES, model="forgotten"))
    put(client, ns, range(3))
    until(lambda: daemon.status()["sessions"] == 2, "its session and the asker's")
    del client
    gc.collect()
    daemon.quiet()


def test_one_registered_namespace_may_serve_two_clients_and_two_daemons(client: Patient, daemon: Daemon) -> None:
    ns = client.register(description(NBYTES, model="shared"))
    put(client, ns, [1])
    with Daemon() as elsewhere, elsewhere.client() as far, daemon.client() as near:
        put(far, far.register(description(NBYTES, model="first")), [9])  # so that handles differ
        assert near.lookup(ns, hashes([1])) == 1
        assert far.lookup(ns, hashes([1])) == 0
        put(far, ns, [2])
        near.close()
        assert [client.lookup(ns, hashes([n])) for n in (1, 2)] == [1, 0]
        assert [far.lookup(ns, hashes([n])) for n in (1, 2)] == [0, 1]


# Many at once


def test_threads_share_one_client(client: Patient, daemon: Daemon) -> None:
    ns = client.register(description(NBYTES, model="threads"))
    failures: list[BaseException] = []
    start = threading.Barrier(24)

    def work(k: int) -> None:
        try:
            start.wait(30)
            mine = range(1000 * k, 1000 * k + 40)
            put(client, ns, mine)
            for n in mine:
                assert client.lookup(ns, hashes([n])) == 1
            with client.lease(ns, hashes(mine)) as blocks:
                assert [is_body(view, n) for n, view in zip(mine, blocks, strict=True)] == [True] * 40
                assert all(is_body(one, n) for n, one in zip(mine, client.get(ns, hashes(mine)), strict=True))
            assert client.delete(ns, hashes(mine)) == 40
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(24)]
    for thread in threads:
        thread.start()
    most = 0
    for thread in threads:
        while thread.is_alive():
            most = max(most, daemon.status()["sockets"])
            thread.join(0.05)
    assert failures == []
    assert most <= 1 + 16 + 2, "an anchor, 16 calls at once, and this test's own, of which one may be just leaving"
    until(lambda: daemon.status()["held_bytes"] == 0, "the releases have come")
    assert client.status(check_integrity=True)["held_bytes"] == 0


def test_callers_beyond_the_sixteenth_wait_for_a_socket(client: Patient, daemon: Daemon) -> None:
    ns = client.register(description(NBYTES, model="queue"))
    put(client, ns, [1])
    start = threading.Barrier(41)
    found: list[Answer] = []

    def ask() -> None:
        start.wait(PATIENCE)
        found.append(client.lookup(ns, hashes([1])))

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    with daemon.stopped():
        start.wait(PATIENCE)
        until(
            lambda: client.lookup(ns, hashes([1]), deadline=0.05).reason == "all 16 sockets of this client are busy",
            "the pool is exhausted",
        )
    for thread in threads:
        thread.join(PATIENCE)
    assert len(found) == 40
    assert all(answer == 1 or answer.reason.startswith(("no answer within", "the daemon at")) for answer in found), [
        a.reason for a in found
    ]
    assert client.lookup(ns, hashes([1])) == 1


WRITER = """
client = Patient(ADDRESS)
ns = client.register(description(ARGS[0], model=ARGS[1]))
while True:
    first, count, shift = hear()
    numbers = range(first, first + count)
    say([int(client.put(ns, hashes(numbers), [body(n + shift, ARGS[0]) for n in numbers])), ""])
"""

READER = """
client = Patient(ADDRESS)
ns = client.register(description(ARGS[0], model=ARGS[1]))
while True:
    first, count = hear()
    say([hashlib.sha256(one).hexdigest() for one in client.get(ns, hashes(range(first, first + count)))])
"""


def test_one_process_writes_and_another_reads_the_same_bytes(daemon: Daemon) -> None:
    with Peer(WRITER, daemon, 50_000, "pair") as writer, Peer(READER, daemon, 50_000, "pair") as reader:
        import hashlib

        assert writer.ask([0, 200, 0]) == [200, ""]
        assert reader.ask([0, 210]) == [hashlib.sha256(body(n, 50_000)).hexdigest() for n in range(200)]


def test_racing_writers_leave_one_whole_copy(daemon: Daemon) -> None:
    before = daemon.status()
    rounds, count = 20, 60
    with Peer(WRITER, daemon, 4000, "race") as a, Peer(WRITER, daemon, 4000, "race") as b, daemon.client() as client:
        ns = client.register(description(4000, model="race"))
        for n in range(rounds):
            a.say([n * count, count, 0])
            b.say([n * count, count, 5_000_000])
            assert a.hear()[0] == b.hear()[0] == count, "the loser hears that the blocks are there"
        for n, one in enumerate(client.get(ns, hashes(range(rounds * count)))):
            assert is_body(one, n) or is_body(one, n + 5_000_000), "one writer's copy, whole"
        after = client.status(check_integrity=True)
    sealed, already = (after[name] - before[name] for name in ("sealed_blocks_total", "already_blocks_total"))
    assert sealed == rounds * count and already + sealed <= 2 * rounds * count
    assert (
        after["known_blocks"] - before["known_blocks"] + after["evicted_blocks_total"] - before["evicted_blocks_total"]
        == sealed
    )
