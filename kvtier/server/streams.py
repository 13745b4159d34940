"""Put and get for callers who cannot map the arena: streams of the bytes themselves, in chunks, checked on both sides.

A put copies chunks into reserved slots, window by window, so that a long one stays below the caller's cap; a get
leases, streams and releases the same way. Framing is the transport's. Whatever ends a call early, nothing stays held.
The only copy made here is into slots: what a get yields is the slot itself, which the caller copies before the next
step. Belongs to the thread of its call.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

import numpy as np
import xxhash

from kvtier.errors import Deadline, Invalid, KvtierError, Lost
from kvtier.format.block import digest
from kvtier.format.identity import NO_CONTEXT
from kvtier.format.layout import HEADER_BYTES
from kvtier.protocol.limits import CHUNK
from kvtier.protocol.stops import PRESENT, Stop
from kvtier.protocol.v1 import kvtier_pb2 as pb
from kvtier.server.sessions import Session
from kvtier.server.verbs import Service, range_of
from kvtier.store.arena import Arena

_WINDOW = 32  # blocks held at once, at most

Pieces = Iterator[bytes | memoryview]
Items = Generator[pb.GetReply | memoryview | pb.GetTrailer, None, None]


def put(service: Service, session: Session, request: pb.PutRequest, chunks: Pieces, until: float) -> pb.PutReply:
    """Stores the bodies that `chunks` carries in order. The answer counts the leading blocks known now.

    Raises Invalid for a malformed call. `until` is a time.monotonic(). Bodies of blocks that are present are read and
    dropped. Any other fault ends the put with a reason.
    """
    asked = request.keys
    namespace, keys, hashes = service.new_blocks_of(session, asked)
    n, resolved, context = len(keys), range_of(asked), asked.context or NO_CONTEXT
    extents = namespace.extents(resolved)
    if len(request.checksum) != n:
        raise Invalid(f"{len(request.checksum)} checksums for {n} hashes")
    known = 0
    window = _window(service, extents.slot_bytes)
    for id_, first in enumerate(range(0, n, window), 1):
        part = slice(first, min(first + window, n))
        try:
            offsets = session.reserve(id_, namespace, resolved, context, keys[part], hashes[part])
            try:
                sums = _fill(service.store.arena, offsets, extents.body_bytes, request.checksum[part], chunks, until)
                known += session.seal(id_, (), sums)
            finally:
                session.abort(id_, ())
        except Invalid:
            raise
        except KvtierError as error:
            return pb.PutReply(known=known, reason=str(error), error=error.code)
    return pb.PutReply(known=known)


def get(service: Service, session: Session, request: pb.Keys, until: float) -> Items:
    """A GetReply, the bytes of the leading known blocks in pieces of at most CHUNK, a GetTrailer.

    Raises Invalid, Stale, Deadline. A piece is valid until the next one is asked for. Closing the generator early
    releases what it holds.
    """
    namespace, keys = service.blocks_of(session, request)
    extents = namespace.extents(range_of(request))
    nbytes, window = extents.block_bytes, _window(service, extents.slot_bytes)
    memory = service.store.arena.memory
    now = time.monotonic()
    # Without `wait_ms` a fifth of the time is left to send what has come up by then.
    cold_until = min(until, now + request.wait_ms / 1000) if request.wait_ms else now + 0.8 * (until - now)
    yield pb.GetReply(nbytes=nbytes)
    sums: list[int] = []
    stop = int(Stop.END)
    for id_, first in enumerate(range(0, len(keys), window), 1):
        part = keys[first : first + window]
        if service.tiering is not None:
            # The next window comes up while this one is sent.
            service.tiering.promoter.start(keys[first : first + 2 * window], namespace, extents)
            service.tiering.bring_up(part, namespace, extents, cold_until)
        offsets, stop = session.lease(id_, part)
        try:
            for i, offset in enumerate(offsets):
                if time.monotonic() > until:
                    raise Deadline("the get ran out of time")
                view = memory[offset : offset + nbytes]
                sums.append(session.checksum(id_, i, view))
                for at in range(0, nbytes, CHUNK):
                    yield view[at : at + CHUNK]
        finally:
            session.release(id_, ())
        if stop != Stop.END:
            break
    yield pb.GetTrailer(checksum=sums, stop=stop)  # type: ignore[arg-type]


def _window(service: Service, slot_bytes: int) -> int:
    """Blocks of one hold: at most a quarter of what a session may hold."""
    return max(1, min(_WINDOW, service.store.session_cap // 4 // slot_bytes))


def _fill(
    arena: Arena, offsets: list[int], nbytes: int, expected: list[int], chunks: Pieces, until: float
) -> list[int]:
    """Reads one body per offset into its slot (or past a PRESENT one).

    Returns the digests of the blocks, 0 for those that are present. Raises Lost for a body that fails its checksum,
    Invalid for one that ends early or runs over, Deadline.
    """
    array, sums = arena.array, []
    for offset, checksum in zip(offsets, expected, strict=True):
        hasher = xxhash.xxh3_64()
        have = 0
        while have < nbytes:
            if time.monotonic() > until:
                raise Deadline("the put ran out of time")
            chunk = next(chunks, None)
            if not chunk or have + len(chunk) > nbytes:
                came = have + len(chunk or b"")
                raise Invalid(f"a body of this range has {nbytes} bytes, in chunks of its own; {came} came")
            hasher.update(chunk)
            if offset != PRESENT:
                start = offset + HEADER_BYTES + have
                np.copyto(array[start : start + len(chunk)], np.frombuffer(chunk, np.uint8))
            have += len(chunk)
        if hasher.intdigest() != checksum:
            raise Lost("a body does not match its checksum: send it again")
        end = offset + HEADER_BYTES + nbytes
        sums.append(0 if offset == PRESENT else digest(arena.memory[offset:end]))
    return sums
