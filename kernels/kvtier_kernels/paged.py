"""One layer of an engine's paged KV cache, as kernels see it: where K and V of a page, head and token stand, native and
FP8.

A page's slot always has room for native elements. Where `flags` says so it holds FP8 instead, in the slot's own bytes
("dual"). A part's row is the run of native bytes of one token and head, of 2 x width bytes, and in an FP8 page becomes

    K|V on one row ("interleaved", C = width of K + width of V)
        codes of K from byte 0, of V from byte `width of K`; f32 scales of K at C, of V at C + 4; channel scales of K
        from C + 16, of V behind them
    K and V on rows of their own ("split")
        codes from byte 0; f32 scale at `width`; channel scales from width + 16

A scale of a tensor, head or block stands in the row of the page's first token, one of a token in that token's row;
channel scales stand in 16 rows, width / 16 in each. Every address is a plain strided view, so any order of pages, heads
and tokens will do: NHD, HND, K and V in one tensor or two. Views only; nothing is copied, no kernel is launched. Any
thread may call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtier.errors import Invalid
from kvtier.format.layout import GRANULARITIES
from kvtier_kernels.reference import described

NATIVE, FP8, MIXED = 0, 1, 2  # what a cache's pages hold; MIXED: each page's flag says which
WIDTHS = (64, 96, 128, 192, 256)  # head dims that are compiled, checked and tested
CHANNEL_ROWS = 16  # rows that hold a page's channel scales
# How a kernel finds a scale, by granularity: none, one a page, one a token, one a channel.
SCALES = {"none": 0, "tensor": 1, "head": 1, "block-head": 1, "token-head": 2, "channel": 3}


class Rows(NamedTuple):
    """Kernel argument: a pointer and its strides, in elements, from page to page, head to head, row to row."""

    start: Any
    page: int
    head: int
    token: int


class Side(NamedTuple):
    """Kernel argument: K or V of a layer."""

    native: Rows
    codes: Rows
    scales: Rows


@dataclass(frozen=True, slots=True)
class Plane:
    """K or V of one layer. All views may have any strides but the innermost, which is 1.

    native   [pages, heads, tokens, width] bf16 or fp16, or None for a cache of FP8 alone
    codes    [pages, heads, tokens, width] uint8, or None for a native cache
    scales   [pages, heads, rows, n] f32 (or bf16, of blocks with small scales), or None: one scale, one a token, or
             width / 16 in each of 16 rows
    """

    native: Tensor | None
    codes: Tensor | None
    scales: Tensor | None
    granularity: str

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise Invalid(f"granularity must be one of {sorted(GRANULARITIES)}, not {self.granularity!r}")
        if self.native is None and self.codes is None:
            raise Invalid("a plane has native elements, codes, or both")
        natives = (torch.bfloat16, torch.float16)
        for name, view, dtypes in (("native", self.native, natives), ("codes", self.codes, (torch.uint8,))):
            if view is None:
                continue
            if view.dim() != 4 or view.dtype not in dtypes or view.shape != self.any.shape:
                wanted = f"{dtypes} of shape [pages, heads, tokens, width]"
                raise Invalid(f"{name} must be {wanted}, not {described(view)}")
            strides = view.stride()
            # Kernels promise the compiler rows on multiples of 16 elements, or every load becomes one of single bytes.
            if strides[3] != 1 or any(stride % 16 for stride in strides[:3]) or view.data_ptr() % 16:
                wanted = "start on multiples of 16 elements and be contiguous"
                raise Invalid(f"rows of {name} must {wanted}; strides are {strides}")
            # Pages are counted in 64 bits, heads and tokens within one in 32.
            if (view.shape[1] - 1) * strides[1] + (view.shape[2] - 1) * strides[2] + view.shape[3] > 2**31:
                page = f"the heads and tokens of one page of {name}"
                raise Invalid(f"{page} must lie within 2^31 elements; strides are {strides}")

    @property
    def any(self) -> Tensor:
        view = self.codes if self.native is None else self.native
        assert view is not None
        return view

    @property
    def width(self) -> int:
        return self.any.shape[3]

    def side(self, fp8_type: bool) -> Side:
        """The kernel argument. `fp8_type`: codes as float8_e4m3fn, not uint8. What is absent gets an unread pointer."""
        codes = self.codes.view(torch.float8_e4m3fn) if self.codes is not None and fp8_type else self.codes
        return Side(*(rows(self.any if view is None else view) for view in (self.native, codes, self.scales)))


def rows(view: Tensor) -> Rows:
    """Pointer and strides of a view [pages, heads, rows, width]."""
    return Rows(view, *view.stride()[:3])


@dataclass(frozen=True, slots=True)
class Paged:
    """K and V of one layer. flags: uint8 [pages], 1 where a page holds FP8; None where pages cannot hold either."""

    keys: Plane
    values: Plane
    flags: Tensor | None = None

    def __post_init__(self) -> None:
        keys, values = tuple(self.keys.any.shape), tuple(self.values.any.shape)
        if keys[:3] != values[:3]:
            raise Invalid(f"K {keys} and V {values} differ in pages, heads or tokens")
        if _form(self.keys) != _form(self.values):
            raise Invalid("K and V of a layer are both native, both FP8 or both either")
        if (self.flags is not None) != (self.form == MIXED):
            raise Invalid("flags are needed where pages may hold native or FP8, and only there")
        if self.flags is not None and (self.flags.dtype != torch.uint8 or self.flags.shape != keys[:1]):
            raise Invalid(f"flags must be uint8 of shape [{keys[0]}], not {described(self.flags)}")

    @property
    def form(self) -> int:
        return _form(self.keys)

    @property
    def heads(self) -> int:
        return self.keys.any.shape[1]

    @property
    def tokens(self) -> int:
        """Of one page."""
        return self.keys.any.shape[2]

    @property
    def device(self) -> torch.device:
        return self.keys.any.device

    def __iter__(self) -> Iterator[Plane]:
        return iter((self.keys, self.values))


def _form(plane: Plane) -> int:
    return NATIVE if plane.codes is None else FP8 if plane.native is None else MIXED


def native(keys: Tensor, values: Tensor) -> Paged:
    """A cache that never holds FP8: an excluded layer, or mode `native`."""
    return Paged(Plane(keys, None, None, "none"), Plane(values, None, None, "none"))


def split(keys: Tensor, values: Tensor, flags: Tensor, granularity: tuple[str, str] = ("head", "head")) -> Paged:
    """K and V [pages, heads, tokens, width], each on rows of its own, whose pages may hold FP8 by their flag."""
    planes = []
    for x, kind in zip((keys, values), granularity, strict=True):
        raw, width = _raw(x), x.shape[3]
        planes.append(Plane(x, raw[..., :width], _slot_scales(raw, kind, width, width, width + 16), kind))
    return Paged(planes[0], planes[1], flags)


def interleaved(
    kv: Tensor, key_width: int, flags: Tensor | None, granularity: tuple[str, str] = ("head", "head")
) -> Paged:
    """K|V on one row: kv [pages, heads, tokens, width of K + width of V]. Without flags it never holds FP8: what
    attention must be given for an excluded layer, as flags are common to all layers."""
    keys, values = kv[..., :key_width], kv[..., key_width:]
    if flags is None:
        return native(keys, values)
    raw, both = _raw(kv), kv.shape[3]
    key_scales = _slot_scales(raw, granularity[0], key_width, both, both + 16)
    value_scales = _slot_scales(raw, granularity[1], both - key_width, both + 4, both + 16 + key_width // 4)
    k = Plane(keys, raw[..., :key_width], key_scales, granularity[0])
    return Paged(k, Plane(values, raw[..., key_width:both], value_scales, granularity[1]), flags)


def fp8(keys: Tensor, values: Tensor, key_scales: Tensor, value_scales: Tensor) -> Paged:
    """An FP8 engine's cache: codes [pages, heads, tokens, width] (e4m3fn or uint8), its scales f32 [1] or [heads]."""
    planes = []
    for codes, scales in ((keys, key_scales), (values, value_scales)):
        pages, heads = codes.shape[:2]
        if scales.dtype != torch.float32 or scales.numel() not in (1, heads):
            raise Invalid(f"static scales must be f32, 1 or {heads} of them, not {described(scales)}")
        spread = scales.reshape(1, -1, 1, 1).expand(pages, heads, 1, 1)
        planes.append(Plane(None, codes.view(torch.uint8), spread, "tensor" if scales.numel() == 1 else "head"))
    return Paged(*planes)


def _raw(x: Tensor) -> Tensor:
    if x.dim() != 4 or x.element_size() != 2 or x.stride(3) != 1:
        wanted = "bf16 or fp16 [pages, heads, tokens, width] with contiguous rows"
        raise Invalid(f"a cache is {wanted}, not {x.dtype} of strides {x.stride()}")
    return x.view(torch.uint8)


def _slot_scales(raw: Tensor, granularity: str, width: int, scale: int, channels: int) -> Tensor:
    """The scales in native slots [pages, heads, tokens, row bytes], free from bytes `scale` and `channels` on."""
    if granularity == "channel":
        if width % 16 or raw.shape[2] < CHANNEL_ROWS or channels + width // 4 > raw.shape[3]:
            raise Invalid(f"channel scales of width {width} do not fit a page of {raw.shape[2]} tokens")
        return raw[:, :, :CHANNEL_ROWS, channels : channels + width // 4].view(torch.float32)
    one = raw[..., scale : scale + 4].view(torch.float32)
    return one if granularity == "token-head" else one[:, :, :1]
