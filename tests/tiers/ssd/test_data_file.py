"""The data file: slots as they stand in memory, growth within limits, and file systems that refuse O_DIRECT."""

from __future__ import annotations

import errno
from collections.abc import Callable

from kvtier.tiers.ssd.ssd import MIN_CAPACITY
from tests.support.daemon import KiB, MiB
from tests.support.tiers import Shop, degraded


def test_a_slot_in_the_file_is_the_slot_in_memory(shop: Shop) -> None:
    out = shop.samples.outgoing(7)
    shop.tier.write([out])
    place = shop.place(7)
    assert place % 4096 == 0
    assert shop.data()[place : place + len(out.slot)] == out.slot


def test_a_floor_of_free_space_is_kept(shop: Shop, lines: Callable[[], list[str]]) -> None:
    shop.open(MIN_CAPACITY, min_free=10 * MiB)
    shop.disk.free_bytes = 10 * MiB + 500 * KiB
    assert shop.samples.put(shop.tier, range(8)) == [True] * 8
    shop.disk.free_bytes = 10 * MiB + 20 * KiB
    for first in range(0, 480, 8):
        shop.samples.put(shop.tier, range(first, first + 8))
    assert degraded(shop.tier) == 1
    assert shop.tier.gauges()["file_bytes"] == 480 * KiB, "one slab, and what is in it goes round"
    assert shop.samples.whole(shop.tier, range(480 - 8, 480)) == list(range(472, 480))
    assert lines() == ["tier degraded"]
    shop.disk.free_bytes = None
    shop.samples.put(shop.tier, range(1000, 1008))
    assert degraded(shop.tier) == 0
    assert lines() == ["tier degraded", "tier recovered"]


def test_a_file_that_cannot_grow_is_left_as_it_was(shop: Shop) -> None:
    shop.disk.fail("allocate", errno.ENOSPC)
    assert shop.samples.put(shop.tier, [1]) == [False]
    assert degraded(shop.tier) == 1
    assert (shop.path / "blocks").stat().st_size == 0
    shop.disk.heal()
    assert shop.samples.put(shop.tier, [1]) == [True]
    assert degraded(shop.tier) == 0


def test_a_file_system_that_takes_o_direct_and_then_refuses_it(shop: Shop, lines: Callable[[], list[str]]) -> None:
    assert shop.tier.gauges()["direct"] == 1
    shop.disk.fail("write", errno.EINVAL, times=1)
    assert shop.samples.put(shop.tier, [1, 2]) == [True, True]
    assert shop.samples.whole(shop.tier, [1, 2]) == [1, 2]
    assert shop.tier.gauges()["direct"] == 0
    assert lines() == ["ssd buffered"], "said once"
    assert not degraded(shop.tier)
