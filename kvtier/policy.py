"""Who goes first, as pure functions: no clock, no I/O, no state. The store asks, the ledger executes.

For now: least recently used, tails before heads (the ledger links tails first), over all slot sizes by age.
"""

from __future__ import annotations

from collections.abc import Mapping

SESSION_SHARE = 0.25  # of the arena, that one session may hold leased and reserved
PIN_SHARE = 0.10  # of the arena, that operators may pin
TENANT_SHARE = 0.50  # of the arena, that all sessions of one tenant may hold


def source(own: int, oldest: Mapping[int, int]) -> int | None:
    """From which size class to take room for class `own`: `oldest` maps a class to the age of its oldest unleased block.

    The class with the oldest block gives; `own` gives when it is as old as any, because that evicts one block and not a slab. None: nobody can.
    """
    if not oldest:
        return None
    least = min(oldest.values())
    return own if oldest.get(own) == least else min(size for size, age in oldest.items() if age == least)


def slab_to_empty(ages: Mapping[int, float]) -> int | None:
    """Which slab of a class to empty for another class: the one whose blocks are oldest on average. None: all hold something in use."""
    return min(ages, key=lambda slab: (ages[slab], slab), default=None)
