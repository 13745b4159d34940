"""Copies cold blocks up, on demand: reserve, read, verify, seal, the same verbs as a client's.

A bounded queue and a few threads; one read per key, however many ask for it. A caller waits within its own deadline and
gets a miss when that ends. The tiers are asked in the order of the list. A block that fails its check is a miss, and
the tier has forgotten it. Thread-safe; never holds its lock while a tier works.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from kvtier.errors import KvtierError, Lost, NotFound
from kvtier.format.layout import Extents
from kvtier.store.namespaces import Namespace
from kvtier.store.store import Store
from kvtier.tiers.tier import Tier, find_any

MAX_QUEUE = 16_384  # keys under way
THREADS = 4
PATIENCE = 5.0  # seconds that `close` waits for reads under way
log = logging.getLogger(__name__)


class Promoter:
    """Promotes blocks of one store from its tiers."""

    def __init__(self, store: Store, tiers: Sequence[Tier], threads: int = THREADS) -> None:
        self._store = store
        self._tiers = list(tiers)
        self._account = functools.cache(store.account_for_moves)  # by tenant
        self._wake = threading.Condition(threading.Lock())
        self._queue: deque[tuple[bytes, Namespace, Extents]] = deque()
        self._under_way: set[bytes] = set()
        self._stop = False
        self.promoted_blocks = self.promoted_bytes = self.lost_blocks = self.failed_blocks = self.refused_blocks = 0
        self._threads = [threading.Thread(target=self._run, name=f"promoter-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def start(self, keys: Sequence[bytes], namespace: Namespace, extents: Extents) -> int:
        """Starts bringing up those of these keys that are cold. Returns how many are under way now. Never waits."""
        warm = self._store.lookup_each(keys)
        cold = [key for key, known in zip(keys, warm, strict=True) if not known]
        here = find_any(self._tiers, cold)
        started = 0
        with self._wake:
            for key, found in zip(cold, here, strict=True):
                if not found:
                    continue
                if key not in self._under_way:
                    if len(self._under_way) >= MAX_QUEUE or self._stop:
                        break
                    self._under_way.add(key)
                    self._queue.append((key, namespace, extents))
                started += 1
            self._wake.notify_all()
        return started

    def wait(self, keys: Sequence[bytes], until: float) -> None:
        """Returns when none of these keys is under way any more, or at `until` (time.monotonic)."""
        with self._wake:
            self._wake.wait_for(lambda: self._under_way.isdisjoint(keys), max(0.0, until - time.monotonic()))

    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def gauges(self) -> dict[str, int]:
        return {
            "promoting_blocks": len(self._under_way),
            "promoted_blocks_total": self.promoted_blocks,
            "promoted_bytes_total": self.promoted_bytes,
            "promotion_lost_blocks_total": self.lost_blocks,
            "promotion_failed_blocks_total": self.failed_blocks,
            "promotion_refused_blocks_total": self.refused_blocks,
        }

    def close(self) -> None:
        """Drops what is queued and ends the threads. Reads under way are waited for, `PATIENCE` at most."""
        with self._wake:
            self._stop = True
            self._under_way.difference_update(key for key, _, _ in self._queue)
            self._queue.clear()
            self._wake.notify_all()
        until = time.monotonic() + PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue:
                    if self._stop:
                        return
                    self._wake.wait(1.0)
                key, namespace, extents = self._queue.popleft()
            try:
                self._promote(key, namespace, extents)
            except Exception:  # a fault of ours must not end promotion for good
                log.exception("promoting failed")
                self._count("failed_blocks")
            with self._wake:
                self._under_way.discard(key)
                self._wake.notify_all()

    def _promote(self, key: bytes, namespace: Namespace, extents: Extents) -> None:
        store, account = self._store, self._account(namespace.tenant)
        try:
            row = store.make_place(account, namespace, extents, key)
        except KvtierError:
            self._count("refused_blocks")  # everything is in use: a miss
            return
        if row is None:
            return  # it is warm
        checksum: int | None = None
        source: Tier | None = None
        try:
            checksum, source = self._read(key, store.slot_of(row)[0], extents.block_bytes)
        finally:
            visible = store.finish_place(account, namespace, row, checksum)
        if source is not None and not source.find([key])[0]:
            store.forget([key])  # deleted while it was read
        elif visible:
            self._count("promoted_blocks")
            self._count("promoted_bytes", extents.block_bytes)

    def _read(self, key: bytes, slot: memoryview, nbytes: int) -> tuple[int | None, Tier | None]:
        """The block from the first tier that has it whole: its checksum and that tier; None if none does."""
        for tier in self._tiers:
            try:
                return tier.read(key, slot, nbytes), tier
            except NotFound:
                continue
            except Lost:
                self._count("lost_blocks")
            except (KvtierError, OSError):
                self._count("failed_blocks")
        return None, None

    def _count(self, name: str, n: int = 1) -> None:
        with self._wake:
            setattr(self, name, getattr(self, name) + n)
