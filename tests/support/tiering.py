"""A store over one tier in this process, for the tests of what moves blocks: a tier that counts, refuses or hangs, and
short calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvtier.errors import Unavailable
from kvtier.tiers.tier import Outgoing
from kvtier.tiers.tiering import Tiering
from kvtier.tiers.write_behind import Budget
from tests.support.daemon import PATIENCE
from tests.support.faulty_tier import FaultyTier
from tests.support.inside import Inside, KiB, MiB
from tests.support.memory_tier import MemoryTier

BODY = 15 * KiB  # slots of 16 KiB: 64 in an arena of 1 MiB


class Counting(MemoryTier):
    """Counts calls; refuses, or hangs, when told to."""

    def __init__(self, capacity: int = 64 * MiB) -> None:
        super().__init__(capacity)
        self.writes: list[int] = []
        self.refusing = False
        self.failing = 0
        self.flowing = threading.Event()
        self.flowing.set()
        self.held = threading.Event()

    def write(self, blocks: Sequence[Outgoing]) -> list[bool]:
        self._hang()
        self.writes.append(len(blocks))
        if self.refusing:
            return [False] * len(blocks)
        return super().write(blocks)

    def read(self, key: bytes, slot: memoryview, nbytes: int) -> int:
        self._hang()
        if self.failing:
            self.failing -= 1
            with self._lock:
                self._reads += 1
            raise Unavailable("not now")
        return super().read(key, slot, nbytes)

    def _hang(self) -> None:
        if not self.flowing.is_set():
            self.held.set()
            assert self.flowing.wait(PATIENCE)


class Works(Inside):
    """A store over one tier."""

    def __init__(self, tier: MemoryTier | FaultyTier, budget: Budget | None = None) -> None:
        super().__init__()
        self.tier = tier
        self.tiering = Tiering(self.store, [tier], {tier.name: budget} if budget else None)
        self.one = self.space(BODY)
        self.writer = self.session()
        self._id = 0

    def __exit__(self, *exc: object) -> None:
        if isinstance(self.tier, Counting):
            self.tier.flowing.set()
        self.tiering.close(1.0)
        super().__exit__(*exc)  # type: ignore[arg-type]

    def seal(self, *numbers: int) -> None:
        for first in range(0, len(numbers), 10):  # a session may hold 16 at once
            self._id += 1
            part = numbers[first : first + 10]
            assert self.put(self.writer, self._id, self.one, part) == len(part)

    def flush(self, *numbers: int, within: float = PATIENCE) -> int:
        return self.tiering.flush(self.one.keys(numbers), self.one.namespace, time.monotonic() + within)

    def settle(self, *numbers: int) -> None:
        self.seal(*numbers)
        assert self.flush(*numbers) == len(numbers)

    def chill(self, *numbers: int) -> None:
        """Settles these and forgets them in the arena."""
        self.settle(*numbers)
        assert len(self.store.forget(self.one.keys(numbers))) == len(numbers)

    def bring(self, *numbers: int, within: float = PATIENCE) -> None:
        self.tiering.bring_up(self.one.keys(numbers), self.one.namespace, self.one.extents, time.monotonic() + within)

    def warm(self, *numbers: int) -> list[int]:
        """Those that are in the arena, each with the right bytes."""
        session, here = self.session(), []
        for n in numbers:
            self._id += 1
            offsets, _ = session.lease(self._id, self.one.keys([n]))
            if offsets:
                assert self.holds(offsets[0], self.one, n)
                here.append(n)
        session.end()
        return here
