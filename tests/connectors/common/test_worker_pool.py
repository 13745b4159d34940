"""Each task is answered exactly once: done, failed, too late, without a place, or left in the queue at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtier.connectors.common import worker_pool
from kvtier.connectors.common.worker_pool import PendingAnswers, WorkerPool, WorkItem
from tests.support.daemon import PATIENCE, until


class Log:
    """A pool's answers in order, and a gate at which one of its threads stands."""

    def __init__(self) -> None:
        self.answers: list[object] = []
        self.gate, self.reached = threading.Event(), threading.Event()

    def item(self, answer: object, until_: float = float("inf"), size: int = 1) -> WorkItem[object]:
        return WorkItem(lambda: answer, self.answers.append, ("failed", answer), until_, size)

    def blocker(self) -> WorkItem[object]:
        def run() -> object:
            self.reached.set()
            assert self.gate.wait(PATIENCE)
            return "blocker"

        return WorkItem(run, self.answers.append, "failed")


@contextmanager
def blocked(pool: WorkerPool, log: Log) -> Iterator[None]:
    """The pool's one thread is busy inside."""
    pool.give(log.blocker())
    assert log.reached.wait(PATIENCE)
    yield
    log.gate.set()


def test_tasks_are_done_in_order_and_one_that_raises_is_answered_as_failed() -> None:
    pool, log = WorkerPool("test", 1), Log()
    with blocked(pool, log):
        pool.give(log.item(2))
        pool.give(WorkItem(lambda: 1 // 0, log.answers.append, -1))
        pool.give(log.item(1), first=True)
    pool.wait(PATIENCE)
    assert log.answers == ["blocker", 1, 2, -1] and pool.alive
    assert pool.close(PATIENCE) and not pool.alive


def test_an_answer_that_cannot_be_given_does_not_end_the_thread() -> None:
    pool, log = WorkerPool("test", 1), Log()
    pool.give(WorkItem(lambda: 1, lambda _: 1 // 0, 0))
    pool.give(log.item(2))
    pool.wait(PATIENCE)
    assert log.answers == [2] and pool.alive and pool.close(PATIENCE)


def test_what_has_waited_past_its_deadline_is_not_begun() -> None:
    pool, log = WorkerPool("test", 1), Log()
    with blocked(pool, log):
        pool.give(log.item(1, until_=time.monotonic()))
        pool.give(log.item(2, until_=time.monotonic() + PATIENCE))
    pool.wait(PATIENCE)
    assert log.answers == ["blocker", ("failed", 1), 2] and pool.close(PATIENCE)


def test_what_exceeds_the_limit_fails_at_once_by_size() -> None:
    pool, log = WorkerPool("test", 1, limit=4), Log()
    with blocked(pool, log):
        pool.give(log.item(1, size=3))
        pool.give(log.item(2, size=2))
        assert log.answers == [("failed", 2)] and pool.waiting == 3
        pool.give(log.item(3))
    pool.wait(PATIENCE)
    assert log.answers == [("failed", 2), "blocker", 1, 3] and pool.waiting == 0 and pool.close(PATIENCE)


def test_closing_fails_what_waits_and_says_whether_the_threads_have_ended() -> None:
    pool, log = WorkerPool("test", 1), Log()
    with blocked(pool, log):
        pool.give(log.item(1))
        assert not pool.close(0.05)
        pool.give(log.item(2))
        assert log.answers == [("failed", 1), ("failed", 2)]
    assert pool.close(PATIENCE) and log.answers[2:] == ["blocker"]


def test_a_pool_that_is_shut_does_what_waits() -> None:
    pool, log = WorkerPool("test", 1), Log()
    with blocked(pool, log):
        pool.give(log.item(1))
        pool.shut()
        pool.give(log.item(2))
    pool.wait(PATIENCE)
    assert log.answers == [("failed", 2), "blocker", 1] and pool.close(PATIENCE)


def test_idle_runs_after_tasks_after_a_wake_that_comes_meanwhile_and_as_soon_as_it_asked_to() -> None:
    calls, inside, go = [], threading.Event(), threading.Event()

    def idle() -> float | None:
        calls.append(time.monotonic())
        if len(calls) == 1:
            inside.set()
            assert go.wait(PATIENCE)
            return None
        return 0.01 if len(calls) == 2 else None

    pool, log = WorkerPool("test", 1, idle=idle), Log()
    pool.give(log.item(1))
    assert inside.wait(PATIENCE)
    pool.wake()  # the thread does not wait just now: the wake is not lost
    go.set()
    until(lambda: len(calls) == 3, "it was woken, and called again after its pause")
    time.sleep(0.05)
    assert len(calls) == 3 and pool.close(PATIENCE)


class Notes:
    """A notifier."""

    def __init__(self) -> None:
        self.told, self.closed = 0, False

    def notify(self) -> None:
        assert not self.closed
        self.told += 1

    def close(self) -> None:
        self.closed = True


def test_an_answer_is_fetched_once_and_told_of_until_the_end() -> None:
    notes = Notes()
    answers: PendingAnswers[str] = PendingAnswers(notes)
    answers.answer(1, "one")
    answers.answer(2, "two")
    assert (answers.fetch(2), answers.fetch(2), answers.fetch_all(), answers.fetch_all()) == (
        "two",
        None,
        {1: "one"},
        {},
    )
    answers.close()
    answers.answer(3, "three")
    answers.close()
    assert answers.fetch_all() == {3: "three"} and notes.told == 2 and notes.closed


def test_answers_that_are_not_fetched_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: PendingAnswers[int] = PendingAnswers()
    monkeypatch.setattr(worker_pool, "MAX_ANSWERS", 3)
    for number in range(5):
        answers.answer(number, number)
    assert list(answers.fetch_all()) == [2, 3, 4]


def test_who_waits_for_an_answer_is_woken_by_it() -> None:
    answers: PendingAnswers[int] = PendingAnswers()
    began = time.monotonic()
    answers.wait(0.05)
    assert time.monotonic() - began >= 0.04
    waiter = threading.Thread(target=answers.wait, args=(PATIENCE,))
    waiter.start()
    answers.answer(1, 1)
    waiter.join(PATIENCE / 2)
    assert not waiter.is_alive()
