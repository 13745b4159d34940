"""The SSD tier: its directory, what it does when the disk does not, what it keeps over restarts. The contract is in
test_tier.py, crashes in test_crash.py, disks that really fill up in test_disk_full.py."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.errors import Invalid, NotFound, Unavailable
from kvtier.tiers.ssd import ssd
from kvtier.tiers.ssd.ssd import MIN_CAPACITY, Ssd
from tests.support.daemon import PATIENCE, KiB, MiB, until
from tests.support.disks import READ_ONLY, Failing
from tests.support.tiers import Registry, Samples, Shop, checkpoints, degraded, fault_of

# --- restarts


def test_blocks_and_their_order_outlive_the_tier(shop: Shop) -> None:
    shop.samples.put(shop.tier, range(100))
    shop.samples.get(shop.tier, 0)
    shop.tier.delete(shop.samples.keys([50]))
    shop.open()
    assert shop.samples.whole(shop.tier, range(101)) == [n for n in range(100) if n != 50]
    held = shop.tier.gauges()["blocks"]
    shop.open()
    for n in range(1000, 1000 + 960 - held + 20):
        shop.samples.put(shop.tier, [n])
    gone = set(range(100)) - {50, *shop.samples.known(shop.tier, range(100))}
    assert gone and max(gone) < 50, "the oldest went first"


def test_a_start_reads_no_data(shop: Shop) -> None:
    shop.samples.put(shop.tier, range(200))
    before = shop.disk.calls["read"]
    shop.open()
    assert shop.tier.gauges()["blocks"] == 200
    assert shop.disk.calls["read"] == before


def test_a_smaller_capacity_holds_from_the_start(shop: Shop) -> None:
    shop.open(16 * MiB)
    large = shop.registry.samples(100 * KiB)
    for n in range(130):
        assert large.put(shop.tier, [n]) == [True]
    shop.open(MIN_CAPACITY)
    assert shop.used() <= MIN_CAPACITY
    shop.tier.check_integrity()
    large = shop.registry.samples(100 * KiB)
    known = large.known(shop.tier, range(130))
    assert known and large.whole(shop.tier, known) == known
    assert large.put(shop.tier, range(500, 504)) == [True] * 4
    assert shop.used() <= MIN_CAPACITY
    shop.open(16 * MiB)
    large = shop.registry.samples(100 * KiB)
    for n in range(130):
        assert large.put(shop.tier, [n]) == [True], "and may grow again"


def test_a_capacity_below_one_slab_is_refused(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "ssd")
    shop.open(64 * MiB)
    with pytest.raises(Invalid, match=r"slabs of 7864320 bytes; 3932160 are too few"):
        shop.open(MIN_CAPACITY)
    shop.open(9 * MiB)
    assert shop.samples.put(shop.tier, [1]) == [True]
    shop.tier.close()


# --- the capacity


def test_ten_times_the_capacity_never_takes_more_than_the_capacity(shop: Shop) -> None:
    """Blocks of one size, then of another; the disk that everything in the directory takes, looked at after each call
    and between."""
    capacity = 8 * MiB
    shop.open(capacity)
    most, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            most[0] = max(most[0], shop.used())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for nbytes, model in ((3000, "org/small"), (60_000, "org/middle"), (900_000, "org/large")):
            samples = shop.registry.samples(nbytes, model=model)
            batch = max(1, min(32, 512 * KiB // samples.slot_bytes))
            for first in range(0, 10 * capacity // samples.slot_bytes // 3, batch):
                samples.put(shop.tier, range(first, first + batch))
                most[0] = max(most[0], shop.used())
    finally:
        stop.set()
        watcher.join(PATIENCE)
    assert capacity * 3 // 4 < most[0] <= capacity
    assert checkpoints(shop.tier) >= 1
    assert not degraded(shop.tier)
    shop.tier.check_integrity()


# --- faults


def until_written(shop: Shop, n: int) -> int:
    """Puts block n until the tier takes it. Returns how often it was asked."""
    asked = 0

    def put() -> bool:
        nonlocal asked
        asked += 1
        return shop.samples.put(shop.tier, [n])[0]

    until(put, "the tier writes again")
    return asked


@pytest.mark.parametrize("call", ["write", "append"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_write_that_fails_is_a_block_that_is_not_there(
    call: str, code: int, shop: Shop, lines: Callable[[], list[str]]
) -> None:
    shop.samples.put(shop.tier, range(4))
    shop.disk.fail(call, code)
    calls = shop.disk.calls[call]
    assert shop.samples.put(shop.tier, [10, 11, 1]) == [False, False, True]
    assert shop.disk.calls[call] == calls + 1, "one try for the batch"
    assert degraded(shop.tier) == 1
    for n in range(20, 60):
        assert shop.samples.put(shop.tier, [n]) == [False]
    assert shop.disk.calls[call] <= calls + 4, "tried after pauses, not for every put"
    assert shop.samples.whole(shop.tier, range(60)) == [0, 1, 2, 3], "reading goes on"
    shop.disk.heal()
    until_written(shop, 10)
    assert degraded(shop.tier) == 0
    assert lines() == ["tier degraded", "tier recovered"], "one line a change, however many puts"
    gauges = shop.tier.gauges()
    assert 1 <= gauges["write_faults_total"] <= 4
    assert gauges["refused_blocks_total"] >= 36
    shop.open()
    assert shop.samples.whole(shop.tier, range(60)) == [0, 1, 2, 3, 10]


def test_a_read_only_disk_takes_nothing_and_gives_what_it_has(shop: Shop, lines: Callable[[], list[str]]) -> None:
    shop.samples.put(shop.tier, range(150))
    for name, code in READ_ONLY.items():
        shop.disk.fail(name, code)
    assert shop.samples.put(shop.tier, range(500, 510)) == [False] * 10
    assert shop.tier.delete(shop.samples.keys([3])) == 1, "forgotten in memory at least"
    assert shop.samples.whole(shop.tier, range(150)) == [n for n in range(150) if n != 3]
    assert degraded(shop.tier) == 1
    shop.disk.heal()
    until_written(shop, 500)
    assert lines() == ["tier degraded", "tier recovered"]
    shop.open()
    assert shop.samples.whole(shop.tier, range(501)) == [n for n in [*range(150), 500] if n != 3], (
        "the delete is on disk by now"
    )


def test_an_outage_costs_no_more_than_one_batch_of_what_is_there(shop: Shop) -> None:
    """Each try could evict for blocks that it then cannot write; only the first does."""
    fits = 960
    for first in range(0, fits, 32):
        shop.samples.put(shop.tier, range(first, first + 32))
    held = shop.tier.gauges()["blocks"]
    shop.disk.fail("append", errno.EIO)
    for n in range(8):
        shop.samples.put(shop.tier, range(2000 + 32 * n, 2032 + 32 * n))
        time.sleep(0.1)
    assert shop.tier.gauges()["write_faults_total"] >= 3
    assert shop.tier.gauges()["blocks"] >= held - 32


def test_a_transient_read_error_keeps_the_block(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    """KVB-14: absent for a while, so that it is not read again and again, then there."""
    monkeypatch.setattr("kvtier.tiers.ssd.ssd._AGAIN", 0.2)
    shop.samples.put(shop.tier, range(1, 9))
    shop.disk.fail("read", errno.EIO, times=1)
    assert fault_of(shop.tier, shop.samples, 5) is Unavailable
    reads = shop.disk.calls["read"]
    assert shop.samples.known(shop.tier, range(1, 9)) == [1, 2, 3, 4, 6, 7, 8], "a prefix ends there"
    assert degraded(shop.tier) == 1
    assert shop.samples.put(shop.tier, [5]) == [True], "it is here, nothing is written for it"
    until(lambda: shop.samples.known(shop.tier, [5]) == [5], "it counts again")
    assert shop.disk.calls["read"] == reads, "asking reads nothing"
    assert shop.samples.whole(shop.tier, range(1, 9)) == list(range(1, 9))
    assert degraded(shop.tier) == 0
    assert lines() == ["tier degraded", "tier recovered"]
    assert shop.tier.gauges()["read_faults_total"] == 1


def test_a_block_that_cannot_be_read_three_times_is_given_up(shop: Shop) -> None:
    shop.samples.put(shop.tier, [1, 2])
    place = shop.place(1)
    shop.disk.fail("read", errno.EIO, when=lambda fd, data, offset: offset == place)
    assert [fault_of(shop.tier, shop.samples, 1) for _ in range(4)] == [Unavailable] * 3 + [NotFound]
    assert shop.samples.whole(shop.tier, [1, 2]) == [2]
    gauges = shop.tier.gauges()
    assert (gauges["read_faults_total"], gauges["lost_blocks_total"], gauges["quarantined_slots"]) == (3, 1, 1)
    assert shop.samples.put(shop.tier, [1]) == [True]
    assert shop.place(1) != place or shop.data().count(shop.samples.block(1)) == 2, "the bad place rests"


# --- a question does not wait for the disk


class Held(Failing):
    """A disk whose writes wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.waiting = threading.Event()

    def _hold(self) -> None:
        if not self.go.is_set():
            self.waiting.set()
            assert self.go.wait(PATIENCE)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        self._hold()
        super().write(fd, data, offset)

    def append(self, fd: int, data: bytes) -> None:
        self._hold()
        super().append(fd, data)


