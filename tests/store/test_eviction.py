"""The store's order of eviction: the replay's decisions, made by the verbs of a real store over real slots.

What is held follows `policy`: a trace through the store hits as often as in the replay, and no longer does where the
order is least recently used.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli.simulator import Kvtier, Lru, Requests, hit_ratio, load
from kvtier.store import eviction
from kvtier.store.accounts import Account
from kvtier.store.eviction import Eviction
from kvtier.store.ledger import USES, Ledger
from tests.support.daemon import content_hash
from tests.support.inside import Inside, KiB, Space
from tests.support.traces import DATA

ages = st.dictionaries(st.integers(1, 8), st.integers(0, 20))


def test_nobody_can_give_where_nothing_is_idle() -> None:
    assert eviction.source(1, {}) is None
    assert eviction.slab_to_empty({}) is None


def test_the_class_with_the_oldest_block_gives() -> None:
    assert eviction.source(1, {1: 30, 2: 10, 3: 20}) == 2
    assert eviction.source(2, {1: 30, 2: 10, 3: 20}) == 2


def test_the_own_class_gives_when_it_is_as_old_as_any() -> None:
    """That evicts one block, where another size would lose a whole slab."""
    assert eviction.source(3, {1: 10, 2: 10, 3: 10}) == 3
    assert eviction.source(9, {2: 10, 1: 10}) == 1, "else the same one, whatever the order"


def test_the_slab_that_is_oldest_on_average_is_emptied() -> None:
    assert eviction.slab_to_empty({7: 5.0, 3: 2.5, 4: 2.5, 1: 9.0}) == 3


@given(own=st.integers(1, 8), oldest=ages)
def test_who_gives_has_a_block_no_younger_than_any(own: int, oldest: dict[int, int]) -> None:
    before = dict(oldest)
    giver = eviction.source(own, oldest)
    assert oldest == before
    if giver is None:
        assert not oldest
    else:
        assert oldest[giver] == min(oldest.values())
        assert giver == own or own not in oldest or oldest[own] > oldest[giver]


@given(ages.map(lambda found: {slab: float(age) for slab, age in found.items()}))
def test_an_emptied_slab_is_no_younger_than_any(found: dict[int, float]) -> None:
    slab = eviction.slab_to_empty(found)
    assert slab is None if not found else found[slab] == min(found.values())  # type: ignore[index]


def test_shares_leave_room_for_others() -> None:
    assert 0 < eviction.PIN_SHARE < eviction.SESSION_SHARE < eviction.TENANT_SHARE < 1


def test_the_ssd_takes_what_was_used_again_and_the_rest_while_there_is_budget() -> None:
    assert eviction.admit(1, 0.0) and eviction.admit(7, 0.1)
    assert eviction.admit(0, 1.0) and not eviction.admit(0, 0.5) and not eviction.admit(0, 0.0)


def test_the_tick_of_a_moment() -> None:
    marks = [(10.0, 100), (20.0, 150), (30.0, 400)]
    assert [eviction.tick_before(marks, moment) for moment in (5.0, 10.0, 29.9, 99.0)] == [0, 100, 150, 400]


@given(st.integers(0, 2**50))
def test_an_age_is_in_its_bucket(age: int) -> None:
    at = eviction.bucket(age)
    assert eviction._START[at] <= age and (age < eviction._START[at + 1] or at == eviction.BUCKETS - 1)
    assert eviction.bucket(age) <= eviction.bucket(age + 1)
    assert eviction.census(np.array([3]), np.array([age])).ravel()[3 * eviction.BUCKETS + at] == 1.0


def test_before_anything_is_known_older_is_worth_less_whatever_the_use_count() -> None:
    worth = eviction.Reuse().worth
    assert all(count == worth[0] for count in worth)
    assert all(a > b for a, b in zip(worth[0][1:60], worth[0][2:61], strict=True))


def test_a_use_count_that_comes_back_is_worth_more() -> None:
    reuse = eviction.Reuse()
    for age in range(100, 200):
        reuse.hit(2, age)
    reuse.gone(np.zeros(100, np.int64), np.arange(100, 200) * 50)
    reuse.learn(np.zeros((eviction.USES, eviction.BUCKETS)))
    assert reuse.worth[2][eviction.bucket(120)] > 5 * reuse.worth[0][eviction.bucket(120)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, eviction.USES - 1), st.integers(0, 10**6)), max_size=60))
def test_worth_never_grows_with_age_nor_falls_with_the_use_count(seen: list[tuple[bool, int, int]]) -> None:
    """Else a head could go before its tail."""
    reuse = eviction.Reuse()
    for came, count, age in seen:
        if came:
            reuse.hit(count, age)
        else:
            reuse.gone(np.array([count]), np.array([age]))
    reuse.learn(np.zeros((eviction.USES, eviction.BUCKETS)))
    worth = np.array(reuse.worth)
    assert np.isfinite(worth).all() and (worth >= 0).all()
    assert (np.diff(worth, axis=1) <= 0).all() and (np.diff(worth, axis=0) >= 0).all()


def ghost_key(n: int) -> bytes:
    """Of the first set where there are two; each has a tag of its own."""
    return (2 * n << 20 | n).to_bytes(8, sys.byteorder) + bytes(24)


def test_ghosts_are_remembered_once_and_the_oldest_of_a_set_goes() -> None:
    ghosts = eviction.Ghosts(1, 1)  # two sets of four
    keys = list(map(ghost_key, range(5)))
    for n, key in enumerate(keys[:4]):
        assert not len(ghosts.remember([key], [3], [10 + n]))
    gone = ghosts.remember([keys[4]], [7], [20])
    assert eviction.count_of(gone).tolist() == [3] and eviction.tick_of(gone).tolist() == [10]
    assert ghosts.recall(keys[:1]) == {}
    assert ghosts.recall([keys[0], keys[4], keys[2]]) == {1: (7, 20), 2: (3, 12)}
    assert ghosts.recall(keys) == {1: (3, 11), 3: (3, 13)}
    assert ghosts.living(100).sum() == 0


def test_ghosts_that_wait_for_the_table_are_remembered_too() -> None:
    ghosts = eviction.Ghosts(320, 10)
    keys = list(map(ghost_key, range(1, 25)))
    ghosts.remember(keys[:6], [2] * 6, range(1, 7))
    assert ghosts.recall(keys[4:7]) == {0: (2, 5), 1: (2, 6)} and ghosts.recall(keys[4:6]) == {}
    ghosts.remember(keys[6:24], [3] * 18, range(7, 25))
    assert ghosts.living(100).sum() == 22
    assert ghosts.recall([keys[0], keys[4], keys[23]]) == {0: (2, 1), 2: (3, 24)}


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 7), st.booleans()), max_size=120),
    st.sampled_from([(40, 1), (200, 7), (2000, 1000)]),
)
def test_ghosts_never_say_what_is_not_so(steps: list[tuple[int, int, bool]], size: tuple[int, int]) -> None:
    """Model: the last use count and tick of a key that was remembered and not recalled since; a ghost may be missing,
    never wrong."""
    ghosts, model = eviction.Ghosts(*size), dict[int, tuple[int, int]]()
    for tick, (n, count, back) in enumerate(steps, 1):
        if back:
            found = ghosts.recall([ghost_key(n)])
            assert not found or found == {0: model.get(n)}
            model.pop(n, None)
        elif n not in model:
            ghosts.remember([ghost_key(n)], [count], [tick])
            model[n] = (count, tick)


def test_ghosts_cost_no_more_than_a_hundred_bytes_a_block() -> None:
    assert eviction.Ghosts(10_000).nbytes <= 100 * 10_000


# --- the order kept up over a real store

BODY = 3 * KiB  # slots of 4 KiB
SLOT = 4 * KiB
CAPACITY = 2048  # blocks


class Cache:
    """A store as the replay's policies are: a request leases the prefix that is there and puts the rest, `batch` blocks
    a call."""

    def __init__(self, inside: Inside, batch: int) -> None:
        self.store, self.batch = inside.store, batch
        self.space: Space = inside.space(BODY)
        self.account: Account = self.store.account("t")
        self._keys: dict[int, bytes] = {}

    def key(self, block: int) -> bytes:
        if block not in self._keys:
            (self._keys[block],) = self.space.keys([block])
        return self._keys[block]

    def has(self, block: int) -> bool:
        return self.store.lookup_each([self.key(block)])[0]

    def use(self, blocks: list[int]) -> None:
        keys = list(map(self.key, blocks))
        rows, _, _ = self.store.lease(self.account, keys)
        self.store.release(self.account, rows)
        for first in range(len(rows), len(blocks), self.batch):
            some = blocks[first : first + self.batch]
            asked = (
                self.space.namespace,
                self.space.resolved,
                bytes(32),
                keys[first : first + self.batch],
                list(map(content_hash, some)),
            )
            reservation, _ = self.store.reserve(self.account, *asked)
            self.store.seal(self.account, reservation, range(len(some)))


def through_a_store(requests: Requests, batch: int) -> float:
    with Inside(CAPACITY * SLOT) as inside:
        assert inside.store.capacity == CAPACITY * SLOT
        ratio = hit_ratio(requests, Cache(inside, batch))  # type: ignore[arg-type]
        assert inside.store.counters.evicted_blocks > 10 * CAPACITY
    return ratio


@pytest.fixture(scope="module")
def requests() -> Requests:
    """The first requests of the conversation trace; the longest is cut to what a session may hold."""
    return [blocks[: CAPACITY // 8] for blocks in load(DATA / "conversation.npz")[:4000]]


@pytest.mark.long
@pytest.mark.parametrize("batch", [256, 32])
def test_a_store_hits_as_often_as_the_replay_says(requests: Requests, batch: int) -> None:
    ours, lru = hit_ratio(requests, Kvtier(CAPACITY)), hit_ratio(requests, Lru(CAPACITY))
    assert ours > lru + 0.03, "else this compares nothing"
    assert through_a_store(requests, batch) == pytest.approx(ours, abs=0.01)


def test_the_comparison_would_see_another_order(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that never learns is least recently used, and so are its hits."""
    monkeypatch.setattr(Eviction, "learn", lambda self: None)
    ours, lru = hit_ratio(requests, Kvtier(CAPACITY)), hit_ratio(requests, Lru(CAPACITY))
    found = through_a_store(requests, 256)
    assert found == pytest.approx(lru, abs=0.002) and found < ours - 0.02


