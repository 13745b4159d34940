"""Damaged, truncated and hostile bytes in an SSD directory cost the blocks they hit, run nothing and lead nowhere else.
KVB-14, KVB-24."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.errors import Invalid, Lost
from kvtier.tiers.ssd import inspection, recovery
from kvtier.tiers.ssd.disk import Disk
from kvtier.tiers.ssd.journal import Journal
from kvtier.tiers.ssd.ssd import MIN_CAPACITY, Ssd
from tests.support.tiers import Registry, Shop, fault_of, flip, memory


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with Shop(tmp_path / "ssd") as made:
        made.open()
        yield made


def damaged(shop: Shop, change: Callable[[bytearray, int], None], n: int = 5) -> None:
    """Changes the data file where block n stands, and looks: a miss, counted, forgotten; the others are whole."""
    place, data = shop.place(n), shop.data()
    change(data, place)
    (shop.path / "blocks").write_bytes(data)
    lost = shop.tier.gauges()["lost_blocks_total"]
    assert fault_of(shop.tier, shop.samples, n) is Lost
    assert shop.tier.gauges()["lost_blocks_total"] == lost + 1
    assert shop.samples.known(shop.tier, range(1, 9)) == [1, 2, 3, 4, 6, 7, 8]
    assert shop.samples.whole(shop.tier, [1, 2, 3, 4]) == [1, 2, 3, 4]
    whole = shop.samples.whole(shop.tier, range(1, 9))
    assert shop.samples.put(shop.tier, [n]) == [True] and shop.samples.whole(shop.tier, range(1, 9)) == sorted(
        {*whole, n}
    )


def cut_to_100_bytes(data: bytearray, place: int) -> None:
    del data[place + 100 :]


CHANGES: dict[str, Callable[[bytearray, int], None]] = {
    "cut": cut_to_100_bytes,
    "zeros": lambda data, place: data.__setitem__(slice(place, place + 4096), bytes(4096)),
    "a bit of the body": lambda data, place: data.__setitem__(place + 900, data[place + 900] ^ 4),
    "a bit of the header": lambda data, place: data.__setitem__(place + 40, data[place + 40] ^ 1),
    "another block": lambda data, place: data.__setitem__(slice(place, place + 4096), data[place - 4096 : place]),
    "pickle": lambda data, place: data.__setitem__(slice(place, place + len(PICKLE)), PICKLE),
    "marshal": lambda data, place: data.__setitem__(slice(place, place + len(MARSHAL)), MARSHAL),
    "torch": lambda data, place: data.__setitem__(slice(place, place + len(TORCH)), TORCH),
    "yaml": lambda data, place: data.__setitem__(slice(place, place + len(YAML)), YAML),
}
CANARY = "/tmp/kvtier-canary"
PICKLE = b"cos\nsystem\n(S'touch " + CANARY.encode() + b"'\ntR."  # os.system("touch ...") when loaded
MARSHAL = b"\xe3\x00\x00\x00\x00" + b"\x00" * 16 + b"s\x10\x00\x00\x00" + CANARY.encode()
TORCH = b"PK\x03\x04archive/data.pkl" + PICKLE
YAML = b'!!python/object/apply:os.system ["touch ' + CANARY.encode() + b'"]'


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_damaged_slot_is_a_miss(change: Callable[[bytearray, int], None], shop: Shop) -> None:
    shop.samples.put(shop.tier, range(1, 9))
    damaged(shop, change)
    assert not os.path.exists(CANARY)


@pytest.mark.parametrize(
    "strange", [PICKLE, MARSHAL, TORCH, YAML, b"\0" * 4096], ids=["pickle", "marshal", "torch", "yaml", "zeros"]
)
@pytest.mark.parametrize("where", ["journal", "checkpoint", "format", "lock", "blocks"])
def test_strange_bytes_in_any_file_run_nothing(strange: bytes, where: str, shop: Shop) -> None:
    shop.samples.put(shop.tier, range(1, 9))
    shop.tier.close()
    name = {"journal": "journal.00000001", "checkpoint": "checkpoint.00000001", "format": "format.json"}.get(
        where, where
    )
    kept = (shop.path / name).read_bytes() if where in ("format",) else b""
    (shop.path / name).write_bytes(strange)
    if where == "format":
        with pytest.raises(Invalid):
            Ssd(shop.path, MIN_CAPACITY, Registry().register)
        (shop.path / name).write_bytes(kept)
    shop.open()
    whole = shop.samples.whole(shop.tier, range(1, 9))
    assert whole == ([] if where in ("journal", "blocks") else list(range(1, 9)))
    assert not os.path.exists(CANARY)
    if where == "checkpoint":
        (shop.path / name).unlink()  # no daemon reads or removes it


def test_records_that_point_anywhere_are_not_believed(shop: Shop) -> None:
    """A journal that is whole by its checksums and names slots that overlap, lie outside, or have impossible sizes."""
    shop.samples.put(shop.tier, range(1, 9))
    shop.tier.close()
    journal = Journal(shop.path, 2**30, False, Disk())
    list(journal.load())
    for n, (page, slot, nbytes) in enumerate(
        [
            (0, 4096, 1280),
            (2**32 - 1, 4096, 1280),
            (7, 4095, 1280),
            (9, 0, 0),
            (10, 2**32 - 4096, 1280),
            (11, 4096, 2**32 - 1),
        ]
    ):
        records = recovery.puts(
            [shop.samples.key(100 + n)], page=[page], slot=[slot], nbytes=[nbytes], namespace=[1], checksum=[1]
        )
        journal.append(records)
    journal.append(
        recovery.puts([shop.samples.key(200)], page=[20], slot=[4096], nbytes=[1280], namespace=[77], checksum=[1])
    )
    journal.close()
    shop.open()
    shop.tier.check_integrity()
    whole = shop.samples.whole(shop.tier, range(1, 300))
    assert whole == [2, 3, 4, 5, 6, 7], "but for those whose places were claimed"
    assert shop.samples.put(shop.tier, range(300, 340)) == [True] * 40
    shop.open()
    assert set(shop.samples.whole(shop.tier, range(1, 340))) >= set(range(300, 340))


@pytest.mark.parametrize(
    "name", ["blocks", "lock", "format.json", "journal.00000001", "format.json.tmp", "checkpoint.00000002.tmp"]
)
def test_a_planted_link_is_not_followed(name: str, shop: Shop, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious" * 1000)
    shop.samples.put(shop.tier, [1])
    shop.tier.close()
    if name == "format.json.tmp":
        for path in shop.path.iterdir():
            path.unlink()
    (shop.path / name).unlink(missing_ok=True)
    (shop.path / name).symlink_to(outside)
    before = sorted(os.listdir(tmp_path))
    if "tmp" in name:
        shop.open()
        for first in range(0, 700, 4):
            shop.samples.put(shop.tier, range(first, first + 4))
    else:
        with pytest.raises(Invalid, match="cannot use"):
            shop.open()
        (shop.path / name).unlink()
        if name == "format.json":
            for path in shop.path.iterdir():
                path.unlink()
        shop.open()
    assert outside.read_bytes() == b"precious" * 1000
    assert sorted(os.listdir(tmp_path)) == before, "nothing is made outside the directory"


def test_a_hostile_tenant_in_the_journal_is_no_tenant(shop: Shop) -> None:
    shop.tier.close()
    journal = Journal(shop.path, 2**30, False, Disk())
    list(journal.load())
    canonical = shop.samples.namespace.description.canonical
    for number, (tenant, raw) in enumerate(
        [("../../x", b"{}"), ("a\nb", canonical), ("", canonical), ("x" * 5000, canonical), ("t", b"[" * 9999)], 1
    ):
        records = recovery.puts(
            [bytes([number]) * 32], page=[number], slot=[4096], nbytes=[1280], namespace=[number], checksum=[1]
        )
        journal.append(records, [(number, tenant, raw)])
    journal.close()
    shop.open()
    assert shop.tier.gauges()["blocks"] == 0
    assert [namespace.tenant for namespace in shop.registry.namespaces.all()] == ["t"]
    shop.tier.close()
    assert inspection.check(shop.path, repair=True).repaired == 10
    shop.open()


def test_quarantine_has_its_bound(shop: Shop) -> None:
    for first in range(0, 400, 16):
        shop.samples.put(shop.tier, range(first, first + 16))
    data = shop.data()
    for n in range(0, 400, 2):
        place = data.find(shop.samples.block(n))
        data[place + 900 : place + 901] = flip(bytes(data[place + 900 : place + 901]), 0)
    (shop.path / "blocks").write_bytes(data)
    assert shop.samples.whole(shop.tier, range(400)) == list(range(1, 400, 2))
    gauges = shop.tier.gauges()
    assert gauges["lost_blocks_total"] == 200
    assert 1 <= gauges["quarantined_slots"] <= 960 // 64
    shop.tier.check_integrity()
    assert shop.samples.put(shop.tier, range(0, 32, 2)) == [True] * 16
    slot = memory(shop.samples.slot_bytes)
    assert shop.tier.read(shop.samples.key(0), slot, shop.samples.nbytes)
