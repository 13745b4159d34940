"""What every tier must keep, asked of each: the small one in memory, SSD with and without the page cache, Redis, each
also with faults around it.

A new tier is one entry in `TIERS`. Capacity and order of Redis are its operator's business (test_redis.py).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import Lost, NotFound, Unavailable
from kvtier.tiers.redis.location import make
from kvtier.tiers.redis.redis import Redis
from kvtier.tiers.ssd import index
from kvtier.tiers.ssd.disk import DIRECT, DISK, Disk
from kvtier.tiers.ssd.ssd import Ssd
from kvtier.tiers.tier import Tier
from tests.support.daemon import PATIENCE
from tests.support.faulty_tier import FaultyTier, Rates, every
from tests.support.memory_tier import MemoryTier
from tests.support.redis_servers import Server, needs_redis
from tests.support.tiers import Registry, Samples, fault_of, memory

MiB = 1 << 20
CAPACITY = 4 * MiB
QUIET = Rates()


class Buffered(Disk):
    """A file system that refuses O_DIRECT."""

    def open(self, path: Path, flags: int) -> int:
        if flags & DIRECT:
            raise OSError(22, "Invalid argument", str(path))
        return super().open(path, flags)


def _ssd(path: Path, registry: Registry, disk: Disk = DISK) -> Ssd:
    return Ssd(path / "ssd", CAPACITY, registry.register, disk=disk)


class Lone(Redis):
    """Redis, with a server of its own; its numbers are fresh whenever they are asked for."""

    def __init__(self) -> None:
        self._server = Server()
        self._server.__enter__()
        try:
            super().__init__(make(self._server.url))
        except BaseException:
            self._server.__exit__(None, None, None)
            raise

    def gauges(self) -> dict[str, int]:
        self.look()
        return super().gauges()

    def close(self) -> None:
        super().close()
        self._server.__exit__(None, None, None)


TIERS: dict[str, Callable[[Path, Registry], Tier]] = {
    "memory": lambda path, registry: MemoryTier(CAPACITY),
    "ssd direct": lambda path, registry: _ssd(path, registry),
    "ssd buffered": lambda path, registry: _ssd(path, registry, Buffered()),
    "redis": lambda path, registry: Lone(),
}
MARKS = {"redis": needs_redis}


def _each(*suffixes: str) -> list[Any]:
    return [pytest.param(f"{name}{suffix}", marks=MARKS.get(name, ())) for suffix in suffixes for name in TIERS]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than CROWDED to shorten an index, and a write is refused then, as it should be."""
    monkeypatch.setattr(index, "CROWDED", PATIENCE)


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def samples(registry: Registry) -> Samples:
    return registry.samples()


@pytest.fixture(params=_each("", " behind quiet faults"))
def tier(request: pytest.FixtureRequest, tmp_path: Path, registry: Registry) -> Iterator[Tier]:
    name = request.param.removesuffix(" behind quiet faults")
    made = TIERS[name](tmp_path, registry)
    if name != request.param:
        made = FaultyTier(made, 1, QUIET)
    yield made
    made.check_integrity()
    made.close()


@pytest.fixture
def bounded(tier: Tier) -> Tier:
    """A tier with a capacity of its own."""
    if tier.name not in ("memory", "ssd"):
        pytest.skip("what is full is this tier's operator's business")
    return tier


@pytest.fixture(params=_each(""))
def faulty(request: pytest.FixtureRequest, tmp_path: Path, registry: Registry) -> Iterator[FaultyTier]:
    """Every fault strikes one time in eight."""
    made = FaultyTier(TIERS[request.param](tmp_path, registry), 2, every(0.12))
    yield made
    made.check_integrity()
    made.close()


def test_what_is_written_is_found_and_read(tier: Tier, samples: Samples) -> None:
    assert tier.find(samples.keys(range(4))) == [False] * 4
    assert samples.put(tier, range(3)) == [True] * 3
    assert tier.find(samples.keys(range(4))) == [True] * 3 + [False]
    assert samples.whole(tier, range(4)) == [0, 1, 2]
    assert fault_of(tier, samples, 3) is NotFound


