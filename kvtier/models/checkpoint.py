"""What a checkpoint alone tells of the namespace that an engine will use, and what it cannot tell.

An engine's namespace is made of what it has really loaded (`connectors.vllm`). This is the same description worked out
beforehand, from config.json and the scales in the safetensors files, under assumptions that the caller states; equal if
these are true, which a test holds against a real engine. Both use `settings_of`. Pure reading: blocks on disk, imports
no engine and no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvtier.errors import Invalid
from kvtier.format.files import naming, open_file
from kvtier.format.fingerprint import resolve_revision
from kvtier.format.identity import Description, HashScheme, f32_hex, f64_hex
from kvtier.format.layout import Group, Layer, Layout, Part
from kvtier.format.scale_names import parse
from kvtier.format.tensors import Tensor, read_header, to_f32
from kvtier.models.model_config import DTYPES, read_config

VLLM_SEED = "vllm-none-hash"  # what vLLM 0.32 and 0.33 start cryptographic hashes from unless PYTHONHASHSEED is set


@dataclass(frozen=True, slots=True)
class Assumed:
    """What the engine's start decides and a checkpoint does not say; the defaults are those of vLLM on a GPU.

    kv_dtype      "auto" (the model's own; FP8 where the checkpoint brings a scheme for it) or "fp8"
    block_tokens  tokens of an engine block; engine_blocks of them in a kvtier block
    backend       attention backend, as it counts for FP8 KV
    cpu           instruction set of a CPU engine ("vec", "amx", ...); None for a GPU
    """

    kv_dtype: str = "auto"
    dtype: str | None = None
    block_tokens: int = 16
    engine_blocks: int = 1
    algorithm: str = "sha256"
    seed: str = VLLM_SEED
    backend: str = "FLASH_ATTN"
    physical: str = "LBHNC"
    cpu: str | None = None


def describe(
    path: str, assumed: Assumed, revision: str | None = None, *, full: bool = False
) -> tuple[Description, list[str]]:
    """(description, what was assumed and what cannot be known), for a model in a local directory. Raises Invalid for
    what only an engine can tell: models with several kinds of cache, MLA, quantized caches that carry their scales with
    the tokens."""
    root = Path(path)
    config = read_config(root / "config.json")
    with naming(root / "config.json"):
        layers, heads, width = _shape(config)
    name, revision = resolve_revision(path, revision, full=full)
    quantization = config.get("quantization_config") or {}
    scheme = quantization.get("kv_cache_scheme")
    if assumed.kv_dtype not in ("auto", "fp8", "fp8_e4m3"):
        raise Invalid(f"the cache of an engine with kv_cache_dtype {assumed.kv_dtype} cannot be told from a checkpoint")
    fp8 = assumed.kv_dtype != "auto" or bool(scheme)
    model_dtype = assumed.dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if model_dtype not in DTYPES:
        raise Invalid(f"the model's dtype {model_dtype} is none of {', '.join(DTYPES)}")
    dtype = "e4m3fn" if fp8 else DTYPES[model_dtype]
    scales, granularity = (
        _scales(root, layers, heads, assumed.cpu is not None) if fp8 and quantization else ({}, "tensor")
    )
    if fp8 and not scales:
        scales = {f"{layer}.{part}": f32_hex(1.0) for layer in range(layers) for part in "kv"}
    parts = tuple(Part(part, width, dtype, granularity if fp8 else "none") for part in "kv")
    group = Group(
        "attention",
        heads,
        assumed.block_tokens,
        tuple(Layer(i, parts) for i in range(layers)),
        assumed.engine_blocks,
        _window(config),
    )
    packing = (
        f"CPU_ATTN {assumed.cpu}, {dtype}, {heads} heads of {width}, {assumed.block_tokens} tokens"
        if assumed.cpu
        else None
    )
    computed = {"dtype": model_dtype, "quantization": str(quantization.get("quant_method"))}
    description = Description(
        name,
        revision,
        Layout((group,)),
        HashScheme(assumed.algorithm, blake2b(assumed.seed.encode(), digest_size=16).hexdigest(), assumed.block_tokens),
        rule="checkpoint" if fp8 else "none",
        scales=scales,
        rope=settings_of(config, config.get("max_position_embeddings"), computed),
        backend=packing or f"K | V ({assumed.backend if fp8 else 'plain'})",
        physical=assumed.physical,
        packing=packing,
    )
    return description, _unknown(assumed, fp8)


def settings_of(config: Any, max_position: int | None, computed: Mapping[str, str]) -> dict[str, str | int]:
    """Settings of the rotary embedding, and how the model is computed, in the form of `Description.rope`. `config` is
    an engine's configuration or the raw config.json; `max_position` the longest context served, on which some kinds of
    rotary embedding depend."""

    def read(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    rope = read("rope_parameters")
    if not rope:  # the older form
        scaling = dict(read("rope_scaling") or {})
        rope = {"rope_type": scaling.pop("type", "default"), **scaling, "rope_theta": read("rope_theta") or 10000.0}
    found: dict[str, Any] = dict(rope)
    if (part := read("partial_rotary_factor")) is not None:
        found["partial_rotary_factor"] = part
    if any(kind in _kinds(found) for kind in ("dynamic", "longrope", "su", "deepseek_yarn")):
        found["max_position"] = max_position or 0
    return _flatten(found) | {f"model.{key}": value for key, value in computed.items()}


def _kinds(rope: Any) -> set[str]:
    """Every rope_type in a nest of settings."""
    if not isinstance(rope, Mapping):
        return set()
    return {str(value) for key, value in rope.items() if key in ("rope_type", "type")}.union(
        *(_kinds(value) for value in rope.values())
    )


def _flatten(data: Mapping[str, Any], path: str = "") -> dict[str, str | int]:
    """{dotted name: text or integer}; floats as the hex of their bits, lists (of factors) as a digest."""
    flat: dict[str, str | int] = {}
    for name, value in data.items():
        here = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping):
            flat |= _flatten(value, here)
        elif isinstance(value, float) or (name.endswith("theta") and isinstance(value, int)):
            flat[here] = f64_hex(value)
        elif isinstance(value, bool) or value is None:
            flat[here] = str(value)
        elif isinstance(value, int) or (isinstance(value, str) and len(value) <= 64):
            flat[here] = value
        else:
            flat[here] = blake2b(json.dumps(value, default=repr).encode(), digest_size=16).hexdigest()
    return flat


def _shape(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(layers, KV heads, width of a head). Raises Invalid for caches of other kinds than K and V alike in all
    layers."""
    odd = [
        key
        for key in ("kv_lora_rank", "layer_types", "sliding_window_pattern", "attention_chunk_size", "text_config")
        if config.get(key)
    ]
    odd = [key for key in odd if key != "layer_types" or set(config["layer_types"]) != {"full_attention"}]
    if odd:
        raise Invalid(
            f"{', '.join(odd)}: the caches of such a model differ from layer to layer, which only the engine can "
            "tell; run it, and ask with `kvtier namespaces`"
        )
    try:
        query = int(config["num_attention_heads"])
        width = config.get("head_dim") or int(config["hidden_size"]) // query
        return int(config["num_hidden_layers"]), int(config.get("num_key_value_heads") or query), int(width)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise Invalid(f"it does not say how many layers and heads the model has: {error}") from None


def _window(config: Mapping[str, Any]) -> int | None:
    if config.get("use_sliding_window") is False or not config.get("sliding_window"):
        return None
    return int(config["sliding_window"])


def _scales(root: Path, layers: int, heads: int, cpu: bool) -> tuple[dict[str, str], str]:
    """Static scales of the checkpoint in the form of `Description.scales`, and their granularity. Missing ones are 1,
    as in vLLM."""
    found: dict[tuple[int, str], list[float]] = {}
    for file in sorted(root.glob("*.safetensors")):
        spans, _ = read_header(file)
        for name, span in spans.items():
            said = parse(name)
            if said is None or said.zero_point or said.part == "q":
                continue
            with open_file(file) as stream, naming(file):
                stream.seek(span.start)
                values = to_f32(Tensor(span.dtype, span.shape, stream.read(span.nbytes))).flatten().tolist()
            for part in said.part:  # "kv" is one scale for both
                found[said.layer, part] = values
    if not found:
        return {}, "tensor"
    counts = {len(values) for values in found.values()}
    if counts - {1, heads} or len(counts) != 1:
        raise Invalid(f"{root}: scales for {sorted(counts)} heads; the model has {heads}")
    per_head = counts != {1} and not cpu  # CPU kernels use the largest of them all
    full = {(layer, part): found.get((layer, part), [1.0]) for layer in range(layers) for part in "kv"}
    packed = {key: values if per_head else [max(values)] for key, values in full.items()}
    return {
        f"{layer}.{part}": "".join(map(f32_hex, values)) for (layer, part), values in packed.items()
    }, "head" if per_head else "tensor"


def _unknown(assumed: Assumed, fp8: bool) -> list[str]:
    """The assumptions in words."""
    where = (
        f"a CPU engine with instruction set {assumed.cpu}"
        if assumed.cpu
        else f"a GPU engine{' with backend ' + assumed.backend if fp8 else ''}"
    )
    return [
        f"assumed: {where}, blocks of {assumed.block_tokens} tokens, {assumed.engine_blocks} to a kvtier block, "
        f"physical layout {assumed.physical}",
        f"assumed: content hashes by {assumed.algorithm} from seed {assumed.seed!r} (PYTHONHASHSEED replaces it)",
        "not known: adapters and cache salts, which vary per request and are not in the namespace",
        "not known: what options of the engine change (hf_overrides, kv_cache_dtype_skip_layers, quantization at "
        "load time, a longer rotary context)",
    ]
