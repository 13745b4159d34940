"""Targets behind which a store stands: lane frames over a real socket, messages at the handlers, gRPC requests at the
door's methods.
"""

from __future__ import annotations

import random
import socket
import struct
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import grpc
import xxhash
from google.protobuf.message import DecodeError, Message

from kvtier.errors import KvtierError
from kvtier.format.layout import Range
from kvtier.protocol import frames, rpc
from kvtier.protocol.fields import check_fields
from kvtier.protocol.frames import Verb
from kvtier.protocol.v1 import kvtier_pb2 as pb
from kvtier.server import unix
from kvtier.server.grpc import GrpcServer
from kvtier.server.sessions import ADMIN, READ, WRITE, Peer, Sessions
from kvtier.server.unix import UnixServer
from kvtier.server.verbs import HANDLERS, Service
from kvtier.store.arena import Arena
from kvtier.store.store import Store
from tests.fuzz.files import descriptions
from tests.fuzz.target import Broken, Target, answered

ARENA = 2**20
PATIENCE = 20.0  # seconds for an answer; the lane gives up on a peer after 2
_FIELDS = ("group", "layer_lo", "layer_hi", "head_lo", "head_hi")
_LIMITS = (0, 0, 0, 1, 1, 2, 3, 4, 8, 255, 65535, 65536, 2**31, 2**32 - 1)


class Behind:
    """A service over a small store, with its namespaces registered, and messages that have a chance with it."""

    def __init__(self) -> None:
        self.arena = Arena(ARENA)
        self.store = Store(self.arena, poison=True)
        self.sessions = Sessions(self.store)
        self.service = Service(self.store, self.sessions)
        self.descriptions = descriptions()
        self.register()

    def register(self) -> None:
        """(Again) the namespaces that `keys` speaks of; an input may have dropped them."""
        self.namespaces = [self.store.namespaces.register(one.canonical, "local") for one in self.descriptions]

    def keys(self, rng: random.Random) -> pb.Keys:
        """Mostly right: a handle, a range, hashes, an id."""
        namespace = rng.choice(self.namespaces)
        resolved = list(namespace.description.layout.resolve(Range()))
        if rng.random() < 0.2:
            resolved[rng.randrange(5)] = rng.choice(_LIMITS)
        hashes = b"".join(rng.randrange(40).to_bytes(32, "little") for _ in range(rng.choice((0, 1, 2, 5, 30))))
        message = pb.Keys(
            handle=namespace.handle,
            hashes=hashes + rng.choice((b"", b"", b"", b"x")),
            id=rng.choice((0, *range(1, 300), 2**64 - 1)),
        )
        for name, value in zip(_FIELDS, resolved, strict=True):
            setattr(message, name, value % 2**32)
        message.nbytes = (
            namespace.description.layout.extents(Range()).block_bytes if rng.random() < 0.9 else rng.choice(_LIMITS)
        )
        message.context = rng.choice((b"", b"", b"c" * 32, b"c" * 31))
        message.boot = rng.choice((0, self.service.boot, 1))
        return message

    def message(self, verb: int, rng: random.Random) -> Message:
        """A request of this verb that has a chance."""
        request = HANDLERS[verb].request
        if request is pb.Keys:
            return self.keys(rng)
        if request is pb.Held:
            return pb.Held(
                id=rng.randrange(300),
                index=[rng.choice((0, 1, 2, 40, 2**32 - 1)) for _ in range(rng.choice((0, 0, 1, 3)))],
            )
        if request is pb.LookupRequest:
            made = pb.LookupRequest(bitmap=rng.random() < 0.5, boot=self.service.boot)
            for _ in range(rng.choice((0, 1, 2, 300))):
                one = self.keys(rng)
                made.handle = one.handle
                made.run.append(pb.Run(hashes=one.hashes, **{name: getattr(one, name) for name in _FIELDS}))
            return made
        if request in (pb.RegisterRequest, pb.ExplainRequest):
            return request(description=rng.choice(self.descriptions).canonical)
        digest = rng.choice(self.namespaces).description_digest.hex()
        name = digest[: rng.choice((0, 3, 4, 16, 64))]
        if request is pb.DiffRequest:
            return pb.DiffRequest(stored=name, live=rng.choice((name, "zz", "abcd")))
        if request is pb.StatusRequest:
            return pb.StatusRequest(check_integrity=rng.random() < 0.02)
        if request is pb.TtlRequest:
            return pb.TtlRequest(name=name, seconds=rng.choice((0, 1, 3600, 2**32 - 1)))
        return request(name=name) if request in (pb.ShowRequest, pb.DropRequest) else request()

    def check(self) -> None:
        self.sessions.check_integrity()
        if not self.sessions.alive():
            raise Broken("the thread that waits for processes has died")
        self.register()

    def close(self) -> None:
        self.sessions.close()
        self.arena.close()


