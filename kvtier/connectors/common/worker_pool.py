"""Threads with a bounded queue, and answers that wait to be fetched: what keeps an engine's own thread from waiting.

A task that is given to a `WorkerPool` is answered exactly once, whatever happens: `end` takes what `run` returned, or
`failed` where `run` raised, the task waited past its deadline, the queue had no place for it, or the pool was closed
before its turn. Thread-safe; `end` and `idle` are called without a lock held. Knows no engine.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

MAX_ANSWERS = 1 << 16  # answers that nobody has fetched; beyond that the oldest go, as those who asked have gone
TICK_SECONDS = 60.0
R = TypeVar("R")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkItem(Generic[R]):
    """`run` does it; `end` takes what it returned, or `failed`. Not begun after `until`. `size`: of the limit."""

    run: Callable[[], R]
    end: Callable[[R], None]
    failed: R
    until: float = math.inf
    size: int = 1


class WorkerPool:
    """Threads that take tasks from one queue in order.

    limit   sizes of waiting tasks together; what would exceed it fails at once
    idle    called by a thread after each task, after `wake`, and when nothing has come for `tick` seconds, or for as
            long as it returned
    noun    what a task is, for the log
    """

    def __init__(
        self,
        name: str,
        threads: int,
        noun: str = "task",
        limit: float = math.inf,
        idle: Callable[[], float | None] | None = None,
        tick: float = TICK_SECONDS,
    ) -> None:
        self._noun, self._limit, self._idle, self._tick = noun, limit, idle, tick
        lock = threading.Lock()
        self._wake, self._done = threading.Condition(lock), threading.Condition(lock)
        self._queue: deque[WorkItem[Any]] = deque()
        self.waiting = 0  # sizes of the tasks in the queue together
        self.running = 0  # tasks that threads are at
        self._woken = self._closed = False
        made = (threading.Thread(target=self._work, name=f"kvtier-{name}", daemon=True) for _ in range(threads))
        self._threads = list(made)
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether all threads run."""
        return all(thread.is_alive() for thread in self._threads)

    def give(self, item: WorkItem[Any], first: bool = False) -> None:
        """Queues a task, or fails it at once. `first`: before those that wait. Never waits."""
        with self._wake:
            taken = not self._closed and self.waiting + item.size <= self._limit
            if taken:
                self.waiting += item.size
                (self._queue.appendleft if first else self._queue.append)(item)
                self._wake.notify()
        if not taken:
            item.end(item.failed)

    def wake(self) -> None:
        """Lets `idle` run soon."""
        with self._wake:
            self._woken = True
            self._wake.notify()

    def drop(self) -> None:
        """Fails what waits."""
        with self._wake:
            items = list(self._queue)
            self._queue.clear()
            self.waiting = 0
            self._done.notify_all()
        for item in items:
            item.end(item.failed)

    def wait(self, seconds: float | None = None) -> None:
        """Until nothing waits or runs, at most so long."""
        with self._done:
            self._done.wait_for(lambda: not self.running and not self._queue, seconds)

    def shut(self) -> None:
        """Takes no more tasks. Those that wait are still done, then the threads end."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def close(self, seconds: float) -> bool:
        """Takes no more tasks, fails what waits, and waits so long for what runs. Whether all threads have ended."""
        self.shut()
        self.drop()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        pause: float | None = None
        while True:
            with self._wake:
                if not (self._queue or self._woken or self._closed):
                    self._wake.wait(self._tick if pause is None else pause)
                if self._closed and not self._queue:
                    return
                self._woken = False
                item = self._queue.popleft() if self._queue else None
                if item is not None:
                    self.waiting -= item.size
                    self.running += 1
            if item is not None:
                self._answer(item)
                with self._done:
                    self.running -= 1
                    self._done.notify_all()
            if self._idle is not None:
                try:
                    pause = self._idle()
                except Exception:
                    log.exception("kvtier: what is done between %ss failed", self._noun)

    def _answer(self, item: WorkItem[Any]) -> None:
        answer = item.failed
        try:
            if time.monotonic() < item.until:
                answer = item.run()
        except Exception:
            log.exception("kvtier: a %s failed", self._noun)
        try:
            item.end(answer)
        except Exception:
            log.exception("kvtier: the answer of a %s could not be given", self._noun)


class Notifier(Protocol):
    """What is told of each answer. Its methods must not wait."""

    def notify(self) -> None:
        """An answer is there."""

    def close(self) -> None:
        """No more will come."""


class PendingAnswers(Generic[R]):
    """Answers by the number of their task, each fetched once."""

    def __init__(self, notifier: Notifier | None = None) -> None:
        self._notifier = notifier
        self._changed = threading.Condition()
        self._answers: dict[int, R] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def answer(self, number: int, answer: R) -> None:
        """Lays an answer out and tells the notifier."""
        with self._changed:
            if len(self._answers) >= MAX_ANSWERS:
                del self._answers[next(iter(self._answers))]
            self._answers[number] = answer
            self._changed.notify_all()
            if self._notifier is not None:
                self._notifier.notify()

    def fetch(self, number: int) -> R | None:
        """A task's answer, once; None: not yet, or fetched before."""
        with self._changed:
            return self._answers.pop(number, None)

    def fetch_all(self) -> dict[int, R]:
        """All answers that nobody has fetched, in order."""
        with self._changed:
            answers, self._answers = self._answers, {}
        return answers

    def wait(self, seconds: float) -> None:
        """Until there is an answer to fetch, at most so long."""
        with self._changed:
            if not self._answers:
                self._changed.wait(seconds)

    def close(self) -> None:
        """Ends the notifier. Answers can be laid out and fetched all the same."""
        with self._changed:
            if self._notifier is not None:
                self._notifier.close()
                self._notifier = None
