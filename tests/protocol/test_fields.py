"""Numbers and fields of protobuf, against protobuf itself."""

from __future__ import annotations

import pytest

from kvtier.errors import Invalid
from kvtier.protocol.fields import check_fields, read_varint, write_varint
from kvtier.protocol.v1 import kvtier_pb2 as pb

NUMBERS = [0, 1, 127, 128, 300, 2**21 - 1, 2**32 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("value", NUMBERS)
def test_numbers_are_protobufs(value: int) -> None:
    raw = write_varint(value)
    assert pb.Keys.FromString(b"\x08" + raw) == pb.Keys.FromString(b"\x08" + raw[:-1] + raw[-1:])
    assert read_varint(b"??" + raw + b"more", 2) == (value, 2 + len(raw))
    assert read_varint(memoryview(raw), 0) == (value, len(raw))


@pytest.mark.parametrize("raw", [b"", b"\x80", b"\xff" * 11])
def test_a_number_that_does_not_end_is_none(raw: bytes) -> None:
    assert read_varint(raw, 0) == (-1, len(raw))
    assert read_varint(b"\x80" * 5 + b"\x01", 0, 5) == (-1, 6)


def test_fields_are_counted_at_the_top_level_alone() -> None:
    request = pb.LookupRequest(handle=1, run=[pb.Run(hashes=bytes(64), layer_hi=2, head_hi=3)] * 5)
    raw = memoryview(request.SerializeToString())
    check_fields(raw, 6)
    with pytest.raises(Invalid, match="more than 5 fields"):
        check_fields(raw, 5)


def test_every_kind_of_field_is_passed_over() -> None:
    number, fixed64, sized, fixed32 = b"\x08\x96\x01", b"\x09" + bytes(8), b"\x0a\x03abc", b"\x0d" + bytes(4)
    raw = memoryview((number + fixed64 + sized + fixed32) * 3)
    check_fields(raw, 12)
    with pytest.raises(Invalid):
        check_fields(raw, 11)


@pytest.mark.parametrize("raw", [b"\x0a", b"\x0a\xff", b"\xff" * 30, b"\x09\x01"])
def test_what_is_no_message_is_left_to_the_parser(raw: bytes) -> None:
    check_fields(memoryview(raw), 4)
