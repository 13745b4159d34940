"""The backend on a GPU: vLLM's Triton backend with kvtier's kernels in the place of two methods. Nobody has run it on a
GPU engine yet.

Write and clear in one launch (`kvtier_kernels.write`); attention by each page's flag (`attention.decode` where every
request has one query, else `prefill`). Selection, metadata and cache come from the class it inherits. The flags are a
tensor at a fixed address, not metadata: a captured graph reads their values of today. Graphs are captured for decode
steps alone: in those of prefill the number of programs would be fixed.
"""

from __future__ import annotations

from typing import Any

import torch
from kvtier_kernels import paged
from kvtier_kernels.attention import decode
from kvtier_kernels.paged import WIDTHS, Paged
from kvtier_kernels.prefill import prefill
from kvtier_kernels.write import write
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends import triton_attn

from kvtier.connectors.vllm.backend import flags
from kvtier.connectors.vllm.backend.declared import KINDS, DualDeclared, refuse


class GpuDualBuilder(triton_attn.TritonAttentionMetadataBuilder):
    """vLLM's, but for what graphs are captured of."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class GpuDualImpl(triton_attn.TritonAttentionImpl):
    """One layer."""

    _cache: Paged | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        odd = {"use_alibi_sqrt": self.use_alibi_sqrt, "chunk_lookback": self.chunk_lookback}
        refuse(self.alibi_slopes, self.kv_cache_dtype, self.attn_type, self.kv_sharing_target_layer_name, odd)
        self._window = None if self.sliding_window[0] < 0 else self.sliding_window[0] + 1
        self._sinks = None if self.sinks is None else self.sinks.float()

    def _paged(self, kv_cache: torch.Tensor) -> Paged:
        """The cache as the kernels see it; made anew where the engine has another tensor."""
        found, page_flags = self._cache, flags.of(kv_cache)
        if found is not None and found.flags is page_flags:
            keys = found.keys.any
            if keys.data_ptr() == kv_cache.data_ptr() and keys.shape[:3] == kv_cache.shape[:3]:
                return found
        self._cache = paged.interleaved(kv_cache, self.head_size, page_flags, KINDS)
        return self._cache

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        write(self._paged(kv_cache), key, value, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output.fill_(0)  # profiling
        if output_scale is not None or output_block_scale is not None or attn_metadata.causal is not True:
            raise NotImplementedError("kvtier's dual backend is causal and does not quantize its output")
        step, cache, count = attn_metadata, self._paged(kv_cache), attn_metadata.num_actual_tokens
        queries = query[:count].view(count, self.num_heads, self.head_size)
        options: dict[str, Any] = {"scale": self.scale, "window": self._window, "sinks": self._sinks}
        options |= {"cap": float(self.logits_soft_cap), "dtype": output.dtype}
        if step.max_query_len == 1:
            requests = step.seq_lens.shape[0]
            queries, table = queries[:requests], step.block_table[:requests]
            found, _ = decode(queries, cache, table, step.seq_lens, step.max_seq_len, **options)
        else:
            starts, longest = step.query_start_loc, step.max_query_len
            found, _ = prefill(queries, cache, step.block_table, starts, step.seq_lens, longest, **options)
        output[: found.shape[0]].view(found.shape).copy_(found)
        return output

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def fused_rope_kvcache_supported(self) -> bool:
        return False  # another writer would not clear flags


class GpuDualBackend(DualDeclared, triton_attn.TritonAttentionBackend):
    """The class that --attention-backend CUSTOM selects. vLLM's own check refuses, by name, what the kernels lack."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return spec

    @staticmethod
    def get_impl_cls() -> type[GpuDualImpl]:
        return GpuDualImpl

    @staticmethod
    def get_builder_cls() -> type[GpuDualBuilder]:
        return GpuDualBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [16, 32, 64, 128, 256]  # what the kernels take

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % 16 == 0  # a block is whole pages

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in WIDTHS  # what the kernels were compiled and checked for

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) >= (8, 0)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def _no(cls) -> bool:
        return False

    supports_rswa = supports_mm_prefix = supports_non_causal = supports_alibi_sqrt = _no
    supports_batch_invariance = _no  # the keys are cut into as many parts as the batch leaves room for
