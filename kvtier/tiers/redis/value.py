"""A Redis value: 32 bytes in front, then the block as it is everywhere. docs/redis.md has the table.

The front carries length, checksum and the beginning of the key, so that half a value, a stale one or another key's is
told before and after its bytes are read. Pure functions.
"""

from __future__ import annotations

import struct

from kvtier.errors import Lost

MAGIC = b"KVTR"
VERSION = 1
# magic, version, zero, bytes of the block, xxh3-64 of the block, first 8 bytes of the key
_FRONT = struct.Struct("<4sHHQQ8s")
FRONT_BYTES = _FRONT.size


def front(key: bytes, nbytes: int, checksum: int) -> bytes:
    """The bytes in front of a block."""
    return _FRONT.pack(MAGIC, VERSION, 0, nbytes, checksum, key[:8])


def read_front(raw: bytes | memoryview, key: bytes, nbytes: int) -> int:
    """The checksum that the front gives. Raises Lost for anything but the front of this key's block of `nbytes`."""
    if len(raw) != FRONT_BYTES:
        raise Lost(f"a front of {len(raw)} bytes")
    magic, version, zero, said, checksum, tag = _FRONT.unpack(raw)
    if magic != MAGIC or version != VERSION or zero:
        raise Lost("not a block of this version")
    if tag != key[:8]:
        raise Lost(f"front of another key: {tag.hex()} instead of {key[:8].hex()}")
    if said != nbytes:
        raise Lost(f"a block of {said} bytes, asked for as {nbytes}")
    return int(checksum)
