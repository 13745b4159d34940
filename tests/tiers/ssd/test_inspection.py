"""`kvtier fsck`: what it finds, what it repairs, and what its exit codes say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.tiers.ssd import inspection
from kvtier.tiers.ssd.ssd import MIN_CAPACITY
from tests.support.daemon import ROOT
from tests.support.tiers import Shop


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """A closed directory with 20 blocks."""
    made = Shop(tmp_path / "ssd")
    made.open(MIN_CAPACITY)
    made.samples.put(made.tier, range(20))
    made.tier.close()
    return made


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtier.cli", "fsck", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_directory_as_a_daemon_leaves_it_is_clean(shop: Shop) -> None:
    done = run(shop.path, "--json")
    assert done.returncode == 0
    said = json.loads(done.stdout)
    assert (said["blocks"], said["whole"], said["namespaces"], said["found"], said["clean"]) == (20, 20, 1, 0, True)
    assert said["nbytes"] == 20 * shop.samples.nbytes and said["data_bytes"] == 480 * 1024
    assert run(shop.path).stdout.startswith("20 of 20 blocks whole (25.0 KiB) in 1 namespaces")


def damage(name: str) -> Callable[[Shop], None]:
    def block(shop: Shop) -> None:
        data = shop.data()
        data[shop.place(7) + 500] ^= 1
        (shop.path / "blocks").write_bytes(data)

    def tail(shop: Shop) -> None:
        with (shop.path / "journal.00000001").open("ab") as file:
            file.write(b"torn")

    def stray(shop: Shop) -> None:
        (shop.path / "notes").write_text("mine")

    def link(shop: Shop) -> None:
        (shop.path / "journal.00000009").symlink_to("/etc/passwd")

    def half(shop: Shop) -> None:
        (shop.path / "checkpoint.00000005.tmp").write_bytes(b"half")

    def unfinished(shop: Shop) -> None:
        (shop.path / "checkpoint.00000005").write_bytes(b"half")

    found: Callable[[Shop], None] = locals()[name]
    return found


DAMAGES = {
    "block": "is not what was written",
    "tail": "is not whole from byte",
    "stray": "is not a file of the SSD tier",
    "link": "is not a regular file",
    "half": "was never finished",
    "unfinished": "is not whole: what it says is not used",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_found_and_repaired(name: str, shop: Shop) -> None:
    damage(name)(shop)
    before = {path.name: path.lstat().st_mtime_ns for path in shop.path.iterdir() if path.name != "lock"}
    looked = run(shop.path)
    assert looked.returncode == 1 and DAMAGES[name] in looked.stdout
    assert {path.name: path.lstat().st_mtime_ns for path in shop.path.iterdir() if path.name != "lock"} == before, (
        "looking changes nothing"
    )
    repaired = run(shop.path, "--repair", "--json")
    assert repaired.returncode == 0 and json.loads(repaired.stdout)["repaired"] == 1
    report = inspection.check(shop.path)
    assert report.found == 0
    whole = 19 if name == "block" else 20
    assert report.blocks == report.whole == whole
    shop.tier = None  # type: ignore[assignment]
    shop.open()
    assert len(shop.samples.whole(shop.tier, range(20))) == whole
    shop.tier.close()


def test_a_key_that_does_not_follow_from_the_header_is_found(shop: Shop) -> None:
    """Journal and block were both rewritten, so that every checksum fits."""
    import struct

    import xxhash

    from kvtier.tiers.ssd import recovery
    from kvtier.tiers.ssd.disk import Disk
    from kvtier.tiers.ssd.journal import Journal

    block = bytearray(shop.samples.block(3))
    place = shop.place(3)
    block[32:64] = b"k" * 32
    data = shop.data()
    data[place : place + len(block)] = block
    (shop.path / "blocks").write_bytes(data)
    journal = Journal(shop.path, 2**30, False, Disk())
    list(journal.load())
    digest = xxhash.xxh3_64_intdigest(bytes(block))
    journal.append(
        recovery.puts(
            [b"k" * 32], page=[place // 4096], slot=[4096], nbytes=[len(block)], namespace=[1], checksum=[digest]
        )
    )
    journal.close()
    assert struct.calcsize("<Q") == 8
    (finding,) = inspection.check(shop.path).findings
    assert finding.what == "has a key that does not follow from its header"


def test_a_directory_in_use_is_refused(shop: Shop) -> None:
    shop.tier = None  # type: ignore[assignment]
    shop.open()
    done = run(shop.path, "--json")
    shop.tier.close()
    assert done.returncode == 4 and json.loads(done.stdout)["error"] == "Unavailable"
    assert f"process {os.getpid()}" in done.stderr


def test_what_is_no_ssd_directory_is_wrong_usage(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", Path("/etc/passwd")):
        done = run(path)
        assert done.returncode == 2 and "is not an SSD tier's directory" in done.stderr
    assert list(tmp_path.iterdir()) == []
