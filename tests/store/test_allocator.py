"""Slots and slabs by themselves: exact sizes, little waste, slabs that move between sizes, and never a slot that is
lost or given twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import Full, Invalid
from kvtier.format.layout import HEADER_BYTES, MAX_BLOCK_BYTES, SLOT_ALIGN, pad
from kvtier.format.slots import MIN_SLABS, SLAB_BYTES
from kvtier.store.allocator import MAX_CLASSES, SizeClass, Slabs

KiB, MiB = 1024, 1 << 20


LIVE: list[Truth] = []  # of the running test


class Truth:
    """Slabs beside what the test knows to be taken. Every test ends with a comparison of both."""

    def __init__(self, arena_bytes: int) -> None:
        self.slabs = Slabs(arena_bytes)
        self.taken: dict[int, int] = {}  # page -> slot bytes
        LIVE.append(self)

    def take(self, slot: int, n: int) -> list[int]:
        pages = self.slabs.take(self.slabs.size_class(slot), n).tolist()
        for page in pages:
            assert page not in self.taken, "a slot was given twice"
            assert page * SLOT_ALIGN + slot <= self.slabs.usable_bytes, "a slot outside the arena"
            self.taken[page] = slot
        return pages

    def give(self, pages: list[int]) -> None:
        for page in pages:
            del self.taken[page]
        self.slabs.give(pages)

    def check(self) -> None:
        self.slabs.check_integrity(self.taken)
        assert self.slabs.taken_bytes() == sum(self.taken.values()) <= self.slabs.usable_bytes
        spans = sorted((page, page + slot // SLOT_ALIGN) for page, slot in self.taken.items())
        assert all(one[1] <= two[0] for one, two in pairwise(spans)), "two slots overlap"


@pytest.fixture(autouse=True)
def integrity() -> Iterator[None]:
    LIVE.clear()
    yield
    for truth in LIVE:
        truth.check()


def slot_bytes(body: int) -> int:
    return pad(HEADER_BYTES + body, SLOT_ALIGN)


# --- sizes


def test_an_arena_is_cut_into_slabs_of_64_blocks_of_a_mebibyte() -> None:
    slabs = Slabs(2 << 30)
    assert slabs.slab_bytes == SLAB_BYTES == 64 * slot_bytes(MiB)
    assert slabs.count == 31 and slabs.usable_bytes == 31 * SLAB_BYTES


@pytest.mark.parametrize("arena", [8 * SLOT_ALIGN, MiB, 64 * MiB, 8 * SLAB_BYTES - SLOT_ALIGN])
def test_the_slabs_of_a_small_arena_shrink(arena: int) -> None:
    slabs = Slabs(arena)
    assert slabs.count >= MIN_SLABS
    assert slabs.slab_bytes % SLOT_ALIGN == 0
    assert slabs.usable_bytes <= arena < slabs.usable_bytes + MIN_SLABS * SLOT_ALIGN + slabs.slab_bytes


@pytest.mark.parametrize("arena", [0, 1, SLOT_ALIGN, 8 * SLOT_ALIGN - 1])
def test_an_arena_too_small_for_slabs_is_refused(arena: int) -> None:
    with pytest.raises(Invalid, match="at least 32768 bytes"):
        Slabs(arena)


def test_a_block_that_fits_no_slab_is_refused_with_what_would_help() -> None:
    slabs = Slabs(64 * MiB)
    with pytest.raises(Invalid, match=f"at least {8 * (8 * MiB + SLOT_ALIGN)} bytes"):
        slabs.size_class(8 * MiB + SLOT_ALIGN)
    assert not slabs.classes


@pytest.mark.parametrize(
    ("body", "waste"),
    [(MiB, 0.01), (2 * MiB, 0.02), (4 * MiB, 0.02), (8 * MiB, 0.02), (12 * MiB, 0.08), (16 * MiB, 0.02)],
)
def test_large_blocks_waste_little(body: int, waste: float) -> None:
    """Share of the arena that holds no body when it is full: headers, padding and what is left of a slab together."""
    truth = Truth(16 * SLAB_BYTES)
    pages = truth.take(slot_bytes(body), 10**6)
    assert len(pages) * body >= (1 - waste) * truth.slabs.usable_bytes
    assert slot_bytes(body) <= MAX_BLOCK_BYTES + SLOT_ALIGN


@pytest.mark.parametrize("body", [128 * KiB, 256 * KiB, 512 * KiB, MiB])
def test_blocks_of_a_power_of_two_do_not_cost_twice_their_size(body: int) -> None:
    truth = Truth(8 * SLAB_BYTES)
    assert len(truth.take(slot_bytes(body), 10**6)) * body >= (0.99 if body == MiB else 0.96) * truth.slabs.usable_bytes


@given(st.integers(1, 16 * MiB), st.integers(8 * SLAB_BYTES, 12 * SLAB_BYTES))
def test_a_slab_holds_as_many_slots_as_fit(body: int, arena: int) -> None:
    slabs = Slabs(arena)
    size = slabs.size_class(slot_bytes(body))
    per_slab = slabs.slots(size)
    assert per_slab >= 1 and per_slab * size.slot_bytes <= slabs.slab_bytes < (per_slab + 1) * size.slot_bytes
    pages = slabs.take(size, per_slab + 1)
    assert len(pages) == per_slab + 1 and sum(slabs.used) == per_slab + 1
    slabs.check_integrity(dict.fromkeys(pages.tolist(), size.slot_bytes))


# --- taking and giving


def test_take_gives_less_when_there_is_less() -> None:
    truth = Truth(8 * 64 * KiB)
    assert len(truth.take(4 * KiB, 128)) == 128
    assert truth.take(4 * KiB, 1) == []
    assert truth.take(8 * KiB, 1) == [], "nor for another size"
    assert truth.take(4 * KiB, 0) == []


def test_the_lowest_slab_goes_first_because_it_is_backed_by_memory_first() -> None:
    truth = Truth(8 * 64 * KiB)
    assert truth.take(4 * KiB, 16) == list(range(15, -1, -1))
    assert {page // 16 for page in truth.take(4 * KiB, 16)} == {1}


def test_slots_given_back_are_taken_again() -> None:
    truth = Truth(8 * 64 * KiB)
    pages = truth.take(4 * KiB, 128)
    truth.give(pages[10:30])
    assert sorted(truth.take(4 * KiB, 128)) == sorted(pages[10:30])


def test_giving_a_slot_that_was_not_taken_is_noticed() -> None:
    truth = Truth(8 * 64 * KiB)
    with pytest.raises(AssertionError, match="was not taken"):
        truth.slabs.give([3])
    pages = truth.take(4 * KiB, 1)
    truth.give(pages)
    with pytest.raises(AssertionError, match="was not taken"):
        truth.slabs.give(pages)


def test_check_integrity_sees_a_lost_slot_a_doubled_one_and_one_of_another_size() -> None:
    slabs = Slabs(8 * 64 * KiB)
    size = slabs.size_class(4 * KiB)
    pages = slabs.take(size, 3).tolist()
    right = dict.fromkeys(pages, 4 * KiB)
    slabs.check_integrity(right)
    for wrong, words in (
        ({**right, 99: 4 * KiB}, "outside any slab"),
        ({**right, 15: 4 * KiB}, "lost or doubled"),
        (dict.fromkeys(pages[1:], 4 * KiB), "lost or doubled"),
        ({**right, pages[0]: 8 * KiB}, "wrong size"),
    ):
        with pytest.raises(AssertionError, match=words):
            slabs.check_integrity(wrong)
    size.free.append(size.free[0])
    with pytest.raises(AssertionError, match="free twice"):
        slabs.check_integrity(right)
    size.free.pop()


# --- slabs that move


def test_an_empty_slab_moves_to_the_size_that_needs_it() -> None:
    truth = Truth(8 * 64 * KiB)
    small = truth.take(4 * KiB, 128)
    truth.give([page for page in small if 16 * 3 <= page < 16 * 4])
    assert len(truth.take(8 * KiB, 100)) == 8, "slab 3 only: every other holds something"
    truth.check()
    truth.give([page for page in small if page >= 16 * 6])
    assert len(truth.take(20 * KiB, 100)) == 6


def test_a_slab_moves_only_when_all_of_it_is_free() -> None:
    truth = Truth(8 * 64 * KiB)
    small = truth.take(4 * KiB, 128)
    truth.give([page for page in small if page % 16])
    assert truth.take(8 * KiB, 1) == []
    assert len(truth.take(4 * KiB, 200)) == 120


def test_a_size_does_not_take_slabs_from_itself() -> None:
    truth = Truth(8 * 64 * KiB)
    pages = truth.take(4 * KiB, 128)
    truth.give(pages)
    assert len(truth.take(4 * KiB, 128)) == 128


@pytest.mark.parametrize("body", [56 * KiB, 128 * KiB, 256 * KiB, 512 * KiB, MiB, 2 * MiB, 4 * MiB, 12 * MiB, 16 * MiB])
def test_after_a_full_switch_of_size_nine_tenths_of_the_arena_are_usable(body: int) -> None:
    truth = Truth(10 * SLAB_BYTES)
    first = truth.take(slot_bytes(MiB), 10**6)
    assert len(first) == 640
    random.Random(body).shuffle(first)
    truth.give(first)
    pages = truth.take(slot_bytes(body), 10**6)
    assert len(pages) * body >= 0.9 * truth.slabs.usable_bytes
    truth.give(pages)
    assert len(truth.take(slot_bytes(MiB), 10**6)) == 640, "and back"


def test_release_slab_keeps_the_other_free_slots_of_the_class() -> None:
    truth = Truth(8 * 64 * KiB)
    size = truth.slabs.size_class(4 * KiB)
    pages = truth.take(4 * KiB, 40)
    truth.give([page for page in pages if page < 16])
    before = sorted(page for page in size.free if page >= 16)
    truth.slabs.release_slab(0)
    assert sorted(size.free) == before and size.slabs == {1, 2}
    with pytest.raises(AssertionError):
        truth.slabs.release_slab(1)


# --- many sizes


def sizes_in_use(truth: Truth) -> list[SizeClass]:
    return [size for size in truth.slabs.classes.values() if truth.slabs.taken(size)]


def test_more_than_255_sizes_share_classes_as_long_as_some_are_empty() -> None:
    truth = Truth(257 * SLAB_BYTES)
    kept = [(n * SLOT_ALIGN, truth.take(n * SLOT_ALIGN, 1)) for n in range(1, MAX_CLASSES + 1)]
    assert len(sizes_in_use(truth)) == MAX_CLASSES
    with pytest.raises(Full, match="255 different sizes"):
        truth.slabs.size_class(300 * SLOT_ALIGN)
    for n in range(256, 600):
        slot, pages = kept.pop(0)
        truth.give(pages)
        kept.append((n * SLOT_ALIGN, truth.take(n * SLOT_ALIGN, 1)))
        assert len(kept[-1][1]) == 1
        assert slot not in truth.slabs.classes
    truth.check()
    indices = [size.index for size in truth.slabs.classes.values()]
    assert sorted(indices) == list(range(1, MAX_CLASSES + 1)), "an index names one size"


def test_a_size_that_was_only_asked_for_gives_its_place() -> None:
    truth = Truth(8 * 2 * MiB)
    for n in range(1, 500):
        truth.slabs.size_class(n * SLOT_ALIGN)
    assert len(truth.slabs.classes) == MAX_CLASSES
    assert len(truth.take(SLOT_ALIGN, 10**6)) == truth.slabs.usable_bytes // SLOT_ALIGN


def test_the_class_of_a_dropped_size_starts_anew() -> None:
    truth = Truth(257 * SLAB_BYTES)
    first = truth.slabs.size_class(SLOT_ALIGN)
    truth.give(truth.take(SLOT_ALIGN, 5))
    for n in range(2, MAX_CLASSES + 2):
        truth.take(n * SLOT_ALIGN, 1)
    assert SLOT_ALIGN not in truth.slabs.classes and not first.slabs
    assert first not in truth.slabs.classes.values()


# --- anything, in any order


@given(st.data())
def test_any_order_of_takes_and_gives_keeps_every_slot(data: st.DataObject) -> None:
    truth = Truth(9 * 60 * KiB)
    sizes = [4 * KiB, 8 * KiB, 12 * KiB, 28 * KiB, 60 * KiB]
    for _ in range(data.draw(st.integers(1, 30), "steps")):
        if truth.taken and data.draw(st.booleans(), "give"):
            pages = list(truth.taken)
            truth.give(data.draw(st.lists(st.sampled_from(pages), unique=True, min_size=1), "pages"))
        else:
            truth.take(data.draw(st.sampled_from(sizes), "size"), data.draw(st.integers(0, 40), "n"))
        truth.check()
