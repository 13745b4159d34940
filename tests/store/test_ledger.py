"""The ledger by itself: what is known, who is oldest, what leases and deletes do to that, and that growth and faults
lose nothing."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.store import ledger as module
from kvtier.store.allocator import MAX_CLASSES
from kvtier.store.ledger import Ledger

SLOT, NBYTES = 4096, 800


def key(n: int) -> bytes:
    return blake2b(n.to_bytes(8, "little"), digest_size=32).digest()


class Book(Ledger):
    """A ledger whose pages the test counts up, and that is compared with itself when the test ends."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = 0
        LIVE.append(self)

    def put(self, *numbers: int, size: int = 1, namespace: int = 1, slot: int = SLOT, uses: bytes = b"") -> list[int]:
        """Reserves and seals these keys in one call; returns their rows."""
        rows = self.hold(*numbers, size=size, namespace=namespace, slot=slot, uses=uses)
        assert all(self.seal(rows))
        return rows

    def hold(self, *numbers: int, size: int = 1, namespace: int = 1, slot: int = SLOT, uses: bytes = b"") -> list[int]:
        pages = range(self.pages, self.pages + len(numbers))
        self.pages += len(numbers)
        return self.reserve(pages, [key(n) for n in numbers], NBYTES, slot, size, namespace, uses)

    def known_of(self, *numbers: int) -> list[int | None]:
        return self.find_each([key(n) for n in numbers])

    def by_age(self, size: int = 1, count: int = 0) -> list[bytes]:
        return self.keys(self.in_order(size, count))

    def in_order(self, size: int = 1, count: int = 0) -> list[int]:
        """Unleased rows, oldest first, read in runs of one age."""
        rows: list[int] = []
        head = next(((tick, row) for one, tick, row in self.oldest(size) if one == count), None)
        while head is not None:
            tick, row = head
            run, head = self.from_oldest(row, 10**6)
            assert set(self.history(run)[2]) == {tick}
            rows += run
        return rows


LIVE: list[Book] = []  # of the running test


@pytest.fixture(autouse=True)
def integrity() -> Iterator[None]:
    LIVE.clear()
    yield
    for book in LIVE:
        pages = book.check_integrity()
        assert len(pages) >= book.known + book.reserved


@pytest.fixture
def book() -> Book:
    return Book()


# --- what is known


def test_a_new_ledger_knows_nothing(book: Book) -> None:
    assert book.known == 0 and book.check_integrity() == {}
    assert book.find([key(1)]) == [] and book.find_each([key(1)]) == [None]
    assert book.oldest(1) == [] and book.youngest(1) is None
    assert book.handles() == set() and book.held_rows() == {} and book.reserved_rows() == set()
    assert book.slab_ages(1, 16) == {}


def test_a_key_is_known_from_seal_on_and_not_before(book: Book) -> None:
    rows = book.hold(1, 2)
    assert book.known == 0 and book.find([key(1)]) == []
    assert book.reserved_rows() == set(rows) and book.handles() == {1}
    assert book.seal(rows) == [True, True]
    assert book.known == 2 and book.find([key(1), key(2)]) == rows and book.reserved_rows() == set()


def test_find_gives_the_leading_part_and_find_each_every_one(book: Book) -> None:
    rows = book.put(1, 2, 4)
    assert book.find([key(n) for n in (1, 2, 3, 4)]) == rows[:2]
    assert book.known_of(1, 2, 3, 4) == [rows[0], rows[1], None, rows[2]]
    assert book.find([key(2), key(2)]) == [rows[1], rows[1]]


def test_the_second_seal_of_a_key_is_told_and_stays_reserved(book: Book) -> None:
    first, second = book.hold(1, 2), book.hold(2, 3)
    assert book.seal(first) == [True, True]
    assert book.seal(second) == [False, True]
    assert book.known == 3 and book.known_of(2) == [first[1]]
    assert book.reserved_rows() == {second[0]}
    assert book.forget([second[0]]) == [2]
    assert book.known_of(2) == [first[1]], "the loser's end must not take the winner's key along"


