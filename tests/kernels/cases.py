"""Caches whose every byte is known, and the exact answer in float64: shared by the tests of the kernels, the error
table and the GPU tests.

Caches are filled through plain torch views and `reference`, never by the kernels under test.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from kvtier_kernels import paged, reference
from kvtier_kernels.attention import decode
from kvtier_kernels.paged import Paged, Plane
from kvtier_kernels.prefill import prefill

from kvtier.format import layout

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available() else "cuda")
ORDERS = ("NHD", "HND", "interleaved", "split")
KINDS = {
    "tensor": ("tensor", "tensor"),
    "head": ("head", "head"),
    "block-head": ("block-head", "block-head"),
    "token-head": ("token-head", "token-head"),
    "channel": ("channel", "channel"),
    "kivi": ("channel", "token-head"),
}
STATIC = ((0.01, 0.5), (0.5, 0.05), (0.05, 0.01))  # scales of K and V by layer and head, unequal everywhere; 0.01 clips
ZEROS, NANS = 0x00, 0xFF  # bytes that slots are filled with first: 0xFF is NaN as e4m3fn, bf16, fp16 and f32


def storage(
    order: str, pages: int, heads: int, tokens: int, width: int, dtype: torch.dtype, fill: int = ZEROS
) -> list[torch.Tensor]:
    """[K, V], or [K|V] for "interleaved", as views [pages, heads, tokens, width] of an engine's tensor in that order,
    every byte `fill`.
    """
    shapes = {
        "NHD": (pages, 2, tokens, heads, width),
        "HND": (pages, 2, heads, tokens, width),
        "interleaved": (pages, tokens, heads, 2 * width),
        "split": (2, pages, tokens, heads, width),
    }
    raw = torch.full((*shapes[order][:-1], shapes[order][-1] * 2), fill, dtype=torch.uint8, device=DEVICE).view(dtype)
    if order == "NHD":
        return [raw[:, i].transpose(1, 2) for i in (0, 1)]
    if order == "HND":
        return [raw[:, i] for i in (0, 1)]
    if order == "interleaved":
        return [raw.transpose(1, 2)]
    return [raw[i].transpose(1, 2) for i in (0, 1)]


def cache_of(views: list[torch.Tensor], kinds: tuple[str, str], flags: torch.Tensor | None) -> Paged:
    if len(views) == 1:
        return paged.interleaved(views[0], views[0].shape[3] // 2, flags, kinds)
    return paged.native(*views) if flags is None else paged.split(views[0], views[1], flags, kinds)


def layout_of(
    width: int,
    heads: int,
    tokens: int,
    kinds: tuple[str, str],
    *,
    blocks: int = 1,
    layers: int = 1,
    small: bool = False,
    dtype: str = "bf16",
    excluded: tuple[int, ...] = (),
) -> layout.Layout:
    """One attention group; `small`: scales that come from the block are bf16."""
    scale = {kind: "bf16" if small and kind in layout.DYNAMIC else "fp32" for kind in kinds}
    quantized = tuple(
        layout.Part(name, width, "e4m3fn", kind, scale[kind]) for name, kind in zip("kv", kinds, strict=True)
    )
    native = tuple(layout.Part(name, width, dtype) for name in "kv")
    made = tuple(layout.Layer(i, native if i in excluded else quantized) for i in range(layers))
    return layout.Layout((layout.Group("attention", heads, tokens, made, blocks),))


def write_page(plane: Plane, page: int, quantized: reference.Quantized, used: int) -> None:
    """Puts one page's codes and scales into its slot as `paged` says, of the first `used` tokens only."""
    assert plane.codes is not None and plane.scales is not None
    plane.codes[page, :, :used] = quantized.codes[:, :used].view(torch.uint8).to(DEVICE)
    scales = quantized.scales.reshape(plane.scales.shape[1:]).to(DEVICE)
    if plane.granularity == "token-head":
        plane.scales[page, :, :used] = scales[:, :used]
    else:
        plane.scales[page] = scales


