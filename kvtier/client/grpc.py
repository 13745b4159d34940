"""gRPC as a client's transport: the same calls from anywhere, bytes copied and checked.

A put asks first what is there and sends the rest; what a get brings is used only after its trailer's checksums and its
keys have been verified. A handle goes with the boot id of the daemon that gave it, so that a restarted daemon never
takes one for another. Thread-safe; a lease or fill belongs to one thread at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash
from google.protobuf.message import DecodeError, Message

from kvtier.client import answers
from kvtier.client.answers import Answer, Asked, Bodies, Body, Fill, Lease, RegisteredNamespace, Registration, fault
from kvtier.client.grpc_channel import GrpcChannel
from kvtier.errors import Invalid, KvtierError, Lost, Unavailable
from kvtier.format.block import verify
from kvtier.format.identity import NO_CONTEXT, derive_keys
from kvtier.format.layout import HEADER_BYTES
from kvtier.protocol import rpc
from kvtier.protocol.frames import Verb
from kvtier.protocol.limits import CHUNK, CONTROL_DEADLINE, KEYS_PER_CALL, TRANSFER_DEADLINE
from kvtier.protocol.stops import Ending, Stop
from kvtier.protocol.v1 import kvtier_pb2 as pb

BYTES_PER_CALL = 64 * 2**20  # of one put or get: what is lost if it breaks off
MAX_FILL = 2**30  # bytes of one fill's private buffers

Block = npt.NDArray[np.uint8]
T = TypeVar("T")
log = logging.getLogger(__name__)


class GrpcTransport:
    """Calls over `channel`. `lost_blocks` counts what came and failed its check."""

    def __init__(self, channel: GrpcChannel) -> None:
        self.channel = channel
        self.lost_blocks = 0
        self._registrations = answers.Registrations()

    def close(self) -> None:
        """Closes the channel; calls under way fail."""
        self.channel.close()

    def call(self, ns: RegisteredNamespace | None, verb: int, request: Message, deadline: float) -> bytes:
        """See Transport.call; the boot id is filled in too."""
        if ns is None:
            return self.channel.unary(rpc.METHODS[verb], request.SerializeToString(), deadline)
        until = time.monotonic() + deadline
        return self._within(ns, until, partial(self._call, verb, request, until))

    def lease(self, asked: Asked, deadline: float | None) -> Lease:
        return CopiedLease(self, asked, TRANSFER_DEADLINE if deadline is None else deadline)

    def fill(self, asked: Asked, deadline: float | None) -> Fill:
        return CopiedFill(self, asked, deadline)

    def get(self, asked: Asked, deadline: float, into: Sequence[Body] | None = None) -> Bodies:
        """A long list takes several calls: what came before one that breaks is kept."""
        bodies = self._fetch(asked, deadline)
        if into is not None:
            for i, body in enumerate(bodies):
                np.copyto(into[i], body)
                bodies[i] = into[i]
        return bodies

    def put(self, asked: Asked, bodies: Sequence[Any], deadline: float) -> Answer:
        """Asks first what is there, and sends the rest."""
        until = time.monotonic() + deadline
        try:
            answers.in_time(deadline)
            missing = self.missing(asked, until)
        except KvtierError as error:
            return Answer(0, fault(error))
        return self.send(asked, bodies, missing, until)

    def missing(self, asked: Asked, until: float) -> list[int]:
        """Which of these blocks the daemon does not know, by index. Raises KvtierError of any kind."""
        out: list[int] = []
        first = 0
        for part in asked.parts():
            run = pb.Run(hashes=part.hashes, **answers.range_fields(part.ns, part.range_))
            request = pb.LookupRequest(context=part.context, bitmap=True, run=[run])
            reply = answers.parse(pb.LookupReply, self.call(part.ns, Verb.LOOKUP, request, _left(until)))
            n = len(part)
            if [len(bits) for bits in reply.bitmap] != [(n + 7) // 8]:
                raise Unavailable("the daemon's answer has no bitmap of this run")
            bits = int.from_bytes(reply.bitmap[0], "little")
            out += [first + i for i in range(n) if not bits >> i & 1]
            first += n
        return out

    def send(
        self, asked: Asked, bodies: Sequence[Any] | Mapping[int, Any], missing: Sequence[int], until: float
    ) -> Answer:
        """Puts the blocks with these indices; the others are there already.

        Returns how many leading blocks are known then.
        """
        raw, step, per_call = asked.hashes, asked.ns.hash_bytes, _per_call(asked)
        for at in range(0, len(missing), per_call):
            batch = missing[at : at + per_call]
            sent = replace(asked, hashes=b"".join(raw[i * step : (i + 1) * step] for i in batch))
            pieces = [memoryview(bodies[i]).cast("B") for i in batch]
            try:
                reply = self._within(asked.ns, until, partial(self._put, sent, pieces, until))
            except KvtierError as error:
                return Answer(missing[at], fault(error))
            if reply.known < len(batch):
                why = answers.DROPPED
                if reply.reason:  # a daemon of the last version says the reason in words alone
                    why = Ending(error=reply.error or Unavailable.code, reason=reply.reason)
                return Answer(missing[at + reply.known], why)
        return Answer(len(asked))

    # -- inside

    def _within(self, ns: RegisteredNamespace, until: float, once: Callable[[Registration], T]) -> T:
        """Runs `once` under this namespace's registration, and once more if the daemon has forgotten that."""
        method = rpc.METHODS[Verb.REGISTER]
        return self._registrations.within(ns, lambda raw: self.channel.unary(method, raw, _left(until)), once)

    def _call(self, verb: int, request: Any, until: float, known: Registration) -> bytes:
        request.handle, request.boot = known.handle, known.boot
        return self.channel.unary(rpc.METHODS[verb], request.SerializeToString(), _left(until))

    def _put(self, asked: Asked, pieces: list[memoryview], until: float, known: Registration) -> pb.PutReply:
        keys = asked.keys(handle=known.handle, boot=known.boot, nbytes=asked.extents.block_bytes)
        request = pb.PutRequest(keys=keys, checksum=map(xxhash.xxh3_64_intdigest, pieces))

        def messages() -> Iterator[bytes]:
            yield rpc.message_chunk(request)
            for piece in pieces:
                for at in range(0, len(piece), CHUNK):
                    yield rpc.data_chunk(piece[at : at + CHUNK])

        reply = answers.parse(pb.PutReply, self.channel.upload(messages(), _left(until)))
        if reply.known > len(pieces):
            raise Unavailable(f"the daemon answers that it stored {reply.known} blocks of {len(pieces)}")
        return reply

    def _fetch(self, asked: Asked, deadline: float) -> Bodies:
        """`get` into fresh memory."""
        until, bodies = time.monotonic() + deadline, Bodies()
        try:
            answers.in_time(deadline)
            for part in asked.parts(_per_call(asked)):
                while part:
                    blocks, bodies.ending = self._within(asked.ns, until, partial(self._get, part, until))
                    bodies += [block[HEADER_BYTES:] for block in blocks]
                    part = part.cut(len(blocks), len(part))
                    if bodies.error or not blocks or bodies.stop not in (Stop.END, Stop.CAP):
                        return bodies
        except KvtierError as error:
            bodies.ending = fault(error)
        return bodies

    def _get(self, asked: Asked, until: float, known: Registration) -> tuple[list[Block], Ending]:
        """One call: (the blocks that passed their check, why there are not more)."""
        left = _left(until)
        request = asked.keys(handle=known.handle, boot=known.boot, wait_ms=answers.waiting(left))
        with self.channel.download(request.SerializeToString(), left) as messages:
            blocks, trailer = _receive(messages, asked.extents.block_bytes, len(asked))
        resolved = asked.ns.resolve(asked.range_)[0]
        keys = derive_keys(known.namespace, resolved, asked.context or NO_CONTEXT, asked.hashes, asked.ns.hash_bytes)
        for i, block in enumerate(blocks):
            try:
                verify(block.data, keys[i], trailer.checksum[i])
            except Lost as error:
                self.lost_blocks += 1
                log.warning("kvtier: a block from %s failed its check: %s", self.channel.target, error)
                return blocks[:i], Ending(error=Lost.code, reason=f"lost: {error}")
        return blocks, Ending.at(trailer.stop)