# --- use counts


class Few(Inside):
    """A store of 64 blocks of one namespace, and an account."""

    def __init__(self) -> None:
        super().__init__(64 * SLOT)
        self.one = self.space(BODY)
        self.reader = self.store.account("t")
        self.ledger, self.order = self.store._ledger, self.store._eviction

    def __enter__(self) -> Few:
        return self

    def seal(self, *numbers: int) -> None:
        reservation, _ = self.store.reserve(self.reader, *self.one.asked(numbers))
        self.store.seal(self.reader, reservation, range(len(numbers)))

    def use(self, *numbers: int) -> None:
        rows, _, _ = self.store.lease(self.reader, self.one.keys(numbers))
        assert len(rows) == len(numbers)
        self.store.release(self.reader, rows)

    def counts(self, *numbers: int) -> list[int | None]:
        rows = self.ledger.find_each(self.one.keys(numbers))
        return [None if row is None else self.ledger.uses([row])[0] for row in rows]

    def going(self) -> list[int]:
        """Numbers of the next victims, the first one first."""
        size = self.store._slabs.classes[self.one.slot].index
        number = {key: n for n, key in enumerate(self.one.keys(range(200)))}
        return [number[key] for key in self.ledger.keys(self.order.victims(size, 64))]


def test_a_use_count_is_how_often_a_block_was_used_again_and_never_more_than_its_heads() -> None:
    with Few() as few:
        few.seal(1, 2, 3)
        few.use(1, 2)
        few.use(1)
        assert few.counts(1, 2, 3) == [2, 1, 0]
        few.use(3)
        few.use(3)
        assert few.counts(3) == [2]
        few.use(1, 2, 3)
        assert few.counts(1, 2, 3) == [3, 2, 2]
        few.seal(4)
        few.use(4, 1)
        assert few.counts(4, 1) == [1, 1], "no more than the block before it"
        for _ in range(10):
            few.use(1)
        assert few.counts(1) == [USES - 1]


