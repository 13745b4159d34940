"""The vLLM connector. vLLM loads it by name:

    --kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.connectors.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

Only this subpackage imports vllm, and only when the class is asked for. `docs/vllm.md` says how to use it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvtierConnector"]


def __getattr__(name: str) -> Any:
    if name != "KvtierConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtier.connectors.vllm.connector import KvtierConnector

    return KvtierConnector
