"""The daemon dies and comes back under a client that stays: nothing piles up on either side, memory never doubles, and
what was stored is a miss.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import pytest

from tests.support.daemon import (
    PATIENCE,
    ROOT,
    Daemon,
    KiB,
    MiB,
    Peer,
    description,
    die_with_parent,
    hashes,
    put,
    read_line,
    until,
)

ARENA = 64 * MiB
SMALL = 16 * MiB
CYCLES = 50

# Says the boot id of each daemon it has put to and got from; holds nothing in between.
_CLIENT = """
client = Client(ADDRESS)
ns = client.register(description(4096))
seen = None
while True:
    hear()
    end = time.monotonic() + PATIENCE
    while True:
        try:
            boot = client.status(deadline=1.0)["boot"]
            if boot != seen and client.put(ns, hashes(range(8)), [body(n, 4096) for n in range(8)], deadline=1.0) == 8:
                break
        except kvtier.errors.KvtierError:
            pass
        assert time.monotonic() < end, "no new daemon"
        time.sleep(0.002)
    got = client.get(ns, hashes(range(8)), deadline=1.0)
    assert len(got) == 8 and all(is_body(view, n) for n, view in enumerate(got))
    seen = boot
    say({"boot": boot, "descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()})
"""


# Starts daemons by fork from a process that has imported everything: a life costs milliseconds of imports less, and all
# else is the command's own.
_NURSERY = """
import os, signal, sys
import kvtier.server.grpc
from kvtier.server import main
from tests.support.daemon import die_with_parent
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: they vanish
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.argv = ["kvtier-server", *line.split()]
        try:
            main.main()
        finally:
            os._exit(1)
    print("pid", pid, flush=True)
"""


class Forked(Daemon):
    """A daemon whose lives are forked. Its end is `kill`."""

    def start(self) -> None:
        if self.process is None:
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", _NURSERY],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=ROOT,
                    preexec_fn=die_with_parent,
                )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"--socket {self.socket} {' '.join(self.arguments)}\n".encode())
        self.process.stdin.flush()
        said = sorted(read_line(self.process.stdout.fileno(), PATIENCE) for _ in range(2))
        assert said[0].startswith("pid ") and said[1].startswith(f"ready: {self.address} "), said
        self.life = int(said[0].split()[1])

    @property
    def pid(self) -> int:
        return self.life

    def kill(self) -> None:
        os.kill(self.life, signal.SIGKILL)
        until(lambda: not os.path.exists(f"/proc/{self.life}"), "the daemon is gone")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        if kind is None:
            self.status(check_integrity=True)
            self.kill()
            assert self.faults() == []
        self.process.kill()
        self.process.wait(PATIENCE)
        self.process.stdin.close()
        self.process.stdout.close()
        self.process = None
        self.close()


def arenas(pid: int) -> tuple[int, int]:
    """(mappings, proportional bytes) of kvtier arenas in a process: two sharers of a page have half of it each."""
    mappings = pss = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = "memfd:kvtier-arena" in line
            mappings += inside
        elif inside and line.startswith("Pss:"):
            pss += int(line.split()[1]) * KiB
    return mappings, pss


def held(pid: int | str) -> set[int]:
    """Inodes of the arenas that a process maps or has a descriptor of. Empty for one that has ended."""
    found = set()
    with suppress(OSError):
        found = {
            int(line.split()[4])
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
            if "memfd:kvtier-arena" in line
        }
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                found |= {link.stat().st_ino} if "memfd:kvtier-arena" in os.readlink(link) else set()
    return found


@pytest.mark.long
@pytest.mark.timeout(400)  # half a minute, but fifty starts on a machine that does ten other things take their time
def test_fifty_deaths_leave_nothing_behind() -> None:
    """kill -9 and start, with a client attached that puts and gets in each life.

    An arena's memory belongs to whoever has a descriptor or a mapping of it: that nobody on the machine has one of an
    earlier life says of the shared memory of these lives, and of no other process's, that it is free.
    """
    with Forked(SMALL) as daemon, Peer(_CLIENT, daemon) as client:
        first = client.ask("go")
        files = sorted(path.name for path in daemon.directory.iterdir())
        until(lambda: daemon.status()["arena_ready_bytes"] == daemon.status()["arena_bytes"], "the arena is backed")
        descriptors, boots, shared, others = daemon.descriptors(), [first["boot"]], held(daemon.pid), []
        for _ in range(CYCLES):
            daemon.kill()
            daemon.start()
            said = client.ask("go")
            boots.append(said["boot"])
            shared |= held(daemon.pid)
            others.append((said["descriptors"], said["threads"]))
            assert sorted(path.name for path in daemon.directory.iterdir()) == files
            (ours, client_bytes), (theirs, daemon_bytes) = arenas(client.pid), arenas(daemon.pid)
            assert (ours, theirs) == (1, 1), "an arena of an earlier life is still mapped"
            assert client_bytes + daemon_bytes <= SMALL + MiB, "together they hold one arena"
        assert len(set(boots)) == CYCLES + 1
        until(lambda: daemon.descriptors() <= descriptors, "the daemon's descriptors")
        assert max(others[-10:]) <= max(others[:10]), "descriptors or threads of the client grow"
        assert len(shared) == CYCLES + 1
        everyone = set().union(*(held(name) for name in os.listdir("/proc") if name.isdigit()))
        assert everyone & shared == held(daemon.pid), "an arena of an earlier life takes memory"


def test_memory_never_doubles_while_the_old_arena_is_let_go() -> None:
    """Sampled through a restart: what client and daemons hold of arenas, all together, stays one arena and a little.

    The client unmaps when the dead daemon's socket ends, which is before the next daemon is up.
    """
    with Daemon(ARENA) as daemon, Peer(_CLIENT, daemon) as client:
        client.ask("go")
        until(lambda: daemon.status()["arena_ready_bytes"] == daemon.status()["arena_bytes"], "the arena is backed")
        most, stop = [0], threading.Event()

        def watch() -> None:
            while not stop.is_set():
                total = 0
                for pid in (client.pid, daemon.process.pid if daemon.process else 0):
                    try:
                        total += arenas(pid)[1]
                    except OSError:
                        continue  # between two lives
                most[0] = max(most[0], total)
                time.sleep(0.005)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for _ in range(2):
                daemon.kill()
                daemon.start()
                client.ask("go")
        finally:
            stop.set()
            watcher.join()
        assert 0 < most[0] <= ARENA * 5 // 4


def test_a_client_that_still_reads_attaches_only_after_it_has_let_go() -> None:
    """Views of the dead daemon's blocks stay readable and unchanged; until they are gone the client serves misses
    rather than map a second arena.
    """
    gc.collect()
    others = arenas(os.getpid())[0]  # of earlier tests in this process
    with Daemon(ARENA) as daemon, daemon.client() as client:
        ns = client.register(description(4096))
        put(client, ns, range(8))
        with client.lease(ns, hashes(range(8))) as blocks:
            before = [bytes(view) for view in blocks]
            daemon.kill()
            daemon.start()
            until(lambda: client.lookup(ns, hashes(range(8))) == 0, "the loss is seen")
            assert arenas(os.getpid())[0] <= others + 1
            assert [bytes(view) for view in blocks] == before
            assert client.put(ns, hashes([1]), [blocks[0].copy()], deadline=0.2) == 0
        put_again = until(
            lambda: client.put(ns, hashes([1]), [b"x" * 4096], deadline=1.0), "it attaches to the new daemon"
        )
        assert put_again == 1 and arenas(os.getpid())[0] <= others + 1


def test_sigterm_lets_calls_under_way_finish() -> None:
    """I15: while clients call without a pause, the daemon is told to end.

    Each call that got in is answered; the end comes in time, with code 0.
    """
    with Daemon(ARENA) as daemon:
        clients = [daemon.client() for _ in range(4)]
        spaces = [client.register(description(512)) for client in clients]
        answers: list[tuple[int, str]] = []
        stop = threading.Event()

        def call(number: int) -> None:
            client, ns, at = clients[number], spaces[number], number << 32
            while not stop.is_set():
                at += 16
                answer = client.put(ns, hashes(range(at, at + 16)), [bytes(512)] * 16, deadline=5.0)
                answers.append((int(answer), answer.reason))

        callers = [threading.Thread(target=call, args=(n,)) for n in range(len(clients))]
        for caller in callers:
            caller.start()
        try:
            until(lambda: len(answers) > 200, "calls are under way")
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(20) == 0
        finally:
            stop.set()
            for caller in callers:
                caller.join()
            for client in clients:
                client.close()
        assert not daemon.faults(), daemon.faults()
        assert not any("Deadline" in reason or "no answer within" in reason for _, reason in answers), (
            "a call got in and was not answered"
        )
        assert "event=stopped" in daemon.log.read_text() and "calls cut off" not in daemon.log.read_text()
        daemon._close_output()
        daemon.process = None
        daemon.start()
