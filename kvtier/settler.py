"""Copies sealed blocks down, in the background: the only way into a lower tier.

A bounded queue of keys; one thread leases, computes the checksum if nobody has, lets the tier write, releases. A full queue or a spent budget drops
the youngest offer and counts it: settling may be dropped, never waited for by a writer. `flush` waits for what it names, within its deadline.
Thread-safe; never holds its lock while the tier works.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.block import digest
from kvtier.namespaces import Namespace
from kvtier.store import Account, Store
from kvtier.tiers import Outgoing, Tier

MAX_QUEUE = 65_536  # keys
BATCH_BLOCKS, BATCH_BYTES = 32, 64 * 2**20  # held at once while the tier writes
_DAY = 86_400.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Budget:
    """Bytes that may be written: per second (with a second's burst) and per day. 0: no limit. Not thread-safe."""

    per_second: int = 0
    per_day: int = 0
    _tokens: float = 0.0
    _at: float = 0.0
    _day_began: float = 0.0
    _today: int = 0

    def spend(self, nbytes: int, now: float) -> float:
        """Takes `nbytes` at time `now`. Returns 0 if they may be written, else the seconds to wait (to the end of a day that is spent)."""
        if self.per_day:
            if now - self._day_began >= _DAY:
                self._day_began, self._today = now, 0
            if self._today and self._today + nbytes > self.per_day:
                return max(0.001, self._day_began + _DAY - now)
        if self.per_second:
            self._tokens = min(float(self.per_second), self._tokens + (now - self._at) * self.per_second) if self._at else float(self.per_second)
            self._at = now
            if self._tokens < min(nbytes, self.per_second):
                return (min(nbytes, self.per_second) - self._tokens) / self.per_second
            self._tokens -= nbytes
        self._today += nbytes
        return 0.0


class Settler:
    """Settles one store's blocks into one tier. `close` ends the thread within `drain` seconds, working off the queue as far as it gets."""

    def __init__(self, store: Store, tier: Tier, budget: Budget | None = None) -> None:
        self._store = store
        self._tier = tier
        self._budget = budget or Budget()
        self._movers: dict[str, Account] = {}  # by tenant
        self._wake = threading.Condition()
        self._queue: OrderedDict[bytes, Namespace] = OrderedDict()
        self._busy: set[bytes] = set()
        self._stop = False
        self._drain_until = 0.0
        self.settled_blocks = self.settled_bytes = self.dropped_blocks = self.refused_blocks = 0
        self._thread = threading.Thread(target=self._run, name="settler", daemon=True)
        self._thread.start()

    def offer(self, keys: Sequence[bytes], namespace: Namespace) -> None:
        """These blocks were sealed. Never waits; what the queue has no room for is dropped."""
        with self._wake:
            room = MAX_QUEUE - len(self._queue)
            for key in keys[:room]:
                self._queue[key] = namespace
            self.dropped_blocks += max(0, len(keys) - room)
            self._wake.notify()

    def flush(self, keys: Sequence[bytes], namespace: Namespace, until: float) -> int:
        """Waits until the tier has these blocks. Returns how many leading ones it has by `until` (time.monotonic)."""
        while True:
            here = self._tier.find(keys)
            missing = [key for key, found in zip(keys, here, strict=True) if not found]
            known = [key for key, row in zip(missing, self._store.lookup_each(missing), strict=True) if row]
            if not known or time.monotonic() >= until:
                return next((i for i, found in enumerate(here) if not found), len(here))
            with self._wake:
                for key in reversed(known):  # to the front, in order
                    if key not in self._busy:
                        self._queue[key] = namespace
                        self._queue.move_to_end(key, last=False)
                self._wake.notify()
                self._wake.wait(max(0.0, min(0.05, until - time.monotonic())))
            if not self._thread.is_alive():
                return next((i for i, found in enumerate(here) if not found), len(here))

    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def gauges(self) -> dict[str, int]:
        with self._wake:
            queued = len(self._queue) + len(self._busy)
        return {
            "settle_queue_blocks": queued,
            "settled_blocks_total": self.settled_blocks,
            "settled_bytes_total": self.settled_bytes,
            "settle_dropped_blocks_total": self.dropped_blocks,
            "settle_refused_blocks_total": self.refused_blocks,
        }

    def close(self, drain: float) -> None:
        """Works off the queue for at most `drain` seconds, then ends."""
        with self._wake:
            self._stop = True
            self._drain_until = time.monotonic() + drain
            self._wake.notify_all()
        self._thread.join(drain + 5)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._stop:
                    self._wake.wait(1.0)
                if self._stop and (not self._queue or time.monotonic() > self._drain_until):
                    return
                batch = [self._queue.popitem(last=False) for _ in range(min(BATCH_BLOCKS, len(self._queue)))]
                self._busy.update(key for key, _ in batch)
            try:
                left = self._settle(batch)
            except Exception:  # a fault of ours must not end settling for good
                log.exception("settling %d blocks failed", len(batch))
                left = []
            with self._wake:
                self._busy.clear()
                for key, namespace in reversed(left):
                    self._queue[key] = namespace
                    self._queue.move_to_end(key, last=False)
                self._wake.notify_all()

    def _settle(self, batch: list[tuple[bytes, Namespace]]) -> list[tuple[bytes, Namespace]]:
        """Writes a batch. Returns what did not fit into it and should be tried next."""
        tenant = batch[0][1].tenant
        mover = self._movers.get(tenant) or self._movers.setdefault(tenant, self._store.mover(tenant))
        others = [entry for entry in batch if entry[1].tenant != tenant]
        batch = [entry for entry in batch if entry[1].tenant == tenant]
        keys = [key for key, _ in batch]
        rows = self._store.hold(mover, keys, BATCH_BYTES)
        left = [entry for i, entry in enumerate(batch) if i not in rows and self._store.lookup_each([entry[0]])[0]] if len(rows) < len(batch) else []
        left += others
        try:
            outgoing = []
            for i, row in rows.items():
                slot, nbytes = self._store.slot_of(row)
                checksum = self._store.checksums([row])[0]
                if not checksum:
                    checksum = digest(slot[:nbytes])
                    self._store.learn_checksum(row, checksum)
                outgoing.append(Outgoing(keys[i], batch[i][1], slot, nbytes, checksum))
            total = sum(len(out.slot) for out in outgoing)
            if not self._may_write(total):
                self.dropped_blocks += len(outgoing)
                return left
            for out, settled in zip(outgoing, self._tier.write(outgoing), strict=True):
                self.settled_blocks += settled
                self.settled_bytes += out.nbytes * settled
                self.refused_blocks += not settled
        finally:
            self._store.let_go(mover, list(rows.values()))
        return left

    def _may_write(self, nbytes: int) -> bool:
        """Waits for the budget of the second; False when the day's is spent."""
        while wait := self._budget.spend(nbytes, time.monotonic()):
            if wait > 60 or (self._stop and time.monotonic() + wait > self._drain_until):
                return False
            time.sleep(min(wait, 0.2))
        return True
