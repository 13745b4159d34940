"""Daemons with a Redis tier, as clients see them: blocks shared between two, beside an SSD, Redis failing under both.
KVB-09, KVB-17 d and e."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvtier.client.api import Client, RegisteredNamespace
from kvtier.format.identity import request_context
from tests.support.daemon import PATIENCE, Daemon, KiB, MiB, Patient, body, description, hashes, put, until
from tests.support.redis_servers import Server, needs_redis

pytestmark = needs_redis

BODY = 60 * KiB  # slots of 64 KiB
ARENA = 8 * MiB
FITS = 112  # blocks in the arena, and some
ODD, ENCODED = "p@ss:/#%25 w", "p%40ss%3A%2F%23%2525%20w"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


def over(server: Server, *arguments: str, options: str = "", arena: int = ARENA) -> Daemon:
    """A daemon with this Redis below it."""
    return Daemon(arena, "--redis", f"url={server.url}{options}", *arguments)


def settle(client: Client, ns: RegisteredNamespace, numbers: range, step: int = 16, **options: bytes) -> None:
    """Puts these blocks and waits until each is settled."""
    for first in range(numbers.start, numbers.stop, step):
        part = range(first, min(first + step, numbers.stop))
        put(client, ns, part, **options)
        answer = client.flush(ns, hashes(part), **options)  # type: ignore[arg-type]
        assert answer == len(part), answer.reason


def right(bodies: list[object], numbers: range) -> bool:
    return len(bodies) == len(numbers) and all(
        (found == body(n, BODY)).all() for found, n in zip(bodies, numbers, strict=True)
    )  # type: ignore[attr-defined]


def knows(client: Client, ns: RegisteredNamespace, numbers: range, n: int) -> None:
    """The daemon says that it knows so many leading blocks. It asks Redis in the background, and on a busy machine the
    answer may come later than a lookup waits for it: a no, until it is asked again."""
    until(lambda: client.lookup(ns, hashes(numbers)) == n, f"{n} blocks are known")


def serves(client: Client, ns: RegisteredNamespace, numbers: range, n: int) -> bool:
    """The same for a get: whether the blocks that it brings, so many in the end, are right."""
    found = until(lambda: len(one := client.get(ns, hashes(numbers))) >= n and one, f"{n} blocks are served")
    return right(list(found), numbers[:n])  # type: ignore[arg-type]


# --- two daemons on one Redis


@pytest.mark.parametrize("transport", ["unix", "grpc"])
def test_what_one_daemon_put_the_other_serves_under_its_namespace_only(server: Server, transport: str) -> None:
    with over(server) as one, over(server) as two, one.client() as writer:
        ns = writer.register(description(BODY))
        settle(writer, ns, range(60))
        with two.client() if transport == "unix" else Patient(f"grpc+unix:{two.socket}.grpc") as reader:
            mine, other = reader.register(description(BODY)), reader.register(description(BODY, revision="2" * 40))
            knows(reader, mine, range(61), 60)
            assert reader.lookup(other, hashes(range(60))) == 0 and len(reader.get(other, hashes(range(3)))) == 0
            assert serves(reader, mine, range(60), 60)
            status = two.status(check_integrity=True)
            assert status["redis_read_blocks_total"] == 60 and status["redis_written_blocks_total"] == 0
            assert status["redis_lost_blocks_total"] == status["redis_read_faults_total"] == 0
            assert reader.lookup(mine, hashes(range(200, 210))) == 0, "and says no to what nobody has"


@pytest.mark.parametrize("transport", ["unix", "grpc"])
def test_a_get_needs_no_lookup_before(server: Server, transport: str) -> None:
    with over(server) as one, over(server) as two, one.client() as writer:
        ns = writer.register(description(BODY))
        settle(writer, ns, range(40))
        with two.client() if transport == "unix" else Patient(f"grpc+unix:{two.socket}.grpc") as reader:
            assert serves(reader, reader.register(description(BODY)), range(50), 40)


def test_with_redis_flushed_in_between_there_are_misses_and_no_errors(server: Server) -> None:
    with over(server) as one, over(server) as two, one.client() as writer, two.client() as reader:
        ns, mine = writer.register(description(BODY)), reader.register(description(BODY))
        settle(writer, ns, range(20))
        knows(reader, mine, range(20), 20)
        server.tell("FLUSHALL")
        found = reader.get(mine, hashes(range(20)))
        assert len(found) == 0 and "miss" in found.reason, found.reason
        until(lambda: reader.lookup(mine, hashes(range(20))) == 0, "the reader's daemon has heard of it")
        status = two.status(check_integrity=True)
        assert status["redis_missed_blocks_total"] >= 1
        assert (
            status["redis_read_faults_total"]
            == status["redis_lost_blocks_total"]
            == status["promotion_failed_blocks_total"]
            == 0
        )
        assert right(writer.get(ns, hashes(range(20))), range(20)), "they are in the writer's arena still"


def test_a_delete_through_one_is_a_miss_through_the_other(server: Server) -> None:
    with over(server) as one, over(server) as two, one.client() as writer, two.client() as reader:
        ns, mine = writer.register(description(BODY)), reader.register(description(BODY))
        settle(writer, ns, range(4))
        assert writer.delete(ns, hashes([1, 2])) == 2
        until(lambda: len(server.names()) == 2, "Redis has forgotten them")
        assert len(reader.get(mine, hashes([1]))) == 0
        assert serves(reader, mine, range(1), 1)
        assert writer.lookup(ns, hashes([1])) == 0


def test_other_tenants_and_other_prefixes_are_other_blocks(server: Server) -> None:
    with (
        over(server) as one,
        over(server, "--user", "any other admin") as two,
        over(server, options=",prefix=elsewhere") as three,
    ):
        with one.client() as writer:
            settle(writer, writer.register(description(BODY)), range(4))
        for daemon in (two, three):
            with daemon.client() as reader:
                ns = reader.register(description(BODY))
                assert reader.lookup(ns, hashes(range(4))) == 0 and len(reader.get(ns, hashes(range(4)))) == 0


# --- KVB-09


@pytest.mark.long
def test_kvb_09_contexts_are_apart_in_redis_too_and_no_salt_reaches_it(server: Server) -> None:
    salt = "tenant-one-secret-salt"
    contexts = [
        request_context(),
        request_context(adapter=b"a" * 32),
        request_context(adapter=b"b" * 32),
        request_context(adapter=b"c" * 32),
        request_context(salt=salt),
        request_context(salt="t2"),
        request_context(adapter=b"a" * 32, salt=salt),
    ]
    assert request_context(salt="") == contexts[0]
    with over(server) as one, over(server) as two, one.client() as writer, two.client() as reader:
        ns, mine = writer.register(description(BODY)), reader.register(description(BODY))
        for stored, context in enumerate(contexts):
            put(writer, ns, range(2), context=context)
            assert writer.flush(ns, hashes(range(2)), context=context) == 2
            for asked, other in enumerate(contexts):
                expected = 2 if asked <= stored else 0
                if expected:  # a no that was heard a moment ago counts for a second
                    until(
                        lambda other=other: len(reader.get(mine, hashes(range(2)), context=other)) == 2, "it is served"
                    )
                assert len(reader.get(mine, hashes(range(2)), context=other)) == expected
                assert reader.lookup(mine, hashes(range(2)), context=other) == expected
                with reader.lease(mine, hashes(range(2)), context=other) as blocks:
                    assert len(blocks) == expected
        assert writer.delete(ns, hashes(range(2)), context=contexts[4]) == 2
        until(lambda: len(server.names()) == 2 * len(contexts) - 2, "only these go from Redis")
        for context in (contexts[5], contexts[0], contexts[6]):
            assert len(writer.get(ns, hashes(range(2)), context=context)) == 2
        with server.client() as client:
            names = server.names()
            everything = b"".join(names) + b"".join(client.mget(names))
        assert salt.encode() not in everything and contexts[6] in everything, "its hash is in the header"
        for daemon in (one, two):
            assert salt not in daemon.log.read_text() and salt not in str(daemon.status())


# --- beside an SSD


def test_the_faster_of_two_tiers_is_read(server: Server, tmp_path: Path) -> None:
    with over(server, "--ssd", f"path={tmp_path / 'ssd'},size=64MiB,free=0") as daemon, daemon.client() as client:
        ns = client.register(description(BODY))
        settle(client, ns, range(2 * FITS))
        until(lambda: len(server.names()) == 2 * FITS, "both have all")
        found = client.get(ns, hashes(range(40)))
        assert right(found, range(40)), found.reason
        status = daemon.status(check_integrity=True)
        assert status["ssd_read_blocks_total"] >= 40 and status["redis_read_blocks_total"] == 0
    with over(server, "--ssd", f"path={tmp_path / 'empty'},size=64MiB,free=0") as daemon, daemon.client() as client:
        assert serves(client, client.register(description(BODY)), range(2 * FITS), 2 * FITS), "the SSD lacks them"


def test_flush_counts_on_the_tier_that_works(server: Server, tmp_path: Path) -> None:
    with over(server, "--ssd", f"path={tmp_path / 'ssd'},size=64MiB,free=0") as daemon, daemon.client() as client:
        ns = client.register(description(BODY))
        settle(client, ns, range(4))
        server.kill()
        until(
            lambda: client.lookup(ns, hashes([9])) == 0 and daemon.status()["redis_breaker"] != 0, "the breaker opens"
        )
        settle(client, ns, range(10, 14))
        status = daemon.status()
        assert status["redis_degraded"] == 1 and status["redis_fault"] and status["ssd_fault"] == ""


# --- KVB-17 d, through the daemon


def test_kvb_17d_what_is_wrong_with_the_settings_is_named_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(ODD)
    with Server(password=ODD) as server, ExitStack() as stack:
        server.tell("ACL", "SETUSER", "poor", "on", ">x", "~*", "+@all", "-set")
        at = f"127.0.0.1:{server.port}"
        for setting, words in [
            (f"url=redis://:wrong-one@{at}", "refuses user and password"),
            (f"url=redis://{at}", "refuses user and password"),
            (f"url=redis://poor:x@{at}", "may not do what this tier needs"),
            (f"url=redis://:{ODD}@{at}", "percent-encoded"),
            (f"url=redis://{at},password_file={tmp_path}/none", "No such file"),
            (f"url=rediss://{at},ca={tmp_path}/none", "does not exist"),
        ]:
            daemon = Daemon(ARENA, directory=tmp_path)
            process = stack.enter_context(daemon.spawn("--arena-bytes", "8MiB", "--redis", setting))
            stack.callback(process.kill)
            said = process.communicate(timeout=PATIENCE)[1].decode()
            assert process.returncode == 2 and words in said, said
            assert "wrong-one" not in said and ODD not in said and ENCODED not in said
        for setting in (f"url=redis://:{ENCODED}@{at}", f"url=redis://{at},password_file={file}"):
            with Daemon(ARENA, "--redis", setting) as daemon, daemon.client() as client:
                settle(client, client.register(description(BODY)), range(2))
                assert daemon.status()["redis_fault"] == ""
                for text in (daemon.log.read_text(), str(daemon.status())):
                    assert ODD not in text and ENCODED not in text
        shown = stack.enter_context(
            Daemon(ARENA, directory=tmp_path).spawn(
                "--arena-bytes", "8MiB", "--redis", f"url=redis://:{ENCODED}@{at}", "--check"
            )
        )
        said = shown.communicate(timeout=PATIENCE)[0].decode()
        assert shown.returncode == 0 and f"redis://:***@{at}" in said and ENCODED not in said


def test_the_extra_that_is_missing_is_named(tmp_path: Path) -> None:
    """A daemon in whose environment there is no redis library starts without the setting and says what to install with
    it."""
    (tmp_path / "redis.py").write_text("raise ImportError('no redis here')\n")
    daemon = Daemon(ARENA, environment={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"})
    with daemon:
        assert daemon.status()["known_blocks"] == 0
    process = Daemon(
        ARENA, directory=tmp_path, environment={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    ).spawn("--arena-bytes", "8MiB", "--redis", "url=redis://127.0.0.1:1")
    with process:
        said = process.communicate(timeout=PATIENCE)[1].decode()
    assert process.returncode == 2 and "pip install kvtier[redis]" in said


# --- KVB-17 e, through the daemon


def test_kvb_17e_memory_and_ssd_serve_on_while_redis_hangs_and_is_gone(server: Server, tmp_path: Path) -> None:
    arguments = ("--ssd", f"path={tmp_path / 'ssd'},size=64MiB,free=0", "--redis", f"url={server.tcp},timeout=0.5")
    with Daemon(ARENA, *arguments) as daemon, daemon.client() as client:
        ns = client.register(description(BODY))
        settle(client, ns, range(2 * FITS))

        def goes_on(start: int) -> None:
            warm = range(2 * FITS - 8, 2 * FITS)
            for n in range(40):
                with client.lease(ns, hashes(warm)) as blocks:
                    assert right(list(blocks), warm)
                assert client.lookup(ns, hashes([50_000 + start + n])) == 0
                put(client, ns, [start + n])
            found = client.get(ns, hashes(range(8)))
            assert right(found, range(8)), "from the SSD"
            client.delete(ns, hashes(range(start, start + 40)))

        with server.stopped():
            goes_on(1000)
            until(lambda: daemon.status()["redis_breaker"] != 0, "the breaker opens")
            goes_on(2000)
            assert daemon.status()["redis_degraded"] == 1
        until(lambda: daemon.status()["redis_breaker"] == 0, "it is back")
        settle(client, ns, range(3000, 3004))
        server.kill()
        goes_on(4000)
        assert server.start()
        until(
            lambda: daemon.status()["redis_breaker"] == 0 and daemon.status()["redis_waiting_deletes"] == 0,
            "it is back",
        )
        settle(client, ns, range(5000, 5004))
        until(lambda: len(server.names()) >= 4, "and takes blocks")
        log = daemon.log.read_text()
        assert "tier degraded" in log and "tier recovered" in log


def test_a_daemon_starts_without_its_redis_and_ends_while_it_hangs(server: Server) -> None:
    server.kill()
    with Daemon(ARENA, "--redis", f"url={server.tcp},timeout=0.5") as daemon, daemon.client() as client:
        ns = client.register(description(BODY))
        put(client, ns, range(4))
        assert daemon.status()["redis_degraded"] == 1
        assert client.lookup(ns, hashes(range(5))) == 4
        assert server.start()
        until(lambda: client.flush(ns, hashes(range(4)), deadline=1.0) == 4, "it settles what it has")
        with server.stopped():
            put(client, ns, range(10, 40))
            client.close()
            assert daemon.terminate() == 0
        daemon.start()


def test_bytes_that_change_in_redis_are_a_miss(server: Server) -> None:
    with over(server) as one, over(server) as two, one.client() as writer, two.client() as reader:
        ns, mine = writer.register(description(BODY)), reader.register(description(BODY))
        settle(writer, ns, range(6))
        with server.client() as client:
            for name in server.names():
                client.setrange(name, 5000, b"\xff\xff")
        assert len(reader.get(mine, hashes(range(6)))) == 0
        until(lambda: reader.lookup(mine, hashes([0])) == 0, "it is forgotten")
        assert two.status()["redis_lost_blocks_total"] >= 1
        assert all(np.array_equal(found, body(n, BODY)) for n, found in enumerate(writer.get(ns, hashes(range(6)))))
