"""Which blocks are known, where they stand, who holds them, and who goes first when there is too little room.

Compact: no object per block. A block is a *row*, an index into columns; 256 small dicts (by the key's first byte) lead from key to row,
because one dict of a million keys stops the interpreter for 300 ms when it grows and small ones for less than 1. Rows that nobody leases stand in
a list by age, one list per slot size; leased rows stand in none, so the oldest unleased block is always the first.
A key enters the index only when its block is sealed. Does no I/O and holds no block bytes.
Not thread-safe: the store holds its lock around every call.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.slabs import MAX_CLASSES

FREE, RESERVED, SEALED, DOOMED = range(4)  # DOOMED: deleted while leased; its slot is free after the last release
_GROW = 1 << 14
_SPAN = 1 << 20
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
        self.checksum = array("Q")  # xxh3-64 of the block, 0 while nobody has computed it
        self.age = array("Q")  # tick of the last use
        self._prev = array("I")
        self._next = array("I")
        self._tick = 0
        self.known = 0  # sealed blocks
        self.reserved = self.reserved_bytes = 0  # rows and bytes of their slots
        self.leased = self.leased_bytes = 0  # rows that somebody leases, doomed ones too
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
        n = len(keys)
        if len(self._free) < n:
            self._grow(max(_GROW, n))
        cut = len(self._free) - n
        rows = self._free[cut:].tolist()
        del self._free[cut:]
        state, sizes, page_of, nbytes_of, slot_of, namespaces, key_of = (
            self.state, self.size, self.page, self.nbytes, self.slot, self.namespace, self._keys,
        )  # fmt: skip
        for row, page, key in zip(rows, pages, keys, strict=True):
            state[row] = RESERVED
            sizes[row] = size
            page_of[row] = page
            nbytes_of[row] = nbytes
            slot_of[row] = slot
            namespaces[row] = namespace
            key_of[row] = key
            self.checksum[row] = 0
        self.reserved += n
        self.reserved_bytes += n * slot
        return rows

    def seal(self, rows: Sequence[int]) -> list[bool]:
        """Makes reserved rows known, youngest first row. False where the key is already known: that row stays reserved."""
        sealed = []
        won = []
        state, keys, shards = self.state, self._keys, self._shards
        for row in rows:
            assert state[row] == RESERVED
            key = keys[row]
            if shards[key[0]].setdefault(key, row) == row:
                state[row] = SEALED
                won.append(row)
                sealed.append(True)
            else:
                sealed.append(False)
        self.known += len(won)
        self.reserved -= len(won)
        self.reserved_bytes -= sum(map(self.slot.__getitem__, won))
        self._link(won)
        return sealed

    def lease(self, rows: Sequence[int]) -> int:
        """One more holder for each of these sealed rows (each given once). Returns the bytes of slots that nobody held before."""
        leases = self.leases
        idle = [row for row in rows if not leases[row]]
        for row in rows:
            leases[row] += 1
        self._unlink(idle)
        fresh = sum(map(self.slot.__getitem__, idle))
        self.leased += len(idle)
        self.leased_bytes += fresh
        return fresh

    def release(self, rows: Sequence[int]) -> tuple[int, list[int]]:
        """One holder less. Returns the bytes of slots that nobody holds now, and the doomed rows among them: nobody needs these any more."""
        leases, state = self.leases, self.state
        for row in rows:
            assert leases[row] > 0
            leases[row] -= 1
        idle = [row for row in rows if not leases[row]]
        sealed = [row for row in idle if state[row] == SEALED]
        self._link(sealed)
        doomed = [row for row in idle if state[row] != SEALED] if len(sealed) < len(idle) else []
        gone = sum(map(self.slot.__getitem__, idle))
        self.leased -= len(idle)
        self.leased_bytes -= gone
        return gone, doomed

    def oldest(self, size: int) -> int | None:
        """Tick of the oldest unleased block of a size class, None if there is none."""
        row = self._next[size]
        return None if row == size else self.age[row]

    def youngest(self, size: int) -> int | None:
        """Tick of the youngest unleased block of a size class, None if there is none."""
        row = self._prev[size]
        return None if row == size else self.age[row]

    def victims(self, size: int, n: int) -> list[int]:
        """Up to `n` unleased rows of a size class, oldest first. Does not modify."""
        rows: list[int] = []
        row, after = self._next[size], self._next
        while len(rows) < n and row != size:
            rows.append(row)
            row = after[row]
        return rows

    def forget(self, rows: Sequence[int]) -> list[int]:
        """Drops unleased rows, sealed, reserved or doomed. Returns their pages; the rows are void."""
        state, leases, keys, shards = self.state, self.leases, self._keys, self._shards
        sealed = [row for row in rows if state[row] == SEALED]
        self._unlink(sealed)
        for row in sealed:
            key = keys[row]
            del shards[key[0]][key]
        self.known -= len(sealed)
        if len(sealed) < len(rows):
            reserved = [row for row in rows if state[row] == RESERVED]
            self.reserved -= len(reserved)
            self.reserved_bytes -= sum(map(self.slot.__getitem__, reserved))
        for row in rows:
            assert state[row] != FREE and not leases[row]
            state[row] = FREE
            keys[row] = b""
        self._free.extend(rows)
        return list(map(self.page.__getitem__, rows))

    def doom(self, row: int) -> None:
        """A leased row leaves the index at once; `release` hands it back."""
        assert self.state[row] == SEALED and self.leases[row]
        key = self._keys[row]
        del self._shards[key[0]][key]
        self.known -= 1
        self.state[row] = DOOMED

    def key(self, row: int) -> bytes:
        return self._keys[row]

    def is_sealed(self, row: int) -> bool:
        return self.state[row] == SEALED

    def is_reserved(self, row: int) -> bool:
        return self.state[row] == RESERVED

    def restore(self, columns: Mapping[str, npt.NDArray[Any]], keys: list[bytes]) -> None:
        """Fills an empty ledger with sealed blocks, oldest first: columns page, nbytes, slot, size, namespace, checksum. 0.5 s a million blocks.

        Raises ValueError if a key stands twice; the ledger is of no use then.
        """
        assert not self.known and not self.reserved
        n = len(keys)
        if not n:
            return
        self._grow(max(0, n - len(self._free)))
        cut = len(self._free) - n
        rows = np.sort(np.frombuffer(self._free, np.uint32)[cut:])
        del self._free[cut:]
        for name, values in columns.items():
            column = getattr(self, name)
            np.frombuffer(column, column.typecode)[rows] = values
        np.frombuffer(self.state, np.uint8)[rows] = SEALED
        np.frombuffer(self.age, np.uint64)[rows] = np.arange(self._tick + 1, self._tick + 1 + n, dtype=np.uint64)
        self._tick += n
        shards, key_of = self._shards, self._keys
        for row, key in zip(rows.tolist(), keys, strict=True):
            shards[key[0]][key] = row
            key_of[row] = key
        self.known = n
        if sum(map(len, shards)) != n:
            raise ValueError("a key stands twice")
        prev, after = np.frombuffer(self._prev, np.uint32), np.frombuffer(self._next, np.uint32)
        sizes = np.frombuffer(self.size, np.uint8)[rows]
        for head in np.unique(sizes).tolist():
            chain = np.concatenate(([head], rows[sizes == head], [head])).astype(np.uint32)
            after[chain[:-1]] = chain[1:]
            prev[chain[1:]] = chain[:-1]
            self.idle[head] = len(chain) - 2

    def copy_sealed(self) -> tuple[dict[str, npt.NDArray[Any]], list[bytes]]:
        """Copies of the columns of all sealed rows, their numbers as "row", and of every row's key. 20 ms a million blocks."""
        rows = np.flatnonzero(np.frombuffer(self.state, np.uint8) == SEALED)
        columns: dict[str, npt.NDArray[Any]] = {"row": rows}
        for name in ("page", "nbytes", "slot", "namespace", "checksum", "age"):
            column = getattr(self, name)
            columns[name] = np.frombuffer(column, column.typecode)[rows]
        return columns, self._keys.copy()

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

    def snapshot(self) -> tuple[bytes, bytes, bytes]:
        """Copies of what `by_namespace` counts: 9 bytes a row, 1 ms at a million rows."""
        return self.state.tobytes(), self.namespace.tobytes(), self.nbytes.tobytes()

    def rows_of_namespace(self, namespace: int, most: int) -> list[int]:
        """Up to `most` sealed rows of a namespace."""
        mine = (np.frombuffer(self.namespace, np.uint32) == namespace) & (np.frombuffer(self.state, np.uint8) == SEALED)
        found: list[int] = np.flatnonzero(mine)[:most].tolist()
        return found

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
        slot, leases = np.frombuffer(self.slot, np.uint32), np.frombuffer(self.leases, np.uint32)
        waiting = np.frombuffer(self.state, np.uint8) == RESERVED
        assert (self.leased, self.leased_bytes) == (int(np.count_nonzero(leases)), int(slot[leases > 0].sum(dtype=np.uint64)))
        assert (self.reserved, self.reserved_bytes) == (int(np.count_nonzero(waiting)), int(slot[waiting].sum(dtype=np.uint64)))
        del slot, leases, waiting
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
        """More rows. All or nothing: columns of unequal length would not go together."""
        first = len(self._keys)
        columns = (
            self.state, self.size, self.leases, self.page, self.nbytes, self.slot, self.namespace, self.checksum, self.age, self._prev, self._next,
        )  # fmt: skip
        try:
            for column in columns:
                column.frombytes(bytes(rows * column.itemsize))
            self._keys.extend([b""] * rows)
            self._free.extend(array("I", range(first + rows - 1, max(first, _FIRST) - 1, -1)))
        except MemoryError:
            for column in columns:
                del column[first:]
            del self._keys[first:]
            raise

    def _link(self, rows: Sequence[int]) -> None:
        """Puts rows at the young end of their lists, the last first: a tail is always older than its head."""
        self._tick += 1
        tick, prev, after, sizes, ages, idle = self._tick, self._prev, self._next, self.size, self.age, self.idle
        for row in reversed(rows):
            head = sizes[row]
            last = prev[head]
            after[last] = prev[head] = row
            prev[row] = last
            after[row] = head
            ages[row] = tick
            idle[head] += 1

    def _unlink(self, rows: Sequence[int]) -> None:
        prev, after, sizes, idle = self._prev, self._next, self.size, self.idle
        for row in rows:
            before, next_ = prev[row], after[row]
            after[before] = next_
            prev[next_] = before
            idle[sizes[row]] -= 1


def by_namespace(state: bytes, namespace: bytes, nbytes: bytes) -> dict[int, tuple[int, int]]:
    """{handle: (sealed blocks, their bytes)} of a snapshot."""
    sealed = np.flatnonzero(np.frombuffer(state, np.uint8) == SEALED)
    if not len(sealed):
        return {}
    handles = np.frombuffer(namespace, np.uint32)[sealed]
    first = int(handles.min())
    if int(handles.max()) - first <= _SPAN:
        names: npt.NDArray[Any] = np.arange(first, int(handles.max()) + 1)
        places: npt.NDArray[Any] = handles - first
    else:  # only after that many registrations; sorting costs twelve times as much (75 ms at a million rows)
        names, places = np.unique(handles, return_inverse=True)
    blocks = np.bincount(places)
    total = np.bincount(places, np.frombuffer(nbytes, np.uint32)[sealed])
    return {int(names[i]): (int(blocks[i]), int(total[i])) for i in np.flatnonzero(blocks)}