def test_of_two_rows_of_one_key_in_one_seal_one_wins(book: Book) -> None:
    rows = book.hold(1, 1)
    assert sorted(book.seal(rows)) == [False, True]
    assert book.known == 1
    book.forget(sorted(book.reserved_rows()))


def test_sealing_twice_is_a_fault_of_the_caller(book: Book) -> None:
    rows = book.put(1)
    with pytest.raises(AssertionError):
        book.seal(rows)


def test_forgotten_rows_are_void_and_used_again(book: Book) -> None:
    rows = book.put(1, 2, 3)
    assert book.forget(rows[:2]) == [0, 1]
    assert book.known == 1 and book.known_of(1, 2, 3) == [None, None, rows[2]]
    assert [book.is_sealed(row) for row in rows] == [False, False, True]
    assert not any(map(book.is_reserved, rows))
    assert set(book.put(4, 5)) == set(rows[:2])
    free = book.hold(6)
    book.forget(free)
    with pytest.raises(AssertionError):
        book.forget(free)


def test_reserved_rows_can_be_forgotten(book: Book) -> None:
    rows = book.hold(1, 2)
    assert book.forget(rows) == [0, 1]
    assert book.handles() == set()


# --- who is oldest


def test_the_tail_of_one_seal_is_older_than_its_head(book: Book) -> None:
    book.put(1, 2, 3)
    book.put(4, 5)
    assert book.by_age() == [key(n) for n in (3, 2, 1, 5, 4)]
    ((count, tick, row),) = book.oldest(1)
    assert (count, book.keys([row])[0]) == (0, key(3))
    run, behind = book.from_oldest(row, 2)
    assert run == book.find_each([key(3), key(2)]) and behind == (tick, book.find([key(1)])[0])
    assert [book.youngest(1)] == book.history(book.find([key(4)]))[2] and tick < book.tick == book.youngest(1)


def test_each_size_has_its_own_order(book: Book) -> None:
    book.put(1, 2, size=1)
    book.put(3, 4, size=MAX_CLASSES, slot=8192)
    book.put(5, size=1)
    assert book.by_age(1) == [key(2), key(1), key(5)]
    assert book.by_age(MAX_CLASSES) == [key(4), key(3)]
    assert book.idle(1) == 3 and book.idle(MAX_CLASSES) == 2
    assert book.oldest(1)[0][1] < book.oldest(MAX_CLASSES)[0][1]


def test_a_release_makes_young_again_tails_before_heads(book: Book) -> None:
    book.put(1, 2, 3)
    book.put(4)
    rows = book.find([key(1), key(2)])
    book.lease(rows)
    assert book.by_age() == [key(3), key(4)], "what is leased is in no list"
    book.release(rows)
    assert book.by_age() == [key(3), key(4), key(2), key(1)]


def test_only_a_release_touches_not_a_look(book: Book) -> None:
    book.put(1, 2)
    book.find([key(1), key(2)])
    book.find_each([key(2)])
    book.in_order()
    assert book.by_age() == [key(2), key(1)]


# --- leases


def test_a_lease_counts_each_holder_and_the_first_ones_bytes(book: Book) -> None:
    rows = book.put(1, 2)
    assert book.lease(rows) == 2 * SLOT
    assert book.lease(rows[:1]) == 0
    assert book.held_rows() == {rows[0]: 2, rows[1]: 1}
    assert book.release(rows) == (SLOT, [])
    assert book.release(rows[:1]) == (SLOT, [])
    assert book.held_rows() == {}


def test_releasing_what_nobody_holds_is_a_fault_of_the_caller(book: Book) -> None:
    rows = book.put(1)
    with pytest.raises(AssertionError):
        book.release(rows)


