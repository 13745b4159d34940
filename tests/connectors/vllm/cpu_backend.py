"""The backend on a CPU, in plain torch and in f32: the meaning of the GPU's kernels, and what tests with a real engine
run on. Slow, and meant so.

A cache is [pages, heads, tokens, K | V] like a GPU's, in any physical order, so everything else (format, flags,
connector) is the same code. CPU engines have a faster backend of their own; it packs K, which nothing in place could be
read from. Called by vLLM from the engine's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from kvtier_kernels import paged
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from kvtier.connectors.vllm.backend import flags
from kvtier.connectors.vllm.backend.declared import KINDS, DualDeclared, refuse

ROWS = 256  # queries whose logits exist at once


@dataclass
class DualMetadata:
    """What `forward` needs of a step."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class CpuDualBuilder(AttentionMetadataBuilder[DualMetadata]):
    """Keeps what `DualMetadata` has."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> DualMetadata:
        """As vLLM calls it. Raises NotImplementedError for attention that is not causal."""
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("kvtier's dual backend is causal")
        return DualMetadata(
            common.num_actual_tokens,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
        )


class CpuDualImpl(AttentionImpl[DualMetadata]):
    """One layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **other: Any,
    ) -> None:
        refuse(alibi_slopes, kv_cache_dtype, attn_type, kv_sharing_target_layer_name, other)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.window, self.kv_cache_dtype = num_kv_heads or num_heads, sliding_window, kv_cache_dtype
        self.cap, self.sinks = logits_soft_cap or 0.0, sinks

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """The only writer of new tokens. slot = page * tokens + place; below 0 is padding: -1 // tokens would be the
        last page."""
        tokens, page_flags = kv_cache.shape[2], flags.of(kv_cache)
        real = slot_mapping >= 0
        slots = slot_mapping[real]
        pages, places = slots // tokens, slots % tokens
        self._clear(page_flags, pages, places)
        count = slot_mapping.shape[0]
        kv_cache[pages, :, places] = torch.cat([key[:count][real], value[:count][real]], -1).to(kv_cache.dtype)

    def _clear(self, page_flags: torch.Tensor, pages: torch.Tensor, places: torch.Tensor) -> None:
        """These pages hold native elements from now on. A token in the middle of an FP8 page would make noise of those
        before it."""
        middle = set(pages[page_flags[pages] != 0].tolist()) - set(pages[places == 0].tolist())
        if middle:
            raise RuntimeError(f"kvtier: a token is to be written into the middle of FP8 pages {sorted(middle)}")
        page_flags[pages] = 0

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: DualMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As vLLM calls it: queries of all sequences over their pages, each by its flag."""
        if attn_metadata is None:
            return output.fill_(0)  # profiling
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kvtier's dual backend does not quantize its output")
        starts = attn_metadata.query_start_loc.tolist()
        for number, length in enumerate(attn_metadata.seq_lens.tolist()[: len(starts) - 1]):
            first, last = starts[number], starts[number + 1]
            if first < last:
                output[first:last] = self._attend(
                    query[first:last], kv_cache, attn_metadata.block_table[number], length
                ).to(output.dtype)
        return output

    def _attend(self, query: torch.Tensor, kv_cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
        """One sequence: [queries, heads, width of V] in f32; `query` are its last tokens."""
        count, tokens, group = query.shape[0], kv_cache.shape[2], self.num_heads // self.num_kv_heads
        start = 0 if self.window is None else max(0, length - count - self.window + 1) // tokens
        keys, values = self._gather(kv_cache, table[start : -(-length // tokens)].long())
        keys, values = keys[:, : length - start * tokens], values[:, : length - start * tokens]
        seen_from = torch.arange(start * tokens, length)
        rows = []
        for low in range(0, count, ROWS):
            part = query[low : low + ROWS].float().view(-1, self.num_kv_heads, group, self.head_size)
            at = torch.arange(length - count + low, length - count + low + part.shape[0])[:, None]
            logits = torch.einsum("qhgd,hkd->hgqk", part, keys) * self.scale
            if self.cap:
                logits = self.cap * torch.tanh(logits / self.cap)
            hidden = seen_from > at
            if self.window is not None:
                hidden |= seen_from <= at - self.window
            logits.masked_fill_(hidden, float("-inf"))
            if self.sinks is not None:
                sink = self.sinks.float().view(self.num_kv_heads, group, 1, 1).expand(*logits.shape[:3], 1)
                logits = torch.cat([logits, sink], -1)
            weights = logits.softmax(-1)[..., : keys.shape[1]]
            rows.append(torch.einsum("hgqk,hkd->qhgd", weights, values).flatten(1, 2))
        return torch.cat(rows)

    def _gather(self, kv_cache: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [heads, tokens, width] of these pages in f32."""
        page_flags = flags.of(kv_cache)
        restored = page_flags[pages] != 0
        if flags.watch is not None:
            flags.watch(pages, restored)
        cache, found = paged.interleaved(kv_cache, self.head_size, page_flags, KINDS), []
        for plane in cache:
            assert plane.native is not None and plane.codes is not None and plane.scales is not None
            x = torch.empty(len(pages), *plane.native.shape[1:])
            x[~restored] = plane.native[pages[~restored]].float()
            x[restored] = plane.codes[pages[restored]].view(torch.float8_e4m3fn).float() * plane.scales[pages[restored]]
            found.append(x.transpose(0, 1).flatten(1, 2))
        return found[0], found[1]


class CpuDualBackend(DualDeclared, AttentionBackend):
    """The class that KVTIER_ATTENTION names where tests run an engine with kvtier's attention on a CPU."""

    @staticmethod
    def get_impl_cls() -> type[CpuDualImpl]:
        """One layer's class."""
        return CpuDualImpl

    @staticmethod
    def get_builder_cls() -> type[CpuDualBuilder]:
        """The metadata's class."""
        return CpuDualBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Pages of any multiple of 16 tokens."""
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Rows on multiples of 16 elements."""
        return head_size % 16 == 0
