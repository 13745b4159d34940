"""The Redis tier on a real server: what Redis does by itself (evicts, refuses, forgets), and what stands under its
names that is no block of ours.

KVB-15, and KVB-17 c. What the connections do is test_connections, what clients see test_redis_daemon.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.errors import Lost, NotFound, Unavailable
from kvtier.tiers.redis.location import make
from kvtier.tiers.redis.redis import Redis
from kvtier.tiers.redis.value import FRONT_BYTES
from tests.support.daemon import PATIENCE, MiB, until
from tests.support.redis_servers import Server, needs_redis
from tests.support.redis_tier import name
from tests.support.tiers import Registry, Samples, fault_of, flip, memory

pytestmark = needs_redis
KiB = 1024


# --- one string a block


def test_a_block_is_one_string_with_its_bytes_behind_a_front(tier: Redis, server: Server, samples: Samples) -> None:
    samples.put(tier, [1, 2])
    assert server.names() == sorted([name(samples, 1), name(samples, 2)])
    with server.client() as client:
        for n in (1, 2):
            assert client.type(name(samples, n)) == b"string" and client.ttl(name(samples, n)) == -1
            value = client.get(name(samples, n))
            assert value[:4] == b"KVTR" and value[FRONT_BYTES:] == samples.block(n), "one form of bytes"


def test_a_time_to_live_is_redis_own(server: Server, samples: Samples) -> None:
    tier = Redis(make(server.url, {"ttl": 500, "prefix": "other.place"}))
    try:
        samples.put(tier, [1])
        (only,) = server.names()
        assert only.startswith(b"other.place:1:")
        with server.client() as client:
            assert 0 < client.ttl(only) <= 500
        assert samples.whole(tier, [1]) == [1]
    finally:
        tier.close()


def test_what_is_there_is_not_sent_again(tier: Redis, server: Server, samples: Samples) -> None:
    other = Redis(make(server.url))
    try:
        samples.put(tier, range(5))
        assert samples.put(other, range(7)) == [True] * 7
        assert other.gauges()["written_blocks_total"] == 2
    finally:
        other.close()


@pytest.mark.parametrize("nbytes", [1024, 60 * KiB, 200 * KiB, MiB, 4 * MiB])
def test_values_of_every_size_come_back(tier: Redis, nbytes: int) -> None:
    samples = Registry().samples(nbytes)
    numbers = range(max(3, min(300, 8 * MiB // nbytes)))
    assert all(samples.put(tier, numbers))
    assert samples.whole(tier, numbers) == list(numbers)


# --- asking


def test_a_miss_after_a_yes_is_a_miss(tier: Redis, server: Server, samples: Samples) -> None:
    samples.put(tier, [1, 2])
    server.tell("FLUSHALL")
    assert samples.known(tier, [1]) == [1]
    assert fault_of(tier, samples, 1) is NotFound
    assert samples.known(tier, [1]) == []
    said = tier.gauges()
    assert (said["missed_blocks_total"], said["lost_blocks_total"], said["read_faults_total"], said["degraded"]) == (
        1,
        0,
        0,
        0,
    )
    assert samples.put(tier, [1]) == [True] and samples.whole(tier, [1]) == [1]


# --- KVB-15: Redis evicts


@pytest.mark.timeout(120)
def test_kvb_15_every_get_is_whole_or_a_miss_while_redis_evicts() -> None:
    samples = Registry().samples(128 * KiB)
    with Server("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru") as server:
        tier = Redis(make(server.url))
        try:
            for n in range(200):
                assert samples.put(tier, [n]) == [True]
            order = list(range(200))
            random.Random(15).shuffle(order)
            with ThreadPoolExecutor(4) as pool:
                found = [n for part in pool.map(lambda i: samples.whole(tier, order[i::4]), range(4)) for n in part]
            assert 10 <= len(found) <= 64
            tier.look()
            said = tier.gauges()
            assert said["capacity_bytes"] == 8 * MiB and said["evicted_blocks_total"] >= 136
            assert (said["lost_blocks_total"], said["read_faults_total"], said["degraded"]) == (0, 0, 0)
            assert said["missed_blocks_total"] == 200 - len(found)
            left = found[:10]
            for n in left:
                mine = [one for one in server.names() if samples.key(n).hex().encode() in one]
                assert len(mine) <= 1, "everything of a block is under one name"  # none: evicted meanwhile
                for one in mine:
                    server.tell("DEL", one)
                assert fault_of(tier, samples, n) is NotFound
            assert samples.known(tier, left) == []
        finally:
            tier.close()


# --- KVB-17 c: Redis is full


def test_kvb_17c_a_full_redis_takes_no_more_and_gives_on(samples: Samples) -> None:
    samples = Registry().samples(128 * KiB)
    with Server("--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        tier = Redis(make(server.url))
        try:
            kept = [n for n in range(200) if _kept(tier, samples, n)]
            assert 16 <= len(kept) <= 64 and kept == list(range(len(kept)))
            assert samples.whole(tier, range(200)) == kept, "gets go on"
            said = tier.gauges()
            assert said["refused_blocks_total"] >= 1 and said["degraded"] == 1 and said["breaker"] == 0
            assert "out of memory" in tier.fault()
            server.tell("CONFIG", "SET", "maxmemory", "0")
            until(lambda: _kept(tier, samples, 150), "it takes blocks again")
            assert tier.gauges()["degraded"] == 0 and tier.fault() == ""
        finally:
            tier.close()


def _kept(tier: Redis, samples: Samples, n: int) -> bool:
    try:
        return samples.put(tier, [n])[0]
    except Unavailable:
        return False


# --- what is no block


def test_damaged_values_are_lost_once_and_forgotten(tier: Redis, server: Server, samples: Samples) -> None:
    chance = random.Random(3)
    samples.put(tier, range(40))
    with server.client() as client:
        whole = {n: client.get(name(samples, n)) for n in range(40)}
        damaged = {
            0: b"",
            1: whole[1][:-1],
            2: whole[2] + b"\0",
            3: whole[3][:FRONT_BYTES],
            4: whole[5],
            5: whole[6][:FRONT_BYTES] + whole[5][FRONT_BYTES:],
            6: b"x" * len(whole[6]),
            7: b"x",
            8: whole[8] * 100,
        }
        damaged |= {n: flip(whole[n], chance.randrange(len(whole[n])), n % 8) for n in range(9, 40)}
        for n, value in damaged.items():
            client.set(name(samples, n), value)
    for n, value in damaged.items():
        expected = NotFound if not value else Lost
        assert fault_of(tier, samples, n) is expected, n
        assert samples.known(tier, [n]) == [] and fault_of(tier, samples, n) is NotFound
    assert tier.gauges()["lost_blocks_total"] == 39
    until(lambda: tier.gauges()["waiting_deletes"] == 0, "Redis is told")
    server.tell("SET", name(samples, 1), "x")
    server.tell("DEL", name(samples, 2))
    server.tell("RPUSH", name(samples, 2), "x")
    assert all(samples.put(tier, range(40))) and samples.whole(tier, range(40)) == list(range(40))


def test_names_of_another_kind_are_refused_without_harm(tier: Redis, server: Server, samples: Samples) -> None:
    server.tell("RPUSH", name(samples, 1), "x")
    samples.put(tier, [2])
    assert fault_of(tier, samples, 1) is Unavailable
    assert tier.gauges()["breaker"] == 0
    assert samples.whole(tier, [2]) == [2], "and the connection goes on"
    assert tier.gauges()["degraded"] == 0


# --- threads


def test_more_threads_than_connections_share_them(server: Server, samples: Samples) -> None:
    tier = Redis(make(server.url, {"connections": 3, "timeout": PATIENCE}))
    try:
        samples.put(tier, range(32))
        most = []
        with ThreadPoolExecutor(12) as pool:
            for _ in pool.map(
                lambda i: samples.whole(tier, range(i % 4, 32, 4)) == list(range(i % 4, 32, 4)) or pytest.fail(),
                range(60),
            ):
                most.append(tier.gauges()["connections"])
        assert max(most) <= 3
        assert tier.gauges()["read_faults_total"] == 0
    finally:
        tier.close()


def test_closing_waits_for_calls_and_ends_all_threads(server: Server, samples: Samples) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    tier = Redis(make(server.url))
    samples.put(tier, [1])
    tier.close()
    until(lambda: {thread.ident for thread in threading.enumerate()} <= before, "its threads end")
    with server.client() as client:
        until(lambda: int(client.info("clients")["connected_clients"]) == 1, "its connections end")
    with pytest.raises(Unavailable):
        tier.read(samples.key(1), memory(samples.slot_bytes), samples.nbytes)
