"""The LMCache connector: an L2 adapter of LMCache's multiprocess server. LMCache loads it by name:

    --l2-adapter '{"type": "plugin", "module_path": "kvtier.connectors.lmcache", "class_name": "KvtierL2Adapter",
                   "adapter_params": {"namespaces": {"org/model": "/etc/kvtier/model.json"}}}'

Only this subpackage imports lmcache, and only when a class is asked for. `docs/lmcache.md` says how to use it.

What each file decides:

adapter           the class that LMCache loads: store, lookup, load, delete; its queues and answers
inventory         what this server has stored and found; what lookups hold
lmcache_settings  `adapter_params`
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvtierL2Adapter", "KvtierL2AdapterConfig"]


def __getattr__(name: str) -> Any:
    if name == "KvtierL2Adapter":
        from kvtier.connectors.lmcache.adapter import KvtierL2Adapter

        return KvtierL2Adapter
    if name == "KvtierL2AdapterConfig":
        from kvtier.connectors.lmcache.lmcache_settings import KvtierL2AdapterConfig

        return KvtierL2AdapterConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
