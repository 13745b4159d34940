"""e4m3fn in both directions, inside kernels: the one place where bits become numbers and numbers bits. The rules are
those of `reference`.

    encode   code(clamp(y, -448, 448)) to nearest even, subnormals kept; NaN -> 0x7F; +-Inf and whatever the clamp cuts
             -> 0x7E / 0xFE
    decode   the exact value in fp16, which holds every e4m3fn value; 0x7F and 0xFF -> NaN

`encode` is called by quantize alone, `decode` by attention, in registers, and by `expand`. Both have a second form in
integer arithmetic for chips whose Triton knows no e4m3fn (sm_80); the two forms agree in every bit. The clamp stands
before the cast because casts above 464 differ between machines.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels import reference

FP8_MAX = tl.constexpr(reference.FP8_MAX)
NAN_CODE = tl.constexpr(reference.NAN_CODE)
SMALLEST_NORMAL = tl.constexpr(2.0**-6)
FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def encode(y, x, BITS: tl.constexpr):
    """uint8 codes of y, f32. `x` is what y was scaled from: its NaN decides, as the clamp drops that of y."""
    y = tl.minimum(tl.maximum(y, -FP8_MAX), FP8_MAX)
    if BITS:
        bits = y.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Round to three mantissa bits, half to even; a carry moves on into the exponent, whose bias changes from 127 to
        # 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        # Below 2^-6 steps are 2^-9, the spacing of f32 at 2^14: the sum rounds, its low bits are the code. Needs
        # enable_fp_fusion=False: y must be rounded before it is added.
        small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        codes = tl.where(tl.abs(y) < SMALLEST_NORMAL, small, normal) | ((bits >> 24) & 0x80)
    else:
        codes = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(x != x, NAN_CODE, codes).to(tl.uint8)


@triton.jit
def decode(codes):
    """fp16 values of codes given as float8e4nv, or as uint8 where the chip has no such type."""
    if codes.dtype == tl.uint8:
        wide = codes.to(tl.uint16)
        # Sign to bit 15, exponent and mantissa below it: the value times 2^-8, as the biases are 15 and 7. fp16 keeps
        # subnormals, so x 256 is exact.
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        bits = tl.where((wide & 0x7F) == NAN_CODE, 0x7E00, bits).to(tl.uint16)
        return bits.to(tl.float16, bitcast=True) * 256.0
    return codes.to(tl.float16)


@triton.jit
def to_fp16(x):
    """A native element as fp16: exact for every bf16 from 2^-14 to 65504, saturating above, NaN kept."""
    if x.dtype == tl.float16:
        return x
    wide = x.to(tl.float32)
    wide = tl.minimum(
        tl.maximum(wide, -FP16_MAX, propagate_nan=tl.PropagateNan.ALL), FP16_MAX, propagate_nan=tl.PropagateNan.ALL
    )
    return wide.to(tl.float16)
