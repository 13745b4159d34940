"""The Redis tier's connections: who may come in, what happens when Redis stops, hangs, is cut off, fails over or moves a slot, and cancelled calls.

KVB-17 a, b, d and e, for the tier; test_redis_daemon has what clients see of it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.pki import Authority
from kvtier.errors import Invalid, KvtierError, Unavailable
from kvtier.tiers import breaker
from kvtier.tiers.redis import exchange
from kvtier.tiers.redis.location import make
from kvtier.tiers.redis.redis import Redis
from tests.support.daemon import PATIENCE, MiB, until
from tests.support.redis_servers import Proxy, Server, cluster, move_slot, needs_redis, sentinels
from tests.support.tiers import Town, Yard, fault_of

pytestmark = needs_redis
KiB = 1024
ODD = "p@ss:/#%25 w"
ENCODED = "p%40ss%3A%2F%23%2525%20w"


@contextmanager
def opened(url: str, **options: Any) -> Iterator[Redis]:
    tier = Redis(make(url, options))
    try:
        yield tier
        tier.check_integrity()
    finally:
        tier.close()


@pytest.fixture
def yard() -> Yard:
    return Town().yard(8 * KiB)


def works(tier: Redis, yard: Yard, n: int) -> bool:
    """Whether a block can be put and read; each is a new one."""
    try:
        return yard.put(tier, [n])[0] and yard.get(tier, n) is not None
    except KvtierError:
        return False


def works_again(tier: Redis, yard: Yard, start: int = 10_000) -> None:
    numbers = iter(range(start, start + 100_000))
    until(lambda: works(tier, yard, next(numbers)), "it works again")


# --- KVB-17 d: who may come in


def test_kvb_17d_an_odd_password_by_url_and_by_file(
    tmp_path: Path, yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "password"
    file.write_text(f"{ODD}\n")
    with Server(password=ODD) as server, caplog.at_level("DEBUG"):
        for url, options in [
            (f"redis://:{ENCODED}@127.0.0.1:{server.port}", {}),
            (f"redis://default:{ENCODED}@127.0.0.1:{server.port}", {}),
            (f"unix://:{ENCODED}@{server.socket}", {}),
            (server.tcp, {"password_file": file}),
            (server.tcp, {"password": ODD}),
        ]:
            with opened(url, **options) as tier:
                assert works(tier, yard, 1)
        for options in ({}, {"password": "wrong"}, {"password": "wr:ong", "user": "nobody"}):
            with pytest.raises(Invalid, match="user and password") as error:
                Redis(make(server.tcp, options))
            assert "wrong" not in str(error.value)
    said = caplog.text
    assert ODD not in said and ENCODED not in said and "wrong" not in said


def test_kvb_17d_a_missing_right_is_named_at_the_start_and_later_in_health(yard: Yard) -> None:
    with Server() as server:
        server.tell("ACL", "SETUSER", "poor", "on", ">x", "~*", "+@all", "-set")
        with pytest.raises(Invalid, match=r"may not do.*'set'"):
            Redis(make(f"redis://poor:x@127.0.0.1:{server.port}"))
        server.tell("ACL", "SETUSER", "elsewhere", "on", ">x", "~other:*", "+@all")
        with pytest.raises(Invalid, match="may not do"):
            Redis(make(f"redis://elsewhere:x@127.0.0.1:{server.port}"))
        least = ("~kvtier:*", "+set", "+exists", "+strlen", "+getrange", "+unlink")
        server.tell("ACL", "SETUSER", "least", "on", ">x", *least)
        with opened(f"redis://least:x@127.0.0.1:{server.port}") as tier:
            assert works(tier, yard, 1)
            server.tell("ACL", "SETUSER", "least", "-set")
            assert not works(tier, yard, 2)
            assert tier.gauges()["degraded"] == 1 and "set" in tier.fault() and yard.whole(tier, [1]) == [1]
            server.tell("ACL", "SETUSER", "least", "+set")
            works_again(tier, yard)
            assert tier.gauges()["degraded"] == 0
            assert tier.delete(yard.keys([1])) == 1
            tier.look()
            assert tier.gauges()["used_bytes"] == 0, "INFO is not among the rights that are needed"


def test_kvb_17d_a_password_that_changes_is_named_in_health_and_read_anew(tmp_path: Path, yard: Yard) -> None:
    file = tmp_path / "password"
    file.write_text("one")
    with Server(password="one") as server, opened(server.tcp, password_file=file) as tier:
        assert works(tier, yard, 1)
        server.tell("CONFIG", "SET", "requirepass", "two")
        server.password = "two"
        server.tell("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        until(lambda: not works(tier, yard, 2) and "user and password" in tier.fault(), "it is named")
        until(lambda: tier.gauges()["breaker"] != 0, "it is not an endless row of misses")
        file.write_text("two\n")
        works_again(tier, yard)


def test_kvb_17d_tls_with_the_right_and_with_the_wrong_authority(tmp_path: Path, yard: Yard) -> None:
    right, wrong = Authority(tmp_path), Authority(tmp_path, "other")
    cert, key = right.issue("server")
    mine, my_key = right.issue("client")
    elsewhere, elsewhere_key = right.issue("elsewhere", hosts="DNS:elsewhere")
    files = ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(right.ca)]
    with Server(tls=[*files, "--tls-auth-clients", "no"], password=ODD) as server:
        url = f"rediss://:{ENCODED}@127.0.0.1:{server.port}"
        with opened(url, ca=right.ca) as tier:
            assert works(tier, yard, 1)
            big = Town().yard(MiB)
            assert big.put(tier, range(6)) == [True] * 6 and big.whole(tier, range(6)) == list(range(6))
        for ca in (wrong.ca, None):
            with pytest.raises(Invalid, match="certificate"):
                Redis(make(url, {} if ca is None else {"ca": ca}))
        with opened(url.replace("rediss", "redis")) as tier:  # in clear, to a port that speaks TLS
            assert tier.gauges()["breaker"] != 0 and tier.fault()
    with Server(tls=[*files, "--tls-auth-clients", "yes"]) as server:
        with opened(f"rediss://127.0.0.1:{server.port}", ca=right.ca, cert=mine, key=my_key) as tier:
            assert works(tier, yard, 1)
        try:
            with opened(f"rediss://127.0.0.1:{server.port}", ca=right.ca) as tier:
                assert tier.gauges()["breaker"] != 0, "the server closed before it said why"
        except Invalid as error:
            assert "certificate of this end" in str(error)
    names = [
        "--tls-cert-file",
        str(elsewhere),
        "--tls-key-file",
        str(elsewhere_key),
        "--tls-ca-cert-file",
        str(right.ca),
        "--tls-auth-clients",
        "no",
    ]
    with Server(tls=names) as server, pytest.raises(Invalid, match="certificate"):
        Redis(make(f"rediss://127.0.0.1:{server.port}", {"ca": right.ca}))
    with (
        Server() as server,
        opened(f"rediss://127.0.0.1:{server.port}", ca=right.ca, timeout=0.5) as tier,
    ):  # TLS, to a port that speaks in clear
        assert tier.gauges()["breaker"] != 0 and tier.fault()


# --- KVB-17 e: stopped, hanging, cut off


def test_kvb_17e_a_redis_that_is_not_there_is_waited_for(yard: Yard) -> None:
    with Server() as server:
        server.kill()
        with opened(server.tcp) as tier:
            assert tier.gauges()["breaker"] != 0 and tier.gauges()["degraded"] == 1 and tier.fault()
            assert yard.known(tier, [1]) == [] and tier.unsure(yard.keys([1])) == [False]
            with pytest.raises(Unavailable):
                yard.put(tier, [1])
            assert server.start()
            works_again(tier, yard)
            assert tier.gauges()["degraded"] == 0 and tier.fault() == ""
            server.kill()
            until(lambda: fault_of(tier, yard, 1) is Unavailable and tier.gauges()["breaker"] != 0, "the breaker opens")
            assert yard.known(tier, [10_000]) == [], "what was known is no use now"
            assert server.start()
            works_again(tier, yard, 20_000)


def test_kvb_17e_a_redis_that_hangs_costs_each_call_its_timeout_at_most(yard: Yard) -> None:
    with Server() as server, opened(server.tcp, timeout=0.5) as tier:
        until(lambda: all(works(tier, yard, n) for n in range(4)), "all are there")
        with server.stopped():
            began = time.monotonic()
            until(lambda: fault_of(tier, yard, 1) is Unavailable and tier.gauges()["breaker"] != 0, "the breaker opens")
            for _ in range(1000):  # at once, each
                assert yard.known(tier, range(4)) == [] and fault_of(tier, yard, 2) is Unavailable
                with pytest.raises(Unavailable):
                    yard.put(tier, [9])
            assert time.monotonic() - began < PATIENCE
            tier.delete(yard.keys([3]))
        works_again(tier, yard)
        until(lambda: tier.gauges()["waiting_deletes"] == 0, "the delete is sent")
        assert yard.whole(tier, range(4)) == [0, 1, 2]


def test_a_connection_that_died_while_idle_is_not_a_fault(yard: Yard) -> None:
    with Server() as server, Proxy(server.address) as proxy, opened(proxy.url) as tier:
        for n in range(10):
            assert works(tier, yard, n)
            proxy.drop()
        assert tier.gauges()["breaker_opened_total"] == 0 and tier.gauges()["write_faults_total"] == 0


def test_calls_through_a_proxy_that_delays_and_cuts_are_whole_or_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "PAUSE", (0.01, 0.05))
    chance, yard = random.Random(7), Town().yard(256 * KiB)
    with Server() as server, Proxy(server.address) as proxy, opened(proxy.url, timeout=0.5) as tier:
        until(lambda: all(works(tier, yard, n) for n in range(8)), "all are there")
        whole = 0
        for i in range(150):
            if i % 3 == 0:
                proxy.cut = chance.randrange(300 * KiB)
            proxy.delay = chance.choice([0, 0, 0, 0.002, 0.01])
            whole += yard.get(tier, chance.randrange(8)) is not None  # compares every byte
            if chance.random() < 0.3:
                try:
                    yard.put(tier, [chance.randrange(8, 16)])
                except Unavailable:
                    pass
            if tier.gauges()["breaker"]:
                until(lambda: tier.gauges()["breaker"] == 0, "the breaker closes")
        assert whole > 50
        proxy.cut, proxy.delay = None, 0.0
        works_again(tier, yard, 100)
        assert tier.gauges()["lost_blocks_total"] == 0


def test_a_proxy_that_stands_still_is_given_up(yard: Yard) -> None:
    with Server() as server, Proxy(server.address) as proxy, opened(proxy.url, timeout=0.5) as tier:
        until(lambda: works(tier, yard, 1), "it is there")
        proxy.frozen = True
        until(lambda: fault_of(tier, yard, 1) is Unavailable and tier.gauges()["breaker"] != 0, "the breaker opens")
        proxy.frozen = False
        works_again(tier, yard)


# --- cancelled calls


class Cancelled(BaseException):
    """Whoever waited for the call has gone."""


def test_a_thousand_cancelled_calls_and_no_answer_reaches_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are broken off anywhere between the question and the answer's last byte, in 8 threads that share the connections of 6."""
    yard, cancelled = Town().yard(20 * KiB), [0]
    chance, lock = random.Random(1000), threading.Lock()
    some, short = exchange._some, exchange._short

    def broken(call: Callable[..., Any], odds: float) -> Callable[..., Any]:
        def made(*arguments: Any) -> Any:
            if not threading.current_thread().name.startswith("ThreadPool"):
                return call(*arguments)  # the tier's own threads have no caller who could go
            with lock:
                before, after = chance.random() < odds, chance.random() < odds
                cancelled[0] += before or after
            if before:
                raise Cancelled
            answer = call(*arguments)
            if after:
                raise Cancelled
            return answer

        return made

    with Server() as server, opened(server.url, connections=6) as tier:
        keys = yard.keys(range(32))
        assert all(yard.put(tier, range(32)))
        monkeypatch.setattr(exchange, "_some", broken(some, 0.1))
        monkeypatch.setattr(exchange, "_short", broken(short, 0.1))
        right = [0]

        def work(seed: int) -> None:
            mine = random.Random(seed)
            while cancelled[0] < 1000:
                n = mine.randrange(40)
                try:
                    if mine.random() < 0.3:
                        yard.put(tier, [n % 32])
                    elif mine.random() < 0.2:
                        assert tier._calls.exist(keys[:8]) == [True] * 8
                    else:
                        assert (yard.get(tier, n) is not None) == (n < 32)  # compares every byte
                        right[0] += 1
                except Cancelled:
                    pass

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, seed) for seed in range(8)]:
                done.result(PATIENCE * 4)
        monkeypatch.undo()
        assert cancelled[0] >= 1000 and right[0] > 300
        said = tier.gauges()
        assert said["connections_dropped_total"] > 300 and said["lost_blocks_total"] == 0 and said["connections"] <= 6
        assert yard.whole(tier, range(32)) == list(range(32))


