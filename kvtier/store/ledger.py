"""Which blocks are known, where they are, who leases them, and in what order they were used: one table, a block a row.

One rule: a key enters the index only when its block is sealed. Compact, without an object per block: a row is an index
into columns. No I/O, no block bytes. Only the owners of a table call it (`Store`, the SSD tier, and the allocator and
eviction of each), all under the owner's one lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_CLASSES = 255  # slot sizes at a time
FREE, RESERVED, SEALED, DOOMED = range(4)  # DOOMED: deleted while leased; its slot is free after the last release
_SPAN = 1 << 20
_GROW = 1 << 14  # rows more, each time
USES = 8  # uses of a block that are told apart
_FIRST = (MAX_CLASSES + 1) * USES  # rows below are the heads of the age lists, one per size class and use count


class Ledger:
    """The table of blocks. Its public names are the interface, and all that a compiled table must offer; columns are
    read and written here only.

    totals    tick, known, reserved, reserved_bytes, leased, leased_bytes, idle
    keys      find, find_each, idle_rows                                 from key to row
    life      reserve, seal, lease, release, doom, forget, restore       of many rows a call
    a row     namespace, place, is_leased, is_sealed, is_reserved
    rows      keys, pages, slots, slot_bytes, block_bytes, uses, checksums, set_checksums
    order     use, history, sample, youngest, oldest, from_oldest        for `Eviction`
    scans     expired, rows_of_slab, rows_of_namespace, slab_ages, handles, snapshot, copy_sealed    over every row
    proofs    held_rows, reserved_rows, check_integrity

    256 small dicts (by the key's first byte) lead from key to row, because one dict of a million keys stops the
    interpreter for 300 ms when it grows and small ones for less than 1. Unleased rows stand in lists by age, one per
    size class and *use count*: how often the block was used again. Leased rows stand in none, except the few that are
    *kept*: leased in order to move them between tiers, which does not count as use.
    """

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(256)]
        self._free: array[int] = array("I")
        self._keys: list[bytes] = []
        self._state = array("B")
        self._size = array("B")  # index of the size class
        self._count = array("B")  # below USES; its value when the row was linked says in which list it stands
        self._leases = array("I")
        self._page = array("I")
        self._nbytes = array("I")  # of the block
        self._slot = array("I")  # bytes of the slot
        self._namespace = array("I")  # handle
        self._checksum = array("Q")  # xxh3-64 of the block, 0: not computed yet
        self._age = array("Q")  # tick of the last use
        self._prev = array("I")
        self._next = array("I")
        self.tick = 0  # rows that were put or used so far
        self.known = 0  # sealed blocks
        self.reserved = self.reserved_bytes = 0  # rows and bytes of their slots
        self.leased = self.leased_bytes = 0  # leased rows, doomed ones too
        self._kept: set[int] = set()  # leased rows that stand in their lists
        self._idle = array("I", bytes(4 * (MAX_CLASSES + 1)))  # unleased sealed rows of each size class
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

    def reserve(
        self, pages: Sequence[int], keys: list[bytes], nbytes: int, slot: int, size: int, handle: int, uses: bytes = b""
    ) -> list[int]:
        """New rows of these use counts for slots of `slot` bytes in size class `size`: counted, not yet known."""
        n = len(keys)
        if len(self._free) < n:
            self._grow(max(_GROW, n))
        cut = len(self._free) - n
        rows = self._free[cut:].tolist()
        del self._free[cut:]
        state, sizes, count_of, page_of = self._state, self._size, self._count, self._page
        nbytes_of, slot_of, namespaces, key_of = self._nbytes, self._slot, self._namespace, self._keys
        for row, page, key, count in zip(rows, pages, keys, uses or bytes(n), strict=True):
            state[row] = RESERVED
            sizes[row] = size
            page_of[row] = page
            nbytes_of[row] = nbytes
            slot_of[row] = slot
            namespaces[row] = handle
            key_of[row] = key
            count_of[row] = count
            self._checksum[row] = 0
        self.reserved += n
        self.reserved_bytes += n * slot
        return rows

    def seal(self, rows: Sequence[int]) -> list[bool]:
        """Makes reserved rows known, the first as youngest. False where the key is known: that row stays reserved."""
        sealed, won = [], []
        state, keys, shards = self._state, self._keys, self._shards
        for row in rows:
            assert state[row] == RESERVED
            key = keys[row]
            new = shards[key[0]].setdefault(key, row) == row
            sealed.append(new)
            if new:
                state[row] = SEALED
                won.append(row)
        self.known += len(won)
        self.reserved -= len(won)
        self.reserved_bytes -= sum(map(self._slot.__getitem__, won))
        self._link(won)
        return sealed

    def lease(self, rows: Sequence[int], keep: bool = False) -> int:
        """One more lease for each of these sealed rows (each once). Returns the bytes of slots that had none before.
        `keep`: rows without another lease stay at their age, until they are leased without `keep`."""
        leases = self._leases
        idle = [row for row in rows if not leases[row]]
        for row in rows:
            leases[row] += 1
        if keep:
            self._kept.update(idle)
            for row in idle:
                self._idle[self._size[row]] -= 1
        else:
            self._unlink([*self._end_keeping(rows), *idle] if self._kept else idle)
        fresh = sum(map(self._slot.__getitem__, idle))
        self.leased += len(idle)
        self.leased_bytes += fresh
        return fresh

    def release(self, rows: Sequence[int]) -> tuple[int, list[int]]:
        """One lease less. Returns the bytes of slots that have none now, and the doomed rows to forget among them."""
        leases, state = self._leases, self._state
        for row in rows:
            assert leases[row] > 0
            leases[row] -= 1
        idle = [row for row in rows if not leases[row]]
        sealed = [row for row in idle if state[row] == SEALED]
        doomed = [row for row in idle if state[row] != SEALED] if len(sealed) < len(idle) else []
        back = self._end_keeping(idle) if self._kept else ()
        self._link([row for row in sealed if row not in back] if back else sealed)
        gone = sum(map(self._slot.__getitem__, idle))
        self.leased -= len(idle)
        self.leased_bytes -= gone
        return gone, doomed

    def idle(self, size: int) -> int:
        return self._idle[size]

    def idle_rows(self, keys: Sequence[bytes], tick: int = 2**64 - 1) -> list[int]:
        """Unleased rows of these keys, each given once, whose last use was at this tick or before."""
        leases, age = self._leases, self._age
        return [row for row in self.find_each(keys) if row is not None and not leases[row] and age[row] <= tick]

    def expired(self, handle: int, tick: int, most: int) -> list[bytes]:
        """Keys of up to `most` unleased blocks of a namespace whose last use was at this tick or before."""
        mine = self._sealed_of(handle) & (np.frombuffer(self._leases, np.uint32) == 0)
        mine &= np.frombuffer(self._age, np.uint64) <= np.uint64(tick)
        return self.keys(np.flatnonzero(mine)[:most].tolist())

    def use(self, rows: Sequence[int]) -> tuple[list[tuple[int, int, int]], list[int]]:
        """These blocks, in the order of their prefix and each once, are about to be leased. A use, unless leased
        already and not kept. A use count grows by one, but not above that of the rows before it. Returns (use count,
        ticks since the last use, rows) of each run of rows that were alike, and the rows that were used for the second
        time."""
        leases, ages, counts, kept = self._leases, self._age, self._count, self._kept
        runs: list[tuple[int, int, int]] = []
        again: list[int] = []
        low, then, before, n = USES - 1, 0, 0, 0
        for row in rows:
            count = counts[row]
            if leases[row] and row not in kept:
                low = min(low, count)
                continue
            age = ages[row]
            if age != then or count != before:
                if n:
                    runs.append((before, self.tick - then, n))
                then, before, n = age, count, 0
            n += 1
            if count < low:
                if not count:
                    again.append(row)
                counts[row] = low = count + 1
            elif count > low:
                counts[row] = low
        if n:
            runs.append((before, self.tick - then, n))
        return runs, again

    def history(self, rows: Sequence[int]) -> tuple[list[bytes], list[int], list[int]]:
        return self.keys(rows), self.uses(rows), list(map(self._age.__getitem__, rows))

    def sample(self, most: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], int]:
        """Use counts, and ticks since the last use, of the sealed rows among up to `most`; each stands for so many
        rows."""
        stride = -(-len(self._state) // most)
        mine = np.flatnonzero(np.frombuffer(self._state, np.uint8)[::stride] == SEALED)
        counts = np.frombuffer(self._count, np.uint8)[::stride][mine].astype(np.int64)
        ages = self.tick - np.frombuffer(self._age, np.uint64)[::stride][mine].astype(np.int64)
        return counts, ages, stride

    def youngest(self, size: int) -> int | None:
        """Tick of the youngest unleased block of a size class, None if there is none."""
        heads = range(size * USES, (size + 1) * USES)
        return max((self._age[row] for head in heads if (row := self._prev[head]) != head), default=None)

    def oldest(self, size: int) -> list[tuple[int, int, int]]:
        """(use count, tick, row) of the oldest unleased block of each use count of a size class that has one."""
        first = self._next[size * USES : (size + 1) * USES]
        rows = map(self._unkept, first) if self._kept else first
        return [(count, self._age[row], row) for count, row in enumerate(rows) if row >= _FIRST]

    def from_oldest(self, row: int, n: int) -> tuple[list[int], tuple[int, int] | None]:
        """Up to `n` unleased rows of one list and age, this one first; and (tick, row) of the next, None at the end."""
        rows, after, ages, age = [row], self._next, self._age, self._age[row]
        while True:
            row = self._unkept(after[row]) if self._kept else after[row]
            if row < _FIRST or ages[row] != age or len(rows) == n:
                return rows, (ages[row], row) if row >= _FIRST else None
            rows.append(row)

    def _unkept(self, row: int) -> int:
        """This row or the first unleased one behind it; the head of its list if there is none."""
        while row in self._kept:
            row = self._next[row]
        return row

    def forget(self, rows: Sequence[int]) -> list[int]:
        """Drops unleased rows, sealed, reserved or doomed. Returns their pages; the rows are void."""
        state, leases, keys, shards = self._state, self._leases, self._keys, self._shards
        sealed = [row for row in rows if state[row] == SEALED]
        self._unlink(sealed)
        for row in sealed:
            key = keys[row]
            del shards[key[0]][key]
        self.known -= len(sealed)
        if len(sealed) < len(rows):
            reserved = [row for row in rows if state[row] == RESERVED]
            self.reserved -= len(reserved)
            self.reserved_bytes -= sum(map(self._slot.__getitem__, reserved))
        for row in rows:
            assert state[row] != FREE and not leases[row]
            state[row] = FREE
            keys[row] = b""
        self._free.extend(rows)
        return list(map(self._page.__getitem__, rows))

    def doom(self, rows: Sequence[int]) -> list[int]:
        """The leased ones of these sealed rows leave the index at once; `release` gives them. Returns the others."""
        assert all(self._state[row] == SEALED for row in rows)
        leased = [row for row in rows if self._leases[row]]
        self._unlink(list(self._end_keeping(leased)))
        for row in leased:
            key = self._keys[row]
            del self._shards[key[0]][key]
            self._state[row] = DOOMED
        self.known -= len(leased)
        return [row for row in rows if not self._leases[row]] if len(leased) < len(rows) else []

    def keys(self, rows: Iterable[int]) -> list[bytes]:
        return list(map(self._keys.__getitem__, rows))

    def namespace(self, row: int) -> int:
        return self._namespace[row]

    def place(self, row: int) -> tuple[int, int, int]:
        return self._page[row], self._slot[row], self._nbytes[row]

    def pages(self, rows: Iterable[int]) -> list[int]:
        return list(map(self._page.__getitem__, rows))

    def slots(self, rows: Iterable[int]) -> list[int]:
        return list(map(self._slot.__getitem__, rows))

    def slot_bytes(self, rows: Iterable[int]) -> int:
        return sum(map(self._slot.__getitem__, rows))

    def block_bytes(self, rows: Iterable[int]) -> int:
        return sum(map(self._nbytes.__getitem__, rows))

    def uses(self, rows: Iterable[int]) -> list[int]:
        """Use counts: how often each block was used again, as far as that is told apart (below `USES`)."""
        return list(map(self._count.__getitem__, rows))

    def checksums(self, rows: Iterable[int]) -> list[int]:
        """xxh3-64 of these blocks, 0 where it has not been computed."""
        return list(map(self._checksum.__getitem__, rows))

    def set_checksums(self, rows: Iterable[int], checksums: Iterable[int]) -> None:
        for row, checksum in zip(rows, checksums, strict=True):
            self._checksum[row] = checksum

    def is_leased(self, row: int) -> bool:
        return self._leases[row] > 0

    def is_sealed(self, row: int) -> bool:
        return self._state[row] == SEALED

    def is_reserved(self, row: int) -> bool:
        return self._state[row] == RESERVED

    def restore(self, columns: Mapping[str, npt.NDArray[Any]], keys: list[bytes]) -> None:
        """Fills an empty ledger with sealed blocks, oldest first. 0.5 s a million blocks. Columns: page, nbytes, slot,
        size, namespace, checksum. Raises ValueError if a key stands twice; the ledger cannot be used then."""
        assert not self.known and not self.reserved
        if not (n := len(keys)):
            return
        self._grow(max(0, n - len(self._free)))
        cut = len(self._free) - n
        rows = np.sort(np.frombuffer(self._free, np.uint32)[cut:])
        del self._free[cut:]
        for name, values in columns.items():
            column = getattr(self, f"_{name}")
            np.frombuffer(column, column.typecode)[rows] = values
        np.frombuffer(self._state, np.uint8)[rows] = SEALED
        np.frombuffer(self._age, np.uint64)[rows] = np.arange(self.tick + 1, self.tick + 1 + n, dtype=np.uint64)
        self.tick += n
        shards, key_of = self._shards, self._keys
        for row, key in zip(rows.tolist(), keys, strict=True):
            shards[key[0]][key] = row
            key_of[row] = key
        self.known = n
        if sum(map(len, shards)) != n:
            raise ValueError("a key stands twice")
        prev, after = np.frombuffer(self._prev, np.uint32), np.frombuffer(self._next, np.uint32)
        sizes = np.frombuffer(self._size, np.uint8)[rows]
        for size in np.unique(sizes).tolist():
            chain = np.concatenate(([size * USES], rows[sizes == size], [size * USES])).astype(np.uint32)
            after[chain[:-1]] = chain[1:]
            prev[chain[1:]] = chain[:-1]
            self._idle[size] = len(chain) - 2

    def copy_sealed(self) -> tuple[dict[str, npt.NDArray[Any]], list[bytes]]:
        """Copies of the sealed rows' columns, with their numbers as "row", and of every row's key. 20 ms a million."""
        rows = np.flatnonzero(np.frombuffer(self._state, np.uint8) == SEALED)
        columns: dict[str, npt.NDArray[Any]] = {"row": rows}
        for name in ("page", "nbytes", "slot", "namespace", "checksum", "age"):
            column = getattr(self, f"_{name}")
            columns[name] = np.frombuffer(column, column.typecode)[rows]
        return columns, self._keys.copy()

    def slab_ages(self, size: int, slab_pages: int) -> dict[int, float]:
        """Mean tick of each slab of a class with nothing leased, reserved or doomed. 2 ms at a million rows."""
        state, sizes = np.frombuffer(self._state, np.uint8), np.frombuffer(self._size, np.uint8)
        mine = np.flatnonzero((sizes == size) & (state != FREE))
        slabs = np.frombuffer(self._page, np.uint32)[mine] // slab_pages
        if not len(mine):
            return {}
        held = (np.frombuffer(self._leases, np.uint32)[mine] > 0) | (state[mine] != SEALED)
        count = np.bincount(slabs)
        mean = np.bincount(slabs, np.frombuffer(self._age, np.uint64)[mine].astype(np.float64)) / np.maximum(count, 1)
        pinned = np.bincount(slabs, held)
        return {int(slab): float(mean[slab]) for slab in np.flatnonzero((count > 0) & (pinned == 0))}

    def rows_of_slab(self, size: int, first_page: int, pages: int) -> list[int]:
        """Sealed rows whose slots lie in these pages."""
        page, sizes = np.frombuffer(self._page, np.uint32), np.frombuffer(self._size, np.uint8)
        mine = (page >= first_page) & (page < first_page + pages) & (sizes == size)
        return list(np.flatnonzero(mine & (np.frombuffer(self._state, np.uint8) == SEALED)).tolist())

    def snapshot(self) -> tuple[bytes, bytes, bytes]:
        """Copies of what `by_namespace` counts: 9 bytes a row, 1 ms at a million rows."""
        return self._state.tobytes(), self._namespace.tobytes(), self._nbytes.tobytes()

    def rows_of_namespace(self, namespace: int, most: int) -> list[int]:
        return list(np.flatnonzero(self._sealed_of(namespace))[:most].tolist())

    def handles(self) -> set[int]:
        """Handles of all namespaces that hold a row, sealed or not."""
        taken = np.frombuffer(self._state, np.uint8) != FREE
        return set(np.unique(np.frombuffer(self._namespace, np.uint32)[taken]).tolist())

    def held_rows(self) -> dict[int, int]:
        """{row: leases} of every leased row."""
        leases = np.frombuffer(self._leases, np.uint32)
        rows = np.flatnonzero(leases)
        return dict(zip(rows.tolist(), leases[rows].tolist(), strict=True))

    def reserved_rows(self) -> set[int]:
        return set(np.flatnonzero(np.frombuffer(self._state, np.uint8) == RESERVED).tolist())

    def check_integrity(self) -> dict[int, int]:
        """Asserts that index, columns and age lists agree. Returns {page: row} of every taken slot."""
        indexed = {row: key for shard in self._shards for key, row in shard.items()}
        assert len(indexed) == self.known
        slot, leases = np.frombuffer(self._slot, np.uint32), np.frombuffer(self._leases, np.uint32)
        waiting = np.frombuffer(self._state, np.uint8) == RESERVED
        counted = int(np.count_nonzero(leases)), int(slot[leases > 0].sum(dtype=np.uint64))
        assert (self.leased, self.leased_bytes) == counted
        counted = int(np.count_nonzero(waiting)), int(slot[waiting].sum(dtype=np.uint64))
        assert (self.reserved, self.reserved_bytes) == counted
        del slot, leases, waiting
        listed: set[int] = set()
        for head in range(_FIRST):
            row, before, age = self._next[head], head, 0
            while row != head:
                assert row not in listed and self._prev[row] == before, "an age list is broken"
                assert self._size[row] * USES + self._count[row] == head and self._state[row] == SEALED
                assert bool(self._leases[row]) == (row in self._kept)
                assert self._age[row] >= age, "an age list is out of order"
                listed.add(row)
                before, age, row = row, self._age[row], self._next[row]
            assert self._prev[head] == before
        assert self._kept <= listed and sum(self._idle) == len(listed) - len(self._kept)
        pages: dict[int, int] = {}
        free = set(self._free)
        for row in range(_FIRST, len(self._state)):
            state = self._state[row]
            assert (state == FREE) == (row in free)
            if state == FREE:
                continue
            assert (state == SEALED) == (row in indexed) and (row not in indexed or indexed[row] == self._keys[row])
            assert (state == SEALED and (not self._leases[row] or row in self._kept)) == (row in listed)
            assert self._leases[row] or state != DOOMED
            assert self._page[row] not in pages, "two rows share a slot"
            pages[self._page[row]] = row
        return pages

    def _sealed_of(self, handle: int) -> npt.NDArray[np.bool_]:
        """For every row whether it is a sealed one of this namespace."""
        mine: npt.NDArray[np.bool_] = np.frombuffer(self._namespace, np.uint32) == handle
        mine &= np.frombuffer(self._state, np.uint8) == SEALED
        return mine

    def _grow(self, rows: int) -> None:
        """More rows. All or nothing: columns of unequal length would not go together."""
        first = len(self._keys)
        columns = (
            self._state, self._size, self._count, self._leases, self._page, self._nbytes, self._slot, self._namespace,
            self._checksum, self._age, self._prev, self._next,
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

    def _end_keeping(self, rows: Iterable[int]) -> set[int]:
        """Those of these rows that were kept are unleased rows again, as far as the lists go. Returns them."""
        back = self._kept.intersection(rows)
        self._kept -= back
        for row in back:
            self._idle[self._size[row]] += 1
        return back

    def _link(self, rows: Sequence[int]) -> None:
        """Puts rows at the young end of their lists, the last first: a tail is always older than its head."""
        self.tick += len(rows)
        tick, prev, after, idle = self.tick, self._prev, self._next, self._idle
        sizes, counts, ages = self._size, self._count, self._age
        for row in reversed(rows):
            size = sizes[row]
            head = size * USES + counts[row]
            last = prev[head]
            after[last] = prev[head] = row
            prev[row] = last
            after[row] = head
            ages[row] = tick
            idle[size] += 1

    def _unlink(self, rows: Sequence[int]) -> None:
        prev, after, sizes, idle = self._prev, self._next, self._size, self._idle
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
