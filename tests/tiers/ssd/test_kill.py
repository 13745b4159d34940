"""kill -9 of real daemons with an SSD tier: under load, and between the steps of a write. KVB-16, I3, I4.

After each kill the directory is checked offline: every block that the index knows is whole. After each start what was
settled is there, every byte.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier.client.api import Client
from kvtier.tiers.ssd import inspection
from tests.support.daemon import (
    PATIENCE,
    ROOT,
    Daemon,
    KiB,
    MiB,
    body,
    description,
    die_with_parent,
    hashes,
    read_line,
    until,
)

BODY = 28 * KiB  # slots of 32 KiB
SSD = "path={path},size=256MiB,free=0"


class Load:
    """A client that puts and flushes batches until it is told to stop, whatever happens to the daemon. `settled` are
    those that it was promised."""

    def __init__(self, address: str, first: int) -> None:
        self.settled: list[int] = []
        self.next = first
        self._client = Client(address)
        self._ns = self._client.register(description(BODY))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._client.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            some = range(self.next, self.next + 8)
            self.next += 8
            if self._client.put(self._ns, hashes(some), [body(n, BODY) for n in some], deadline=1.0) == 8:
                self.settled += some[: self._client.flush(self._ns, hashes(some), deadline=5.0)]


def check_disk(path: Path) -> inspection.Report:
    report = inspection.check(path)
    assert report.whole == report.blocks, report.findings
    return report


def check_settled(daemon: Daemon, numbers: list[int], known: int) -> None:
    """All of these are there, with the right bytes, and the daemon knows as many blocks as the disk has."""
    with daemon.client() as client:
        ns = client.register(description(BODY))
        assert daemon.status()["ssd_blocks"] == known
        for at in range(0, len(numbers), 64):
            some = numbers[at : at + 64]
            found = client.get(ns, hashes(some))
            assert len(found) == len(some), f"settled blocks are gone: {len(found)} of {len(some)}: {found.reason}"
            assert all((one == body(n, BODY)).all() for one, n in zip(found, some, strict=True))
        status = daemon.status(check_integrity=True)
        assert status["ssd_lost_blocks_total"] == 0 and status["promotion_lost_blocks_total"] == 0


def rounds(path: Path, n: int, seed: int, *options: str) -> None:
    chance, settled, first = random.Random(seed), list[int](), 0
    with Daemon(16 * MiB, "--ssd", ",".join((SSD.format(path=path), *options)), "--grpc", "off") as daemon:
        for _ in range(n):
            load = Load(daemon.address, first)
            enough = chance.randrange(8, 120)
            until(lambda load=load, enough=enough: len(load.settled) >= enough, "blocks are settled")  # type: ignore[misc]
            threading.Event().wait(chance.random() * 0.02)
            daemon.kill()
            load.stop()
            settled += load.settled
            first = load.next
            report = check_disk(path)
            daemon.start()
            check_settled(daemon, chance.sample(settled, min(128, len(settled))), report.blocks)
            if len(settled) > 3000:
                with daemon.client() as client:
                    client.drop(client.register(description(BODY)).digest.hex()[:16])
                settled = []
    assert check_disk(path).found == 0


@pytest.mark.parametrize("options", [(), ("sync=true",)], ids=["", "sync"])
def test_killed_under_load(options: tuple[str, ...], tmp_path: Path) -> None:
    rounds(tmp_path / "ssd", 5, 1, *options)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_under_load_a_hundred_times(tmp_path: Path) -> None:
    rounds(tmp_path / "ssd", 100, 2)


# A daemon whose disk stops for ever at the n-th call of one kind, and says so.
_PAUSED = """
import sys, time
from kvtier.tiers.ssd import disk
from kvtier.tiers.ssd import index
name, nth, before, seen = sys.argv.pop(1), int(sys.argv.pop(1)), sys.argv.pop(1) == "before", [0]
index.Index._checkpoint_due = lambda self: self._journal.since > 4000  # soon and often
real = getattr(disk.Disk, name)
def paused(self, *arguments):
    seen[0] += 1
    if seen[0] != nth:
        return real(self, *arguments)
    if not before:
        real(self, *arguments)
    print("paused", flush=True)
    time.sleep(600)
