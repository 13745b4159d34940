"""What a rank has really loaded: its KV caches as pages that can be copied, and the report for the namespace.

Every layer is looked at by itself: its spec, its tensor, its backend, its live scales; no global setting is believed.
What is not known to be plain K and V becomes an opaque run of bytes whose digest says what wrote it. What kvtier does
not know how to keep is refused here, by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from kvtier_kernels import paged
from vllm.v1 import kv_cache_interface as interface

from kvtier.connectors.common import quantizing
from kvtier.connectors.common.pages import GroupCaches, PartCache
from kvtier.connectors.vllm import modes
from kvtier.connectors.vllm.backend import flags
from kvtier.errors import Invalid
from kvtier.format.identity import canonical_json, f32_hex
from kvtier.format.layout import FP8, Part

# Backends whose page is [heads, tokens, K | V] in plain numbers, by their source (0.32, 0.33). MLA: [1, tokens,
# latent].
PLAIN = frozenset(("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"))
DUAL = "CUSTOM"  # kvtier's own, whose page is the same; elsewhere a CUSTOM backend is one that nobody knows
PLAIN_LATENT = frozenset(("FLASHMLA", "TRITON_MLA", "CUTLASS_MLA", "FLASHINFER_MLA", "FLASH_ATTN_MLA"))
CPU = "CPU_ATTN"  # a head's page is all of K, then all of V; the order within each depends on the instruction set
Tensors = dict[str, torch.Tensor]  # by layer
_NATIVE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_KINDS = dict.fromkeys((interface.FullAttentionSpec, interface.SlidingWindowSpec), "attention")
_KINDS |= dict.fromkeys((interface.MLAAttentionSpec, interface.SlidingWindowMLASpec), "latent")


@dataclass(slots=True)
class RankCaches:
    """All caches of a rank, and the fields of the namespace that they decide."""

    groups: list[GroupCaches | None]  # None: no layer of this group is on this rank
    fields: dict[str, Any]

    @property
    def device(self) -> torch.device:
        """Where the caches are."""
        return next(group.layers[0][1][0].cells.device for group in self.groups if group is not None)

    def report(self) -> str:
        """JSON for the scheduler."""
        return canonical_json({**self.fields, "groups": [group and group.to_json() for group in self.groups]}).decode()


def inspect(config: Any, kv_config: Any, kv_caches: Tensors, tp_rank: int, asked: str = "auto") -> RankCaches:
    """What this rank has loaded, in the mode that is `asked` for or follows from it. Raises Invalid, naming the layer,
    for what kvtier does not know how to keep, and for a mode that cannot be."""
    parallel, modules = config.parallel_config, config.compilation_config.static_forward_context
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise Invalid("context parallelism spreads the tokens of a block over ranks: kvtier does not keep such caches")
    groups: list[GroupCaches | None] = []
    formats, packings = set[str](), set[str]()
    for number, group in enumerate(kv_config.kv_cache_groups):
        spec = group.kv_cache_spec
        shared = group.enable_kv_transfer and spec.prefix_cacheable and not group.host_resident
        if group.is_eagle_group or not shared:
            why = "belongs to a draft model or cannot be shared by content"
            raise Invalid(f"KV cache group {number} {why}: kvtier does not keep such caches")
        made: GroupCaches | None = None
        for name in group.layer_names:
            own = spec.kv_cache_specs[name] if isinstance(spec, interface.UniformTypeKVCacheSpecs) else spec
            reader, ratio = _EngineLayer(name, modules[name], own), kv_caches[name].shape[0] // kv_config.num_blocks
            parts = reader.read(kv_caches[name], kv_config.num_blocks, parallel.tensor_parallel_size, tp_rank)
            one = GroupCaches(reader.shape(config, tp_rank), reader.saver, ratio)
            made = made or one
            if (one.shape, one.ratio) != (made.shape, made.ratio):
                found = f"{one.shape}, {one.ratio} kernel blocks, not {made.shape}, {made.ratio}"
                raise Invalid(f"layer {name} differs from its KV cache group: {found}")
            made.layers.append((name, parts))
            formats.add(reader.format)
            if reader.packed:
                packings.add(reader.format)
        groups.append(made)
    mode = modes.choose(asked, config, kv_config, groups, modules)
    fields = {"physical": config.cache_config.kv_cache_layout or "LBHNC", "mode": mode}
    fields |= {"backend": "; ".join(sorted(formats)), "packing": "; ".join(sorted(packings)) or None}
    ours = [name for group in kv_config.kv_cache_groups for name in group.layer_names if modes.active(modules[name])]
    if len({kv_caches[name].shape[0] for name in ours}) > 1:
        raise Invalid("KV cache groups whose pages differ in number cannot share their flags")
    page_flags = flags.fix(kv_caches[ours[0]]) if ours else None
    if mode in modes.QUANTIZING:
        fields |= {"rule": quantizing.RULE, "codec": quantizing.CODEC}
        groups = [group and _quantizing(group, mode == "dual", page_flags, kv_caches) for group in groups]
    return RankCaches(groups, fields)


def _quantizing(
    group: GroupCaches, in_place: bool, page_flags: torch.Tensor | None, kv_caches: Tensors
) -> quantizing.QuantizedCaches:
    """The same caches, with FP8 blocks outside. Raises Invalid where rows do not stand on multiples of 16 elements."""
    first = group.layers[0]
    cache, native = kv_caches[first[0]], first[1][0].part.dtype
    kind: type[quantizing.QuantizedCaches] = quantizing.HostCaches
    if cache.device.type != "cpu":
        from kvtier.connectors.common import quantizing_gpu

        kind = quantizing_gpu.DeviceCaches
    made = kind(group.shape, group.saver, group.ratio, native=native, in_place=in_place)
    for name, parts in group.layers:
        dtype, pages, width = parts[0].part.dtype, kv_caches[name].shape[0], parts[0].part.width
        if dtype != native or pages != cache.shape[0]:
            raise Invalid(f"layer {name} differs from its KV cache group: {dtype}, {pages} pages")
        codes = [Part(p.part.name, p.part.width, "e4m3fn", quantizing.KIND) for p in parts]
        made.layers.append((name, [PartCache(part, p.cells) for part, p in zip(codes, parts, strict=True)]))
        if page_flags is not None:
            kinds = (quantizing.KIND, quantizing.KIND)
            made.paged.append(paged.interleaved(kv_caches[name], width, page_flags, kinds))
        else:
            views = [p.cells.view(quantizing.TORCH[native]) for p in parts]
            made.paged.append(paged.native(views[0], views[1]))
    return made


class _EngineLayer:
    """Reads one layer. `format`, a part of the namespace: how bytes were written. `packed`: for a CPU's kernels."""

    def __init__(self, name: str, module: Any, spec: Any) -> None:
        self.name, self.module, self.spec = name, module, spec
        self.kind = _KINDS.get(type(spec), "")
        if not self.kind or spec.tokens_per_state != 1:
            raise Invalid(f"layer {name}: kvtier does not keep the cache of a {type(spec).__name__}")
        self.backend = str(module.attn_backend.get_name())
        self.stated = str(getattr(spec, "cache_dtype_str", None) or module.kv_cache_dtype)
        self.dtype = self._dtype()
        self.digest: str | None = None
        self.saver, self.packed = True, False

    def _dtype(self) -> str:
        """Number format of plain caches; "" where the bytes are packed in a way of their own."""
        spec = self.spec
        content = (spec.head_size + spec.head_size_v) * torch.empty(0, dtype=spec.dtype).element_size()
        if spec.num_head_slots is not None or spec.state_content_size_bytes != content:
            return ""
        if spec.kv_quant_mode == interface.KVQuantMode.NONE:
            return _NATIVE.get(spec.dtype, "")
        if spec.kv_quant_mode != interface.KVQuantMode.FP8_PER_TENSOR:
            return ""
        from vllm.platforms import current_platform

        return "e5m2" if "e5m2" in self.stated else ("e4m3fnuz" if current_platform.is_fp8_fnuz() else "e4m3fn")

    def read(self, cache: torch.Tensor, num_blocks: int, tp: int, tp_rank: int) -> list[PartCache]:
        """The parts of this layer. Raises Invalid if the tensor is not what its spec says."""
        spec, ratio = self.spec, cache.shape[0] // num_blocks
        item = cache.element_size()
        found, size = tuple(cache.shape), spec.state_content_size_bytes
        if (found[0], found[1], found[2] * ratio) != (num_blocks * ratio, spec.num_heads, spec.block_size):
            blocks = f"{num_blocks} blocks of {spec.block_size} tokens"
            raise Invalid(f"layer {self.name}: a cache of shape {found} is not {blocks}")
        if found[3] * item != size or cache.stride(3) != 1:
            raise Invalid(f"layer {self.name}: {found[3] * item} bytes a token and head, not {size}")
        known = self.backend in (PLAIN_LATENT if self.kind == "latent" else PLAIN)
        ours = self.kind == "attention" and self.backend == DUAL and modes.active(self.module)
        plain = self.dtype and (known or ours)
        own_format = self.backend if self.dtype in FP8 else "plain"
        if self.kind == "latent" and plain:
            self.format = f"latent ({own_format})"
            return [self._part("latent", spec.head_size, cache, "k")]
        if self.dtype and self.backend == CPU and self.kind == "attention" and spec.head_size == spec.head_size_v:
            sizes = f"{cache.shape[1]} heads of {spec.head_size}, {spec.block_size} tokens"
            self.packed = True
            self.format = f"{CPU} {self.module.isa}, {self.dtype}, {sizes}"
            halves = cache.view(cache.shape[0], cache.shape[1], 2 * cache.shape[2], -1).chunk(2, dim=2)
            return [self._part(name, spec.head_size, half, name) for name, half in zip("kv", halves, strict=True)]
        if plain:
            self.format = f"K | V ({own_format})"
            both = (cache[..., : spec.head_size], cache[..., spec.head_size :])
            return [self._part(name, half.shape[3], half, name) for name, half in zip("kv", both, strict=True)]
        return [self._opaque(cache, tp, tp_rank)]

    def _part(self, name: str, width: int, cells: torch.Tensor, scale: str) -> PartCache:
        cells = cells.view(torch.uint8)
        if self.dtype not in FP8:
            return PartCache(Part(name, width, self.dtype), cells)
        live = [float(value) for value in getattr(self.module, f"_{scale}_scale").detach().float().flatten().tolist()]
        used = float(getattr(self.module, f"_{scale}_scale_float"))
        if len(live) == 1 and f32_hex(live[0]) != f32_hex(used):
            found = f"{live[0]} on the device and {used} on the host"
            raise Invalid(f"layer {self.name}: its {scale}_scale is {found}: which one its kernel uses is unknown")
        if len(live) == 1 or self.backend == CPU:  # CPU kernels use one scale whatever the checkpoint has: the largest
            return PartCache(Part(name, width, self.dtype, "tensor"), cells, [used])
        if len(live) != self.spec.num_kv_heads:
            raise Invalid(f"layer {self.name}: {len(live)} {scale} scales for {self.spec.num_kv_heads} heads")
        return PartCache(Part(name, width, self.dtype, "head"), cells, live)

    def _opaque(self, cache: torch.Tensor, tp: int, tp_rank: int) -> PartCache:
        """The whole page, unread. Every rank's bytes are parts of their own."""
        isa = getattr(self.module, "isa", "")
        said = [self.backend, isa, self.stated, str(self.spec.dtype), list(cache.shape[1:]), self.spec.block_size, tp]
        said += [f32_hex(float(getattr(self.module, f"_{scale}_scale_float", 1.0))) for scale in "kv"]
        self.digest = blake2b(canonical_json(said), digest_size=32).hexdigest()
        self.format = f"opaque {self.backend} {self.stated}"
        cells = cache.view(torch.uint8)
        return PartCache(Part("bytes", cells[0].numel() * (self.spec.block_size // cache.shape[2]), "u8"), cells)

    def shape(self, config: Any, tp_rank: int) -> dict[str, Any]:
        """What a group's layers share, with this rank's heads. Raises Invalid where heads divide otherwise."""
        spec, tp = self.spec, config.parallel_config.tensor_parallel_size
        if getattr(spec, "attention_chunk_size", None) is not None:
            raise Invalid(f"layer {self.name}: chunked local attention is not kept by kvtier")
        shape = {"kind": self.kind, "heads": 1, "heads_total": 1, "head_lo": 0}
        shape |= {"tokens": spec.block_size, "window": getattr(spec, "sliding_window", None)}
        if self.digest is not None:
            return {**shape, "kind": "opaque", "digest": self.digest}
        if self.kind == "latent":
            self.saver = tp_rank == 0  # every rank holds the same latent
        else:
            total, heads = config.model_config.get_total_num_kv_heads(), spec.num_kv_heads
            if heads != max(1, total // tp) or max(total, tp) % min(total, tp):
                raise Invalid(f"layer {self.name}: {heads} KV heads on each of {tp} ranks do not make {total}")
            self.saver = tp <= total or tp_rank % (tp // total) == 0  # of ranks that share a head the lowest saves
            shape |= {"heads": heads, "heads_total": total, "head_lo": tp_rank * total // tp}
        return {**shape, "digest": None}