def test_what_is_leased_already_is_not_used_again() -> None:
    with Few() as few:
        few.seal(1, 2)
        holder = few.session()
        holder.lease(1, few.one.keys([1]))
        few.use(1, 2)
        assert few.counts(1, 2) == [1, 1]
        holder.release(1, ())


def test_a_block_that_comes_back_has_the_use_count_it_had_and_one_more() -> None:
    with Few() as few:
        few.seal(*range(10))
        few.use(*range(4))
        few.use(*range(2))
        for first in range(100, 180, 16):
            few.seal(*range(first, first + 16))
        assert few.counts(*range(10)) == [None] * 10
        few.seal(*range(10))
        assert few.counts(*range(10)) == [3, 3, 2, 2, 1, 1, 1, 1, 1, 1]
        few.seal(50, 51)
        assert few.counts(50, 51) == [0, 0]


def test_what_is_put_behind_a_block_that_is_there_has_no_higher_use_count() -> None:
    with Few() as few:
        few.seal(1, 2, 3)
        few.use(1, 2, 3)
        few.use(1, 2, 3)
        for first in range(100, 180, 16):
            few.seal(*range(first, first + 16))
        few.seal(9)
        few.seal(9, 2, 3)
        assert few.counts(9, 2, 3) == [0, 0, 0]


# --- who moves blocks


