"""Copies between the tiers, in one process: the settler, the promoter and what the store sees of both, over tiers that work, hang, refuse and lie."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvtier.errors import Unavailable
from kvtier.protocol.stops import Stop
from kvtier.tiers import write_behind as settling
from kvtier.tiers.tier import Outgoing
from kvtier.tiers.tiering import Tiering
from kvtier.tiers.write_behind import Budget, WriteBehind
from tests.support.daemon import PATIENCE, until
from tests.support.faulty_tier import FaultyTier, Rates, every
from tests.support.inside import Inside, KiB, MiB, Space
from tests.support.memory_tier import MemoryTier

BODY = 15 * KiB  # slots of 16 KiB: 64 in an arena of 1 MiB


class Counting(MemoryTier):
    """Counts calls; refuses, or hangs, when told to."""

    def __init__(self, capacity: int = 64 * MiB) -> None:
        super().__init__(capacity)
        self.writes: list[int] = []
        self.refusing = False
        self.failing = 0
        self.flowing = threading.Event()
        self.flowing.set()
        self.held = threading.Event()

    def write(self, blocks: Sequence[Outgoing]) -> list[bool]:
        self._hang()
        self.writes.append(len(blocks))
        if self.refusing:
            return [False] * len(blocks)
        return super().write(blocks)

    def read(self, key: bytes, slot: memoryview, nbytes: int) -> int:
        self._hang()
        if self.failing:
            self.failing -= 1
            with self._lock:
                self._reads += 1
            raise Unavailable("not now")
        return super().read(key, slot, nbytes)

    def _hang(self) -> None:
        if not self.flowing.is_set():
            self.held.set()
            assert self.flowing.wait(PATIENCE)


class Works(Inside):
    """A store over one tier."""

    def __init__(self, tier: MemoryTier | FaultyTier, budget: Budget | None = None) -> None:
        super().__init__()
        self.tier = tier
        self.tiering = Tiering(self.store, [tier], {tier.name: budget} if budget else None)
        self.one = self.space(BODY)
        self.writer = self.session()
        self._id = 0

    def __exit__(self, *exc: object) -> None:
        if isinstance(self.tier, Counting):
            self.tier.flowing.set()
        self.tiering.close(1.0)
        super().__exit__(*exc)  # type: ignore[arg-type]

    def seal(self, *numbers: int) -> None:
        for first in range(0, len(numbers), 10):  # a session may hold 16 at once
            self._id += 1
            part = numbers[first : first + 10]
            assert self.put(self.writer, self._id, self.one, part) == len(part)

    def flush(self, *numbers: int, within: float = PATIENCE) -> int:
        return self.tiering.flush(self.one.keys(numbers), self.one.namespace, time.monotonic() + within)

    def settle(self, *numbers: int) -> None:
        self.seal(*numbers)
        assert self.flush(*numbers) == len(numbers)

    def chill(self, *numbers: int) -> None:
        """Settles these and forgets them in the arena."""
        self.settle(*numbers)
        assert len(self.store.forget(self.one.keys(numbers))) == len(numbers)

    def bring(self, *numbers: int, within: float = PATIENCE) -> None:
        self.tiering.bring_up(self.one.keys(numbers), self.one.namespace, self.one.extents, time.monotonic() + within)

    def warm(self, *numbers: int) -> list[int]:
        """Those that are in the arena, each with the right bytes."""
        session, here = self.session(), []
        for n in numbers:
            self._id += 1
            offsets, _ = session.lease(self._id, self.one.keys([n]))
            if offsets:
                assert self.holds(offsets[0], self.one, n)
                here.append(n)
        session.end()
        return here


@pytest.fixture
def tier() -> Counting:
    return Counting()


@pytest.fixture
def works(tier: Counting) -> Iterator[Works]:
    with Works(tier) as made:
        yield made


# --- down


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
    (row,) = works.store.hold(account := works.store.mover("t"), works.one.keys([1]), MiB).values()
    assert works.store.checksums([row]) != [0]
    works.store.let_go(account, [row])


def test_a_hanging_tier_holds_up_nobody_and_little_of_the_arena(works: Works, tier: Counting) -> None:
    tier.flowing.clear()
    works.seal(*range(40))
    assert tier.held.wait(PATIENCE)
    assert works.store.gauges()["leased_bytes"] <= works.store.capacity // settling.ARENA_SHARE
    for n in range(100, 300, 10):
        works.seal(*range(n, n + 10))  # evicts what is not held, at once
    assert works.flush(299, within=0.05) == 0
    assert works.warm(299) == [299]
    tier.flowing.set()
    assert works.flush(299) == 1


def test_a_full_queue_drops_the_youngest_and_counts_them(tier: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "MAX_QUEUE", 8)
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
        assert works.flush(*range(21)) == 21, "whoever asks for them gets them settled"


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
    until(lambda: not works.tiering.gauges()["settle_queue_blocks"], "the settler is done")
    assert tier.find(works.one.keys([1, 2])) == [False, True]
    works.settle(1)
    assert tier.find(works.one.keys([1])) == [True], "stored anew, it is settled anew"


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


# --- the budget


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
    """Under a day's budget of 20 slots: what was used once is written while half is left, then what is used a second time, and what a flush names."""
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


# --- up


def test_many_readers_of_one_cold_block_make_one_read(works: Works, tier: Counting) -> None:
    """KVB-19 (b)."""
    works.chill(1)
    tier.flowing.clear()
    keys = works.one.keys([1])
    readers = [
        threading.Thread(daemon=True, target=lambda: works.tiering.promoter.wait(keys, time.monotonic() + PATIENCE))
        for _ in range(64)
    ]
    assert all(works.tiering.prefetch(keys, works.one.namespace, works.one.extents) == 1 for _ in range(64))
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
    works.tiering.prefetch(works.one.keys([1]), works.one.namespace, works.one.extents)
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


# --- faults and threads


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
    """KVB-19 (a) with a lower tier: two writers, a reader and a deleter; every block that is seen is right, and in the end nothing is doubled."""
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
        until(lambda: not works.tiering.gauges()["settle_queue_blocks"], "the settler is done")
        works.store.delete(works.one.keys(numbers))
        assert works.store.gauges()["used_bytes"] == 0
        assert works.tier.gauges()["blocks"] == 0, "deleted means deleted everywhere"


def test_quiet_rates_do_nothing() -> None:
    assert Rates() == every(0.0)


def test_settlers_end_with_their_store() -> None:
    with Inside() as inside:
        lone = WriteBehind(inside.store, MemoryTier(MiB))
        assert lone.alive()
        lone.close(0.1)
        assert not lone.alive()
        assert isinstance(inside.space(), Space)
