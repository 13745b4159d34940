"""Who gets a slot when there are too few: free ones first, then empty slabs of other sizes, then the slots of what is worth least.

`order` says who goes, the ledger and the slabs forget them; no I/O, and what is leased or reserved never goes. A request that cannot be met
takes nothing and evicts nothing. Not thread-safe: the store, which owns it, holds its lock around every call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.errors import Full
from kvtier.format.layout import SLOT_ALIGN
from kvtier.store import policy
from kvtier.store.arena import Arena
from kvtier.store.ledger import Ledger
from kvtier.store.order import Order
from kvtier.store.slabs import SizeClass, Slabs


@dataclass(slots=True)
class Counters:
    """Totals since the start; read without a lock, so a reader may see one call half counted."""

    lookup_keys: int = 0
    lookup_hits: int = 0
    lookup_warm: int = 0  # of these, leading ones in the arena
    lookup_misses: int = 0  # lookups that ended at a key that is not known: one key each, whatever came behind it
    lease_keys: int = 0
    leased_blocks: int = 0
    leased_bytes: int = 0
    sealed_blocks: int = 0
    sealed_bytes: int = 0
    already_blocks: int = 0
    aborted_blocks: int = 0
    evicted_blocks: int = 0
    evicted_bytes: int = 0
    deleted_blocks: int = 0
    expired_blocks: int = 0  # by their namespace's time-to-live
    drained_slabs: int = 0
    full: int = 0
    bad_headers: int = 0
    unserved: Counter[int] = field(
        default_factory=Counter
    )  # keys that leases asked for and did not get, by why they stopped


class Room:
    """The slots of a store and the order in which they are given up.

    poison   fill freed slots with 0x7F
    """

    def __init__(
        self, arena: Arena | None, slabs: Slabs, ledger: Ledger, order: Order, counters: Counters, poison: bool
    ) -> None:
        self._arena = arena
        self._slabs = slabs
        self._ledger = ledger
        self._order = order
        self._counters = counters
        self._poison = poison

    def size_class(self, slot: int, n: int = 1) -> SizeClass:
        """The class of this slot size. When all are taken, the one that was used longest ago goes, of those with nothing in use.

        Raises Full where none can go, or where `n` slots could not be taken afterwards either: nothing is evicted in vain.
        """
        ledger, slabs = self._ledger, self._slabs
        try:
            return slabs.size_class(slot)
        except Full:
            idle = [c.index for c in slabs.classes.values() if ledger.idle[c.index] == slabs.taken(c)]
            gone = policy.source(0, {index: age for index in idle if (age := ledger.youngest(index)) is not None})
            if gone is None or not self._can_take(SizeClass(0, slot), n):
                self._counters.full += 1
                raise
            self._evict(self._order.victims(gone, ledger.idle[gone]))
            return slabs.size_class(slot)

    def take(self, size: SizeClass, n: int) -> Sequence[int]:
        """`n` free slots of this class, evicting what is worth least. Raises Full with nothing taken and nothing evicted."""
        if not self._can_take(size, n):
            self._counters.full += 1
            raise Full(
                "full, retry: what is leased and reserved leaves too little of the arena for blocks of this size"
            )
        pages = self._slabs.take(size, n)
        while len(pages) < n:
            self._make_room(size, n - len(pages))
            pages += self._slabs.take(size, n - len(pages))
        return pages

    def free(self, rows: Sequence[int]) -> None:
        """Forgets rows that nobody leases and gives their slots back."""
        if self._poison and self._arena is not None:
            for row in rows:
                self._arena.poison(self._ledger.page[row] * SLOT_ALIGN, self._ledger.slot[row])
        self._slabs.give(self._ledger.forget(rows))

    def give(self, pages: Sequence[int]) -> None:
        """Slots from `take` that are not used after all."""
        self._slabs.give(pages)

    def _can_take(self, size: SizeClass, n: int) -> bool:
        """Whether `n` slots of this class can be had by evicting all that may go. Cheap unless slabs of other sizes are needed."""
        ledger, slabs = self._ledger, self._slabs
        slots = len(size.free) + ledger.idle[size.index] + slabs.unowned * slabs.slots(size)
        for other in slabs.classes.values():
            if slots >= n:
                break
            if other is not size:
                empty = sum(not slabs.used[slab] for slab in other.slabs)
                slots += (empty + len(ledger.slab_ages(other.index, slabs.slab_pages))) * slabs.slots(size)
        return slots >= n

    def _make_room(self, size: SizeClass, n: int) -> None:
        """Evicts up to `n` blocks of this class, or a slab of the class whose next victim is worth least. `_can_take` has found that one can go."""
        ledger, order = self._ledger, self._order
        order.learn()
        classes = self._slabs.classes.values()
        alone = len(classes) == 1  # as nearly always
        least = (
            {size.index: (0.0, 0)}
            if alone
            else {c.index: worth for c in classes if (worth := order.least(c.index)) is not None}
        )
        while (giver := policy.source(size.index, least)) is not None:
            if giver == size.index:
                self._evict(order.victims(giver, n))
                return
            slab = policy.slab_to_empty(ledger.slab_ages(giver, self._slabs.slab_pages))
            if slab is not None:
                pages = self._slabs.slab_pages
                self._evict(ledger.rows_of_slab(giver, slab * pages, pages))
                self._slabs.release_slab(slab)
                self._counters.drained_slabs += 1
                return
            del least[giver]  # something is in use in each of its slabs
        raise AssertionError("less room than was counted")

    def _evict(self, rows: Sequence[int]) -> None:
        self._counters.evicted_blocks += len(rows)
        self._counters.evicted_bytes += sum(map(self._ledger.nbytes.__getitem__, rows))
        self._order.evicted(rows)
        self.free(rows)
