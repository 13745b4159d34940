"""Limits of a call agree with each other and with the sizes of messages."""

from __future__ import annotations

from kvtier.protocol import limits
from kvtier.protocol.frames import MAX_BODY
from kvtier.protocol.rpc import MAX_MESSAGE

LONGEST_HASH = 64  # bytes


def test_the_longest_call_fits_a_message() -> None:
    assert limits.KEYS_PER_CALL * LONGEST_HASH < MAX_BODY < MAX_MESSAGE
    assert limits.MAX_KEYS * LONGEST_HASH < MAX_MESSAGE
    assert limits.CHUNK < MAX_MESSAGE


def test_a_default_deadline_is_below_what_the_server_allows() -> None:
    defaults = (limits.LOOKUP_DEADLINE, limits.CONTROL_DEADLINE, limits.HELLO_DEADLINE, limits.TRANSFER_DEADLINE)
    assert list(defaults) == sorted(defaults) and defaults[-1] < limits.STALL < limits.LONGEST
    assert limits.MAX_WAIT_MS <= limits.LONGEST * 1000
