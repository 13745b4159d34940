"""Reading safetensors files: tensors as raw bytes (numpy has no bf16), every malformation an Invalid that names the
file.

Whole small files (scales) go through the safetensors library; of large ones (weights) only the header is read, here, as
strictly. Sizes are limited before anything is allocated. Blocks on disk, never on a FIFO or a device. Nothing here is
kept between calls, hence thread-safe.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from kvtier.errors import Invalid
from kvtier.format.files import naming, open_file, read_file
from kvtier.format.layout import fields, items

MAX_FILE_BYTES = 64 * 2**20  # of a file that is read whole
MAX_HEADER_BYTES = 100_000_000  # the limit of the format


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a safetensors file as it stands: format name ("F32", "BF16", ...), shape, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor lies in a safetensors file; `start` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """All tensors of a safetensors file of at most MAX_FILE_BYTES, as raw bytes. Raises Invalid naming the file."""
    raw = read_file(path, MAX_FILE_BYTES)
    try:
        found = safetensors.deserialize(raw)
    except safetensors.SafetensorError as error:
        raise Invalid(f"{path}: not a safetensors file: {error}") from None
    return {name: Tensor(tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"])) for name, tensor in found}


def read_header(path: str | os.PathLike[str]) -> tuple[dict[str, Span], bytes]:
    """Where the tensors of a safetensors file of any size lie, and the file's first bytes up to the data. Raises
    Invalid naming the file.

    Reads the header only. Spans leave no hole, do not overlap, and end with the file, as the format demands.
    """
    with open_file(path) as file, naming(path):
        size = os.fstat(file.fileno()).st_size
        length = file.read(8)
        header_bytes = int.from_bytes(length, "little")
        if len(length) < 8 or header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise Invalid("not a safetensors file: its header does not fit")
        raw = file.read(header_bytes)
        try:
            data = json.loads(raw.decode(), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise Invalid(f"not a safetensors file: its header is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise Invalid("not a safetensors file: its header is not an object")
        start = 8 + header_bytes
        spans = {name: _span(name, entry, start) for name, entry in data.items() if name != "__metadata__"}
        position = start
        for span in sorted(spans.values(), key=lambda span: (span.start, span.nbytes)):
            if span.start != position:
                raise Invalid("not a safetensors file: its tensors overlap or leave a hole")
            position += span.nbytes
        if position != size:
            raise Invalid(f"not a safetensors file: its tensors end at byte {position}, the file at {size}")
    return spans, length + raw


def to_f32(tensor: Tensor) -> NDArray[np.float32]:
    """The values of an F32, F16 or BF16 tensor, exactly, in its shape. Raises Invalid for other formats and sizes."""
    item = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(tensor.dtype)
    if item is None:
        raise Invalid(f"values must be F32, F16 or BF16, not {tensor.dtype}")
    if len(tensor.data) != prod(tensor.shape) * np.dtype(item).itemsize:
        raise Invalid(f"{len(tensor.data)} bytes do not make a {tensor.dtype} tensor of shape {list(tensor.shape)}")
    values = np.frombuffer(tensor.data, item)
    if tensor.dtype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)  # the upper half of an f32
    return values.astype(np.float32).reshape(tensor.shape)


def _span(name: str, entry: Any, start: int) -> Span:
    dtype, shape, offsets = fields(entry, f"header of {name!r:.200}", "dtype", "shape", "data_offsets")
    numbers = [*items(shape, "shape", 64), *items(offsets, "data_offsets", 2)]
    if (
        not isinstance(dtype, str)
        or any(type(number) is not int or number < 0 for number in numbers)
        or len(offsets) != 2
        or offsets[0] > offsets[1]
    ):
        raise Invalid(f"header of {name!r:.200}: a format name, sizes and two offsets are wanted")
    return Span(dtype, tuple(shape), start + offsets[0], offsets[1] - offsets[0])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found
