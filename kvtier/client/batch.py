"""Many blocks copied into or out of the mapped arena.

While one piece is copied, the calls for its neighbours are on their way.

A call that is waited for costs a wake-up on each side, and after a large copy both sides find their caches cold. So the
next piece is asked for before this one is copied, and the last one's seal is read after it; a release needs no answer.
At most two pieces are held at a time. Not thread-safe: a batch is one call of one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

import numpy as np

from kvtier.client.answers import Asked, Bodies, Body
from kvtier.client.connection import Attachment, Connection
from kvtier.client.copier import copy
from kvtier.client.unix_socket import ErrorAnswer, UnixSocket
from kvtier.errors import Deadline, Full, Lost
from kvtier.format.layout import HEADER_BYTES
from kvtier.protocol.frames import Verb
from kvtier.protocol.limits import CONTROL_DEADLINE, KEYS_PER_CALL
from kvtier.protocol.stops import PRESENT
from kvtier.protocol.v1 import kvtier_pb2 as pb

# A piece takes longer to copy than its calls do. Two are enough: on two cores a put in two pieces gained 5 % over one
# at 1 MiB, more pieces gained nothing, and neither does a second one where all is 8 MiB.
PIECE_BYTES, PIECES = 8 << 20, 2


class Batch:
    """`done` of the blocks, from the front, are copied: a call that failed may be made again and goes on there."""

    def __init__(self, asked: Asked, deadline: float) -> None:
        self._asked, self._extents, self._total = asked, asked.extents, len(asked)
        self._deadline, self._until = deadline, monotonic() + deadline
        self.done = 0

    def read(
        self, connection: Connection, attachment: Attachment, handle: int, bodies: Bodies, into: Sequence[Body] | None
    ) -> int:
        """Appends copies of the warm leading part to `bodies`, made in `into` (at the same places) if given.

        Returns why it stopped. Raises KvtierError of any kind; nothing stays leased.
        """
        per_call, stop = self._per_call(attachment), 0
        opened: deque[int] = deque()

        def ask(first: int) -> None:
            opened.append(next(attachment.ids))
            sock.send(Verb.LEASE, self._keys(handle, opened[-1], first, per_call), self._deadline)

        try:
            with connection.several(attachment, self._deadline) as sock:
                ask(self.done)
                while opened:
                    reply = pb.Slots.FromString(sock.answer())
                    offsets, stop = reply.offset, reply.stop
                    following = self.done + len(offsets)
                    if not stop and following < self._total:
                        self._check_time()
                        ask(following)
                    if into is None:
                        targets: Sequence[Body] = [np.empty(self._extents.body_bytes, np.uint8) for _ in offsets]
                    else:
                        targets = into[len(bodies) : len(bodies) + len(offsets)]
                    copy(zip(targets, (self._body(attachment, offset) for offset in offsets), strict=True))
                    bodies += targets
                    self.done = following
                    sock.post(opened[0], self._deadline)
                    opened.popleft()
        except ErrorAnswer as answered:
            raise answered.error from None
        finally:
            if opened:
                connection.release(attachment, list(opened), CONTROL_DEADLINE)
        return stop

    def write(self, connection: Connection, attachment: Attachment, handle: int, bodies: Sequence[Any]) -> None:
        """Copies bodies in and seals them.

        Raises KvtierError of any kind, with `done` as far as it came; nothing stays reserved.
        """
        per_call, total = self._per_call(attachment), self._total
        opened: deque[int] = deque()
        sealing = 0  # blocks of the seal whose answer is on its way

        def ask(first: int) -> None:
            opened.append(next(attachment.ids))
            keys = self._keys(handle, opened[-1], first, per_call, self._extents.block_bytes)
            sock.send(Verb.RESERVE, keys, self._deadline)

        try:
            with connection.several(attachment, self._deadline) as sock:
                ask(self.done)
                for first in range(self.done, total, per_call):
                    try:
                        offsets = pb.Slots.FromString(sock.answer()).offset
                    except ErrorAnswer as refused:
                        self._sealed(sock, opened, sealing)  # the piece before it is stored and counted
                        if not sealing or not isinstance(refused.error, Full):
                            raise
                        sealing = 0  # and its slots are perhaps the room that was missing
                        opened.pop()
                        ask(first)
                        offsets = pb.Slots.FromString(sock.answer()).offset
                    if first + per_call < total:
                        self._check_time()
                        ask(first + per_call)
                    placed = zip(offsets, bodies[first : first + per_call], strict=True)
                    new = ((at, body) for at, body in placed if at != PRESENT)
                    copy((self._body(attachment, at), np.frombuffer(body, np.uint8)) for at, body in new)
                    self._sealed(sock, opened, sealing)
                    sock.send(Verb.SEAL, pb.Held(id=opened[0]).SerializeToString(), self._deadline)
                    sealing = len(offsets)
                self._sealed(sock, opened, sealing)
        except ErrorAnswer as answered:
            raise answered.error from None
        finally:
            if opened:
                connection.finish(attachment, Verb.ABORT, list(opened), CONTROL_DEADLINE)

    def _sealed(self, sock: UnixSocket, opened: deque[int], n: int) -> None:
        """Reads the answer to the seal of the oldest piece, of `n` blocks."""
        if not n:
            return
        known = pb.Count.FromString(sock.answer()).n
        self.done += known
        if known < n:
            raise Lost("some blocks were dropped before they were sealed")
        opened.popleft()

    def _per_call(self, attachment: Attachment) -> int:
        """Blocks of a piece: an eighth of what a session may hold at most, so that two at a time leave room for other
        threads of it.
        """
        slot = self._extents.slot_bytes
        wanted = max(PIECE_BYTES // slot, -(-self._total // PIECES))
        return max(1, min(KEYS_PER_CALL, attachment.mapping.nbytes // 32 // slot, wanted))

    def _keys(self, handle: int, id_: int, first: int, n: int, nbytes: int = 0) -> bytes:
        part = self._asked if first == 0 and n >= self._total else self._asked.cut(first, first + n)
        return part.keys(handle=handle, id=id_, nbytes=nbytes).SerializeToString()

    def _body(self, attachment: Attachment, offset: int) -> Body:
        start = offset + HEADER_BYTES
        return attachment.memory[start : start + self._extents.body_bytes]

    def _check_time(self) -> None:
        if monotonic() > self._until:
            raise Deadline(f"not done within {self._deadline:g} s")
