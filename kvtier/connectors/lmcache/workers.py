"""Tasks as LMCache wants them: submitted without waiting, answered exactly once, announced on an event descriptor of their kind.

A `PendingAnswers` hands out ids and answers of one kind of task; a `WorkerPool` is threads with one bounded queue. Whatever a task runs into, its id is answered:
with what it failed to do. LMCache's locks on the buffers of a task have an end, 300 s from its submission: what has waited for long is failed without
touching them. After `close` nothing of a task runs any more, and what waited is answered as failed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

MAX_WAITING = 4096  # tasks in a queue; more fail at once
WAIT_SECONDS = 60.0  # in the queue, at most
MAX_ANSWERS = 1 << 16  # answers that nobody has fetched; the oldest go, as those who asked have gone
R = TypeVar("R")
log = logging.getLogger(__name__)


class PendingAnswers(Generic[R]):
    """Answers of one kind of task, each fetched once."""

    def __init__(self, ids: Iterator[int]) -> None:
        self._ids = ids
        self._event = create_event_notifier()
        self._lock = threading.Lock()
        self._answers: dict[int, R] = {}
        self._closed = False

    def open(self) -> int:
        """The id of a new task."""
        return next(self._ids)

    def fileno(self) -> int:
        return int(self._event.fileno())

    def answer(self, task: int, answer: R) -> None:
        """Lays an answer out and says so on the descriptor."""
        with self._lock:
            if len(self._answers) >= MAX_ANSWERS:
                del self._answers[next(iter(self._answers))]
            self._answers[task] = answer
            if not self._closed:
                self._event.notify()

    def fetch(self, task: int) -> R | None:
        """A task's answer, once; None: not yet, or fetched before."""
        with self._lock:
            return self._answers.pop(task, None)

    def fetch_all(self) -> dict[int, R]:
        """All answers that nobody has fetched."""
        with self._lock:
            answers, self._answers = self._answers, {}
        return answers

    def close(self) -> None:
        """Closes the descriptor."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._event.close()


@dataclass(frozen=True, slots=True)
class WorkItem(Generic[R]):
    """`run` does it; `end` takes what it returned, or `failed`."""

    run: Callable[[], R]
    end: Callable[[R], None]
    failed: R
    born: float = field(default_factory=time.monotonic)


class WorkerPool:
    """Threads that take tasks from one queue in order. `idle` is called about every `tick` seconds by one of them, if given."""

    def __init__(self, name: str, threads: int, idle: Callable[[], None] | None = None, tick: float = 1.0) -> None:
        self._wake = threading.Condition()
        self._waiting: deque[WorkItem[Any]] = deque()
        self._idle, self._tick = idle, tick
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtier-{name}", daemon=True) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def give(self, task: WorkItem[Any]) -> None:
        """Queues a task; it fails at once where the queue is full or closed."""
        with self._wake:
            taken = not self._closed and len(self._waiting) < MAX_WAITING
            if taken:
                self._waiting.append(task)
                self._wake.notify()
        if not taken:
            task.end(task.failed)

    def wake(self) -> None:
        """Lets `idle` run soon."""
        with self._wake:
            self._wake.notify()

    def close(self, seconds: float) -> None:
        """Fails what waits, and waits so long for what runs."""
        with self._wake:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._wake.notify_all()
        for task in waiting:
            task.end(task.failed)
        for thread in self._threads:
            thread.join(seconds)

    def _work(self) -> None:
        while True:
            with self._wake:
                if not self._waiting and not self._closed:
                    self._wake.wait(self._tick)
                if self._closed:
                    return
                task = self._waiting.popleft() if self._waiting else None
            if task is not None:
                self._run(task)
            if self._idle is not None:
                self._run(WorkItem(self._idle, lambda _: None, None))

    def _run(self, task: WorkItem[Any]) -> None:
        answer = task.failed
        try:
            if time.monotonic() - task.born < WAIT_SECONDS:
                answer = task.run()
        except Exception:
            log.exception("kvtier: a task failed")
        try:
            task.end(answer)
        except Exception:
            log.exception("kvtier: an answer could not be given")