class Messages(Target):
    """A verb's number, then its request: what both transports hand to the handlers. A second byte says who calls."""

    name = "message"
    weight = 20
    words = tuple(bytes([field << 3 | kind]) for field in range(1, 12) for kind in (0, 1, 2))

    def __init__(self) -> None:
        self._behind = Behind()
        self._peers = [Peer("local", role) for role in (READ, WRITE, ADMIN)] + [Peer("other", WRITE)]
        self._open()

    def _open(self) -> None:
        self._sessions = [self._behind.sessions.open(peer, None) for peer in self._peers]

    def first_seeds(self) -> Sequence[bytes]:
        rng = random.Random(1)
        return [
            bytes([verb, 2]) + self._behind.message(verb, rng).SerializeToString()
            for verb in HANDLERS
            for _ in range(2)
        ]

    def make(self, rng: random.Random) -> bytes | None:
        verb = rng.choice(list(HANDLERS))
        if verb == Verb.DROP and rng.random() < 0.95:
            return None
        return bytes([verb, rng.randrange(256)]) + self._behind.message(verb, rng).SerializeToString()

    def run(self, data: bytes) -> str:
        if len(data) < 2:
            return "short"
        handler = HANDLERS.get(data[0])
        if handler is None:
            return "unknown"
        session = self._sessions[data[1] % len(self._sessions)]

        def call() -> None:
            session.allow(handler.role)
            if handler.most_fields:
                check_fields(memoryview(data)[2:], handler.most_fields)
            handler.call(self._behind.service, session, handler.request.FromString(data[2:])).SerializeToString()

        return answered(call, KvtierError, DecodeError) if data[0] != Verb.HELLO else "hello"

    def check(self) -> None:
        self._behind.check()
        for session in self._sessions:
            self._behind.sessions.leave(session)
        self._open()

    def close(self) -> None:
        self._behind.close()


