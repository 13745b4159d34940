"""numpy views of the parts and scales inside a block's body. Nothing is copied: a view reads, and writes where the body
is writable, the slot itself.

A view of a leased block is valid until its lease ends, one of a reserved slot until it is sealed. numpy has no FP8 and
no bf16, so elements of these formats come as raw bits. The torch twin is `kvtier.client.torch_views`. Pure arithmetic
over `layout.Extents`; any thread may call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import Invalid
from kvtier.format.layout import Extents

_BITS = {
    **dict.fromkeys(("e4m3fn", "e5m2", "e4m3fnuz", "u8"), np.uint8),
    **dict.fromkeys(("bf16", "fp16"), np.uint16),
    "fp32": np.float32,
}


def part_view(body: NDArray[np.uint8], extents: Extents, layer: int, part: int) -> NDArray[Any]:
    """Elements of one part, [heads, tokens, width]; of an opaque group its bytes, [1, 1, bytes]. `layer` counts within
    the range.

    dtype: uint8 for FP8 codes and opaque bytes, uint16 for bf16 and fp16 bits, float32 for fp32. Raises Invalid for a
    body of another size.
    """
    place = extents.place(layer, part)
    return _view(body, extents, place.shape, np.dtype(_BITS[place.part.dtype]), place.data)


def scale_view(body: NDArray[np.uint8], extents: Extents, layer: int, part: int) -> NDArray[Any]:
    """Scales of one part, [heads, scale_count] (`layout.Group.scale_count`; none for a native part). `layer` counts
    within the range.

    dtype: float32, uint16 for the bits of 2-byte scales. Raises Invalid for a body of another size.
    """
    place = extents.place(layer, part)
    return _view(body, extents, (place.scale_count,), np.dtype(_BITS[place.part.scale_dtype]), place.scales)


def _view(
    body: NDArray[np.uint8], extents: Extents, inner: tuple[int, ...], dtype: np.dtype[Any], start: int
) -> NDArray[Any]:
    check_body(body, extents)
    size = dtype.itemsize
    strides = (size,) if len(inner) == 1 else (inner[1] * size, size)
    return np.ndarray((extents.head_count, *inner), dtype, body, start, (extents.head_stride, *strides))


def check_body(body: NDArray[np.uint8], extents: Extents) -> None:
    """Raises Invalid unless `body` is one contiguous run of exactly this range's bytes."""
    if body.dtype != np.uint8 or body.shape != (extents.body_bytes,) or not body.flags.c_contiguous:
        wanted = f"a contiguous run of {extents.body_bytes} uint8"
        raise Invalid(f"the body of this range is {wanted}, not {body.dtype} of shape {body.shape}")
