"""Redis tiers for tests: opened and closed with a check, and whether one works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvtier.errors import KvtierError
from kvtier.tiers.redis.location import make
from kvtier.tiers.redis.redis import Redis
from tests.support.daemon import until
from tests.support.tiers import Samples


@contextmanager
def opened(url: str, **options: Any) -> Iterator[Redis]:
    tier = Redis(make(url, options))
    try:
        yield tier
        tier.check_integrity()
    finally:
        tier.close()


def works(tier: Redis, samples: Samples, n: int) -> bool:
    """Whether a block can be put and read; each is a new one."""
    try:
        return samples.put(tier, [n])[0] and samples.get(tier, n) is not None
    except KvtierError:
        return False


def works_again(tier: Redis, samples: Samples, start: int = 10_000) -> None:
    numbers = iter(range(start, start + 100_000))
    until(lambda: works(tier, samples, next(numbers)), "it works again")


def name(samples: Samples, n: int) -> bytes:
    return b"kvtier:1:" + samples.key(n).hex().encode()


def known(tier: Redis, samples: Samples, *numbers: int) -> list[int]:
    """Those that the tier says it has, once it is sure of all."""
    keys = samples.keys(numbers)

    def sure() -> bool:
        tier.find(keys)
        return not any(tier.unsure(keys))

    until(sure, "it is sure")
    return samples.known(tier, numbers)
