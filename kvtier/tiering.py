"""All that lies below the arena, as the verbs see it: which keys are known down there, settling, promotion, forgetting.

Built by the daemon where a lower tier is configured; without one the store has no `lower` and every cold answer is a miss.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from kvtier.layout import Extents
from kvtier.namespaces import Namespace
from kvtier.promoter import Promoter
from kvtier.settler import Budget, Settler
from kvtier.store import Store
from kvtier.tiers import Tier

MAX_WAITING = 6  # calls that wait for promotions at once: half of what the door has for puts and gets


class Tiering:
    """Tiers in the order they are asked (the fastest first), each with its settler. Attaches itself to the store. `budgets` are by a tier's name."""

    def __init__(self, store: Store, tiers: Sequence[Tier], budgets: Mapping[str, Budget] | None = None) -> None:
        self._store = store
        self.tiers = list(tiers)
        self._settlers = [Settler(store, tier, (budgets or {}).get(tier.name)) for tier in self.tiers]
        self.promoter = Promoter(store, self.tiers)
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)
        store.lower = self

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether any lower tier has it. No I/O."""
        found = [False] * len(keys)
        for tier in self.tiers:
            found = [a or b for a, b in zip(found, tier.find(keys), strict=True)]
        return found

    def offer(self, keys: Sequence[bytes], namespace: Namespace) -> None:
        """These blocks were sealed."""
        for settler in self._settlers:
            settler.offer(keys, namespace)

    def flush(self, keys: Sequence[bytes], namespace: Namespace, until: float) -> int:
        """Waits until every tier has these blocks; the number of leading ones that all have."""
        return min(settler.flush(keys, namespace, until) for settler in self._settlers)

    def prefetch(self, keys: Sequence[bytes], namespace: Namespace, extents: Extents) -> int:
        """Starts promotion of what is cold: how many are under way."""
        return self.promoter.start(keys, namespace, extents)

    def bring_up(self, keys: Sequence[bytes], namespace: Namespace, extents: Extents, until: float) -> None:
        """Promotes what is cold and waits for it, until `until` at most; not at all while `MAX_WAITING` others do: a tier that hangs shall not take
        all threads of a transport with it."""
        if self.promoter.start(keys, namespace, extents) and self._waiting.acquire(blocking=False):
            try:
                self.promoter.wait(keys, until)
            finally:
                self._waiting.release()

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forgets these blocks everywhere below."""
        for tier in self.tiers:
            tier.delete(keys)

    def drop(self, namespace: Namespace) -> int:
        """Forgets a namespace everywhere below; the largest number of blocks a tier had."""
        return max((tier.drop(namespace) for tier in self.tiers), default=0)

    def handles(self) -> set[int]:
        """Namespaces that hold blocks below."""
        return set().union(*(tier.handles() for tier in self.tiers))

    def alive(self) -> bool:
        """Whether all threads run."""
        return self.promoter.alive() and all(settler.alive() for settler in self._settlers)

    def gauges(self) -> dict[str, int]:
        """Numbers of settlers, promoter and tiers; a tier's carry its name in front."""
        merged: dict[str, int] = self.promoter.gauges()
        for settler in self._settlers:
            for name, value in settler.gauges().items():
                merged[name] = merged.get(name, 0) + value
        for tier in self.tiers:
            merged |= {f"{tier.name}_{name}": value for name, value in tier.gauges().items()}
        return merged

    def check_integrity(self) -> None:
        """Asserts that each tier's books agree with themselves; slow."""
        for tier in self.tiers:
            tier.check_integrity()

    def close(self, drain: float) -> None:
        """Settles for at most `drain` seconds more, then ends threads and tiers."""
        for settler in self._settlers:
            settler.close(drain / max(1, len(self._settlers)))
        self.promoter.close()
        self._store.lower = None
        for tier in self.tiers:
            tier.close()
