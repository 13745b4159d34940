"""The store's verbs for who moves blocks between the tiers, and what the store asks of the tiers below it.

Down: hold -> copy out -> let_go. Up: make_place -> copy in -> finish_place. As a client's lease and reserve, but one block at a time, without caps,
without ids and without counting as use. Share the store's lock and ledger; never hold the lock while bytes move.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from kvtier.errors import Stale
from kvtier.format.layout import SLOT_ALIGN, Extents
from kvtier.store.accounts import Account
from kvtier.store.arena import Arena
from kvtier.store.ledger import Ledger
from kvtier.store.namespaces import Namespace
from kvtier.store.order import Order
from kvtier.store.room import Room


class Lower(Protocol):
    """What lies below the arena, as far as the store asks. None of these waits for a disk or a network; all are called without the store's lock,
    but for `find` and `unsure`, which take no lock of their own."""

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether it is known down there."""

    def unsure(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether `find` may say more in some milliseconds."""

    def offer(self, keys: Sequence[bytes], namespace: Namespace) -> None:
        """These blocks were sealed."""

    def offer_again(self, keys: Sequence[bytes], handle: int, tenant: str) -> None:
        """These blocks, of one namespace, were used for the second time: what was left out of a tier may be worth its bytes now."""

    def delete(self, keys: Sequence[bytes]) -> None:
        """These blocks are to be forgotten."""

    def drop(self, namespace: Namespace) -> int:
        """All blocks of a namespace are to be forgotten; how many there were."""

    def handles(self) -> set[int]:
        """Handles of the namespaces that have blocks there."""


class Movers:
    """Accounts and slots of those who move blocks. `account` makes an empty account of the daemon's own under a tenant."""

    def __init__(
        self,
        arena: Arena,
        ledger: Ledger,
        order: Order,
        room: Room,
        lock: threading.Lock,
        account: Callable[[str], Account],
    ) -> None:
        self._arena = arena
        self._ledger = ledger
        self._order = order
        self._room = room
        self._lock = lock
        self._account = account
        self.accounts: list[Account] = []

    def account(self, tenant: str) -> Account:
        """A new account for moving a tenant's blocks. No cap applies: who moves holds few blocks at once."""
        made = self._account(tenant)
        with self._lock:
            self.accounts.append(made)
        return made

    def hold(self, account: Account, keys: Sequence[bytes], most: int) -> dict[int, int]:
        """Pins those of these keys (each once) that are in the arena, one at least and up to `most` bytes: {index: row}. `let_go` ends it."""
        ledger = self._ledger
        with self._lock:
            found: dict[int, int] = {}
            total = 0
            for i, row in enumerate(ledger.find_each(keys)):
                if row is None or row in account.leased:
                    continue
                total += ledger.slot[row]
                if total > most and found:
                    break
                found[i] = row
            rows = list(found.values())
            account.tenant.held += ledger.lease(rows, keep=True)
            account.held += sum(map(ledger.slot.__getitem__, rows))
            account.leased.update(rows)
            return found

    def let_go(self, account: Account, rows: Sequence[int], spoiled: Collection[int] = ()) -> list[int]:
        """Ends `hold` on these rows; those in `spoiled` are forgotten. Returns the rows that were deleted while they were held."""
        ledger = self._ledger
        with self._lock:
            gone = [row for row in rows if not ledger.is_sealed(row)]
            for row in spoiled:
                if ledger.is_sealed(row):
                    ledger.doom(row)
            account.leased.difference_update(rows)
            account.held -= sum(map(ledger.slot.__getitem__, rows))
            idle, doomed = ledger.release(rows)
            account.tenant.held -= idle
            self._room.free(doomed)
            return gone

    def rank(self, row: int) -> int:
        """How often a held row was used again, as far as that is told apart."""
        return self._ledger.rank[row]

    def slot_of(self, row: int) -> tuple[memoryview, int]:
        """The whole slot of a held or reserved row, and the bytes of its block."""
        start = self._ledger.page[row] * SLOT_ALIGN
        return self._arena.memory[start : start + self._ledger.slot[row]], self._ledger.nbytes[row]

    def make_place(self, account: Account, namespace: Namespace, extents: Extents, key: bytes) -> int | None:
        """Takes a slot for a block that comes up from a lower tier: its row, None if it is here already. Raises Full, Invalid, Stale."""
        slot = extents.slot_bytes
        with self._lock:
            if namespace.dropped:
                raise Stale("this namespace was dropped")
            if self._ledger.find_each([key])[0] is not None:
                return None
            size = self._room.size_class(slot)
            pages = self._room.take(size, 1)
            try:
                rank = self._order.recall([key], [None], use=0)
                (row,) = self._ledger.reserve(
                    pages, [key], extents.block_bytes, slot, size.index, namespace.handle, rank
                )
            except BaseException:
                self._room.give(pages)
                raise
            account.held += slot
            account.tenant.held += slot
            account.reserved.add(row)
            return row

    def finish_place(self, account: Account, namespace: Namespace, row: int, checksum: int | None) -> bool:
        """Makes the block in this slot, verified against its checksum, visible; without a checksum gives the slot back. Whether it is visible."""
        ledger = self._ledger
        with self._lock:
            account.reserved.discard(row)
            account.held -= ledger.slot[row]
            account.tenant.held -= ledger.slot[row]
            if checksum is not None and not namespace.dropped:
                ledger.checksum[row] = checksum
                if ledger.seal([row])[0]:
                    return True
            self._room.free([row])
            return False
