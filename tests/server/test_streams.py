"""Put and get as streams of bytes, without a transport. Over gRPC: test_grpc.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import xxhash

from kvtier.errors import Deadline, Invalid
from kvtier.protocol.stops import Stop
from kvtier.protocol.v1 import kvtier_pb2 as pb
from kvtier.server import streams
from kvtier.server.sessions import WRITE, Peer, Session
from kvtier.server.verbs import Service
from tests.support.daemon import body, description, hashes
from tests.support.inside import Inside

MODEL = description(4096)
SIZE = MODEL.layout.extents().body_bytes


@pytest.fixture
def inside() -> Iterator[Inside]:
    with Inside() as made:
        yield made


def opened(inside: Inside) -> tuple[Service, pb.Keys]:
    """A service, and blocks 0 to 3 as a call names them."""
    service = Service(inside.store, inside.sessions)
    with call(service) as session:
        handle = service.register(session, pb.RegisterRequest(description=MODEL.canonical)).handle
    nbytes = MODEL.layout.extents().block_bytes
    return service, pb.Keys(handle=handle, layer_hi=1, head_hi=1, hashes=hashes(range(4)), nbytes=nbytes)


@contextmanager
def call(service: Service) -> Iterator[Session]:
    """The session of one call, which holds nothing when the stream has ended."""
    session = service.sessions.open(Peer("t", WRITE), None)
    yield session
    assert session.held_bytes == 0
    service.sessions.leave(session)


def put(service: Service, keys: pb.Keys, bodies: list[bytes], chunks: list[bytes]) -> pb.PutReply:
    asked = pb.PutRequest(keys=keys, checksum=[xxhash.xxh3_64_intdigest(one) for one in bodies])
    with call(service) as session:
        return streams.put(service, session, asked, iter(chunks), time.monotonic() + 30)


def test_what_was_put_comes_back_and_nothing_stays_held(inside: Inside) -> None:
    service, keys = opened(inside)
    bodies = [body(n, SIZE).tobytes() for n in range(4)]
    assert put(service, keys, bodies, [piece for one in bodies for piece in (one[:100], one[100:])]).known == 4
    with call(service) as session:
        got = streams.get(service, session, keys, time.monotonic() + 30)
        parts = [bytes(part) if isinstance(part, memoryview) else part for part in got]
    trailer = parts[-1]
    assert isinstance(trailer, pb.GetTrailer) and (len(trailer.checksum), trailer.stop) == (4, Stop.END)
    assert [part[-SIZE:] for part in parts if isinstance(part, bytes)] == bodies


def test_a_body_that_fails_its_checksum_is_a_reason(inside: Inside) -> None:
    service, keys = opened(inside)
    bodies = [bytes(SIZE)] * 4
    reply = put(service, keys, bodies, [bodies[0], b"\1" + bodies[1][1:], *bodies[2:]])
    assert reply.known == 0 and "checksum" in reply.reason


def test_a_malformed_put_raises(inside: Inside) -> None:
    service, keys = opened(inside)
    bodies = [bytes(SIZE)] * 4
    with pytest.raises(Invalid, match="checksums for 4 hashes"):
        put(service, keys, bodies[:3], bodies)
    with pytest.raises(Invalid, match="in chunks of its own"):
        put(service, keys, bodies, bodies[:1])


def test_a_late_get_ends(inside: Inside) -> None:
    service, keys = opened(inside)
    bodies = [bytes(SIZE)] * 4
    assert put(service, keys, bodies, bodies).known == 4
    with call(service) as session:
        late = streams.get(service, session, keys, time.monotonic() - 1)
        next(late)
        with pytest.raises(Deadline):
            next(late)
