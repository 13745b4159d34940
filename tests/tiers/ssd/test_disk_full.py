"""Disks that really fill up, and a daemon that really runs out of descriptors. KVB-13. A read-only disk and lost
permissions are in test_ssd.py.

Needs root for the mounts; says so where it is not.
"""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, KiB, MiB, body, description, hashes, until

BODY = 512 * KiB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """8 MiB of tmpfs."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: mounting a small file system needs root")
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"NOT TESTED: no mounts here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], timeout=60, check=True)


def changes(daemon: Daemon) -> list[str]:
    """Lines of the log about the tier's state."""
    return [line for line in daemon.log.read_text().splitlines() if 'event="tier ' in line]


def test_a_disk_that_fills_up_and_has_room_again(small_disk: Path) -> None:
    with Daemon(32 * MiB, "--ssd", f"path={small_disk}/ssd,size=64MiB,free=0") as daemon, daemon.client() as client:
        ns = client.register(description(BODY))

        def put(*numbers: int) -> int:
            """Stores these; how many of them are settled soon after."""
            assert client.put(ns, hashes(numbers), [body(n, BODY) for n in numbers]) == len(numbers), "memory goes on"
            return sum(client.flush(ns, hashes([n]), deadline=0.3) for n in numbers)

        def gauge() -> int:
            return int(daemon.status()["ssd_degraded"])

        assert put(0, 1) == 2
        assert gauge() == 0
        foreign = small_disk / "foreign"
        room = os.statvfs(small_disk).f_bavail * 4096
        foreign.write_bytes(b"x" * min(6 * MiB, room))
        for n in range(2, 32):
            put(n)
        assert gauge() == 1
        assert len(changes(daemon)) == 1, changes(daemon)
        assert client.lookup(ns, hashes(range(2, 32))) == 30
        with client.lease(ns, hashes([31])) as blocks:
            assert (blocks[0] == body(31, BODY)).all()
        foreign.unlink()
        until(lambda: put(40) == 1 and not gauge(), "writing goes on without a restart")
        assert [("degraded" in line, "recovered" in line) for line in changes(daemon)] == [(True, False), (False, True)]
        known = [n for n in range(50) if client.lookup(ns, hashes([n]))]
        assert {0, 1, 40} - set(known) <= {0, 1}
        assert all((one == body(n, BODY)).all() for n in known for one in client.get(ns, hashes([n])))
        status = daemon.status(check_integrity=True)
        assert status["ssd_lost_blocks_total"] == 0


def test_a_daemon_without_descriptors_writes_on(tmp_path: Path) -> None:
    with (
        Daemon(16 * MiB, "--ssd", f"path={tmp_path}/ssd,size=4MiB,free=0", "--grpc", "off") as daemon,
        daemon.client() as client,
    ):
        ns = client.register(description(1024))

        def put(first: int) -> int:
            some = range(first, first + 32)
            assert client.put(ns, hashes(some), [body(n, 1024) for n in some]) == 32
            return client.flush(ns, hashes(some))

        def degraded() -> int:
            return int(client.status()["ssd_degraded"])

        assert put(0) == 32
        before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (min(32, daemon.descriptors()), before[1]))
        first = 32
        while not degraded():
            assert put(first) == 32, "what is open goes on being written"
            first += 32
            assert first < 5000
        assert len(changes(daemon)) == 1
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
        until(lambda: not degraded(), "the index is shortened once there are descriptors")
        assert put(10_000) == 32
        assert len(changes(daemon)) == 2
