"""How a capacity is cut into slabs, for the store and for those who plan for one. Slots in slabs: `store.allocator`."""

from __future__ import annotations

from kvtier.errors import Invalid
from kvtier.format.layout import SLOT_ALIGN

SLAB_BYTES = 64 * 2**20 + 256 * 2**10  # 64 blocks of 1 MiB with their headers: 64 * (1 MiB + 4 KiB)
MIN_SLABS = 8  # of a small arena: its slabs shrink, so that several block sizes still find room


def default_slab(nbytes: int) -> int:
    """Bytes of a slab for this capacity. Raises Invalid if that is below `MIN_SLABS` slots of the smallest size."""
    slab = SLAB_BYTES if nbytes >= MIN_SLABS * SLAB_BYTES else nbytes // MIN_SLABS
    if slab < SLOT_ALIGN:
        raise Invalid(f"an arena needs at least {MIN_SLABS * SLOT_ALIGN} bytes, not {nbytes}")
    return slab // SLOT_ALIGN * SLOT_ALIGN
