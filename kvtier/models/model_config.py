"""What a model's config.json says about its caches: per layer, which kind, how many heads, how wide, how far it looks
back.

For planning, before any engine runs; an engine may do otherwise (it then says so itself). What is not understood is
refused by name, never guessed: a wrong capacity is worse than none. Pure reading of one small file; no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import Invalid
from kvtier.format.files import naming, read_file
from kvtier.format.layout import check_int

MAX_CONFIG_BYTES = 8 * 2**20
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_ATTENTION = {"full_attention", "attention", "global_attention", "full"}
_SLIDING = {"sliding_attention", "local_attention", "sliding_window"}
_CHUNKED = {"chunked_attention"}
_STATE = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "rglru", "short_conv"}
# old configs of these models do not list their layers; the first of so many slides, the last is full
_EVERY_OTHER = {"gemma2": 2}


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer.

    kind     "attention" (K and V per head), "latent" (MLA: one record per token, whatever the number of heads), "state"
             (a recurrent state: no bytes per token)
    heads    KV heads of the whole model
    widths   elements per token and head of each part: (K, V), or (latent,)
    window   tokens that it looks back, None for all
    """

    index: int
    kind: str
    heads: int
    widths: tuple[int, ...]
    window: int | None = None

    @property
    def elements(self) -> int:
        """Elements per token over all heads and parts."""
        return self.heads * sum(self.widths)


@dataclass(frozen=True, slots=True)
class ModelCaches:
    """The caches of a model. `dtype` is the model's own, a word of `layout`; `positions` the longest context its config
    names, if it does."""

    model: str
    dtype: str
    layers: tuple[LayerCache, ...]
    positions: int | None = None

    @property
    def cached(self) -> tuple[LayerCache, ...]:
        """The layers that keep bytes per token."""
        return tuple(layer for layer in self.layers if layer.kind != "state")

    @property
    def windowed(self) -> frozenset[int]:
        """The layers with a window where others look back over everything; they stay native unless asked otherwise."""
        found = frozenset(layer.index for layer in self.cached if layer.window is not None)
        return found if len(found) < len(self.cached) else frozenset()

    def kv_layers(self) -> tuple[LayerCache, ...]:
        """The layers that keep K and V. Raises Invalid for a model that keeps a latent instead."""
        if any(layer.kind == "latent" for layer in self.layers):
            raise Invalid("MLA keeps one latent instead of K and V: it is not calibrated here")
        return self.cached


def read_caches(path: str | Path) -> ModelCaches:
    """The caches of the model in this directory, or of this config.json. Raises Invalid, naming the file, for what is
    missing or not understood."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    config = read_config(file)
    with naming(file):
        return caches_of(config, file.resolve().parent.name)


def read_config(file: Path) -> dict[str, Any]:
    """A config.json, or another small JSON object beside it. Raises Invalid, naming the file."""
    raw = read_file(file, MAX_CONFIG_BYTES)
    with naming(file):
        try:
            config = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Invalid(f"not JSON: {error!s:.200}") from None
        if not isinstance(config, dict):
            raise Invalid("not an object")
        return config


def caches_of(config: Mapping[str, Any], model: str) -> ModelCaches:
    """The same from a configuration that was read already."""
    inner = config.get("text_config")
    text: Mapping[str, Any] = {**config, **inner} if isinstance(inner, Mapping) else config
    count, query = _number(text, "num_hidden_layers"), _number(text, "num_attention_heads")
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        raise Invalid(f"the model's dtype {dtype!r:.80} is none of {', '.join(sorted(DTYPES))}")
    shared = text.get("num_kv_shared_layers") or 0  # the last so many read the caches of layers before them
    check_int("num_kv_shared_layers", shared, 0, count - 1)
    kinds = _kinds(text, count)
    layers = tuple(_layer(text, index, kinds[index], query) for index in range(count - shared))
    if all(layer.kind == "state" for layer in layers):
        raise Invalid("no layer keeps bytes per token: there is no KV cache to plan for")
    positions = text.get("max_position_embeddings")
    name = text.get("_name_or_path") or model
    known = positions if type(positions) is int and positions > 0 else None
    return ModelCaches(str(name), DTYPES[dtype], layers, known)


def _kinds(text: Mapping[str, Any], count: int) -> list[str]:
    """One word per layer: "attention", "sliding", "chunked" or "state"."""
    listed = text.get("layer_types") or text.get("layers_block_type")
    if listed is None:
        return _implied(text, count)
    if not isinstance(listed, list) or len(listed) < count:
        raise Invalid(f"layer_types must name {count} layers")
    kinds = []
    for word in listed[:count]:
        kind = next((kind for kind, words in _WORDS.items() if word in words), None)
        if kind is None:
            raise Invalid(f"layer_types names {word!r:.80}, which is not understood")
        kinds.append(kind)
    return kinds


_WORDS = {"attention": _ATTENTION, "sliding": _SLIDING, "chunked": _CHUNKED, "state": _STATE}


def _implied(text: Mapping[str, Any], count: int) -> list[str]:
    """The kinds of a config that does not list its layers."""
    if odd := [
        key
        for key in ("attn_layer_period", "attention_layers", "hybrid_override_pattern", "mamba_d_state", "ssm_cfg")
        if text.get(key)
    ]:
        raise Invalid(f"{', '.join(odd)}: layers of several kinds that are not listed in layer_types")
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return ["attention"] * count
    every = text.get("sliding_window_pattern") or _EVERY_OTHER.get(str(text.get("model_type")))
    if every is None:
        return ["sliding"] * count
    check_int("sliding_window_pattern", every, 1, 1024)
    return ["attention" if (index + 1) % every == 0 else "sliding" for index in range(count)]


def _layer(text: Mapping[str, Any], index: int, kind: str, query: int) -> LayerCache:
    if kind == "state":
        return LayerCache(index, "state", 1, (0,))
    window = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}.get(kind)
    reach = _number(text, window) if window else None
    if text.get("kv_lora_rank"):
        return LayerCache(
            index, "latent", 1, (_number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim"),), reach
        )
    heads = _number(text, "num_key_value_heads") if text.get("num_key_value_heads") is not None else query
    width = _number(text, "head_dim") if text.get("head_dim") is not None else _number(text, "hidden_size") // query
    if kind == "attention" and text.get("global_head_dim"):  # full layers wider than sliding ones
        width = _number(text, "global_head_dim")
        heads = _number(text, "num_global_key_value_heads") if text.get("num_global_key_value_heads") else heads
    values = _number(text, "v_head_dim") if text.get("v_head_dim") else width
    if not width:
        raise Invalid("hidden_size is smaller than num_attention_heads")
    return LayerCache(index, "attention", heads, (width, values), reach)


def _number(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    check_int(name, value, 1, 2**31 - 1)
    return int(value)  # type: ignore[arg-type]
