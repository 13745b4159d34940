"""Promotion: cold blocks copied up, for many readers, with faults, and forgotten meanwhile."""

from __future__ import annotations

import threading
import time

import pytest

from kvtier.protocol.stops import Stop
from tests.support.daemon import PATIENCE, until
from tests.support.tiering import BODY, Counting, Works


def test_many_readers_of_one_cold_block_make_one_read(works: Works, tier: Counting) -> None:
    """KVB-19 (b)."""
    works.chill(1)
    tier.flowing.clear()
    keys = works.one.keys([1])
    readers = [
        threading.Thread(daemon=True, target=lambda: works.tiering.promoter.wait(keys, time.monotonic() + PATIENCE))
        for _ in range(64)
    ]
    assert all(works.tiering.promoter.start(keys, works.one.namespace, works.one.extents) == 1 for _ in range(64))
    for reader in readers:
        reader.start()
    tier.flowing.set()
    for reader in readers:
        reader.join(PATIENCE)
        assert not reader.is_alive()
    assert works.warm(1) == [1]
    assert tier.gauges()["read_blocks_total"] == 1


def test_a_failed_read_ends_all_that_wait_with_at_most_one_more(works: Works, tier: Counting) -> None:
    works.chill(1)
    works.tiering._waiting = threading.BoundedSemaphore(16)  # else those beyond `MAX_WAITING` do not wait
    tier.failing = 1
    answers: list[list[int]] = []
    lock = threading.Lock()

    def read() -> None:
        works.bring(1)
        works.bring(1)
        with lock:
            answers.append(works.warm(1))

    readers = [threading.Thread(daemon=True, target=read) for _ in range(16)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(PATIENCE)
    assert answers == [[1]] * 16
    assert tier.gauges()["read_blocks_total"] == 2
    assert works.tiering.gauges()["promotion_failed_blocks_total"] == 1


def test_a_lost_block_is_a_miss_and_no_longer_cold(works: Works, tier: Counting) -> None:
    works.chill(1, 2)
    kept = tier._kept[works.one.keys([1])[0]]
    tier._kept[works.one.keys([1])[0]] = type(kept)(kept.namespace, bytes(len(kept.slot)), kept.nbytes, kept.checksum)
    works.bring(1, 2)
    assert works.warm(1, 2) == [2]
    assert works.store.lease(works.store.account("t"), works.one.keys([1]))[2] == Stop.MISS
    assert works.tiering.gauges()["promotion_lost_blocks_total"] == 1


def test_nothing_comes_up_where_everything_is_in_use(works: Works) -> None:
    works.chill(1)
    holders = [works.session(tenant) for tenant in "abcde"]
    spaces = [works.space(BODY, tenant) for tenant in "abcde"]
    for holder, space in zip(holders, spaces, strict=True):
        for i in range(16):
            try:
                holder.reserve(i + 1, *space.asked([i]))
            except Exception:
                break
    works.bring(1, within=1.0)
    assert works.warm(1) == []
    assert works.tiering.gauges()["promotion_refused_blocks_total"] == 1
    for holder in holders:
        holder.end()
    works.bring(1)
    assert works.warm(1) == [1]


@pytest.mark.parametrize("when", ["deleted", "dropped"])
def test_what_is_forgotten_while_it_comes_up_stays_forgotten(when: str, works: Works, tier: Counting) -> None:
    works.chill(1)
    tier.flowing.clear()
    works.tiering.promoter.start(works.one.keys([1]), works.one.namespace, works.one.extents)
    assert tier.held.wait(PATIENCE)
    tier.held.clear()
    if when == "deleted":
        assert works.store.delete(works.one.keys([1])) == 1
    else:
        assert works.store.drop(works.one.namespace) == 1
    tier.flowing.set()
    until(lambda: not works.tiering.gauges()["promoting_blocks"], "the promoter is done")
    assert works.store.known_each(works.one.keys([1])) == [False]


def test_a_cancelled_reader_takes_nothing_from_the_others(works: Works, tier: Counting) -> None:
    works.chill(1)
    tier.flowing.clear()
    works.bring(1, within=0.01)  # the first goes away
    other = threading.Thread(daemon=True, target=works.bring, args=(1,))
    other.start()
    tier.flowing.set()
    other.join(PATIENCE)
    assert works.warm(1) == [1] and tier.gauges()["read_blocks_total"] == 1
