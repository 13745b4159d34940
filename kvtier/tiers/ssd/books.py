"""What the SSD tier keeps in memory beside its ledger: totals, tombstones that wait for the journal, namespaces the journal knows, suspects.

No I/O. Not thread-safe: the tier holds its lock, but for `Suspects.wait` and its truth, which are single reads of a dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtier.store.allocator import Allocator, Slabs
from kvtier.store.eviction import Eviction
from kvtier.store.ledger import Ledger
from kvtier.store.namespaces import Namespace
from kvtier.store.store_counters import Counters
from kvtier.tiers.ssd.journal import Told

MAX_SUSPECTS = 4096
MAX_FAULTS = 3  # reads of one block that fail one after another before it is given up
_AGAIN = 2.0  # seconds after the first failed read in which a block counts as absent; twice as long after each more


@dataclass(slots=True)
class SsdTotals:
    """Totals since the start."""

    written_blocks: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    refused_blocks: int = 0  # not written: no room, or writing pauses
    lost_blocks: int = 0  # failed their check when they came back, or could not be read again and again
    read_faults: int = 0
    write_faults: int = 0


class Tombstones:
    """Keys that were forgotten and whose journal records say otherwise."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self.made = 0
        self.buried = 0  # of `made`, on disk

    def __bool__(self) -> bool:
        return bool(self._keys)

    def add(self, key: bytes) -> None:
        """One more."""
        self._keys.append(key)
        self.made += 1

    def take(self) -> list[bytes]:
        """All that wait, in order, on their way to disk."""
        taken, self._keys = self._keys, []
        return taken

    def put_back(self, keys: list[bytes]) -> None:
        """They did not get there."""
        self._keys[:0] = keys

    def settle(self, made: int) -> None:
        """Of the first so many that were made none is needed on disk any more: a checkpoint is younger."""
        done = max(0, len(self._keys) - (self.made - made))
        del self._keys[:done]
        self.buried += done


class SsdRoom(Allocator):
    """Allocator whose evictions leave a tombstone for the journal."""

    def __init__(self, slabs: Slabs, ledger: Ledger, counters: Counters, tombstones: Tombstones) -> None:
        super().__init__(None, slabs, ledger, Eviction(ledger, learns=False), counters, poison=False)
        self._tombstones = tombstones

    def free(self, rows: Sequence[int]) -> None:
        """Forgets rows; those that the journal knows, which have a checksum, get a tombstone."""
        for row in rows:
            if self._ledger.checksums((row,))[0]:
                self._tombstones.add(self._ledger.key(row))
        super().free(rows)


class Known:
    """Namespaces that the journal was told of, each under a number that is never used for another. `limit`: bytes of their frames."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._next = 1
        self._bytes = 0
        self.crowded = False  # one was refused for want of room
        self.numbers: dict[int, int] = {}  # by handle
        self.described: dict[int, tuple[str, bytes]] = {}  # by number: tenant and description

    def begin(self, number: int) -> None:
        """Numbers below are taken."""
        self._next = number

    def add(self, handle: int, told: Told) -> None:
        """The journal knows this one."""
        number, tenant, description = told
        self.numbers[handle] = number
        self.described[number] = (tenant, description)
        self._bytes += _size(tenant, description)
        self._next = max(self._next, number + 1)

    def room_for(self, namespace: Namespace) -> bool:
        """Whether this one is known or may still be told."""
        if namespace.handle in self.numbers:
            return True
        fits = self._bytes + _size(namespace.tenant, namespace.description.canonical) <= self._limit
        self.crowded |= not fits
        return fits

    def missing(self, namespaces: Iterable[Namespace]) -> dict[int, Told]:
        """What the journal must be told before it can name these: {handle: ...}, each under a fresh number."""
        told: dict[int, Told] = {}
        for namespace in namespaces:
            if namespace.handle not in self.numbers and namespace.handle not in told:
                told[namespace.handle] = (self._next + len(told), namespace.tenant, namespace.description.canonical)
        return told

    def number(self, handle: int, told: Mapping[int, Told]) -> int:
        """The number of a namespace that is known, or among those about to be told."""
        known = self.numbers.get(handle)
        return told[handle][0] if known is None else known

    def keep(self, handles: set[int]) -> bool:
        """Forgets all but these: the next checkpoint will not name them. Whether there were any."""
        gone = self.numbers.keys() - handles
        for handle in gone:
            tenant, description = self.described.pop(self.numbers.pop(handle))
            self._bytes -= _size(tenant, description)
        self.crowded = False
        return bool(gone)


class Suspects:
    """Blocks whose last read failed: absent for a while, given up after `MAX_FAULTS`."""

    def __init__(self) -> None:
        self._until: dict[bytes, tuple[float, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._until)

    def wait(self, key: bytes, now: float) -> bool:
        """Whether this block counts as absent now."""
        found = self._until.get(key)
        return found is not None and now < found[0]

    def failed(self, key: bytes, now: float) -> bool:
        """A read failed. Whether the block is to be given up."""
        failures = self._until.get(key, (0.0, 0))[1] + 1
        self._until[key] = (now + _AGAIN * 2.0 ** (failures - 1), failures)
        if len(self._until) > MAX_SUSPECTS:
            del self._until[next(iter(self._until))]
        return failures >= MAX_FAULTS

    def clear(self, key: bytes) -> None:
        """It was read, or it is gone."""
        self._until.pop(key, None)


def _size(tenant: str, description: bytes) -> int:
    return len(description) + len(tenant.encode()) + 32
