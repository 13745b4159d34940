"""Who sees what: the verbs over arena, slabs and ledger, under one lock. Puts, gets, promotions and pins are all made of these.

reserve -> fill -> seal | abort        lease -> read -> release        lookup, delete

Space is taken before bytes arrive and nothing is visible before it is sealed; sealed blocks never change. No call waits for room, for
another client or for a disk: it answers less, or Full at once. The lock is held for bookkeeping only, never while bytes are copied or hashed.
Callers pass an `Account` (their caps) and get rows back; who keeps rows and ids for a client is `session`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier import policy
from kvtier.arena import Arena
from kvtier.block import header_template, headers
from kvtier.errors import Full, Invalid, Lost
from kvtier.layout import HEADER_BYTES, SLOT_ALIGN
from kvtier.ledger import Ledger
from kvtier.namespaces import Namespace, Namespaces
from kvtier.slabs import SizeClass, Slabs

PRESENT = 2**64 - 1
MAX_KEYS = 16_384
_DROP_STEP = 2048  # blocks forgotten in one hold of the lock: about 5 ms
END, MISS, COLD, CAP, NO_TIER = range(5)  # why an answer stopped; the numbers of `Stop` in the proto


@dataclass(slots=True, eq=False)
class Tenant:
    """What all sessions of one tenant hold, in bytes; a slot held by several of them counts once."""

    name: str
    held: int = 0


@dataclass(slots=True, eq=False)
class Account:
    """What one session holds, in bytes of slots leased and reserved. Changed under the store's lock only."""

    tenant: Tenant
    held: int = 0


@dataclass(slots=True, eq=False)
class Reservation:
    """Slots taken for a writer. `rows[i]` is None where key i was present already or entry i is finished."""

    namespace: Namespace
    nbytes: int
    rows: list[int | None]
    pages: list[int]
    headers: list[bytes]


@dataclass(slots=True)
class Counters:
    """Totals since the start; read without a lock, so a reader may see one call half counted."""

    lookup_keys: int = 0
    lookup_hits: int = 0
    leased_blocks: int = 0
    leased_bytes: int = 0
    sealed_blocks: int = 0
    sealed_bytes: int = 0
    already_blocks: int = 0
    aborted_blocks: int = 0
    evicted_blocks: int = 0
    evicted_bytes: int = 0
    deleted_blocks: int = 0
    drained_slabs: int = 0
    full: int = 0
    bad_headers: int = 0
    stops: Counter[int] = field(default_factory=Counter)


