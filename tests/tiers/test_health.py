"""A tier's health: degraded while any kind fails, one log line at either end, pauses that grow and end."""

from __future__ import annotations

import pytest

from kvtier.tiers import health
from kvtier.tiers.health import INDEX, READ, SPACE, WRITE, Health


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which tests set."""
    now = [100.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    return now


def test_it_is_degraded_until_the_last_kind_works_again(caplog: pytest.LogCaptureFixture) -> None:
    state = Health("ssd")
    assert not state.degraded and state.fault == ""
    state.bad(WRITE, "no writes")
    state.bad(READ, "no reads", pause=False)
    state.bad(WRITE, "still none")
    assert state.degraded and state.fault == "no writes"
    state.good(SPACE)
    state.good(WRITE)
    assert state.degraded and state.fault == "no reads"
    state.good(READ)
    assert not state.degraded
    assert [record.message for record in caplog.records] == ["tier degraded", "tier recovered"]


def test_pauses_double_up_to_a_limit_and_a_success_ends_them(clock: list[float]) -> None:
    state = Health("ssd", (1.0, 4.0))
    for pause in (1.0, 2.0, 4.0, 4.0):
        state.bad(WRITE, "full")
        clock[0] += pause - 0.01
        assert state.paused(WRITE)
        clock[0] += 0.01
        assert not state.paused(WRITE)
    state.bad(WRITE, "full")
    state.good(WRITE)
    assert not state.paused(WRITE)
    state.bad(WRITE, "full")
    clock[0] += 1.0
    assert not state.paused(WRITE), "the first pause again"


def test_a_pause_is_of_one_kind_only() -> None:
    state = Health("ssd")
    state.bad(INDEX, "no checkpoint")
    state.bad(READ, "no reads", pause=False)
    assert state.paused(INDEX) and not state.paused(WRITE) and not state.paused(READ)
