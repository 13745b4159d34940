"""Who goes first, as pure functions over ages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier import policy

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