setattr(disk.Disk, name, paused)
from kvtier.server.main import main
main()
"""


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("name", "nth"), [("write", 5), ("append", 8), ("rename", 1), ("sync", 2), ("unlink", 3), ("allocate", 2)]
)
def test_killed_between_the_steps_of_a_write(name: str, nth: int, when: str, tmp_path: Path) -> None:
    """KVB-16 (b)."""
    path = tmp_path / "ssd"
    with Daemon(16 * MiB, "--ssd", SSD.format(path=path), "--grpc", "off", directory=tmp_path) as daemon:
        client = daemon.client()
        ns = client.register(description(BODY))
        assert (
            client.put(ns, hashes(range(8)), [body(n, BODY) for n in range(8)])
            == 8
            == client.flush(ns, hashes(range(8)))
        )
        client.close()
        daemon.terminate()
        command = [
            sys.executable,
            "-c",
            _PAUSED,
            name,
            str(nth),
            when,
            "--socket",
            str(daemon.socket),
            *daemon.arguments,
        ]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, preexec_fn=die_with_parent
        )
        assert child.stdout is not None
        try:
            said = read_line(child.stdout.fileno(), PATIENCE)
            load = None
            if said.startswith("ready"):
                load = Load(daemon.address, 8)
                said = read_line(child.stdout.fileno(), PATIENCE)
            assert said == "paused\n"
        finally:
            child.kill()
            child.wait(PATIENCE)
            child.stdout.close()
        settled = list(range(8))
        if load is not None:
            load.stop()
            settled += load.settled
        report = check_disk(path)
        daemon.start()
        check_settled(daemon, settled, report.blocks)
        daemon.terminate()
        names = {one.name.split(".")[0] for one in path.iterdir()}
        assert names <= {"blocks", "lock", "format", "journal", "checkpoint"} and not list(path.glob("*.tmp")), (
            "no halves are left"
        )
        assert check_disk(path).found == 0
        daemon.start()


def test_two_daemons_do_not_share_a_directory(tmp_path: Path) -> None:
    """KVB-16 (a): the second says why and ends with 3; the first goes on."""
    ssd = SSD.format(path=tmp_path / "ssd")
    with Daemon(16 * MiB, "--ssd", ssd) as daemon:
        second = subprocess.run(
            [
                sys.executable,
                "-m",
                "kvtier.server",
                "--socket",
                str(tmp_path / "other.sock"),
                "--arena-bytes",
                "16MiB",
                "--ssd",
                ssd,
            ],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            cwd=ROOT,
            check=False,
        )
        assert second.returncode == 3
        assert (
            f"belongs to another daemon (process {daemon.pid}): stop it, or give this one a directory of its own"
            in second.stderr
        )
        with daemon.client() as client:
            ns = client.register(description(BODY))
            assert client.put(ns, hashes([1]), [body(1, BODY)]) == 1 == client.flush(ns, hashes([1]))


def test_two_daemons_that_start_at_the_same_instant(tmp_path: Path) -> None:
    """KVB-16 (c): in a directory that does not exist; one has it, the other refuses."""
    ssd = SSD.format(path=tmp_path / "not" / "yet" / "there")
    children = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "kvtier.server",
                "--socket",
                str(tmp_path / f"{i}.sock"),
                "--arena-bytes",
                "8MiB",
                "--grpc",
                "off",
                "--ssd",
                ssd,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            preexec_fn=die_with_parent,
        )
        for i in range(2)
    ]
    try:
        until(lambda: any(child.poll() is not None for child in children), "one of them ends")
        loser = next(child for child in children if child.poll() is not None)
        (winner,) = [child for child in children if child is not loser]
        assert (
            loser.returncode == 3 and loser.stderr is not None and b"belongs to another daemon" in loser.stderr.read()
        )
        assert winner.stdout is not None and read_line(winner.stdout.fileno(), PATIENCE).startswith("ready")
        winner.terminate()
        assert winner.wait(PATIENCE) == 0
    finally:
        for child in children:
            child.kill()
            child.communicate(timeout=PATIENCE)
