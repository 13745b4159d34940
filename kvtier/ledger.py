"""Which blocks are known, where they stand, who holds them, and who goes first when there is too little room.

Compact: no object per block. A block is a *row*, an index into columns; 256 small dicts (by the key's first byte) lead from key to row,
because one dict of a million keys stops the interpreter for 300 ms when it grows and small ones for less than 1. Rows that nobody leases stand in
a list by age, one list per slot size; leased rows stand in none, so the oldest unleased block is always the first.
A key enters the index only when its block is sealed. Does no I/O and holds no block bytes.
Not thread-safe: the store holds its lock around every call.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from kvtier.slabs import MAX_CLASSES

FREE, RESERVED, SEALED, DOOMED = range(4)  # DOOMED: deleted while leased; its slot is free after the last release
_GROW = 1 << 14
_FIRST = MAX_CLASSES + 1  # rows below are the heads of the age lists, one per size class


class Ledger:
    """Rows and their order. `pages` are slots as `slabs` names them."""

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(256)]
        self._free: array[int] = array("I")
        self._keys: list[bytes] = []
        self.state = array("B")
        self.size = array("B")  # index of the size class
        self.leases = array("I")
        self.page = array("I")
        self.nbytes = array("I")  # of the block
        self.slot = array("I")  # bytes of the slot
        self.namespace = array("I")  # handle
        self.age = array("Q")  # tick of the last use
        self._prev = array("I")
        self._next = array("I")
        self._tick = 0
        self.known = 0  # sealed blocks
        self.idle = array("I", bytes(4 * _FIRST))  # length of each age list
        self._grow(_FIRST)
        for row in range(_FIRST):
            self._prev[row] = self._next[row] = row

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Rows of the leading known keys. Does not modify."""
        shards, rows = self._shards, []
        for key in keys:
            row = shards[key[0]].get(key)
            if row is None:
                break
            rows.append(row)
        return rows

    def find_each(self, keys: Sequence[bytes]) -> list[int | None]:
        """The row of every key, None where it is not known. Does not modify."""
        shards = self._shards
        return [shards[key[0]].get(key) for key in keys]

    def reserve(self, pages: Sequence[int], keys: Sequence[bytes], nbytes: int, slot: int, size: int, namespace: int) -> list[int]:
        """New rows for these slots of `slot` bytes in size class `size`: counted, not yet known."""
        rows = []
        for page, key in zip(pages, keys, strict=True):
            if not self._free:
                self._grow(_GROW)
            row = self._free.pop()
            self.state[row] = RESERVED
            self.size[row] = size
            self.page[row] = page
            self.nbytes[row] = nbytes
            self.slot[row] = slot
            self.namespace[row] = namespace
            self._keys[row] = key
            rows.append(row)
        return rows

    def seal(self, rows: Sequence[int]) -> list[bool]:
        """Makes reserved rows known, youngest first row. False where the key is already known: that row stays reserved."""
        self._tick += 1
        sealed = []
        for row in reversed(rows):  # the tail is linked first, so it is older than its head
            assert self.state[row] == RESERVED
            key = self._keys[row]
            if self._shards[key[0]].setdefault(key, row) != row:
                sealed.append(False)
                continue
            self.state[row] = SEALED
            self.known += 1
            self._link(row)
            sealed.append(True)
        sealed.reverse()
        return sealed

    def lease(self, rows: Iterable[int]) -> int:
        """One more holder for each of these sealed rows (each given once). Returns the bytes of slots that nobody held before."""
        fresh = 0
        leases, slot = self.leases, self.slot
        for row in rows:
            if not leases[row]:
                self._unlink(row)
                fresh += slot[row]
            leases[row] += 1
        return fresh

    def release(self, rows: Sequence[int]) -> tuple[int, list[int]]:
        """One holder less. Returns the bytes of slots that nobody holds now, and the doomed rows among them: nobody needs these any more."""
        self._tick += 1
        idle, doomed = 0, []
        leases, slot = self.leases, self.slot
        for row in reversed(rows):  # the tail is linked first, so it is older than its head
            assert leases[row] > 0
            leases[row] -= 1
            if not leases[row]:
                idle += slot[row]
                if self.state[row] == SEALED:
                    self._link(row)
                else:
                    doomed.append(row)
        return idle, doomed

    def oldest(self, size: int) -> int | None:
        """Tick of the oldest unleased block of a size class, None if there is none."""
        row = self._next[size]
        return None if row == size else self.age[row]

    def victims(self, size: int, n: int) -> list[int]:
        """Up to `n` unleased rows of a size class, oldest first. Does not modify."""
        rows: list[int] = []
        row, after = self._next[size], self._next
        while len(rows) < n and row != size:
            rows.append(row)
            row = after[row]
        return rows

    def forget(self, row: int) -> int:
        """Drops an unleased row, sealed, reserved or doomed. Returns its page; the row is void."""
        state = self.state[row]
        assert state != FREE and not self.leases[row]
        if state == SEALED:
            self._unlink(row)
            key = self._keys[row]
            del self._shards[key[0]][key]
            self.known -= 1
        self._keys[row] = b""
        self.state[row] = FREE
        self._free.append(row)
        return self.page[row]

    def doom(self, row: int) -> None:
        """A leased row leaves the index at once; `release` hands it back."""
        assert self.state[row] == SEALED and self.leases[row]
        key = self._keys[row]
        del self._shards[key[0]][key]
        self.known -= 1
        self.state[row] = DOOMED

    def key(self, row: int) -> bytes:
        return self._keys[row]

    def slab_ages(self, size: int, slab_pages: int) -> dict[int, float]:
        """Mean tick of the blocks of each slab of a size class in which nothing is leased, reserved or doomed. Costs 2 ms at a million rows."""
        state, sizes = np.frombuffer(self.state, np.uint8), np.frombuffer(self.size, np.uint8)
        mine = np.flatnonzero((sizes == size) & (state != FREE))
        slabs = np.frombuffer(self.page, np.uint32)[mine] // slab_pages
        if not len(mine):
            return {}
        held = (np.frombuffer(self.leases, np.uint32)[mine] > 0) | (state[mine] != SEALED)
        count = np.bincount(slabs)
        mean = np.bincount(slabs, np.frombuffer(self.age, np.uint64)[mine].astype(np.float64)) / np.maximum(count, 1)
        pinned = np.bincount(slabs, held)
        return {int(slab): float(mean[slab]) for slab in np.flatnonzero((count > 0) & (pinned == 0))}

    def rows_of_slab(self, size: int, first_page: int, pages: int) -> list[int]:
        """Sealed rows whose slots lie in these pages."""
        page = np.frombuffer(self.page, np.uint32)
        state, sizes = np.frombuffer(self.state, np.uint8), np.frombuffer(self.size, np.uint8)
        found: list[int] = np.flatnonzero((page >= first_page) & (page < first_page + pages) & (state == SEALED) & (sizes == size)).tolist()
        return found

    def by_namespace(self) -> dict[int, tuple[int, int]]:
        """{handle: (sealed blocks, their bytes)}."""
        sealed = np.flatnonzero(np.frombuffer(self.state, np.uint8) == SEALED)
        handles = np.frombuffer(self.namespace, np.uint32)[sealed]
        unique, inverse = np.unique(handles, return_inverse=True)
        blocks = np.bincount(inverse, minlength=len(unique))
        nbytes = np.bincount(inverse, np.frombuffer(self.nbytes, np.uint32)[sealed], minlength=len(unique))
        return {int(h): (int(b), int(n)) for h, b, n in zip(unique, blocks, nbytes, strict=True)}

    def handles(self) -> set[int]:
        """Handles of all namespaces that hold a row, sealed or not."""
        taken = np.frombuffer(self.state, np.uint8) != FREE
        return set(np.unique(np.frombuffer(self.namespace, np.uint32)[taken]).tolist())

    def held_rows(self) -> dict[int, int]:
        """{row: leases} of every leased row."""
        leases = np.frombuffer(self.leases, np.uint32)
        rows = np.flatnonzero(leases)
        return dict(zip(rows.tolist(), leases[rows].tolist(), strict=True))

    def reserved_rows(self) -> set[int]:
        return set(np.flatnonzero(np.frombuffer(self.state, np.uint8) == RESERVED).tolist())

    def check_integrity(self) -> dict[int, int]:
        """Asserts that index, columns and age lists agree. Returns {page: row} of every taken slot."""
        indexed = {row: key for shard in self._shards for key, row in shard.items()}
        assert len(indexed) == self.known
        listed: set[int] = set()
        for size in range(_FIRST):
            row, before, age = self._next[size], size, 0
            while row != size:
                assert row not in listed and self._prev[row] == before, "an age list is broken"
                assert self.size[row] == size and self.state[row] == SEALED and not self.leases[row]
                assert self.age[row] >= age, "an age list is out of order"
                listed.add(row)
                before, age, row = row, self.age[row], self._next[row]
            assert self._prev[size] == before
        assert sum(self.idle) == len(listed)
        pages: dict[int, int] = {}
        free = set(self._free)
        for row in range(_FIRST, len(self.state)):
            state = self.state[row]
            assert (state == FREE) == (row in free)
            if state == FREE:
                continue
            assert (state == SEALED) == (row in indexed) and (row not in indexed or indexed[row] == self._keys[row])
            assert (state == SEALED and not self.leases[row]) == (row in listed)
            assert self.leases[row] or state != DOOMED
            assert self.page[row] not in pages, "two rows share a slot"
            pages[self.page[row]] = row
        return pages

    def _grow(self, rows: int) -> None:
        first = len(self.state)
        for column in (self.state, self.size, self.leases, self.page, self.nbytes, self.slot, self.namespace, self.age, self._prev, self._next):
            column.frombytes(bytes(rows * column.itemsize))
        self._keys.extend([b""] * rows)
        self._free.extend(range(first + rows - 1, max(first, _FIRST) - 1, -1))

    def _link(self, row: int) -> None:
        """Puts a row at the young end of its list."""
        head, prev, after = self.size[row], self._prev, self._next
        last = prev[head]
        after[last] = row
        prev[row] = last
        after[row] = head
        prev[head] = row
        self.age[row] = self._tick
        self.idle[head] += 1

    def _unlink(self, row: int) -> None:
        before, after = self._prev[row], self._next[row]
        self._next[before] = after
        self._prev[after] = before
        self.idle[self.size[row]] -= 1
