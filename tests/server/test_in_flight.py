"""Calls under way: which are late, how many of a kind there may be, and that late ones are cut."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvtier.errors import Full
from kvtier.protocol.limits import LONGEST, PATIENCE, STALL
from kvtier.server.in_flight import Call, InFlight, Places
from tests.support.daemon import until


class Context:
    """As much of gRPC's context as a call uses."""

    def __init__(self, remaining: float = 60.0) -> None:
        self.remaining, self.cancelled = remaining, False

    def time_remaining(self) -> float:
        return self.remaining

    def cancel(self) -> None:
        self.cancelled = True


def test_a_call_is_late_after_its_deadline_ours_or_a_wait() -> None:
    now = time.monotonic()
    assert not Call(Context(1)).late(now) and Call(Context(1)).late(now + 2)
    assert Call(Context(1e9)).late(now + LONGEST + 1), "no call lasts longer, whatever its client says"
    waiting: Any = Call(Context())
    waiting.waits = now
    assert not waiting.late(now + PATIENCE / 2) and waiting.late(now + PATIENCE + 1)
    waiting.patience = STALL
    assert not waiting.late(now + PATIENCE + 1) and waiting.late(now + STALL + 1)


def test_places_are_limited_in_all_and_for_each_tenant() -> None:
    places = Places(3, 2, "puts")
    with places.take("a"), places.take("a"):
        with pytest.raises(Full, match="2 puts of this tenant"), places.take("a"):
            pass
        with places.take("b"), pytest.raises(Full, match="3 puts are under way"), places.take("c"):
            pass
        assert places.taken == 2
    assert places.taken == 0


def test_late_calls_are_cut_once_and_counted() -> None:
    calls = InFlight()
    late, fine = Context(-1), Context()
    calls.start()
    try:
        with calls.begin(late), calls.begin(fine):
            until(lambda: late.cancelled, "the late call is cut")
            time.sleep(0.6)
            assert (calls.cut, len(calls), fine.cancelled) == (1, 2, False)
    finally:
        calls.close()
    assert not len(calls) and not calls.alive()
