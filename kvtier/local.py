"""The lane as a client's transport: blocks by reference in the mapped arena, copies at the speed of memory.

Handles are registered where a call needs one, and again after a restart of the daemon. The session, its sockets and the mapping are
`connection`'s business. Thread-safe; a lease or fill belongs to one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from google.protobuf.message import Message

from kvtier.calls import (
    CONTROL,
    KEYS_PER_CALL,
    PRESENT,
    STOPS,
    Answer,
    Bodies,
    Body,
    Fill,
    Hashes,
    Lease,
    Registered,
    context_field,
    count,
    join,
    range_fields,
    split,
)
from kvtier.connection import Attachment, Connection
from kvtier.errors import Invalid, KvtierError, Stale, Unavailable
from kvtier.frames import Verb
from kvtier.layout import HEADER_BYTES, Range
from kvtier.v1 import kvtier_pb2 as pb

FETCH_AHEAD = 64  # cold blocks that a get has on their way at once
COLD_AGAIN, COLD_LONGEST = 0.001, 0.05  # seconds until a get looks again whether they have come: at first, and at most


class Local:
    """Calls over the lane at `path`. Raises Unmappable (from `attach`) where the daemon does not share its memory with this process."""

    def __init__(self, path: str) -> None:
        self.connection = Connection(path)

    def attach(self, deadline: float) -> None:
        """Connects now if need be. Raises KvtierError."""
        self.connection.attach(deadline)

    def close(self) -> None:
        """Ends the session. Open leases stay valid to read until they exit; open fills are lost."""
        self.connection.close()

    def call(self, ns: Registered | None, verb: int, request: Message, deadline: float, attachment: Attachment | None = None) -> bytes:
        """One call; within a namespace its handle is filled in, registered where need be, once more if the daemon has forgotten it."""
        until = time.monotonic() + deadline
        attachment = attachment or self.connection.attach(deadline)
        if ns is not None:
            request.handle = self._handle(ns, attachment, deadline)  # type: ignore[attr-defined]
        left = until - time.monotonic()
        if left < 0.99 * deadline:  # a deadline that stays the same spares the socket two system calls
            deadline = max(0.001, left)
        try:
            return self.connection.call(attachment, verb, request.SerializeToString(), deadline)
        except Stale:
            if ns is None:
                raise
            ns._handle = None
            request.handle = self._handle(ns, attachment, deadline)  # type: ignore[attr-defined]
            return self.connection.call(attachment, verb, request.SerializeToString(), deadline)

    def lease(self, ns: Registered, hashes: Hashes, range_: Range, context: bytes, deadline: float | None) -> Lease:
        """See Client.lease."""
        return MappedLease(self, ns, hashes, range_, context, CONTROL if deadline is None else deadline)

    def fill(self, ns: Registered, hashes: Hashes, range_: Range, context: bytes, deadline: float | None) -> Fill:
        """See Client.fill."""
        return MappedFill(self, ns, hashes, range_, context, CONTROL if deadline is None else deadline)

    def get(self, ns: Registered, hashes: Hashes, range_: Range, context: bytes, deadline: float) -> Bodies:
        """See Client.get. Taken in pieces, so that the session's cap is never in the way; what is cold is fetched and waited for."""
        until, pause = time.monotonic() + deadline, COLD_AGAIN
        bodies = Bodies()
        for part in split(ns, hashes):
            raw = part
            while raw:
                left = max(0.001, until - time.monotonic())
                with self.lease(ns, raw, range_, context, left) as blocks:
                    for view in blocks:
                        body = np.empty(view.size, np.uint8)
                        np.copyto(body, view)
                        bodies.append(body)
                    bodies.reason = blocks.reason
                raw = raw[len(blocks) * ns.hash_bytes :]
                if not raw or (blocks and blocks.stop == pb.CAP):
                    continue
                pause = COLD_AGAIN if blocks else min(COLD_LONGEST, 2 * pause)
                if blocks.stop != pb.COLD or time.monotonic() + pause > until or not self._fetch(ns, raw, range_, context, left, bodies):
                    return bodies
                time.sleep(pause)
        return bodies

    def _fetch(self, ns: Registered, raw: bytes, range_: Range, context: bytes, deadline: float, bodies: Bodies) -> bool:
        """Starts bringing up the next cold blocks, as many as the arena holds easily: more would push each other out. Whether it was asked."""
        try:
            arena = self.connection.attach(deadline).mapping.nbytes
            n = max(1, min(FETCH_AHEAD, arena // 16 // ns.extents(range_).slot_bytes))
            request = pb.Keys(context=context_field(context), hashes=raw[: n * ns.hash_bytes], **range_fields(ns, range_))
            self.call(ns, Verb.PREFETCH, request, deadline)
        except KvtierError as error:
            bodies.reason = str(error)
            return False
        return True

    def put(self, ns: Registered, hashes: Hashes, bodies: Sequence[Any], range_: Range, context: bytes, deadline: float) -> Answer:
        """See Client.put. Split below the session's cap."""
        total, step, raw = len(bodies), ns.hash_bytes, join(ns, hashes)
        extents = ns.extents(range_)
        try:
            arena = self.connection.attach(deadline).mapping.nbytes
        except KvtierError as error:
            return Answer(0, str(error))
        # a quarter of what a session may hold, so that other threads of it find room
        per_call = max(1, min(KEYS_PER_CALL, arena // 16 // extents.slot_bytes))
        done = 0
        while done < total:
            n = min(per_call, total - done)
            with self.fill(ns, raw[done * step : (done + n) * step], range_, context, deadline) as slots:
                for slot, body in zip(slots, bodies[done : done + n], strict=True):
                    if slot is not None:
                        np.copyto(slot, np.frombuffer(body, np.uint8))
            if slots.sealed < n:
                return Answer(done + slots.sealed, slots.reason)
            done += n
        return Answer(done)

    def _handle(self, ns: Registered, attachment: Attachment, deadline: float) -> int:
        known = ns._handle
        if known is not None and known[0] == attachment.boot:
            return known[1]
        request = pb.RegisterRequest(description=ns.canonical)
        reply = pb.RegisterReply.FromString(self.connection.call(attachment, Verb.REGISTER, request.SerializeToString(), deadline))
        if reply.description != ns.digest:
            raise Unavailable("the daemon computes another digest for this description: client and daemon differ in version")
        ns._handle = (attachment.boot, reply.handle)
        return reply.handle


class MappedLease(Lease):
    """Views of the slots themselves, pinned until exit."""

    def __init__(self, local: Local, ns: Registered, hashes: Hashes, range_: Range, context: bytes, deadline: float) -> None:
        self._local, self._ns = local, ns
        self._parts = split(ns, hashes)
        self._range, self._context, self._deadline = range_, context_field(context), deadline
        self._ids: list[int] = []
        self._attachment: Attachment | None = None
        self._memory: Body | None = None
        self._offsets: list[int] = []
        self.reason = ""
        self.stop = 0

    def __enter__(self) -> MappedLease:
        ns, connection = self._ns, self._local.connection
        fields = range_fields(ns, self._range)
        self._body_bytes = ns.extents(self._range).body_bytes
        try:
            attachment = connection.attach(self._deadline)
            connection.use(attachment)
            self._attachment = attachment
            memory = attachment.memory.view()
            memory.flags.writeable = False
            self._memory = memory
            for part in self._parts:
                id_ = next(attachment.ids)
                self._ids.append(id_)
                request = pb.Keys(id=id_, context=self._context, hashes=part, **fields)
                reply = pb.Slots.FromString(self._local.call(ns, Verb.LEASE, request, self._deadline, attachment))
                self._offsets += reply.offset
                self.stop = reply.stop
                if self.stop:
                    self.reason = STOPS.get(self.stop, f"stopped ({self.stop})")
                    break
        except BaseException as error:
            if not isinstance(error, KvtierError) or isinstance(error, Invalid):
                self.__exit__(None, None, None)
                raise
            self.reason = str(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        self._memory = None
        connection = self._local.connection
        # the tail first, so that it is older than its head and goes first
        connection.finish(attachment, Verb.RELEASE, self._ids[::-1], min(CONTROL, self._deadline))
        connection.unuse(attachment)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self._offsets)))]
        start = self._offsets[index] + HEADER_BYTES
        return self._mapped()[start : start + self._body_bytes]

    def __iter__(self) -> Iterator[Body]:
        if not self._offsets:  # perhaps nobody answered: there is no mapping then
            return iter(())
        memory, nbytes = self._mapped(), self._body_bytes
        return iter([memory[at : at + nbytes] for at in [offset + HEADER_BYTES for offset in self._offsets]])

    def _mapped(self) -> Body:
        if self._memory is None:
            raise Invalid("the lease has ended, and its views are void: read inside the `with`")
        return self._memory


class MappedFill(Fill):
    """Views of the reserved slots themselves."""

    def __init__(self, local: Local, ns: Registered, hashes: Hashes, range_: Range, context: bytes, deadline: float) -> None:
        self._local, self._ns = local, ns
        self._parts = split(ns, hashes)
        self._range, self._context, self._deadline = range_, context_field(context), deadline
        self._ids: list[tuple[int, int]] = []
        self._attachment: Attachment | None = None
        self._offsets: list[int] | None = None
        self._total = count(ns, hashes)
        self.reason = ""
        self.sealed = 0

    def __enter__(self) -> MappedFill:
        ns, connection = self._ns, self._local.connection
        fields = range_fields(ns, self._range)
        extents = ns.extents(self._range)
        self._body_bytes = extents.body_bytes
        offsets: list[int] = []
        try:
            attachment = connection.attach(self._deadline)
            connection.use(attachment)
            self._attachment = attachment
            for part in self._parts:
                id_ = next(attachment.ids)
                self._ids.append((id_, len(part) // ns.hash_bytes))
                request = pb.Keys(id=id_, context=self._context, hashes=part, nbytes=extents.block_bytes, **fields)
                offsets += pb.Slots.FromString(self._local.call(ns, Verb.RESERVE, request, self._deadline, attachment)).offset
            self._offsets = offsets
        except BaseException as error:
            self._abort()
            if not isinstance(error, KvtierError) or isinstance(error, Invalid):
                raise
            self.reason = str(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        attachment = self._attachment
        if attachment is None:
            return
        if kind is not None or self._offsets is None:
            self._abort()
            return
        connection = self._local.connection
        try:
            for id_, n in self._ids:
                request = pb.Held(id=id_)
                reply = connection.call(attachment, Verb.SEAL, request.SerializeToString(), self._deadline)
                known = pb.Count.FromString(reply).n
                self.sealed += known
                if known < n:
                    self.reason = "some blocks were dropped before they were sealed"
                    self._abort()  # what follows is of no use without them
                    return
        except BaseException as failure:
            self._abort()
            if not isinstance(failure, KvtierError):
                raise
            self.reason = str(failure)
            return
        self._attachment = None
        connection.unuse(attachment)

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._total))]
        if not -self._total <= index < self._total:
            raise IndexError(index)
        offsets, attachment = self._offsets, self._attachment
        if offsets is None or attachment is None or offsets[index] == PRESENT:
            return None
        start = offsets[index] + HEADER_BYTES
        return attachment.memory[start : start + self._body_bytes]

    def _abort(self) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        connection = self._local.connection
        connection.finish(attachment, Verb.ABORT, [id_ for id_, _ in self._ids], min(CONTROL, self._deadline))
        connection.unuse(attachment)
