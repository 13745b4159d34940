"""Blocks of one namespace that nobody has put or used for too long: found and forgotten by the tick of their last use. Arena and SSD have one each.

No clock and no I/O: `policy.tick_before` makes a tick of a time. What is leased, held to be moved or reserved is never among them. Thread-safe:
takes the lock of whoever owns the ledger, for one bounded step at a time: 2 to 5 ms to look at a million, 5 ms to forget `STEP` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from kvtier.store.ledger import SEALED, Ledger
from kvtier.store.room import Counters

STEP = 2048  # blocks of one step


class Aging:
    """The ages of one ledger's blocks. `forget` takes sealed, unleased rows out of it; it is called under `lock`."""

    def __init__(
        self, ledger: Ledger, lock: AbstractContextManager[Any], counters: Counters, forget: Callable[[list[int]], None]
    ) -> None:
        self._ledger = ledger
        self._lock = lock
        self._counters = counters
        self._forget = forget

    def tick(self) -> int:
        """The ledger's tick now: what is put or used from here on is younger."""
        with self._lock:
            return self._ledger.tick

    def expired(self, handle: int, tick: int) -> list[bytes]:
        """Keys of up to `STEP` unleased blocks of a namespace whose last use was at this tick or before. Does not modify."""
        ledger = self._ledger
        with self._lock:
            mine = (np.frombuffer(ledger.namespace, np.uint32) == handle) & (
                np.frombuffer(ledger.state, np.uint8) == SEALED
            )
            mine &= (np.frombuffer(ledger.age, np.uint64) <= np.uint64(tick)) & (
                np.frombuffer(ledger.leases, np.uint32) == 0
            )
            return list(map(ledger.key, np.flatnonzero(mine)[:STEP].tolist()))

    def forget(self, keys: Sequence[bytes], tick: int) -> int:
        """Forgets those of these blocks that are unleased and no younger still. Returns how many."""
        with self._lock:
            rows = [row for row in self._idle(keys) if self._ledger.age[row] <= tick]
            self._forget(rows)
            self._counters.expired_blocks += len(rows)
            return len(rows)

    def renew(self, keys: Sequence[bytes]) -> None:
        """Those of these blocks that are unleased count as used now."""
        with self._lock:
            rows = self._idle(keys)
            self._ledger.lease(rows)
            self._ledger.release(rows)

    def _idle(self, keys: Sequence[bytes]) -> list[int]:
        """Unleased rows of these keys, each given once."""
        return [row for row in self._ledger.find_each(keys) if row is not None and not self._ledger.leases[row]]
