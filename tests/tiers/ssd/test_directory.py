"""Whose a directory is, and of which format: owners, refused starts, other formats, a disk that has run out."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from kvtier.errors import Full, Invalid, Unavailable
from kvtier.tiers.ssd.ssd import MIN_CAPACITY, Ssd
from tests.support.daemon import KiB
from tests.support.disks import Failing
from tests.support.tiers import Registry, Shop


def test_a_directory_holds_five_kinds_of_files_for_nobody_else_to_read(shop: Shop) -> None:
    shop.samples.put(shop.tier, [1])
    assert sorted(path.name for path in shop.path.iterdir()) == ["blocks", "format.json", "journal.00000001", "lock"]
    assert shop.path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in shop.path.iterdir()} == {0o600}
    assert json.loads((shop.path / "format.json").read_text()) == {"kvtier_ssd": 1, "slab_bytes": 480 * KiB}
    assert (shop.path / "lock").read_text() == str(os.getpid())


def test_one_owner_at_a_time(shop: Shop) -> None:
    with pytest.raises(Unavailable, match=rf"belongs to another daemon \(process {os.getpid()}\): stop it"):
        Ssd(shop.path, MIN_CAPACITY, shop.registry.register)
    shop.samples.put(shop.tier, [1])
    shop.open()
    assert shop.samples.whole(shop.tier, [1]) == [1]


def test_a_refused_start_gives_everything_back(shop: Shop, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    descriptors = os.listdir("/proc/self/fd")
    for path, capacity in (
        (other, MIN_CAPACITY),
        (tmp_path / "a", MIN_CAPACITY - 1),
        (tmp_path / "a", 2**44 + 1),
        (other / "notes.txt", MIN_CAPACITY),
    ):
        with pytest.raises(Invalid):
            Ssd(path, capacity, shop.registry.register)
    assert os.listdir("/proc/self/fd") == descriptors
    assert sorted(path.name for path in other.iterdir()) in (["notes.txt"], ["lock", "notes.txt"])


def test_a_start_that_was_cut_off_does_not_bar_the_next(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("12345")
    (tmp_path / "format.json.tmp").write_text('{"kvt')
    (tmp_path / "lost+found").mkdir()
    tier = Ssd(tmp_path, MIN_CAPACITY, Registry().register)
    tier.close()
    assert not (tmp_path / "format.json.tmp").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not readable"),
        ("[]", "not readable"),
        ("[" * 5000, "not readable"),
        ('{"kvtier_ssd": 1}', "not readable"),
        ('{"kvtier_ssd": 2, "slab_bytes": 4096}', "SSD format 2; this version reads 1"),
        ('{"kvtier_ssd": 1, "slab_bytes": 4097}', "not pages"),
        ('{"kvtier_ssd": 1, "slab_bytes": 0}', "not pages"),
        ('{"kvtier_ssd": 1, "slab_bytes": "4096"}', "not pages"),
        ('{"kvtier_ssd": 1, "slab_bytes": true}', "not pages"),
        ('{"kvtier_ssd": 1, "slab_bytes": 1e9}', "not pages"),
    ],
)
def test_another_format_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "format.json").write_text(text)
    with pytest.raises(Invalid, match=words):
        Ssd(tmp_path, MIN_CAPACITY, Registry().register)


def test_a_disk_that_has_run_out_is_told_from_a_wrong_path(tmp_path: Path) -> None:
    disk = Failing()
    for code, kind in (
        (errno.ENOSPC, Full),
        (errno.EIO, Full),
        (errno.EMFILE, Full),
        (errno.EROFS, Invalid),
        (errno.EACCES, Invalid),
    ):
        disk.fail("open", code)
        with pytest.raises(kind, match="cannot use"):
            Ssd(tmp_path / "ssd", MIN_CAPACITY, Registry().register, disk=disk)
