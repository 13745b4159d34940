"""All that lies below the arena, as the verbs see it: which keys are known there, write-behind, promotion, forgetting.

Built where a lower tier is configured; without one the store has no `lower` and every cold answer is a miss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from kvtier.errors import Stale
from kvtier.format.layout import Extents
from kvtier.store.namespaces import Namespace
from kvtier.store.store import Store
from kvtier.tiers.promotion import Promoter
from kvtier.tiers.tier import Tier, find_any
from kvtier.tiers.write_behind import Budget, WriteBehind

DOUBTS = 0.002  # seconds between looks at what a tier is finding out
MAX_WAITING = 6  # calls that wait for promotions at once: half of what the gRPC transport has for puts and gets


class Tiering:
    """Tiers in the order they are asked, each with its write-behind; the store's `lower`. `budgets`: by tier."""

    def __init__(self, store: Store, tiers: Sequence[Tier], budgets: Mapping[str, Budget] | None = None) -> None:
        self._store = store
        self.tiers = list(tiers)
        self._write_behinds = [WriteBehind(store, tier, (budgets or {}).get(tier.name)) for tier in self.tiers]
        self.promoter = Promoter(store, self.tiers)
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)
        store.lower = self

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        return find_any(self.tiers, keys)

    def unsure(self, keys: Sequence[bytes]) -> list[bool]:
        found = [False] * len(keys)
        for tier in self.tiers:
            found = [a or b for a, b in zip(found, tier.unsure(keys), strict=True)]
        return found

    def offer(self, keys: Sequence[bytes], namespace: Namespace) -> None:
        for queue in self._write_behinds:
            queue.offer(keys, namespace)

    def offer_again(self, keys: Sequence[bytes], handle: int, tenant: str) -> None:
        try:
            namespace = self._store.namespaces.get(handle, tenant)
        except Stale:
            return
        for tier, queue in zip(self.tiers, self._write_behinds, strict=True):
            if missing := [key for key, here in zip(keys, tier.find(keys), strict=True) if not here]:
                queue.offer(missing, namespace)

    def flush(self, keys: Sequence[bytes], namespace: Namespace, until: float) -> int:
        """Waits until each working tier (if none: every tier) has these: the leading ones that all of these have."""
        working = [queue for tier, queue in zip(self.tiers, self._write_behinds, strict=True) if not tier.fault()]
        return min(queue.flush(keys, namespace, until) for queue in working or self._write_behinds)

    def bring_up(self, keys: Sequence[bytes], namespace: Namespace, extents: Extents, until: float) -> None:
        """Promotes what is cold and waits for it, until `until` at most; not at all while `MAX_WAITING` others do: a
        tier that hangs shall not take all threads of a transport with it."""
        started, doubts = self.promoter.start(keys, namespace, extents), any(self.unsure(keys))
        if (started or doubts) and self._waiting.acquire(blocking=False):
            try:
                while doubts and time.monotonic() < until:
                    time.sleep(DOUBTS)
                    self.promoter.start(keys, namespace, extents)
                    doubts = any(self.unsure(keys))
                self.promoter.wait(keys, until)
            finally:
                self._waiting.release()

    def delete(self, keys: Sequence[bytes]) -> None:
        for tier, queue in zip(self.tiers, self._write_behinds, strict=True):
            queue.forget(keys)
            tier.delete(keys)

    def drop(self, namespace: Namespace) -> int:
        """Forgets a namespace everywhere below; the largest number of blocks a tier had."""
        return max((tier.drop(namespace) for tier in self.tiers), default=0)

    def handles(self) -> set[int]:
        return set().union(*(tier.handles() for tier in self.tiers))

    def alive(self) -> bool:
        return self.promoter.alive() and all(queue.alive() for queue in self._write_behinds)

    def gauges(self) -> dict[str, int]:
        """Numbers of the write-behinds, the promoter and the tiers; a tier's carry its name in front."""
        merged: dict[str, int] = self.promoter.gauges()
        for queue in self._write_behinds:
            for name, value in queue.gauges().items():
                merged[name] = merged.get(name, 0) + value
        for tier in self.tiers:
            merged |= {f"{tier.name}_{name}": value for name, value in tier.gauges().items()}
        return merged

    def faults(self) -> dict[str, str]:
        return {f"{tier.name}_fault": tier.fault() for tier in self.tiers}

    def check_integrity(self) -> None:
        for tier in self.tiers:
            tier.check_integrity()

    def close(self, drain: float) -> None:
        """Writes for at most `drain` seconds more, then ends threads and tiers."""
        for queue in self._write_behinds:
            queue.close(drain / max(1, len(self._write_behinds)))
        self.promoter.close()
        self._store.lower = None
        for tier in self.tiers:
            tier.close()
