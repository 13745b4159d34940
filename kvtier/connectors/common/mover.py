"""Copies between an engine's cache and the store, in threads. The engine waits only for loads that its next step needs.

Each block's copy is one act under a lock. Whoever takes an engine block away (a fence, a deadline, a cancelled request)
does so under that lock: a copy that has begun ends first, one that has not never begins. So no copy reads a block that
has a new owner, and none writes into a block that was reported as failed. `load`, `finished`, `fence` and `save` are
called by the engine's thread; `drain` and `close` by any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Protocol

from kvtier.client.answers import Body
from kvtier.client.api import Client, RegisteredNamespace
from kvtier.connectors.common.jobs import Load, Save
from kvtier.connectors.common.lookups import Heartbeat, label
from kvtier.connectors.common.worker_pool import PendingAnswers, WorkerPool, WorkItem
from kvtier.format.layout import Extents, Range
from kvtier.protocol.stops import Stop

LOAD_SECONDS = 5.0  # a load between steps that takes longer has failed
SYNC_SECONDS = 1.0  # as long may a load hold up the step that needs it
CALL_SECONDS = 1.0  # deadline of one call to the daemon
# As long may a step wait for the save of a block that it is about to overwrite; then the save is dropped.
FENCE_SECONDS = 0.02
FLUSH_SECONDS = 2.0  # at the end
BATCH_BYTES = 8 << 20  # reserved at once for saving
MAX_QUEUED = 4096  # blocks that wait to be saved; more are dropped
LOADERS = 2
Count = Callable[[str, float, str], None]
Stored = Callable[[int, int], None]
log = logging.getLogger(__name__)


class Cache(Protocol):
    """One group of the engine's caches on this rank. `extents`: its place in a block; `saver`: it is saved here."""

    extents: Extents
    saver: bool

    @property
    def batch(self) -> int:
        """Entries that one `read` takes."""

    def write(self, ready: Any, blocks: Sequence[int], slot: Body) -> Any:
        """Copies engine blocks into a slot, every byte of it, once `ready` has come. Returns what `look` looks at."""

    def look(self, written: Any) -> tuple[int, str]:
        """(clipped FP8 codes, the layer of a value that is not finite or "")."""

    def read(self, ready: Any, entries: Sequence[Sequence[int]], bodies: Sequence[Body]) -> None:
        """Copies blocks into the engine blocks that are wanted, once `ready` has come. They are there on return."""


def _call(part: Range, context: bytes) -> dict[str, Any]:
    """Options of one call to the daemon."""
    return {"range_": part, "context": context, "deadline": CALL_SECONDS}


class _Spoiled(Exception):
    """A save ends before this entry."""


@dataclass(eq=False)
class LoadJob:
    """A load under way. `done`: leading blocks loaded, per run. Once `closed`, nothing of it is copied any more."""

    load: Load
    deadline: float
    done: list[int]
    ready: Any = None
    began: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False
    reason: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def good(self) -> int:
        """Leading blocks loaded; of several runs all or none."""
        total = sum(len(run.hashes) for run in self.load.runs)
        return sum(self.done) if len(self.done) == 1 or sum(self.done) == total else 0


@dataclass(eq=False)
class _SaveJob:
    """`limit`: entries from here on may not be copied; `copied`: those before have been; `began`: 0 until it runs."""

    save: Save
    ready: Any
    limit: int
    copied: int = 0
    reason: str = ""
    began: float = 0.0

    def first_in(self, fence: set[int]) -> int | None:
        """The first entry that is not copied yet and stands in the fence."""
        blocks = self.save.run.blocks
        return next((at for at in range(self.copied, self.limit) if not fence.isdisjoint(blocks[at])), None)


Held = tuple[Sequence[Cache | None], Sequence[Range | None]]  # per group, None where this rank holds nothing


