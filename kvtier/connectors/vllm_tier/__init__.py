"""A secondary tier of vLLM's own CPU offloading: what leaves vLLM's CPU pool stays in a kvtier daemon. By name:

    "secondary_tiers": [{"type": "KvtierTier", "module_path": "kvtier.connectors.vllm_tier",
                         "namespace": "/etc/kvtier/model.json"}]

vllm is imported when the class is asked for. `docs/vllm.md` says how to use it and what it cannot know.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvtierTier"]


def __getattr__(name: str) -> Any:
    if name != "KvtierTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtier.connectors.vllm.tier.offload_tier import KvtierTier

    return KvtierTier
