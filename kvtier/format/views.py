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
from kvtier.format.layout import Extents, Part

_BITS = {
    "e4m3fn": np.uint8,
    "e5m2": np.uint8,
    "e4m3fnuz": np.uint8,
    "u8": np.uint8,
    "bf16": np.uint16,
    "fp16": np.uint16,
    "fp32": np.float32,
}


def part_of(extents: Extents, layer: int, part: int) -> Part:
    """The layout's part behind these indices; `layer` counts within the range of `extents`. Raises Invalid outside
    it."""
    layers = extents.group.layers[extents.layers[0] : extents.layers[1]]
    if not 0 <= layer < len(layers):
        raise Invalid(f"layer {layer} is not in [0, {len(layers)}), the layers of this range")
    if not 0 <= part < len(layers[layer].parts):
        raise Invalid(
            f"part {part} is not in [0, {len(layers[layer].parts)}), the parts of layer {layers[layer].index}"
        )
    return layers[layer].parts[part]


def part_view(body: NDArray[np.uint8], extents: Extents, layer: int, part: int) -> NDArray[Any]:
    """Elements of one part, [heads, tokens, width]; of an opaque group its bytes, [1, 1, bytes]. `layer` counts within
    the range.

    dtype: uint8 for FP8 codes and opaque bytes, uint16 for bf16 and fp16 bits, float32 for fp32. Raises Invalid for a
    body of another size.
    """
    spec = part_of(extents, layer, part)
    tokens = 1 if extents.group.kind == "opaque" else extents.group.tokens
    dtype = np.dtype(_BITS[spec.dtype])
    return _view(body, extents, (tokens, spec.width), dtype, extents.data[layer][part])


def scale_view(body: NDArray[np.uint8], extents: Extents, layer: int, part: int) -> NDArray[Any]:
    """Scales of one part, [heads, scale_count] (`layout.Group.scale_count`; none for a native part). `layer` counts
    within the range.

    dtype: float32, uint16 for the bits of 2-byte scales. Raises Invalid for a body of another size.
    """
    spec = part_of(extents, layer, part)
    dtype = np.dtype(_BITS[spec.scale_dtype])
    return _view(body, extents, (extents.group.scale_count(spec),), dtype, extents.scales[layer][part])


def _view(
    body: NDArray[np.uint8], extents: Extents, inner: tuple[int, ...], dtype: np.dtype[Any], start: int
) -> NDArray[Any]:
    check_body(body, extents)
    heads = extents.heads[1] - extents.heads[0]
    strides = (
        (extents.head_stride, dtype.itemsize)
        if len(inner) == 1
        else (extents.head_stride, inner[1] * dtype.itemsize, dtype.itemsize)
    )
    return np.ndarray((heads, *inner), dtype, body, start, strides)


def check_body(body: NDArray[np.uint8], extents: Extents) -> None:
    """Raises Invalid unless `body` is one contiguous run of exactly this range's bytes."""
    if body.dtype != np.uint8 or body.shape != (extents.body_bytes,) or not body.flags.c_contiguous:
        raise Invalid(
            f"the body of this range is a contiguous run of {extents.body_bytes} uint8, not {body.dtype} of shape "
            f"{body.shape}"
        )
