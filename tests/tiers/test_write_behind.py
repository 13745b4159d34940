"""Write-behind: blocks copied down over a tier that works, hangs and refuses, within a budget."""

from __future__ import annotations

import threading
import time

import pytest

from kvtier.tiers import write_behind
from kvtier.tiers.write_behind import Budget, WriteBehind
from tests.support.daemon import PATIENCE, until
from tests.support.inside import Inside, KiB, MiB, Space
from tests.support.memory_tier import MemoryTier
from tests.support.tiering import Counting, Works


def test_sealed_blocks_are_settled_and_outlive_the_arena(works: Works) -> None:
    works.chill(1, 2, 3)
    assert works.warm(1, 2, 3) == []
    assert works.store.lookup_tiers(works.one.keys([1, 2, 3, 4])) == (3, 0)
    works.bring(1, 2, 3, 4)
    assert works.warm(1, 2, 3, 4) == [1, 2, 3]
    assert works.store.lookup_tiers(works.one.keys([1, 2, 3, 4])) == (3, 3)
    gauges = works.tiering.gauges()
    assert (gauges["settled_blocks_total"], gauges["promoted_blocks_total"]) == (3, 3)


def test_settling_takes_the_checksum_once(works: Works) -> None:
    works.settle(1)
    (row,) = works.store.hold(account := works.store.account_for_moves("t"), works.one.keys([1]), MiB).values()
    assert works.store.checksums([row]) != [0]
    works.store.let_go(account, [row])


def test_a_hanging_tier_holds_up_nobody_and_little_of_the_arena(works: Works, tier: Counting) -> None:
    tier.flowing.clear()
    works.seal(*range(40))
    assert tier.held.wait(PATIENCE)
    assert works.store.gauges()["leased_bytes"] <= works.store.capacity // write_behind.ARENA_SHARE
    for n in range(100, 300, 10):
        works.seal(*range(n, n + 10))  # evicts what is not held, at once
    assert works.flush(299, within=0.05) == 0
    assert works.warm(299) == [299]
    tier.flowing.set()
    assert works.flush(299) == 1


def test_a_full_queue_drops_the_youngest_and_counts_them(tier: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "MAX_QUEUE", 8)
    with Works(tier) as works:
        tier.flowing.clear()
        works.seal(0)
        assert tier.held.wait(PATIENCE)
        works.seal(*range(1, 21))
        gauges = works.tiering.gauges()
        assert gauges["settle_queue_blocks"] == 9
        assert gauges["settle_dropped_blocks_total"] == 12
        tier.flowing.set()
        assert works.flush(*range(9)) == 9
        assert tier.find(works.one.keys([9, 20])) == [False, False]
        assert works.flush(*range(21)) == 21, "a flush gets them settled"


def test_a_refusing_tier_is_asked_again_with_pauses_within_a_flush(works: Works, tier: Counting) -> None:
    tier.refusing = True
    works.seal(1)
    until(lambda: tier.writes, "it was offered")
    asked = len(tier.writes)
    assert works.flush(1, within=0.5) == 0
    assert 1 <= len(tier.writes) - asked <= 8, "backed off, not a busy loop"
    asked = len(tier.writes)
    time.sleep(0.1)
    assert len(tier.writes) == asked, "one try a put, none after the flush"
    tier.refusing = False
    assert works.flush(1) == 1
    assert works.tiering.gauges()["settle_refused_blocks_total"] >= 2


def test_flush_counts_a_leading_part(works: Works) -> None:
    works.seal(1, 2, 4)
    assert works.flush(1, 2, 3, 4) == 2
    assert works.flush(9, 1) == 0
    assert works.flush() == 0


def test_a_block_that_was_written_over_is_not_settled_and_goes(works: Works, tier: Counting) -> None:
    """A client with a writable mapping breaks the law: the copy in memory is no longer what was sealed."""
    tier.flowing.clear()
    works.seal(0)
    assert tier.held.wait(PATIENCE)
    works.seal(1, 2)
    session = works.session()
    (offset,), _ = session.lease(1, works.one.keys([1]))
    works.arena.array[offset + 40] ^= 1
    session.end()
    tier.flowing.set()
    assert works.flush(2) == 1
    until(lambda: works.tiering.gauges()["settle_spoiled_blocks_total"] == 1, "it is noticed")
    assert works.store.known_each(works.one.keys([1, 2])) == [False, True]


def test_what_is_deleted_while_it_is_settled_does_not_come_back(works: Works, tier: Counting) -> None:
    tier.flowing.clear()
    works.seal(1, 2)
    assert tier.held.wait(PATIENCE)
    assert works.store.delete(works.one.keys([1])) == 1
    tier.flowing.set()
    assert works.flush(2) == 1
    until(lambda: not works.tiering.gauges()["settle_queue_blocks"], "the queue is empty")
    assert tier.find(works.one.keys([1, 2])) == [False, True]
    works.settle(1)
    assert tier.find(works.one.keys([1])) == [True], "stored anew, it is settled anew"


