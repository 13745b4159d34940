"""What the tier does by itself: drops in the background, and trials of a Redis that was not there."""

from __future__ import annotations

import time

import pytest

from kvtier.errors import Unavailable
from kvtier.tiers.redis.redis import Redis
from tests.support.daemon import until
from tests.support.redis_servers import Server, needs_redis
from tests.support.redis_tier import opened, works_again
from tests.support.tiers import Registry, Samples, fault_of

pytestmark = needs_redis
KiB = 1024


def test_a_dropped_namespace_goes_from_redis_and_others_stay(tier: Redis, server: Server) -> None:
    registry = Registry()
    one, two = registry.samples(8 * KiB), registry.samples(8 * KiB, tenant="other")
    for first in range(0, 1200, 300):
        one.put(tier, range(first, first + 300))
    two.put(tier, range(5))
    server.tell("SET", "kvtier:1:stranger", "x")
    server.tell("SET", "mine", "x")
    one.namespace.dropped = True
    assert tier.drop(one.namespace) == 1200
    assert one.known(tier, range(3)) == []
    again = Registry().samples(8 * KiB)
    assert again.put(tier, [1]) in ([False], [True]), "refused until the old ones are gone"
    until(lambda: len(server.names()) <= 8, "they are gone")
    assert two.whole(tier, range(5)) == list(range(5))
    assert {b"mine", b"kvtier:1:stranger"} <= set(server.names())
    until(lambda: again.put(tier, [2]) == [True], "the namespace may come back")
    assert again.whole(tier, [2]) == [2]


def test_a_namespace_that_was_crowded_out_here_stays_for_others(tier: Redis, server: Server, samples: Samples) -> None:
    samples.put(tier, range(3))
    samples.namespace.crowded = samples.namespace.dropped = True
    assert tier.drop(samples.namespace) == 3
    time.sleep(0.3)
    assert len(server.names()) == 3


def test_kvb_17e_a_redis_that_is_not_there_is_waited_for(samples: Samples) -> None:
    with Server() as server:
        server.kill()
        with opened(server.tcp) as tier:
            assert tier.gauges()["breaker"] != 0 and tier.gauges()["degraded"] == 1 and tier.fault()
            assert samples.known(tier, [1]) == [] and tier.unsure(samples.keys([1])) == [False]
            with pytest.raises(Unavailable):
                samples.put(tier, [1])
            assert server.start()
            works_again(tier, samples)
            assert tier.gauges()["degraded"] == 0 and tier.fault() == ""
            server.kill()
            until(
                lambda: fault_of(tier, samples, 1) is Unavailable and tier.gauges()["breaker"] != 0, "the breaker opens"
            )
            assert samples.known(tier, [10_000]) == [], "what was known is no use now"
            assert server.start()
            works_again(tier, samples, 20_000)
