"""What this server has put into the daemon or found there, and what it holds for LMCache.

The daemon knows keys, LMCache's eviction and quotas want object keys with sizes: `Inventory` keeps these, as far as
this process has met them. `Holds` keeps the leases that stand behind LMCache's locks: from a lookup until the unlock,
or until `HOLD_SECONDS` are over, for an unlock may never come. No I/O; both are thread-safe.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvtier.client.answers import Lease
from kvtier.connectors.common.object_naming import Space

MAX_OBJECTS = 1 << 20
HOLD_SECONDS = 60.0


class Inventory:
    """Objects by key, in the order in which they were met."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Any, tuple[int, Space]] = {}
        self._order: dict[int, Any] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def space(self, key: Any) -> Space | None:
        """The namespace in which a key is known to be stored."""
        entry = self._entries.get(key)
        return entry[1] if entry else None

    def enter(self, keys: Sequence[Any], space: Space) -> tuple[list[Any], list[tuple[Any, int]]]:
        """(keys that are new, (key, size) of those that had to make room or are stored in another form now)."""
        fresh, gone = [], []
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry and entry[1] is space:
                    continue
                if entry:
                    gone.append((key, self._drop(key)))
                elif len(self._entries) >= MAX_OBJECTS:
                    oldest = self._order[next(iter(self._order))]
                    gone.append((oldest, self._drop(oldest)))
                number = next(self._numbers)
                self._entries[key] = (number, space)
                self._order[number] = key
                fresh.append(key)
        return fresh, gone

    def remove(self, keys: Sequence[Any]) -> list[tuple[Any, int]]:
        """(key, size) of those of the keys that were there."""
        with self._lock:
            return [(key, self._drop(key)) for key in keys if key in self._entries]

    def page(self, model: str | None, size: int, after: int) -> tuple[list[tuple[Any, int]], int | None]:
        """At most `size` (key, bytes) behind number `after`, and the number to go on from; None: that was all."""
        with self._lock:
            order = list(self._order)
            found: list[tuple[Any, int]] = []
            for number in order[bisect_right(order, after) :]:
                key = self._order[number]
                if model is not None and key.model_name != model:
                    continue
                if len(found) == size:
                    return found, after
                found.append((key, self._entries[key][1].nbytes))
                after = number
        return found, None

    def _drop(self, key: Any) -> int:
        number, space = self._entries.pop(key)
        del self._order[number]
        return space.nbytes


@dataclass(eq=False, slots=True)
class Hold:
    """The leases of one lookup, one for each piece of its objects, which end together.

    left      locks on it that are not given back
    readers   loads that copy out of it just now
    """

    space: Space
    leases: list[Lease]
    left: int
    until: float = field(default_factory=lambda: time.monotonic() + HOLD_SECONDS)
    readers: int = 0

    @property
    def nbytes(self) -> int:
        return self.space.slot_bytes * max(len(lease) for lease in self.leases)


class Holds:
    """Locks by object key. A lock that is given back twice, or after its time, is nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[Any, list[tuple[Hold, int]]] = defaultdict(list)
        self._open: list[Hold] = []

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena that are held."""
        with self._lock:
            return sum(hold.nbytes for hold in self._open)

    def add(self, keys: Sequence[Any], space: Space, leases: list[Lease]) -> None:
        """One lock of each key; key n is block n of every lease."""
        hold = Hold(space, leases, len(keys))
        with self._lock:
            self._open.append(hold)
            for place, key in enumerate(keys):
                self._by_key[key].append((hold, place))

    def unlock(self, keys: Sequence[Any]) -> None:
        """Gives one lock of each key back."""
        with self._lock:
            for key in keys:
                holds = self._by_key.get(key)
                if not holds:
                    continue
                holds.pop(0)[0].left -= 1
                if not holds:
                    del self._by_key[key]

    def borrow(self, keys: Sequence[Any], space: Space) -> list[tuple[Hold, int] | None]:
        """Where each key is held, None where it is not. What is borrowed stays held until it is given back."""
        with self._lock:
            held = (self._by_key.get(key, ()) for key in keys)
            found = [next((entry for entry in entries if entry[0].space is space), None) for entries in held]
            for entry in found:
                if entry is not None:
                    entry[0].readers += 1
        return found

    def give_back(self, borrowed: Sequence[tuple[Hold, int] | None]) -> None:
        """Ends a `borrow`."""
        with self._lock:
            for entry in borrowed:
                if entry is not None:
                    entry[0].readers -= 1

    def ended(self, everything: bool = False) -> list[Lease]:
        """Leases that nobody needs any more: to be released by the caller, once."""
        now = time.monotonic()
        with self._lock:
            unread = (hold for hold in self._open if not hold.readers)
            over = [hold for hold in unread if everything or hold.left <= 0 or hold.until < now]
            if over:
                self._open = [hold for hold in self._open if hold not in over]
            if late := [hold for hold in over if hold.left > 0]:
                for key in list(self._by_key):
                    self._by_key[key] = [entry for entry in self._by_key[key] if entry[0] not in late]
                    if not self._by_key[key]:
                        del self._by_key[key]
        return [lease for hold in over for lease in hold.leases]
