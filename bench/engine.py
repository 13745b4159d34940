"""A simulated engine of `bench.trace`: `python -m bench.engine SOCKET BODY_BYTES PARTS`. It serves requests one after
the other through the client.

Per request: a lookup of its blocks, a get of what is known into memory that exists, and a put of the rest, as a
connector does it. Nothing is computed and nothing is kept on a device: all that an engine would not have to compute
again comes from the store. A block of a trace is PARTS blocks here. Every get is compared with what was put: bytes
follow from the block's number."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np

from bench.client_process import wait_mapped
from bench.harness import now
from bench.live import description
from bench.pools import Bytes, private
from bench.workers import Handlers, serve
from kvtier.client.api import Client

LOOKUP, LOAD, SAVE = 1.0, 2.0, 2.0  # deadlines: longer than an engine's, so that a slow answer is measured and no miss
MOST = 2048  # blocks of one request


class Engine:
    """One client and its staging memory."""

    def __init__(self, client: Client, body_bytes: int, parts: int) -> None:
        self.client, self.parts = client, parts
        self.namespace = client.register(description(body_bytes))
        self.staging = private(MOST, body_bytes)
        self.names: dict[int, bytes] = {}
        self.bodies = private(64, body_bytes, fill=True)

    def hashes(self, blocks: list[int]) -> bytes:
        """The content hashes of a request."""
        for block in blocks:
            if block not in self.names:
                self.names[block] = b"".join(
                    blake2b(b"%d/%d" % (block, part), digest_size=32).digest() for part in range(self.parts)
                )
        return b"".join(self.names[block] for block in blocks)

    def body(self, name: bytes) -> Bytes:
        """What a block holds."""
        return self.bodies[name[0] % len(self.bodies)]

    def serve(self, blocks: list[int]) -> tuple[int, int, float, float, float]:
        """(blocks known, blocks loaded, seconds of lookup, load and save) of one request."""
        raw = self.hashes(blocks)
        names = [raw[at : at + 32] for at in range(0, len(raw), 32)][:MOST]
        start = now()
        known = int(self.client.lookup(self.namespace, raw, deadline=LOOKUP))
        looked = now()
        got = 0
        if known:
            got = len(self.client.get(self.namespace, names[:known], deadline=LOAD, into=self.staging[:known]))
        loaded = now()
        for i in {0, got // 2, got - 1} if got else ():
            assert np.array_equal(self.staging[i], self.body(names[i])), "the store gave back other bytes than were put"
        again = now()
        if got < len(names):
            behind = max(0, got - 1)  # with the one before, so that the store knows whose tail it is
            self.client.put(self.namespace, names[behind:], [self.body(name) for name in names[behind:]], deadline=SAVE)
        return known, got, looked - start, loaded - looked, now() - again


@contextmanager
def make(socket: str, body_bytes: int, parts: int) -> Iterator[tuple[Handlers, dict[str, Any]]]:
    """An engine that serves lists of requests."""
    with Client(f"unix:{socket}") as client:
        engine = Engine(client, body_bytes, parts)
        client.status(deadline=5.0)
        wait_mapped()
        yield {"run": lambda requests: [engine.serve(blocks) for blocks in requests]}, {}


if __name__ == "__main__":
    serve(lambda: make(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
