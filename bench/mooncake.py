"""Mooncake's store as a contestant of `bench.versus`, in the environment of `bench/peers.sh`: over TCP, over its
shared-memory transport, and as the client that shares a pool with a daemon on its host.

A master and whatever else it needs are processes of their own on free ports of loopback. Its master evicts late and by
itself, so what was put before is removed between windows; that is not timed. `python -m bench.mooncake MASTER BYTES` is
the process whose memory holds the blocks."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.contest import Bytes, Contestant, Field
from bench.workers import Handlers, Worker, die_with_parent, serve

MiB, GiB = 2**20, 2**30
SEGMENT = 2 * GiB
PATIENCE = 60.0
HOT_CACHE = {
    "MC_STORE_LOCAL_HOT_CACHE_SIZE": str(GiB),
    "MC_STORE_LOCAL_HOT_CACHE_USE_SHM": "1",
    "MC_STORE_LOCAL_HOT_ADMISSION_THRESHOLD": "1",
}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def version() -> str:
    """Of the wheel, whichever build it is."""
    return next(f"{d.name} {d.version}" for d in distributions() if d.name.startswith("mooncake-transfer-engine"))


@contextmanager
def program(
    name: str, port: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """One of the wheel's programs, until its port accepts connections."""
    import mooncake

    path = Path(mooncake.__path__[0]) / name
    path.chmod(0o755)  # wheels may lose it
    process = subprocess.Popen(
        [str(path), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=sys.stderr,
        env={**os.environ, **(environment or {})},
        preexec_fn=die_with_parent,
    )
    try:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{name} does not listen on its port") from None
                time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


class Store(Contestant):
    """What the three have in common: a master, batches by address, and room."""

    def __init__(self, field: Field) -> None:
        self.master = free_port()
        arguments = [
            f"--rpc_port={self.master}",
            "--enable_http_metadata_server=false",
            f"--metrics_port={free_port()}",
        ]
        arguments += ["--default_kv_lease_ttl=5000"]
        process = field.stack.enter_context(program("mooncake_master", self.master, arguments))
        self.servers = {"master": process.pid}
        call = field.batch * field.size
        servers = self.servers
        self.store = self.connect(field)
        super().__init__(field)
        self.servers = servers
        self.versions = {"mooncake": version()}
        self.most = max(2, min(16, SEGMENT * 4 // 5 // call - field.batches))
        self.keys: list[list[str]] = [[] for _ in range(field.batches)]
        self.old: list[str] = []
        self.numbers = count()
        self.sizes = [field.size] * field.batch
        self.verbs = {"put": self.put, "get": self.get}

    def connect(self, field: Field) -> Any:
        """A client of the master. Adds to `servers`."""
        raise NotImplementedError

    def addresses(self, memory: Bytes, i: int) -> list[int]:
        start = memory.ctypes.data + i * self.field.batch * self.field.size
        return [start + n * self.field.size for n in range(self.field.batch)]

    def put(self, i: int) -> None:
        keys = [f"{os.getpid()}-{next(self.numbers)}" for _ in range(self.field.batch)]
        failed = self.store.batch_put_from(keys, self.addresses(self.source, i), self.sizes)
        assert not any(failed), f"batch_put_from answers {failed}"
        self.old += self.keys[i]
        self.keys[i] = keys

    def get(self, i: int) -> None:
        got = self.store.batch_get_into(self.keys[i], self.addresses(self.target, i), self.sizes)
        assert got == self.sizes, f"batch_get_into answers {got}"

    def warm(self) -> None:
        for n in range(self.field.batches + self.most):  # as full as it ever gets: its memory has been touched then
            self.put(n % self.field.batches)
        self.room()
        super().warm()

    def room(self) -> None:
        for key in self.old:
            self.store.remove(key, True)
        self.old.clear()


class Tcp(Store):
    """The blocks lie in another process; both copy over loopback."""

    variables: ClassVar[Mapping[str, str]] = {}

    def connect(self, field: Field) -> Any:
        os.environ.update(self.variables)
        storage = Worker(["-m", "bench.mooncake", str(self.master), str(SEGMENT)], environment=self.variables)
        self.servers["storage"] = field.stack.enter_context(storage).pid
        store = client(self.master, 0)
        field.stack.callback(store.close)
        return store

    def make_memory(self) -> tuple[Bytes, Bytes]:
        made = super().make_memory()
        for memory in made:
            assert self.store.register_buffer(memory.ctypes.data, memory.nbytes) == 0, "register_buffer failed"
        return made


class Shm(Tcp):
    """The same with the transport over POSIX shared memory, new in 0.3.14, whose store does not yet allocate its
    segment for it."""

    variables: ClassVar[Mapping[str, str]] = {"MC_FORCE_SHM": "1", "MC_STORE_USE_SHM_SEGMENT": "1"}


class Dummy(Store):
    """A daemon that owns the blocks, and an application whose memory is a pool shared with it: Mooncake's own design
    for one host, hot cache on."""

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        self.verbs["get without a copy"] = self.look

    def connect(self, field: Field) -> Any:
        from mooncake.store import MooncakeDistributedStore

        port = free_port()
        arguments = [
            "--host=127.0.0.1",
            f"--global_segment_size={SEGMENT}",
            f"--master_server_address=127.0.0.1:{self.master}",
            f"--port={port}",
        ]
        arguments += ["--metadata_server=P2PHANDSHAKE", "--protocol=tcp"]
        environment = {**HOT_CACHE, "MC_STORE_LOCAL_HOT_BLOCK_SIZE": str(field.size)}
        self.servers["mooncake_client"] = field.stack.enter_context(
            program("mooncake_client", port, arguments, environment)
        ).pid
        store = MooncakeDistributedStore()
        pool = 2 * field.batches * field.batch * field.size + 64 * MiB
        answer = store.setup_dummy(pool, 128 * MiB, f"127.0.0.1:{port}")
        assert answer == 0, f"setup_dummy answers {answer}"
        field.stack.callback(store.close)
        return store

    def make_memory(self) -> tuple[Bytes, Bytes]:
        shape = (self.field.batches, self.field.batch, self.field.size)
        made = []
        for whole in super().make_memory():
            address = self.store.alloc_from_mem_pool(whole.nbytes)
            assert address, "alloc_from_mem_pool answers 0"
            assert self.store.register_buffer(address, whole.nbytes) == 0, "register_buffer failed"
            memory = np.frombuffer((ctypes.c_uint8 * whole.nbytes).from_address(address), np.uint8).reshape(shape)
            np.copyto(memory, whole)
            made.append(memory)
        return made[0], made[1]

    def look(self, i: int) -> None:
        found = self.store.batch_get_buffer(self.keys[i])
        assert len(found) == self.field.batch and all(one is not None for one in found), (
            "batch_get_buffer misses blocks"
        )


def client(master: int, segment: int) -> Any:
    """A client with so many bytes of memory for others."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    answer = store.setup(
        f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", segment, 512 * MiB, "tcp", "", f"127.0.0.1:{master}"
    )
    assert answer == 0, f"setup answers {answer}"
    return store


@contextmanager
def storage(master: int, nbytes: int) -> Iterator[tuple[Handlers, dict[str, Any]]]:
    """The process that holds the blocks."""
    store = client(master, nbytes)
    yield {}, {}
    store.close()


if __name__ == "__main__":
    serve(lambda: storage(int(sys.argv[1]), int(sys.argv[2])))
