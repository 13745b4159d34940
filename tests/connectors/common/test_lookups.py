"""Lookups of requests over a client that says what it is told to: what is held, let go of, asked again and answered
without the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.client.api import Answer, Client, Ended
from kvtier.connectors.common import lookups
from kvtier.connectors.common.lookups import GroupShape, Heartbeat, LookupQueue, RequestLookup, label
from kvtier.errors import Deadline, Full, Lost, Unavailable
from kvtier.format.layout import Range
from kvtier.protocol.stops import MISS, Ending, Stop
from tests.support.daemon import PATIENCE, until


def test_only_a_daemon_that_does_not_answer_counts_as_away() -> None:
    said = {
        MISS: "miss",
        Ending(error=Lost.code, reason="lost: checksum 0 instead of 1"): "lost",
        Ending(error=Full.code, reason="full, retry: the session holds all it may"): "full",
        Ending.at(Stop.CAP): "full",
        Ending.at(Stop.COLD): "cold",
    }
    silent = {
        Ending(error=Deadline.code, reason="no answer within 50 ms"): "deadline",
        Ending(error=Unavailable.code, reason="no daemon at /nowhere: No such file or directory"): "away",
        Ending(error=Unavailable.code, reason="no daemon at /var/missing/cold/full/lost.sock"): "away",  # D5
    }
    for ending, name in {**said, **silent}.items():
        heartbeat = Heartbeat(Client("/nowhere"), "test")
        answer = Answer(0, ending)
        assert label(answer) == name
        assert heartbeat.judge(answer) == heartbeat.healthy == (ending in said)


class FakeLease(list[Any], Ended):
    """Leading blocks, and whether they are held."""

    def __init__(self, client: FakeClient, n: int, stop: Stop) -> None:
        super().__init__([None] * n)
        self._client, self.ending = client, Ending.at(stop)

    def __enter__(self) -> FakeLease:
        self._client.held += len(self)
        return self

    def __exit__(self, *failure: object) -> None:
        self._client.held -= len(self)


class FakeClient:
    """Has the first `warm` blocks of everything in memory, and `cold` more below it."""

    def __init__(self, warm: int, cold: int = 0) -> None:
        self.warm, self.cold, self.held, self.closed = warm, cold, 0, False
        self.prefetched: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()

    def lookup(self, ns: Any, hashes: Any, **options: Any) -> Answer:
        if isinstance(hashes, bytes):  # the heartbeat's
            return Answer(0, MISS)
        return Answer(min(len(hashes), self.warm + self.cold))

    def lease(self, ns: Any, hashes: Any, **options: Any) -> FakeLease:
        assert self.gate.wait(PATIENCE)
        if self.warm < 0:
            raise RuntimeError("a fault of the test")
        got = min(len(hashes), self.warm)
        return FakeLease(self, got, Stop.END if got == len(hashes) else Stop.COLD if self.cold else Stop.MISS)

    def prefetch(self, ns: Any, hashes: Any, **options: Any) -> Answer:
        self.prefetched += hashes
        return Answer(len(hashes))

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASK_LATER", "MISS_AFTER", "MISSED"):
        monkeypatch.setattr(lookups, name, PATIENCE)


@contextmanager
def queue(client: FakeClient) -> Iterator[LookupQueue]:
    ns: Any = SimpleNamespace(hash_bytes=32)
    made = LookupQueue(client, GroupShape(ns, (16,), (None,), ((Range(),),), 16))  # type: ignore[arg-type]
    yield made
    made.close()
    assert client.closed


def request(blocks: int = 8) -> RequestLookup:
    return RequestLookup(0, 16 * blocks, [[bytes([n]) * 32 for n in range(blocks)]], bytes(32))


def test_what_is_promised_is_held_until_it_is_dropped() -> None:
    client = FakeClient(warm=5)
    with queue(client) as made:
        one = request()
        made.ask(one)
        assert (one.answer(), one.failure, client.held) == (5 * 16, "", 5)
        made.drop(one)
        until(lambda: client.held == 0, "it is let go of")


def test_a_lookup_that_is_dropped_before_its_turn_holds_nothing() -> None:
    client = FakeClient(warm=5)
    with queue(client) as made:
        lookups.ASK_LATER = 0.01  # the fixture sets it back
        client.gate.clear()
        first, second = request(), request()
        made.ask(first)
        made.ask(second)
        assert first.answer() is None and second.answer() is None
        made.drop(first)
        made.drop(second)
        client.gate.set()
        until(lambda: first.done.is_set() and second.done.is_set() and client.held == 0, "both are answered")
        assert second.answer() == 0


def test_cold_blocks_are_brought_up_and_asked_for_again() -> None:
    client = FakeClient(warm=2, cold=3)
    with queue(client) as made:
        lookups.ASK_LATER = 0.01
        one = request()
        made.ask(one)
        until(lambda: len(client.prefetched) >= 3, "they are prefetched")
        assert one.answer() is None and client.prefetched[:3] == one.hashes[0][2:5]
        client.warm, client.cold = 5, 0
        assert one.done.wait(PATIENCE)
        assert (one.answer(), client.held) == (5 * 16, 5)


def test_a_full_queue_an_absent_daemon_and_a_fault_are_misses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(warm=-1)
    with queue(client) as made:
        fault, full, away = request(), request(), request()
        made.ask(fault)
        monkeypatch.setattr(lookups, "MAX_LOOKUPS", 0)
        made.ask(full)
        made.heartbeat.healthy = False
        made.ask(away)
        assert [one.answer() for one in (fault, full, away)] == [0, 0, 0]
        assert [one.failure for one in (fault, full, away)] == ["error", "queue", "away"]
