"""The memory tier: verbs of which puts, gets, promotions and pins are made, under one lock.

reserve -> fill -> seal | abort    lease -> read -> release    lookup, delete    hold, let_go, make_place, finish_place

Space is taken before bytes arrive and nothing is visible before it is sealed; sealed blocks never change. No call waits
for space, for another client or for a disk: it answers less, or Full at once. The lock is held for bookkeeping only,
never while bytes are copied or hashed. Thread-safe. Callers pass an `Account` (their caps) and get rows back;
`server.sessions` keeps rows and ids for a client.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

from kvtier.errors import Full, Invalid, Lost, Stale
from kvtier.format.block import header_template, headers
from kvtier.format.layout import HEADER_BYTES, SLOT_ALIGN, Extents
from kvtier.protocol.stops import PRESENT, Stop
from kvtier.store.accounts import Account, Reservation, Tenant
from kvtier.store.allocator import Allocator, Slabs
from kvtier.store.arena import Arena
from kvtier.store.eviction import PIN_SHARE, SESSION_SHARE, TENANT_SHARE, Aging, Eviction
from kvtier.store.ledger import Ledger, by_namespace
from kvtier.store.namespaces import Namespace, Namespaces
from kvtier.store.store_counters import Counters

_LOOK = 512  # keys of one question to the tiers below
_DROP_STEP = 2048  # blocks forgotten in one hold of the lock: about 5 ms


class LowerTiers(Protocol):
    """What the store asks of the tiers below. None of these waits for a disk or a network. All are called without the
    store's lock, but for `find` and `unsure`, which take no lock of their own."""

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether it is known down there."""

    def unsure(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether `find` may say more in some milliseconds."""

    def offer(self, keys: Sequence[bytes], namespace: Namespace) -> None:
        """These blocks were sealed."""

    def offer_again(self, keys: Sequence[bytes], handle: int, tenant: str) -> None:
        """These blocks, of one namespace, were used for the second time: a tier that refused them may want them now."""

    def delete(self, keys: Sequence[bytes]) -> None:
        """These blocks are to be forgotten."""

    def drop(self, namespace: Namespace) -> int:
        """All blocks of a namespace are to be forgotten; how many there were."""

    def handles(self) -> set[int]:
        """Handles of the namespaces that have blocks there."""


