"""The index beside its blocks: checkpoints that shorten it, namespaces it names, and what happens when it is full."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import Invalid
from kvtier.tiers.ssd import index
from kvtier.tiers.ssd.ssd import MIN_CAPACITY, Ssd
from tests.support.daemon import KiB, MiB, until
from tests.support.tiers import Registry, Shop, checkpoints, degraded


def test_the_index_is_shortened_and_says_the_same(shop: Shop) -> None:
    for round_ in range(6):
        for first in range(0, 640, 16):
            shop.samples.put(shop.tier, range(first, first + 16))
        shop.tier.delete(shop.samples.keys(range(round_, 640, 7)))
    until(lambda: checkpoints(shop.tier) >= 2, "checkpoints are written")
    known = shop.samples.known(shop.tier, range(640))
    assert shop.tier.gauges()["index_bytes"] < 192 * KiB
    shop.open()
    assert shop.samples.known(shop.tier, range(640)) == known == shop.samples.whole(shop.tier, range(640))


def test_a_namespace_left_out_of_a_checkpoint_is_told_again(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number stands in journals that are gone: blocks put under it later would have no description."""
    monkeypatch.setattr(index, "CHECKPOINT_BYTES", 1)
    other = shop.registry.samples(model="org/other")
    other.put(shop.tier, [1])
    shop.tier.delete(other.keys([1]))
    before = checkpoints(shop.tier)
    for first in range(0, 640, 32):
        shop.samples.put(shop.tier, range(first, first + 32))
    until(lambda: checkpoints(shop.tier) > before, "a checkpoint without the other namespace")
    assert other.put(shop.tier, [2]) == [True]
    shop.open()
    assert shop.registry.samples(model="org/other").whole(shop.tier, [1, 2]) == [2]


def test_a_checkpoint_that_cannot_be_written_is_said_once_and_tried_again(
    shop: Shop, lines: Callable[[], list[str]]
) -> None:
    """As with a directory that lost its permissions, or no descriptor: what is open goes on being written."""
    shop.disk.fail("open", errno.EACCES)
    said = []
    for first in range(0, 700, 4):
        said.append(all(shop.samples.put(shop.tier, range(first, first + 4))))
    assert all(said), "blocks are written all the while"
    until(lambda: degraded(shop.tier), "a checkpoint is due and fails")
    assert lines() == ["tier degraded"]
    shop.disk.heal()
    until(lambda: not degraded(shop.tier), "it is tried again")
    assert checkpoints(shop.tier) >= 1
    assert lines() == ["tier degraded", "tier recovered"]


def test_an_index_without_room_refuses_and_does_not_break(shop: Shop) -> None:
    """Descriptions have their part of the index. Beyond it a namespace's blocks are refused, until another's
    description is not needed any more."""
    large = [shop.registry.samples(model=f"org/{i}", backend="b" * 200, physical="p" * 200) for i in range(60)]
    answers = [samples.put(shop.tier, [1])[0] for samples in large]
    assert answers[0] and not answers[-1]
    refused = shop.tier.gauges()["refused_blocks_total"]
    assert refused >= answers.count(False)
    assert not degraded(shop.tier), "nothing is wrong with the disk"
    assert shop.used() <= MIN_CAPACITY
    for samples in large[:40]:
        shop.tier.drop(samples.namespace)
    until(lambda: large[-1].put(shop.tier, [1])[0], "a checkpoint leaves the dropped ones out")
    shop.open()
    again = shop.registry.samples(model="org/59", backend="b" * 200, physical="p" * 200)
    assert again.whole(shop.tier, [1]) == [1]


def test_a_slab_that_is_emptied_for_one_block_finds_space_for_its_tombstones(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the keeper is with its checkpoints: it hears that one is needed, and the write waits for it."""
    monkeypatch.setattr(index.Index, "_checkpoint_due", lambda self: self._tight)
    large, n = shop.registry.samples(100_000, model="org/large"), 0
    while n < MIN_CAPACITY // shop.samples.slot_bytes or shop.tier._index._journal.free > 4 * KiB:
        assert shop.samples.put(shop.tier, [n]) == [True]
        n += 1
    before = shop.tier.gauges()["evicted_blocks_total"]
    assert large.put(shop.tier, [1]) == [True]
    assert shop.tier.gauges()["evicted_blocks_total"] - before > 4 * KiB // 64, "more than the index had space for"


def test_a_smaller_capacity_shortens_the_index_too(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "ssd")
    shop.open(32 * MiB)
    for first in range(0, 7000, 32):
        shop.samples.put(shop.tier, range(first, first + 32))
    until(lambda: checkpoints(shop.tier), "a checkpoint of all these")
    shop.open(6 * MiB)
    assert shop.used() <= 6 * MiB
    shop.tier.check_integrity()
    assert shop.samples.put(shop.tier, [9999]) == [True]
    assert len(shop.samples.known(shop.tier, range(7000))) > 900
    shop.tier.close()


def test_a_namespace_of_a_newer_version_is_left_alone(shop: Shop, lines: Callable[[], list[str]]) -> None:
    other = shop.registry.samples(model="org/other")
    shop.samples.put(shop.tier, [1])
    other.put(shop.tier, range(2, 12))
    shop.tier.close()
    registry = Registry()

    def register(raw: bytes, tenant: str) -> object:
        if b"org/other" in raw:
            raise Invalid("format 99")
        return registry.namespaces.register(raw, tenant)

    shop.tier = Ssd(shop.path, MIN_CAPACITY, register, disk=shop.disk)  # type: ignore[arg-type]
    assert lines() == ["ssd namespace not understood"]
    assert shop.tier.gauges()["blocks"] == 1
    third = registry.samples(model="org/third")
    assert third.put(shop.tier, [3]) == [True]
    shop.open()
    assert shop.samples.whole(shop.tier, [1]) == [1]
    assert shop.registry.samples(model="org/third").whole(shop.tier, [3]) == [3]
    again = shop.registry.samples(model="org/other")
    assert len(again.whole(shop.tier, range(2, 12))) == 9, (
        "its number was not used for another, and one slot was free to be used"
    )


def test_namespaces_without_blocks_are_not_registered(shop: Shop) -> None:
    other = shop.registry.samples(model="org/other")
    shop.samples.put(shop.tier, [1])
    other.put(shop.tier, [2])
    shop.tier.drop(other.namespace)
    shop.tier.close()
    registry = Registry()
    shop.tier = Ssd(shop.path, MIN_CAPACITY, registry.register, disk=shop.disk)
    assert [namespace.description.model for namespace in registry.namespaces.all()] == ["org/m"]


def test_tombstones_that_do_not_fit_do_not_keep_the_keeper_from_its_checkpoint(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for each other for good, and the tier refuse every block."""
    samples, journal = shop.samples, shop.tier._index._journal
    assert samples.put(shop.tier, range(64)) == [True] * 64
    monkeypatch.setattr(journal, "spare", journal.limit)  # nothing may be appended
    before = checkpoints(shop.tier)
    assert shop.tier.delete(samples.keys(range(32))) == 32
    until(lambda: checkpoints(shop.tier) > before, "a checkpoint that leaves the deleted ones out")
    assert samples.put(shop.tier, [100]) == [True]
    shop.open()
    assert samples.known(shop.tier, range(64)) == list(range(32, 64))
