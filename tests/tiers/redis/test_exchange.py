"""Questions and answers, whole or the connection is closed: through a proxy that delays and cuts, cancelled, out of
time; values that are too long."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvtier.errors import Lost, Unavailable
from kvtier.tiers import breaker
from kvtier.tiers.redis import exchange
from kvtier.tiers.redis.redis import Redis
from tests.support.daemon import PATIENCE, MiB, until
from tests.support.redis_servers import Proxy, Server, needs_redis
from tests.support.redis_tier import name, opened, works, works_again
from tests.support.tiers import Registry, Samples, fault_of

pytestmark = needs_redis
KiB = 1024


@pytest.mark.long
def test_calls_through_a_proxy_that_delays_and_cuts_are_whole_or_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "PAUSE", (0.01, 0.05))
    chance, samples = random.Random(7), Registry().samples(256 * KiB)
    with Server() as server, Proxy(server.address) as proxy, opened(proxy.url, timeout=0.5) as tier:
        until(lambda: all(works(tier, samples, n) for n in range(8)), "all are there")
        whole = 0
        for i in range(150):
            if i % 3 == 0:
                proxy.cut = chance.randrange(300 * KiB)
            proxy.delay = chance.choice([0, 0, 0, 0.002, 0.01])
            whole += samples.get(tier, chance.randrange(8)) is not None  # compares every byte
            if chance.random() < 0.3:
                try:
                    samples.put(tier, [chance.randrange(8, 16)])
                except Unavailable:
                    pass
            if tier.gauges()["breaker"]:
                until(lambda: tier.gauges()["breaker"] == 0, "the breaker closes")
        assert whole > 50
        proxy.cut, proxy.delay = None, 0.0
        works_again(tier, samples, 100)
        assert tier.gauges()["lost_blocks_total"] == 0


def test_a_proxy_that_stands_still_is_given_up(samples: Samples) -> None:
    with Server() as server, Proxy(server.address) as proxy, opened(proxy.url, timeout=0.5) as tier:
        until(lambda: works(tier, samples, 1), "it is there")
        proxy.frozen = True
        until(lambda: fault_of(tier, samples, 1) is Unavailable and tier.gauges()["breaker"] != 0, "the breaker opens")
        proxy.frozen = False
        works_again(tier, samples)


class Cancelled(BaseException):
    """The caller has gone."""


@pytest.mark.long
def test_a_thousand_cancelled_calls_and_no_answer_reaches_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are broken off anywhere between the question and the answer's last byte, in 8 threads that share the
    connections of 6."""
    samples, cancelled = Registry().samples(20 * KiB), [0]
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
        keys = samples.keys(range(32))
        assert all(samples.put(tier, range(32)))
        monkeypatch.setattr(exchange, "_some", broken(some, 0.1))
        monkeypatch.setattr(exchange, "_short", broken(short, 0.1))
        right = [0]

        def work(seed: int) -> None:
            mine = random.Random(seed)
            while cancelled[0] < 1000:
                n = mine.randrange(40)
                try:
                    if mine.random() < 0.3:
                        samples.put(tier, [n % 32])
                    elif mine.random() < 0.2:
                        assert tier._calls.exist(keys[:8]) == [True] * 8
                    else:
                        assert (samples.get(tier, n) is not None) == (n < 32)  # compares every byte
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
        assert samples.whole(tier, range(32)) == list(range(32))


@pytest.mark.long
def test_calls_that_run_out_of_time_and_no_answer_reaches_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy holds answers back for about as long as calls wait."""
    monkeypatch.setattr(breaker, "AFTER", 1 << 30)
    samples, chance = Registry().samples(20 * KiB), random.Random(5)
    with Server() as server, Proxy(server.address) as proxy, opened(proxy.url, timeout=0.05) as tier:
        until(lambda: all(works(tier, samples, n) for n in range(16)), "all are there")
        late = right = 0
        for _ in range(120):
            proxy.delay = chance.choice([0.0, 0.01, 0.02, 0.03])
            late_before = tier.gauges()["read_faults_total"]
            right += samples.get(tier, chance.randrange(16)) is not None  # compares every byte
            late += tier.gauges()["read_faults_total"] > late_before
        assert late > 5 and right > 5
        assert tier.gauges()["lost_blocks_total"] == 0


def test_a_read_takes_in_no_more_than_it_asked_for(tier: Redis, server: Server, samples: Samples) -> None:
    """A value of 64 MiB under a block's name costs the block's bytes and one."""
    server.tell("SETRANGE", name(samples, 1), 64 * MiB, "x")
    with server.client() as client:
        before = int(client.info("stats")["total_net_output_bytes"])
        assert fault_of(tier, samples, 1) is Lost
        assert int(client.info("stats")["total_net_output_bytes"]) - before < MiB
