"""How many tokens fit where, natively and quantized, and from which context length on it pays: arithmetic over a
model's caches.

Everything follows from sizes and from figures that the caller gives; nothing is measured or looked up here. An engine's
pool is counted as vLLM counts it: pages of `block` tokens, layers of one kind in groups, a request takes whole blocks
of every group. What kvtier's own tiers hold follows from `layout`, so scales, alignment and slots are in it. Pure
functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtier.errors import Invalid
from kvtier.format.layout import (
    FP8,
    ITEM_BYTES,
    SCALE_BYTES,
    STATIC,
    Extents,
    Group,
    Layer,
    Layout,
    Part,
    Range,
    check_int,
    pad,
)
from kvtier.format.slots import default_slab
from kvtier.models.model_config import LayerCache, ModelCaches

NAMES = {1: ("latent",), 2: ("k", "v")}
REDIS_ENTRY = 160  # bytes Redis keeps beside a value: dictionary entry, object, 32-byte key; an estimate
MAX_TOKENS = 2**40  # no context is longer; a break-even beyond it is none


@dataclass(frozen=True, slots=True)
class Choice:
    """How the KV is kept.

    dtype         "e4m3fn", or the model's own dtype for native KV
    granularity   of the scales of an FP8 part
    block         tokens of an engine block; engine_blocks of them in one kvtier block
    excluded      layers that stay native
    sliding       True: layers with a window are quantized too. They are small, and quality suffers there first: native
                  is the default
    tp            ranks that share the KV heads
    in_flight     tokens scheduled at once, which windows hold beside themselves (vLLM: max_num_batched_tokens)
    """

    dtype: str = "e4m3fn"
    granularity: str = "head"
    block: int = 16
    engine_blocks: int = 1
    excluded: frozenset[int] = frozenset()
    sliding: bool = False
    tp: int = 1
    in_flight: int = 0

    def __post_init__(self) -> None:
        check_int("block", self.block, 1, 65536)
        check_int("engine_blocks", self.engine_blocks, 1, 4096)
        check_int("tp", self.tp, 1, 1024)
        check_int("in_flight", self.in_flight, 0, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class GroupSize:
    """One group of equal layers on one rank: bytes of the page of one layer, tokens on it, and what a token costs over
    all of its layers.

    payload_bytes  per token, without scales; scale_bytes per token of scales that come with the tokens (static ones
                   belong to the layer)
    """

    kind: str
    dtype: str
    layers: tuple[int, ...]
    heads: int
    widths: tuple[int, ...]
    window: int | None
    block: int
    page_bytes: int
    payload_bytes: int
    scale_bytes: float

    def blocks(self, tokens: int, in_flight: int) -> int:
        """Blocks that a request of so many tokens holds: whole ones; a window needs one more, as it may begin inside a
        block."""
        if self.window is None:
            return -(-tokens // self.block)
        held = min(self.window - 1 + in_flight, tokens)
        return -(-held // self.block) + 1


@dataclass(frozen=True, slots=True)
class Pool:
    """What an engine's cache of so many bytes holds.

    block_bytes   bytes of one block of the pool, which every group draws from; padding of unequal groups included
    blocks        whole ones in the pool
    request       blocks of one request of `context` tokens
    remainder     tokens of room that such a request leaves unused in its last blocks, as a share of what it holds
    """

    block_bytes: int
    blocks: int
    context: int
    request: int
    remainder: float

    @property
    def concurrency(self) -> float:
        """Requests of `context` tokens at once, as vLLM reports it; the whole part really fits."""
        return self.blocks / self.request

    @property
    def tokens(self) -> int:
        """Tokens at this context length, as vLLM reports them."""
        return int(self.concurrency * self.context)


def is_quantized(layer: LayerCache, choice: Choice) -> bool:
    """Whether this layer is kept in FP8."""
    return choice.dtype in FP8 and layer.index not in choice.excluded and (choice.sliding or layer.window is None)


def group_sizes(caches: ModelCaches, choice: Choice) -> list[GroupSize]:
    """Layers of one kind, format and size together, in the order of their first layer."""
    if unknown := sorted(choice.excluded - {layer.index for layer in caches.layers}):
        raise Invalid(f"excluded layer {unknown[0]}: the model has {len(caches.layers)} layers with a cache")
    found: dict[tuple[str, str, int, tuple[int, ...], int | None], list[int]] = {}
    for layer in caches.cached:
        dtype = choice.dtype if is_quantized(layer, choice) else caches.dtype
        key = (layer.kind, dtype, rank_heads(layer, choice.tp), layer.widths, layer.window)
        found.setdefault(key, []).append(layer.index)
    sizes = []
    for (kind, dtype, heads, widths, window), layers in found.items():
        elements = heads * sum(widths)
        scales = _scale_bytes(widths, heads, choice) if dtype in FP8 else 0
        page = pad(choice.block * elements * ITEM_BYTES[dtype] + scales)
        payload = elements * ITEM_BYTES[dtype] * len(layers)
        each = scales * len(layers) / choice.block
        sizes.append(GroupSize(kind, dtype, tuple(layers), heads, widths, window, choice.block, page, payload, each))
    return sizes


def rank_heads(layer: LayerCache, tp: int) -> int:
    """KV heads on one rank: a share of them, or one that several ranks hold. A latent is whole on every rank."""
    if layer.kind == "latent":
        return 1
    if layer.heads % tp and tp % layer.heads:
        raise Invalid(f"{layer.heads} KV heads cannot be shared by {tp} ranks")
    return max(1, layer.heads // tp)


def pool(caches: ModelCaches, choice: Choice, nbytes: int, context: int) -> Pool:
    """What `nbytes` of one rank's memory hold in requests of `context` tokens. Raises Invalid for no room and no
    context."""
    check_int("context", context, 1, MAX_TOKENS)
    sizes = group_sizes(caches, choice)
    # one kind of layer: one block table, pages of any size beside each other
    if len({(size.kind, size.window) for size in sizes}) == 1:
        block_bytes = sum(size.page_bytes * len(size.layers) for size in sizes)
        tables = [sizes[0]]
    else:
        sizes = _equal_pages(sizes)
        each = _group_layers([len(size.layers) for size in sizes])
        block_bytes = sizes[0].page_bytes * each
        tables = [size for size in sizes for _ in range(-(-len(size.layers) // each))]
    blocks = nbytes // block_bytes
    if not blocks:
        raise Invalid(f"{nbytes} bytes hold not even one block of {block_bytes}")
    request = sum(size.blocks(context, choice.in_flight) for size in tables)
    room = sum(size.blocks(context, choice.in_flight) * size.block for size in tables)
    used = sum(context if size.window is None else min(context, size.window - 1 + choice.in_flight) for size in tables)
    return Pool(block_bytes, blocks, context, request, 1 - used / room)


def _equal_pages(sizes: list[GroupSize]) -> list[GroupSize]:
    """Pages of one size for layers of several kinds, as a shared pool needs them: more tokens on a smaller page where
    that divides, else padding."""
    largest = max(size.page_bytes for size in sizes)
    equal = []
    for s in sizes:
        block = s.block * (largest // s.page_bytes) if largest % s.page_bytes == 0 else s.block
        equal.append(replace(s, block=block, page_bytes=largest))
    return equal


def _group_layers(counts: list[int]) -> int:
    """Layers of one group of a hybrid model: the smallest kind's number, or the largest's where they hardly differ
    (vLLM's rule)."""
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def _scale_bytes(widths: tuple[int, ...], heads: int, choice: Choice) -> int:
    """Bytes of the scales that one engine block of one layer brings with it; none for static ones."""
    if choice.granularity in STATIC:
        return 0
    group = Group(
        "attention", heads, choice.block, (Layer(0, tuple(_parts(widths, choice.dtype, choice.granularity))),)
    )
    return heads * sum(group.scale_bytes(part) for part in group.layers[0].parts)


def _parts(widths: tuple[int, ...], dtype: str, granularity: str) -> list[Part]:
    return [
        Part(name, width, dtype, granularity if dtype in FP8 else "none")
        for name, width in zip(NAMES[len(widths)], widths, strict=True)
    ]


def layout_of(caches: ModelCaches, choice: Choice) -> Layout:
    """The layout of kvtier's blocks: layers of one kind, window and head count in a group, each layer in its own
    format."""
    found: dict[tuple[str, int, int | None], list[Layer]] = {}
    for layer in caches.cached:
        dtype = choice.dtype if is_quantized(layer, choice) else caches.dtype
        parts = tuple(_parts(layer.widths, dtype, choice.granularity))
        found.setdefault((layer.kind, layer.heads, layer.window), []).append(Layer(layer.index, parts))
    return Layout(
        tuple(
            Group(kind, heads, choice.block, tuple(layers), choice.engine_blocks, window)
            for (kind, heads, window), layers in found.items()
        )
    )


def rank_blocks(caches: ModelCaches, choice: Choice) -> list[tuple[Extents, int]]:
    """Of every group: one rank's block, and how many ranks keep a block of their own (ranks that share a head keep it
    once). Raises Invalid where a block is beyond the largest: fewer engine blocks then."""
    layout = layout_of(caches, choice)
    found = []
    for index, group in enumerate(layout.groups):
        ranks = 1 if group.kind == "latent" else min(choice.tp, group.heads)
        if group.heads % ranks or (ranks > 1 and choice.tp % ranks):
            raise Invalid(f"{group.heads} KV heads cannot be shared by {choice.tp} ranks")
        found.append((layout.extents(Range(index, heads=(0, group.heads // ranks))), ranks))
    return found


def stored_bytes(caches: ModelCaches, choice: Choice) -> float:
    """Bytes of one token of a prefix in kvtier's blocks, over all groups and ranks: header, scales and alignment
    included."""
    return sum(ranks * extents.block_bytes / extents.group.tokens for extents, ranks in rank_blocks(caches, choice))


def arena_tokens(caches: ModelCaches, choice: Choice, nbytes: int) -> int:
    """Tokens of prefix, over all ranks, that an arena of so many bytes holds: whole slots in whole slabs."""
    slab = default_slab(nbytes)
    cost = 0.0  # slabs per token
    for extents, ranks in rank_blocks(caches, choice):
        slots = slab // extents.slot_bytes
        if not slots:
            raise Invalid(f"{nbytes} bytes are too few: a slab of {slab} holds no slot of {extents.slot_bytes}")
        cost += ranks / (slots * extents.group.tokens)
    return int((nbytes // slab) / cost)


def ssd_tokens(caches: ModelCaches, choice: Choice, nbytes: int) -> int:
    """The same for an SSD tier, a sixteenth of which is the index's."""
    return arena_tokens(caches, choice, nbytes - nbytes // 16)


def redis_tokens(caches: ModelCaches, choice: Choice, nbytes: int) -> int:
    """The same for a Redis of so many bytes, by an estimate of what it keeps beside each value."""
    cost = sum(
        ranks * (extents.block_bytes + REDIS_ENTRY) / extents.group.tokens
        for extents, ranks in rank_blocks(caches, choice)
    )
    return int(nbytes / cost)


def static_scale_bytes(caches: ModelCaches, choice: Choice) -> int:
    """Bytes of the static scales of the whole model, kept once by the engine."""
    if choice.granularity not in STATIC:
        return 0
    quantized = [layer for layer in caches.cached if is_quantized(layer, choice)]
    per_part = [1 if choice.granularity == "tensor" else layer.heads for layer in quantized]
    return (
        sum(count * len(layer.widths) for count, layer in zip(per_part, quantized, strict=True)) * SCALE_BYTES["fp32"]
    )


def exclusion_bytes(caches: ModelCaches, choice: Choice, layer: int) -> int:
    """What leaving one more layer native costs, in bytes per token over all heads; 0 if it is native already."""
    found = next((one for one in caches.cached if one.index == layer), None)
    if found is None:
        raise Invalid(f"layer {layer} has no cache")
    return found.elements * (ITEM_BYTES[caches.dtype] - ITEM_BYTES[choice.dtype]) if is_quantized(found, choice) else 0


# --- from which length on it pays


def restore_break_even(
    bytes_per_token: float, link: float, overhead: float, recompute: Callable[[float], float]
) -> float | None:
    """The context length, in tokens, from which restoring takes less time than `recompute` (tokens -> seconds); None if
    it never does.

    link      bytes a second from the tier to the engine; overhead seconds a request whatever its length
    """
    if link <= 0 or overhead < 0 or bytes_per_token <= 0:
        raise Invalid("bytes per token and the link's speed are greater than 0, the overhead is not below")

    def gain(n: float) -> float:
        return recompute(n) - (overhead + n * bytes_per_token / link)

    return _first(gain)


def prefill_seconds(rate: float, quadratic: float = 0.0) -> Callable[[float], float]:
    """Time to recompute n tokens: n / rate, and `quadratic` seconds per token squared for attention, which longer
    contexts need."""
    if rate <= 0 or quadratic < 0:
        raise Invalid("tokens a second must be greater than 0, the quadratic part not below")
    return lambda n: n / rate + quadratic * n * n


def decode_break_even(native: tuple[float, float], quantized: tuple[float, float]) -> float | None:
    """The context length from which a decode step over FP8 is faster than over native KV. Each is (time at length 0,
    time per token of context), in any one unit: a line through measured inter-token latencies. 0 if FP8 is faster from
    the start, None if never."""
    (base, slope), (base8, slope8) = native, quantized
    if base8 <= base:
        return 0.0 if slope8 <= slope else None  # faster only up to a length: nothing to wait for
    return (base8 - base) / (slope - slope8) if slope8 < slope else None


def _first(gain: Callable[[float], float]) -> float | None:
    """The smallest n > 0 with gain(n) >= 0, for a gain that is convex and not positive at 0."""
    high = 1.0
    while gain(high) < 0:
        high *= 2
        if high > MAX_TOKENS:
            return None
    low = 0.0
    while high - low > max(1e-6, high * 1e-9):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) >= 0 else (middle, high)
    return high


def prefill_curve(points: list[tuple[float, float]]) -> Callable[[float], float]:
    """The same through measured (tokens, seconds): a line through 0 for one point, with a quadratic part by least
    squares for more."""
    if not points or any(not (0 < n < MAX_TOKENS and 0 < t < math.inf) for n, t in points):
        raise Invalid("prefill times are pairs of tokens and seconds, both greater than 0")
    a, b, c, p, q = (
        sum(term) for term in zip(*((n * n, n**3, n**4, n * t, n * n * t) for n, t in points), strict=True)
    )
    determinant = a * c - b * b
    if len({n for n, _ in points}) == 1 or determinant <= 0:
        return prefill_seconds(a / p)
    linear, quadratic = (p * c - q * b) / determinant, (a * q - b * p) / determinant
    if linear <= 0 or quadratic < 0:  # noise bends the curve the wrong way: the plain line
        return prefill_seconds(a / p)
    return prefill_seconds(1 / linear, quadratic)


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(value at 0, slope) of the least-squares line through measured (context length, time) pairs. Raises Invalid for
    fewer than two lengths."""
    if len({x for x, _ in points}) < 2 or not all(math.isfinite(x) and math.isfinite(y) for x, y in points):
        raise Invalid("a line needs finite times at two context lengths or more")
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope
