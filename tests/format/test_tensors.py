"""Safetensors files from raw bytes: read as they stand, or refused with the file's name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import Invalid
from kvtier.format.tensors import MAX_FILE_BYTES, Tensor, read_header, read_safetensors, to_f32


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype: str, shape: list[int], low: int, high: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [low, high]}


GOOD = safetensors_bytes(
    {"a": entry("F32", [1], 0, 4), "b": entry("BF16", [2], 4, 8)}, b"\0\0\x80\x3f" + b"\x80\x3f\x20\xc0"
)


def test_a_file_is_read_as_raw_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    found = read_safetensors(path)
    assert found == {"a": Tensor("F32", (1,), b"\0\0\x80\x3f"), "b": Tensor("BF16", (2,), b"\x80\x3f\x20\xc0")}
    spans, head = read_header(path)
    assert GOOD.startswith(head) and len(head) == len(GOOD) - 8
    for name, span in spans.items():
        assert (span.dtype, span.shape) == (found[name].dtype, found[name].shape)
        assert GOOD[span.start : span.start + span.nbytes] == found[name].data


MALFORMED = {
    "empty": b"",
    "shorter than a length": b"\x01\0\0",
    "length 0": bytes(8),
    "length beyond the file": struct.pack("<Q", 1000) + b"{}",
    "length 2^63-1": struct.pack("<Q", 2**63 - 1) + b"{}",
    "length 2^64-1": b"\xff" * 40,
    "not JSON": safetensors_bytes(b"hello"),
    "not UTF-8": safetensors_bytes(b"\xff\xfe{}"),
    "a list": safetensors_bytes(b"[]"),
    "deep nesting": safetensors_bytes(b"[" * 50_000),
    "entry is no object": safetensors_bytes({"a": 1}),
    "no dtype": safetensors_bytes({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "dtype is no text": safetensors_bytes({"a": {"dtype": 5, "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "negative size": safetensors_bytes({"a": entry("F32", [-1], 0, 4)}, bytes(4)),
    "size is no integer": safetensors_bytes({"a": entry("F32", [1.0], 0, 4)}, bytes(4)),  # type: ignore[list-item]
    "shape is no list": safetensors_bytes({"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}, bytes(4)),
    "three offsets": safetensors_bytes({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, bytes(4)),
    "offsets reversed": safetensors_bytes({"a": entry("F32", [1], 4, 0)}, bytes(4)),
    "negative offset": safetensors_bytes({"a": entry("F32", [1], -4, 0)}, bytes(4)),
    "ends beyond the file": safetensors_bytes({"a": entry("F32", [2], 0, 8)}, bytes(4)),
    "file is longer": safetensors_bytes({"a": entry("F32", [1], 0, 4)}, bytes(5)),
    "cut short": GOOD[:-1],
    "hole": safetensors_bytes({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, bytes(12)),
    "overlap": safetensors_bytes({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, bytes(8)),
    "starts late": safetensors_bytes({"a": entry("F32", [1], 4, 8)}, bytes(8)),
    "a pickle": b"\x80\x04\x95\x1f\0\0\0\0\0\0\0\x8c\x05posix\x8c\x06system\x93\x8c\x05touch\x85R.",
}
SHAPES = {  # the header alone cannot tell these; the library can
    "shape does not multiply up": safetensors_bytes({"a": entry("F32", [3], 0, 4)}, bytes(4)),
    "shape overflows": safetensors_bytes({"a": entry("F32", [2**62, 4], 0, 4)}, bytes(4)),
    "unknown dtype": safetensors_bytes({"a": entry("F33", [1], 0, 4)}, bytes(4)),
}


@pytest.mark.parametrize("case", [*MALFORMED, *SHAPES])
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes({**MALFORMED, **SHAPES}[case])
    with pytest.raises(Invalid, match=r"bad\.safetensors: not a safetensors file"):
        read_safetensors(path)
    if case in MALFORMED:
        with pytest.raises(Invalid, match=r"bad\.safetensors: "):
            read_header(path)


def test_a_name_that_stands_twice_is_refused_where_weights_are_read(tmp_path: Path) -> None:
    path = tmp_path / "twice.safetensors"
    one = json.dumps(entry("F32", [1], 0, 4))
    path.write_bytes(safetensors_bytes(f'{{"a":{one},"a":{one}}}'.encode(), bytes(4)))
    with pytest.raises(Invalid, match="a key stands twice"):
        read_header(path)


def test_a_file_above_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    with open(path, "wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(Invalid, match=r"large\.safetensors: more than 67108864 bytes"):
        read_safetensors(path)


@given(position=st.integers(0, len(GOOD) - 1), flip=st.integers(1, 255), cut=st.integers(0, len(GOOD)))
def test_a_damaged_file_is_refused_or_read_within_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, position: int, flip: int, cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    raw = bytearray(GOOD)
    raw[position] ^= flip
    for damaged in (bytes(raw), bytes(raw[:cut])):
        path.write_bytes(damaged)
        for read in (read_safetensors, read_header):
            try:
                read(path)
            except Invalid as error:
                assert "damaged.safetensors" in str(error)
    try:
        spans, _ = read_header(path)
        found = read_safetensors(path)
    except Invalid:
        return
    assert {name: damaged[span.start : span.start + span.nbytes] for name, span in spans.items()} == {
        n: t.data for n, t in found.items()
    }


def test_values_are_read_exactly() -> None:
    bits = np.arange(65536, dtype=np.uint32)
    half = to_f32(Tensor("BF16", (65536,), bits.astype("<u2").tobytes()))
    assert (half.view(np.uint32) == bits << 16).all(), "bf16 is the upper half of an f32, NaN payloads included"
    f16 = to_f32(Tensor("F16", (65536,), bits.astype("<u2").tobytes()))
    finite = np.isfinite(f16)
    assert finite.sum() == 63488 and (f16[finite].astype(np.float16).view(np.uint16) == bits[finite]).all()
    f32 = np.array([1.1, -0.0, 1e-45, np.inf, 3.4e38], "<f4")
    assert to_f32(Tensor("F32", (5, 1), f32.tobytes())).tobytes() == f32.tobytes()
    scalar = to_f32(Tensor("F32", (), b"\0\0\x80\x3f"))
    assert scalar.shape == () and scalar == 1


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("F64", (1,), bytes(8)),
        Tensor("F8_E4M3", (1,), b"8"),
        Tensor("I8", (1,), b"8"),
        Tensor("F32", (2,), bytes(4)),
    ],
)
def test_other_values_are_refused(tensor: Tensor) -> None:
    with pytest.raises(Invalid):
        to_f32(tensor)


@pytest.mark.torch
def test_torch_and_we_read_the_same_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    values = torch.randn(4, 7, generator=torch.Generator().manual_seed(1))
    written = {
        "bf16": values.bfloat16(),
        "f16": values.half(),
        "f32": values,
        "scalar": values[0, 0].bfloat16().reshape(()),
    }
    save_file(written, tmp_path / "torch.safetensors")
    found = read_safetensors(tmp_path / "torch.safetensors")
    for name, tensor in written.items():
        assert found[name].shape == tuple(tensor.shape)
        assert (to_f32(found[name]) == tensor.float().numpy()).all(), name
