"""The verbs of the store, alone: nothing visible before it is sealed, nothing changed while it is leased, nothing lost
when a call fails."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvtier.errors import Full, Invalid, Lost, Stale
from kvtier.format.layout import HEADER_BYTES, SLOT_ALIGN
from kvtier.format.slots import SLAB_BYTES
from kvtier.protocol.stops import PRESENT, Stop
from kvtier.store import allocator as slabs_module
from kvtier.store.accounts import Account, Reservation
from kvtier.store.arena import POISON, Arena
from kvtier.store.store import Store
from tests.support.daemon import body, description
from tests.support.inside import Inside, KiB, MiB, Space

SLOT = 4 * KiB  # of the blocks of `space()`


class Holder:
    """An account and what is held under it: what a session is to the store."""

    def __init__(self, store: Store, tenant: str) -> None:
        self.store = store
        self.account: Account = store.account(tenant)
        self.reservations: list[Reservation] = []
        self.leases: Counter[int] = Counter()

    def reserve(self, space: Space, numbers: Sequence[int]) -> tuple[Reservation, list[int]]:
        made, offsets = self.store.reserve(self.account, *space.asked(numbers))
        self.reservations.append(made)
        return made, offsets

    def seal(self, made: Reservation, indices: Sequence[int] | None = None) -> int:
        return self.store.seal(self.account, made, range(len(made.rows)) if indices is None else indices)

    def abort(self, made: Reservation, indices: Sequence[int] | None = None) -> int:
        return self.store.abort(self.account, made, range(len(made.rows)) if indices is None else indices)

    def lease(self, space: Space, numbers: Sequence[int]) -> tuple[list[int], list[int], int]:
        rows, offsets, stop = self.store.lease(self.account, space.keys(numbers))
        self.leases.update(set(rows))
        return rows, offsets, stop

    def release(self, rows: Sequence[int]) -> None:
        self.store.release(self.account, list(dict.fromkeys(rows)))
        self.leases.subtract(set(rows))

    def holdings(self) -> tuple[Account, dict[int, int], set[int]]:
        return (
            self.account,
            dict(+self.leases),
            {row for made in self.reservations for row in made.rows if row is not None},
        )


class Shop(Inside):
    """An `Inside` whose accounts are held by Holders instead of sessions."""

    def __init__(self, arena_bytes: int = MiB) -> None:
        super().__init__(arena_bytes)
        self.holders: list[Holder] = []

    def holder(self, tenant: str = "t") -> Holder:
        self.holders.append(Holder(self.store, tenant))
        return self.holders[-1]

    def check(self) -> None:
        self.store.check_integrity([holder.holdings() for holder in self.holders])

    def stock(self, holder: Holder, space: Space, numbers: Sequence[int]) -> None:
        """Puts these blocks, a session's share at a time."""
        step = self.store.session_cap // space.slot
        for first in range(0, len(numbers), step):
            part = numbers[first : first + step]
            made, offsets = holder.reserve(space, part)
            self.write(offsets, space, part)
            assert holder.seal(made) == len(part)

    def known(self, space: Space, numbers: Sequence[int]) -> list[int]:
        return [n for n, here in zip(numbers, self.store.lookup_each(space.keys(numbers)), strict=True) if here]

    @property
    def used(self) -> int:
        return self.store.gauges()["used_bytes"]


@pytest.fixture
def shop() -> Iterator[Shop]:
    with Shop() as made:  # 256 slots of 4 KiB; a session may hold 64, a tenant 128
        yield made


# --- writing


