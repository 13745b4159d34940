"""Calls with breaker and health: rights and passwords that are refused, a Redis that hangs, and no connection that is
free. KVB-17 d and e."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvtier.errors import Invalid, Unavailable
from kvtier.tiers.redis.location import make
from kvtier.tiers.redis.redis import Redis
from tests.support.daemon import PATIENCE, until
from tests.support.redis_servers import Server, needs_redis
from tests.support.redis_tier import opened, works, works_again
from tests.support.tiers import Samples, fault_of, memory

pytestmark = needs_redis
KiB = 1024


def test_kvb_17d_a_missing_right_is_named_at_the_start_and_later_in_health(samples: Samples) -> None:
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
            assert works(tier, samples, 1)
            server.tell("ACL", "SETUSER", "least", "-set")
            assert not works(tier, samples, 2)
            assert tier.gauges()["degraded"] == 1 and "set" in tier.fault() and samples.whole(tier, [1]) == [1]
            server.tell("ACL", "SETUSER", "least", "+set")
            works_again(tier, samples)
            assert tier.gauges()["degraded"] == 0
            assert tier.delete(samples.keys([1])) == 1
            tier.look()
            assert tier.gauges()["used_bytes"] == 0, "INFO is not among the rights that are needed"


def test_kvb_17d_a_password_that_changes_is_named_in_health_and_read_anew(tmp_path: Path, samples: Samples) -> None:
    file = tmp_path / "password"
    file.write_text("one")
    with Server(password="one") as server, opened(server.tcp, password_file=file) as tier:
        assert works(tier, samples, 1)
        server.tell("CONFIG", "SET", "requirepass", "two")
        server.password = "two"
        server.tell("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        until(lambda: not works(tier, samples, 2) and "user and password" in tier.fault(), "it is named")
        until(lambda: tier.gauges()["breaker"] != 0, "it is not an endless row of misses")
        file.write_text("two\n")
        works_again(tier, samples)


def test_kvb_17e_a_redis_that_hangs_costs_each_call_its_timeout_at_most(samples: Samples) -> None:
    with Server() as server, opened(server.tcp, timeout=0.5) as tier:
        until(lambda: all(works(tier, samples, n) for n in range(4)), "all are there")
        with server.stopped():
            began = time.monotonic()
            until(
                lambda: fault_of(tier, samples, 1) is Unavailable and tier.gauges()["breaker"] != 0, "the breaker opens"
            )
            for _ in range(1000):  # at once, each
                assert samples.known(tier, range(4)) == [] and fault_of(tier, samples, 2) is Unavailable
                with pytest.raises(Unavailable):
                    samples.put(tier, [9])
            assert time.monotonic() - began < PATIENCE
            tier.delete(samples.keys([3]))
        works_again(tier, samples)
        until(lambda: tier.gauges()["waiting_deletes"] == 0, "the delete is sent")
        assert samples.whole(tier, range(4)) == [0, 1, 2]


def test_a_call_that_finds_no_connection_free_says_nothing_about_redis(server: Server, samples: Samples) -> None:
    tier = Redis(make(server.url, {"connections": 2, "timeout": 1.0}))
    try:
        samples.put(tier, range(2))
        taken, done = threading.Barrier(3), threading.Event()

        def hold() -> None:
            with tier._calls.connections.connection():
                taken.wait(PATIENCE)
                assert done.wait(PATIENCE)

        holders = [threading.Thread(target=hold) for _ in range(2)]
        for holder in holders:
            holder.start()
        taken.wait(PATIENCE)
        with pytest.raises(Unavailable, match="in use"):
            tier.read(samples.key(1), memory(samples.slot_bytes), samples.nbytes)
        assert tier.gauges()["breaker"] == 0 and tier.gauges()["read_faults_total"] == 0
        done.set()
        for holder in holders:
            holder.join(PATIENCE)
        until(lambda: samples.whole(tier, [0, 1]) == [0, 1], "they are free again")
    finally:
        tier.close()
