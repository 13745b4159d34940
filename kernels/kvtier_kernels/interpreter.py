"""Triton's interpreter with the arithmetic of the hardware: import it, before any kernel is launched, wherever
TRITON_INTERPRET=1.

The stock interpreter is numerically wrong, alike in Triton 3.4 to 3.9: casts to e4m3fn lose the carry out of the
mantissa (7.87 becomes 4), round ties away from zero, flush subnormals and turn 464 and above into NaN; 0x7F decodes to
480; f32 to bf16 truncates; a dot of bf16 multiplies raw bits. `install` puts torch's conversions in their place, as PTX
defines them. It changes the process-wide interpreter and nothing where the interpreter is off. Call it from one thread;
calling it again is harmless.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

ON = os.environ.get("TRITON_INTERPRET") == "1"
TORCH = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_BITS: dict[int, tuple[Any, Any]] = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32)}
_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_stock_convert = interpreter._convert_float


def _tensor(data: Any, dtype: Any) -> torch.Tensor:
    """The interpreter's array, numbers or raw bits, as a torch tensor of the dtype it stands for."""
    raw = np.array(data, order="C")  # a copy: the interpreter's arrays may be read-only
    return torch.from_numpy(raw.view(_BITS[raw.itemsize][0])).view(TORCH[dtype])


def _convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """`data` of one float format in another, to nearest even; FP8 saturates (cvt.rn.satfinite) and keeps NaN."""
    toward_zero = getattr(interpreter._ir.ROUNDING_MODE, "RTZ", None)
    if source not in TORCH or target not in TORCH or (rounding is not None and rounding == toward_zero):
        return _stock_convert(data, source, target, rounding)
    values, wanted = _tensor(data, source).float(), TORCH[target]
    if wanted.itemsize == 1:
        most = torch.finfo(wanted).max
        values = torch.where(values.isnan(), values, values.clamp(-most, most))
    raw = values.to(wanted).view(_BITS[wanted.itemsize][1]).numpy().view(_UNSIGNED[wanted.itemsize])
    return raw.reshape(np.shape(data))


def _dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """a @ b + d with exact products and f32 sums, whatever the operands' format."""

    def plain(handle: Any) -> Any:
        dtype = handle.dtype.scalar
        small = dtype in TORCH and dtype is not tl.float32
        return _tensor(handle.data, dtype).float().numpy() if small else handle.data

    product = np.matmul(plain(a), plain(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def install() -> None:
    """Corrects the interpreter of this process."""
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _dot


install()