@pytest.fixture
def held(shop: Shop) -> Iterator[Held]:
    disk = shop.disk = Held()
    shop.open()
    shop.samples.put(shop.tier, range(4))
    disk.go.clear()
    yield disk
    disk.go.set()


def in_background(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_whoever_asks_is_answered_while_the_disk_hangs(shop: Shop, held: Held) -> None:
    writer = in_background(lambda: shop.samples.put(shop.tier, [10]))
    assert held.waiting.wait(PATIENCE)
    done = threading.Event()

    def ask() -> None:
        shop.tier.gauges()
        shop.tier.handles()
        shop.tier.blocks_by_namespace()
        assert shop.samples.known(shop.tier, range(12)) == [0, 1, 2, 3]
        assert shop.samples.whole(shop.tier, range(4)) == [0, 1, 2, 3], "reading needs no journal"
        assert shop.tier.delete(shop.samples.keys([3])) == 1
        assert shop.tier.drop(shop.registry.samples(model="org/none").namespace) == 0
        done.set()

    asker = in_background(ask)
    assert done.wait(PATIENCE / 3)
    held.go.set()
    writer.join(PATIENCE)
    asker.join(PATIENCE)
    assert shop.samples.whole(shop.tier, range(12)) == [0, 1, 2, 10]


def test_a_put_after_a_delete_outlives_it(shop: Shop, held: Held) -> None:
    """Block 5 is on its way down twice; one copy is sealed and deleted while the other is being written: the tombstone
    is older than its record."""
    held.go.set()
    assert shop.samples.put(shop.tier, [5]) == [True]
    tier = shop.tier
    tier.delete(shop.samples.keys([5]))
    held.go.clear()
    held.waiting.clear()
    slow = in_background(lambda: shop.samples.put(tier, [5]))
    assert held.waiting.wait(PATIENCE), "the data is being written"
    with tier._lock:  # a delete of a copy that was sealed and is gone, not journalled yet
        tier._tombstones.add(shop.samples.key(5))
    held.go.set()
    slow.join(PATIENCE)
    assert shop.samples.known(tier, [5]) == [5]
    shop.open()
    assert shop.samples.whole(shop.tier, [5]) == [5]


def test_a_namespace_dropped_while_a_block_is_written_keeps_it_out(shop: Shop, held: Held) -> None:
    writer = in_background(lambda: shop.samples.put(shop.tier, [10]))
    assert held.waiting.wait(PATIENCE)
    shop.samples.namespace.dropped = True
    assert shop.tier.drop(shop.samples.namespace) == 4
    held.go.set()
    writer.join(PATIENCE)
    assert shop.samples.known(shop.tier, range(12)) == []
    shop.open()
    assert shop.tier.gauges()["blocks"] == 0


def test_the_same_block_written_by_two_is_one_block(shop: Shop, held: Held) -> None:
    writers = [in_background(lambda: shop.samples.put(shop.tier, [10, 11])) for _ in range(4)]
    assert held.waiting.wait(PATIENCE)
    held.go.set()
    for writer in writers:
        writer.join(PATIENCE)
    assert shop.samples.whole(shop.tier, [10, 11]) == [10, 11]
    assert shop.tier.gauges()["blocks"] == 6
    shop.open()
    assert shop.samples.whole(shop.tier, [10, 11]) == [10, 11]


def test_closing_a_tier_whose_disk_hangs_keeps_the_directory(
    shop: Shop, held: Held, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(ssd, "PATIENCE", 0.1)
    writer = in_background(lambda: shop.samples.put(shop.tier, [10]))
    assert held.waiting.wait(PATIENCE)
    shop.tier.close()
    assert lines() == ["ssd still busy"]
    with pytest.raises(Unavailable, match="belongs to another daemon"):
        Ssd(shop.path, MIN_CAPACITY, Registry().register)
    held.go.set()
    writer.join(PATIENCE)
    monkeypatch.undo()
    shop.open()
    assert shop.samples.whole(shop.tier, range(11)) == [0, 1, 2, 3, 10]


def test_readers_and_evictions_do_not_meet(shop: Shop) -> None:
    """A block that is being read is not written over: each read brings the right bytes or says it is gone."""
    stop = threading.Event()
    failed: list[BaseException] = []
    hits = [0]

    def read() -> None:
        try:
            while not stop.is_set():
                hits[0] += len(shop.samples.whole(shop.tier, range(1200)))
        except BaseException as error:
            failed.append(error)

    readers = [in_background(read) for _ in range(3)]
    try:
        for round_ in range(12):
            for first in range(0, 1200, 24):
                shop.samples.put(shop.tier, range(first, first + 24))
            if round_ % 3 == 0:
                shop.tier.delete(shop.samples.keys(range(0, 1200, 5)))
    finally:
        stop.set()
        for reader in readers:
            reader.join(PATIENCE)
    assert not failed, failed[0]
    assert hits[0] > 1000
    assert shop.tier.gauges()["lost_blocks_total"] == 0
    assert shop.tier.gauges()["evicted_blocks_total"] > 1000


def test_yards_differ() -> None:
    """The tests' own blocks: another namespace or number is another key and other bytes."""
    registry = Registry()
    first, second = registry.samples(), registry.samples(tenant="u")
    assert isinstance(first, Samples)
    assert len({first.key(1), first.key(2), second.key(1)}) == 3
    assert len({first.block(1), first.block(2), second.block(1)}) == 3