def test_a_delete_waits_for_the_write_under_way(works: Works, tier: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the block is known below for a moment after the answer, and for good after a kill in that moment."""
    monkeypatch.setattr(write_behind, "SETTLING", PATIENCE)
    tier.flowing.clear()
    works.seal(1, 2)
    assert tier.held.wait(PATIENCE)
    done: list[list[bool]] = []

    def delete() -> None:
        works.store.delete(works.one.keys([1]))
        done.append(works.store.known_each(works.one.keys([1, 2])))

    thread = threading.Thread(target=delete, daemon=True)
    thread.start()
    time.sleep(0.1)
    assert not done, "it waits"
    tier.flowing.set()
    thread.join(PATIENCE)
    assert done == [[False, True]]


def test_closing_drains_the_queue_and_a_hanging_tier_does_not_keep_it(tier: Counting) -> None:
    with Works(tier) as works:
        works.seal(*range(60))
        works.tiering.close(PATIENCE)
        assert sum(tier.writes) == 60
    tier = Counting()
    with Works(tier) as works:
        tier.flowing.clear()
        works.seal(1)
        assert tier.held.wait(PATIENCE)
        began = time.monotonic()
        threading.Timer(0.2, tier.flowing.set).start()
        works.tiering.close(0.05)
        assert time.monotonic() - began < PATIENCE


def test_budget_per_second_lends_a_second_and_is_paid_back() -> None:
    budget = Budget(per_second=1000)
    assert budget.wait(50.0) == 0
    budget.spend(1000, 50.0)
    assert budget.wait(50.0) == 0
    budget.spend(500, 50.0)
    assert budget.wait(50.0) == pytest.approx(0.5)
    assert budget.wait(50.5) == 0
    budget.spend(3000, 1000.0)
    assert budget.wait(1000.0) == pytest.approx(2.0), "not more than a second is saved up"


def test_budget_per_day_begins_anew_after_a_day() -> None:
    budget = Budget(per_day=1000)
    budget.spend(999, 5.0)
    assert budget.wait(6.0) == 0
    budget.spend(10, 6.0)
    assert budget.wait(7.0) == pytest.approx(86_398.0)
    assert budget.wait(5.0 + 86_400) == 0
    budget.spend(10, 5.0 + 86_401)
    assert budget.wait(5.0 + 86_402) == 0


def test_no_budget_is_no_limit() -> None:
    budget = Budget()
    for now in range(3):
        budget.spend(2**50, float(now))
        assert budget.wait(float(now)) == 0


def test_a_spent_day_drops_and_counts(tier: Counting) -> None:
    with Works(tier, Budget(per_day=40 * KiB)) as works:
        works.settle(1, 2, 3)
        works.seal(*range(10, 20))
        until(lambda: works.tiering.gauges()["settle_dropped_blocks_total"] == 10, "nothing waits for tomorrow")
        assert works.flush(10, within=0.1) == 0
        assert works.store.gauges()["leased_blocks"] == 0


def test_the_share_of_a_budget_that_is_left() -> None:
    assert Budget().left(5.0) == 1.0
    budget = Budget(per_second=1000, per_day=10_000)
    assert budget.left(50.0) == 1.0
    budget.spend(600, 50.0)
    assert budget.left(50.0) == pytest.approx(0.4) and budget.left(50.1) == pytest.approx(0.5)
    assert budget.left(60.0) == pytest.approx(0.94), "of the day"
    assert budget.left(50.0 + 86_401) == 1.0
    budget.spend(3000, 60.0)
    assert budget.left(60.0) < 0


def test_a_scarce_budget_is_for_what_was_used_again(tier: Counting) -> None:
    """Under a day's budget of 20 slots: what was used once is written while half is left, then what is used a second
    time, and what a flush names."""
    with Works(tier, Budget(per_day=20 * 16 * KiB)) as works:
        for n in range(30):  # each written or left out before the next is sealed
            works.seal(n)
            until(
                lambda n=n: (
                    sum(works.tiering.gauges()[f"{name}_blocks_total"] for name in ("settled", "settle_dropped"))
                    == n + 1
                ),
                "each is judged",
            )
        here = [n for n in range(30) if tier.find(works.one.keys([n]))[0]]
        assert here == list(range(10)) and works.tiering.gauges()["settle_dropped_blocks_total"] == 20
        works.warm(25)
        until(lambda: tier.find(works.one.keys([25]))[0], "it is offered again at its second use")
        assert works.flush(26) == 1
        written = tier.writes.copy()
        works.warm(25, 3)
        works.seal(50)
        until(lambda: works.tiering.gauges()["settle_dropped_blocks_total"] == 21, "everything was looked at")
        assert tier.writes == written, "what is there is not written again"


def test_a_small_budget_slows_and_holds_nothing_meanwhile(tier: Counting) -> None:
    with Works(tier, Budget(per_second=32 * KiB)) as works:
        began = time.monotonic()
        works.seal(*range(8))  # 128 KiB: a second's burst, then 3 s
        until(lambda: tier.writes, "the first batch")
        until(lambda: works.store.gauges()["leased_blocks"] == 0, "nothing is held while it waits")
        assert works.flush(*range(8)) == 8
        assert time.monotonic() - began > 0.5


def test_a_write_behind_ends_when_it_is_closed() -> None:
    with Inside() as inside:
        lone = WriteBehind(inside.store, MemoryTier(MiB))
        assert lone.alive()
        lone.close(0.1)
        assert not lone.alive()
        assert isinstance(inside.space(), Space)