class CopiedLease(Lease):
    """Private copies, which arrive on entry and are held until exit."""

    def __init__(self, transport: GrpcTransport, asked: Asked, deadline: float) -> None:
        self._get = partial(transport.get, asked, deadline)
        self._bodies: list[Body] = []

    def __enter__(self) -> CopiedLease:
        bodies = self._get()
        for body in bodies:
            body.flags.writeable = False
        self._bodies, self.ending = bodies, bodies.ending
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies = []

    def __len__(self) -> int:
        return len(self._bodies)

    def __getitem__(self, index: Any) -> Any:
        return self._bodies[index]


class CopiedFill(Fill):
    """Private buffers, put on a clean exit."""

    def __init__(self, transport: GrpcTransport, asked: Asked, deadline: float | None) -> None:
        super().__init__(len(asked))
        self._transport, self._asked, self._deadline = transport, asked, deadline
        self._buffers: dict[int, Body] | None = None

    def __enter__(self) -> CopiedFill:
        nbytes = self._asked.extents.body_bytes
        deadline = CONTROL_DEADLINE if self._deadline is None else self._deadline
        try:
            answers.in_time(deadline)
            missing = self._transport.missing(self._asked, time.monotonic() + deadline)
            total = len(missing) * nbytes
            if total > MAX_FILL:
                raise Invalid(f"{total} bytes in one fill; over gRPC it may have {MAX_FILL}: send fewer")
            self._buffers = {i: np.empty(nbytes, np.uint8) for i in missing}
        except KvtierError as error:
            self.ending = fault(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        buffers, self._buffers = self._buffers, None
        if kind is not None or buffers is None:
            return
        until = time.monotonic() + (TRANSFER_DEADLINE if self._deadline is None else self._deadline)
        done = self._transport.send(self._asked, buffers, list(buffers), until)
        self.sealed, self.ending = int(done), done.ending

    def _body(self, index: int) -> Body | None:
        return self._buffers.get(index) if self._buffers is not None else None


def _receive(messages: Iterator[bytes], nbytes: int, most: int) -> tuple[list[Block], pb.GetTrailer]:
    """Blocks of `nbytes` and the trailer, out of the stream of a get. Raises Unavailable for one that is malformed."""
    blocks: list[Block] = []
    have, greeted = nbytes, False  # bytes of the last block
    try:
        for raw in messages:
            is_message, piece = rpc.open_chunk(raw)
            if not greeted:
                if not is_message or pb.GetReply.FromString(bytes(piece)).nbytes != nbytes:
                    break
                greeted = True
            elif is_message:
                trailer = pb.GetTrailer.FromString(bytes(piece))
                if have != nbytes or len(trailer.checksum) != len(blocks):
                    break
                return blocks, trailer
            else:
                if have == nbytes:
                    if len(blocks) == most:
                        break
                    blocks.append(np.empty(nbytes, np.uint8))
                    have = 0
                if have + len(piece) > nbytes:
                    break
                np.copyto(blocks[-1][have : have + len(piece)], np.frombuffer(piece, np.uint8))
                have += len(piece)
    except (Invalid, DecodeError):
        pass
    raise Unavailable("the daemon's stream of blocks is malformed, or ended before its trailer")


def _per_call(asked: Asked) -> int:
    return max(1, min(KEYS_PER_CALL, BYTES_PER_CALL // asked.extents.block_bytes))


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())
