"""What every backend of kvtier says of itself to vLLM, and what none of them does. A backend inherits `DualDeclared`
before vLLM's class, and each `Impl` calls `refuse`. The flags, the cache's form and these words are all that a second
backend (tests have one in plain torch) shares with the GPU's."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionType

KINDS = ("block-head", "block-head")  # what one scale covers in a page that holds FP8: of K, of V


class DualDeclared:
    """For a subclass of vLLM's AttentionBackend."""

    kvtier_dual = True  # how the connector knows it
    forward_includes_kv_cache_update = False  # so do_kv_cache_update is called
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # a member of vLLM's enumeration

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    supports_sink = supports_sliding_window


def refuse(alibi: Any, kv_cache_dtype: str, attn_type: str, shared: str | None, other: dict[str, Any]) -> None:
    """Raises NotImplementedError, by name, for what no backend of kvtier's does."""
    odd = {name: value for name, value in other.items() if value not in (None, False, -1)}
    if alibi is not None or odd:
        raise NotImplementedError(f"kvtier's dual backend has no {', '.join(odd) or 'alibi_slopes'}")
    if kv_cache_dtype not in DualDeclared.supported_kv_cache_dtypes:
        odd_cache = f"kv_cache_dtype {kv_cache_dtype}: an FP8 cache needs no dual"
        raise NotImplementedError(f"kvtier's dual backend keeps a BF16 or FP16 cache, not {odd_cache}")
    if attn_type != AttentionType.DECODER:
        raise NotImplementedError(f"kvtier's dual backend is for decoders, not attention of type {attn_type}")
    if shared is not None:
        raise NotImplementedError(f"kvtier's dual backend does not read the cache of another layer ({shared})")
