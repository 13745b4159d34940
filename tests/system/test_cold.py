"""Cold blocks through a real daemon with an SSD tier: what clients see of settling, promotion, deletes and restarts,
over the lane and over gRPC.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.client.api import Client, RegisteredNamespace
from tests.support.daemon import PATIENCE, Daemon, KiB, MiB, Patient, body, description, hashes, put, until

BODY = 60 * KiB  # slots of 64 KiB
ARENA = 8 * MiB
FITS = 112  # blocks in the arena, and some
SSD = "path={path},size={size},free=0"


@contextmanager
def chilled(path: Path, size: str = "64MiB", arena: int = ARENA, *arguments: str) -> Iterator[Daemon]:
    """A daemon with an SSD tier in `path`."""
    with Daemon(arena, "--ssd", SSD.format(path=path, size=size), *arguments) as daemon:
        yield daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with chilled(tmp_path / "ssd") as made:
        yield made


@pytest.fixture(params=["unix", "grpc"])
def client(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Client]:
    with daemon.client() if request.param == "unix" else Patient(f"grpc+unix:{daemon.socket}.grpc") as made:
        yield made


def settle(client: Client, ns: RegisteredNamespace, numbers: range, step: int = 16) -> None:
    """Puts these blocks and waits until each is settled."""
    for first in range(numbers.start, numbers.stop, step):
        part = range(first, min(first + step, numbers.stop))
        put(client, ns, part)
        answer = client.flush(ns, hashes(part))
        assert answer == len(part), answer.reason


def right(bodies: list[object], numbers: range) -> bool:
    return len(bodies) == len(numbers) and all(
        (found == body(n, BODY)).all() for found, n in zip(bodies, numbers, strict=True)
    )  # type: ignore[attr-defined]


def test_a_cold_prefix_is_looked_up_and_got(client: Client, daemon: Daemon) -> None:
    ns = client.register(description(BODY))
    settle(client, ns, range(3 * FITS))
    assert client.lookup(ns, hashes(range(3 * FITS))) == 3 * FITS
    assert daemon.status()["ssd_read_blocks_total"] == 0
    for first in range(0, 3 * FITS, FITS // 2):
        numbers = range(first, first + FITS // 2)
        found = client.get(ns, hashes(numbers))
        assert right(found, numbers), (len(found), found.reason)
    status = daemon.status(check_integrity=True)
    assert status["promoted_blocks_total"] >= 2 * FITS
    assert status["promotion_lost_blocks_total"] == status["ssd_lost_blocks_total"] == 0


def test_a_get_may_be_larger_than_the_arena(client: Client) -> None:
    ns = client.register(description(BODY))
    settle(client, ns, range(3 * FITS))
    found = client.get(ns, hashes(range(3 * FITS)))
    assert right(found, range(3 * FITS)), (len(found), found.reason)


def test_a_lease_says_cold_and_never_promotes(daemon: Daemon) -> None:
    with daemon.client() as client:
        ns = client.register(description(BODY))
        settle(client, ns, range(2 * FITS))
        with client.lease(ns, hashes([0, 1])) as blocks:
            assert (len(blocks), blocks.reason) == (0, "cold: prefetch first")
        time.sleep(0.05)
        assert daemon.status()["promoted_blocks_total"] == 0
        assert client.prefetch(ns, hashes([0, 1, 10_000])) == 2
        until(lambda: daemon.status()["promoted_blocks_total"] == 2, "both come up")
        with client.lease(ns, hashes([0, 1, 10_000])) as blocks:
            assert right(list(blocks), range(2)) and blocks.reason == "miss"
        assert client.prefetch(ns, hashes([0, 1])) == 0, "they are warm"


def test_flush_counts_a_leading_part_and_keeps_its_deadline(client: Client) -> None:
    ns = client.register(description(BODY))
    put(client, ns, range(4))
    assert client.flush(ns, hashes([0, 1, 99, 2, 3])) == 2, "nobody has the third"
    began = time.monotonic()
    assert client.flush(ns, hashes(range(4)), deadline=PATIENCE) == 4
    assert time.monotonic() - began < PATIENCE / 2, "it ends when all are settled"


def test_without_a_lower_tier_flush_and_prefetch_say_so() -> None:
    with Daemon(ARENA) as daemon, daemon.client() as client:
        ns = client.register(description(BODY))
        put(client, ns, [1])
        for answer in (client.flush(ns, hashes([1])), client.prefetch(ns, hashes([1]))):
            assert (answer, answer.reason) == (0, "there is no lower tier")


def test_a_get_of_what_stays_cold_ends_within_its_deadline(daemon: Daemon) -> None:
    """Every slot is reserved, so nothing can come up: a miss in time, and not an endless row of calls."""
    with daemon.client() as client, Client(daemon.address) as reader:
        ns = client.register(description(BODY))
        settle(client, ns, range(2 * FITS))
        holders = [daemon.client() for _ in range(2)]
        fills = []
        try:
            for i, holder in enumerate(holders):
                mine = holder.register(description(BODY, model="org/other"))
                fill = holder.fill(mine, hashes(range(1000 * i, 1000 * i + 28)))
                fills.append(fill.__enter__())
                assert not fill.reason
            before = sum(daemon.status()[name] for name in ("promotion_refused_blocks_total", "promoted_blocks_total"))
            began = time.monotonic()
            found = reader.get(reader.register(description(BODY)), hashes(range(2)), deadline=1.0)
            assert time.monotonic() - began < 10.0
            assert right(found, range(len(found)))
            assert (
                sum(daemon.status()[name] for name in ("promotion_refused_blocks_total", "promoted_blocks_total"))
                - before
                < 200
            )
        finally:
            for fill in fills:
                fill.__exit__(RuntimeError, RuntimeError(), None)
            for holder in holders:
                holder.close()


def test_deleted_is_gone_from_every_tier_and_stays_so_after_kill_9(client: Client, daemon: Daemon) -> None:
    ns = client.register(description(BODY))
    settle(client, ns, range(2 * FITS))
    assert client.delete(ns, hashes([0, 1, 2 * FITS - 1])) == 3
    assert client.lookup(ns, hashes([0])) == 0
    assert client.get(ns, hashes([0])) == []
    daemon.kill()
    daemon.start()
    until(lambda: client.lookup(ns, hashes([2])) == 1, "the daemon is back")
    assert [client.lookup(ns, hashes([n])) for n in (0, 1, 2, 2 * FITS - 1)] == [0, 0, 1, 0]
    assert right(client.get(ns, hashes([2])), range(2, 3))


def test_settled_blocks_outlive_the_daemon(client: Client, daemon: Daemon) -> None:
    ns = client.register(description(BODY))
    settle(client, ns, range(2 * FITS))
    for end in (daemon.kill, daemon.terminate):
        end()
        daemon.start()
        until(lambda: client.lookup(ns, hashes([0])) == 1, "the daemon is back")
        assert client.lookup(ns, hashes(range(2 * FITS))) == 2 * FITS
        assert right(client.get(ns, hashes(range(20))), range(20))
        assert [info.model for info in client.list_namespaces()] == ["org/m"], "known without a client's word"


def test_sigterm_settles_what_waits(daemon: Daemon) -> None:
    with daemon.client() as client:
        ns = client.register(description(BODY))
        put(client, ns, range(50))
        assert daemon.terminate() == 0
        daemon.start()
        until(lambda: client.lookup(ns, hashes([0])) == 1, "the daemon is back")
        assert client.lookup(ns, hashes(range(50))) == 50


def test_a_dropped_namespace_is_gone_below_too(client: Client, daemon: Daemon) -> None:
    ns, other = client.register(description(BODY)), client.register(description(BODY, model="org/other"))
    settle(client, ns, range(2 * FITS))
    settle(client, other, range(10))
    assert client.drop(ns.digest.hex()[:16]) == 2 * FITS
    assert client.lookup(ns, hashes([0])) == 0
    assert daemon.status()["ssd_blocks"] == 10
    daemon.kill()
    daemon.start()
    until(lambda: client.lookup(other, hashes(range(10))) == 10, "the daemon is back")
    assert [info.model for info in client.list_namespaces()] == ["org/other"]
    assert client.lookup(ns, hashes([0])) == 0


def test_tenants_do_not_meet_below(tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    with chilled(ssd) as daemon, daemon.client() as client:
        settle(client, client.register(description(BODY)), range(2 * FITS))
    with chilled(ssd, "64MiB", ARENA, "--user", "any strangers admin") as daemon, daemon.client() as client:
        ns = client.register(description(BODY))
        assert daemon.status()["ssd_blocks"] == 2 * FITS
        assert client.lookup(ns, hashes([0])) == 0
        assert client.get(ns, hashes([0])) == []
        assert client.prefetch(ns, hashes([0])) == 0


def test_sixty_four_readers_of_one_cold_key_make_one_read(daemon: Daemon) -> None:
    with daemon.client() as client:
        ns = client.register(description(BODY))
        settle(client, ns, range(2 * FITS))
        start = threading.Barrier(64)
        answers: list[bool] = []

        def read() -> None:
            start.wait(PATIENCE)
            answers.append(right(client.get(ns, hashes([0])), range(1)))

        threads = [threading.Thread(target=read) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert answers == [True] * 64
        assert daemon.status()["ssd_read_blocks_total"] == 1
