"""The Redis tier's connections: who may come in, what happens when Redis stops, hangs, is cut off, fails over or moves
a slot, and cancelled calls.

KVB-17 a, b, d and e, for the tier; test_redis_daemon has what clients see of it.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.pki import Authority
from kvtier.errors import Invalid
from kvtier.tiers.redis.location import make
from kvtier.tiers.redis.redis import Redis
from tests.support.daemon import PATIENCE, MiB, until
from tests.support.redis_servers import Proxy, Server, cluster, move_slot, needs_redis, sentinels
from tests.support.redis_tier import opened, works, works_again
from tests.support.tiers import Registry, Samples

pytestmark = needs_redis
KiB = 1024
ODD = "p@ss:/#%25 w"
ENCODED = "p%40ss%3A%2F%23%2525%20w"


# --- KVB-17 d: who may come in


def test_kvb_17d_an_odd_password_by_url_and_by_file(
    tmp_path: Path, samples: Samples, caplog: pytest.LogCaptureFixture
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
                assert works(tier, samples, 1)
        for options in ({}, {"password": "wrong"}, {"password": "wr:ong", "user": "nobody"}):
            with pytest.raises(Invalid, match="user and password") as error:
                Redis(make(server.tcp, options))
            assert "wrong" not in str(error.value)
    said = caplog.text
    assert ODD not in said and ENCODED not in said and "wrong" not in said


def test_kvb_17d_tls_with_the_right_and_with_the_wrong_authority(tmp_path: Path, samples: Samples) -> None:
    right, wrong = Authority(tmp_path), Authority(tmp_path, "other")
    cert, key = right.issue("server")
    mine, my_key = right.issue("client")
    elsewhere, elsewhere_key = right.issue("elsewhere", hosts="DNS:elsewhere")
    files = ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(right.ca)]
    with Server(tls=[*files, "--tls-auth-clients", "no"], password=ODD) as server:
        url = f"rediss://:{ENCODED}@127.0.0.1:{server.port}"
        with opened(url, ca=right.ca) as tier:
            assert works(tier, samples, 1)
            big = Registry().samples(MiB)
            assert big.put(tier, range(6)) == [True] * 6 and big.whole(tier, range(6)) == list(range(6))
        for ca in (wrong.ca, None):
            with pytest.raises(Invalid, match="certificate"):
                Redis(make(url, {} if ca is None else {"ca": ca}))
        with opened(url.replace("rediss", "redis")) as tier:  # in clear, to a port that speaks TLS
            assert tier.gauges()["breaker"] != 0 and tier.fault()
    with Server(tls=[*files, "--tls-auth-clients", "yes"]) as server:
        with opened(f"rediss://127.0.0.1:{server.port}", ca=right.ca, cert=mine, key=my_key) as tier:
            assert works(tier, samples, 1)
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


def test_a_connection_that_died_while_idle_is_not_a_fault(samples: Samples) -> None:
    with Server() as server, Proxy(server.address) as proxy, opened(proxy.url) as tier:
        for n in range(10):
            assert works(tier, samples, n)
            proxy.drop()
        assert tier.gauges()["breaker_opened_total"] == 0 and tier.gauges()["write_faults_total"] == 0


# --- KVB-17 a: failover


def test_kvb_17a_two_servers_behind_one_name_change_places(samples: Samples) -> None:
    with Server() as first, Server() as second, Proxy(first.address) as proxy:
        second.tell("REPLICAOF", *first.address)
        until(lambda: second.tell("INFO", "replication")["master_link_status"] == "up", "it replicates")
        with opened(proxy.url) as tier:
            with ThreadPoolExecutor(6) as pool:
                assert all(pool.map(lambda n: works(tier, samples, n), range(30)))  # a warm pool
            until(lambda: second.tell("DBSIZE") == 30, "the replica has them")
            second.tell("REPLICAOF", "NO", "ONE")
            first.tell("REPLICAOF", *second.address)
            proxy.target = second.address
            works_again(tier, samples)
            assert tier.gauges()["degraded"] == 0
            assert samples.whole(tier, range(30)) == list(range(30))


def test_kvb_17a_a_replica_without_a_primary_is_said_to_be_one(samples: Samples) -> None:
    with Server() as server, opened(server.url) as tier:
        assert works(tier, samples, 1)
        server.tell("REPLICAOF", "127.0.0.1", 1)
        server.tell("CONFIG", "SET", "replica-serve-stale-data", "yes")
        assert not works(tier, samples, 2)
        assert "replica" in tier.fault() and tier.gauges()["degraded"] == 1 and tier.gauges()["breaker"] == 0
        assert samples.whole(tier, [1]) == [1], "reads go on"
        server.tell("REPLICAOF", "NO", "ONE")
        works_again(tier, samples)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_kvb_17a_sentinels_promote_the_replica(samples: Samples) -> None:
    with Server() as first, Server() as second:
        second.tell("REPLICAOF", *first.address)
        until(lambda: second.tell("INFO", "replication")["master_link_status"] == "up", "it replicates")
        with sentinels(first, "blocks") as watchers:
            url = "redis://" + ",".join(f"{host}:{port}" for host, port in watchers)
            with opened(url, sentinel="blocks") as tier:
                assert works(tier, samples, 1)
                until(lambda: second.tell("DBSIZE") == 1, "the replica has it")
                first.kill()
                works_again(tier, samples)
                assert samples.whole(tier, [1]) == [1]
                assert second.tell("DBSIZE") >= 2
            with opened(url, sentinel="others") as tier:
                assert "no Sentinel knows" in tier.fault()


# --- KVB-17 b: a cluster


@pytest.mark.long
@pytest.mark.timeout(180)
def test_kvb_17b_a_slot_that_moves_during_a_batch_loses_nothing(samples: Samples) -> None:
    with (
        cluster() as servers,
        opened(f"redis://127.0.0.1:{servers[0].port},127.0.0.1:{servers[1].port}", cluster=True) as tier,
    ):
        assert all(samples.put(tier, range(64)))
        assert sum(len(server.names()) for server in servers) == 64 and all(server.names() for server in servers)
        slots = sorted({servers[0].tell("CLUSTER", "KEYSLOT", name) for server in servers for name in server.names()})
        stop, halfway, rounds = threading.Event(), threading.Event(), []

        def read() -> None:
            while not stop.is_set():
                with ThreadPoolExecutor(4) as pool:
                    assert (
                        list(pool.map(lambda n: samples.get(tier, n) is not None, range(64))) == [True] * 64
                    )  # compares every byte, order kept
                assert tier._calls.exist(samples.keys(range(64))) == [True] * 64
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
        assert all(samples.put(tier, range(64, 128))) and samples.whole(tier, range(128)) == list(range(128))
        assert tier.delete(samples.keys(range(128))) == 128
        until(lambda: not any(server.names() for server in servers), "all are forgotten")
        said = tier.gauges()
        assert (said["missed_blocks_total"], said["lost_blocks_total"], said["breaker_opened_total"]) == (0, 0, 0)


def _serves(server: Server, slot: int) -> bool:
    return any(
        low <= slot <= high and primary[1] == server.port for low, high, primary, *_ in server.tell("CLUSTER", "SLOTS")
    )


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_cluster_whose_node_is_lost_and_comes_back(samples: Samples) -> None:
    with cluster() as servers, opened(f"redis://127.0.0.1:{servers[0].port}", cluster=True) as tier:
        assert all(samples.put(tier, range(64)))
        tier.look()
        assert tier.gauges()["blocks"] == 64, "of all nodes"
        tier.drop(samples.namespace)
        until(lambda: not any(server.names() for server in servers), "a drop goes through all nodes")
        until(lambda: not tier._upkeep.dropping, "the drop ends")
        servers[2].kill()
        until(lambda: not works(tier, samples, 200) and tier.gauges()["degraded"] == 1, "it is noticed")
        assert servers[2].start()
        works_again(tier, samples)


def test_a_server_that_is_no_cluster_is_named(samples: Samples) -> None:
    with Server() as server, pytest.raises(Invalid, match="cluster support disabled"):
        Redis(make(server.tcp, {"cluster": True}))


@pytest.mark.long
def test_one_node_of_a_cluster_taken_for_a_single_server_is_named(samples: Samples) -> None:
    with cluster() as servers, pytest.raises(Invalid, match="cluster = true"):
        Redis(make(servers[0].tcp))
