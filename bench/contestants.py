"""Contestants of `bench.versus` that run in the project's own environment: plain copies, kvtier's lane, its SSD tier,
Redis through redis-py."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import redis

from bench.contest import Bytes, Contestant, Field
from bench.live import DEADLINE, Live, arena_for, fresh
from bench.redis import server
from bench.tiers import Blocks
from kvtier.format.block import digest
from kvtier.store.namespaces import Namespaces
from kvtier.tiers.ssd.data_file import WRITERS
from kvtier.tiers.ssd.ssd import Ssd
from kvtier.tiers.tier import Outgoing


class Copy(Contestant):
    """The ceiling: `np.copyto` of the same blocks, from one private memory into another."""

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        self.verbs = {"put": self.copy, "get": self.copy}

    def copy(self, i: int) -> None:
        for source, target in zip(self.source[i], self.target[i], strict=True):
            np.copyto(target, source)


class Kvtier(Contestant):
    """A daemon's lane through the public client: `put`, `get` into memory that exists already, and a lease, which
    copies nothing."""

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        self.live = field.stack.enter_context(Live(arena_for(4 * field.batches * field.batch, field.size), field.size))
        self.servers = {"daemon": self.live.pid}
        self.hashes = [b""] * field.batches
        self.verbs = {"put": self.put, "get": self.get, "get without a copy": self.lease}

    def put(self, i: int) -> None:
        hashes = fresh(self.field.batch)
        done = self.live.client.put(self.live.namespace, hashes, list(self.source[i]), deadline=DEADLINE)
        assert done == self.field.batch, f"{done} blocks were put: {done.reason}"
        self.hashes[i] = hashes

    def get(self, i: int) -> None:
        found = self.live.client.get(self.live.namespace, self.hashes[i], deadline=DEADLINE, into=list(self.target[i]))
        assert len(found) == self.field.batch, f"{len(found)} blocks: {found.reason}"

    def lease(self, i: int) -> None:
        with self.live.client.lease(self.live.namespace, self.hashes[i], deadline=DEADLINE) as blocks:
            views = list(blocks)
        assert len(views) == self.field.batch, f"{len(views)} blocks: {blocks.reason}"

    def warm(self) -> None:
        # the arena is full then: what is measured evicts, and every slot has been touched by this client
        for _ in range(5):
            super().warm()


class KvtierSsd(Contestant):
    """The SSD tier alone, as settling and promotion use it: a digest of each block and one write; reads by its threads,
    every byte checked."""

    def __init__(self, field: Field) -> None:
        self.blocks = Blocks(Namespaces(set, lambda _: 0), field.size, 2 * field.batches * field.batch)
        super().__init__(field)
        where = Path(field.directory) / "ssd"
        self.namespaces = Namespaces(set, lambda _: 0)
        self.tier = Ssd(where, 4 * field.batches * field.batch * self.blocks.slot_bytes, self.namespaces.register)
        field.stack.callback(self.tier.close)
        self.pool = field.stack.enter_context(ThreadPoolExecutor(WRITERS))
        self.keys: list[list[bytes]] = [[] for _ in range(field.batches)]
        self.verbs = {"put": self.put, "get": self.get}

    def make_memory(self) -> tuple[Bytes, Bytes]:
        half = self.field.batches * self.field.batch
        self.slots = self.blocks.slots[:half], self.blocks.slots[half:]
        return np.zeros((0, 0, 0), np.uint8), np.zeros((0, 0, 0), np.uint8)

    def put(self, i: int) -> None:
        slots = self.slots[0][i * self.field.batch : (i + 1) * self.field.batch]
        keys, nbytes = self.blocks.renamed(slots), self.blocks.nbytes
        out = [
            Outgoing(key, self.blocks.namespace, slot, nbytes, digest(slot[:nbytes]))
            for key, slot in zip(keys, slots, strict=True)
        ]
        assert all(self.tier.write(out)), self.tier.gauges()
        self.keys[i] = keys

    def get(self, i: int) -> None:
        keys, slots = self.keys[i], self.slots[1][i * self.field.batch : (i + 1) * self.field.batch]
        shares = [range(first, len(keys), WRITERS) for first in range(WRITERS)]
        list(
            self.pool.map(lambda share: [self.tier.read(keys[n], slots[n], self.blocks.nbytes) for n in share], shares)
        )

    def check(self) -> None:
        for i in range(self.field.batches):  # `read` compares every checksum; here that it is the block that was put
            self.get(i)
            for put, got in zip(
                *(half[i * self.field.batch : (i + 1) * self.field.batch] for half in self.slots), strict=True
            ):
                assert put[: self.blocks.nbytes] == got[: self.blocks.nbytes], "other bytes came back than were put"


class RedisPy(Contestant):
    """redis-py with hiredis on a Unix socket; one command a block, and all of a batch in one pipeline.

    SET takes the bytes from numpy memory; what GET brings is copied into numpy memory, as an engine's staging buffer
    needs it. What was put before is deleted between windows: Redis counts in seconds when a key was used, so letting it
    evict would now and then take what is to be read next."""

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        self.most = 8
        nbytes = (field.batches + 2 * self.most) * field.batch * field.size
        start, socket = field.stack.enter_context(server(Path(field.directory), 2 * nbytes))
        self.servers = {"redis-server": start().pid}
        self.client = field.stack.enter_context(redis.Redis(unix_socket_path=str(socket), socket_timeout=60))
        self.versions = {"redis-server": self.client.info("server")["redis_version"], "redis-py": redis.__version__}
        self.names: list[list[bytes]] = [[] for _ in range(field.batches)]
        self.old: list[bytes] = []
        self.numbers = count()
        self.verbs = {
            "put": self.put,
            "put pipelined": self.put_pipelined,
            "get": self.get,
            "get pipelined": self.get_pipelined,
        }

    def room(self) -> None:
        if self.old:
            self.client.delete(*self.old)
        self.old.clear()

    def put(self, i: int) -> None:
        names = self._names()
        for name, block in zip(names, self.source[i], strict=True):
            self.client.set(name, block.data)
        self._keep(i, names)

    def put_pipelined(self, i: int) -> None:
        names = self._names()
        with self.client.pipeline(transaction=False) as pipe:
            for name, block in zip(names, self.source[i], strict=True):
                pipe.set(name, block.data)
            pipe.execute()
        self._keep(i, names)

    def get(self, i: int) -> None:
        for name, target in zip(self.names[i], self.target[i], strict=True):
            np.copyto(target, np.frombuffer(self.client.get(name), np.uint8))

    def get_pipelined(self, i: int) -> None:
        with self.client.pipeline(transaction=False) as pipe:
            for name in self.names[i]:
                pipe.get(name)
            for value, target in zip(pipe.execute(), self.target[i], strict=True):
                np.copyto(target, np.frombuffer(value, np.uint8))

    def _keep(self, i: int, names: list[bytes]) -> None:
        self.old += self.names[i]
        self.names[i] = names

    def _names(self) -> list[bytes]:
        return [b"%d:%d" % (os.getpid(), next(self.numbers)) for _ in range(self.field.batch)]
