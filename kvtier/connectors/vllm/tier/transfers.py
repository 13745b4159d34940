"""Lookups and transfers of vLLM's scheduler, which must not wait: taken at once, answered later by threads.

`ChunkLookups` ask whether a chunk is stored; each has an answer after `LOOKUP_SECONDS` at the latest, a miss where
nobody knows. `Transfers` are jobs; each is answered exactly once, by what was moved of it, whatever happens. A job has
a deadline from its submission on: one that has waited too long is answered as failed without a byte touched, and what
runs ends by it. Knows neither vLLM nor the daemon. Thread-safe.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtier.connectors.common.worker_pool import PendingAnswers, WorkerPool, WorkItem

LOOKUP_SECONDS = 2.0  # after which a lookup counts as a miss
MAX_LOOKUPS = 1 << 16  # chunks without an answer; more are misses at once
MAX_JOBS = 1024  # that wait, in each direction; more fail at once


@dataclass(eq=False, slots=True)
class ChunkLookup:
    """Whether the chunk of a key is stored. `found`: None until known. `askers`: its requests."""

    key: bytes
    run: tuple[str, bytes]
    born: float = field(default_factory=time.monotonic)
    found: bool | None = None
    askers: int = 0


class ChunkLookups:
    """One thread that asks for what has gathered since the last `flush`. An answer lives as long as a request for it.

    All methods are called by the scheduler's thread. `find` is called with the keys of one request and group, in order:
    for each of them whether it is stored; None where nobody answers.
    """

    def __init__(self, find: Callable[[Sequence[bytes]], Sequence[bool] | None]) -> None:
        self._find = find
        self._known: dict[bytes, ChunkLookup] = {}
        self._by_asker: dict[str, set[bytes]] = defaultdict(set)
        self._fresh: list[ChunkLookup] = []
        self._pool = WorkerPool("tier-lookup", 1, "lookup", MAX_LOOKUPS)

    def ask(self, key: bytes, asker: str) -> bool | None:
        """The answer, None: not yet. Never waits."""
        lookup = self._known.get(key)
        if lookup is None:
            lookup = self._known[key] = ChunkLookup(key, (asker, key[-4:]))
            self._fresh.append(lookup)
        if key not in self._by_asker[asker]:
            self._by_asker[asker].add(key)
            lookup.askers += 1
        if lookup.found is None and time.monotonic() - lookup.born > LOOKUP_SECONDS:
            lookup.found = False
        return lookup.found

    def flush(self) -> None:
        """Hands what is new to the thread, in runs of one request and group."""
        fresh, self._fresh = self._fresh, []
        runs: dict[tuple[str, bytes], list[ChunkLookup]] = defaultdict(list)
        for lookup in fresh:
            runs[lookup.run].append(lookup)
        for run in runs.values():
            self._pool.give(WorkItem(partial(self._ask, run), partial(_answer, run), frozenset(), size=len(run)))

    def miss(self, keys: Collection[bytes]) -> None:
        """From now on the answer for these is no: else a load that fails would be asked for again and again."""
        for key in keys:
            if lookup := self._known.get(key):
                lookup.found = False

    def forget(self, asker: str) -> None:
        """A request has ended."""
        for key in self._by_asker.pop(asker, ()):
            lookup = self._known[key]
            lookup.askers -= 1
            if not lookup.askers:
                del self._known[key]

    def __len__(self) -> int:
        return len(self._known)

    def close(self, seconds: float) -> None:
        """Ends the thread; waits so long for it."""
        self._pool.close(seconds)

    def _ask(self, run: list[ChunkLookup]) -> frozenset[bytes]:
        """Keys of a run that are stored."""
        keys = [lookup.key for lookup in run if lookup.found is None]
        found = (self._find(keys) if keys else None) or [False] * len(keys)
        return frozenset(key for key, there in zip(keys, found, strict=True) if there)


def _answer(run: list[ChunkLookup], there: frozenset[bytes]) -> None:
    for lookup in run:
        if lookup.found is None:
            lookup.found = lookup.key in there


@dataclass(eq=False, slots=True)
class Job:
    """Chunks to be stored or loaded: keys, and their rows in the CPU pool. `until`: no byte is touched after that."""

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
    """A pool for each direction. `move` does a job and says which keys it moved; `after` runs once it is answered."""

    def __init__(self, move: Callable[[Job], list[bytes]], after: Callable[[], None], loaders: int) -> None:
        self._move = move
        self.answers: PendingAnswers[Done] = PendingAnswers()
        self.loading = WorkerPool("tier-load", loaders, "transfer", MAX_JOBS, after)
        self.storing = WorkerPool("tier-store", 1, "transfer", MAX_JOBS, after)

    def submit(self, job: Job) -> None:
        """Queues a job; it fails at once where too many wait or after `close`. Never waits."""
        pool = self.loading if job.load else self.storing
        pool.give(WorkItem(partial(self._move, job), partial(self._answer, job), [], job.until))

    def fail(self, job: Job) -> None:
        """Answers a job that was not begun."""
        self._answer(job, [])

    def take(self) -> list[Done]:
        """Answers since the last call. Never waits."""
        return list(self.answers.fetch_all().values())

    def drain(self) -> None:
        """Fails what waits and returns once nothing runs any more, which is by the last job's deadline."""
        for pool in (self.loading, self.storing):
            pool.drop()
        for pool in (self.loading, self.storing):
            pool.wait()

    def close(self, seconds: float, end: Callable[[], None]) -> bool:
        """Fails loads that wait, stores on for so long, then calls `end` for what runs. Whether all threads ended."""
        pools, until = (self.loading, self.storing), time.monotonic() + seconds
        for pool in pools:
            pool.shut()
        self.loading.drop()
        for pool in pools:
            pool.wait(max(0.0, until - time.monotonic()))
        for pool in pools:
            pool.drop()
        end()
        until = time.monotonic() + seconds
        ended = [pool.close(max(0.1, until - time.monotonic())) for pool in pools]
        return all(ended)

    def _answer(self, job: Job, good: list[bytes]) -> None:
        self.answers.answer(job.id, Done(job, good, time.monotonic() - job.born))
