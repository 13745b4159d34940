"""The unix socket as a client's transport: blocks by reference in the mapped arena, copies at the speed of memory.

Handles are registered where a call needs one, and again after a restart of the daemon. The session, its sockets and the
mapping are `connection`'s business. Thread-safe; a lease or fill belongs to one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvtier.client import answers
from kvtier.client.answers import Answer, Asked, Bodies, Body, Fill, Lease, RegisteredNamespace, Registration, fault
from kvtier.client.batch import Batch
from kvtier.client.connection import Attachment, Connection
from kvtier.errors import Invalid, KvtierError
from kvtier.format.layout import HEADER_BYTES
from kvtier.protocol.frames import Verb
from kvtier.protocol.limits import CONTROL_DEADLINE
from kvtier.protocol.stops import PRESENT, Ending
from kvtier.protocol.v1 import kvtier_pb2 as pb

T = TypeVar("T")
FETCH_AHEAD = 64  # cold blocks that a get has on their way at once
COLD_AGAIN, COLD_LONGEST = 0.001, 0.05  # seconds until a get looks again whether they have come: at first, and at most


class UnixTransport:
    """Calls over the unix socket at `path`.

    Raises Unmappable (from `attach`) where the daemon does not share its memory with this process.
    """

    def __init__(self, path: str) -> None:
        self.connection = Connection(path)
        self._registrations = answers.Registrations()

    def attach(self, deadline: float) -> None:
        """Connects now if need be. Raises KvtierError."""
        self.connection.attach(deadline)

    def close(self) -> None:
        """Ends the session. Open leases stay valid to read until they exit; open fills are lost."""
        self.connection.close()

    def call(
        self,
        ns: RegisteredNamespace | None,
        verb: int,
        request: Message,
        deadline: float,
        attachment: Attachment | None = None,
    ) -> bytes:
        """See Transport.call; registered once more if the daemon has forgotten the namespace."""
        until = time.monotonic() + deadline
        attachment = attachment or self.connection.attach(deadline)

        def once(known: Registration | None = None) -> bytes:
            if known is not None:
                request.handle = known.handle  # type: ignore[attr-defined]
            return self.connection.call(attachment, verb, request.SerializeToString(), _left(until, deadline))

        if ns is None:
            return once()
        return self._registrations.within(ns, self._asking(attachment, until, deadline), once, attachment.boot)

    def lease(self, asked: Asked, deadline: float | None) -> Lease:
        return MappedLease(self, asked, CONTROL_DEADLINE if deadline is None else deadline)

    def fill(self, asked: Asked, deadline: float | None) -> Fill:
        return MappedFill(self, asked, CONTROL_DEADLINE if deadline is None else deadline)

    def get(self, asked: Asked, deadline: float, into: Sequence[Body] | None = None) -> Bodies:
        """Taken in pieces, so that the session's cap is never in the way; what is cold is fetched and waited for."""
        until, pause, bodies = time.monotonic() + deadline, COLD_AGAIN, Bodies()
        while asked:
            left = _left(until, deadline)
            batch = Batch(asked, left)
            try:
                answers.in_time(deadline)
                stop = self._within(asked.ns, left, partial(batch.read, self.connection, bodies=bodies, into=into))
            except KvtierError as error:
                bodies.ending = fault(error)
                return bodies
            bodies.ending = Ending.at(stop)
            if batch.done == len(asked):
                break
            asked = asked.cut(batch.done, len(asked))
            if batch.done and stop == pb.CAP:
                continue
            pause = COLD_AGAIN if batch.done else min(COLD_LONGEST, 2 * pause)
            if stop != pb.COLD or time.monotonic() + pause > until or not self._fetch(asked, left, bodies):
                return bodies
            time.sleep(pause)
        return bodies

    def _fetch(self, asked: Asked, deadline: float, bodies: Bodies) -> bool:
        """Starts bringing up the next cold blocks, as many as the arena holds easily: more would push each other out.

        Whether it was asked.
        """
        try:
            arena = self.connection.attach(deadline).mapping.nbytes
            n = max(1, min(FETCH_AHEAD, arena // 16 // asked.extents.slot_bytes))
            self.call(asked.ns, Verb.PREFETCH, asked.cut(0, n).keys(), deadline)
        except KvtierError as error:
            bodies.ending = Ending.by(error)
            return False
        return True

    def put(self, asked: Asked, bodies: Sequence[Any], deadline: float) -> Answer:
        """Split below the session's cap."""
        batch = Batch(asked, deadline)
        try:
            answers.in_time(deadline)
            if asked:
                self._within(asked.ns, deadline, partial(batch.write, self.connection, bodies=bodies))
        except KvtierError as error:
            return Answer(batch.done, fault(error))
        return Answer(batch.done)

    def _within(self, ns: RegisteredNamespace, deadline: float, call: Callable[[Attachment, int], T]) -> T:
        """A call on the current attachment with the namespace's handle, once more if the daemon has forgotten it.

        Raises KvtierError of any kind.
        """
        until = time.monotonic() + deadline
        attachment = self.connection.attach(deadline)
        self.connection.use(attachment)
        try:
            asking = self._asking(attachment, until, deadline)
            return self._registrations.within(ns, asking, lambda known: call(attachment, known.handle), attachment.boot)
        finally:
            self.connection.unuse(attachment)

    def _asking(self, attachment: Attachment, until: float, deadline: float) -> Callable[[bytes], bytes]:
        """Registers a description within what is left of the deadline."""
        return lambda raw: self.connection.call(attachment, Verb.REGISTER, raw, _left(until, deadline))


def _left(until: float, deadline: float) -> float:
    """Seconds until `until`. A deadline that stays about the same stays equal: that spares two system calls."""
    left = until - time.monotonic()
    return deadline if left >= 0.99 * deadline else max(0.001, left)


class MappedLease(Lease):
    """Views of the slots themselves, pinned until exit."""

    def __init__(self, transport: UnixTransport, asked: Asked, deadline: float) -> None:
        self._transport, self._asked, self._deadline = transport, asked, deadline
        self._ids: list[int] = []
        self._attachment: Attachment | None = None
        self._memory: Body | None = None
        self._offsets: list[int] = []

    def __enter__(self) -> MappedLease:
        asked, connection = self._asked, self._transport.connection
        self._body_bytes = asked.extents.body_bytes
        try:
            answers.in_time(self._deadline)
            attachment = connection.attach(self._deadline)
            connection.use(attachment)
            self._attachment = attachment
            memory = attachment.memory.view()
            memory.flags.writeable = False
            self._memory = memory
            for part in asked.parts():
                id_ = next(attachment.ids)
                self._ids.append(id_)
                raw = self._transport.call(asked.ns, Verb.LEASE, part.keys(id=id_), self._deadline, attachment)
                reply = pb.Slots.FromString(raw)
                self._offsets += reply.offset
                self.ending = Ending.at(reply.stop)
                if reply.stop:
                    break
        except BaseException as error:
            if not isinstance(error, KvtierError) or isinstance(error, Invalid):
                self.__exit__()
                raise
            self.ending = Ending.by(error)
        return self

    def __exit__(self, *_: object) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        self._memory = None
        connection = self._transport.connection
        # the tail first, so that it is older than its head and goes first
        connection.release(attachment, self._ids[::-1], min(CONTROL_DEADLINE, self._deadline))
        connection.unuse(attachment)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self._offsets)))]
        start = self._offsets[index] + HEADER_BYTES
        return self._mapped()[start : start + self._body_bytes]

    def __iter__(self) -> Iterator[Body]:
        if not self._offsets:  # without an answer there is no mapping
            return iter(())
        memory, nbytes = self._mapped(), self._body_bytes
        return iter([memory[at : at + nbytes] for at in [offset + HEADER_BYTES for offset in self._offsets]])

    def _mapped(self) -> Body:
        if self._memory is None:
            raise Invalid("the lease has ended, and its views are void: read inside the `with`")
        return self._memory


