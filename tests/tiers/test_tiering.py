"""All tiers as the verbs see them: waiting within limits, faults of every kind, and races of deletes and puts with
copies up and down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvtier.protocol.stops import Stop
from tests.support.daemon import PATIENCE, until
from tests.support.faulty_tier import FaultyTier, every
from tests.support.inside import MiB
from tests.support.memory_tier import MemoryTier
from tests.support.tiering import Counting, Works


def test_whoever_waits_for_a_hanging_tier_goes_in_time(works: Works, tier: Counting) -> None:
    works.chill(1)
    tier.flowing.clear()
    began = time.monotonic()
    works.bring(1, within=0.1)
    assert 0.09 < time.monotonic() - began < PATIENCE
    _, _, stop = works.store.lease(works.store.account("t"), works.one.keys([1]))
    assert stop == Stop.COLD
    tier.flowing.set()
    until(lambda: works.warm(1), "it comes up all the same")


def test_few_wait_at_once_and_the_others_go_on(works: Works, tier: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    works.chill(1)
    tier.flowing.clear()
    works.tiering._waiting = threading.BoundedSemaphore(1)
    slow = threading.Thread(daemon=True, target=works.bring, args=(1,))
    slow.start()
    until(lambda: works.tiering._waiting._value == 0, "one waits")
    began = time.monotonic()
    works.bring(1, within=PATIENCE)
    assert time.monotonic() - began < PATIENCE / 3
    tier.flowing.set()
    slow.join(PATIENCE)


def test_whatever_the_tier_does_blocks_are_right_or_absent() -> None:
    with Works(FaultyTier(MemoryTier(64 * MiB), 3, every(0.1))) as works:
        seen = 0
        for first in range(0, 240, 8):
            some = range(first, first + 8)
            works.seal(*some)
            works.flush(*some, within=2.0)
            works.store.forget(works.one.keys(some))
            works.bring(*some, within=2.0)
            seen += len(works.warm(*some))
        assert 80 < seen < 240
        assert works.tiering.alive()


def test_a_tier_that_raises_ends_no_thread(works: Works, tier: Counting, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> list[bool]:
        raise OSError(5, "Input/output error")

    original: Callable[..., list[bool]] = tier.write
    tier.write = broken  # type: ignore[method-assign]
    works.seal(1)
    until(lambda: works.tiering.gauges()["settle_refused_blocks_total"], "it was tried")
    assert not caplog.records, "the tier says what is wrong, once"
    tier.write = lambda blocks: 1 // 0  # type: ignore[assignment,method-assign,return-value]
    works.seal(2)
    until(lambda: caplog.records, "a fault of ours is told")
    assert caplog.records[0].message == "settling failed"
    tier.write = original  # type: ignore[method-assign]
    assert works.flush(1, 2) == 2
    assert works.tiering.alive()


def test_delete_and_put_race_with_both_movers() -> None:
    """KVB-19 (a) with a lower tier: two writers, a reader and a deleter; every block that is seen is right, and in the
    end nothing is doubled."""
    with Works(Counting()) as works:
        stop, failed = threading.Event(), list[BaseException]()
        numbers = range(6)

        def loop(what: Callable[[int], object]) -> threading.Thread:
            def run() -> None:
                n = 0
                try:
                    while not stop.is_set():
                        what(n % len(numbers))
                        n += 1
                except BaseException as error:
                    failed.append(error)

            thread = threading.Thread(daemon=True, target=run)
            thread.start()
            return thread

        ids = iter(range(10**9, 2 * 10**9))
        sessions = [works.session() for _ in range(3)]

        def write(session: object) -> Callable[[int], object]:
            return lambda n: works.put(session, next(ids), works.one, [n])  # type: ignore[arg-type]

        def read(n: int) -> None:
            works.store.forget(works.one.keys([n]))
            works.bring(n, within=0.05)
            id_ = next(ids)
            offsets, _ = sessions[2].lease(id_, works.one.keys([n]))
            if offsets:
                assert works.holds(offsets[0], works.one, n)
                sessions[2].release(id_, ())

        def remove(n: int) -> None:
            works.store.delete(works.one.keys([n]))
            time.sleep(0.001)

        threads = [loop(write(sessions[0])), loop(write(sessions[1])), loop(read), loop(remove)]
        time.sleep(1.0)
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert not failed, failed[0]
        for session in sessions:
            session.end()
        until(lambda: not works.tiering.gauges()["settle_queue_blocks"], "the queue is empty")
        works.store.delete(works.one.keys(numbers))
        assert works.store.gauges()["used_bytes"] == 0
        assert works.tier.gauges()["blocks"] == 0, "deleted means deleted everywhere"
