"""A tier in this process's memory: the least that keeps the contract. For tests and benchmarks of what moves blocks,
where a disk would be noise.

At most `capacity` bytes; what was used longest ago goes first. Thread-safe, one lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.errors import Lost, NotFound, Unavailable
from kvtier.format import block
from kvtier.store.namespaces import Namespace
from kvtier.tiers.tier import Outgoing


@dataclass(frozen=True, slots=True)
class _Kept:
    namespace: Namespace
    slot: bytes
    nbytes: int
    checksum: int


class MemoryTier:
    """Blocks by key."""

    name = "memory"

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._used = 0
        self._closed = False
        self._reads = self._lost = self._evicted = 0

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether the block is here."""
        return [key in self._kept for key in keys]

    def unsure(self, keys: Sequence[bytes]) -> list[bool]:
        """Never: it knows what it holds."""
        return [False] * len(keys)

    def write(self, blocks: Sequence[Outgoing]) -> list[bool]:
        """Keeps copies, evicting what was used longest ago."""
        with self._lock:
            self._check_open()
            for out in blocks:
                if out.key in self._kept or out.namespace.dropped or len(out.slot) > self.capacity:
                    continue
                while self._used + len(out.slot) > self.capacity:
                    self._forget(next(iter(self._kept)))
                    self._evicted += 1
                self._kept[out.key] = _Kept(out.namespace, bytes(out.slot), out.nbytes, out.checksum)
                self._used += len(out.slot)
            return [out.key in self._kept for out in blocks]

    def read(self, key: bytes, slot: memoryview, nbytes: int) -> int:
        """Copies a block into `slot` and returns its checksum, verified. Raises NotFound or Lost."""
        with self._lock:
            self._check_open()
            kept = self._kept.get(key)
            if kept is None:
                raise NotFound("not in the memory tier")
            self._kept.move_to_end(key)
            self._reads += 1
        try:
            if kept.nbytes != nbytes or len(kept.slot) != len(slot):
                raise Lost(
                    f"a block of {kept.nbytes} bytes in a slot of {len(kept.slot)}, "
                    f"asked for as {nbytes} in {len(slot)}"
                )
            np.copyto(np.frombuffer(slot, np.uint8), np.frombuffer(kept.slot, np.uint8))
            block.verify(slot[:nbytes], key, kept.checksum)
        except Lost:
            with self._lock:
                if self._kept.get(key) is kept:
                    self._forget(key)
                    self._lost += 1
            raise
        return kept.checksum

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forgets these blocks; returns how many were known."""
        with self._lock:
            known = [key for key in dict.fromkeys(keys) if key in self._kept]
            for key in known:
                self._forget(key)
            return len(known)

    def drop(self, namespace: Namespace) -> int:
        """Forgets all blocks of a namespace; returns how many."""
        with self._lock:
            mine = [key for key, kept in self._kept.items() if kept.namespace is namespace]
            for key in mine:
                self._forget(key)
            return len(mine)

    def handles(self) -> set[int]:
        """Handles of the namespaces whose blocks are here."""
        with self._lock:
            return {kept.namespace.handle for kept in self._kept.values()}

    def blocks_by_namespace(self) -> dict[int, tuple[int, int]]:
        """{handle: (blocks, their bytes)}."""
        found: dict[int, tuple[int, int]] = {}
        with self._lock:
            for kept in self._kept.values():
                blocks, nbytes = found.get(kept.namespace.handle, (0, 0))
                found[kept.namespace.handle] = (blocks + 1, nbytes + kept.nbytes)
        return found

    def gauges(self) -> dict[str, int]:
        """Numbers for operators."""
        with self._lock:
            return {
                "capacity_bytes": self.capacity,
                "used_bytes": self._used,
                "blocks": len(self._kept),
                "degraded": 0,
                "read_blocks_total": self._reads,
                "lost_blocks_total": self._lost,
                "evicted_blocks_total": self._evicted,
            }

    def fault(self) -> str:
        """What is wrong now, for people; "" if nothing is."""
        return ""

    def check_integrity(self) -> None:
        """Asserts that the bytes are those of the blocks, and within the capacity."""
        with self._lock:
            assert self._used == sum(len(kept.slot) for kept in self._kept.values()) <= self.capacity

    def close(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._closed = True
            self._kept.clear()
            self._used = 0

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the memory tier is closed")

    def _forget(self, key: bytes) -> None:
        self._used -= len(self._kept.pop(key).slot)
