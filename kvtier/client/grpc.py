"""gRPC as a client's transport: the same calls from anywhere, bytes copied and checked.

A put asks first what is there and sends the rest; what a get brings is used only after its trailer's checksums and its
keys have been verified. A handle goes with the boot id of the daemon that gave it, so that a restarted daemon never
takes one for another. Thread-safe; a lease or fill belongs to one thread at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash
from google.protobuf.message import DecodeError, Message

from kvtier.client.answers import (
    DROPPED,
    Answer,
    Bodies,
    Body,
    Fill,
    Hashes,
    Lease,
    RegisteredNamespace,
    Registration,
    Registrations,
    context_field,
    count,
    in_time,
    join,
    parse,
    range_fields,
    split,
    waiting,
)
from kvtier.client.grpc_channel import GrpcChannel
from kvtier.errors import Invalid, KvtierError, Lost, Unavailable
from kvtier.format.block import verify
from kvtier.format.identity import derive_keys
from kvtier.format.layout import HEADER_BYTES, Range
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


@dataclass(frozen=True, slots=True)
class _Which:
    """Blocks of one call: keys, without handle and boot id."""

    ns: RegisteredNamespace
    range_: Range
    context: bytes
    hashes: bytes
    nbytes: int = 0

    def keys(self, known: Registration) -> pb.Keys:
        fields = range_fields(self.ns, self.range_)
        return pb.Keys(
            handle=known.handle,
            boot=known.boot,
            context=context_field(self.context),
            hashes=self.hashes,
            nbytes=self.nbytes,
            **fields,
        )


class GrpcTransport:
    """Calls over `channel`. `lost_blocks` counts what came and failed its check."""

    def __init__(self, channel: GrpcChannel) -> None:
        self.channel = channel
        self.lost_blocks = 0
        self._registrations = Registrations()

    def close(self) -> None:
        """Closes the channel; calls under way fail."""
        self.channel.close()

    def call(self, ns: RegisteredNamespace | None, verb: int, request: Message, deadline: float) -> bytes:
        """One call; within a namespace handle and boot id are filled in, registered where need be.

        Raises KvtierError of any kind.
        """
        if ns is None:
            return self.channel.unary(rpc.METHODS[verb], request.SerializeToString(), deadline)
        until = time.monotonic() + deadline
        return self._within(ns, until, partial(self._call, verb, request, until))

    def lease(
        self, ns: RegisteredNamespace, hashes: Hashes, range_: Range, context: bytes, deadline: float | None
    ) -> Lease:
        """See Client.lease."""
        return CopiedLease(self, ns, hashes, range_, context, TRANSFER_DEADLINE if deadline is None else deadline)

    def fill(
        self, ns: RegisteredNamespace, hashes: Hashes, range_: Range, context: bytes, deadline: float | None
    ) -> Fill:
        """See Client.fill."""
        return CopiedFill(self, ns, hashes, range_, context, deadline)

    def get(
        self,
        ns: RegisteredNamespace,
        hashes: Hashes,
        range_: Range,
        context: bytes,
        deadline: float,
        into: Sequence[Body] | None = None,
    ) -> Bodies:
        """See Client.get. A long list takes several calls: what came before one that breaks is kept."""
        bodies = self.fetch(ns, hashes, range_, context, deadline)
        if into is not None:
            for i, body in enumerate(bodies):
                np.copyto(into[i], body)
                bodies[i] = into[i]
        return bodies

    def fetch(self, ns: RegisteredNamespace, hashes: Hashes, range_: Range, context: bytes, deadline: float) -> Bodies:
        """`get` into fresh memory."""
        until, bodies = time.monotonic() + deadline, Bodies()
        try:
            in_time(deadline)
            for raw in split(ns, hashes, _per_call(ns, range_)):
                while raw:
                    which = _Which(ns, range_, context, raw)
                    blocks, bodies.ending = self._within(ns, until, partial(self._get, which, until))
                    bodies += [block[HEADER_BYTES:] for block in blocks]
                    raw = raw[len(blocks) * ns.hash_bytes :]
                    if bodies.error or not blocks or bodies.stop not in (Stop.END, Stop.CAP):
                        return bodies
        except Invalid:
            raise
        except KvtierError as error:
            bodies.ending = Ending.by(error)
        return bodies

    def put(
        self,
        ns: RegisteredNamespace,
        hashes: Hashes,
        bodies: Sequence[Any],
        range_: Range,
        context: bytes,
        deadline: float,
    ) -> Answer:
        """See Client.put. Asks first what is there, and sends the rest."""
        until = time.monotonic() + deadline
        try:
            in_time(deadline)
            missing = self.missing(ns, hashes, range_, context, until)
        except Invalid:
            raise
        except KvtierError as error:
            return Answer(0, Ending.by(error))
        return self.send(ns, hashes, bodies, missing, range_, context, until)

    def missing(
        self, ns: RegisteredNamespace, hashes: Hashes, range_: Range, context: bytes, until: float
    ) -> list[int]:
        """Which of these blocks the daemon does not know, by index. Raises KvtierError of any kind."""
        out: list[int] = []
        first = 0
        for part in split(ns, hashes):
            run = pb.Run(hashes=part, **range_fields(ns, range_))
            request = pb.LookupRequest(context=context_field(context), bitmap=True, run=[run])
            reply = parse(pb.LookupReply, self.call(ns, Verb.LOOKUP, request, _left(until)))
            n = len(part) // ns.hash_bytes
            if [len(bits) for bits in reply.bitmap] != [(n + 7) // 8]:
                raise Unavailable("the daemon's answer has no bitmap of this run")
            bits = int.from_bytes(reply.bitmap[0], "little")
            out += [first + i for i in range(n) if not bits >> i & 1]
            first += n
        return out

    def send(
        self,
        ns: RegisteredNamespace,
        hashes: Hashes,
        bodies: Sequence[Any] | Mapping[int, Any],
        missing: Sequence[int],
        range_: Range,
        context: bytes,
        until: float,
    ) -> Answer:
        """Puts the blocks with these indices; the others are there already.

        Returns how many leading blocks are known then.
        """
        raw, step = join(ns, hashes), ns.hash_bytes
        nbytes, per_call = ns.extents(range_).block_bytes, _per_call(ns, range_)
        for at in range(0, len(missing), per_call):
            batch = missing[at : at + per_call]
            which = _Which(ns, range_, context, b"".join(raw[i * step : (i + 1) * step] for i in batch), nbytes)
            pieces = [memoryview(bodies[i]).cast("B") for i in batch]
            try:
                reply = self._within(ns, until, partial(self._put, which, pieces, until))
            except Invalid:
                raise
            except KvtierError as error:
                return Answer(missing[at], Ending.by(error))
            if reply.known < len(batch):
                # A daemon of the last version says the reason in words alone.
                why = Ending(error=reply.error or Unavailable.code, reason=reply.reason) if reply.reason else DROPPED
                return Answer(missing[at + reply.known], why)
        return Answer(len(raw) // step)

    # -- inside

    def _within(self, ns: RegisteredNamespace, until: float, once: Callable[[Registration], T]) -> T:
        """Runs `once` under this namespace's registration, and once more if the daemon has forgotten that."""
        method = rpc.METHODS[Verb.REGISTER]
        return self._registrations.within(ns, lambda raw: self.channel.unary(method, raw, _left(until)), once)

    def _call(self, verb: int, request: Any, until: float, known: Registration) -> bytes:
        request.handle, request.boot = known.handle, known.boot
        return self.channel.unary(rpc.METHODS[verb], request.SerializeToString(), _left(until))

    def _put(self, which: _Which, pieces: list[memoryview], until: float, known: Registration) -> pb.PutReply:
        request = pb.PutRequest(keys=which.keys(known), checksum=map(xxhash.xxh3_64_intdigest, pieces))

        def messages() -> Iterator[bytes]:
            yield rpc.message_chunk(request)
            for piece in pieces:
                for at in range(0, len(piece), CHUNK):
                    yield rpc.data_chunk(piece[at : at + CHUNK])

        reply = parse(pb.PutReply, self.channel.upload(messages(), _left(until)))
        if reply.known > len(pieces):
            raise Unavailable(f"the daemon answers that it stored {reply.known} blocks of {len(pieces)}")
        return reply

    def _get(self, which: _Which, until: float, known: Registration) -> tuple[list[Block], Ending]:
        """One call: (the blocks that passed their check, why there are not more)."""
        nbytes = which.ns.extents(which.range_).block_bytes
        request, left = which.keys(known), _left(until)
        request.wait_ms = waiting(left)
        with self.channel.download(request.SerializeToString(), left) as messages:
            blocks, trailer = _receive(messages, nbytes, len(which.hashes) // which.ns.hash_bytes)
        resolved = which.ns.resolve(which.range_)[0]
        keys = derive_keys(known.namespace, resolved, which.context, which.hashes, which.ns.hash_bytes)
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

    def __init__(
        self,
        transport: GrpcTransport,
        ns: RegisteredNamespace,
        hashes: Hashes,
        range_: Range,
        context: bytes,
        deadline: float,
    ) -> None:
        context_field(context)
        join(ns, hashes)
        self._ask = partial(transport.fetch, ns, hashes, range_, context, deadline)
        self._bodies: list[Body] = []

    def __enter__(self) -> CopiedLease:
        bodies = self._ask()
        for body in bodies:
            body.flags.writeable = False
        self._bodies, self.ending = bodies, bodies.ending
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bodies = []

    def __len__(self) -> int:
        return len(self._bodies)

    def __getitem__(self, index: Any) -> Any:
        return self._bodies[index]


class CopiedFill(Fill):
    """Private buffers, put on a clean exit."""

    def __init__(
        self,
        transport: GrpcTransport,
        ns: RegisteredNamespace,
        hashes: Hashes,
        range_: Range,
        context: bytes,
        deadline: float | None,
    ) -> None:
        context_field(context)
        self._transport, self._ns, self._hashes = transport, ns, join(ns, hashes)
        self._range, self._context, self._deadline = range_, context, deadline
        self._total = count(ns, self._hashes)
        self._buffers: dict[int, Body] | None = None
        self.sealed = 0

    def __enter__(self) -> CopiedFill:
        nbytes = self._ns.extents(self._range).body_bytes
        until = time.monotonic() + (CONTROL_DEADLINE if self._deadline is None else self._deadline)
        try:
            in_time(CONTROL_DEADLINE if self._deadline is None else self._deadline)
            missing = self._transport.missing(self._ns, self._hashes, self._range, self._context, until)
            if len(missing) * nbytes > MAX_FILL:
                raise Invalid(
                    f"{len(missing) * nbytes} bytes in one fill; over gRPC it may have {MAX_FILL}: send fewer"
                )
            self._buffers = {i: np.empty(nbytes, np.uint8) for i in missing}
        except Invalid:
            raise
        except KvtierError as error:
            self.ending = Ending.by(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        buffers, self._buffers = self._buffers, None
        if kind is not None or buffers is None:
            return
        until = time.monotonic() + (TRANSFER_DEADLINE if self._deadline is None else self._deadline)
        done = self._transport.send(self._ns, self._hashes, buffers, list(buffers), self._range, self._context, until)
        self.sealed, self.ending = int(done), done.ending

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._total))]
        if not -self._total <= index < self._total:
            raise IndexError(index)
        return self._buffers.get(index % self._total) if self._buffers is not None else None


def _receive(messages: Iterator[bytes], nbytes: int, most: int) -> tuple[list[Block], pb.GetTrailer]:
    """Blocks of `nbytes` and the trailer, out of the stream of a get.

    Raises Unavailable for a stream that is not one.
    """
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


def _per_call(ns: RegisteredNamespace, range_: Range) -> int:
    return max(1, min(KEYS_PER_CALL, BYTES_PER_CALL // ns.extents(range_).block_bytes))


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())