def test_a_leased_row_is_no_victim(book: Book) -> None:
    rows = book.put(1, 2)
    book.lease(rows[:1])
    assert book.in_order() == rows[1:]
    book.lease(rows[1:])
    assert book.in_order() == [] and book.oldest(1) == [] and book.youngest(1) is None


def test_a_doomed_row_leaves_the_index_at_once_and_comes_back_with_the_last_release(book: Book) -> None:
    rows = book.put(1, 2)
    book.lease(rows)
    book.lease(rows[:1])
    book.doom([rows[0]])
    assert book.known == 1 and book.known_of(1, 2) == [None, rows[1]]
    assert book.is_leased(rows[0]) and not book.is_sealed(rows[0]) and not book.is_reserved(rows[0])
    again = book.put(1)
    assert book.release(rows) == (SLOT, []), "the doomed row has a holder left"
    assert book.release(rows[:1]) == (SLOT, [rows[0]])
    assert book.forget([rows[0]]) == [0]
    assert book.known_of(1) == again, "the new block of the same key stays"


def test_doom_hands_back_what_nobody_leases(book: Book) -> None:
    rows = book.put(1, 2, 3)
    book.lease(rows[1:2])
    assert book.doom(rows) == [rows[0], rows[2]]
    assert book.known_of(1, 2, 3) == [rows[0], None, rows[2]]
    assert book.forget([rows[0], rows[2]]) == [0, 2] and book.release(rows[1:2]) == (SLOT, rows[1:2])
    book.forget(rows[1:2])


def test_only_a_sealed_block_can_be_doomed(book: Book) -> None:
    with pytest.raises(AssertionError):
        book.doom(book.hold(1))


# --- how often a block was used


def test_a_use_raises_use_counts_and_tells_runs_of_what_was_alike(book: Book) -> None:
    rows = book.put(1, 2, 3)
    tick = book.tick
    later = book.put(4)
    assert book.use([*rows, *later]) == ([(0, 1, 3), (0, 0, 1)], [*rows, *later])
    assert book.uses([*rows, *later]) == [1, 1, 1, 1]
    assert book.history(rows) == ([key(n) for n in (1, 2, 3)], [1, 1, 1], [tick] * 3)
    assert book.use(rows[:1]) == ([(1, 1, 1)], []) and book.uses(rows) == [2, 1, 1]
    assert book.use(rows[1:2] + rows[:1]) == ([(1, 1, 1), (2, 1, 1)], []), "a run ends where use counts differ"
    assert book.uses(rows) == [2, 2, 1], "no more than the block before it"
    book.lease([*rows, *later])  # a lease follows a use: only then does the row stand in the list of its use count
    book.release([*rows, *later])


def test_what_is_leased_is_not_used_again_and_what_is_kept_is(book: Book) -> None:
    leased, kept, none = book.put(1), book.put(2), book.put(3)
    book.lease(leased)
    book.lease(kept, keep=True)
    runs, again = book.use([*none, *kept, *leased])
    assert runs == [(0, 0, 1), (0, 1, 1)] and again == [*none, *kept]
    assert book.uses([*leased, *kept, *none]) == [0, 1, 1]
    book.lease([*none, *kept])
    book.release([*leased, *kept, *none])
    book.release(kept)


def test_a_sample_is_of_sealed_rows_and_says_for_how_many_one_stands(book: Book) -> None:
    book.put(*range(10), uses=bytes(5) + b"\2" * 5)
    book.hold(10)
    counts, ages, stride = book.sample(1 << 20)
    assert stride == 1 and sorted(counts.tolist()) == [0] * 5 + [2] * 5 and ages.tolist() == [0] * 10
    assert book.sample(100)[2] > 1


# --- rows that stay where they are while they are held


def test_a_kept_row_stays_at_its_age_and_is_no_victim_meanwhile(book: Book) -> None:
    first, second, third = book.put(1), book.put(2), book.put(3)
    assert book.lease(second, keep=True) == SLOT and book.idle(1) == 2
    assert book.in_order() == first + third
    assert book.release(second) == (SLOT, [])
    assert book.in_order() == first + second + third, "that it was held was no use"


