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
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from kvtier.connectors.vllm.backend import flags
from kvtier.connectors.vllm.backend.declared import KINDS, DualDeclared, refuse


class GpuDualBuilder(TritonAttentionMetadataBuilder):
    """vLLM's, but for what graphs are captured of."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class GpuDualImpl(TritonAttentionImpl):
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
        if (
            found is None
            or found.flags is not page_flags
            or found.keys.any.data_ptr() != kv_cache.data_ptr()
            or found.keys.any.shape[:3] != kv_cache.shape[:3]
        ):
            found = self._cache = paged.interleaved(kv_cache, self.head_size, page_flags, KINDS)
        return found

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """As vLLM calls it."""
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
        """As vLLM calls it."""
        if attn_metadata is None:
            return output.fill_(0)  # profiling
        if output_scale is not None or output_block_scale is not None or attn_metadata.causal is not True:
            raise NotImplementedError("kvtier's dual backend is causal and does not quantize its output")
        step, cache, count = attn_metadata, self._paged(kv_cache), attn_metadata.num_actual_tokens
        queries = query[:count].view(count, self.num_heads, self.head_size)
        options: dict[str, Any] = {
            "scale": self.scale,
            "window": self._window,
            "cap": float(self.logits_soft_cap),
            "sinks": self._sinks,
        }
        if step.max_query_len == 1:
            requests = step.seq_lens.shape[0]
            found, _ = decode(
                queries[:requests],
                cache,
                step.block_table[:requests],
                step.seq_lens,
                step.max_seq_len,
                dtype=output.dtype,
                **options,
            )
        else:
            found, _ = prefill(
                queries,
                cache,
                step.block_table,
                step.query_start_loc,
                step.seq_lens,
                step.max_query_len,
                dtype=output.dtype,
                **options,
            )
        output[: found.shape[0]].view(found.shape).copy_(found)
        return output

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: the output is what it is."""
        return False

    def fused_rope_kvcache_supported(self) -> bool:
        """No: another writer would not clear flags."""
        return False


class GpuDualBackend(DualDeclared, TritonAttentionBackend):
    """The class that --attention-backend CUSTOM selects. What the kernels lack is refused by vLLM's own check, by
    name."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The cache stays what the model says."""
        return spec

    @staticmethod
    def get_impl_cls() -> type[GpuDualImpl]:
        """One layer's class."""
        return GpuDualImpl

    @staticmethod
    def get_builder_cls() -> type[GpuDualBuilder]:
        """The metadata's class."""
        return GpuDualBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """What the kernels take: powers of two from 16 tokens on."""
        return [16, 32, 64, 128, 256]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """A block is whole pages."""
        return block_size is None or block_size % 16 == 0

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Head dims that the kernels were compiled and checked for."""
        return head_size in WIDTHS

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """From sm_80 on."""
        return (capability.major, capability.minor) >= (8, 0)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders."""
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_rswa(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """No: the keys are cut into as many parts as the batch leaves room for."""
        return False
