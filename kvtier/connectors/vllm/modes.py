"""Which mode an engine is in, and what a mode refuses: by name and at the start, never at a transfer.

    native         BF16 or FP16 blocks as they are             passthrough    the engine's own FP8 blocks as they are
    dual           quantized on save, read in place as FP8     expand         quantized on save, dequantized on restore
                   by kvtier's attention backend

`auto` is passthrough for an FP8 cache, dual where kvtier's backend is active and nothing speaks against it, else
native. Pure functions of what the engine has loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvtier.connectors.common.pages import GroupCaches
from kvtier.errors import Invalid
from kvtier.format.layout import FP8

MODES = ("auto", "native", "passthrough", "dual", "expand")
QUANTIZING = ("dual", "expand")
Groups = Sequence[GroupCaches | None]
HOW = "start vLLM with --attention-backend CUSTOM, on a GPU"
log = logging.getLogger(__name__)


def check(mode: str, config: Any, kv_config: Any) -> None:
    """What can be told from the engine's configuration. Raises Invalid."""
    if mode in QUANTIZING and (reason := _config_refusal(mode, config, kv_config)):
        raise Invalid(f"mode {mode}: {reason}")


def _config_refusal(mode: str, config: Any, kv_config: Any) -> str:
    cache, parallel = config.cache_config, config.parallel_config
    if cache.cache_dtype not in ("auto", "bfloat16", "float16"):
        kept = f"the cache is kept as {cache.cache_dtype}"
        return f"{kept}; this mode quantizes a BF16 or FP16 cache (an FP8 cache is stored as it is)"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism spreads the tokens of a block over ranks"
    sizes = {group.kv_cache_spec.block_size for group in kv_config.kv_cache_groups}
    hash_size = kv_config.hash_block_size or cache.hash_block_size
    if mode == "dual" and hash_size is not None and sizes != {hash_size}:
        found = f"hash_block_size is {hash_size} and blocks have {sorted(sizes)} tokens"
        return f"{found}: a hit inside a block would be copied and then written to"
    return ""


def choose(asked: str, config: Any, kv_config: Any, groups: Groups, modules: dict[str, Any]) -> str:
    """The mode. Raises Invalid where what was asked for cannot be."""
    held = [group for group in groups if group is not None]
    layers = [(name, parts, group.shape["kind"]) for group in held for name, parts in group.layers]
    fp8 = any(part.part.dtype in FP8 for _, parts, _ in layers for part in parts)
    ours = all(active(modules[name]) for name, _, _ in layers)
    refused = _config_refusal("dual" if asked == "auto" else asked, config, kv_config)
    refused = refused or _layer_refusal(layers, modules)
    if asked == "auto":
        if fp8:
            return "passthrough"
        if ours and not refused:
            return "dual"
        if ours:
            log.warning("kvtier: mode native, not dual: %s", refused)
        elif not refused:
            log.info('kvtier: mode native stores BF16. To halve the bytes: "mode": "expand", or mode dual: %s', HOW)
        return "native"
    if asked in QUANTIZING and refused:
        raise Invalid(f"mode {asked}: {refused}")
    if asked == "dual" and not ours:
        raise Invalid(f"mode dual: kvtier's attention backend is not in use: {HOW}")
    if asked == "dual" and (other := _other_connector()):
        raise Invalid(f"mode dual: {other} would read FP8 bytes as BF16; no connector stands beside this one")
    if (asked == "passthrough") != fp8 and asked in ("native", "passthrough"):
        raise Invalid(f"mode {asked}: the engine's cache is {'FP8' if fp8 else 'not FP8'}")
    return asked


def active(module: Any) -> bool:
    """Whether a layer's attention backend is kvtier's."""
    return bool(getattr(module.attn_backend, "kvtier_dual", False))


def _layer_refusal(layers: list[tuple[str, list[Any], str]], modules: dict[str, Any]) -> str:
    for name, parts, kind in layers:
        if kind == "latent":
            return f"layer {name} keeps an MLA latent, which has no K and V to quantize"
        dtypes = [part.part.dtype for part in parts]
        if kind != "attention" or not {"bf16", "fp16"}.issuperset(dtypes):
            return f"layer {name} keeps {kind} {', '.join(dtypes)}, not K and V in BF16 or FP16"
    for name, module in modules.items():
        if (target := getattr(module, "kv_sharing_target_layer_name", None)) is not None:
            return f"layer {name} uses the cache of {target}: shared caches are not quantized"
    return ""


def _other_connector() -> str:
    """The class of the engine's connector where that is not ours: then ours is one of several."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    return "" if group is None or hasattr(group, "_half") else type(group).__name__
