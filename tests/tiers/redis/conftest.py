"""A real server, a tier on it, and blocks of 8 KiB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.tiers.redis.location import make
from kvtier.tiers.redis.redis import Redis
from tests.support.redis_servers import Server
from tests.support.tiers import Registry, Samples

KiB = 1024


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


@pytest.fixture
def tier(server: Server) -> Iterator[Redis]:
    made = Redis(make(server.url))
    yield made
    made.check_integrity()
    made.close()


@pytest.fixture
def samples() -> Samples:
    return Registry().samples(8 * KiB)
