"""KVB-19 (a) over a real SSD tier: one key written, settled, forgotten, promoted, read and deleted at once, in one
process.

Every read is one of the written values or a miss; in the end there is one entry in the arena, one on the disk, and the
directory is clean.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from kvtier.protocol.stops import PRESENT
from kvtier.server.sessions import Session
from kvtier.tiers.ssd import inspection
from kvtier.tiers.ssd.ssd import MIN_CAPACITY, Ssd
from kvtier.tiers.tiering import Tiering
from tests.store.test_store_cases import VALUES, Race
from tests.support.daemon import PATIENCE
from tests.support.inside import Inside, KiB, MiB


class Disk(Inside):
    """A store over an SSD tier in this directory."""

    def __init__(self, path: Path) -> None:
        super().__init__(8 * MiB)
        self.path = path
        self.tier = Ssd(path, MIN_CAPACITY, self.store.namespaces.register)
        self.tiering = Tiering(self.store, [self.tier])

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is None:
                self.tiering.check_integrity()
        finally:
            self.tiering.close(1.0)
            super().__exit__(*exc)  # type: ignore[arg-type]


class Deep(Race):
    """Writers flush now and then; readers forget in the arena what is on the disk, then bring it up."""

    inside: Disk

    def write(self, session: Session, value: int) -> None:
        for id_ in range(1, self.rounds + 1):
            (offset,) = session.reserve(id_, *self.space.asked([7]))
            if offset != PRESENT:
                np.copyto(self.inside.body_at(offset, self.space), VALUES[value])
                assert session.seal(id_, ()) == 1, "the losing put hears that the key is there, not an error"
            if id_ % 10 == value:
                self.inside.tiering.flush(self.key, self.space.namespace, time.monotonic() + 0.05)

    def read(self, session: Session) -> None:
        store, tiering = self.inside.store, self.inside.tiering
        for id_ in count(1):
            if self.stop.is_set():
                return
            if id_ % 3 == 0 and self.inside.tier.find(self.key)[0]:
                self.seen["forgotten"] += len(store.forget(self.key))
            tiering.bring_up(self.key, self.space.namespace, self.space.extents, time.monotonic() + 0.05)
            offsets, _ = session.lease(id_, self.key)
            if not offsets:
                self.seen["miss"] += 1
                continue
            first = self.inside.body_at(offsets[0], self.space).copy()
            again = self.inside.body_at(offsets[0], self.space).copy()
            session.release(id_, ())
            assert np.array_equal(first, again), "a leased block changed"
            found = [n for n, value in enumerate(VALUES, 1) if np.array_equal(first, value)]
            assert found, f"neither of the written values: {first[:16]}"
            self.seen[f"P({found[0]})"] += 1

    def delete(self) -> None:
        while not self.stop.is_set():
            self.seen["deleted"] += self.inside.store.delete(self.key)
            self.stop.wait(0.02)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)  # threads change often
    try:
        with Disk(tmp_path / "ssd") as made:
            yield made
        report = inspection.check(made.path)
        assert not report.findings and report.whole == report.blocks
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("rounds", [10_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_kvb_19_a_one_key_over_an_ssd(disk: Disk, rounds: int) -> None:
    run = Deep(disk, rounds)
    run.run()
    assert run.seen["P(1)"] and run.seen["P(2)"] and run.seen["deleted"], dict(run.seen)
    session = disk.session()
    (offset,) = session.reserve(1, *run.space.asked([7]))
    if offset != PRESENT:
        np.copyto(disk.body_at(offset, run.space), VALUES[0])
    session.seal(1, ())
    until = time.monotonic() + PATIENCE
    for space in (run.space, run.double):
        assert disk.tiering.flush(space.keys([7]), space.namespace, until) == 1
    assert disk.tier.gauges()["blocks"] == 2 and disk.tier.gauges()["lost_blocks_total"] == 0
    assert disk.store.gauges()["used_bytes"] == 8 * KiB, "one entry of each length"
    disk.store.forget(run.key)
    disk.tiering.bring_up(run.key, run.space.namespace, run.space.extents, until)
    offsets, _ = session.lease(2, run.key)
    assert any(np.array_equal(disk.body_at(offsets[0], run.space), value) for value in VALUES), (
        "said to be there, and so it can be had"
    )
    session.release(2, ())
    disk.store.delete(run.key)
    disk.store.delete(run.double.keys([7]))
    assert disk.store.gauges()["used_bytes"] == 0 and disk.tier.gauges()["blocks"] == 0, (
        "deleted means deleted everywhere"
    )
    session.end()
