"""The breaker: opens after failures in a row, tries after pauses that grow, closes after a good answer."""

from __future__ import annotations

import pytest

from kvtier.tiers import breaker
from kvtier.tiers.breaker import CLOSED, HALF_OPEN, OPEN, Breaker
from tests.support.daemon import until


def test_a_breaker_opens_after_failures_in_a_row_and_closes_after_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "PAUSE", (0.01, 0.05))
    one = Breaker()
    for _ in range(5):
        assert not one.bad("once")
        assert not one.good() and one.closed, "a success in between"
    assert not one.bad("first")
    assert one.bad("second") and one.state == OPEN and one.reason == "second"
    assert not one.bad("a call from before"), "it is open already"
    until(one.due, "a trial is due")
    assert one.state == HALF_OPEN and not one.due(), "one trial at a time"
    assert not one.bad("a call from before") and one.state == HALF_OPEN, "which is no trial"
    assert not one.bad("trial", trial=True) and one.state == OPEN
    until(one.due, "another")
    assert one.good() and one.state == CLOSED and one.reason == ""
    assert one.opened_total == 1


def test_pauses_grow_to_a_limit() -> None:
    one = Breaker()
    one.bad("x")
    one.bad("x")
    waits = []
    for _ in range(12):
        before = breaker.time.monotonic()
        one.bad("x", trial=True)
        waits.append(one._not_before - before)
    assert (
        waits[0] < waits[2] < waits[4]
        and max(waits) <= breaker.PAUSE[1] + 1
        and min(waits[6:]) >= breaker.PAUSE[1] * 0.75
    )
