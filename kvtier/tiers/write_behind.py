"""Copies sealed blocks down, in the background: the only way into a lower tier.

A bounded queue of keys; one thread leases, checks, lets the tier write, releases. No put ever waits for a copy: what a
full queue, a scarce budget (`eviction.admit`) or the tier refuses is counted and left out. `flush` waits in its
deadline for the blocks it names, and these are always written. A block that the tier has is called settled. At most a
sixteenth of the arena is held, only while the tier writes. Thread-safe; never holds its lock while the tier works.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvtier.errors import KvtierError, Lost
from kvtier.format.block import digest, verify
from kvtier.store import eviction
from kvtier.store.namespaces import Namespace
from kvtier.store.store import Store
from kvtier.tiers.tier import Outgoing, Tier

MAX_QUEUE = 65_536  # keys
BATCH_BLOCKS, BATCH_BYTES = 32, 64 * 2**20  # held at once while the tier writes
SETTLING = 0.2  # seconds that a delete waits for a write under way
ARENA_SHARE = 16  # and at most one part in 16 of the arena
_DAY = 86_400.0
_AGAIN = (0.02, 1.0)  # seconds until a flush offers again what the tier refused: first and longest
Entry = tuple[bytes, Namespace]
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Budget:
    """Bytes that may be written per second (and a second's burst) and per day; 0: no limit. Not thread-safe."""

    per_second: int = 0
    per_day: int = 0
    _tokens: float = 0.0
    _at: float | None = None
    _day_began: float = 0.0
    _today: int = 0

    def wait(self, now: float) -> float:
        """Seconds until more may be written. A batch may be larger than what is left, and is paid for afterwards."""
        if self._at is None:
            return 0.0
        if self.per_day and self._today >= self.per_day and (left := self._day_began + _DAY - now) > 0:
            return left
        if self.per_second and (tokens := self._tokens + (now - self._at) * self.per_second) < 0:
            return -tokens / self.per_second
        return 0.0

    def left(self, now: float) -> float:
        """The share that is left of a second's burst or of the day, whichever is less; 1 where nothing limits."""
        if self._at is None:
            return 1.0
        today = self._today / self.per_day if self.per_day and now - self._day_began < _DAY else 0.0
        burst = self._tokens / self.per_second + now - self._at if self.per_second else 1.0
        return min(burst, 1.0 - today, 1.0)

    def spend(self, nbytes: int, now: float) -> None:
        if self._at is None or now - self._day_began >= _DAY:
            self._day_began, self._today = now, 0
        self._today += nbytes
        saved = self._tokens + (now - self._at) * self.per_second if self._at is not None else float(self.per_second)
        self._tokens, self._at = min(float(self.per_second), saved) - nbytes, now


class WriteBehind:
    """One store's queue of blocks to be written to one tier. `close` writes for at most `drain` seconds more."""

    def __init__(self, store: Store, tier: Tier, budget: Budget | None = None) -> None:
        self._store, self._tier = store, tier
        self._budget = budget or Budget()
        self._batch_bytes = min(BATCH_BYTES, store.capacity // ARENA_SHARE)
        self._account = functools.cache(store.account_for_moves)  # by tenant
        self._wake = threading.Condition(threading.Lock())
        self._queue: OrderedDict[bytes, Namespace] = OrderedDict()
        self._busy: set[bytes] = set()
        self._asked: set[bytes] = set()  # in the queue or busy, by `flush`
        self._batches = 0  # that were tried
        self._stop, self._drain_until = False, 0.0
        self.settled_blocks = self.settled_bytes = self.dropped_blocks = self.refused_blocks = self.spoiled_blocks = 0
        self._thread = threading.Thread(target=self._run, name="write-behind", daemon=True)
        self._thread.start()

    def offer(self, keys: Sequence[bytes], namespace: Namespace) -> None:
        """These blocks were sealed. Never waits; what does not fit into the queue is dropped."""
        with self._wake:
            for key in keys:
                if key not in self._queue and (len(self._queue) >= MAX_QUEUE or self._stop):
                    self.dropped_blocks += 1
                else:
                    self._queue[key] = namespace
            self._wake.notify_all()

    def forget(self, keys: Collection[bytes]) -> None:
        """These are to be written no more. Waits for a write of one of them to end, `SETTLING` at most: the tier may
        know it already, and would not hear of the delete. One that takes longer is undone when it has ended."""
        with self._wake:
            for key in keys:
                self._queue.pop(key, None)
                self._asked.discard(key)
            self._wake.notify_all()  # a flush may wait for them
            self._wake.wait_for(lambda: self._busy.isdisjoint(keys), SETTLING)

    def flush(self, keys: Sequence[bytes], namespace: Namespace, until: float) -> int:
        """Waits for the tier to have these, at most until `until` (time.monotonic): how many leading ones it has."""
        pause, longest = _AGAIN
        while True:
            batches = self._batches  # before the tier is asked: what was written meanwhile is not asked for again
            here = self._tier.find(keys)
            missing = [key for key, found in zip(keys, here, strict=True) if not found]
            known = [key for key, warm in zip(missing, self._store.lookup_each(missing), strict=True) if warm]
            if not known or time.monotonic() >= until or self._stop or not self.alive():
                return here.index(False) if missing else len(here)
            with self._wake:
                if self._batches != batches:
                    continue
                self._put_first(known, namespace)
                self._wake.wait_for(functools.partial(self._done, known), until - time.monotonic())
            if not self._tier.find(known[:1])[0]:  # refused: not again at once
                with self._wake:
                    self._wake.wait_for(lambda: self._stop, max(0.0, min(pause, until - time.monotonic())))
                pause = min(longest, 2 * pause)

    def alive(self) -> bool:
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
            "settle_spoiled_blocks_total": self.spoiled_blocks,
        }

    def close(self, drain: float) -> None:
        """Works off the queue for at most `drain` seconds, then ends. A tier that hangs is waited for a second more."""
        with self._wake:
            self._stop = True
            self._drain_until = time.monotonic() + drain
            self._wake.notify_all()
        self._thread.join(drain + 1)

    # -- the queue, under its lock

    def _put_first(self, keys: Sequence[bytes], namespace: Namespace) -> None:
        """To the front of the queue, in this order."""
        for key in reversed(keys):
            if key not in self._busy:
                self._queue[key] = namespace
                self._queue.move_to_end(key, last=False)
        self._asked.update(keys)
        while len(self._queue) > MAX_QUEUE:
            self._asked.discard(self._queue.popitem()[0])
            self.dropped_blocks += 1
        self._wake.notify_all()

    def _done(self, keys: Sequence[bytes]) -> bool:
        """Whether each of these was tried. The last is asked first: it is mostly the last."""
        return keys[-1] not in self._queue and not any(key in self._busy or key in self._queue for key in keys)

    def _next(self) -> list[Entry] | None:
        """A batch, once there is one and the budget lets it be written; None at the end."""
        with self._wake:
            while True:
                now = time.monotonic()
                if self._stop and (not self._queue or now > self._drain_until):
                    self._drop_all()
                    return None
                wait = self._budget.wait(now)
                if self._queue and not wait:
                    batch = [self._queue.popitem(last=False) for _ in range(min(BATCH_BLOCKS, len(self._queue)))]
                    self._busy.update(key for key, _ in batch)
                    return batch
                if self._queue and (wait > 60 or (self._stop and now + wait > self._drain_until)):
                    self._drop_all()
                    self._wake.notify_all()
                    continue
                self._wake.wait(min(1.0, wait) if self._queue else 1.0)

    def _drop_all(self) -> None:
        self.dropped_blocks += len(self._queue)
        self._queue.clear()
        self._asked.clear()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            left: list[Entry] = []
            try:
                left = self._write_part(batch)
            except Exception:  # a fault of ours must not end writing for good
                log.exception("settling failed")
                self.dropped_blocks += len(batch)
            with self._wake:
                self._busy.clear()
                self._batches += 1
                rest = {key for key, _ in left}
                self._asked.difference_update(key for key, _ in batch if key not in rest)
                for key, namespace in reversed(left):
                    self._queue[key] = namespace
                    self._queue.move_to_end(key, last=False)
                self._wake.notify_all()

    def _write_part(self, batch: list[Entry]) -> list[Entry]:
        """Writes the blocks of one tenant, as many as fit a batch. Returns the rest, which is tried next."""
        tenant = batch[0][1].tenant
        account = self._account(tenant)
        mine = [entry for entry in batch if entry[1].tenant == tenant]
        rows = self._store.hold(account, [key for key, _ in mine], self._batch_bytes)
        spoiled: set[int] = set()
        try:
            going = {row: mine[i] for i, row in rows.items() if self._admitted(mine[i][0], row)}
            outgoing = {
                row: out for row, one in going.items() if (out := self._outgoing(row, *one, spoiled)) is not None
            }
            self._write(list(outgoing.values()))
        finally:
            gone = self._store.let_go(account, list(rows.values()), spoiled)
        if gone:  # deleted while they were written
            self._tier.delete([outgoing[row].key for row in gone if row in outgoing])
        last = max(rows, default=len(mine) - 1)
        return mine[last + 1 :] + [entry for entry in batch if entry[1].tenant != tenant]

    def _admitted(self, key: bytes, row: int) -> bool:
        """Whether a held block is worth its bytes; one that a flush asks for always is."""
        if key in self._asked or eviction.admit(self._store.uses(row), self._budget.left(time.monotonic())):
            return True
        self.dropped_blocks += 1
        return False

    def _outgoing(self, row: int, key: bytes, namespace: Namespace, spoiled: set[int]) -> Outgoing | None:
        """A held block on its way down; None, and the row among the spoiled, if it is no longer what was sealed."""
        slot, nbytes = self._store.slot_of(row)
        checksum = self._store.checksums([row])[0]
        try:
            verify(slot[:nbytes], key, checksum or None)
        except Lost:  # a client has written over it
            spoiled.add(row)
            self.spoiled_blocks += 1
            return None
        if not checksum:
            checksum = digest(slot[:nbytes])
            self._store.learn_checksum(row, checksum)
        return Outgoing(key, namespace, slot, nbytes, checksum)

    def _write(self, outgoing: list[Outgoing]) -> None:
        if not outgoing:
            return
        try:
            written = self._tier.write(outgoing)
        except (KvtierError, OSError):  # the tier's own gauges and log say more
            written = [False] * len(outgoing)
        spent = sum(len(out.slot) * done for out, done in zip(outgoing, written, strict=True))
        self._budget.spend(spent, time.monotonic())
        for out, done in zip(outgoing, written, strict=True):
            self.settled_blocks += done
            self.settled_bytes += out.nbytes * done
            self.refused_blocks += not done
