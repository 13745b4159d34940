"""The vLLM connector. vLLM loads it by name:

    --kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.connectors.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

Only this subpackage imports vllm, and only when the class is asked for. `docs/vllm.md` says how to use it.

What each file decides:

connector         the class that vLLM loads; which half answers which call
scheduler         the scheduler's half: what is asked, loaded, saved
worker            a worker's half: caches registered, copies started and awaited
engine_caches     what a rank's live caches are: formats, scales, layout
engine_namespace  the namespace of a running engine
modes             native, passthrough, dual, expand: which is chosen, what each refuses
messages          what the two halves send each other
vllm_settings     `kv_connector_extra_config`
stats             counters in vLLM's form
events            blocks announced as stored
compat            which versions of vLLM are known
backend           the attention backend of mode `dual`
tier              the secondary tier of vLLM's offloading
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvtierConnector"]


def __getattr__(name: str) -> Any:
    if name != "KvtierConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtier.connectors.vllm.connector import KvtierConnector

    return KvtierConnector
