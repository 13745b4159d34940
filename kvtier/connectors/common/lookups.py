"""Asking the daemon for a scheduler that must not wait: a thread with a client of its own, and a heartbeat.

A request's lookup is answered with the token up to which every part of every rank is known *and held*: the thread
leases what it promises, so that nothing is evicted between promise and load, and lets go when the lookup is dropped.
Nothing else has a side effect. While the daemon does not answer, lookups are answered with a miss at once. Methods may
be called from any thread; none of them blocks longer than it was told to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from kvtier.client.api import Client, Ended, Lease, RegisteredNamespace
from kvtier.connectors.common.worker_pool import WorkerPool, WorkItem
from kvtier.errors import Deadline, Full, Lost
from kvtier.format.layout import Range
from kvtier.protocol.stops import Stop

ASK_LATER = 0.001  # seconds that a question may hold up the scheduler
MISS_AFTER = 1.0  # seconds after which a question counts as a miss
BEAT = 0.5  # seconds between beats
MISSED = 0.5  # seconds after which a beat has got no answer
COLD_AGAIN = 0.02
MAX_LOOKUPS = 1024
log = logging.getLogger(__name__)


_WORKS = (0, Full.code, Lost.code)
_ERRORS = {Full.code: "full", Lost.code: "lost", Deadline.code: "deadline"}
_STOPS: dict[int, str] = {Stop.COLD: "cold", Stop.CAP: "full"}


def answered(answer: Ended) -> bool:
    """Whether the call reached a daemon that works: a block that failed its check says nothing of the others."""
    return answer.error in _WORKS


def label(answer: Ended) -> str:
    """Why an answer is not all that was asked for, as a metric's label: one of a handful."""
    return _ERRORS.get(answer.error, "away") if answer.error else _STOPS.get(answer.stop, "miss")


class Heartbeat:
    """Whether the daemon answers: asked every `BEAT`; failed calls elsewhere tell it too. `patience`: for `MISSED`."""

    def __init__(self, client: Client, name: str, patience: float | None = None) -> None:
        self._client, self._patience = client, patience
        self._probe: tuple[RegisteredNamespace, bytes] | None = None
        self._stop = threading.Event()
        self.healthy = True
        self._said: bool | None = None
        self._thread = threading.Thread(target=self._beat, name=f"kvtier-{name}-heartbeat", daemon=True)

    def start(self, ns: RegisteredNamespace) -> None:
        """From now on the daemon is asked for a block that does not exist."""
        self._probe = (ns, bytes(ns.hash_bytes))
        self._thread.start()

    def judge(self, answer: Ended) -> bool:
        """Whether a call was answered; if not, the daemon counts as away until it answers a beat."""
        if answered(answer):
            return True
        self.lost()
        return False

    def lost(self) -> None:
        """A call was not answered: the daemon counts as away until it answers a beat."""
        self.healthy = False

    def changed(self) -> bool:
        """Whether `healthy` is another than at the last call."""
        said, self._said = self._said, self.healthy
        return said != self.healthy

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(BEAT + MISSED)

    def _beat(self) -> None:
        """The first beat comes at once: it connects."""
        assert self._probe is not None
        while not self._stop.is_set():
            self.healthy = answered(self._client.lookup(*self._probe, deadline=self._patience or MISSED))
            self._stop.wait(BEAT)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A namespace as lookups need it: per group tokens of a block, window, and the parts that must all be there."""

    ns: RegisteredNamespace
    tokens: tuple[int, ...]
    windows: tuple[int | None, ...]
    parts: tuple[tuple[Range, ...], ...]
    align: int


@dataclass(eq=False)
class RequestLookup:
    """One request's question, from token `start` to at most `top`. `hashes` per group: from `start // tokens` on."""

    start: int
    top: int
    hashes: list[list[bytes]]
    context: bytes
    born: float = field(default_factory=time.monotonic)
    end: int | None = None
    failed: str = ""
    done: threading.Event = field(default_factory=threading.Event)
    dropped: bool = False
    leases: list[Lease] = field(default_factory=list)

    @property
    def failure(self) -> str:
        """Why nobody answered, in time or at all, as a metric's label; "" where the store was asked."""
        return self.failed if self.done.is_set() else "deadline"

    @property
    def left(self) -> float:
        """Seconds that the thread still has for it: a little less than until it counts as a miss."""
        return max(0.01, self.born + 0.9 * MISS_AFTER - time.monotonic())

    def answer(self) -> int | None:
        """The token up to which blocks are held; None: ask later; `start` (a miss) once MISS_AFTER is over."""
        if not self.done.is_set() and time.monotonic() - self.born > MISS_AFTER:
            return self.start
        return self.end if self.done.is_set() else None

    def miss(self, failed: str) -> None:
        """Answers it without the store."""
        self.end, self.failed = self.start, failed
        self.done.set()


