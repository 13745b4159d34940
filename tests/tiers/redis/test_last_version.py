"""Values that the last version wrote to Redis: they are served byte for byte, and values written now are the same."""

from __future__ import annotations

import base64

import redis

from kvtier.format.identity import parse_description
from tests.support.daemon import Daemon, MiB, body, hashes
from tests.support.last_version import KEPT, assert_served
from tests.support.redis_servers import Server, needs_redis

pytestmark = needs_redis


def values() -> dict[str, bytes]:
    """The kept values by name."""
    return {name: base64.b64decode(value) for name, value in KEPT["values"].items()}


def test_values_of_the_last_version_are_served_whole() -> None:
    with Server() as server, redis.Redis(unix_socket_path=str(server.socket)) as connection:
        for name, value in values().items():
            connection.set(name, value)
        with Daemon(8 * MiB, "--redis", f"url={server.url}") as daemon, daemon.client() as client:
            assert assert_served(client, KEPT["redis"]) == len(values()) > 0


def test_the_same_blocks_are_the_same_values_now() -> None:
    with Server() as server, redis.Redis(unix_socket_path=str(server.socket)) as connection:
        with Daemon(8 * MiB, "--redis", f"url={server.url}") as daemon, daemon.client() as client:
            for kept in KEPT["redis"].values():
                ns, context = client.register(parse_description(kept["description"].encode())), kept["context"]
                options = {"context": bytes.fromhex(context)} if context else {}
                nbytes = ns.extents().body_bytes
                for n in kept["whole"]:
                    assert client.put(ns, hashes([n]), [body(n, nbytes)], **options) == 1
                    assert client.flush(ns, hashes([n]), **options) == 1
        assert {name.decode(): connection.get(name) for name in connection.keys("*")} == values()