def test_a_read_fills_the_whole_slot_and_returns_the_digest(tier: Tier, samples: Samples) -> None:
    out = samples.outgoing(1)
    assert tier.write([out]) == [True]
    slot = memory(samples.slot_bytes)
    slot[:] = b"\x7f" * len(slot)
    assert tier.read(out.key, slot, samples.nbytes) == out.checksum
    assert slot == out.slot, "padding included: one form of bytes"


def test_writing_twice_changes_nothing(tier: Tier, samples: Samples) -> None:
    assert samples.put(tier, [1, 2]) == [True, True]
    used = tier.gauges()["used_bytes"]
    assert samples.put(tier, [2, 1, 2]) == [True] * 3
    assert samples.put(tier, [3, 3, 3]) == [True] * 3, "also within one call"
    assert tier.gauges()["used_bytes"] == used * 3 // 2 or tier.name == "redis", "Redis counts what it needs itself too"
    assert tier.gauges()["blocks"] == 3
    assert samples.whole(tier, [1, 2, 3]) == [1, 2, 3]


def test_nothing_is_no_work(tier: Tier) -> None:
    assert tier.write([]) == []
    assert tier.find([]) == []
    assert tier.delete([]) == 0


def test_deleted_is_gone(tier: Tier, samples: Samples) -> None:
    samples.put(tier, range(4))
    assert tier.delete(samples.keys([1, 3, 3, 9])) == 2
    assert samples.known(tier, range(4)) == [0, 2] == samples.whole(tier, range(4))
    assert tier.delete(samples.keys([1])) == 0
    assert samples.put(tier, [1]) == [True], "and may come back"
    assert samples.whole(tier, range(4)) == [0, 1, 2]


def test_namespaces_are_apart(tier: Tier, registry: Registry, samples: Samples) -> None:
    other = registry.samples(2048, tenant="u")
    samples.put(tier, range(3))
    other.put(tier, range(2))
    assert tier.handles() == {samples.namespace.handle, other.namespace.handle}
    held = tier.blocks_by_namespace()
    assert (held == {} and tier.name == "redis") or held == {
        samples.namespace.handle: (3, 3 * samples.nbytes),
        other.namespace.handle: (2, 2 * other.nbytes),
    }
    assert tier.drop(samples.namespace) == 3
    assert samples.known(tier, range(3)) == []
    assert other.whole(tier, range(2)) == [0, 1]
    assert tier.handles() == {other.namespace.handle}
    assert tier.drop(samples.namespace) == 0


def test_a_dropped_namespace_takes_no_more_blocks(tier: Tier, samples: Samples) -> None:
    samples.namespace.dropped = True
    assert samples.put(tier, [1]) == [False]
    assert tier.find(samples.keys([1])) == [False]


