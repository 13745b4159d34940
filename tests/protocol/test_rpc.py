"""What both ends of gRPC agree on: framing of chunks, status codes."""

from __future__ import annotations

import os

import pytest

from kvtier.errors import BY_CODE, Denied, Invalid, Unauthenticated
from kvtier.protocol import rpc
from kvtier.protocol.frames import Verb
from kvtier.protocol.limits import CHUNK
from kvtier.protocol.v1 import kvtier_pb2 as pb


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, CHUNK])
def test_our_framing_is_that_of_protobuf(size: int) -> None:
    raw = os.urandom(size)
    assert pb.Chunk.FromString(rpc.data_chunk(raw)) == pb.Chunk(data=raw)
    assert rpc.data_chunk(raw) == pb.Chunk(data=raw).SerializeToString()
    request = pb.GetTrailer(checksum=range(size // 8))
    assert rpc.message_chunk(request) == pb.Chunk(message=request.SerializeToString()).SerializeToString()
    for made, is_message, inside in ((pb.Chunk(data=raw), False, raw), (pb.Chunk(message=raw), True, raw)):
        assert rpc.open_chunk(made.SerializeToString()) == (is_message, inside)
    long_length = b"\x0a" + bytes([size >> shift & 0x7F | 0x80 for shift in (0, 7, 14, 21)]) + b"\0" + raw
    assert rpc.open_chunk(long_length) == (False, raw)
    unknown_field = pb.Chunk(data=raw).SerializeToString() + b"\x78\x01"
    assert rpc.open_chunk(unknown_field) == (False, raw)


@pytest.mark.parametrize("raw", [b"", b"\x0a", b"\x0a\x05abc", b"\x0a\xff\xff\xff\xff\xff", b"\x78\x01", b"\xff" * 20])
def test_what_is_no_chunk_is_invalid(raw: bytes) -> None:
    with pytest.raises(Invalid):
        rpc.open_chunk(raw)


def test_every_error_has_a_status_of_its_own() -> None:
    assert set(rpc.STATUS) == set(BY_CODE.values())
    assert len(set(rpc.STATUS.values())) == len(rpc.STATUS)
    for kind, code in rpc.STATUS.items():
        assert rpc.status_of(kind("words")) == (code, "words")
    assert rpc.status_of(Unauthenticated("x"))[0] is not rpc.status_of(Denied("x"))[0]


def test_every_verb_but_those_of_the_mapped_arena_is_a_method() -> None:
    mapped = {Verb.HELLO, Verb.RESERVE, Verb.SEAL, Verb.ABORT, Verb.LEASE, Verb.RELEASE}
    assert set(rpc.METHODS) == set(Verb) - mapped
    methods = pb.DESCRIPTOR.services_by_name["Kvtier"].methods_by_name
    assert set(rpc.METHODS.values()) | {rpc.PUT, rpc.GET} == set(methods)