def test_every_kept_row_is_passed_over_wherever_it_stands(book: Book) -> None:
    rows = book.put(1, 2, 3, 4, 5)
    for kept in ([rows[4]], [rows[0]], [rows[1], rows[3]], rows):
        book.lease(kept, keep=True)
        assert book.in_order() == [row for row in reversed(rows) if row not in kept]
        book.release(kept)
    assert book.in_order() == rows[::-1]


def test_whoever_leases_a_kept_row_uses_it(book: Book) -> None:
    first, second = book.put(1), book.put(2)
    book.lease(first, keep=True)
    assert book.lease(first) == 0
    book.release(first)
    assert book.in_order() == second, "the mover still holds it"
    book.release(first)
    assert book.in_order() == second + first


def test_a_mover_that_comes_second_keeps_nothing(book: Book) -> None:
    first, second = book.put(1), book.put(2)
    book.lease(first)
    book.lease(first, keep=True)
    assert book.in_order() == second
    book.release(first)
    book.release(first)
    assert book.in_order() == second + first


def test_a_kept_row_can_be_doomed(book: Book) -> None:
    first, second = book.put(1), book.put(2)
    book.lease(first, keep=True)
    book.doom([first[0]])
    book.check_integrity()
    assert book.in_order() == second
    assert book.release(first) == (SLOT, first)
    book.forget(first)


def test_each_use_count_has_its_own_order(book: Book) -> None:
    low, high = book.put(1, 2), book.put(3, 4, uses=bytes((5, 5)))
    assert book.by_age(count=0) == [key(2), key(1)] and book.by_age(count=5) == [key(4), key(3)]
    assert [count for count, _, _ in book.oldest(1)] == [0, 5] and book.idle(1) == 4
    for _ in range(5):
        book.use(low[:1])
    book.lease(low)
    book.release(low)
    assert book.by_age(count=0) == [key(2)] and book.in_order(count=5) == [*high[::-1], low[0]]
    assert [book.youngest(1)] == book.history(low[:1])[2]


# --- slabs and namespaces


def test_the_age_of_a_slab_is_told_only_where_nothing_is_in_use(book: Book) -> None:
    """Slabs of 4 pages here. Slab 0 is old, 1 young, 2 has a lease, 3 a reservation, 4 a doomed block, 5 is of another
    size."""
    book.put(*range(4))
    book.put(*range(4, 8))
    leased, reserved, doomed = book.put(*range(8, 12)), book.hold(*range(12, 16)), book.put(*range(16, 20))
    other = book.put(*range(20, 24), size=2)
    book.seal(reserved[1:])
    book.lease([leased[3], doomed[0]])
    book.doom([doomed[0]])
    ages = book.slab_ages(1, 4)
    assert list(ages) == [0, 1] and ages[0] < ages[1]
    assert list(book.slab_ages(2, 4)) == [5]
    assert book.rows_of_slab(2, 20, 4) == sorted(other)
    assert book.rows_of_slab(1, 20, 4) == []
    assert len(book.rows_of_slab(1, 12, 4)) == 3, "sealed ones only"


def test_rows_of_a_namespace(book: Book) -> None:
    mine = book.put(1, 2, 3, namespace=7)
    book.put(4, namespace=8)
    held = book.hold(5, namespace=9)
    assert sorted(book.rows_of_namespace(7, 99)) == sorted(mine)
    assert len(book.rows_of_namespace(7, 2)) == 2
    assert book.rows_of_namespace(9, 99) == [], "what is reserved is nobody's yet"
    assert book.handles() == {7, 8, 9}
    book.forget(held)
    assert book.handles() == {7, 8}


# --- growth and faults


def test_rows_grow_beyond_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GROW", 8)
    book = Book()
    for first in range(0, 100, 10):
        book.put(*range(first, first + 10))
        book.check_integrity()
    assert book.known == 100 and len(book.find([key(n) for n in range(100)])) == 100
    book.put(*range(100, 200))
    assert book.by_age()[0] == key(9) and book.by_age()[-1] == key(100)