def test_reserve_writes_header_and_tail_and_leaves_the_body_alone(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space(1000)
    _, offsets = holder.reserve(space, [1, 2, 3])
    assert len(set(offsets)) == 3 and all(offset % SLOT_ALIGN == 0 for offset in offsets)
    for offset in offsets:
        slot = shop.arena.array[offset : offset + space.slot]
        assert (slot[HEADER_BYTES : space.block_bytes] == POISON).all()
        assert not slot[space.block_bytes :].any(), "the padding behind the block is zero"
    shop.write(offsets, space, [1, 2, 3])
    assert all(shop.holds(offset, space, n) for offset, n in zip(offsets, [1, 2, 3], strict=True))


def test_nothing_is_visible_before_it_is_sealed(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    made, offsets = holder.reserve(space, [1, 2])
    shop.write(offsets, space, [1, 2])
    assert shop.store.lookup(space.keys([1, 2])) == 0
    assert holder.lease(space, [1]) == ([], [], Stop.MISS)
    assert shop.store.delete(space.keys([1])) == 0
    assert holder.seal(made, [1]) == 1
    assert shop.known(space, [1, 2]) == [2]
    assert holder.seal(made) == 2
    assert shop.store.lookup(space.keys([1, 2, 3])) == 2


def test_a_lease_shows_the_slots_that_were_written(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    made, offsets = holder.reserve(space, [1, 2])
    shop.write(offsets, space, [1, 2])
    holder.seal(made)
    rows, seen, stop = holder.lease(space, [1, 2])
    assert (seen, stop) == (offsets, Stop.END) and len(rows) == 2
    assert all(shop.holds(offset, space, n) for offset, n in zip(seen, [1, 2], strict=True))
    holder.release(rows)


def test_what_is_there_is_not_reserved_again(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    shop.stock(holder, space, [1, 3])
    used = shop.used
    made, offsets = holder.reserve(space, [1, 2, 3])
    assert offsets[0] == offsets[2] == PRESENT != offsets[1]
    assert shop.used == used + SLOT
    shop.write(offsets, space, [1, 2, 3])
    assert holder.seal(made) == 3
    made, offsets = holder.reserve(space, [1, 2, 3])
    assert offsets == [PRESENT] * 3 and not made.open
    assert holder.seal(made) == 3 and shop.used == used + SLOT
    made, offsets = holder.reserve(space, [])
    assert offsets == [] and not made.open and holder.seal(made) == 0


def test_of_two_writers_the_first_seal_wins_and_the_loser_hears_it(shop: Shop) -> None:
    one, two, space = shop.holder(), shop.holder(), shop.space()
    first, at_first = one.reserve(space, [1, 2])
    second, at_second = two.reserve(space, [2, 3])
    shop.write(at_first, space, [1, 2])
    shop.body_at(at_second[0], space)[:] = 99
    shop.write(at_second[1:], space, [3])
    assert one.seal(first) == 2
    assert two.seal(second) == 2, "ALREADY counts: the key is stored"
    assert shop.store.counters.already_blocks == 1 and shop.store.counters.sealed_blocks == 3
    assert shop.used == 3 * SLOT, "the loser's slot is free at once"
    assert shop.block_at(at_second[0], space) == bytes([POISON]) * space.block_bytes
    rows, offsets, _ = two.lease(space, [2])
    assert shop.holds(offsets[0], space, 2)
    two.release(rows)


def test_a_key_given_twice_in_one_reserve_is_stored_once(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    made, offsets = holder.reserve(space, [7, 7, 8])
    assert len(set(offsets)) == 3
    shop.write(offsets, space, [7, 7, 8])
    assert holder.seal(made) == 3
    assert shop.used == 2 * SLOT and shop.store.gauges()["known_blocks"] == 2


def test_seal_counts_what_is_stored_and_not_what_was_aborted(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    shop.stock(holder, space, [0])
    made, _ = holder.reserve(space, [0, 1, 2, 3])
    assert holder.abort(made, [1]) == 1
    assert holder.seal(made, [0, 1, 2]) == 2, "present, aborted, sealed"
    assert holder.seal(made) == 3 and holder.seal(made) == 3
    assert shop.known(space, [0, 1, 2, 3]) == [0, 2, 3]


def test_abort_frees_and_a_late_seal_seals_nothing(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    made, offsets = holder.reserve(space, [1, 2])
    shop.write(offsets, space, [1, 2])
    assert holder.abort(made) == 2 and holder.abort(made) == 0
    assert holder.account.held == 0 == shop.used
    assert holder.seal(made) == 0 and shop.known(space, [1, 2]) == []
    assert (shop.arena.array[offsets[0] : offsets[0] + SLOT] == POISON).all()
    assert shop.store.counters.aborted_blocks == 2


def test_abort_after_seal_takes_nothing_back(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    made, _ = holder.reserve(space, [1, 2])
    holder.seal(made, [0])
    assert holder.abort(made) == 1
    assert shop.known(space, [1, 2]) == [1]


@pytest.mark.parametrize("at", [0, 8, 12, 22, 24, 32, 63, 64, 96, 128, 191, 192, 196, 200, 204, 255])
def test_a_block_whose_header_was_changed_is_dropped(shop: Shop, at: int) -> None:
    holder, space = shop.holder(), shop.space()
    made, offsets = holder.reserve(space, [1, 2, 3])
    shop.write(offsets, space, [1, 2, 3])
    shop.arena.array[offsets[1] + at] ^= 1
    with pytest.raises(Lost, match="the header of 1 blocks was changed by the writer"):
        holder.seal(made)
    assert shop.known(space, [1, 2, 3]) == [1, 3], "the others are sealed"
    assert shop.used == 2 * SLOT and not made.open
    assert shop.store.counters.bad_headers == 1
    assert holder.seal(made) == 2
    shop.stock(holder, space, [2])
    assert shop.store.lookup(space.keys([1, 2, 3])) == 3


def test_a_whole_header_of_another_block_is_a_changed_header(shop: Shop) -> None:
    """A writer that mixed two slots up: both headers are valid, each in the wrong place."""
    holder, space = shop.holder(), shop.space()
    made, (one, two) = holder.reserve(space, [1, 2])
    head = bytes(shop.arena.memory[one : one + HEADER_BYTES])
    shop.arena.memory[one : one + HEADER_BYTES] = bytes(shop.arena.memory[two : two + HEADER_BYTES])
    shop.arena.memory[two : two + HEADER_BYTES] = head
    with pytest.raises(Lost, match="the header of 2 blocks"):
        holder.seal(made)
    assert shop.known(space, [1, 2]) == []


def test_checksums_given_at_seal_are_kept_for_their_block(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    shop.stock(holder, space, [2])
    made, _ = holder.reserve(space, [1, 2, 3])
    shop.store.seal(holder.account, made, [0, 1, 2], [11, 22, 33])
    rows, _, _ = holder.lease(space, [1, 2, 3])
    assert shop.store.checksums(rows) == [11, 0, 33], "a block that was there keeps what is known of it"
    shop.store.learn_checksum(rows[1], 44)
    assert shop.store.checksums(rows) == [11, 44, 33]
    holder.release(rows)
    shop.store.delete(space.keys([1]))
    made, _ = holder.reserve(space, [4])
    holder.seal(made)
    rows, _, _ = holder.lease(space, [4])
    assert shop.store.checksums(rows) == [0], "a row that is used again knows no checksum"
    holder.release(rows)


# --- refusals: nothing taken, nothing lost


def test_a_call_over_the_cap_can_never_succeed(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    with pytest.raises(
        Invalid, match="266240 bytes in one call; one session may hold 262144: send fewer blocks a call"
    ):
        holder.reserve(space, range(65))
    assert shop.used == 0
    holder.reserve(space, range(64))


def test_a_block_that_fits_no_slab_is_refused(shop: Shop) -> None:
    with pytest.raises(Invalid, match="does not fit a slab of 131072"):
        shop.holder().reserve(shop.space(128 * KiB), [1])
    assert not shop.store._slabs.classes


def test_the_cap_of_a_session(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    made, _ = holder.reserve(space, range(60))
    with pytest.raises(Full, match="full, retry: this session holds 245760 of the 262144 bytes"):
        holder.reserve(space, range(100, 105))
    assert shop.used == 60 * SLOT and shop.store.counters.full == 1
    holder.reserve(space, range(100, 104))
    holder.seal(made, range(30))
    holder.reserve(space, range(200, 230))


def test_the_cap_of_a_tenant_over_its_sessions_and_not_over_others(shop: Shop) -> None:
    one, two, three, other = shop.holder(), shop.holder(), shop.holder(), shop.holder("someone else")
    space, foreign = shop.space(), shop.space(tenant="someone else")
    one.reserve(space, range(64))
    two.reserve(space, range(64))
    with pytest.raises(Full, match="this tenant holds 524288 of the 524288 bytes"):
        three.reserve(space, [1])
    assert three.lease(space, []) == ([], [], Stop.END)
    other.reserve(foreign, range(64))


def test_a_reserve_that_cannot_be_met_evicts_nothing(shop: Shop) -> None:
    """Three tenants hold three quarters; the rest is idle blocks. What asks for more than the rest must not flush it in
    vain."""
    held = [(shop.holder(tenant), shop.space(tenant=tenant)) for tenant in "abc"]
    for holder, space in held:
        holder.reserve(space, range(64))
    late, space = shop.holder("d"), shop.space(tenant="d")
    shop.stock(late, space, range(60))
    rows, _, _ = late.lease(space, range(20))
    asker, mine = shop.holder("e"), shop.space(tenant="e")
    with pytest.raises(Full, match="full, retry: what is leased and reserved leaves too little"):
        asker.reserve(mine, range(45))
    assert shop.known(space, range(60)) == list(range(60)), "all or nothing holds for what would have gone, too"
    assert shop.store.counters.evicted_blocks == 0 and shop.store.counters.full == 1
    asker.reserve(mine, range(44))
    assert shop.known(space, range(60)) == list(range(20))
    late.release(rows)


def test_slabs_pinned_by_another_size_are_not_emptied_in_vain(shop: Shop) -> None:
    """One leased block in each slab keeps another size out of all of them, and is told at once, with nothing
    evicted."""
    holder, small, large = shop.holder(), shop.space(), shop.space(7900)
    shop.stock(holder, small, range(256))
    rows = [holder.lease(small, [n])[0][0] for n in range(0, 256, 32)]
    with pytest.raises(Full):
        holder.reserve(large, [1])
    assert shop.store.gauges()["known_blocks"] == 256
    holder.release(rows[3:4])
    made, _ = holder.reserve(large, range(16))
    with pytest.raises(Full):
        holder.reserve(large, [99])
    assert shop.store.gauges()["known_blocks"] == 224, "one slab moved"
    holder.abort(made)
    holder.release(rows[:3] + rows[4:])


def no_memory(*_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    "what", ["kvtier.store.ledger.Ledger.reserve", "kvtier.store.store.headers", "kvtier.store.store.header_template"]
)
def test_a_fault_half_way_through_a_reserve_gives_everything_back(
    shop: Shop, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, space = shop.holder(), shop.space()
    shop.stock(holder, space, range(10))
    with monkeypatch.context() as patch:
        patch.setattr(what, no_memory)
        with pytest.raises(MemoryError):
            holder.reserve(space, range(20))
    shop.check()
    assert shop.used == 10 * SLOT and holder.account.held == 0 == holder.account.tenant.held
    holder.reserve(space, range(20))


@pytest.mark.parametrize(
    ("context", "hashes", "error"),
    [
        (None, [bytes(32)] * 2, struct.error),
        (bytes(32), [b"short", b"longer"], ValueError),
        (bytes(32), [], IndexError),
    ],
)
def test_a_mistake_of_the_callers_takes_nothing(
    shop: Shop, context: Any, hashes: list[bytes], error: type[Exception]
) -> None:
    holder, space = shop.holder(), shop.space()
    with pytest.raises(error):
        shop.store.reserve(holder.account, space.namespace, space.resolved, context, space.keys([1, 2]), hashes)
    assert shop.used == 0 == holder.account.held


# --- reading


def test_lookup_answers_the_leading_part_and_changes_nothing(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    shop.stock(holder, space, [1, 2, 4])
    before = shop.store.gauges()
    assert shop.store.lookup(space.keys([1, 2, 3, 4])) == 2
    assert shop.store.lookup(space.keys([3, 1])) == 0 == shop.store.lookup([])
    assert shop.store.lookup_each(space.keys([1, 2, 3, 4])) == [True, True, False, True]
    assert shop.store.gauges() == before
    assert (shop.store.counters.lookup_keys, shop.store.counters.lookup_hits) == (6, 2)


def test_why_a_lease_stopped(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    shop.stock(holder, space, range(70))
    assert holder.lease(space, [0, 1, 99, 2])[2] == Stop.MISS
    assert holder.lease(space, [3])[2] == Stop.END
    rows, offsets, stop = holder.lease(space, range(70))
    assert stop == Stop.CAP and len(rows) == len(offsets) == 61, "3 of 64 are held already"
    assert holder.lease(space, range(70)) == ([], [], Stop.CAP)
    assert holder.lease(space, [99]) == ([], [], Stop.MISS), "a miss is a miss, also at the cap"


def test_a_lease_of_many_sizes_is_cut_by_bytes(shop: Shop) -> None:
    holder, small, large = shop.holder(), shop.space(), shop.space(60_000)
    shop.stock(holder, small, range(10))
    shop.stock(holder, large, range(4))
    assert len(holder.lease(large, range(4))[0]) == 4
    keys = small.keys(range(10)) + large.keys([0])
    rows, _, stop = shop.store.lease(holder.account, keys)
    assert len(rows) == (shop.store.session_cap - 4 * large.slot) // SLOT and stop == Stop.CAP
    holder.leases.update(set(rows))


def test_a_key_given_twice_is_pinned_once(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    shop.stock(holder, space, [1, 2])
    rows, offsets, _ = holder.lease(space, [1, 2, 1, 1])
    assert len(rows) == 4 and offsets[0] == offsets[2] == offsets[3]
    assert holder.account.held == 2 * SLOT
    holder.release(rows)
    assert holder.account.held == 0


def test_duplicates_do_not_count_against_the_cap(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    shop.stock(holder, space, range(65))
    rows, _, stop = holder.lease(space, [0] * 100 + list(range(1, 64)))
    assert len(rows) == 163 and stop == Stop.END
    holder.release(rows)
    rows, _, stop = holder.lease(space, [*range(64), 0, 1, 64, 2])
    assert len(rows) == 66 and stop == Stop.CAP, "cut at the first block that is new and does not fit"


def test_a_slot_held_by_several_sessions_counts_once_for_the_tenant(shop: Shop) -> None:
    space = shop.space()
    holders = [shop.holder() for _ in range(4)]
    shop.stock(holders[0], space, range(64))
    held = [holder.lease(space, range(64))[0] for holder in holders]
    assert [len(rows) for rows in held] == [64] * 4
    assert all(holder.account.held == 64 * SLOT for holder in holders)
    assert holders[0].account.tenant.held == 64 * SLOT
    for holder, rows in zip(holders[:3], held[:3], strict=True):
        holder.release(rows)
        assert holder.account.tenant.held == 64 * SLOT
    holders[3].release(held[3])
    assert holders[0].account.tenant.held == 0


def test_the_tenants_cap_cuts_only_what_nobody_of_it_holds(shop: Shop) -> None:
    one, two, three, space = shop.holder(), shop.holder(), shop.holder(), shop.space()
    shop.stock(one, space, range(130))
    one.lease(space, range(64))
    two.lease(space, range(64, 124))
    rows, _, stop = three.lease(space, [*range(60, 64), *range(124, 130)])
    assert stop == Stop.CAP and len(rows) == 4 + 4, "four are held by the first, four fit"
    assert three.account.tenant.held == shop.store.tenant_cap


def test_leased_blocks_are_never_evicted_and_never_change(shop: Shop) -> None:
    reader, writer, space = shop.holder(), shop.holder(), shop.space()
    shop.stock(writer, space, range(256))
    rows, offsets, _ = reader.lease(space, range(40))
    shop.stock(writer, space, range(1000, 1500))
    assert shop.known(space, range(256)) == list(range(40))
    assert all(shop.holds(offset, space, n) for n, offset in enumerate(offsets))
    reader.release(rows)
    shop.stock(writer, space, range(2000, 2300))
    assert shop.known(space, range(40)) == []


# --- deleting


def test_delete_forgets_at_once_and_frees_the_slot(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    shop.stock(holder, space, [1, 2, 3])
    assert shop.store.delete(space.keys([2, 9, 2])) == 1
    assert shop.known(space, [1, 2, 3]) == [1, 3] and shop.used == 2 * SLOT
    assert shop.store.delete([]) == 0


def test_what_is_deleted_while_leased_stays_readable_and_is_freed_with_the_last_lease(shop: Shop) -> None:
    one, two, space = shop.holder(), shop.holder(), shop.space()
    shop.stock(one, space, [1, 2])
    held, (offset, _), _ = one.lease(space, [1, 2])
    also, _, _ = two.lease(space, [1])
    assert shop.store.delete(space.keys([1])) == 1 and shop.store.delete(space.keys([1])) == 0
    assert shop.known(space, [1, 2]) == [2] and two.lease(space, [1]) == ([], [], Stop.MISS)
    made, (new, *_) = two.reserve(space, [1])
    assert new != offset, "a leased slot is nobody else's"
    shop.body_at(new, space)[:] = 5
    two.seal(made)
    assert shop.holds(offset, space, 1)
    one.release(held)
    assert shop.holds(offset, space, 1) and shop.used == 3 * SLOT
    two.release(also)
    assert shop.used == 2 * SLOT
    assert (shop.arena.array[offset : offset + SLOT] == POISON).all()
    assert (shop.body_at(new, space) == 5).all(), "the new block of the same key is not touched"


def test_a_deleted_block_counts_for_its_holder_until_it_is_released(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    shop.stock(holder, space, range(64))
    rows, _, _ = holder.lease(space, range(64))
    shop.store.delete(space.keys(range(64)))
    with pytest.raises(Full):
        holder.reserve(space, [1])
    shop.check()
    holder.release(rows)
    assert shop.used == 0 == holder.account.held


def test_delete_leaves_reservations_alone(shop: Shop) -> None:
    one, two, space = shop.holder(), shop.holder(), shop.space()
    made, offsets = one.reserve(space, [1])
    shop.stock(two, space, [1])
    shop.store.delete(space.keys([1]))
    shop.write(offsets, space, [1])
    assert one.seal(made) == 1 and shop.known(space, [1]) == [1]


# --- eviction and slabs


def test_the_oldest_goes_first_and_the_tail_before_its_head(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    for first in range(0, 256, 64):
        shop.stock(holder, space, range(first, first + 64))
    shop.stock(holder, space, range(1000, 1010))
    assert shop.known(space, range(256)) == [*range(54), *range(64, 256)]
    rows, _, _ = holder.lease(space, range(54))
    holder.release(rows)
    shop.stock(holder, space, range(2000, 2064))
    assert shop.known(space, range(256)) == [*range(54), *range(128, 256)], "what was read again is young again"
    assert shop.store.lookup(space.keys(range(64))) == 54, "a leading part is left"
    assert shop.store.counters.evicted_blocks == 74
    assert shop.store.counters.evicted_bytes == 74 * space.block_bytes


def test_a_lookup_does_not_make_young(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    shop.stock(holder, space, range(256))
    shop.store.lookup(space.keys(range(64)))
    shop.store.lookup_each(space.keys(range(64)))
    shop.stock(holder, space, range(1000, 1064))
    assert shop.known(space, range(64)) == []


@pytest.mark.parametrize("nbytes", [7000, 12_000, 60_000, 130_000])
def test_after_a_full_switch_of_size_nine_tenths_of_the_arena_are_usable(shop: Shop, nbytes: int) -> None:
    holder, small, large = shop.holder(), shop.space(), shop.space(nbytes)
    shop.stock(holder, small, range(256))
    fit = shop.store.capacity // large.slot
    shop.stock(holder, large, range(fit + 10))
    assert shop.store.gauges()["known_blocks"] * large.slot >= 0.9 * shop.store.capacity
    assert shop.known(small, range(256)) == []
    newest = shop.known(large, range(fit + 10))[-1]
    rows, offsets, _ = holder.lease(large, [newest])
    assert shop.holds(offsets[0], large, newest)
    holder.release(rows)
    shop.stock(holder, small, range(300))
    assert len(shop.known(small, range(300))) == 256 and shop.known(large, range(fit + 10)) == []


@pytest.mark.parametrize(("body_bytes", "waste"), [(MiB, 0.01), (12 * MiB, 0.07), (16 * MiB, 0.01)])
def test_large_blocks_fit_and_fill_a_real_arena(body_bytes: int, waste: float) -> None:
    """The bodies are not written, so the arena costs no memory: what counts here is how many fit before anything is
    evicted."""
    arena = Arena(8 * SLAB_BYTES)
    store = Store(arena)
    space = Space(store, "t", description(body_bytes))
    account, fit = store.account("t"), 0
    while not store.counters.evicted_blocks:
        made, _ = store.reserve(account, *space.asked([fit]))
        assert store.seal(account, made, [0]) == 1
        fit += 1
    store.check_integrity([(account, {}, set())])
    assert (fit - 1) * body_bytes >= (1 - waste) * store.capacity
    arena.close()


def test_two_sizes_share_the_arena_by_age(shop: Shop) -> None:
    """Neither size starves the other: new blocks of either push out what is oldest, whichever size that is."""
    holder, small, large = shop.holder(), shop.space(), shop.space(12_000)
    shop.stock(holder, small, range(10_000, 10_256))
    for turn in range(12):
        shop.stock(holder, small, range(100 * turn, 100 * turn + 30))
        shop.stock(holder, large, range(100 * turn, 100 * turn + 8))
        assert shop.known(small, range(100 * turn, 100 * turn + 30)) == list(range(100 * turn, 100 * turn + 30))
        assert shop.known(large, range(100 * turn, 100 * turn + 8)) == list(range(100 * turn, 100 * turn + 8))
        shop.check()
    assert shop.store.counters.drained_slabs > 0


def test_one_size_too_many_takes_the_place_of_the_one_used_longest_ago(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs_module, "MAX_CLASSES", 4)
    holder = shop.holder()
    spaces = [shop.space(nbytes) for nbytes in (1000, 5000, 9000, 13_000, 17_000)]
    for space in spaces[:4]:
        shop.stock(holder, space, range(3))
    rows, _, _ = holder.lease(spaces[0], range(3))
    held, _, _ = holder.lease(spaces[1], [2])
    holder.release(rows)  # so 0 is younger than 2 and 3, and 1 is in use
    shop.stock(holder, spaces[4], range(3))
    assert [len(shop.known(space, range(3))) for space in spaces] == [3, 3, 0, 3, 3]
    busy = [holder.reserve(space, [50])[0] for space in (spaces[0], spaces[3], spaces[4])]
    with pytest.raises(Full, match="different sizes"):
        holder.reserve(spaces[2], [1])
    assert [len(shop.known(space, range(3))) for space in spaces] == [3, 3, 0, 3, 3]
    holder.release(held)
    shop.stock(holder, spaces[2], [1])
    assert [len(shop.known(space, range(3))) for space in spaces] == [3, 0, 1, 3, 3]
    for made in busy:
        holder.abort(made)


def test_a_size_too_many_that_finds_no_slab_evicts_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """All classes are taken and every slab holds something in use, so making a class for the new size would be in
    vain."""
    monkeypatch.setattr(slabs_module, "MAX_CLASSES", 2)
    holder, small, large = shop.holder(), shop.space(), shop.space(5000)
    shop.stock(holder, small, range(7 * 32))
    rows = [holder.lease(small, [n])[0][0] for n in range(0, 7 * 32, 32)]
    shop.stock(holder, large, range(16))
    assert len(shop.known(large, range(16))) == 16 and len(shop.store._slabs.classes) == 2
    with pytest.raises(Full):
        holder.reserve(shop.space(9000), range(11))
    assert len(shop.known(large, range(16))) == 16, "nothing is evicted in vain"
    made, offsets = holder.reserve(small, [0])
    assert offsets == [PRESENT] and not made.open
    shop.stock(holder, shop.space(9000), range(10))
    assert shop.known(large, range(16)) == []
    holder.release(rows)


def test_freed_slots_are_poisoned(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    made, offsets = holder.reserve(space, range(3))
    shop.write(offsets, space, range(3))
    holder.seal(made, [0, 1])
    shop.store.delete(space.keys([0]))
    holder.abort(made)
    for offset in (offsets[0], offsets[2]):
        assert (shop.arena.array[offset : offset + SLOT] == POISON).all()
    assert np.array_equal(shop.body_at(offsets[1], space), body(1, space.body_bytes))


# --- namespaces and gauges


def test_dropping_a_namespace_forgets_its_blocks_and_no_others(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.store.store._DROP_STEP", 7)
    holder, gone, stays = shop.holder(), shop.space(), shop.space(model="org/stays")
    shop.stock(holder, gone, range(50))
    shop.stock(holder, stays, range(50))
    rows, offsets, _ = holder.lease(gone, range(5))
    made, _ = holder.reserve(gone, [100, 101])
    holder.seal(made, [0])
    assert shop.store.drop(gone.namespace) == 51
    assert shop.known(gone, range(102)) == [] and shop.known(stays, range(50)) == list(range(50))
    assert all(shop.holds(offset, gone, n) for n, offset in enumerate(offsets)), "what is leased stays readable"
    assert holder.seal(made) == 0 and holder.account.held == 5 * SLOT
    with pytest.raises(Stale, match="register the description again"):
        holder.reserve(gone, [1])
    again = shop.space()
    assert again.namespace is not gone.namespace
    shop.stock(holder, again, [1])
    assert shop.known(gone, [1]) == [1], "the same description is the same namespace"
    holder.release(rows)


def test_gauges_count_what_is_there(shop: Shop) -> None:
    holder, space, other = shop.holder(), shop.space(), shop.space(5000)
    shop.stock(holder, space, range(5))
    shop.stock(holder, other, range(2))
    rows, _, _ = holder.lease(space, range(2))
    made, _ = holder.reserve(other, [9])
    gauges = shop.store.gauges()
    assert gauges["arena_bytes"] == shop.store.capacity == MiB
    assert gauges["used_bytes"] == 5 * SLOT + 3 * other.slot
    assert (gauges["known_blocks"], gauges["leased_blocks"], gauges["reserved_blocks"]) == (7, 2, 1)
    assert (gauges["leased_bytes"], gauges["reserved_bytes"]) == (2 * SLOT, other.slot)
    assert shop.store.blocks_by_namespace() == {
        space.namespace.handle: (5, 5 * space.block_bytes),
        other.namespace.handle: (2, 2 * other.block_bytes),
    }
    assert shop.store.belongs(space.keys([1])[0], space.namespace) and not shop.store.belongs(
        space.keys([1])[0], other.namespace
    )
    assert not shop.store.belongs(space.keys([77])[0], space.namespace)
    holder.release(rows)
    holder.abort(made)


def test_check_integrity_sees_a_lease_and_a_reservation_without_a_holder(shop: Shop) -> None:
    holder, space = shop.holder(), shop.space()
    shop.stock(holder, space, [1])
    rows, _, _ = holder.lease(space, [1])
    made, _ = holder.reserve(space, [2])
    account, leases, reserved = holder.holdings()
    for wrong in ((account, {}, reserved), (account, leases, set()), (account, {rows[0]: 2}, reserved)):
        with pytest.raises(AssertionError):
            shop.store.check_integrity([wrong])
    account.held += 1
    with pytest.raises(AssertionError, match="account says"):
        shop.store.check_integrity([(account, leases, reserved)])
    account.held -= 1
    holder.release(rows)
    holder.abort(made)