@dataclass
class Case:
    """One attention problem; `exact` [sequence][K or V] is float64 [heads, tokens, width]."""

    width: int = 64
    heads: int = 2
    group: int = 4
    page: int = 16
    kinds: str = "head"
    lengths: tuple[int, ...] = (1, 15, 16, 17, 33)
    fp8: str = "leading"  # which pages are FP8: all, none, leading (two thirds), odd
    order: str = "interleaved"
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    fill: int = NANS
    unused_scale: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        counts = [-(-length // self.page) for length in self.lengths]
        total, kinds = sum(counts) + 2, KINDS[self.kinds]  # two pages belong to nobody
        views = storage(self.order, total, self.heads, self.page, self.width, self.dtype, self.fill)
        flags = None if self.fp8 == "none" else torch.zeros(total, dtype=torch.uint8, device=DEVICE)
        self.cache = cache_of(views, kinds, flags)
        if self.unused_scale is not None:
            for plane in self.cache:
                assert plane.scales is not None
                plane.scales.fill_(self.unused_scale)
        ids = torch.randperm(total, generator=random).int()
        self.table = torch.full(
            (len(counts), max(*counts, 1) + 1), int(ids[-1]), dtype=torch.int32
        )  # behind the end: a page full of `fill`
        self.exact: list[list[torch.Tensor]] = []
        at = 0
        for sequence, count in enumerate(counts):
            self.table[sequence, :count] = ids[at : at + count]
            at += count
            self.exact.append(self._fill(sequence, count, random, kinds))
        self.table = self.table.to(DEVICE)
        self.q = torch.Generator().manual_seed(self.seed + 1)

    def _fill(self, sequence: int, count: int, random: torch.Generator, kinds: tuple[str, str]) -> list[torch.Tensor]:
        pages: list[list[torch.Tensor]] = [[], []]
        for i in range(count):
            page = int(self.table[sequence, i])
            used = min(self.page, self.lengths[sequence] - i * self.page)
            restored = {"all": True, "none": False, "leading": i < max(1, count * 2 // 3), "odd": i % 2 == 1}[self.fp8]
            for j, plane in enumerate(self.cache):
                x = torch.randn(self.heads, self.page, self.width, generator=random).to(self.dtype)
                x[:, used:] = 0
                if restored:
                    static = torch.tensor(STATIC[j % 3])[: self.heads] if kinds[j] in layout.STATIC else None
                    static = static[:1] if kinds[j] == "tensor" and static is not None else static
                    quantized = reference.quantize(x, kinds[j], static)
                    write_page(plane, page, quantized, used)
                    pages[j].append(exact_values(quantized, kinds[j])[:, :used])
                else:
                    assert plane.native is not None
                    plane.native[page, :, :used] = x[:, :used].to(DEVICE)
                    pages[j].append(x[:, :used].double())
            if restored and self.cache.flags is not None:
                self.cache.flags[page] = 1
        return [
            torch.cat(part, 1) if part else torch.zeros(self.heads, 0, self.width, dtype=torch.float64)
            for part in pages
        ]

    def queries(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.heads * self.group, self.width, generator=self.q).to(self.dtype).to(DEVICE)

    def _options(self) -> dict[str, Any]:
        return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in self.options.items()}

    def decode(self, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        return decode(
            queries, self.cache, self.table, lengths, max(self.lengths), dtype=torch.float32, **self._options()
        )

    def prefill(
        self, queries: torch.Tensor, counts: tuple[int, ...], dots: str = "fp16"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
        return prefill(
            queries,
            self.cache,
            self.table,
            starts,
            lengths,
            max(counts),
            dtype=torch.float32,
            dots=dots,
            **self._options(),
        )

    def right(self, queries: torch.Tensor, counts: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(out [heads, queries, width], lse [heads, queries]) of each sequence in float64."""
        answers, at = [], 0
        for length, count, (keys, values) in zip(self.lengths, counts, self.exact, strict=True):
            own = queries[at : at + count].cpu().double().transpose(0, 1)
            answers.append(exact_attention(own, keys, values, length - count, self.group, **self.options))
            at += count
        return answers

    def decode_errors(self) -> tuple[float, float]:
        """Worst relative error of the output of a sequence, and worst error of its log-sum-exp."""
        queries = self.queries(len(self.lengths))
        ones = tuple(1 for _ in self.lengths)
        out, lse = (x.cpu() for x in self.decode(queries))
        return worst([(out[i, :, None], lse[i, :, None], *right) for i, right in enumerate(self.right(queries, ones))])

    def prefill_errors(self, counts: tuple[int, ...], dots: str = "fp16") -> tuple[float, float]:
        queries = self.queries(sum(counts))
        out, lse = (x.cpu() for x in self.prefill(queries, counts, dots))
        found = zip(out.split(counts), lse.split(counts), self.right(queries, counts), strict=True)
        return worst([(o.transpose(0, 1), s.T, *right) for o, s, right in found])


def exact_values(quantized: reference.Quantized, granularity: str) -> torch.Tensor:
    """Codes times scales, float64 [heads, tokens, width] of one engine block: products of f32 are exact in it."""
    scales = quantized.scales.double()
    shaped = scales[:, None, :] if granularity == "channel" else scales[:, :, None]
    return quantized.codes.double() * shaped


def exact_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, group: int, *,
    window: int | None = None, cap: float = 0.0, sinks: torch.Tensor | None = None, **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Softmax attention in float64, written down without any of the kernels' tricks."""
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    logits = queries @ keys.mT * queries.shape[2] ** -0.5
    if cap:
        logits = cap * torch.tanh(logits / cap)
    own = torch.arange(start, start + queries.shape[1])[:, None]
    there = torch.arange(keys.shape[1])[None, :]
    hidden = there > own
    if window is not None:
        hidden |= there <= own - window
    logits = logits.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.cpu().double()[:, None, None].expand(-1, logits.shape[1], 1)], 2)
    weights = logits.softmax(2)[..., : keys.shape[1]]
    return weights @ values, logits.logsumexp(2)


def worst(found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    errors = [float((out - right).norm() / right.norm()) for out, _, right, _ in found]
    return max(errors), max(float((lse - exact).abs().max()) for _, lse, _, exact in found)
