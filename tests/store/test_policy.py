"""Who goes first, as pure functions over ages."""

from __future__ import annotations

import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.store import policy

ages = st.dictionaries(st.integers(1, 8), st.integers(0, 20))


def test_nobody_can_give_where_nothing_is_idle() -> None:
    assert policy.source(1, {}) is None
    assert policy.slab_to_empty({}) is None


def test_the_class_with_the_oldest_block_gives() -> None:
    assert policy.source(1, {1: 30, 2: 10, 3: 20}) == 2
    assert policy.source(2, {1: 30, 2: 10, 3: 20}) == 2


def test_the_own_class_gives_when_it_is_as_old_as_any() -> None:
    """That evicts one block, where another size would lose a whole slab."""
    assert policy.source(3, {1: 10, 2: 10, 3: 10}) == 3
    assert policy.source(9, {2: 10, 1: 10}) == 1, "else the same one, whatever the order"


def test_the_slab_that_is_oldest_on_average_is_emptied() -> None:
    assert policy.slab_to_empty({7: 5.0, 3: 2.5, 4: 2.5, 1: 9.0}) == 3


@given(own=st.integers(1, 8), oldest=ages)
def test_who_gives_has_a_block_no_younger_than_any(own: int, oldest: dict[int, int]) -> None:
    before = dict(oldest)
    giver = policy.source(own, oldest)
    assert oldest == before
    if giver is None:
        assert not oldest
    else:
        assert oldest[giver] == min(oldest.values())
        assert giver == own or own not in oldest or oldest[own] > oldest[giver]


@given(ages.map(lambda found: {slab: float(age) for slab, age in found.items()}))
def test_an_emptied_slab_is_no_younger_than_any(found: dict[int, float]) -> None:
    slab = policy.slab_to_empty(found)
    assert slab is None if not found else found[slab] == min(found.values())  # type: ignore[index]


def test_shares_leave_room_for_others() -> None:
    assert 0 < policy.PIN_SHARE < policy.SESSION_SHARE < policy.TENANT_SHARE < 1


def test_the_ssd_takes_what_was_used_again_and_the_rest_while_there_is_budget() -> None:
    assert policy.admit(1, 0.0) and policy.admit(7, 0.1)
    assert policy.admit(0, 1.0) and not policy.admit(0, 0.5) and not policy.admit(0, 0.0)


def test_the_tick_of_a_moment() -> None:
    marks = [(10.0, 100), (20.0, 150), (30.0, 400)]
    assert [policy.tick_before(marks, moment) for moment in (5.0, 10.0, 29.9, 99.0)] == [0, 100, 150, 400]


@given(st.integers(0, 2**50))
def test_an_age_is_in_its_bucket(age: int) -> None:
    at = policy.bucket(age)
    assert policy._START[at] <= age and (age < policy._START[at + 1] or at == policy.BUCKETS - 1)
    assert policy.bucket(age) <= policy.bucket(age + 1)
    assert policy.census(np.array([3]), np.array([age])).ravel()[3 * policy.BUCKETS + at] == 1.0


def test_before_anything_is_known_older_is_worth_less_whatever_the_rank() -> None:
    worth = policy.Reuse().worth
    assert all(rank == worth[0] for rank in worth)
    assert all(a > b for a, b in zip(worth[0][1:60], worth[0][2:61], strict=True))


def test_a_rank_that_comes_back_is_worth_more() -> None:
    reuse = policy.Reuse()
    for age in range(100, 200):
        reuse.hit(2, age)
    reuse.gone(np.zeros(100, np.int64), np.arange(100, 200) * 50)
    reuse.learn(np.zeros((policy.RANKS, policy.BUCKETS)))
    assert reuse.worth[2][policy.bucket(120)] > 5 * reuse.worth[0][policy.bucket(120)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, policy.RANKS - 1), st.integers(0, 10**6)), max_size=60))
def test_worth_never_grows_with_age_nor_falls_with_rank(seen: list[tuple[bool, int, int]]) -> None:
    """Else a head could go before its tail."""
    reuse = policy.Reuse()
    for came, rank, age in seen:
        if came:
            reuse.hit(rank, age)
        else:
            reuse.gone(np.array([rank]), np.array([age]))
    reuse.learn(np.zeros((policy.RANKS, policy.BUCKETS)))
    worth = np.array(reuse.worth)
    assert np.isfinite(worth).all() and (worth >= 0).all()
    assert (np.diff(worth, axis=1) <= 0).all() and (np.diff(worth, axis=0) >= 0).all()


def ghost_key(n: int) -> bytes:
    """Of the first set where there are two; each has a tag of its own."""
    return (2 * n << 20 | n).to_bytes(8, sys.byteorder) + bytes(24)


def test_ghosts_are_remembered_once_and_the_oldest_of_a_set_goes() -> None:
    ghosts = policy.Ghosts(1, 1)  # two sets of four
    keys = list(map(ghost_key, range(5)))
    for n, key in enumerate(keys[:4]):
        assert not len(ghosts.remember([key], [3], [10 + n]))
    gone = ghosts.remember([keys[4]], [7], [20])
    assert policy.rank_of(gone).tolist() == [3] and policy.tick_of(gone).tolist() == [10]
    assert ghosts.recall(keys[:1]) == {}
    assert ghosts.recall([keys[0], keys[4], keys[2]]) == {1: (7, 20), 2: (3, 12)}
    assert ghosts.recall(keys) == {1: (3, 11), 3: (3, 13)}
    assert ghosts.living(100).sum() == 0


def test_ghosts_that_wait_for_the_table_are_remembered_too() -> None:
    ghosts = policy.Ghosts(320, 10)
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
    """Model: the last rank and tick of a key that was remembered and not recalled since; a ghost may be missing, never wrong."""
    ghosts, model = policy.Ghosts(*size), dict[int, tuple[int, int]]()
    for tick, (n, rank, back) in enumerate(steps, 1):
        if back:
            found = ghosts.recall([ghost_key(n)])
            assert not found or found == {0: model.get(n)}
            model.pop(n, None)
        elif n not in model:
            ghosts.remember([ghost_key(n)], [rank], [tick])
            model[n] = (rank, tick)


def test_ghosts_cost_no_more_than_a_hundred_bytes_a_block() -> None:
    assert policy.Ghosts(10_000).nbytes <= 100 * 10_000
