"""Crashes at any point of the SSD tier's life: whole or absent, nothing else counted; with `sync`, what was settled is
there.

Every change that the tier makes to its disk is recorded; every prefix of the record is a crash. After a kill -9 all of
it is on disk, the last write perhaps in part; after a power cut what was not synced may be missing or torn. Each time a
new tier opens what is left. Kills of real daemons are in test_kill.py.
"""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.tiers.ssd import index, inspection
from kvtier.tiers.ssd.ssd import Ssd
from tests.support.disks import Op, Recording, after_kill, after_power_cut
from tests.support.tiers import Registry, Samples

KiB, MiB = 1024, 1 << 20
CAPACITY = 4 * MiB
NUMBERS = range(90)


@pytest.fixture
def shelf() -> Iterator[Path]:
    """A directory in memory where there is one: thousands of fsyncs are not what is tested."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="kvtier-test-") as name:
        yield Path(name)


def yards(registry: Registry) -> list[Samples]:
    return [registry.samples(60 * KiB), registry.samples(200 * KiB, model="org/large")]


def live(path: Path, sync: bool, rounds: int, monkeypatch: pytest.MonkeyPatch) -> list[Op]:
    """A life of a tier with everything that changes its disk, and what was known after each call, as events."""
    monkeypatch.setattr(index, "CHECKPOINT_BYTES", 2048)
    chance, disk, registry = random.Random(5), Recording(), Registry()
    small, large = yards(registry)
    for reopened in range(2):
        tier = Ssd(path, CAPACITY, registry.register, sync=sync, disk=disk)
        try:
            for _ in range(rounds):
                what = chance.random()
                samples, numbers = (small, NUMBERS) if what < 0.8 else (large, range(20))
                some = chance.sample(numbers, 4)
                if what < 0.65 or what >= 0.8:
                    samples.put(tier, some)
                elif what < 0.75:
                    tier.delete(samples.keys(some))
                else:
                    samples.whole(tier, some)
                disk.note(known(tier, small, large))
            if reopened == 0:
                assert tier.gauges()["checkpoints_total"] >= 1
        finally:
            tier.close()
    disk.note(known(tier, small, large))
    return disk.ops


def known(tier: Ssd, small: Samples, large: Samples) -> frozenset[tuple[str, int]]:
    return frozenset(
        {("small", n) for n in small.known(tier, NUMBERS)} | {("large", n) for n in large.known(tier, range(20))}
    )


def spread(path: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)


def recovered(path: Path, sync: bool) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """(known, whole) blocks of a tier that opens this directory. Fails for a wrong byte or books that do not agree with
    the disk."""
    registry = Registry()
    small, large = yards(registry)
    tier = Ssd(path, CAPACITY, registry.register, sync=sync)
    try:
        before = set(known(tier, small, large))
        whole = {("small", n) for n in small.whole(tier, NUMBERS)} | {
            ("large", n) for n in large.whole(tier, range(20))
        }
        assert whole <= before
        assert set(known(tier, small, large)) == whole, "what failed is forgotten"
        tier.check_integrity()
        for samples in (small, large):  # it goes on
            assert all(samples.put(tier, range(1000, 1003))) and samples.whole(tier, range(1000, 1003)) == [
                1000,
                1001,
                1002,
            ]
        tier.check_integrity()
    finally:
        tier.close()
    report = inspection.check(path)
    assert not report.findings, report.findings
    assert report.blocks == report.whole == tier.gauges()["blocks"]
    return before, whole


def promised(ops: list[Op], at: int) -> set[tuple[str, int]]:
    """What was known before and after the call in which the crash comes: it may take others away, these it may not."""
    before: Any = next((op.event for op in reversed(ops[:at]) if op.kind == "event"), frozenset())
    after: Any = next((op.event for op in ops[at:] if op.kind == "event"), before)
    return set(before & after)


def crashes(ops: list[Op], step: int) -> list[int]:
    """Prefixes: every `step`th, and all that end beside a change of names."""
    rare = {i for i, op in enumerate(ops) if op.kind in ("create", "rename", "unlink", "size")}
    chosen = {*range(0, len(ops) + 1, step), len(ops), *rare, *(i + 1 for i in rare)}
    return sorted(i for i in chosen if i == len(ops) or ops[i - 1].kind != "event" or i % step == 0)


@pytest.mark.long
@pytest.mark.parametrize("sync", [False, True], ids=["", "sync"])
@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
def test_a_crash_leaves_each_block_whole_or_absent(
    sync: bool, power: bool, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay(sync, power, shelf, monkeypatch, rounds=60, step=11)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sync", [False, True], ids=["", "sync"])
@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
def test_a_crash_at_every_point(
    sync: bool, power: bool, seed: int, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay(sync, power, shelf, monkeypatch, rounds=100, step=1, seed=seed)


def replay(
    sync: bool, power: bool, shelf: Path, monkeypatch: pytest.MonkeyPatch, rounds: int, step: int, seed: int = 0
) -> None:
    ops = live(shelf / "life", sync, rounds, monkeypatch)
    monkeypatch.undo()
    lost = kept = 0
    for at in crashes(ops, step):
        chance = random.Random(f"{seed}/{at}")
        files = (after_power_cut if power else after_kill)(ops[:at], chance)
        spread(shelf / "crashed", files)
        before, whole = recovered(shelf / "crashed", sync)
        must = promised(ops, at)
        if sync or not power:
            assert must <= whole, f"settled blocks are gone after operation {at}: {sorted(must - whole)}"
            assert before == whole, "what the index says is there"
        kept += len(whole)
        lost += len(must - whole)
    assert kept > 100
    assert (power and not sync) or not lost


def test_the_record_replays_to_what_is_on_disk(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of a disk agrees with the disk: all operations and no crash give the very files."""
    ops = live(shelf / "life", False, 40, monkeypatch)
    files = after_kill([*ops, Op("event")], random.Random(0))
    real = {path.name: path.read_bytes() for path in (shelf / "life").iterdir()}
    del real["lock"], files["lock"]
    assert files.keys() == real.keys()
    assert [name for name in real if real[name] != files[name]] == []
    kinds = {
        kind: sum(op.kind == kind for op in ops)
        for kind in ("write", "size", "sync", "create", "rename", "unlink", "sync_directory")
    }
    assert min(kinds.values()) >= 2, kinds
    names = {op.name.split(".")[0] for op in ops if op.kind == "write"}
    assert names == {"format", "journal", "blocks", "checkpoint"}
    assert len(list(itertools.groupby(op.kind for op in ops))) > 100
