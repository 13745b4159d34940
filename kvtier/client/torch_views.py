"""torch views of the parts and scales inside a block's body: what `kvtier.format.views` gives, in torch's own number
formats. Nothing is copied.

A view of a leased block is valid until its lease ends and must not be written: the mapping may be read-only, and then
the process dies of it. One of a reserved slot is valid until it is sealed. Any thread may call. The only file of
the client library that imports torch.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.errors import Invalid
from kvtier.format.layout import SCALE_BYTES, Extents
from kvtier.format.views import check_body

DTYPES = {
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "u8": torch.uint8,
}


def body_tensor(body: NDArray[np.uint8], extents: Extents) -> torch.Tensor:
    """A body as a uint8 tensor over the same bytes, which it keeps alive. Where many views follow, give it to the
    functions below.

    torch has no read-only tensors and warns about read-only arrays; a ctypes array at the same address keeps the body
    and spares the warning.
    """
    check_body(body, extents)
    raw = (ctypes.c_uint8 * extents.body_bytes).from_address(body.__array_interface__["data"][0])
    raw.body = body  # type: ignore[attr-defined]
    return torch.frombuffer(raw, dtype=torch.uint8)


def part_tensor(body: NDArray[np.uint8] | torch.Tensor, extents: Extents, layer: int, part: int) -> torch.Tensor:
    """Elements of one part, [heads, tokens, width], in the part's number format; of an opaque group its bytes, [1, 1,
    bytes].

    `layer` counts within the range. Raises Invalid for a body of another size.
    """
    place = extents.place(layer, part)
    raw = run_view(body, extents, place.data, place.data_bytes)
    return raw.view(DTYPES[place.part.dtype]).unflatten(1, place.shape)


def scale_tensor(body: NDArray[np.uint8] | torch.Tensor, extents: Extents, layer: int, part: int) -> torch.Tensor:
    """Scales of one part, [heads, scale_count] (`layout.Group.scale_count`; none for a native part), in the format of
    the part's scales.

    `layer` counts within the range. Raises Invalid for a body of another size, and where 4-byte scales do not stand on
    a multiple of 4 (they follow an odd number of 2-byte ones): torch cannot view these.
    """
    place = extents.place(layer, part)
    start, size, dtype = place.scales, SCALE_BYTES[place.part.scale_dtype], DTYPES[place.part.scale_dtype]
    if start % size:
        what = f"scales of {place.part.name} start at byte {start}: torch needs a multiple of {size}"
        raise Invalid(f"{what}. kvtier.format.views.scale_view reads them")
    return run_view(body, extents, start, place.scale_bytes).view(dtype)


def run_view(body: NDArray[np.uint8] | torch.Tensor, extents: Extents, start: int, nbytes: int) -> torch.Tensor:
    """uint8 [heads, nbytes]: these bytes of every head's run. Raises Invalid for a body of another size."""
    if not isinstance(body, torch.Tensor):
        body = body_tensor(body, extents)
    elif body.dtype != torch.uint8 or tuple(body.shape) != (extents.body_bytes,) or not body.is_contiguous():
        found = f"{body.dtype} of shape {tuple(body.shape)}"
        raise Invalid(f"the body of this range is a contiguous run of {extents.body_bytes} uint8, not {found}")
    # as_strided counts from the start of the storage, not of the tensor.
    return body.as_strided((extents.head_count, nbytes), (extents.head_stride, 1), body.storage_offset() + start)