def test_calls_that_run_out_of_time_and_no_answer_reaches_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy holds answers back for about as long as calls wait."""
    monkeypatch.setattr(breaker, "AFTER", 1 << 30)
    yard, chance = Town().yard(20 * KiB), random.Random(5)
    with Server() as server, Proxy(server.address) as proxy, opened(proxy.url, timeout=0.05) as tier:
        until(lambda: all(works(tier, yard, n) for n in range(16)), "all are there")
        late = right = 0
        for _ in range(120):
            proxy.delay = chance.choice([0.0, 0.01, 0.02, 0.03])
            late_before = tier.gauges()["read_faults_total"]
            right += yard.get(tier, chance.randrange(16)) is not None  # compares every byte
            late += tier.gauges()["read_faults_total"] > late_before
        assert late > 5 and right > 5
        assert tier.gauges()["lost_blocks_total"] == 0


# --- KVB-17 a: failover


def test_kvb_17a_two_servers_behind_one_name_change_places(yard: Yard) -> None:
    with Server() as first, Server() as second, Proxy(first.address) as proxy:
        second.tell("REPLICAOF", *first.address)
        until(lambda: second.tell("INFO", "replication")["master_link_status"] == "up", "it replicates")
        with opened(proxy.url) as tier:
            with ThreadPoolExecutor(6) as pool:
                assert all(pool.map(lambda n: works(tier, yard, n), range(30)))  # a warm pool
            until(lambda: second.tell("DBSIZE") == 30, "the replica has them")
            second.tell("REPLICAOF", "NO", "ONE")
            first.tell("REPLICAOF", *second.address)
            proxy.target = second.address
            works_again(tier, yard)
            assert tier.gauges()["degraded"] == 0
            assert yard.whole(tier, range(30)) == list(range(30))


def test_kvb_17a_a_replica_without_a_primary_is_said_to_be_one(yard: Yard) -> None:
    with Server() as server, opened(server.url) as tier:
        assert works(tier, yard, 1)
        server.tell("REPLICAOF", "127.0.0.1", 1)
        server.tell("CONFIG", "SET", "replica-serve-stale-data", "yes")
        assert not works(tier, yard, 2)
        assert "replica" in tier.fault() and tier.gauges()["degraded"] == 1 and tier.gauges()["breaker"] == 0
        assert yard.whole(tier, [1]) == [1], "reads go on"
        server.tell("REPLICAOF", "NO", "ONE")
        works_again(tier, yard)


@pytest.mark.timeout(180)
def test_kvb_17a_sentinels_promote_the_replica(yard: Yard) -> None:
    with Server() as first, Server() as second:
        second.tell("REPLICAOF", *first.address)
        until(lambda: second.tell("INFO", "replication")["master_link_status"] == "up", "it replicates")
        with sentinels(first, "blocks") as watchers:
            url = "redis://" + ",".join(f"{host}:{port}" for host, port in watchers)
            with opened(url, sentinel="blocks") as tier:
                assert works(tier, yard, 1)
                until(lambda: second.tell("DBSIZE") == 1, "the replica has it")
                first.kill()
                works_again(tier, yard)
                assert yard.whole(tier, [1]) == [1]
                assert second.tell("DBSIZE") >= 2
            with opened(url, sentinel="others") as tier:
                assert "no Sentinel knows" in tier.fault()


# --- KVB-17 b: a cluster


@pytest.mark.timeout(180)
def test_kvb_17b_a_slot_that_moves_during_a_batch_loses_nothing(yard: Yard) -> None:
    with (
        cluster() as servers,
        opened(f"redis://127.0.0.1:{servers[0].port},127.0.0.1:{servers[1].port}", cluster=True) as tier,
    ):
        assert all(yard.put(tier, range(64)))
        assert sum(len(server.names()) for server in servers) == 64 and all(server.names() for server in servers)
        slots = sorted({servers[0].tell("CLUSTER", "KEYSLOT", name) for server in servers for name in server.names()})
        stop, halfway, rounds = threading.Event(), threading.Event(), []

        def read() -> None:
            while not stop.is_set():
                with ThreadPoolExecutor(4) as pool:
                    assert (
                        list(pool.map(lambda n: yard.get(tier, n) is not None, range(64))) == [True] * 64
                    )  # compares every byte, order kept
                assert tier._calls.exist(yard.keys(range(64))) == [True] * 64
                rounds.append(1)

        def move() -> None:
            for i, slot in enumerate(slots[:12]):
                to = next(server for server in servers if not _serves(server, slot))
                move_slot(servers, slot, to, halfway if i == 0 else None)

        with ThreadPoolExecutor(2) as pool:
            reading, moving = pool.submit(read), pool.submit(move)
            until(lambda: len(rounds) >= 2 or reading.done(), "batches while a slot is half moved")
            halfway.set()
            moving.result(PATIENCE)
            seen = len(rounds)
            until(lambda: len(rounds) >= seen + 2 or reading.done(), "batches afterwards")
            stop.set()
            reading.result(PATIENCE)
        assert all(yard.put(tier, range(64, 128))) and yard.whole(tier, range(128)) == list(range(128))
        assert tier.delete(yard.keys(range(128))) == 128
        until(lambda: not any(server.names() for server in servers), "all are forgotten")
        said = tier.gauges()
        assert (said["missed_blocks_total"], said["lost_blocks_total"], said["breaker_opened_total"]) == (0, 0, 0)


def _serves(server: Server, slot: int) -> bool:
    return any(
        low <= slot <= high and primary[1] == server.port for low, high, primary, *_ in server.tell("CLUSTER", "SLOTS")
    )


@pytest.mark.timeout(180)
def test_a_cluster_whose_node_is_lost_and_comes_back(yard: Yard) -> None:
    with cluster() as servers, opened(f"redis://127.0.0.1:{servers[0].port}", cluster=True) as tier:
        assert all(yard.put(tier, range(64)))
        tier.look()
        assert tier.gauges()["blocks"] == 64, "of all nodes"
        tier.drop(yard.namespace)
        until(lambda: not any(server.names() for server in servers), "a drop goes through all nodes")
        until(lambda: not tier._upkeep.dropping, "the drop ends")
        servers[2].kill()
        until(lambda: not works(tier, yard, 200) and tier.gauges()["degraded"] == 1, "it is noticed")
        assert servers[2].start()
        works_again(tier, yard)


def test_a_server_that_is_no_cluster_is_named(yard: Yard) -> None:
    with Server() as server, pytest.raises(Invalid, match="cluster support disabled"):
        Redis(make(server.tcp, {"cluster": True}))


def test_one_node_of_a_cluster_taken_for_a_single_server_is_named(yard: Yard) -> None:
    with cluster() as servers, pytest.raises(Invalid, match="cluster = true"):
        Redis(make(servers[0].tcp))
