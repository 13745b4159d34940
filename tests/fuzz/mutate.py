"""Making new inputs of old ones: a few random edits of a kind that parsers get wrong."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

MAX_INPUT = 64 * 1024
_NUMBERS = (
    0,
    1,
    7,
    8,
    127,
    128,
    255,
    256,
    4095,
    4096,
    32767,
    32768,
    65535,
    65536,
    2**20,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_WORDS = (
    b"\x00", b"\xff", b"\xff\xff\xff\xff", b"\x80" * 10, b"\r\n\r\n", b"\n", b"{", b"}", b"[", b"]", b'"',
    b"\\", b"..", b"/", b"null", b"NaN", b"-1", b"1e999", b"true", b"\xf0\x9f\x98\x80", b"\xed\xa0\x80",
    b"A" * 300, b"[" * 200, b"9" * 50,
)  # fmt: skip


class Mutator:
    """Edits bytes. `words` are what a target's format is made of."""

    def __init__(self, rng: random.Random, seeds: Sequence[bytes], words: Sequence[bytes] = ()) -> None:
        self.rng = rng
        self.seeds = list(seeds)
        self._words = (*_WORDS, *words)
        self._edits: list[Callable[[bytearray], None]] = [
            self._flip, self._byte, self._number, self._cut, self._delete, self._repeat, self._insert, self._splice,
            self._swap, self._decimal,
        ]  # fmt: skip

    def next(self) -> bytes:
        """A seed with one to a few edits; now and then noise, or the seed itself."""
        rng = self.rng
        choice = rng.random()
        if choice < 0.02:
            return rng.randbytes(rng.randrange(200))
        data = bytearray(rng.choice(self.seeds))
        if choice < 0.04:
            return bytes(data)
        for _ in range(1 + int(rng.expovariate(0.7))):
            rng.choice(self._edits)(data)
        return bytes(data[:MAX_INPUT])

    def _at(self, data: bytearray) -> int:
        return self.rng.randrange(len(data) + 1)

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)

    def _byte(self, data: bytearray) -> None:
        if data:
            data[self.rng.randrange(len(data))] = self.rng.randrange(256)

    def _number(self, data: bytearray) -> None:
        value, form = self.rng.choice(_NUMBERS), self.rng.choice(("<H", "<I", "<Q", ">I"))
        raw = struct.pack(form, value % (1 << 8 * struct.calcsize(form)))
        at = self._at(data)
        data[at : at + len(raw)] = raw

    def _decimal(self, data: bytearray) -> None:
        """Changes a run of digits, if there is one."""
        places = [i for i, byte in enumerate(data[:4096]) if 48 <= byte < 58]
        if places:
            at = end = self.rng.choice(places)
            while end < len(data) and 48 <= data[end] < 58:
                end += 1
            data[at:end] = str(self.rng.choice(_NUMBERS)).encode()

    def _cut(self, data: bytearray) -> None:
        del data[self._at(data) :]

    def _delete(self, data: bytearray) -> None:
        at = self._at(data)
        del data[at : at + self.rng.choice((1, 2, 4, 8, 32))]

    def _repeat(self, data: bytearray) -> None:
        at, size = self._at(data), self.rng.choice((1, 4, 16, 64))
        piece = bytes(data[at : at + size])
        data[at:at] = piece * self.rng.choice((1, 1, 2, 50))

    def _insert(self, data: bytearray) -> None:
        at = self._at(data)
        data[at:at] = self.rng.choice(self._words)

    def _splice(self, data: bytearray) -> None:
        other = self.rng.choice(self.seeds)
        at, start = self._at(data), self.rng.randrange(len(other) + 1)
        data[at : at + self.rng.randrange(64)] = other[start : start + self.rng.randrange(64)]

    def _swap(self, data: bytearray) -> None:
        if len(data) > 8:
            a, b = self.rng.randrange(len(data) - 4), self.rng.randrange(len(data) - 4)
            data[a : a + 4], data[b : b + 4] = data[b : b + 4], data[a : a + 4]