def test_what_is_held_to_be_copied_stays_in_its_place_and_use_count() -> None:
    """A chain that is settled in two batches: its head must not become older than its tail."""
    with Few() as few:
        few.seal(*range(1, 9))
        few.seal(20)
        before = few.going()
        mover = few.store.account_for_moves("t")
        for part in (range(1, 5), range(5, 9)):
            rows = few.store.hold(mover, few.one.keys(part), 1 << 20)
            assert few.going() == [n for n in before if n not in part]
            few.store.let_go(mover, list(rows.values()))
        assert few.going() == before == [8, 7, 6, 5, 4, 3, 2, 1, 20] and few.counts(*range(1, 9)) == [0] * 8


def test_a_reader_uses_what_somebody_copies() -> None:
    with Few() as few:
        few.seal(1, 2)
        few.seal(3)
        mover = few.store.account_for_moves("t")
        rows = few.store.hold(mover, few.one.keys([1, 2]), 1 << 20)
        few.use(1)
        few.store.let_go(mover, list(rows.values()))
        assert few.counts(1, 2) == [1, 0] and few.going()[:2] == [2, 3]


def test_a_promoted_block_has_the_use_count_it_had() -> None:
    with Few() as few:
        few.seal(1)
        few.use(1)
        few.use(1)
        for first in range(100, 180, 16):
            few.seal(*range(first, first + 16))
        mover, (key,) = few.store.account_for_moves("t"), few.one.keys([1])
        row = few.store.make_place(mover, few.one.namespace, few.one.extents, key)
        assert row is not None
        assert few.store.finish_place(mover, few.one.namespace, row, 7)
        assert few.counts(1) == [2], "the lease that follows is its use"


# --- victims


@given(
    st.lists(st.tuples(st.integers(0, USES - 1), st.integers(1, 4)), min_size=1, max_size=30),
    st.integers(1, 40),
    st.lists(st.integers(0, 10**6), max_size=4),
    st.booleans(),
)
def test_victims_are_what_is_worth_least_one_after_another(
    puts: list[tuple[int, int]], n: int, held: list[int], learned: bool
) -> None:
    """Naive: of the oldest of each use count the one worth least, found anew for every victim."""
    ledger = Ledger()
    order = Eviction(ledger)
    rows: list[int] = []
    for count, length in puts:
        keys = [(len(rows) + i).to_bytes(32, "little") for i in range(length)]
        made = ledger.reserve(range(len(rows), len(rows) + length), keys, 800, SLOT, 1, 1, bytes([count] * length))
        assert all(ledger.seal(made))
        rows += made
    for keep, place in enumerate(held):
        ledger.lease([rows[place % len(rows)]], keep=bool(keep % 2))
    if learned:
        order._reuse.worth = np.sort(np.random.default_rng(n).random((USES, eviction.BUCKETS)), 1)[:, ::-1].tolist()
    count_of, tick_of = (dict(zip(rows, values, strict=True)) for values in ledger.history(rows)[1:])
    idle = [row for row in rows if not ledger.is_leased(row)]
    left = {count: [row for row in idle if count_of[row] == count] for count in range(USES)}
    for mine in left.values():
        mine.sort(key=lambda row: (tick_of[row], -rows.index(row)))
    wanted: list[int] = []
    while len(wanted) < n and any(left.values()):
        price = {
            r: (order._reuse.worth[r][eviction.bucket(ledger.tick - tick_of[m[0]])], tick_of[m[0]], r)
            for r, m in left.items()
            if m
        }
        wanted.append(left[min(price, key=price.__getitem__)].pop(0))
    assert order.victims(1, n) == wanted
    assert order.least(1) is None if not wanted else order.least(1) is not None
    ledger.check_integrity()


def test_ghosts_of_a_store_cost_no_more_than_a_hundred_bytes_a_block() -> None:
    with Few() as few:
        assert few.order.nbytes == 0
        for first in range(0, 200, 16):
            few.seal(*range(first, first + 16))
        assert 0 < few.order.nbytes <= 100 * 64


@pytest.mark.parametrize("learns", [True, False])
def test_other_sizes_give_what_is_worth_less(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks that come back after more large ones than there is room for: kept once that is learned, never where
    it is not."""
    if not learns:
        monkeypatch.setattr(Eviction, "learn", lambda self: None)
    with Inside(1 << 20) as inside:
        small, large, account = inside.space(BODY), inside.space(7 * KiB), inside.store.account("t")

        def put(space: Space, numbers: range) -> None:
            reservation, _ = inside.store.reserve(account, *space.asked(numbers))
            inside.store.seal(account, reservation, range(len(numbers)))

        hits = []
        for first in range(1000, 1000 + 60 * 144, 144):
            rows, _, _ = inside.store.lease(account, small.keys(range(20)))
            inside.store.release(account, rows)
            hits.append(len(rows))
            if len(rows) < 20:
                put(small, range(20))
            for some in range(first, first + 144, 16):
                put(large, range(some, some + 16))
        assert sum(hits[-20:]) > 300 if learns else not any(hits)