class MappedFill(Fill):
    """Views of the reserved slots themselves."""

    def __init__(self, transport: UnixTransport, asked: Asked, deadline: float) -> None:
        self._transport, self._asked, self._deadline = transport, asked, deadline
        self._ids: list[tuple[int, int]] = []
        self._attachment: Attachment | None = None
        self._offsets: list[int] | None = None
        super().__init__(len(asked))

    def __enter__(self) -> MappedFill:
        asked, connection = self._asked, self._transport.connection
        nbytes, self._body_bytes = asked.extents.block_bytes, asked.extents.body_bytes
        offsets: list[int] = []
        try:
            answers.in_time(self._deadline)
            attachment = connection.attach(self._deadline)
            connection.use(attachment)
            self._attachment = attachment
            for part in asked.parts():
                id_ = next(attachment.ids)
                self._ids.append((id_, len(part)))
                request = part.keys(id=id_, nbytes=nbytes)
                raw = self._transport.call(asked.ns, Verb.RESERVE, request, self._deadline, attachment)
                offsets += pb.Slots.FromString(raw).offset
            self._offsets = offsets
        except BaseException as error:
            self._abort()
            if not isinstance(error, KvtierError) or isinstance(error, Invalid):
                raise
            self.ending = Ending.by(error)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        attachment = self._attachment
        if attachment is None:
            return
        if kind is not None or self._offsets is None:
            self._abort()
            return
        connection = self._transport.connection
        try:
            for id_, n in self._ids:
                request = pb.Held(id=id_)
                reply = connection.call(attachment, Verb.SEAL, request.SerializeToString(), self._deadline)
                known = pb.Count.FromString(reply).n
                self.sealed += known
                if known < n:
                    self.ending = answers.DROPPED
                    self._abort()  # what follows is of no use without them
                    return
        except BaseException as failure:
            self._abort()
            if not isinstance(failure, KvtierError):
                raise
            self.ending = Ending.by(failure)
            return
        self._attachment = None
        connection.unuse(attachment)

    def _body(self, index: int) -> Body | None:
        offsets, attachment = self._offsets, self._attachment
        if offsets is None or attachment is None or offsets[index] == PRESENT:
            return None
        start = offsets[index] + HEADER_BYTES
        return attachment.memory[start : start + self._body_bytes]

    def _abort(self) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        connection = self._transport.connection
        connection.finish(attachment, Verb.ABORT, [id_ for id_, _ in self._ids], min(CONTROL_DEADLINE, self._deadline))
        connection.unuse(attachment)
