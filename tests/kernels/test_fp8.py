"""Number format in kernels: the corrected interpreter, both forms of encode and decode, and case KVB-02. Every bf16
number and every code is tried.
"""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl
from kvtier_kernels import reference
from kvtier_kernels.fp8 import decode, encode, to_fp16

from tests.kernels.cases import DEVICE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _encode(x, out, N: tl.constexpr, BITS: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    wide = tl.load(x + i).to(tl.float32)
    tl.store(out + i, encode(wide, wide, BITS))


@triton.jit
def _decode(codes, out):
    i = tl.arange(0, 256)
    tl.store(out + i, decode(tl.load(codes + i)).to(tl.float32))


@triton.jit
def _to_fp16(x, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + i, to_fp16(tl.load(x + i)))


@triton.jit
def _cast(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def _dot(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    tl.store(
        out + m[:, None] * N + n[None, :],
        tl.dot(tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :])),
    )


FORMS = [pytest.param(False, id="native"), pytest.param(True, id="bits")]


def codes_of(x: torch.Tensor, bits: bool) -> torch.Tensor:
    out = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    _encode[(len(x) // 256,)](x.to(DEVICE), out, N=256, BITS=bits, enable_fp_fusion=False)
    return out.cpu()


def padded(values: list[float]) -> torch.Tensor:
    return torch.tensor(values + [0.0] * (-len(values) % 256))


@pytest.mark.parametrize("bits", FORMS)
def test_encode_equals_the_reference_for_every_bf16_number(bits: bool) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    wanted = reference.quantize(x.reshape(1, 256, 256), "tensor", torch.ones(1)).codes.view(torch.uint8).flatten()
    assert torch.equal(codes_of(x, bits), wanted)


@pytest.mark.parametrize("bits", FORMS)
def test_encode_rounds_f32_to_nearest_even(bits: bool) -> None:
    """All midpoints between neighbouring codes, their f32 neighbours, and random numbers of every size."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (values[1:] + values[:-1]) / 2
    near = torch.cat([middle, torch.nextafter(middle, torch.tensor(1e9)), torch.nextafter(middle, torch.tensor(0.0))])
    spread = torch.randn(1024, generator=torch.Generator().manual_seed(0)) * torch.exp2(torch.arange(1024) % 24 - 14.0)
    x = torch.cat(
        [near, -near, spread, torch.tensor([torch.inf, -torch.inf, torch.nan, 464.0, 464.1, 3e38, 1e-40, -1e-40])]
    )
    x = torch.cat([x, torch.zeros(-len(x) % 256)])
    wanted = reference.quantize(x.reshape(1, 1, -1), "tensor", torch.ones(1)).codes.view(torch.uint8).flatten()
    assert torch.equal(codes_of(x, bits), wanted)


@pytest.mark.parametrize("bits", FORMS)
def test_kvb_02_saturation_and_e4m3fn(bits: bool) -> None:
    table = {
        448.0: 0x7E,
        464.0: 0x7E,
        465.0: 0x7E,
        480.0: 0x7E,
        1e9: 0x7E,
        -1e9: 0xFE,
        240.0: 0x77,
        241.0: 0x77,
        1.0: 0x38,
    }
    table |= {2.0**-9: 0x01, 2.0**-10: 0x00, 1.5 * 2.0**-9: 0x02, 0.1: 0x1D}
    assert codes_of(padded(list(table)), bits)[: len(table)].tolist() == list(table.values())
    assert codes_of(padded([-0.0, torch.nan, torch.inf, -torch.inf]), bits)[:4].tolist() == [0x80, 0x7F, 0x7E, 0xFE]


@pytest.mark.parametrize("bits", FORMS)
def test_decode_is_exact_for_every_code(bits: bool) -> None:
    codes, out = torch.arange(256, dtype=torch.uint8), torch.empty(256, device=DEVICE)
    wanted = codes.view(torch.float8_e4m3fn).float()
    _decode[(1,)]((codes if bits else codes.view(torch.float8_e4m3fn)).to(DEVICE), out)
    found = out.cpu()
    assert torch.equal(found.isnan(), wanted.isnan()) and wanted.isnan().sum() == 2
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


def test_native_elements_become_fp16_and_saturate() -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out = torch.empty(65536, dtype=torch.float16, device=DEVICE)
    _to_fp16[(256,)](x.to(DEVICE), out, N=256)
    wanted = x.float().clamp(-65504, 65504).half()
    found = out.cpu()
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.equal(found[~x.isnan()], wanted[~x.isnan()])


@pytest.mark.skipif(not INTERPRETED, reason="about the interpreter")
def test_the_interpreter_casts_as_hardware_does() -> None:
    x = torch.tensor([7.87, 31.9, 12.5, 464.0, 1e4, torch.inf, torch.nan, 2.0**-9, 0.0009, -0.3] + [0.0] * 6)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float16):
        out = torch.empty(16, dtype=dtype)
        _cast[(1,)](x, out, N=16)
        wanted = x.clamp(-448, 448).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)
        assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.skipif(not INTERPRETED, reason="about the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_interpreter_multiplies_numbers_not_bits(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=random).to(dtype) for shape in ((16, 64), (64, 32)))
    out = torch.empty(16, 32)
    _dot[(1,)](a, b, out, M=16, N=32, K=64)
    assert (out.double() - a.double() @ b.double()).abs().max() < 1e-4