class Stubborn(array):  # type: ignore[type-arg]
    """A column that finds no memory once."""

    refuses = True

    def frombytes(self, buffer: bytes, /) -> None:  # type: ignore[override]
        if self.refuses:
            self.refuses = False
            raise MemoryError
        super().frombytes(buffer)


@pytest.mark.parametrize("column", ["_state", "_page", "_checksum", "_next"])
def test_growth_that_finds_no_memory_can_be_tried_again(monkeypatch: pytest.MonkeyPatch, column: str) -> None:
    monkeypatch.setattr(module, "_GROW", 8)
    book = Book()
    rows = book.put(*range(8))
    old = getattr(book, column)
    setattr(book, column, Stubborn(old.typecode, old))
    with pytest.raises(MemoryError):
        book.hold(8, 9)
    book.check_integrity()
    assert book.known_of(*range(8)) == rows
    assert len(book.slab_ages(1, 16)) == 1, "columns still go together"
    book.put(8, 9)
    assert book.known == 10


@given(st.data())
def test_any_order_of_verbs_keeps_the_ledger_whole(data: st.DataObject) -> None:
    """Model: states of rows; the ledger's own check compares index, columns and lists."""
    book = Book()
    reserved: dict[int, int] = {}  # row -> number
    sealed: dict[int, int] = {}
    leases: dict[int, int] = {}
    doomed: set[int] = set()
    for _ in range(data.draw(st.integers(1, 25), "steps")):
        verb = data.draw(st.sampled_from(["hold", "seal", "forget", "lease", "release", "doom"]), "verb")
        if verb == "hold":
            numbers = data.draw(st.lists(st.integers(0, 12), max_size=5), "numbers")
            reserved.update(zip(book.hold(*numbers, size=data.draw(st.integers(1, 3), "size")), numbers, strict=True))
        elif verb == "seal" and reserved:
            rows = data.draw(st.lists(st.sampled_from(sorted(reserved)), unique=True), "rows")
            for row, won in zip(rows, book.seal(rows), strict=True):
                assert won == (reserved[row] not in sealed.values())
                if won:
                    sealed[row] = reserved.pop(row)
        elif verb == "forget" and (free := [row for row in [*reserved, *sealed] if not leases.get(row)]):
            rows = data.draw(st.lists(st.sampled_from(free), unique=True), "rows")
            book.forget(rows)
            for row in rows:
                reserved.pop(row, None)
                sealed.pop(row, None)
        elif verb == "lease" and sealed:
            rows = data.draw(st.lists(st.sampled_from(sorted(sealed)), unique=True), "rows")
            assert book.lease(rows, data.draw(st.booleans(), "keep")) == SLOT * sum(not leases.get(row) for row in rows)
            for row in rows:
                leases[row] = leases.get(row, 0) + 1
        elif verb == "release" and (held := [row for row, n in leases.items() if n]):
            rows = data.draw(st.lists(st.sampled_from(held), unique=True), "rows")
            for row in rows:
                leases[row] -= 1
            gone = [row for row in rows if row in doomed and not leases[row]]
            assert book.release(rows) == (SLOT * sum(not leases[row] for row in rows), gone)
            book.forget(gone)
            doomed -= set(gone)
        elif verb == "doom" and sealed:
            rows = data.draw(st.lists(st.sampled_from(sorted(sealed)), unique=True), "rows")
            assert book.doom(rows) == [row for row in rows if not leases.get(row)]
            for row in rows:
                if leases.get(row):
                    doomed.add(row)
                    del sealed[row]
        book.check_integrity()
        assert book.known_of(*range(13)) == [
            next((row for row, n in sealed.items() if n == number), None) for number in range(13)
        ]
        assert book.held_rows() == {row: n for row, n in leases.items() if n}
        assert book.reserved_rows() == set(reserved)
