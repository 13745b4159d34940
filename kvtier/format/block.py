"""The bytes of a block: a header of 256 bytes, then the body that `layout` describes. One form in arena, file, Redis
and on the wire.

The daemon writes headers at reserve and compares them at seal; whoever brings bytes back from anywhere calls `verify`.
The format is one page, docs/format.md. Functions over buffers, no state; none of them modifies what it checks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import Lost
from kvtier.format import layout
from kvtier.format.layout import ALIGN, HEADER_BYTES, MAX_BLOCK_BYTES, Extents

MAGIC = b"KVTIER\r\n"  # the line end shows transfers that mangle text
VERSION = 1

# magic, version, hash bytes, group, layer_lo, layer_hi, head_lo, head_hi, zero, nbytes, key, namespace, context, hash,
# tokens, scales, payload
_HEADER = struct.Struct("<8sHHHHHHHHQ32s32s32s64sIII")
_KEY = slice(32, 64)
_HASH = slice(128, 192)
_ZERO_TAIL = bytes(HEADER_BYTES - _HEADER.size)

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a header; offsets are bytes from the start of the block."""

    hash_bytes: int
    resolved: tuple[int, int, int, int, int]
    nbytes: int
    key: bytes
    namespace: bytes
    context: bytes
    content_hash: bytes
    tokens: int
    scales: int
    payload: int


def header_template(
    namespace: bytes, resolved: tuple[int, int, int, int, int], context: bytes, extents: Extents, hash_bytes: int
) -> bytes:
    """256 bytes with key and content hash left zero: what the headers of one call share."""
    known = (bytes(32), namespace, context, bytes(64), extents.group.tokens)
    starts = (HEADER_BYTES + extents.scales[0][0], HEADER_BYTES + extents.data[0][0])
    return _HEADER.pack(MAGIC, VERSION, hash_bytes, *resolved, 0, extents.block_bytes, *known, *starts) + _ZERO_TAIL


def headers(template: bytes, keys: list[bytes], hashes: list[bytes]) -> npt.NDArray[np.uint8]:
    """Headers of many blocks, [n, 256] uint8: the template with each key and content hash filled in."""
    rows = np.empty((len(keys), HEADER_BYTES), np.uint8)
    rows[:] = np.frombuffer(template, np.uint8)
    rows[:, _KEY] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
    nbytes = len(hashes[0])
    rows[:, _HASH.start : _HASH.start + nbytes] = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, nbytes)
    return rows


def parse_header(block: Bytes) -> Header:
    """The header at the start of `block`. Raises Lost for anything that no daemon of this version writes."""
    if len(block) < HEADER_BYTES:
        raise Lost(f"a block has at least {HEADER_BYTES} bytes, not {len(block)}")
    raw = bytes(block[:HEADER_BYTES])
    magic, version, hash_bytes, *resolved, zero, nbytes, key, namespace, context, content, tokens, scales, payload = (
        _HEADER.unpack_from(raw)
    )
    if magic != MAGIC:
        raise Lost(f"not a block: it begins with {magic!r}")
    if version != VERSION:
        raise Lost(f"block version {version}; this version reads {VERSION}")
    if zero or any(raw[_HEADER.size :]) or any(content[hash_bytes:]):
        raise Lost("reserved bytes of the header are not zero")
    if not 8 <= hash_bytes <= 64:
        raise Lost(f"content hash of {hash_bytes} bytes")
    group, layer_lo, layer_hi, head_lo, head_hi = resolved
    ordered = layer_lo < layer_hi <= layout.MAX_LAYERS and head_lo < head_hi <= layout.MAX_HEADS
    if not ordered or group >= layout.MAX_GROUPS:
        raise Lost(f"no such range: group {group}, layers [{layer_lo}, {layer_hi}), heads [{head_lo}, {head_hi})")
    if not 1 <= tokens <= layout.MAX_TOKENS:
        raise Lost(f"a block of {tokens} tokens")
    if scales != HEADER_BYTES or not scales <= payload < nbytes <= MAX_BLOCK_BYTES or payload % ALIGN or nbytes % ALIGN:
        raise Lost(f"sizes that do not fit: {nbytes} bytes, scales at {scales}, payload at {payload}")
    range_ = (group, layer_lo, layer_hi, head_lo, head_hi)
    return Header(hash_bytes, range_, nbytes, key, namespace, context, content[:hash_bytes], tokens, scales, payload)


def verify(block: Bytes, key: bytes, checksum: int | None = None) -> Header:
    """Checks that `block` is whole and is the block of `key`; with a checksum also every byte. Raises Lost saying what
    is wrong.

    Called just before bytes leave for a lower tier and just after they came back. Reads all of `block` if a checksum is
    given.
    """
    header = parse_header(block)
    if header.key != key:
        raise Lost(f"block of another key: {header.key.hex()[:16]} instead of {key.hex()[:16]}")
    if header.nbytes != len(block):
        raise Lost(f"block of {header.nbytes} bytes in {len(block)}")
    if checksum is not None and (found := digest(block)) != checksum:
        raise Lost(f"checksum {found:016x} instead of {checksum:016x}")
    return header


def digest(block: Bytes) -> int:
    """xxh3-64 over header and body: kept outside the block (ledger, journal record, value frame, wire trailer)."""
    return xxhash.xxh3_64_intdigest(block)
