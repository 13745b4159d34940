"""Times-to-live: which namespaces have one, and the thread that forgets blocks which were not put or used for so long.

One rule: never too early. Time becomes a tick by marks that are taken while a namespace is watched
(`eviction.tick_before`), so what was there when its time-to-live was set, or when the daemon started, counts as used
then. Late by a sixteenth of it and 3 seconds at most; on the SSD at most as long again, where the block was in the
arena too. Redis forgets by itself. Thread-safe; verbs that read and write blocks never come here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtier.errors import Full, Invalid, Unavailable
from kvtier.store import eviction
from kvtier.store.eviction import Aging
from kvtier.store.namespaces import Namespace
from kvtier.store.store import Store

MAX_TTL = 10 * 366 * 86_400  # seconds
MAX_TTLS = 256  # namespaces that have one; they are kept in one small file
MARKS = 32  # in a time-to-live
PERIOD = 1.0  # seconds between looks at what is due
PAUSE = 0.005  # seconds between two steps, so that others find the lock free
PATIENCE = 5.0  # seconds that `close` waits for a step under way

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Watch:
    """A namespace with a time-to-live, and when each place was at which tick."""

    seconds: int
    marks: list[deque[tuple[float, int]]]

    def due(self, now: float) -> bool:
        return not self.marks[0] or now - self.marks[0][-1][0] >= self.seconds / MARKS


class Expiry:
    """The times-to-live of a store's namespaces. `sweep` belongs to the thread that `start` starts, or to a test.
    `clock` gives seconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._places = [store.aging]
        self._lock = threading.Lock()
        self._ttls: dict[str, int] = {}  # seconds by `_name`; replaced as a whole, so that it is read without the lock
        self._save: Callable[[Mapping[str, int]], None] = lambda ttls: None
        self._watches: dict[int, _Watch] = {}  # by handle
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def attach(self, below: Aging, ttls: Mapping[str, int], save: Callable[[Mapping[str, int]], None]) -> None:
        """A lower tier whose blocks expire too, what it remembers, and how it keeps it (OSError). Before `start`."""
        self._places.append(below)
        self._ttls, self._save = dict(ttls), save

    def set(self, namespace: Namespace, seconds: int) -> None:
        """Gives a namespace a time-to-live, from now on; 0 takes it away. It outlives a drop of the namespace. Raises
        Invalid, Full for one namespace too many, Unavailable if it cannot be written: nothing is changed then."""
        if not 0 <= seconds <= MAX_TTL:
            raise Invalid(f"a time-to-live has 1 to {MAX_TTL} seconds, or 0 for none, not {seconds}")
        with self._lock:
            ttls = {**self._ttls, _name(namespace): seconds}
            ttls = {name: ttl for name, ttl in ttls.items() if ttl}
            if len(ttls) > MAX_TTLS:
                here = set(map(_name, self._store.namespaces.all()))
                ttls = {name: ttl for name, ttl in ttls.items() if name in here}
            if len(ttls) > MAX_TTLS:
                raise Full(f"{MAX_TTLS} namespaces have a time-to-live: take one away first")
            try:
                self._save(ttls)
            except OSError as error:
                what = "the SSD tier's directory cannot be written, so nothing was changed"
                raise Unavailable(f"{what}: {error.strerror or error}") from None
            self._ttls = ttls

    def of(self, namespace: Namespace) -> int:
        """The time-to-live of a namespace in seconds; 0: none."""
        return self._ttls.get(_name(namespace), 0)

    def sweep(self) -> int:
        """Takes the marks that are due, forgets what has expired. Returns how many; one in two tiers counts twice."""
        now, gone = self._clock(), 0
        limited = {one: ttl for one in self._store.namespaces.all() if (ttl := self.of(one))} if self._ttls else {}
        before, self._watches = self._watches, {}
        for namespace, ttl in limited.items():
            watch = before.get(namespace.handle)
            if watch is None or watch.seconds != ttl:
                watch = _Watch(ttl, [deque(maxlen=MARKS + 2) for _ in self._places])
            self._watches[namespace.handle] = watch
        for handle, watch in self._watches.items():
            if watch.due(now):
                for place, marks in zip(self._places, watch.marks, strict=True):
                    marks.append((now, place.tick()))
                    gone += self._expire(place, handle, eviction.tick_before(marks, now - watch.seconds))
        return gone

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="expiry", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread, after the step under way."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(PATIENCE)

    def _expire(self, place: Aging, handle: int, tick: int) -> int:
        """Forgets a namespace's blocks of this tick and before. Below the arena those that are still in it count as
        used: reads there stay there."""
        gone = 0
        while tick and not self._stop.is_set() and (keys := place.expired(handle, tick)):
            if place is not self._places[0]:
                warm = self._store.lookup_each(keys)
                place.renew([key for key, here in zip(keys, warm, strict=True) if here])
                keys = [key for key, here in zip(keys, warm, strict=True) if not here]
            gone += place.forget(keys, tick)
            self._stop.wait(PAUSE)
        return gone

    def _run(self) -> None:
        while not self._stop.wait(PERIOD):
            try:
                self.sweep()
            except Exception:  # a fault of ours must not end it for good
                log.exception("expiring failed")


def _name(namespace: Namespace) -> str:
    """What a namespace is called over restarts: half of its digest, in hex."""
    return namespace.digest.hex()[:32]