class LaneFrames(Target):
    """Bytes on a lane socket. The first byte says whether a hello was said before; the rest is sent as it is."""

    name = "lane"
    weight = 20
    words = (b"\x4b\x76\x01", *(bytes([0x4B, 0x76, 1, verb]) for verb in range(21)))

    def __init__(self) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="kvtier-fuzz-")
        self._path = Path(self._own.name) / "k.sock"
        self._behind = Behind()
        unix.MAX_REFUSAL = 0.0  # bad input is what this lives on
        self._lane = UnixServer(self._path, self._behind.service, lambda uid, gid, pid: Peer("local", ADMIN, uid, pid))
        self._lane.start()
        self._buffer = memoryview(bytearray(frames.HEADER.size + frames.MAX_BODY))
        self._sock: socket.socket | None = None
        self._used = 0

    def first_seeds(self) -> Sequence[bytes]:
        rng = random.Random(2)
        hello = frames.pack(
            Verb.HELLO, 0, 1000, pb.HelloRequest(protocol=1, map=True, drained=[b"d" * 16]).SerializeToString()
        )
        calls = [
            b"\x01" + frames.pack(verb, 7, 250, self._behind.message(verb, rng).SerializeToString())
            for verb in HANDLERS
        ]
        return [
            b"\x00" + hello,
            b"\x00" + frames.pack(Verb.HELLO, 0, 1, pb.HelloRequest(protocol=1, session=b"s" * 16).SerializeToString()),
            *calls,
        ]

    def make(self, rng: random.Random) -> bytes | None:
        verb = rng.choice(list(HANDLERS))
        if verb == Verb.DROP and rng.random() < 0.95:
            return None
        body = self._behind.message(verb, rng).SerializeToString()
        if rng.random() < 0.3 and body:
            edited = bytearray(body)
            edited[rng.randrange(len(edited))] = rng.randrange(256)
            body = bytes(edited)
        return b"\x01" + frames.pack(verb, rng.randrange(2**64), rng.randrange(2**64), body)

    def run(self, data: bytes) -> str:
        greeted, raw = data[:1] == b"\x01", data[1:]
        whole = len(raw) >= frames.HEADER.size and struct.unpack_from("<HBBI", raw)[:2] == (
            frames.MAGIC,
            frames.VERSION,
        )
        whole = whole and struct.unpack_from("<I", raw, 4)[0] == len(raw) - frames.HEADER.size
        if greeted and whole:
            return self._call(raw)
        sock = self._connect()
        try:
            if greeted:
                self._hello(sock)
            try:
                sock.sendall(raw)
                sock.shutdown(socket.SHUT_WR)  # a frame that stops half-way would otherwise cost the lane its 2 s
            except OSError:
                pass  # closed before it was all sent: an answer
            return self._drain(sock)
        finally:
            sock.close()

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        frames.set_timeouts(sock, PATIENCE, PATIENCE)
        sock.connect(str(self._path))
        return sock

    def _hello(self, sock: socket.socket) -> None:
        sock.sendall(frames.pack(Verb.HELLO, 0, 1000, pb.HelloRequest(protocol=1).SerializeToString()))
        status, _, _, body = frames.receive(sock, self._buffer, PATIENCE)
        if status:
            raise Broken(f"a hello was refused: {bytes(body)!r}")

    def _call(self, raw: bytes) -> str:
        """A whole frame on the socket that lasts: exactly one answer, to this request."""
        if self._sock is None or self._used >= 500:  # a session ends now and then, and what it held with it
            self._end()
            self._sock, self._used = self._connect(), 0
            self._hello(self._sock)
        self._used += 1
        self._sock.sendall(raw)
        try:
            status, request, boot, _ = frames.receive(self._sock, self._buffer, PATIENCE)
        except frames.Closed:
            raise Broken("a whole frame was not answered") from None
        if (
            request != struct.unpack_from("<Q", raw, 8)[0]
            or boot != self._behind.service.boot
            or status == KvtierError.code
        ):
            raise Broken(f"answered with status {status} to request {request}")
        return f"status {status}" if status else "taken"

    def _drain(self, sock: socket.socket) -> str:
        """Reads to the end of the stream: what came, or "closed"."""
        said = "closed"
        while True:
            try:
                got = sock.recv_into(self._buffer)
            except ConnectionError:
                return said
            except BlockingIOError:
                raise Broken("the lane neither answers nor closes") from None
            if not got:
                return said
            said = "answered"

    def _end(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def check(self) -> None:
        self._end()
        if not self._lane.alive():
            raise Broken("the lane's accepting thread has died")
        self._behind.register()

    def close(self) -> None:
        self._end()
        self._lane.close()
        if self._lane.gauges()["lane_sockets"]:
            raise Broken("calls hang in the lane")
        self._behind.sessions.check_integrity()
        self._behind.close()
        self._own.cleanup()


class _Ended(Exception):
    """What `abort` of a call's context raises."""


class _Context:
    """What gRPC hands a method beside its requests; `code` is what it was aborted with."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None

    def time_remaining(self) -> float:
        return 5.0

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "unix:"

    def cancel(self) -> None:
        self.code = grpc.StatusCode.CANCELLED

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        if not isinstance(details, str) or len(details) > rpc.MAX_DETAILS:
            raise Broken("details that gRPC cannot carry")
        self.code = code
        raise _Ended


class GrpcRequests(Target):
    """The messages of one gRPC call: a byte for the method, then u16 length and bytes, again and
    again.
    """

    name = "grpc"
    weight = 10
    words = (b"\x0a", b"\x12", b"\x0a\x80\x08", b"\x12\x00")

    def __init__(self) -> None:
        self._behind = Behind()
        self._door = door = GrpcServer(self._behind.service, [], unix_peer=Peer("local", ADMIN))
        who = door._unix_caller
        unary = [
            door._one(name, who, HANDLERS[verb].role, partial(door._verb, verb)) for verb, name in rpc.METHODS.items()
        ]
        self._methods = [*unary, door._one(rpc.PUT, who, WRITE, door._put), door._many(rpc.GET, who, READ, door._get)]
        self._put, self._get = len(unary), len(unary) + 1
        self._verbs = list(rpc.METHODS)

    def _pack(self, method: int, pieces: Sequence[bytes]) -> bytes:
        return bytes([method]) + b"".join(struct.pack("<H", len(piece)) + piece for piece in pieces)

    def _put_pieces(self, rng: random.Random) -> list[bytes]:
        keys = self._behind.keys(rng)
        n = len(keys.hashes) // 32
        nbytes = max(16, int(keys.nbytes) - 256) if keys.nbytes < 60000 else 64
        body = rng.randbytes(nbytes)
        checksum = xxhash.xxh3_64_intdigest(body) if rng.random() < 0.8 else rng.randrange(2**64)
        count = n if rng.random() < 0.9 else rng.randrange(5)
        first = rpc.message_chunk(pb.PutRequest(keys=keys, checksum=[checksum] * count))
        cut = rng.choice((nbytes, nbytes // 2, 1 + nbytes // 3))
        return [first, *(rpc.data_chunk(body[at : at + cut]) for _ in range(min(n, 6)) for at in range(0, nbytes, cut))]

    def first_seeds(self) -> Sequence[bytes]:
        rng = random.Random(3)
        seeds = [
            self._pack(i, [self._behind.message(verb, rng).SerializeToString()]) for i, verb in enumerate(self._verbs)
        ]
        return [
            *seeds,
            self._pack(self._put, self._put_pieces(rng)),
            self._pack(self._get, [self._behind.keys(rng).SerializeToString()]),
        ]

    def make(self, rng: random.Random) -> bytes | None:
        choice = rng.random()
        if choice < 0.3:
            return self._pack(self._put, [piece for piece in self._put_pieces(rng) if rng.random() < 0.97])
        if choice < 0.5:
            return self._pack(self._get, [self._behind.keys(rng).SerializeToString()])
        return None

    def run(self, data: bytes) -> str:
        if not data:
            return "short"
        method, pieces, at = self._methods[data[0] % len(self._methods)], [], 1
        while at + 2 <= len(data):
            (size,) = struct.unpack_from("<H", data, at)
            pieces.append(data[at + 2 : at + 2 + size])
            at += 2 + size
        context = _Context()
        try:
            if method.stream_unary is not None:
                method.stream_unary(iter(pieces), context)
            else:
                self._exhaust(method.stream_stream(iter(pieces), context))
        except _Ended:
            pass
        if context.code is grpc.StatusCode.INTERNAL:
            raise Broken("an internal error")
        return context.code.name.lower() if context.code is not None else "taken"

    def _exhaust(self, answers: Iterator[Any]) -> None:
        for answer in answers:
            if len(answer) > rpc.MAX_MESSAGE:
                raise Broken("an answer larger than a client can read")

    def check(self) -> None:
        self._behind.check()

    def close(self) -> None:
        self._door.close(0)
        self._behind.close()