class Mover:
    """Threads over one client. `rate`: bytes a second that may be saved; 0: no limit. `count(name, value, label)` is
    called from any thread, and `stored(id, n)` for each save: its leading blocks stored."""

    def __init__(self, client: Client, ns: RegisteredNamespace, held: Held, rate: int, count: Count, stored: Stored):
        self._client, self._ns, (self._caches, self._ranges) = client, ns, held
        self._rate, self._allowance, self._refilled = rate, 0.0, time.monotonic()
        self._count, self._stored = count, stored
        self._changed = threading.Condition()  # around `_saves`, told when one ends
        self._copying = threading.Lock()  # one block at a time on its way out
        self._jobs: dict[int, LoadJob] = {}
        self._over: PendingAnswers[LoadJob] = PendingAnswers()
        self._saves: list[_SaveJob] = []  # waiting and under way
        self._logged: set[str] = set()
        self._closed = False
        self.heartbeat = Heartbeat(client, "worker")
        self.heartbeat.start(ns)
        self._saving = WorkerPool("save", 1, "save")
        self._loading = WorkerPool("load", LOADERS, "load")

    # -- loads

    def load(self, loads: Sequence[Load], ready: Any = None) -> None:
        """Starts loads, and waits for those that the next step needs. `ready`: an event of the device after which what
        was in these blocks is not read any more."""
        now, limit = time.monotonic(), {True: SYNC_SECONDS, False: LOAD_SECONDS}
        jobs = [LoadJob(load, now + limit[load.sync], [0] * len(load.runs), ready) for load in loads]
        self._jobs |= {job.load.id: job for job in jobs}
        for job in jobs:
            if self.heartbeat.healthy:
                self._loading.give(WorkItem(partial(self._load, job), partial(self._end, job), "error"))
            else:
                self._end(job, "away")
        for job in jobs:
            if job.load.sync and not job.over.wait(max(0.0, job.deadline - time.monotonic())):
                self._end(job, "deadline")

    def wait(self, seconds: float) -> None:
        """Until a load is over, at most so long; not at all where none is under way."""
        if self._jobs:
            self._over.wait(seconds)

    def cancel(self, id_: int) -> None:
        """Nobody needs this load any more. It is reported as over all the same."""
        if id_ in self._jobs:
            self._end(self._jobs[id_], "cancelled")

    def finished(self) -> list[LoadJob]:
        """Loads that are over since the last call, each once; those past their deadline have failed."""
        now = time.monotonic()
        for job in list(self._jobs.values()):
            if now > job.deadline:
                self._end(job, "deadline")
        over = list(self._over.fetch_all().values())
        for job in over:
            del self._jobs[job.load.id]
            self._count("load_seconds", now - job.began, "")
            if job.reason:
                self._count("load_failures", 1, job.reason)
        return over

    def _end(self, job: LoadJob, reason: str) -> None:
        """Closes a load, once. `reason`: why it failed, or ""."""
        with job.lock:
            if job.closed:
                return
            job.closed, job.reason = True, reason
        self._over.answer(job.load.id, job)
        job.over.set()

    def _load(self, job: LoadJob) -> str:
        """Copies blocks until all are there or the load is closed. Returns why it failed, or ""."""
        for number, run in enumerate(job.load.runs):
            cache, part = self._caches[run.group], self._ranges[run.group]
            if cache is None or part is None:
                job.done[number] = len(run.hashes)
                continue
            while (at := job.done[number]) < len(run.hashes):
                call = _call(part, job.load.context)
                with self._client.lease(self._ns, run.hashes[at:], **call) as blocks:
                    views, entry = iter(blocks), at
                    while batch := list(islice(views, cache.batch)):
                        with job.lock:
                            if job.closed:
                                return ""
                            cache.read(job.ready, run.blocks[entry : entry + len(batch)], batch)
                            entry += len(batch)
                            job.done[number] = entry
                    got, capped = len(blocks), blocks.stop == Stop.CAP
                self._count("load_bytes", got * cache.extents.body_bytes, "")
                if at + got < len(run.hashes) and not capped:
                    self.heartbeat.judge(blocks)
                    return label(blocks)
                # Our own cap, because of other loads: wait for them, until the deadline closes this one.
                if not got and job.over.wait(0.005):
                    return ""
        return ""

    # -- saves

    def save(self, saves: Sequence[Save], ready: Any) -> None:
        """Queues what the step has filled. `ready`: an event of the device after which it is there."""
        fresh = []
        with self._changed:
            waiting = sum(job.limit for job in self._saves if not job.began)
            for save in saves:
                n, cache = len(save.run.hashes), self._caches[save.run.group]
                if cache is None or not cache.saver:
                    continue
                if waiting + n > MAX_QUEUED:
                    self._count("save_dropped_blocks", n, "queue")
                    continue
                waiting += n
                fresh.append(_SaveJob(save, ready, n))
            self._saves += fresh
        for job in fresh:
            item: WorkItem[int | None] = WorkItem(partial(self._save, job), partial(self._saved, job), None)
            self._saving.give(item)

    def fence(self, blocks: set[int]) -> None:
        """These engine blocks get new owners now. A save that copies them may end within `FENCE_SECONDS`."""
        until = time.monotonic() + FENCE_SECONDS
        with self._changed:
            while any(job.began and job.first_in(blocks) is not None for job in self._saves):
                if time.monotonic() >= until:
                    break
                self._changed.wait(0.001)
            jobs = list(self._saves)
        with self._copying:
            for job in jobs:
                first = job.first_in(blocks)
                if first is not None:
                    job.limit, job.reason = first, "overwritten"

    def _saved(self, job: _SaveJob, done: int | None) -> None:
        """A save is over. `done`: its leading blocks that are stored; None: it failed."""
        n = len(job.save.run.hashes)
        if done is None:
            done, job.reason = 0, "error"
        self._count("save_seconds", time.monotonic() - (job.began or time.monotonic()), "")
        if done < n:
            self._count("save_dropped_blocks", n - done, job.reason or "other")
        self._stored(job.save.id, done)
        with self._changed:
            self._saves.remove(job)
            self._changed.notify_all()

    def _save(self, job: _SaveJob) -> int:
        """Leading blocks of a job that are stored now."""
        job.began = time.monotonic()
        cache = self._caches[job.save.run.group]
        assert cache is not None
        size, done = max(1, BATCH_BYTES // cache.extents.slot_bytes), 0
        while done < job.limit:
            n = min(size, job.limit - done)
            if not self.heartbeat.healthy or not self._may_spend():
                job.reason = "rate" if self.heartbeat.healthy else "away"
                break
            got = self._save_batch(job, cache, done, n)
            done += got
            if got < n:
                break
        return done

    def _save_batch(self, job: _SaveJob, cache: Cache, first: int, n: int) -> int:
        """Stores entries [first, first + n): how many leading ones of them are stored now."""
        run, part, copied, clipped = job.save.run, self._ranges[job.save.run.group], 0, 0
        assert part is not None
        try:
            hashes = run.hashes[first : first + n]
            with self._client.fill(self._ns, hashes, **_call(part, job.save.context)) as slots:
                if slots.error:
                    job.reason = label(slots)
                    self.heartbeat.judge(slots)
                    return 0
                fresh = [slot is not None for slot in slots]
                for entry, slot in enumerate(slots, first):
                    if slot is not None:
                        clipped += self._copy(job, cache, first, entry, slot)
                    copied += 1
        except _Spoiled:
            return self._save_batch(job, cache, first, copied) if copied else 0  # what stands before it is of use
        stored = sum(fresh[: slots.sealed])
        if slots.sealed < n:
            job.reason = label(slots)
        self._allowance -= stored * cache.extents.body_bytes
        self._count("save_blocks", stored, "")
        self._count("save_known_blocks", slots.sealed - stored, "")
        self._count("clipped_codes", clipped, "")
        self._count("save_bytes", stored * cache.extents.body_bytes, "")
        return slots.sealed

    def _copy(self, job: _SaveJob, cache: Cache, first: int, entry: int, slot: Body) -> int:
        """Copies one block out, as one act under the lock. Returns its clipped codes. Raises _Spoiled if it has a new
        owner or a value is not finite: then the batch is copied anew from `first`, so these are fenced again."""
        with self._copying:
            if entry >= job.limit:
                job.copied = first
                raise _Spoiled
            written = cache.write(job.ready, job.save.run.blocks[entry], slot)
            job.copied = entry + 1
        clipped, layer = cache.look(written)
        if layer:
            with self._copying:
                job.limit, job.copied, job.reason = min(job.limit, entry), first, "not finite"
            if layer not in self._logged:
                self._logged.add(layer)
                log.error("kvtier: layer %s has values that are not finite; such blocks are not stored", layer)
            raise _Spoiled
        return clipped

    def _may_spend(self) -> bool:
        """Whether the bytes-per-second cap leaves room; up to one second's worth may be saved up."""
        if not self._rate:
            return True
        now = time.monotonic()
        self._allowance = min(float(self._rate), self._allowance + (now - self._refilled) * self._rate)
        self._refilled = now
        return self._allowance > 0

    # -- the end

    def drain(self, seconds: float) -> None:
        """Lets saves end for so long, then drops the rest: no thread touches the engine's memory then."""
        with self._changed:
            self._changed.wait_for(lambda: not self._saves, seconds)
            jobs = list(self._saves)
        with self._copying:
            for job in jobs:
                job.limit, job.reason = min(job.limit, job.copied), "shutdown"
        for load in list(self._jobs.values()):
            self._end(load, "cancelled")

    def close(self) -> None:
        """Ends threads and session. Once is enough."""
        if self._closed:
            return
        self._closed = True
        self.drain(FLUSH_SECONDS)
        self.heartbeat.stop()
        self._saving.close(1.0)
        self._loading.close(1.0)
        self._client.close()
