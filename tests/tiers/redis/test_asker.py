"""Questions and deletes in the background: what is learned, when a yes grows old, and deletes while Redis is away."""

from __future__ import annotations

import random
import time

import pytest

from kvtier.errors import NotFound
from kvtier.tiers.redis import presence
from kvtier.tiers.redis.location import make
from kvtier.tiers.redis.redis import Redis
from tests.support.daemon import PATIENCE, until
from tests.support.redis_servers import Server, needs_redis
from tests.support.redis_tier import known, name
from tests.support.tiers import Samples, fault_of

pytestmark = needs_redis
KiB = 1024


def test_find_learns_what_others_put_and_what_is_not_there(tier: Redis, server: Server, samples: Samples) -> None:
    other = Redis(make(server.url))
    try:
        samples.put(other, [1, 2])
    finally:
        other.close()
    assert samples.known(tier, [1, 2, 3]) == [], "no answer is waited for"
    assert known(tier, samples, 1, 2, 3) == [1, 2]
    assert tier.unsure(samples.keys([1, 2, 3])) == [False] * 3
    assert samples.whole(tier, [1, 2, 3]) == [1, 2]


def test_a_long_find_is_asked_piece_by_piece_and_many_questions_are_bounded(tier: Redis, samples: Samples) -> None:
    numbers = range(2000)
    for first in range(0, 2000, 500):
        samples.put(tier, range(first, first + 500, 2))
    tier._presence.forget(samples.namespace.handle)
    tier._presence = tier._asker._presence = presence.Presence()
    end = time.monotonic() + PATIENCE
    while len(samples.known(tier, numbers)) < 1000:
        tier.check_integrity()
        assert time.monotonic() < end
        time.sleep(0.005)
    assert samples.known(tier, numbers) == list(range(0, 2000, 2))


def test_existence_turns_false_within_the_documented_time(
    tier: Redis, server: Server, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its constants a tenth of what they are."""
    for constant in ("HOLD", "FRESH", "ABSENT"):
        monkeypatch.setattr(presence, constant, getattr(presence, constant) / 10)
    samples.put(tier, [1, 2])
    server.tell("DEL", name(samples, 1))
    assert samples.known(tier, [1, 2]) == [1, 2], "it was so a moment ago"
    time.sleep(presence.FRESH + 0.01)
    until(lambda: samples.known(tier, [1, 2]) == [2], "asked anew, as it is old")
    time.sleep(presence.HOLD + 0.01)
    assert samples.known(tier, [1, 2]) == [], "it was not asked for long"
    until(lambda: samples.known(tier, [1, 2]) == [2], "asked again")


def test_deletes_reach_redis_and_what_is_written_again_stays(tier: Redis, server: Server, samples: Samples) -> None:
    samples.put(tier, range(6))
    assert tier.delete(samples.keys([0, 1, 9])) == 2
    until(lambda: len(server.names()) == 4, "Redis has forgotten them")
    chance = random.Random(1)
    for _ in range(200):
        n = chance.randrange(6)
        if chance.random() < 0.5:
            tier.delete(samples.keys([n]))
            assert samples.known(tier, [n]) == [] and fault_of(tier, samples, n) is NotFound
        else:
            assert samples.put(tier, [n]) == [True]
            assert samples.whole(tier, [n]) == [n]


def test_deletes_wait_while_redis_is_away(tier: Redis, server: Server, samples: Samples) -> None:
    samples.put(tier, range(4))
    with server.stopped():
        assert tier.delete(samples.keys([1, 2])) == 2
        assert samples.known(tier, [1, 2]) == []
        assert tier.gauges()["waiting_deletes"] == 2
    until(lambda: tier.gauges()["waiting_deletes"] == 0, "they are sent")
    assert set(server.names()) == {name(samples, 0), name(samples, 3)}
