"""The bytes in front of a block in a Redis value."""

from __future__ import annotations

import pytest

from kvtier.errors import Lost
from kvtier.tiers.redis.value import FRONT_BYTES, front, read_front

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


def test_a_front_is_read_back() -> None:
    raw = front(KEY, 2**24, 2**64 - 1)
    assert len(raw) == FRONT_BYTES == 32
    assert read_front(raw, KEY, 2**24) == 2**64 - 1


def test_a_front_that_is_not_of_this_block_is_lost() -> None:
    good = front(KEY, 4096, 77)
    for raw, key, nbytes in [
        (good, OTHER, 4096),
        (good, KEY, 4097),
        (good[:-1], KEY, 4096),
        (good + b"\0", KEY, 4096),
        (b"", KEY, 4096),
    ]:
        with pytest.raises(Lost):
            read_front(raw, key, nbytes)
    for at in [*range(16), *range(24, 32)]:  # every byte but the checksum's
        bad = bytearray(good)
        bad[at] ^= 0x10
        with pytest.raises(Lost):
            read_front(bytes(bad), KEY, 4096)