class Store:
    """All blocks of a daemon. `poison`: fill freed slots with 0x7F (tests): who reads one too late sees NaN codes."""

    def __init__(self, arena: Arena, *, poison: bool = False) -> None:
        self.arena = arena
        self.counters = Counters()
        self._slabs = Slabs(arena.nbytes)
        self._ledger = Ledger()
        self._eviction = Eviction(self._ledger)
        self._allocator = Allocator(arena, self._slabs, self._ledger, self._eviction, self.counters, poison)
        self._lock = threading.Lock()
        self._tenants: dict[str, Tenant] = {}
        self._moving: list[Account] = []
        self.aging = Aging(self._ledger, self._lock, self.counters, self._allocator.free)
        self.lower: LowerTiers | None = None
        self.namespaces = Namespaces(self._handles_in_use, self._purge)
        self.capacity = self._slabs.usable_bytes
        self.session_cap = int(self.capacity * SESSION_SHARE)
        self.pin_cap = int(self.capacity * PIN_SHARE)
        self.tenant_cap = int(self.capacity * TENANT_SHARE)

    def account(self, tenant: str, own: bool = False) -> Account:
        """A new, empty account under a tenant."""
        with self._lock:
            return Account(self._tenants.setdefault(tenant, Tenant(tenant)), own=own)

    def reserve(
        self,
        account: Account,
        namespace: Namespace,
        resolved: tuple[int, int, int, int, int],
        context: bytes,
        keys: list[bytes],
        hashes: list[bytes],
    ) -> tuple[Reservation, list[int]]:
        """Takes a slot for every key that is not sealed yet, or none. Returns the reservation, and an offset or PRESENT
        a key. Writes header and padding. Raises Full at once (arena, session or tenant), Invalid for a block no slab
        can hold."""
        extents = namespace.extents(resolved)
        slot = extents.slot_bytes
        n = len(keys)
        reservation = Reservation(namespace, extents.block_bytes, [None] * n, [0] * n, [b""] * n)
        offsets = [PRESENT] * n
        with self._lock:
            if namespace.dropped:
                raise Stale("this namespace was dropped: register the description again")
            present = self._ledger.find_each(keys)
            fresh = [i for i, row in enumerate(present) if row is None]
            if not fresh:
                return reservation, offsets
            self._check_caps(account, slot * len(fresh))
            pages, rows = self._take(namespace, extents, keys, present)
            self._charge(account, slot * len(rows))
        for i, page, row in zip(fresh, pages, rows, strict=True):
            reservation.rows[i], reservation.pages[i], offsets[i] = row, page, page * SLOT_ALIGN
        try:
            nbytes = namespace.description.hashing.nbytes
            template = header_template(namespace.digest, resolved, context, extents, nbytes)
            heads = headers(template, [keys[i] for i in fresh], [hashes[i] for i in fresh])
            self._write_heads(reservation, fresh, heads.tobytes(), slot)
        except BaseException:  # nothing stays taken, whatever it is
            self.abort(account, reservation, fresh)
            raise
        return reservation, offsets

    def seal(
        self, account: Account, reservation: Reservation, indices: Sequence[int], checksums: Sequence[int] | None = None
    ) -> int:
        """Makes these entries (each once) visible; frees slots whose key was sealed meanwhile. Returns how many are
        stored.

        Entries that are finished already are passed over; those that were aborted or dropped do not count. `checksums`
        are the blocks' digests where the caller has computed them, one per index. Under a dropped namespace nothing is
        sealed. A block whose header the writer changed is dropped and counted; Lost is raised for it after the others
        are sealed.
        """
        good: list[int] = []
        bad: list[int] = []
        memory = self.arena.memory
        for i in indices:
            if reservation.rows[i] is not None:
                offset = reservation.pages[i] * SLOT_ALIGN
                (good if memory[offset : offset + HEADER_BYTES] == reservation.headers[i] else bad).append(i)
        with self._lock:
            if reservation.namespace.dropped:  # under the lock: `drop` sets this before it looks for blocks
                self._undo(account, reservation, indices)
                reservation.lost.update(indices)
                return 0
            # another socket of the session may have been quicker
            good = [i for i in good if reservation.rows[i] is not None]
            rows = [row for i in good if (row := reservation.rows[i]) is not None]
            if checksums is not None:
                digests = dict(zip(indices, checksums, strict=True))
                self._ledger.set_checksums(rows, map(digests.__getitem__, good))
            keys = self._ledger.keys(rows)
            sealed = self._ledger.seal(rows)
            losers = [row for row, won in zip(rows, sealed, strict=True) if not won]
            self._close(account, reservation, good)
            self._allocator.free(losers)
            dropped = self._undo(account, reservation, bad)
            self.counters.sealed_blocks += len(rows) - len(losers)
            self.counters.sealed_bytes += (len(rows) - len(losers)) * reservation.nbytes
            self.counters.already_blocks += len(losers)
            self.counters.bad_headers += dropped
        if (lower := self.lower) is not None and rows:
            lower.offer([key for key, won in zip(keys, sealed, strict=True) if won], reservation.namespace)
        if dropped:
            raise Lost(f"the header of {dropped} blocks was changed by the writer; they are dropped")
        return reservation.stored(indices)

    def abort(self, account: Account, reservation: Reservation, indices: Sequence[int]) -> int:
        """Frees the slots of these entries. Returns how many; finished entries are passed over."""
        with self._lock:
            return self._undo(account, reservation, indices)

    def lookup(self, keys: list[bytes]) -> int:
        """How many leading keys are known in any tier. No side effects but counting."""
        return self.lookup_tiers(keys)[0]

    def lookup_tiers(self, keys: list[bytes]) -> tuple[int, int]:
        """How many leading keys are known in any tier, and how many in the arena. No side effects but counting."""
        counters = self.counters
        with self._lock:
            known = warm = len(self._ledger.find(keys))
        while self.lower is not None and known < len(keys):
            part = self.known_each(keys[known : known + _LOOK])
            known += part.index(False) if False in part else len(part)
            if False in part and self.lower.unsure(keys[known : known + 1])[0]:
                return known, warm  # who asks is told to ask again: counted then
            if False in part:
                break
        with self._lock:
            counters.lookup_keys += len(keys)
            counters.lookup_hits += known
            counters.lookup_warm += warm
            counters.lookup_misses += known < len(keys)
        return known, warm

    def lookup_each(self, keys: Sequence[bytes]) -> list[bool]:
        """For every single key whether it is in the arena. No side effects."""
        with self._lock:
            return [row is not None for row in self._ledger.find_each(keys)]

    def known_each(self, keys: Sequence[bytes]) -> list[bool]:
        """For every single key whether any tier has it. No side effects."""
        # The tiers first: a block on its way up is in one of them until it is in the arena.
        below = lower.find(keys) if (lower := self.lower) is not None else [False] * len(keys)
        return [a or b for a, b in zip(self.lookup_each(keys), below, strict=True)]

    def lease(self, account: Account, keys: list[bytes]) -> tuple[list[int], list[int], int]:
        """Leases the leading known blocks: (rows, offsets, why it stopped), one each per key. Never waits or promotes.
        A leased slot never moves, goes or changes. A key given twice is leased once. The caps shorten it (Stop.CAP)."""
        ledger = self._ledger
        with self._lock:
            rows = ledger.find(keys)
            stop = Stop.END if len(rows) == len(keys) else Stop.MISS
            unique = list(dict.fromkeys(rows))
            total = ledger.slot_bytes(unique)
            if account.held + total > self.session_cap or account.tenant.held + total > self.tenant_cap:
                asked = len(rows)
                rows, unique, total = self._fit(account, rows)
                stop = Stop.CAP if len(rows) < asked else stop
            again = self._eviction.used(unique)
            self._charge(account, total, ledger.lease(unique))
            offsets = [page * SLOT_ALIGN for page in ledger.pages(rows)]
            if stop == Stop.MISS and (lower := self.lower) is not None:
                rest = [keys[len(rows)]]
                stop = Stop.COLD if lower.find(rest)[0] or lower.unsure(rest)[0] else stop
            if not account.own:
                self.counters.lease_keys += len(keys)
                self.counters.leased_blocks += len(rows)
                self.counters.leased_bytes += total
                self.counters.unserved[stop] += len(keys) - len(rows)
        if again and (lower := self.lower) is not None:
            lower.offer_again(ledger.keys(again), ledger.namespace(again[0]), account.tenant.name)
        return rows, offsets, stop

    def release(self, account: Account, rows: Sequence[int]) -> None:
        """Ends the caller's lease on these rows (each once). Deleted blocks without another lease are freed."""
        with self._lock:
            self._release(account, rows)

    def delete(self, keys: list[bytes]) -> int:
        """Forgets these blocks now; a leased one's slot is freed after its last lease. Returns how many were known.
        Reservations stay. Here, below, here again: a copy on its way down or up looks afterwards whether the block is
        still there."""
        known = self.forget(keys)
        if (lower := self.lower) is not None:
            known |= {key for key, here in zip(keys, lower.find(keys), strict=True) if here}
            lower.delete(keys)
            known |= self.forget(keys)
        return len(known)

    def forget(self, keys: Sequence[bytes]) -> set[bytes]:
        """Forgets these blocks in the arena alone. Returns those that were known."""
        with self._lock:
            found = {key: row for key, row in zip(keys, self._ledger.find_each(keys), strict=True) if row is not None}
            self._forget(list(found.values()))
            return set(found)

    def checksums(self, rows: Sequence[int]) -> list[int]:
        """Digests of these leased rows, 0 where none was computed yet."""
        return self._ledger.checksums(rows)

    def learn_checksum(self, row: int, digest: int) -> None:
        self._ledger.set_checksums([row], [digest])

    # -- between the tiers. Down: hold -> copy out -> let_go. Up: make_place -> copy in -> finish_place. As lease and
    # reserve of a client, but without caps, without ids and without counting as use. The lock is not held while bytes
    # move.

    def account_for_moves(self, tenant: str) -> Account:
        """A new account for moving a tenant's blocks. No cap applies: it holds few blocks at once."""
        made = self.account(tenant, own=True)
        with self._lock:
            self._moving.append(made)
        return made

    def hold(self, account: Account, keys: Sequence[bytes], most: int) -> dict[int, int]:
        """Leases those of these keys (each once) that are here, up to `most` bytes but one at least: {index: row}."""
        ledger = self._ledger
        with self._lock:
            mine, found, total = account.leased, dict[int, int](), 0
            known = {i: row for i, row in enumerate(ledger.find_each(keys)) if row is not None and row not in mine}
            for (i, row), slot in zip(known.items(), ledger.slots(known.values()), strict=True):
                if found and total + slot > most:
                    break
                found[i] = row
                total += slot
            rows = list(found.values())
            self._charge(account, total, ledger.lease(rows, keep=True))
            account.leased.update(rows)
            return found

    def let_go(self, account: Account, rows: Sequence[int], spoiled: Collection[int] = ()) -> list[int]:
        """Ends `hold` on these rows; forgets those in `spoiled`. Returns the rows that were deleted meanwhile."""
        ledger = self._ledger
        with self._lock:
            gone = [row for row in rows if not ledger.is_sealed(row)]
            ledger.doom([row for row in spoiled if ledger.is_sealed(row)])
            account.leased.difference_update(rows)
            self._release(account, rows)
            return gone

    def uses(self, row: int) -> int:
        """How often a held block was used again, as far as that is told apart."""
        return self._ledger.uses([row])[0]

    def slot_of(self, row: int) -> tuple[memoryview, int]:
        """The whole slot of a held or reserved row, and the bytes of its block."""
        page, slot, nbytes = self._ledger.place(row)
        return self.arena.memory[page * SLOT_ALIGN : page * SLOT_ALIGN + slot], nbytes

    def make_place(self, account: Account, namespace: Namespace, extents: Extents, key: bytes) -> int | None:
        """Takes a slot for a block from below: its row, None if it is here already. Raises Full, Invalid, Stale."""
        with self._lock:
            if namespace.dropped:
                raise Stale("this namespace was dropped")
            if self._ledger.find_each([key])[0] is not None:
                return None
            _, (row,) = self._take(namespace, extents, [key], [None], use=0)
            self._charge(account, extents.slot_bytes)
            account.reserved.add(row)
            return row

    def finish_place(self, account: Account, namespace: Namespace, row: int, checksum: int | None) -> bool:
        """Makes a block verified against its checksum visible; None: gives its slot back. Whether it is visible."""
        ledger = self._ledger
        with self._lock:
            account.reserved.discard(row)
            self._charge(account, -ledger.slot_bytes([row]))
            if checksum is not None and not namespace.dropped:
                ledger.set_checksums([row], [checksum])
                if ledger.seal([row])[0]:
                    return True
            self._allocator.free([row])
            return False

    def belongs(self, key: bytes, namespace: Namespace) -> bool:
        with self._lock:
            row = self._ledger.find_each([key])[0]
            return row is not None and self._ledger.namespace(row) == namespace.handle

    def drop(self, namespace: Namespace) -> int:
        """Forgets a namespace and all its blocks, in steps that leave the lock in between. Returns how many."""
        self.namespaces.drop(namespace)
        return self._purge(namespace)

    def gauges(self) -> dict[str, int]:
        """Bytes and blocks as they stand. Holds the lock for microseconds."""
        ledger = self._ledger
        with self._lock:
            return {
                "arena_bytes": self.capacity,
                "arena_ready_bytes": min(self.arena.ready_bytes, self.capacity),
                "used_bytes": self._slabs.taken_bytes(),
                "known_blocks": ledger.known,
                "leased_blocks": ledger.leased,
                "leased_bytes": ledger.leased_bytes,
                "reserved_blocks": ledger.reserved,
                "reserved_bytes": ledger.reserved_bytes,
            }

    def blocks_by_namespace(self) -> dict[int, tuple[int, int]]:
        """{handle: (sealed blocks, their bytes)}. Counts a copy: the lock is held for 1 ms at a million blocks."""
        with self._lock:
            columns = self._ledger.snapshot()
        return by_namespace(*columns)

    def check_integrity(self, holders: Sequence[tuple[Account, dict[int, int], set[int]]] | None = None) -> None:
        """Asserts that ledger, slabs and accounts agree with ground truth; slow. Holds the lock. `holders` is what each
        session believes: (account, {row: leases}, reserved rows). If given, it must explain every lease and
        reservation."""
        with self._lock:
            pages = self._ledger.check_integrity()
            self._slabs.check_integrity({page: self._ledger.place(row)[1] for page, row in pages.items()})
            assert self._slabs.taken_bytes() <= self.capacity
            held, reserved = self._ledger.held_rows(), self._ledger.reserved_rows()
            total = self._ledger.slot_bytes([*held, *reserved])
            assert sum(tenant.held for tenant in self._tenants.values()) == total, "tenants' accounts do not add up"
            self.namespaces.check_integrity(set(by_namespace(*self._ledger.snapshot())))
            if holders is not None:
                moving = [(one, dict.fromkeys(one.leased, 1), set(one.reserved)) for one in self._moving]
                holders = [*holders, *moving]
                leases, claimed = Counter[int](), set[int]()
                shares: dict[str, set[int]] = {name: set() for name in self._tenants}
                for account, rows, waiting in holders:
                    leases.update(rows)
                    assert not claimed & waiting, "two sessions hold one reservation"
                    claimed |= waiting
                    shares[account.tenant.name] |= rows.keys() | waiting
                    mine = self._ledger.slot_bytes([*Counter(rows).elements(), *waiting])
                    assert account.held == mine, f"account says {account.held}, session holds {mine}"
                assert dict(leases) == held and claimed == reserved, "a lease or reservation without a holder"
                for name, share in shares.items():
                    mine = self._ledger.slot_bytes(share)
                    assert self._tenants[name].held == mine, f"the account of tenant {name} does not add up"

    def _purge(self, namespace: Namespace) -> int:
        """Forgets the blocks of a namespace that is dropped already. The largest number that a tier had."""
        below, dropped = lower.drop(namespace) if (lower := self.lower) is not None else 0, 0
        while True:
            with self._lock:
                rows = self._ledger.rows_of_namespace(namespace.handle, _DROP_STEP)
                if not rows:
                    return max(below, dropped)
                self._forget(rows)
            dropped += len(rows)

    # -- under the lock

    def _charge(self, account: Account, nbytes: int, fresh: int | None = None) -> None:
        """So many bytes of slots more. `fresh`: of these, what no other session of the tenant holds; None: all."""
        account.held += nbytes
        account.tenant.held += nbytes if fresh is None else fresh

    def _take(
        self, namespace: Namespace, extents: Extents, keys: list[bytes], present: list[int | None], use: int = 1
    ) -> tuple[Sequence[int], list[int]]:
        """Pages and reserved rows for the keys not present, not charged yet. Raises Full, Invalid: takes nothing."""
        absent = [key for key, row in zip(keys, present, strict=True) if row is None]
        slot, ledger = extents.slot_bytes, self._ledger
        size = self._allocator.size_class(slot, len(absent))
        pages = self._allocator.take(size, len(absent))
        try:
            uses = self._eviction.recall(keys, present, use)
            rows = ledger.reserve(pages, absent, extents.block_bytes, slot, size.index, namespace.handle, uses)
        except BaseException:
            self._allocator.give(pages)
            raise
        return pages, rows

    def _release(self, account: Account, rows: Sequence[int]) -> None:
        idle, doomed = self._ledger.release(rows)
        self._charge(account, -self._ledger.slot_bytes(rows), -idle)
        self._allocator.free(doomed)

    def _check_caps(self, account: Account, need: int) -> None:
        session, tenant = account.held, account.tenant.held
        for what, held, cap in (("session", session, self.session_cap), ("tenant", tenant, self.tenant_cap)):
            if need > cap:
                most = f"{need} bytes in one call; one {what} may hold {cap}"
                raise Invalid(f"{most}: send fewer blocks a call or make the arena larger")
            if held + need > cap:
                self.counters.full += 1
                holds = f"this {what} holds {held} of the {cap} bytes it may hold at once"
                raise Full(f"full, retry: {holds}, and asks for {need} more")

    def _fit(self, account: Account, rows: list[int]) -> tuple[list[int], list[int], int]:
        """The leading part of `rows` that the caps leave space for: (rows, unique rows, bytes)."""
        left = max(0, self.session_cap - account.held)
        tenant_left = max(0, self.tenant_cap - account.tenant.held)
        seen: dict[int, None] = {}
        total = fresh = 0
        for i, (row, slot) in enumerate(zip(rows, self._ledger.slots(rows), strict=True)):
            if row in seen:
                continue
            fresh += 0 if self._ledger.is_leased(row) else slot
            if total + slot > left or fresh > tenant_left:
                return rows[:i], list(seen), total
            seen[row] = None
            total += slot
        return rows, list(seen), total

    def _forget(self, rows: Sequence[int]) -> None:
        """Takes sealed rows out of the index; slots of leased ones follow after their last lease."""
        self._allocator.free(self._ledger.doom(rows))
        self.counters.deleted_blocks += len(rows)

    def _undo(self, account: Account, reservation: Reservation, indices: Sequence[int]) -> int:
        """Frees the slots of what is open among these entries. Returns how many."""
        rows = self._close(account, reservation, indices, reservation.lost)
        self._allocator.free(rows)
        self.counters.aborted_blocks += len(rows)
        return len(rows)

    def _close(
        self, account: Account, reservation: Reservation, indices: Sequence[int], closed: set[int] | None = None
    ) -> list[int]:
        """Takes what is open among these entries out of reservation and accounts: its rows. Adds them to `closed`."""
        rows = []
        for i in indices:
            row = reservation.rows[i]
            if row is not None:
                reservation.rows[i] = None
                rows.append(row)
                if closed is not None:
                    closed.add(i)
        self._charge(account, -self._ledger.slot_bytes(rows))
        return rows

    def _write_heads(self, made: Reservation, entries: Sequence[int], heads: bytes, slot: int) -> None:
        """Header and padding of these entries' slots. Not under the lock: the slots are the caller's."""
        memory, nbytes, padding = self.arena.memory, made.nbytes, bytes(slot - made.nbytes)
        for i, at in zip(entries, range(0, len(heads), HEADER_BYTES), strict=True):
            offset = made.pages[i] * SLOT_ALIGN
            head = made.headers[i] = heads[at : at + HEADER_BYTES]
            memory[offset : offset + HEADER_BYTES] = head
            memory[offset + nbytes : offset + slot] = padding

    def _handles_in_use(self) -> set[int]:
        below = lower.handles() if (lower := self.lower) is not None else set()
        with self._lock:
            return self._ledger.handles() | below