class Store:
    """All blocks of a daemon.

    poison   fill freed slots with 0x7F (tests): a reader of a slot that is no longer its own sees NaN codes, not plausible bytes
    """

    def __init__(self, arena: Arena, *, poison: bool = False) -> None:
        self.arena = arena
        self.counters = Counters()
        self._poison = poison
        self._slabs = Slabs(arena.nbytes)
        self._ledger = Ledger()
        self._lock = threading.Lock()
        self._tenants: dict[str, Tenant] = {}
        self.namespaces = Namespaces(self._handles_in_use)
        self.capacity = self._slabs.usable_bytes
        self.session_cap = int(self.capacity * policy.SESSION_SHARE)
        self.pin_cap = int(self.capacity * policy.PIN_SHARE)
        self.tenant_cap = int(self.capacity * policy.TENANT_SHARE)

    def account(self, tenant: str) -> Account:
        """A new, empty account under a tenant."""
        with self._lock:
            return Account(self._tenants.setdefault(tenant, Tenant(tenant)))

    # -- writers

    def reserve(
        self, account: Account, namespace: Namespace, resolved: tuple[int, int, int, int, int], context: bytes, keys: list[bytes], hashes: list[bytes]
    ) -> tuple[Reservation, list[int]]:
        """Takes a slot for every key that is not sealed yet; all or nothing. Returns the reservation and an offset or PRESENT per key.

        Writes header and padding of each slot. Raises Full (arena, session or tenant; at once), Invalid for a block no slab can hold.
        """
        extents = namespace.extents(resolved)
        slot, nbytes = extents.slot_bytes, extents.block_bytes
        with self._lock:
            present = self._ledger.find_each(keys)
            fresh = [i for i, row in enumerate(present) if row is None]
            need = slot * len(fresh)
            self._check_caps(account, need)
            size = self._slabs.size_class(slot)
            pages = self._take(size, len(fresh))
            rows = self._ledger.reserve(pages, [keys[i] for i in fresh], nbytes, slot, size.index, namespace.handle)
            account.held += need
            account.tenant.held += need
        if not fresh:
            return Reservation(namespace, nbytes, [None] * len(keys), [], []), [PRESENT] * len(keys)
        template = header_template(namespace.digest, resolved, context, extents, namespace.description.hashing.nbytes)
        made = headers(template, [keys[i] for i in fresh], [hashes[i] for i in fresh]).tobytes()
        heads = [made[at : at + HEADER_BYTES] for at in range(0, len(made), HEADER_BYTES)]
        memory, padding = self.arena.memory, bytes(slot - nbytes)
        offsets = [PRESENT] * len(keys)
        all_rows: list[int | None] = [None] * len(keys)
        all_pages = [0] * len(keys)
        all_heads = [b""] * len(keys)
        for i, page, row, head in zip(fresh, pages, rows, heads, strict=True):
            offset = page * SLOT_ALIGN
            memory[offset : offset + HEADER_BYTES] = head
            memory[offset + nbytes : offset + slot] = padding
            offsets[i], all_rows[i], all_pages[i], all_heads[i] = offset, row, page, head
        return Reservation(namespace, nbytes, all_rows, all_pages, all_heads), offsets

    def seal(self, account: Account, reservation: Reservation, indices: Sequence[int], checksums: Sequence[int] | None = None) -> int:
        """Makes these entries visible, or frees their slots where the key was sealed meanwhile. Returns the number of keys now known.

        Entries that are finished already are passed over. `checksums` are the blocks' digests where the caller has computed them, one per index.
        Under a dropped namespace nothing is sealed. A block whose header the writer changed is dropped and counted; Lost is raised for it
        after the others are sealed.
        """
        good: list[int] = []
        bad: list[int] = []
        memory = self.arena.memory
        for i in indices:
            if reservation.rows[i] is not None:
                offset = reservation.pages[i] * SLOT_ALIGN
                (good if memory[offset : offset + HEADER_BYTES] == reservation.headers[i] else bad).append(i)
        known = len(indices) - len(bad)
        with self._lock:
            good = [i for i in good if reservation.rows[i] is not None]  # another socket of the session may have been quicker
            rows = [row for i in good if (row := reservation.rows[i]) is not None]
            if reservation.namespace.dropped:  # under the lock: `drop` sets this before it looks for blocks
                self._close(account, reservation, good)
                self._free(rows)
                self.counters.aborted_blocks += len(rows)
                return 0
            if checksums is not None:
                known_sums = dict(zip(indices, checksums, strict=True))
                for i, row in zip(good, rows, strict=True):
                    self._ledger.checksum[row] = known_sums[i]
            sealed = self._ledger.seal(rows)
            losers = [row for row, won in zip(rows, sealed, strict=True) if not won]
            self._close(account, reservation, good)
            self._free(losers)
            self.counters.sealed_blocks += len(rows) - len(losers)
            self.counters.sealed_bytes += (len(rows) - len(losers)) * reservation.nbytes
            self.counters.already_blocks += len(losers)
        if bad:
            self.abort(account, reservation, bad)
            self.counters.bad_headers += len(bad)
            raise Lost(f"the header of {len(bad)} blocks was changed by the writer; they are dropped")
        return known

    def abort(self, account: Account, reservation: Reservation, indices: Sequence[int]) -> int:
        """Frees the slots of these entries. Returns how many; finished entries are passed over."""
        with self._lock:
            rows = [row for i in indices if (row := reservation.rows[i]) is not None]
            self._close(account, reservation, indices)
            self._free(rows)
            self.counters.aborted_blocks += len(rows)
        return len(rows)

    # -- readers

    def lookup(self, keys: list[bytes]) -> int:
        """The number of leading keys that are known. No side effects but counting."""
        with self._lock:
            known = len(self._ledger.find(keys))
            self.counters.lookup_keys += len(keys)
            self.counters.lookup_hits += known
        return known

    def lookup_each(self, keys: list[bytes]) -> list[bool]:
        """For every single key whether it is known. No side effects."""
        with self._lock:
            return [row is not None for row in self._ledger.find_each(keys)]

    def lease(self, account: Account, keys: list[bytes]) -> tuple[list[int], list[int], int]:
        """Pins the leading known blocks: (rows, offsets, why it stopped), one each per key. A leased slot never moves, goes or changes.

        A key given twice is pinned once. Shortened by the caps of session and tenant (CAP). Never waits, never promotes.
        """
        ledger = self._ledger
        with self._lock:
            rows = ledger.find(keys)
            stop = END if len(rows) == len(keys) else MISS
            unique = list(dict.fromkeys(rows))
            total = sum(map(ledger.slot.__getitem__, unique))
            if account.held + total > self.session_cap or account.tenant.held + total > self.tenant_cap:
                asked = len(rows)
                rows, unique, total = self._fit(account, rows)
                stop = CAP if len(rows) < asked else stop
            account.held += total
            account.tenant.held += ledger.lease(unique)
            page = ledger.page
            offsets = [page[row] * SLOT_ALIGN for row in rows]
            self.counters.leased_blocks += len(rows)
            self.counters.leased_bytes += total
            self.counters.stops[stop] += 1
        return rows, offsets, stop

    def release(self, account: Account, rows: Sequence[int]) -> None:
        """Ends a lease on these rows (each once), which the caller holds. Deleted blocks that nobody holds any more are freed."""
        with self._lock:
            account.held -= sum(map(self._ledger.slot.__getitem__, rows))
            idle, doomed = self._ledger.release(rows)
            account.tenant.held -= idle
            self._free(doomed)

    def delete(self, keys: list[bytes]) -> int:
        """Forgets these blocks now; a leased one's slot is freed after its last lease. Returns how many were known. Reservations are untouched."""
        with self._lock:
            rows = list(dict.fromkeys(row for row in self._ledger.find_each(keys) if row is not None))
            self._forget(rows)
        return len(rows)

    def checksums(self, rows: Sequence[int]) -> list[int]:
        """What the ledger has as digests of these rows, 0 where nobody has computed one. The caller holds a lease on them."""
        return list(map(self._ledger.checksum.__getitem__, rows))

    def learn_checksum(self, row: int, digest: int) -> None:
        """Keeps the digest of a leased block."""
        self._ledger.checksum[row] = digest

    # -- operators

    def belongs(self, key: bytes, namespace: Namespace) -> bool:
        """Whether a known key's block is of this namespace."""
        with self._lock:
            row = self._ledger.find_each([key])[0]
            return row is not None and self._ledger.namespace[row] == namespace.handle

    def drop(self, namespace: Namespace) -> int:
        """Forgets a namespace and all its blocks, in steps that leave the lock in between. Returns the number of blocks."""
        self.namespaces.drop(namespace)
        dropped = 0
        while True:
            with self._lock:
                rows = self._ledger.rows_of_namespace(namespace.handle, _DROP_STEP)
                if not rows:
                    return dropped
                self._forget(rows)
            dropped += len(rows)

    def gauges(self) -> dict[str, int]:
        """Bytes and blocks as they stand. Costs milliseconds at a million blocks; holds the lock while it counts."""
        with self._lock:
            held, reserved = self._ledger.held_rows(), self._ledger.reserved_rows()
            return {
                "arena_bytes": self.capacity,
                "arena_ready_bytes": min(self.arena.ready_bytes, self.capacity),
                "used_bytes": self._slabs.taken_bytes(),
                "known_blocks": self._ledger.known,
                "leased_blocks": len(held),
                "leased_bytes": sum(map(self._slot_bytes, held)),
                "reserved_blocks": len(reserved),
                "reserved_bytes": sum(map(self._slot_bytes, reserved)),
            }

    def blocks_by_namespace(self) -> dict[int, tuple[int, int]]:
        """{handle: (sealed blocks, their bytes)}."""
        with self._lock:
            return self._ledger.by_namespace()

    def check_integrity(self, holders: Sequence[tuple[Account, dict[int, int], set[int]]] | None = None) -> None:
        """Asserts that ledger, slabs and accounts agree with ground truth; slow. Holds the lock.

        `holders` is what the sessions believe: (account, {row: leases}, reserved rows) each; given, it must explain every lease and reservation.
        """
        with self._lock:
            pages = self._ledger.check_integrity()
            self._slabs.check_integrity({page: self._slot_bytes(row) for page, row in pages.items()})
            assert self._slabs.taken_bytes() <= self.capacity
            held, reserved = self._ledger.held_rows(), self._ledger.reserved_rows()
            total = sum(map(self._slot_bytes, held)) + sum(map(self._slot_bytes, reserved))
            assert sum(tenant.held for tenant in self._tenants.values()) == total, "tenants' accounts do not add up"
            if holders is not None:
                leases: Counter[int] = Counter()
                claimed: set[int] = set()
                for account, rows, waiting in holders:
                    leases.update(rows)
                    assert not claimed & waiting, "two sessions hold one reservation"
                    claimed |= waiting
                    mine = sum(self._slot_bytes(row) * n for row, n in rows.items()) + sum(map(self._slot_bytes, waiting))
                    assert account.held == mine, f"account says {account.held}, session holds {mine}"
                assert dict(leases) == held and claimed == reserved, "a lease or reservation without a holder"

    # -- under the lock

    def _slot_bytes(self, row: int) -> int:
        return self._ledger.slot[row]

    def _check_caps(self, account: Account, need: int) -> None:
        for what, held, cap in (("session", account.held, self.session_cap), ("tenant", account.tenant.held, self.tenant_cap)):
            if need > cap:
                raise Invalid(f"{need} bytes in one call; one {what} may hold {cap}: send fewer blocks a call or make the arena larger")
            if held + need > cap:
                self.counters.full += 1
                raise Full(f"full, retry: this {what} holds {held} of the {cap} bytes it may hold at once, and asks for {need} more")

    def _fit(self, account: Account, rows: list[int]) -> tuple[list[int], list[int], int]:
        """The leading part of `rows` that the caps leave room for: (rows, unique rows, bytes)."""
        room = max(0, self.session_cap - account.held)
        tenant_room = max(0, self.tenant_cap - account.tenant.held)
        seen: dict[int, None] = {}
        total = fresh = 0
        for i, row in enumerate(rows):
            if row in seen:
                continue
            slot = self._slot_bytes(row)
            fresh += 0 if self._ledger.leases[row] else slot
            if total + slot > room or fresh > tenant_room:
                return rows[:i], list(seen), total
            seen[row] = None
            total += slot
        return rows, list(seen), total

    def _take(self, size: SizeClass, n: int) -> Sequence[int]:
        """`n` free slots of this class, evicting what is oldest. Raises Full with nothing taken."""
        pages = self._slabs.take(size, n)
        while len(pages) < n:
            if not self._make_room(size, n - len(pages)):
                self._slabs.give(pages)
                self.counters.full += 1
                raise Full("full, retry: everything in the arena is leased or reserved")
            pages += self._slabs.take(size, n - len(pages))
        return pages

    def _make_room(self, size: SizeClass, n: int) -> bool:
        """Evicts up to `n` blocks of this class, or empties a slab of the class with the oldest blocks. False if nothing can go."""
        ledger = self._ledger
        oldest = {c.index: age for c in self._slabs.classes.values() if (age := ledger.oldest(c.index)) is not None}
        while (giver := policy.source(size.index, oldest)) is not None:
            if giver == size.index:
                self._evict(ledger.victims(giver, n))
                return True
            slab = policy.slab_to_empty(ledger.slab_ages(giver, self._slabs.slab_pages))
            if slab is not None:
                pages = self._slabs.slab_pages
                self._evict(ledger.rows_of_slab(giver, slab * pages, pages))
                self._slabs.release_slab(slab)
                self.counters.drained_slabs += 1
                return True
            del oldest[giver]  # something is in use in each of its slabs
        return False

    def _forget(self, rows: Sequence[int]) -> None:
        """Takes sealed rows out of the index; slots of leased ones follow after their last lease."""
        leases = self._ledger.leases
        for row in rows:
            if leases[row]:
                self._ledger.doom(row)
        self._free([row for row in rows if not leases[row]])
        self.counters.deleted_blocks += len(rows)

    def _evict(self, rows: Sequence[int]) -> None:
        self.counters.evicted_blocks += len(rows)
        self.counters.evicted_bytes += sum(map(self._ledger.nbytes.__getitem__, rows))
        self._free(rows)

    def _free(self, rows: Sequence[int]) -> None:
        if self._poison:
            for row in rows:
                self.arena.poison(self._ledger.page[row] * SLOT_ALIGN, self._slot_bytes(row))
        self._slabs.give(self._ledger.forget(rows))

    def _close(self, account: Account, reservation: Reservation, indices: Sequence[int]) -> None:
        """Takes entries out of a reservation and its accounts."""
        for i in indices:
            row = reservation.rows[i]
            if row is not None:
                reservation.rows[i] = None
                slot = self._slot_bytes(row)
                account.held -= slot
                account.tenant.held -= slot

    def _handles_in_use(self) -> set[int]:
        with self._lock:
            return self._ledger.handles()