def test_full_means_the_oldest_goes_and_the_capacity_is_never_exceeded(bounded: Tier, samples: Samples) -> None:
    tier = bounded
    fits = CAPACITY // samples.slot_bytes
    for n in range(0, 3 * fits, 16):
        assert samples.put(tier, range(n, n + 16)) == [True] * 16
        assert tier.gauges()["used_bytes"] <= CAPACITY
    known = samples.known(tier, range(3 * fits))
    assert known == list(range(known[0], known[-1] + 1)) and known[-1] >= 3 * fits - 1, (
        "the youngest are there, without a gap"
    )
    assert len(known) >= fits * 3 // 4
    assert samples.whole(tier, known[:: max(1, len(known) // 16)])
    assert tier.gauges()["evicted_blocks_total"] >= 2 * fits


def test_reading_keeps_a_block_from_going(bounded: Tier, samples: Samples) -> None:
    tier = bounded
    fits = CAPACITY // samples.slot_bytes
    samples.put(tier, [0])
    for n in range(1, 2 * fits):
        samples.put(tier, [n])
        if n % 64 == 0:
            assert samples.get(tier, 0) is not None
    assert samples.known(tier, [0, 1]) == [0]


def test_a_block_too_large_is_refused_and_harms_nobody(bounded: Tier, registry: Registry, samples: Samples) -> None:
    tier = bounded
    large = registry.samples(6 * MiB)
    samples.put(tier, [1])
    assert large.put(tier, [1]) == [False]
    assert samples.put(tier, [2]) == [True]
    assert samples.whole(tier, [1, 2]) == [1, 2]


def test_sizes_change_hands(tier: Tier, registry: Registry) -> None:
    sizes = [registry.samples(nbytes, model=f"m/{nbytes}") for nbytes in (1024, 100_000, 20_000)]
    for _ in range(2):
        for one in sizes:
            n = 2 * CAPACITY // one.slot_bytes
            assert all(one.put(tier, [i])[0] for i in range(n))
            assert one.whole(tier, [n - 1])
    tier.check_integrity()


def test_wrong_bytes_under_a_checksum_are_lost_at_the_first_read_and_forgotten(tier: Tier, samples: Samples) -> None:
    out = samples.outgoing(5)
    out.slot[700] ^= 1
    assert tier.write([out, samples.outgoing(6)]) == [True, True]
    assert fault_of(tier, samples, 5) is Lost
    assert tier.find(samples.keys([5, 6])) == [False, True]
    assert fault_of(tier, samples, 5) is NotFound
    assert tier.gauges()["lost_blocks_total"] == 1
    assert samples.put(tier, [5]) == [True]
    assert samples.whole(tier, [5, 6]) == [5, 6]


def test_another_blocks_bytes_are_lost(tier: Tier, samples: Samples) -> None:
    out, other = samples.outgoing(5), samples.outgoing(6)
    out.slot[:] = other.slot
    right_for_these_bytes = type(out)(out.key, out.namespace, out.slot, out.nbytes, other.checksum)
    assert tier.write([right_for_these_bytes]) == [True]
    assert fault_of(tier, samples, 5) is Lost, "the key is under the checksum"


def test_threads_may_do_all_of_it_at_once(tier: Tier, samples: Samples) -> None:
    numbers = range(48)
    stop = threading.Event()
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            while not stop.is_set():
                some = chance.sample(numbers, 6)
                what = chance.randrange(4)
                if what == 0:
                    samples.put(tier, some)
                elif what == 1:
                    samples.whole(tier, some)
                elif what == 2:
                    tier.delete(samples.keys(some[:2]))
                else:
                    tier.gauges()
                    samples.known(tier, some)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    stop.wait(1.0)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failed and not any(thread.is_alive() for thread in threads)
    tier.check_integrity()


def test_a_closed_tier_says_so(tier: Tier, samples: Samples) -> None:
    samples.put(tier, [1])
    tier.close()
    with pytest.raises(Unavailable):
        samples.put(tier, [2])
    with pytest.raises((Unavailable, NotFound)):
        tier.read(samples.key(1), memory(samples.slot_bytes), samples.nbytes)


# --- with faults


def test_whole_or_absent_whatever_strikes(faulty: FaultyTier, samples: Samples) -> None:
    numbers = range(40)
    answers = 0
    for start in range(0, 400, 4):
        some = [(start + i) % len(numbers) for i in range(4)]
        samples.put(faulty, some)
        answers += len(samples.whole(faulty, [*some, (start * 7) % len(numbers)]))  # compares every byte
    assert answers > 100
    struck = faulty.struck
    assert min(struck[fault] for fault in ("flip", "truncate", "misdirect", "stale", "delay", "refuse")) > 5, struck
    assert faulty.gauges()["lost_blocks_total"] > 5


def test_the_same_seed_makes_the_same_faults(samples: Samples) -> None:
    def run(seed: int) -> list[object]:
        tier = FaultyTier(MemoryTier(CAPACITY), seed, every(0.2))
        said: list[object] = []
        for n in range(60):
            said += [samples.put(tier, [n]), fault_of(tier, samples, n)]
        return said

    assert run(7) == run(7) != run(8)


def test_a_stalled_tier_hangs_and_goes_on(samples: Samples, tmp_path: Path) -> None:
    tier = FaultyTier(MemoryTier(CAPACITY), 1, QUIET)
    tier.stall()
    done = threading.Event()
    writer = threading.Thread(target=lambda: (samples.put(tier, [1]), done.set()))
    writer.start()
    assert not done.wait(0.05)
    assert tier.find(samples.keys([1])) == [False], "asking does not hang"
    tier.resume()
    assert done.wait(PATIENCE)
    writer.join()
    assert samples.whole(tier, [1]) == [1]


def test_quiet_rates_do_nothing() -> None:
    assert Rates() == every(0.0)
