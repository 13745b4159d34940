"""Launch settings: one default per kernel and head dim, looked up, never searched at run time, so that nothing stalls
and graphs can be captured.

Every default is to compile without spills, with 16-byte loads and within shared memory for sm_80, sm_89, sm_90 and
sm_100 on Triton 3.6.0 and 3.9.0: `kernels/tools/aot_check.py` compiles exactly what the launchers would and judges it.
An exception stands beside its evidence. None of them has been timed on a GPU yet. Pure functions, but for `assume`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvtier.errors import Invalid
from kvtier_kernels.paged import WIDTHS

_assumed: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Tuning:
    """tile: tokens of a step; rows: rows of queries of a program (prefill); warps and stages as Triton means them."""

    tile: int
    warps: int
    stages: int = 2
    rows: int = 0


@contextmanager
def assume(capability: tuple[int, int]) -> Iterator[None]:
    """Lets launchers behave as on a GPU of this compute capability, for compilation without one. Not for threads."""
    global _assumed
    before, _assumed = _assumed, capability
    try:
        yield
    finally:
        _assumed = before


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability; None on a CPU, where Triton's interpreter runs."""
    if _assumed is not None:
        return _assumed
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def knows_e4m3(device: torch.device) -> bool:
    """Whether Triton has the type for this device. Below sm_89 it refuses it ("supported fp8 dtypes are fp8e4b15,
    fp8e5"): bit forms are used."""
    found = capability(device)
    return found is None or found >= (8, 9)


def casts_directly(device: torch.device) -> bool:
    """Whether f32 becomes e4m3fn in one rounding. On sm_89 Triton 3.6.0 casts by way of fp16 rounded toward zero
    (cvt.rz.f16.f32, then cvt.rn.satfinite.e4m3x2.f16x2), which puts numbers just above the middle of two codes into the
    middle: the bit form is used there, too."""
    found = capability(device)
    return found is None or found >= (9, 0)


def copying(tokens: int, wide: int) -> Tuning:
    """For quantize, gather, restore and expand: `tokens` of an engine block, `wide` the width rounded up to a power of
    two.

    8,192 elements are 64 a thread, so that an engine block of up to 64 tokens of width 128 is read once and stays in
    registers. A thread writes 16 codes at least: with 4 warps a block of 16 tokens of width 64 would be written 8 bytes
    at a time. Longer engine blocks go in tiles of half the size, as the loop around them needs registers (2 spills for
    544 tokens on sm_90 otherwise).
    """
    whole = 1 << (tokens - 1).bit_length()
    tile = whole if whole * wide <= 8192 else 4096 // wide
    return Tuning(tile, max(1, min(4, tile * wide // 512)))


def decode(width: int, page: int, channel: bool) -> Tuning:
    """For `attention.decode`. Tiles of 16 tokens for width 128: with 32 sm_90 spills 6 times on Triton 3.9.0. Channel
    scales differ from page to page, so a step then stays within one, and loads of the next one are not begun before:
    with two stages sm_90 spills 8 times for width 256 (Triton 3.6.0)."""
    tile = {64: 64, 96: 32, 128: 16, 192: 16, 256: 16}[width]
    return Tuning(min(tile, page, 32), 4, 1 if width > 128 else 2) if channel else Tuning(tile, 4, 2)


def prefill(width: int, channel: bool, dots: str, device: torch.device) -> Tuning:
    """For `prefill.prefill`; `dots` as there.

    64 rows on 8 warps and tiles of 16 tokens: with 128 rows and 32 tokens sm_80 spills 85 times for width 128 and 354
    for 256, sm_90 54 times for 256; with 64 rows and 32 tokens sm_80 still spills 10 times for width 64 and 8 for
    native pages of width 128, and sm_89 lacks the shared memory for 256 (123 KiB of 99). All on Triton 3.6.0.
    Exceptions:
    - sm_90 and newer take tiles of 32 up to width 128, where nothing spills: half the steps, and instructions twice as
      wide.
    - Head dim 256 keeps tiles of 16 everywhere; `prefill` warns, as engines' own kernels regress there and this one is
      not timed.
    - Channel scales: 4 warps, as 8 spill on sm_80 (16 times for width 96); above width 128 every setting that was tried
      spills (46 to 356 times).
    - FP8 dots, sm_90 and newer only: 128 rows, as with 64 sm_100 spills twice for width 128.
    """
    if channel:
        return Tuning(16, 4, 2, 64)
    if dots != "fp16":
        return Tuning(32, 8, 2, 128)
    if width == 256:
        return Tuning(16, 8, 2, 64)
    wide = capability(device)
    return Tuning(32 if width <= 128 and wide is not None and wide >= (9, 0) else 16, 8, 2, 64)


def splits(device: torch.device, programs: int, tiles: int) -> int:
    """Parts that decode cuts keys into: two programs a multiprocessor; at most one a tile and 64 (`merge`'s most)."""
    if capability(device) is None:
        return max(1, min(4, tiles))
    wanted = -(-2 * multiprocessors(device) // max(1, programs))
    return max(1, min(64, tiles, wanted))


def multiprocessors(device: torch.device) -> int:
    """132 where a GPU is only assumed."""
    return 132 if _assumed is not None else torch.cuda.get_device_properties(device).multi_processor_count


def check_width(width: int) -> None:
    """Raises Invalid for a head dim that no kernel was checked for."""
    if width not in WIDTHS:
        raise Invalid(f"head dim must be one of {WIDTHS}, not {width}")


def warn(message: str) -> None:
    """A warning that a person should see once."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)
