"""What a store has done since its start, for metrics and status."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Totals since the start; read without a lock, so a reader may see one call half counted."""

    lookup_keys: int = 0
    lookup_hits: int = 0
    lookup_warm: int = 0  # of these, leading ones in the arena
    lookup_misses: int = 0  # lookups that ended at a key that is not known: one key each, whatever came behind it
    lease_keys: int = 0
    leased_blocks: int = 0
    leased_bytes: int = 0
    sealed_blocks: int = 0
    sealed_bytes: int = 0
    already_blocks: int = 0
    aborted_blocks: int = 0
    evicted_blocks: int = 0
    evicted_bytes: int = 0
    deleted_blocks: int = 0
    expired_blocks: int = 0  # by their namespace's time-to-live
    drained_slabs: int = 0
    full: int = 0
    bad_headers: int = 0
    # keys that leases asked for and did not get, by why they stopped
    unserved: Counter[int] = field(default_factory=Counter)
