"""A store and its sessions in the test's own process, with freed slots poisoned. What is stored are the numbered blocks
of `tests.support.daemon`.

Leaving an `Inside` proves that ledger, slabs, accounts and sessions agree, and ends what it started.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.format.block import parse_header
from kvtier.format.identity import NO_CONTEXT, Description, derive_keys
from kvtier.format.layout import HEADER_BYTES, Range
from kvtier.protocol.stops import PRESENT
from kvtier.server.sessions import WRITE, Peer, Session, Sessions
from kvtier.store.arena import POISON, Arena
from kvtier.store.store import Store
from tests.support.daemon import body, content_hash, description

KiB, MiB = 1024, 1 << 20


class Space:
    """A namespace as tests use it: blocks are numbers, and block n holds `body(n)`."""

    def __init__(self, store: Store, tenant: str, wanted: Description, range_: Range = Range()) -> None:  # noqa: B008
        self.namespace = store.namespaces.register(wanted.canonical, tenant)
        self.resolved = wanted.layout.resolve(range_)
        self.extents = wanted.layout.extents(range_)
        self.body_bytes, self.block_bytes, self.slot = (
            self.extents.body_bytes,
            self.extents.block_bytes,
            self.extents.slot_bytes,
        )

    def hashes(self, numbers: Sequence[int]) -> list[bytes]:
        return [content_hash(n) for n in numbers]

    def keys(self, numbers: Sequence[int], context: bytes = NO_CONTEXT) -> list[bytes]:
        return derive_keys(self.namespace.digest, self.resolved, context, b"".join(self.hashes(numbers)), 32)

    def asked(self, numbers: Sequence[int], context: bytes = NO_CONTEXT) -> tuple[Any, ...]:
        """What `reserve` of store and session takes after its first argument."""
        return self.namespace, self.resolved, context, self.keys(numbers, context), self.hashes(numbers)


class Inside:
    """Store and sessions over an arena of 8 slabs. A context manager."""

    def __init__(self, arena_bytes: int = MiB) -> None:
        self.arena = Arena(arena_bytes)
        self.store = Store(self.arena, poison=True)
        self.sessions = Sessions(self.store)
        self.arena.array[:] = POISON
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Inside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self.sessions.close()
            for child in self._children:
                with child:
                    child.kill()
            self.arena.close()

    def check(self) -> None:
        """Sessions and store agree, and what is free is poisoned or was never used."""
        self.sessions.check_integrity()

    def space(self, nbytes: int = 1024, tenant: str = "t", **fields: Any) -> Space:
        return Space(self.store, tenant, description(nbytes, **fields))

    def session(self, tenant: str = "t", role: int = WRITE) -> Session:
        """A session without a process: it ends with its socket."""
        return self.sessions.open(Peer(tenant, role), None)

    def process(self) -> subprocess.Popen[bytes]:
        """A process that only lives."""
        child = subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )  # reads until this process is gone, however it goes
        self._children.append(child)
        return child

    def session_of(self, child: subprocess.Popen[bytes], tenant: str = "t") -> Session:
        """A session of a process, which may map the arena."""
        return self.sessions.open(self.peer_of(child, tenant), os.pidfd_open(child.pid))

    def peer_of(self, child: subprocess.Popen[bytes], tenant: str = "t") -> Peer:
        return Peer(tenant, WRITE, os.getuid(), child.pid)

    def body_at(self, offset: int, space: Space) -> npt.NDArray[np.uint8]:
        start = offset + HEADER_BYTES
        return self.arena.array[start : start + space.body_bytes]

    def block_at(self, offset: int, space: Space) -> bytes:
        return bytes(self.arena.memory[offset : offset + space.block_bytes])

    def write(self, offsets: Sequence[int], space: Space, numbers: Sequence[int]) -> None:
        """Fills what was reserved with the bodies of these blocks."""
        for offset, n in zip(offsets, numbers, strict=True):
            if offset != PRESENT:
                self.body_at(offset, space)[:] = body(n, space.body_bytes)

    def put(self, session: Session, id_: int, space: Space, numbers: Sequence[int]) -> int:
        """Reserves, fills and seals. How many are stored then."""
        offsets = session.reserve(id_, *space.asked(numbers))
        self.write(offsets, space, numbers)
        return session.seal(id_, ())

    def holds(self, offset: int, space: Space, n: int) -> bool:
        """Whether the slot holds block n of this namespace, header and body, whole."""
        header = parse_header(self.arena.memory[offset : offset + space.block_bytes])
        same = (
            header.key == space.keys([n])[0]
            and header.namespace == space.namespace.digest
            and header.content_hash == content_hash(n)
        )
        return (
            same
            and header.nbytes == space.block_bytes
            and np.array_equal(self.body_at(offset, space), body(n, space.body_bytes))
        )
