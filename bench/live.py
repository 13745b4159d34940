"""A daemon of the benchmark's own with one client, and the calls that are timed.

The daemon is a child process on a Unix socket in a temporary directory; leaving the context ends both. Blocks are
opaque bytes, so a case can have slots of any size. Timed functions check what they got: a benchmark that reads a miss
measures nothing."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any

from google.protobuf.message import Message

from bench.empty import Frames, Options
from bench.harness import Child, KiB, now, progress
from kvtier.client.answers import RegisteredNamespace
from kvtier.client.api import Client
from kvtier.client.unix_socket import UnixSocket
from kvtier.format.identity import CHAIN, Description, HashScheme
from kvtier.format.layout import HEADER_BYTES, SLOT_ALIGN, opaque, pad
from kvtier.format.slots import MIN_SLABS, SLAB_BYTES
from kvtier.protocol.frames import HEADER, MAX_BODY, Verb, pack, receive
from kvtier.protocol.v1 import kvtier_pb2 as pb
from kvtier.server.settings import MIN_ARENA
from kvtier.store.allocator import Slabs

BATCH = 32
HASH = 32  # bytes of one content hash
BODY = 3 * KiB  # of a block in a slot of 4 KiB
DEADLINE = 5.0  # of every timed call: a pause is to be measured, not to become a miss


def fresh(n: int = BATCH) -> bytes:
    """Content hashes nobody has used yet, concatenated."""
    return os.urandom(n * HASH)


def description(body_bytes: int) -> Description:
    """A namespace whose blocks are `body_bytes` of opaque bytes."""
    return Description(
        "benchmark", "0" * 40, opaque(body_bytes, "0" * 64, engine_tokens=16), HashScheme(CHAIN, "0", 16, nbytes=HASH)
    )


def slot_bytes(body_bytes: int) -> int:
    return pad(HEADER_BYTES + body_bytes, SLOT_ALIGN)


def arena_for(nblocks: int, body_bytes: int) -> int:
    """Bytes of an arena that holds this many blocks, and hardly more."""
    slot = slot_bytes(body_bytes)
    a_slab = -(-nblocks // MIN_SLABS)
    if a_slab * slot < SLAB_BYTES:
        return max(MIN_ARENA, MIN_SLABS * a_slab * slot)
    return -(-nblocks // (SLAB_BYTES // slot)) * SLAB_BYTES


@dataclass(frozen=True, slots=True)
class Calls:
    """Frame sizes of the real calls for one batch."""

    reserve: Frames
    seal: Frames
    lease: Frames
    release: Frames


class Live:
    """A daemon with an arena of this size, all of it backed by memory, and a client with one namespace. A context
    manager."""

    def __init__(self, arena_bytes: int, body_bytes: int, arguments: Sequence[str] = ()) -> None:
        """`arguments` are more of the daemon's."""
        self.arena_bytes, self.body_bytes, self.arguments = arena_bytes, body_bytes, arguments
        slabs = Slabs(arena_bytes)
        self.capacity = slabs.count * (slabs.slab_bytes // slot_bytes(body_bytes))  # blocks

    def __enter__(self) -> Live:
        with ExitStack() as stack:
            self.path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-"))) / "kvtier.sock"
            arguments = [
                "-m",
                "kvtier.server",
                "--config",
                os.devnull,
                "--socket",
                str(self.path),
                "--arena-bytes",
                str(self.arena_bytes),
            ]
            arguments += self.arguments
            self.pid = stack.enter_context(Child(arguments)).pid
            self.client = stack.enter_context(Client(f"unix:{self.path}"))
            self.namespace = self.client.register(description(self.body_bytes))
            self._wait_backed(300.0)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _wait_backed(self, deadline: float) -> None:
        """Until daemon and client have touched the whole arena."""
        end = now() + deadline
        while (status := self.status())["arena_ready_bytes"] < status["arena_bytes"] or any(
            t.name == "kvtier-populate" for t in threading.enumerate()
        ):
            if now() > end:
                raise RuntimeError(f"the arena was not backed by memory within {deadline:.0f} s: {status}")
            time.sleep(0.05)

    def status(self) -> dict[str, Any]:
        return self.client.status(deadline=DEADLINE)

    def raw(self) -> Raw:
        """One more socket of the client's session; closed with this context."""
        return self._stack.enter_context(closing(Raw(self)))

    @property
    def options(self) -> Options:
        """Those of the client's sockets."""
        with closing(Raw(self)) as raw:
            return Options.of(raw.sock)

    # -- what the store knows

    def fill(self, n: int) -> bytes:
        """Seals `n` fresh blocks, bodies unwritten. Returns their hashes."""
        hashes = fresh(n)
        with self.client.fill(self.namespace, hashes, deadline=DEADLINE) as slots:
            pass
        assert slots.sealed == n, f"{slots.sealed} of {n} blocks were sealed: {slots.reason}"
        return hashes

    def fill_up(self, step: int = 500) -> list[bytes]:
        """Fresh blocks until nothing is free, `step` a call: afterwards every reserve evicts. Returns the hashes of
        each whole call."""
        calls, rest = divmod(self.capacity - self.status()["known_blocks"], step)
        filled = []
        with progress("filling the store", calls) as tick:
            for _ in range(calls):
                filled.append(self.fill(step))
                tick()
        self.fill(rest)
        return filled

    # -- what is timed

    def getter(self, *batches: bytes) -> Callable[[], None]:
        """Lease, views, release: of the next of these batches each time."""
        client, namespace, turn = self.client, self.namespace, cycle(batches)

        def get() -> None:
            with client.lease(namespace, next(turn), deadline=DEADLINE) as blocks:
                views = list(blocks)
            assert len(views) == BATCH, f"{len(views)} of {BATCH} blocks: {blocks.reason}"

        return get

    def raw_getter(self, hashes: bytes) -> Callable[[], None]:
        """The same without the client library: two calls on a socket of the session, and slices of the mapping."""
        raw, nbytes = self.raw(), self.body_bytes
        memory = raw.attachment.memory

        def get() -> None:
            keys = raw.keys(hashes)
            raw.send(Verb.LEASE, keys)
            offsets = pb.Slots.FromString(raw.answer()).offset
            views = [memory[offset + HEADER_BYTES : offset + HEADER_BYTES + nbytes] for offset in offsets]
            raw.send(Verb.RELEASE, pb.Held(id=keys.id))
            raw.answer()
            assert len(views) == BATCH

        return get

    def putter(self) -> Callable[[], None]:
        """Reserve and seal of a batch of fresh blocks."""

        def put() -> None:
            self.fill(BATCH)

        return put

    def lookups(self, runs: Sequence[bytes]) -> Callable[[], None]:
        """Lookup of the next of these runs each time; every block of it is known."""
        client, namespace, turn = self.client, self.namespace, cycle(runs)

        def look() -> None:
            hashes = next(turn)
            known = client.lookup(namespace, hashes, deadline=DEADLINE)
            assert known == len(hashes) // HASH, f"{known} of {len(hashes) // HASH} blocks known: {known.reason}"

        return look

    def timed_put(self) -> tuple[float, float]:
        """Seconds of the reserve and of the seal of one batch of fresh blocks."""
        slots = self.client.fill(self.namespace, fresh(), deadline=DEADLINE)
        start = now()
        slots.__enter__()
        middle = now()
        slots.__exit__(None, None, None)
        end = now()
        assert slots.sealed == BATCH, f"{slots.sealed} of {BATCH} blocks were sealed: {slots.reason}"
        return middle - start, end - middle


class Raw:
    """A socket of a live client's session, below the client library. What is sent can be answered later. Not
    thread-safe."""

    def __init__(self, live: Live) -> None:
        self.attachment = live.client._connection.attach(DEADLINE)
        self._socket = UnixSocket(
            str(live.path), pb.HelloRequest(protocol=1, session=self.attachment.session), DEADLINE
        )
        self.sock = self._socket.sock
        self._buffer = memoryview(bytearray(HEADER.size + MAX_BODY))
        self.block_bytes = live.namespace.extents().block_bytes
        self.send(Verb.REGISTER, pb.RegisterRequest(description=live.namespace.canonical))
        self._handle = pb.RegisterReply.FromString(self.answer()).handle

    def keys(self, hashes: bytes, reserve: bool = False) -> pb.Keys:
        """A lease request, or a reserve request, with a fresh id."""
        size = self.block_bytes if reserve else 0
        return pb.Keys(
            handle=self._handle, layer_hi=1, head_hi=1, id=next(self.attachment.ids), hashes=hashes, nbytes=size
        )

    def send(self, verb: Verb, message: Message) -> None:
        self.sock.sendall(pack(verb, 0, int(DEADLINE * 1000), message.SerializeToString()))

    def answer(self) -> bytes:
        status, _, _, body = receive(self.sock, self._buffer, DEADLINE)
        assert status == 0, bytes(body)
        return bytes(body)

    def close(self) -> None:
        self._socket.close()


def measure_calls(live: Live) -> Calls:
    """Frame sizes of one real put and one real get of a batch, each call with its answer."""
    hashes = fresh()
    with closing(Raw(live)) as raw:

        def measure(verb: Verb, message: Message) -> Frames:
            raw.send(verb, message)
            return Frames(message.ByteSize(), len(raw.answer()))

        keys = raw.keys(hashes, reserve=True)
        writing = measure(Verb.RESERVE, keys), measure(Verb.SEAL, pb.Held(id=keys.id))
        keys = raw.keys(hashes)
        return Calls(*writing, measure(Verb.LEASE, keys), measure(Verb.RELEASE, pb.Held(id=keys.id)))


def leases(client: Client, ns: RegisteredNamespace, hashes: bytes, seconds: int, what: str) -> list[float]:
    """Seconds of each lease of all these blocks, made one after the other for so long. Every block must be in
    memory."""
    calls: list[float] = []
    with progress(what, seconds) as tick:
        for _ in range(seconds):
            end = now() + 1.0
            while (start := now()) < end:
                with client.lease(ns, hashes, deadline=DEADLINE) as blocks:
                    views = list(blocks)
                assert len(views) == len(hashes) // ns.hash_bytes, blocks.reason
                calls.append(now() - start)
            tick()
    return calls


class Peer(Child):
    """Another client process (`bench.peers`)."""

    def __init__(self, what: str, socket: Path, hashes: bytes) -> None:
        super().__init__(["-m", "bench.peers", what, str(socket), hashes.hex()])
