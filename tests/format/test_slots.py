"""How a capacity is cut into slabs."""

from __future__ import annotations

import pytest

from kvtier.errors import Invalid
from kvtier.format.layout import SLOT_ALIGN
from kvtier.format.slots import MIN_SLABS, SLAB_BYTES, default_slab


def test_a_slab_holds_64_blocks_of_a_mebibyte_with_their_headers() -> None:
    assert SLAB_BYTES == 64 * (2**20 + SLOT_ALIGN)
    assert default_slab(MIN_SLABS * SLAB_BYTES) == default_slab(2**40) == SLAB_BYTES


@pytest.mark.parametrize("nbytes", [MIN_SLABS * SLOT_ALIGN, 10**6, 2**27 + 12345, MIN_SLABS * SLAB_BYTES - 1])
def test_a_small_capacity_still_has_its_slabs(nbytes: int) -> None:
    slab = default_slab(nbytes)
    assert slab % SLOT_ALIGN == 0 and SLOT_ALIGN <= slab < SLAB_BYTES
    assert MIN_SLABS * slab <= nbytes < MIN_SLABS * (slab + SLOT_ALIGN), "the largest slab of which all fit"


def test_less_than_the_smallest_slabs_is_refused() -> None:
    with pytest.raises(Invalid, match="at least 32768 bytes, not 32767"):
        default_slab(MIN_SLABS * SLOT_ALIGN - 1)
