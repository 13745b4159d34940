"""Questions and transfers of vLLM's scheduler, which must not wait: asked and submitted at once, answered later by threads of ours.

`Questions` are whether a chunk is stored; each has an answer after `QUESTION_SECONDS` at the latest, a miss where nobody knows. `Transfers` are jobs;
each is answered exactly once, by what was moved of it, whatever happens. A job has a deadline from its submission on: one that has waited too long
is answered as failed without a byte touched, and what runs ends by it. Knows neither vLLM nor the daemon. Thread-safe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

QUESTION_SECONDS = 2.0  # after which a question counts as a miss
MAX_QUESTIONS = 1 << 16  # without an answer; more are misses at once
MAX_JOBS = 1024  # that wait; more fail at once
log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class ChunkQuestion:
    """Whether the chunk of a key is stored. `found` is None until it is known; the first answer counts. `askers`: requests that still want it."""

    key: bytes
    run: tuple[str, bytes]
    born: float = field(default_factory=time.monotonic)
    found: bool | None = None
    askers: int = 0


class Questions:
    """One thread that asks for what has gathered since the last `flush`. An answer is kept as long as a request that asked for it lives.

    All methods but the thread's are called by the scheduler's thread. `find` is called with the keys of one request and group, in order: for each of
    them whether it is stored; None where nobody answers.
    """

    def __init__(self, find: Callable[[Sequence[bytes]], Sequence[bool] | None]) -> None:
        self._find = find
        self._known: dict[bytes, ChunkQuestion] = {}
        self._by_asker: dict[str, set[bytes]] = defaultdict(set)
        self._fresh: list[ChunkQuestion] = []
        self._wake = threading.Condition()
        self._asked: deque[ChunkQuestion] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kvtier-tier-lookup", daemon=True)
        self._thread.start()

    def ask(self, key: bytes, asker: str) -> bool | None:
        """The answer, None: not yet. Never waits."""
        question = self._known.get(key)
        if question is None:
            question = self._known[key] = ChunkQuestion(key, (asker, key[-4:]))
            self._fresh.append(question)
        if key not in self._by_asker[asker]:
            self._by_asker[asker].add(key)
            question.askers += 1
        if question.found is None and time.monotonic() - question.born > QUESTION_SECONDS:
            question.found = False
        return question.found

    def flush(self) -> None:
        """Hands what is new to the thread."""
        fresh, self._fresh = self._fresh, []
        if not fresh:
            return
        with self._wake:
            room = 0 if self._closed else max(0, MAX_QUESTIONS - len(self._asked))
            self._asked.extend(fresh[:room])
            self._wake.notify()
        for question in fresh[room:]:
            question.found = False

    def miss(self, keys: Collection[bytes]) -> None:
        """From now on the answer for these is no: else a load that fails would be asked for again and again."""
        for key in keys:
            if question := self._known.get(key):
                question.found = False

    def forget(self, asker: str) -> None:
        """A request has ended."""
        for key in self._by_asker.pop(asker, ()):
            question = self._known[key]
            question.askers -= 1
            if not question.askers:
                del self._known[key]

    def __len__(self) -> int:
        return len(self._known)

    def close(self, seconds: float) -> None:
        """Ends the thread; waits so long for it."""
        with self._wake:
            self._closed = True
            self._asked.clear()
            self._wake.notify()
        self._thread.join(seconds)

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._asked and not self._closed:
                    self._wake.wait(60.0)
                if self._closed:
                    return
                asked = list(self._asked)
                self._asked.clear()
            runs: dict[tuple[str, bytes], list[ChunkQuestion]] = defaultdict(list)
            for question in asked:
                runs[question.run].append(question)
            for run in runs.values():
                self._answer([question for question in run if question.found is None])

    def _answer(self, run: list[ChunkQuestion]) -> None:
        found: Sequence[bool] | None = None
        try:
            found = self._find([question.key for question in run]) if run else []
        except Exception:
            log.exception("kvtier: a lookup failed")
        for question, there in zip(run, found or [False] * len(run), strict=True):
            if question.found is None:
                question.found = there


@dataclass(eq=False, slots=True)
class Job:
    """Chunks to be stored or loaded: keys and, as numbers, their rows in the CPU pool. `until`: no byte is touched after that."""

    id: int
    load: bool
    keys: list[bytes]
    rows: list[int]
    until: float
    born: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Done:
    """A job's answer: the keys that were moved whole, and the seconds since it was submitted."""

    job: Job
    good: list[bytes]
    seconds: float


class Transfers:
    """Threads with a queue for each direction. `move` does a job and says which keys it moved; `after` is called once it is answered."""

    def __init__(self, move: Callable[[Job], list[bytes]], after: Callable[[], None], loaders: int) -> None:
        self._move, self._after = move, after
        self._wake = threading.Condition()
        self._waiting: dict[bool, deque[Job]] = {True: deque(), False: deque()}
        self._running = 0
        self._done: deque[Done] = deque()
        self._closed = self._ended = False
        kinds = [True] * loaders + [False]
        self._threads = [
            threading.Thread(
                target=self._work, args=(load,), name=f"kvtier-tier-{'load' if load else 'store'}", daemon=True
            )
            for load in kinds
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queues a job; it fails at once where too many wait or after `close`. Never waits."""
        with self._wake:
            queue = self._waiting[job.load]
            if not self._closed and len(queue) < MAX_JOBS:
                queue.append(job)
                self._wake.notify_all()
                return
        self.fail(job)

    def fail(self, job: Job) -> None:
        """Answers a job that was not begun."""
        self._done.append(Done(job, [], time.monotonic() - job.born))

    def take(self) -> list[Done]:
        """Answers since the last call. Never waits."""
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    def drain(self) -> None:
        """Fails what waits and returns once nothing runs any more, which is by the last job's deadline."""
        with self._wake:
            waiting = self._empty()
            while self._running:
                self._wake.wait(1.0)
        for job in waiting:
            self.fail(job)

    def close(self, seconds: float, end: Callable[[], None]) -> bool:
        """Fails loads that wait and goes on storing for so long; then calls `end`, which is to end what runs. Whether all threads have ended."""
        with self._wake:
            self._closed = True
            waiting = self._empty(True)
            self._wake.wait_for(lambda: not self._running and not any(self._waiting.values()), seconds)
            waiting += self._empty()
            self._ended = True
            self._wake.notify_all()
        for job in waiting:
            self.fail(job)
        end()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.1, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _empty(self, *kinds: bool) -> list[Job]:
        """Takes out what waits, of one kind or all. Call with the lock held."""
        found: list[Job] = []
        for kind in kinds or (True, False):
            found += self._waiting[kind]
            self._waiting[kind].clear()
        return found

    def _work(self, load: bool) -> None:
        queue = self._waiting[load]
        while True:
            with self._wake:
                while not queue and not self._ended:
                    self._wake.wait(60.0)
                if not queue:
                    return
                job = queue.popleft()
                self._running += 1
            good: list[bytes] = []
            try:
                if time.monotonic() < job.until:
                    good = self._move(job)
            except Exception:
                log.exception("kvtier: a transfer failed")
            self._done.append(Done(job, good, time.monotonic() - job.born))
            with self._wake:
                self._running -= 1
                self._wake.notify_all()
            try:
                self._after()
            except Exception:
                log.exception("kvtier: leases could not be released")
