"""An SSD directory that the last version wrote: it is served byte for byte, and `kvtier fsck` finds it clean."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvtier.tiers.ssd import inspection
from tests.support.daemon import Daemon, MiB
from tests.support.last_version import FOLDER, KEPT, assert_served


@pytest.mark.parametrize("end", ["ended", "killed"])
def test_a_directory_of_the_last_version_is_served_whole(tmp_path: Path, end: str) -> None:
    subprocess.run(["tar", "-xJf", FOLDER / "ssd.tar.xz", "-C", tmp_path], check=True)
    path, kept = tmp_path / end, KEPT["ssd"][end]
    before = inspection.check(path)
    assert before.clean and not before.findings
    assert before.namespaces == sum(bool(one["whole"]) for one in kept.values())
    with Daemon(8 * MiB, "--ssd", f"path={path},size=4MiB,free=0") as daemon, daemon.client() as client:
        assert daemon.status()["ssd_blocks"] == before.blocks
        assert {one.model.removeprefix("org/"): one.ttl for one in client.list_namespaces()} == {
            name: one["ttl"] for name, one in kept.items() if one["whole"]
        }
        assert assert_served(client, kept) == before.blocks
    after = inspection.check(path)
    assert not after.findings and after.blocks == before.blocks
