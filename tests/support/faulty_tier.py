"""Faults as an implementation with a seed: a tier around another tier that damages, delays, refuses and stalls.

What is damaged on its way down reaches the inner tier with the checksum of the right bytes, as a medium that loses bits
would have it; what is damaged on its way up is checked here again, as every tier must. So whoever uses it sees a block
whole or absent, more slowly and less often. The same seed and the same calls in one thread make the same faults.
Thread-safe.
"""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from kvtier.errors import Lost, Unavailable
from kvtier.format import block
from kvtier.store.namespaces import Namespace
from kvtier.tiers.tier import Outgoing, Tier

MAX_STALL = 60.0  # seconds that one call hangs at most
MAX_STALE = 64  # older blocks kept to be mistaken for others


@dataclass(frozen=True, slots=True)
class Rates:
    """How often each fault strikes, from 0 to 1, by block and direction."""

    flip: float = 0.0  # one bit is another
    truncate: float = 0.0  # the end is zeros
    misdirect: float = 0.0  # the bytes of another block of the same call, or the last one before
    stale: float = 0.0  # what stood in that memory before, some block of earlier calls
    delay: float = 0.0  # up to `longest` seconds
    refuse: float = 0.0  # an error of the medium, nothing done
    longest: float = 0.005  # seconds


class FaultyTier:
    """`inner` with faults. `stall` holds every read and write up until `resume`."""

    def __init__(self, inner: Tier, seed: int, rates: Rates) -> None:
        self.inner = inner
        self.name = inner.name
        self.struck: Counter[str] = Counter()
        self._rates = rates
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        self._older: list[bytes] = []

    # -- what tests steer

    def stall(self) -> None:
        """From here on reads and writes hang."""
        self._flowing.clear()

    def resume(self) -> None:
        """They go on."""
        self._flowing.set()

    # -- the tier

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """As the inner tier knows; no fault ever strikes here, as it does no I/O."""
        return self.inner.find(keys)

    def unsure(self, keys: Sequence[bytes]) -> list[bool]:
        """As the inner tier says."""
        return self.inner.unsure(keys)

    def write(self, blocks: Sequence[Outgoing]) -> list[bool]:
        """Lets some blocks arrive damaged, refuses some. False for these."""
        self._wait()
        passed = [(i, self._damaged(out, blocks)) for i, out in enumerate(blocks) if not self._strikes("refuse")]
        here = [False] * len(blocks)
        for (i, _), kept in zip(passed, self.inner.write([out for _, out in passed]), strict=True):
            here[i] = kept
        with self._lock:
            self._older = [*self._older, *(bytes(out.slot) for out in blocks)][-MAX_STALE:]
        return here

    def read(self, key: bytes, slot: memoryview, nbytes: int) -> int:
        """Reads, perhaps damages what came, checks it. Raises what the inner tier does, Lost, Unavailable."""
        self._wait()
        if self._strikes("refuse"):
            raise Unavailable("the medium does not answer")
        checksum = self.inner.read(key, slot, nbytes)
        damaged = self._damage(bytes(slot), [])
        if damaged is not None:
            np.copyto(np.frombuffer(slot, np.uint8), np.frombuffer(damaged, np.uint8))
            try:
                block.verify(slot[:nbytes], key, checksum)
            except Lost:
                self.inner.delete([key])
                raise
        return checksum

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forgets these blocks."""
        return self.inner.delete(keys)

    def drop(self, namespace: Namespace) -> int:
        """Forgets all blocks of a namespace."""
        return self.inner.drop(namespace)

    def handles(self) -> set[int]:
        """Those of the inner tier."""
        return self.inner.handles()

    def blocks_by_namespace(self) -> dict[int, tuple[int, int]]:
        """Those of the inner tier."""
        return self.inner.blocks_by_namespace()

    def gauges(self) -> dict[str, int]:
        """Those of the inner tier."""
        return self.inner.gauges()

    def fault(self) -> str:
        """That of the inner tier."""
        return self.inner.fault()

    def check_integrity(self) -> None:
        """That of the inner tier."""
        self.inner.check_integrity()

    def close(self) -> None:
        """Ends a stall and closes the inner tier."""
        self.resume()
        self.inner.close()

    # -- inside

    def _strikes(self, fault: str) -> bool:
        with self._lock:
            strikes: bool = self._random.random() < getattr(self._rates, fault)
            self.struck[fault] += strikes
        return strikes

    def _wait(self) -> None:
        self._flowing.wait(MAX_STALL)
        if self._strikes("delay"):
            with self._lock:
                seconds = self._random.random() * self._rates.longest
            time.sleep(seconds)
            self._flowing.wait(MAX_STALL)

    def _damaged(self, out: Outgoing, others: Sequence[Outgoing]) -> Outgoing:
        """The block as it will arrive: as it is, or in memory of its own."""
        damaged = self._damage(bytes(out.slot), [bytes(other.slot) for other in others if other is not out])
        if damaged is None:
            return out
        memory = mmap.mmap(-1, len(out.slot))  # aligned, as slots are
        memory[:] = damaged
        return Outgoing(out.key, out.namespace, memoryview(memory), out.nbytes, out.checksum)

    def _damage(self, slot: bytes, others: Sequence[bytes]) -> bytes | None:
        """Other bytes of the same length, or None."""
        with self._lock:
            older = [one for one in self._older if len(one) == len(slot)]
        others = [one for one in others if len(one) == len(slot)] or older[-1:]
        if self._strikes("flip"):
            with self._lock:
                bit = self._random.randrange(8 * len(slot))
            flipped = bytearray(slot)
            flipped[bit // 8] ^= 1 << bit % 8
            return bytes(flipped)
        if self._strikes("truncate"):
            with self._lock:
                kept = self._random.randrange(len(slot))
            return slot[:kept] + bytes(len(slot) - kept)
        if others and self._strikes("misdirect"):
            return self._choose(others)
        if self._strikes("stale"):
            return self._choose(older) if older else bytes(len(slot))
        return None

    def _choose(self, some: Sequence[bytes]) -> bytes:
        with self._lock:
            return self._random.choice(some)


def every(rate: float) -> Rates:
    """All faults at one rate."""
    return Rates(**{field.name: rate for field in fields(Rates) if field.name != "longest"})
