"""NIXL's POSIX backend as a contestant of `bench.versus`, in the environment of `bench/peers.sh`: a batch is one
transfer of as many descriptors between memory and a preallocated file. It has no index, evicts nothing, syncs nothing
and checks nothing: the floor of what a file tier costs."""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from pathlib import Path

import nixl_cu12._api as nixl

from bench.contest import Contestant, Field

PATIENCE = 60.0


class PageCache(Contestant):
    """Through the page cache: what is read was never on the disk. Source and target are one memory in two halves."""

    flags = 0

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        self.versions = {"nixl-cu12": version("nixl-cu12")}
        self.agent = nixl.nixl_agent("bench", nixl.nixl_agent_config(backends=[]))
        self.agent.create_backend("POSIX")
        nbytes = self.source.nbytes
        self.fd = os.open(Path(field.directory) / "nixl", os.O_RDWR | os.O_CREAT | self.flags)
        field.stack.callback(os.close, self.fd)
        os.posix_fallocate(self.fd, 0, nbytes)
        regions = [(memory.ctypes.data, nbytes, 0, "") for memory in (self.source, self.target)]
        self.registered = [
            self.agent.register_memory(regions, "DRAM"),
            self.agent.register_memory([(0, nbytes, self.fd, "")], "FILE"),
        ]
        field.stack.callback(lambda: [self.agent.deregister_memory(one) for one in self.registered])
        self.verbs = {
            "put": lambda i: self.move("WRITE", self.source.ctypes.data, i),
            "get": lambda i: self.move("READ", self.target.ctypes.data, i),
        }

    def move(self, what: str, base: int, i: int) -> None:
        size = self.field.size
        offsets = range(i * self.field.batch * size, (i + 1) * self.field.batch * size, size)
        memory = self.agent.get_xfer_descs([(base + at, size, 0) for at in offsets], "DRAM")
        file = self.agent.get_xfer_descs([(at, size, self.fd) for at in offsets], "FILE")
        handle = self.agent.initialize_xfer(what, memory, file, "bench")
        state, end = self.agent.transfer(handle), time.monotonic() + PATIENCE
        while state not in ("DONE", "ERR"):
            assert time.monotonic() < end, f"a transfer took more than {PATIENCE:.0f} s"
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE", f"a transfer ended with {state}"
        self.agent.release_xfer_handle(handle)


class Direct(PageCache):
    """With O_DIRECT, past the page cache."""

    flags = os.O_DIRECT