class LookupQueue:
    """The thread and its queue."""

    def __init__(self, client: Client, shape: GroupShape) -> None:
        self._client, self._shape = client, shape
        # With one part and no window a lease is the answer, which spares the scheduler from waiting for another call.
        self._direct = shape.windows == (None,) and len(shape.parts[0]) == 1
        self._cold: deque[tuple[float, RequestLookup]] = deque()  # to be asked again, and when
        self._dropped: deque[RequestLookup] = deque()
        self.heartbeat = Heartbeat(client, "scheduler")
        self.heartbeat.start(shape.ns)
        self._pool = WorkerPool("lookup", 1, "lookup", idle=self._tend)

    def ask(self, lookup: RequestLookup) -> None:
        """Asks and waits for the answer, at most `ASK_LATER`."""
        if not self.heartbeat.healthy:
            lookup.miss("away")
        elif self._pool.waiting + len(self._cold) >= MAX_LOOKUPS:
            lookup.miss("queue")
        else:
            self._give(lookup)
            lookup.done.wait(ASK_LATER)

    def drop(self, lookup: RequestLookup) -> None:
        """The answer is not needed any more: what is held for it is released, now or when it comes. Returns at once."""
        lookup.dropped = True
        self._dropped.append(lookup)
        self._pool.wake()

    def close(self) -> None:
        """Ends the thread and the client. What was held is the daemon's again."""
        self._pool.close(5.0)
        self.heartbeat.stop()
        self._client.close()

    def _give(self, lookup: RequestLookup, first: bool = False) -> None:
        item: WorkItem[bool | None] = WorkItem(partial(self._find, lookup), partial(self._ended, lookup), None)
        self._pool.give(item, first)

    def _ended(self, lookup: RequestLookup, answered: bool | None) -> None:
        """`answered`: as `_find` says; None where it failed."""
        if answered:
            lookup.done.set()
        elif answered is None:
            lookup.miss("error")
        else:
            self._cold.append((time.monotonic() + COLD_AGAIN, lookup))

    def _tend(self) -> float | None:
        """Releases what was dropped and asks again for what was cold. Seconds until it is to be called again."""
        while self._dropped:
            self._release(self._dropped.popleft())
        while self._cold and self._cold[0][0] <= time.monotonic():
            self._give(self._cold.popleft()[1], first=True)
        return max(0.0, self._cold[0][0] - time.monotonic()) if self._cold else None

    def _release(self, lookup: RequestLookup) -> None:
        for lease in lookup.leases:
            lease.__exit__(None, None, None)
        lookup.leases.clear()

    def _find(self, lookup: RequestLookup) -> bool:
        """Answers a lookup. False: blocks are cold and on their way, ask again soon."""
        while self._dropped:  # before anything new is held
            self._release(self._dropped.popleft())
        if lookup.dropped:
            lookup.end = lookup.start
            return True
        lookup.failed = ""
        end = lookup.top - lookup.top % self._shape.align if self._direct else self._known(lookup)
        end, cold = self._hold(lookup, end)
        if cold and time.monotonic() - lookup.born < 0.9 * MISS_AFTER and not lookup.dropped:
            self._release(lookup)
            return False
        if end <= lookup.start:
            self._release(lookup)
        lookup.end = max(end, lookup.start)
        return True

    def _span(self, lookup: RequestLookup, group: int, end: int) -> tuple[int, int]:
        """Entries of a group's hashes that a prefix of `end` tokens needs: all, or those that the window still sees."""
        tokens, window = self._shape.tokens[group], self._shape.windows[group]
        first = lookup.start // tokens
        low = first if window is None else max(first, max(0, end - window + 1) // tokens)
        return low - first, end // tokens - first

    def _known(self, lookup: RequestLookup) -> int:
        """The largest token up to which everything that the engine will read is known, in any tier."""
        shape = self._shape
        full = [(g, part) for g, window in enumerate(shape.windows) if window is None for part in shape.parts[g]]
        runs = [(part, lookup.hashes[g]) for g, part in full]
        answers = self._client.lookup_runs(shape.ns, runs, context=lookup.context, deadline=lookup.left) if runs else []
        end = lookup.top
        for (group, _), known in zip(full, answers, strict=True):
            if not self.heartbeat.judge(known):
                lookup.failed = label(known)
                return lookup.start
            end = min(end, (lookup.start // shape.tokens[group] + known) * shape.tokens[group])
        end -= end % shape.align
        sliding = [g for g, window in enumerate(shape.windows) if window is not None]
        while sliding and end > lookup.start:
            short = min(self._window_known(lookup, group, end) for group in sliding)
            if short == end or lookup.failed:
                break
            end = short - short % shape.align
        return lookup.start if lookup.failed else end

    def _window_known(self, lookup: RequestLookup, group: int, end: int) -> int:
        """`end` if the window before it is whole, else the largest smaller token at which it may be."""
        shape = self._shape
        low, high = self._span(lookup, group, end)
        asked = lookup.hashes[group][low:high]
        for part in shape.parts[group]:
            known = self._client.lookup(shape.ns, asked, range_=part, context=lookup.context, deadline=lookup.left)
            if not self.heartbeat.judge(known):
                lookup.failed = label(known)
                return lookup.start
            if known < len(asked):
                # The first hole is at this block: a shorter prefix must end before it, or its window begin after it.
                return (lookup.start // shape.tokens[group] + low + known) * shape.tokens[group]
        return end

    def _hold(self, lookup: RequestLookup, end: int) -> tuple[int, bool]:
        """Leases what a prefix of `end` tokens needs: (the token up to which it is, whether cold blocks hinder)."""
        shape = self._shape
        cold = False
        for group, parts in enumerate(shape.parts):
            for part in parts if end > lookup.start else ():
                low, high = self._span(lookup, group, end)
                asked = lookup.hashes[group][low:high]
                if not asked:
                    continue
                lease = self._client.lease(shape.ns, asked, range_=part, context=lookup.context, deadline=lookup.left)
                lookup.leases.append(lease.__enter__())
                if len(lease) == len(asked):
                    continue
                if not self.heartbeat.judge(lease):
                    lookup.failed = label(lease)
                    return lookup.start, False
                if lease.stop == Stop.COLD and (below := self._below(lookup, part, asked)[len(lease) :]):
                    cold = True
                    self._client.prefetch(shape.ns, below, range_=part, context=lookup.context, deadline=lookup.left)
                held = (lookup.start // shape.tokens[group] + low + len(lease)) * shape.tokens[group]
                end = lookup.start if shape.windows[group] is not None else held - held % shape.align
        return end, cold

    def _below(self, lookup: RequestLookup, part: Range, asked: list[bytes]) -> list[bytes]:
        """The leading ones of these that some tier has. Sets the lookup's failure if the daemon does not answer."""
        if not self._direct:  # these were looked up
            return asked
        known = self._client.lookup(self._shape.ns, asked, range_=part, context=lookup.context, deadline=lookup.left)
        if not self.heartbeat.judge(known):
            lookup.failed = label(known)
        return asked[:known]
