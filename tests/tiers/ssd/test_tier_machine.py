"""The store over a real SSD tier as a state machine: any verbs in any order, arena and disk so small that both evict,
lives that end and begin.

The model says of a key: *absent, or equal to what was put under it*; and of a settled one, that it stays while nothing
is evicted from the disk. After each step sessions, ledger, slabs, journal and disk agree; after each life `fsck` finds
nothing.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.protocol.stops import Stop
from kvtier.tiers.ssd import inspection
from kvtier.tiers.ssd.ssd import MIN_CAPACITY, Ssd
from kvtier.tiers.tiering import Tiering
from tests.support.daemon import PATIENCE, until
from tests.support.inside import Inside, KiB, Space

SLOT = 128 * KiB
SIZES = (SLOT - 4 * KiB, SLOT // 2 - 4 * KiB)  # bodies
ARENA, NUMBERS = 16 * SLOT, 40  # blocks of each size: 2.5 times the arena, 1.3 times the disk

pick = st.integers(0, 10**6)
some = st.tuples(st.integers(0, NUMBERS - 1), st.integers(1, 10)).map(
    lambda run: [(run[0] + i) % NUMBERS for i in range(run[1])]
)


class TierMachine(RuleBasedStateMachine):
    """See the module. Blocks are numbers: block n of a space holds `body(n)`."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory(prefix="kvtier-test-")
        self.path = Path(self._directory.name) / "ssd"
        self.put_once: set[tuple[int, int]] = set()  # (space, number)
        self.settled: set[tuple[int, int]] = set()  # counted by a flush, and not deleted since
        self.ids = 0

    @initialize()
    def begin(self) -> None:
        self.inside = Inside(ARENA)
        self.tier = Ssd(self.path, MIN_CAPACITY, self.inside.store.namespaces.register)
        self.tiering = Tiering(self.inside.store, [self.tier])
        self.spaces = [self.inside.space(size) for size in SIZES]
        self.writer, self.reader = self.inside.session(), self.inside.session()
        self.held: dict[int, tuple[int, list[int], list[int]]] = {}  # lease -> (space, numbers, offsets)
        if not self.put_once:
            for first in range(0, NUMBERS, 10):
                for s in range(2):
                    self.put(s, list(range(first, first + 10)))

    def id(self) -> int:
        self.ids += 1
        return self.ids

    def keys(self, s: int, numbers: list[int]) -> list[bytes]:
        return self.spaces[s].keys(numbers)

    def on_disk(self, s: int, numbers: list[int]) -> list[bool]:
        return self.tier.find(self.keys(s, numbers))

    # -- verbs

    @rule(s=st.integers(0, 1), numbers=some)
    def put(self, s: int, numbers: list[int]) -> None:
        for at in range(0, len(numbers), 2):
            pair = numbers[at : at + 2]
            assert self.inside.put(self.writer, self.id(), self.spaces[s], pair) == len(pair)
            self.put_once |= {(s, n) for n in pair}

    @rule(s=st.integers(0, 1), numbers=some, keep=st.booleans())
    def get(self, s: int, numbers: list[int], keep: bool) -> None:
        """Leases what is warm; each block is right. Some leases are kept for a while, few enough to leave room."""
        numbers = numbers[:2] if keep else numbers
        keys = self.keys(s, numbers)
        id_ = self.id()
        offsets, stop = self.reader.lease(id_, keys)
        for n, offset in zip(numbers, offsets, strict=False):
            assert (s, n) in self.put_once and self.inside.holds(offset, self.spaces[s], n)
        if len(offsets) == len(keys):
            assert stop == Stop.END
        elif stop == Stop.COLD:
            assert (s, numbers[len(offsets)]) in self.put_once
        if offsets and keep and len(self.held) < 3:
            self.held[id_] = (s, numbers[: len(offsets)], offsets)
        elif offsets:
            self.reader.release(id_, ())

    @rule(n=pick)
    def release(self, n: int) -> None:
        if self.held:
            id_ = sorted(self.held)[n % len(self.held)]
            self.reader.release(id_, ())
            del self.held[id_]

    @rule(s=st.integers(0, 1), numbers=some)
    def flush(self, s: int, numbers: list[int]) -> None:
        space = self.spaces[s]
        known = [n for n in numbers if self.inside.store.lookup_each(self.keys(s, [n]))[0]]
        done = self.tiering.flush(self.keys(s, known), space.namespace, time.monotonic() + PATIENCE)
        assert done == len(known), "what is in the arena can be settled"
        self.settled |= {(s, n) for n in known}

    @rule(s=st.integers(0, 1), numbers=some)
    def forget(self, s: int, numbers: list[int]) -> None:
        """As an eviction does."""
        self.inside.store.forget(self.keys(s, numbers))

    @rule(s=st.integers(0, 1), numbers=some)
    def bring_up(self, s: int, numbers: list[int]) -> None:
        space, keys = self.spaces[s], self.keys(s, numbers)
        self.quiet()
        warm = self.inside.store.lookup_each(keys)
        cold = sum(here and not up for here, up in zip(self.tier.find(keys), warm, strict=True))
        before = self.tiering.gauges()["promoted_blocks_total"]
        self.tiering.bring_up(keys, space.namespace, space.extents, time.monotonic() + PATIENCE)
        if not self.held:  # else there may be too little room
            assert self.tiering.gauges()["promoted_blocks_total"] - before == cold, "what the disk has comes up"

    @rule(s=st.integers(0, 1), numbers=some)
    def delete(self, s: int, numbers: list[int]) -> None:
        keys = self.keys(s, numbers)
        self.quiet()  # a write under way for longer than a delete waits is undone only when it has ended
        self.inside.store.delete(keys)
        assert not any(self.inside.store.lookup_each(keys)) and not any(self.on_disk(s, numbers))
        self.put_once -= {(s, n) for n in numbers}
        self.settled -= {(s, n) for n in numbers}

    @rule(s=st.integers(0, 1))
    def drop(self, s: int) -> None:
        description = self.spaces[s].namespace.description
        self.inside.store.drop(self.spaces[s].namespace)
        until(
            lambda: not self.tier.blocks_by_namespace().get(self.spaces[s].namespace.handle), "dropped on the disk, too"
        )
        self.spaces[s] = Space(self.inside.store, "t", description)
        self.put_once = {(i, n) for i, n in self.put_once if i != s}
        self.settled = {(i, n) for i, n in self.settled if i != s}

    @rule(drain=st.booleans())
    def restart(self, drain: bool) -> None:
        """A daemon ends and another begins: the arena is empty, the disk has what was settled."""
        self.close(drain)
        self.begin()

    # -- what holds

    def quiet(self) -> None:
        until(
            lambda: not (self.tiering.gauges()["settle_queue_blocks"] or self.tiering.gauges()["promoting_blocks"]),
            "nothing is under way",
        )

    @invariant()
    def all_agree(self) -> None:
        self.inside.check()
        self.tiering.check_integrity()
        for s, numbers, offsets in self.held.values():
            assert all(
                self.inside.holds(offset, self.spaces[s], n) for n, offset in zip(numbers, offsets, strict=True)
            ), "a leased block changed"
        for s in range(2):
            known = [
                n for n, here in enumerate(self.inside.store.known_each(self.keys(s, list(range(NUMBERS))))) if here
            ]
            assert {(s, n) for n in known} <= self.put_once
        if not self.tier.gauges()["evicted_blocks_total"]:
            assert all(self.on_disk(s, [n])[0] for s, n in self.settled), "settled, and not deleted"
        else:
            self.settled.clear()

    def close(self, drain: bool) -> None:
        for session in (self.writer, self.reader):
            session.end()
        self.tiering.close(PATIENCE if drain else 0.0)
        self.inside.__exit__(None, None, None)
        report = inspection.check(self.path)
        assert not report.findings and report.whole == report.blocks, report.findings

    def teardown(self) -> None:
        try:
            if hasattr(self, "inside"):
                self.close(drain=False)
        finally:
            self._directory.cleanup()


@pytest.mark.timeout(900)
class TestTierMachine(TierMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=15, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestTierMachineLong(TierMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=300, stateful_step_count=80)
