"""Protobuf's wire basics, by hand where its parser would copy too much or notice too late: numbers and fields.

A number (varint) has seven bits a byte, the lowest first, and the top bit set in all bytes but its last. A field is
such a number (`field << 3 | kind`) and a value, whose form `kind` names. Pure functions.
"""

from __future__ import annotations

from kvtier.errors import Invalid

NUMBER, FIXED64, SIZED = range(3)  # kinds of a field's value; all others here have four bytes
MAX_DIGITS = 10  # bytes of a 64-bit number


def read_varint(raw: bytes | memoryview, at: int, digits: int = MAX_DIGITS) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends; (-1, the end of `raw`) if none of `digits` bytes is there."""
    value = shift = 0
    for i in range(at, min(at + digits, len(raw))):
        value |= (raw[i] & 0x7F) << shift
        if raw[i] < 0x80:
            return value, i + 1
        shift += 7
    return -1, len(raw)


def write_varint(value: int) -> bytes:
    """The bytes of a number, which is not negative."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def check_fields(body: memoryview, most: int) -> None:
    """Raises Invalid if a message has more than `most` fields at its top level. Looks at no more than these.

    Parsing costs 130 bytes of memory for each sub-message, and an empty one is two bytes on the wire: 1 MiB would
    become 66. What is no message at all passes here; the parser refuses it.
    """
    at, end = 0, len(body)
    for _ in range(most + 1):
        if at >= end:
            return
        tag, at = read_varint(body, at)
        kind = tag & 7
        if kind == SIZED:
            length, at = read_varint(body, at)
            at += max(length, 0)
        elif kind == NUMBER:
            at = read_varint(body, at)[1]
        else:
            at += 8 if kind == FIXED64 else 4
    raise Invalid(f"a message with more than {most} fields")
