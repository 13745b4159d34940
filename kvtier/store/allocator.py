"""Which slots exist, which of them are free, and who gets one when there are too few.

A slab is a run of bytes that belongs to one slot size at a time. Slots are named by their page: offset in the arena / 4
KiB. Slot sizes are exact (block rounded up to 4 KiB), so users need not know them; slabs move between sizes when they
hold nothing. Free slots go first, then empty slabs of other sizes, then the slots of what is worth least (`eviction`).
A request that cannot be met takes nothing and evicts nothing. No data, no I/O. Not thread-safe: the owner (`Store`, the
SSD tier) holds its lock around every call.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.errors import Full, Invalid
from kvtier.format.layout import SLOT_ALIGN
from kvtier.format.slots import MIN_SLABS, default_slab
from kvtier.store.arena import Arena
from kvtier.store.eviction import Eviction, slab_to_empty, source
from kvtier.store.ledger import MAX_CLASSES, Ledger
from kvtier.store.store_counters import Counters


@dataclass(slots=True)
class SizeClass:
    """One slot size. `free` is a stack of pages in slabs of this class; `slabs` are their numbers."""

    index: int
    slot_bytes: int
    free: array[int] = field(default_factory=lambda: array("I"))
    slabs: set[int] = field(default_factory=set)


class Slabs:
    """The slots of an arena, or of a file that grows slab by slab.

    arena_bytes   capacity; only whole slabs are used (`usable_bytes`)
    slab_bytes    size of a slab, a multiple of the page; None: by the capacity
    backed        slabs from the start that have memory or disk behind them; the others wait for `back`. None: all
    """

    def __init__(self, arena_bytes: int, slab_bytes: int | None = None, backed: int | None = None) -> None:
        self.slab_bytes = slab_bytes or default_slab(arena_bytes)
        self.slab_pages = self.slab_bytes // SLOT_ALIGN
        self.count = arena_bytes // self.slab_bytes
        self.usable_bytes = self.count * self.slab_bytes
        self.used = array("I", bytes(4 * self.count))  # slots taken, by slab
        self.classes: dict[int, SizeClass] = {}  # by slot size
        self._by_index: list[SizeClass | None] = [None] * (MAX_CLASSES + 1)
        backed = self.count if backed is None else min(backed, self.count)
        self._unbacked = list(range(self.count - 1, backed - 1, -1))
        # slabs without a class; the lowest goes first (it is prefaulted first)
        self._pool = list(range(backed - 1, -1, -1))
        self._owner: list[SizeClass | None] = [None] * self.count

    def size_class(self, slot_bytes: int) -> SizeClass:
        """The class of this slot size, made on first use. Raises Invalid if a slab is too small for it, Full if there
        are too many sizes."""
        found = self.classes.get(slot_bytes)
        if found is not None:
            return found
        if slot_bytes > self.slab_bytes:
            advice = f"make the arena larger (at least {MIN_SLABS * slot_bytes} bytes) or the blocks smaller"
            raise Invalid(f"a block of {slot_bytes} bytes does not fit a slab of {self.slab_bytes}: {advice}")
        index = next((i for i in range(1, MAX_CLASSES + 1) if self._by_index[i] is None), 0)
        if not index:
            spare = next((c for c in self.classes.values() if not self.taken(c)), None)
            if spare is None:
                raise Full(f"blocks of {MAX_CLASSES} different sizes are stored; no more sizes can be taken at once")
            index = spare.index
            self._drop_class(spare)
        made = SizeClass(index, slot_bytes)
        self.classes[slot_bytes] = self._by_index[index] = made
        return made

    def take(self, size: SizeClass, n: int) -> array[int]:
        """Up to `n` free slots: of the class's slabs, then of slabs without a class, then of empty ones of others."""
        while len(size.free) < n and (self._pool or self._reclaim(size)):
            self._adopt(size, self._pool.pop())
        n = min(n, len(size.free))
        cut = len(size.free) - n
        pages = size.free[cut:]
        del size.free[cut:]
        used, per = self.used, self.slab_pages
        for page in pages:
            used[page // per] += 1
        return pages

    @property
    def unbacked(self) -> int | None:
        """The next slab without anything behind it, None if there is none."""
        return self._unbacked[-1] if self._unbacked else None

    def back(self) -> None:
        self._pool.append(self._unbacked.pop())

    def restore(self, pages: npt.NDArray[np.uint32], slots: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Takes exactly these slots, oldest first, before any other is taken. Returns which could be taken. The others
        lie outside or overlap, or are of another size than the youngest of their slab."""
        pages, slots = pages.astype(np.uint32), slots.astype(np.uint32)
        taken = np.zeros(len(pages), np.bool_)
        slab_of = pages // self.slab_pages
        sane = np.flatnonzero((slots > 0) & (slots <= self.slab_bytes) & (slots % SLOT_ALIGN == 0))
        order = sane[np.argsort(slab_of[sane], kind="stable")]
        bounds = np.flatnonzero(np.diff(slab_of[order])) + 1
        pool = set(self._pool)
        for mine in np.split(order, bounds) if len(order) else ():
            # of several sizes that of the youngest has written over the others
            slab, slot = int(slab_of[mine[0]]), int(slots[mine[-1]])
            if slab not in pool or (slot not in self.classes and len(self.classes) >= MAX_CLASSES):
                continue
            size, step, first = self.size_class(slot), slot // SLOT_ALIGN, slab * self.slab_pages
            index, rest = np.divmod(pages[mine].astype(np.int64) - first, step)
            fits = mine[(slots[mine] == slot) & (rest == 0) & (index < self.slots(size))]
            unique, at = np.unique(pages[fits], return_index=True)
            taken[fits[at]] = True
            pool.discard(slab)
            every = first + step * np.arange(self.slots(size), dtype=np.uint32)
            size.free.extend(np.setdiff1d(every, unique)[::-1].tolist())
            size.slabs.add(slab)
            self._owner[slab] = size
            self.used[slab] = len(unique)
        self._pool = sorted(pool, reverse=True)
        return taken

    def indices(self, slots: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
        """The index of the class of each of these slot sizes, all of which have one."""
        found = np.zeros(len(slots), np.uint8)
        for slot, size in self.classes.items():
            found[slots == slot] = size.index
        return found

    def give(self, pages: Iterable[int]) -> None:
        """Slots are free again."""
        used, owners, per = self.used, self._owner, self.slab_pages
        for page in pages:
            slab = page // per
            owner = owners[slab]
            assert owner is not None and used[slab] > 0, f"page {page} was not taken"
            used[slab] -= 1
            owner.free.append(page)

    def release_slab(self, slab: int) -> None:
        """Takes an empty slab from its class. The store empties it first."""
        owner = self._owner[slab]
        assert owner is not None and self.used[slab] == 0
        first = slab * self.slab_pages
        free = np.frombuffer(owner.free, np.uint32)
        kept = free[(free < first) | (free >= first + self.slab_pages)]
        owner.free = array("I", kept.tobytes())
        owner.slabs.discard(slab)
        self._owner[slab] = None
        self._pool.append(slab)

    @property
    def unowned(self) -> int:
        return len(self._pool)

    def slots(self, size: SizeClass) -> int:
        """Slots of this class in one slab."""
        return self.slab_bytes // size.slot_bytes

    def taken(self, size: SizeClass) -> int:
        return sum(self.used[slab] for slab in size.slabs)

    def taken_bytes(self) -> int:
        """Bytes of all taken slots, their padding included."""
        return sum(size.slot_bytes * self.taken(size) for size in self.classes.values())

    def check_integrity(self, taken: dict[int, int]) -> None:
        """Asserts that the ledger's {page: slot bytes} agrees, and that every slot is either free or taken, once."""
        seen = dict(taken)
        for size in self.classes.values():
            assert self._by_index[size.index] is size
            pages = set(size.free)
            assert len(pages) == len(size.free), "a slot is free twice"
            step = size.slot_bytes // SLOT_ALIGN
            for slab in size.slabs:
                assert self._owner[slab] is size
                slots = {slab * self.slab_pages + i * step for i in range(self.slots(size))}
                mine = {page for page in slots if page in seen}
                assert all(seen.pop(page) == size.slot_bytes for page in mine), "a slot of the wrong size"
                assert not mine & pages and mine | (pages & slots) == slots, f"slab {slab}: a slot is lost or doubled"
                assert len(mine) == self.used[slab], f"slab {slab}: {self.used[slab]} counted, {len(mine)} taken"
        assert not seen, "slots taken outside any slab"
        slabs = self._pool + [s for c in self.classes.values() for s in c.slabs] + self._unbacked
        assert sorted(slabs) == list(range(self.count))

    def _adopt(self, size: SizeClass, slab: int) -> None:
        first, step = slab * self.slab_pages, size.slot_bytes // SLOT_ALIGN
        size.free.extend(range(first + (self.slots(size) - 1) * step, first - 1, -step))
        size.slabs.add(slab)
        self._owner[slab] = size

    def _reclaim(self, for_: SizeClass) -> bool:
        for size in self.classes.values():
            # only then can a slab be empty
            if size is not for_ and len(size.free) * size.slot_bytes + size.slot_bytes > self.slab_bytes:
                slab = next((slab for slab in size.slabs if not self.used[slab]), None)
                if slab is not None:
                    self.release_slab(slab)
                    return True
        return False

    def _drop_class(self, size: SizeClass) -> None:
        for slab in list(size.slabs):
            self.release_slab(slab)
        del self.classes[size.slot_bytes]
        self._by_index[size.index] = None


class Allocator:
    """The slots of a store, and what is evicted for them. `poison`: fill freed slots with 0x7F."""

    def __init__(
        self, arena: Arena | None, slabs: Slabs, ledger: Ledger, eviction: Eviction, counters: Counters, poison: bool
    ) -> None:
        self._arena, self._slabs, self._poison = arena, slabs, poison
        self._ledger, self._eviction, self._counters = ledger, eviction, counters

    def size_class(self, slot: int, n: int = 1) -> SizeClass:
        """The class of this slot size. When all are taken, the one unused for longest goes, if nothing in it is in use.
        Raises Full where none can go, or where `n` slots could not be taken afterwards either; nothing is evicted
        then."""
        ledger, slabs = self._ledger, self._slabs
        try:
            return slabs.size_class(slot)
        except Full:
            idle = [c.index for c in slabs.classes.values() if ledger.idle(c.index) == slabs.taken(c)]
            gone = source(0, {index: age for index in idle if (age := ledger.youngest(index)) is not None})
            if gone is None or not self._can_take(SizeClass(0, slot), n):
                self._counters.full += 1
                raise
            self._evict(self._eviction.victims(gone, ledger.idle(gone)))
            return slabs.size_class(slot)

    def take(self, size: SizeClass, n: int) -> Sequence[int]:
        """`n` free slots of this class; evicts what is worth least. Raises Full, with nothing taken or evicted."""
        if not self._can_take(size, n):
            self._counters.full += 1
            raise Full(
                "full, retry: what is leased and reserved leaves too little of the arena for blocks of this size"
            )
        pages = self._slabs.take(size, n)
        while len(pages) < n:
            self._evict_for(size, n - len(pages))
            pages += self._slabs.take(size, n - len(pages))
        return pages

    def free(self, rows: Sequence[int]) -> None:
        """Forgets unleased rows and gives their slots back."""
        if self._poison and self._arena is not None:
            for row in rows:
                page, slot, _ = self._ledger.place(row)
                self._arena.poison(page * SLOT_ALIGN, slot)
        self._slabs.give(self._ledger.forget(rows))

    def give(self, pages: Sequence[int]) -> None:
        self._slabs.give(pages)

    def _can_take(self, size: SizeClass, n: int) -> bool:
        """Whether `n` slots are there if all goes that may. Cheap unless slabs of other sizes are needed."""
        ledger, slabs = self._ledger, self._slabs
        slots = len(size.free) + ledger.idle(size.index) + slabs.unowned * slabs.slots(size)
        for other in slabs.classes.values():
            if slots >= n:
                break
            if other is not size:
                empty = sum(not slabs.used[slab] for slab in other.slabs)
                slots += (empty + len(ledger.slab_ages(other.index, slabs.slab_pages))) * slabs.slots(size)
        return slots >= n

    def _evict_for(self, size: SizeClass, n: int) -> None:
        """Evicts up to `n` blocks of this class, or a slab of the class whose next victim is worth least."""
        ledger, eviction = self._ledger, self._eviction
        eviction.learn()
        classes = self._slabs.classes.values()
        if len(classes) == 1:  # as nearly always
            least = {size.index: (0.0, 0)}
        else:
            least = {c.index: worth for c in classes if (worth := eviction.least(c.index)) is not None}
        while (giver := source(size.index, least)) is not None:
            if giver == size.index:
                self._evict(eviction.victims(giver, n))
                return
            slab = slab_to_empty(ledger.slab_ages(giver, self._slabs.slab_pages))
            if slab is not None:
                pages = self._slabs.slab_pages
                self._evict(ledger.rows_of_slab(giver, slab * pages, pages))
                self._slabs.release_slab(slab)
                self._counters.drained_slabs += 1
                return
            del least[giver]  # something is in use in each of its slabs
        raise AssertionError("fewer slots than were counted")

    def _evict(self, rows: Sequence[int]) -> None:
        self._counters.evicted_blocks += len(rows)
        self._counters.evicted_bytes += self._ledger.block_bytes(rows)
        self._eviction.evicted(rows)
        self.free(rows)
