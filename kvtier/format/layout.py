"""Shapes and order of the bytes of one block. Every size, offset and stride in the product derives from here.

A *layout* is a tuple of layer groups. A block holds the KV of `engine_blocks` consecutive engine blocks of one group,
for a range of its layers and a range of its KV heads. The body of a block is

    for each head, for each layer:  scales of every part, together padded to 16 bytes
                                    every part's elements [tokens, width], each padded to 16 bytes

so a range of heads is one contiguous run. Formats may differ from layer to layer (excluded layers stay native) and from
part to part (K and V of different width, number format and scale granularity). An `opaque` group's part is one run of
bytes per layer and block that nobody interprets. Numbers only: no arrays, no I/O. Immutable, hence thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from kvtier.errors import Invalid

ALIGN = 16  # every part and every run of scales starts on a multiple of this, counted from the start of the body
HEADER_BYTES = 256
SLOT_ALIGN = 4096  # slots are padded to the page, so that O_DIRECT and mappings need no copy
MAX_BLOCK_BYTES = 16 * 2**20 + HEADER_BYTES

MAX_GROUPS = 64
MAX_LAYERS = 1024  # per group; indices travel as u16
MAX_HEADS = 1024
MAX_WIDTH = 1 << 16
MAX_TOKENS = 1 << 16

ITEM_BYTES = {"e4m3fn": 1, "e5m2": 1, "e4m3fnuz": 1, "bf16": 2, "fp16": 2, "fp32": 4, "u8": 1}
FP8 = frozenset(("e4m3fn", "e5m2", "e4m3fnuz"))
SCALE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
STATIC = frozenset(("tensor", "head"))  # scales known before the block, part of the namespace
DYNAMIC = frozenset(("block-head", "token-head", "channel"))  # scales computed from the block, only inside it
GRANULARITIES = frozenset(("none",)) | STATIC | DYNAMIC
KINDS = frozenset(("attention", "latent", "opaque"))


def pad(nbytes: int, align: int = ALIGN) -> int:
    """`nbytes` rounded up to a multiple of `align` (a power of two)."""
    return (nbytes + align - 1) & -align


def check_int(name: str, value: Any, low: int, high: int) -> None:
    """Raises Invalid unless `value` is an integer (no bool) from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise Invalid(f"{name} must be an integer from {low} to {high}, not {value!r:.80}")


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of one layer: "k", "v", an MLA "latent", a packed "record" ...

    width         elements per token and head (bytes per *block* in an opaque group)
    dtype         number format of the elements, a key of ITEM_BYTES
    granularity   what one scale covers: "none" (native), "tensor", "head" (both static, repeated per head in the
                  block), "block-head" (one engine block of one head), "token-head", "channel" (one channel of one
                  engine block and head)
    scale_dtype   number format of a scale, a key of SCALE_BYTES
    """

    name: str
    width: int
    dtype: str
    granularity: str = "none"
    scale_dtype: str = "fp32"

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.isidentifier() and len(self.name) <= 32):
            raise Invalid(f"a part's name must be an identifier of at most 32 characters, not {self.name!r}")
        check_int(f"width of {self.name}", self.width, 1, MAX_BLOCK_BYTES)
        if self.dtype not in ITEM_BYTES:
            raise Invalid(f"dtype of {self.name} must be one of {sorted(ITEM_BYTES)}, not {self.dtype!r}")
        if self.granularity not in GRANULARITIES:
            wanted = f"one of {sorted(GRANULARITIES)}"
            raise Invalid(f"granularity of {self.name} must be {wanted}, not {self.granularity!r}")
        if self.scale_dtype not in SCALE_BYTES:
            raise Invalid(f"scale_dtype of {self.name} must be one of {sorted(SCALE_BYTES)}, not {self.scale_dtype!r}")
        if (self.granularity == "none") != (self.dtype not in FP8):
            wanted = "an FP8 part needs a scale granularity and a native one has none"
            raise Invalid(f"{self.name}: {wanted} ({self.dtype}, {self.granularity})")

    @property
    def native(self) -> bool:
        return self.granularity == "none"


@dataclass(frozen=True, slots=True)
class Layer:
    """The parts of one layer, in the order they stand in the block. `index` is the layer's number in the model."""

    index: int
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        check_int("layer index", self.index, 0, 65535)
        if not 1 <= len(self.parts) <= 8:
            raise Invalid(f"layer {self.index} must have 1 to 8 parts, not {len(self.parts)}")
        if len({p.name for p in self.parts}) != len(self.parts):
            raise Invalid(f"layer {self.index} has two parts of one name")


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block size and head count. Ranges of layers count within `layers`, not in the model.

    engine_tokens   tokens of one engine block (16 to 544 seen in the field)
    engine_blocks   engine blocks in one kvtier block
    window          sliding window in tokens, None for full attention
    digest          hex digest of what an opaque group's bytes mean (dtype, shape, packing); None otherwise
    """

    kind: str
    heads: int
    engine_tokens: int
    layers: tuple[Layer, ...]
    engine_blocks: int = 1
    window: int | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise Invalid(f"group kind must be one of {sorted(KINDS)}, not {self.kind!r}")
        check_int("heads", self.heads, 1, MAX_HEADS)
        check_int("engine_tokens", self.engine_tokens, 1, MAX_TOKENS)
        check_int("engine_blocks", self.engine_blocks, 1, MAX_TOKENS)
        check_int("tokens of a block", self.tokens, 1, MAX_TOKENS)
        if self.window is not None:
            check_int("window", self.window, 1, 2**31 - 1)
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise Invalid(f"a group must have 1 to {MAX_LAYERS} layers, not {len(self.layers)}")
        if self.kind != "attention" and self.heads != 1:
            raise Invalid(f"a {self.kind} group has the one head [0, 1), not {self.heads}")
        opaque = self.kind == "opaque"
        if (self.digest is not None) != opaque:
            raise Invalid("an opaque group, and only one, needs the digest of what its bytes mean")
        digits = isinstance(self.digest, str) and len(self.digest) == 64 and set(self.digest) <= set("0123456789abcdef")
        if opaque and not digits:
            raise Invalid("the digest of an opaque group must be 64 lower-case hex digits")
        for layer in self.layers:
            if opaque and (len(layer.parts) != 1 or layer.parts[0].dtype != "u8"):
                wanted = "one part of dtype u8 whose width is its bytes per block"
                raise Invalid(f"layer {layer.index} of an opaque group must have {wanted}")
            for part in layer.parts:
                if not opaque and part.width > MAX_WIDTH:
                    where = f"width of {part.name} in layer {layer.index}"
                    raise Invalid(f"{where} must be at most {MAX_WIDTH}, not {part.width}")

    @property
    def tokens(self) -> int:
        """Tokens of one block."""
        return self.engine_tokens * self.engine_blocks

    def data_bytes(self, part: Part) -> int:
        """Bytes of one part's elements, for one head and layer, before padding."""
        return part.width if self.kind == "opaque" else self.tokens * part.width * ITEM_BYTES[part.dtype]

    def scale_count(self, part: Part) -> int:
        """Scales of one part, for one head and layer."""
        if part.granularity == "none":
            return 0
        if part.granularity in STATIC:
            return 1
        if part.granularity == "token-head":
            return self.tokens
        return self.engine_blocks * (part.width if part.granularity == "channel" else 1)

    def scale_bytes(self, part: Part) -> int:
        return self.scale_count(part) * SCALE_BYTES[part.scale_dtype]


@dataclass(frozen=True, slots=True)
class Range:
    """Which part of a namespace a block covers: a group, layers [lo, hi) within the group, KV heads [lo, hi).

    `hi` = None means to the end; `Layout.resolve` fills it in. Ranges are part of a block's key, never of the
    namespace.
    """

    group: int = 0
    layers: tuple[int, int | None] = (0, None)
    heads: tuple[int, int | None] = (0, None)


class Place(NamedTuple):
    """Where one part of one layer stands in every head's run. Offsets are bytes from the start of the run.

    part          what stands there
    data          start of the elements
    shape         of the elements: (tokens, width), in an opaque group (1, bytes)
    scales        start of the scales
    scale_count   how many there are, 0 for a native part
    """

    part: Part
    data: int
    shape: tuple[int, int]
    scales: int
    scale_count: int

    @property
    def data_bytes(self) -> int:
        """Of the elements, without the padding behind them."""
        return self.shape[0] * self.shape[1] * ITEM_BYTES[self.part.dtype]

    @property
    def scale_bytes(self) -> int:
        return self.scale_count * SCALE_BYTES[self.part.scale_dtype]


@dataclass(frozen=True, slots=True)
class Extents:
    """Where things stand in the body of a block of one range. All numbers are bytes from the start of the body.

    head_stride   from one head's run to the next
    scales        [layer][part] -> start of the scales, within a head's run; the size is group.scale_bytes(part)
    data          [layer][part] -> start of the elements, within a head's run
    body_bytes    heads * head_stride
    """

    group: Group
    layers: tuple[int, int]
    heads: tuple[int, int]
    head_stride: int
    scales: tuple[tuple[int, ...], ...]
    data: tuple[tuple[int, ...], ...]

    def place(self, layer: int, part: int) -> Place:
        """Where a part stands; `layer` counts within the range. Raises Invalid outside it. Whoever reads, writes or
        copies a body goes by this."""
        group, (low, high) = self.group, self.layers
        if not 0 <= layer < high - low:
            raise Invalid(f"layer {layer} is not in [0, {high - low}), the layers of this range")
        within = group.layers[low + layer]
        if not 0 <= part < len(within.parts):
            raise Invalid(f"part {part} is not in [0, {len(within.parts)}), the parts of layer {within.index}")
        found = within.parts[part]
        shape = (1 if group.kind == "opaque" else group.tokens, found.width)
        return Place(found, self.data[layer][part], shape, self.scales[layer][part], group.scale_count(found))

    @property
    def places(self) -> list[list[Place]]:
        """`place` of everything: [layer of the range][part]."""
        return [[self.place(i, j) for j in range(len(starts))] for i, starts in enumerate(self.data)]

    @property
    def range_layers(self) -> tuple[Layer, ...]:
        """The group's layers that this range covers."""
        return self.group.layers[self.layers[0] : self.layers[1]]

    @property
    def head_count(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def padded(self) -> bool:
        """Whether a body has bytes that belong to no part; they must be zero, as equal KV makes equal bytes."""
        used = sum(place.data_bytes + place.scale_bytes for places in self.places for place in places)
        return used != self.head_stride

    @property
    def body_bytes(self) -> int:
        return self.head_stride * self.head_count

    @property
    def block_bytes(self) -> int:
        """Header and body: what is stored, sent and checked."""
        return HEADER_BYTES + self.body_bytes

    @property
    def slot_bytes(self) -> int:
        return pad(self.block_bytes, SLOT_ALIGN)


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups of a model. Layer indices are unique over the groups."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise Invalid(f"a layout must have 1 to {MAX_GROUPS} groups, not {len(self.groups)}")
        indices = [layer.index for group in self.groups for layer in group.layers]
        if len(set(indices)) != len(indices):
            raise Invalid("a layer of the model may stand in one group only")

    def resolve(self, range_: Range) -> tuple[int, int, int, int, int]:
        """(group, layer_lo, layer_hi, head_lo, head_hi) with open ends filled in. Raises Invalid outside the layout."""
        if not 0 <= range_.group < len(self.groups):
            raise Invalid(f"group {range_.group} is not in [0, {len(self.groups)})")
        group = self.groups[range_.group]
        ends, sizes = [], (("layers", range_.layers, len(group.layers)), ("heads", range_.heads, group.heads))
        for what, (low, high), size in sizes:
            high = size if high is None else high
            if not 0 <= low < high <= size:
                raise Invalid(f"{what} [{low}, {high}) of group {range_.group} is empty or outside [0, {size})")
            ends += [low, high]
        return (range_.group, ends[0], ends[1], ends[2], ends[3])

    def extents(self, range_: Range | None = None) -> Extents:
        """Sizes and offsets of a block of this range. Raises Invalid outside the layout or above MAX_BLOCK_BYTES."""
        return _extents(self, *self.resolve(range_ or Range()))

    def to_json(self) -> dict[str, Any]:
        """Plain data of the closed schema that `from_json` reads."""
        return {"groups": [_group_to_json(group) for group in self.groups]}

    @classmethod
    def from_json(cls, data: Any) -> Layout:
        """The layout that `to_json` wrote. Raises Invalid for missing or unknown fields, wrong types and sizes."""
        groups = fields(data, "layout", "groups")[0]
        return cls(tuple(_group_from_json(group) for group in items(groups, "layout.groups")))


@lru_cache(maxsize=16)  # up to 300 KiB each; who needs more keeps them
def _extents(layout: Layout, group_index: int, layer_lo: int, layer_hi: int, head_lo: int, head_hi: int) -> Extents:
    group = layout.groups[group_index]
    position = 0
    scales, data = [], []
    for layer in group.layers[layer_lo:layer_hi]:
        starts = []
        for part in layer.parts:
            starts.append(position)
            position += group.scale_bytes(part)
        position = pad(position)
        scales.append(tuple(starts))
        starts = []
        for part in layer.parts:
            starts.append(position)
            position = pad(position + group.data_bytes(part))
        data.append(tuple(starts))
    extents = Extents(group, (layer_lo, layer_hi), (head_lo, head_hi), position, tuple(scales), tuple(data))
    if extents.block_bytes > MAX_BLOCK_BYTES:
        raise Invalid(
            f"a block of this range has {extents.block_bytes} bytes; the largest is {MAX_BLOCK_BYTES}: use fewer "
            "tokens, layers or heads a block"
        )
    return extents


def fields(data: Any, where: str, *names: str) -> list[Any]:
    """The values of exactly these fields of a JSON object, in this order. Raises Invalid for missing and unknown
    ones."""
    if not isinstance(data, dict):
        raise Invalid(f"{where} must be an object, not {type(data).__name__}")
    if missing := [name for name in names if name not in data]:
        raise Invalid(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(map(str, set(data) - set(names))):
        raise Invalid(f"{where} has unknown fields: {', '.join(unknown)[:200]}")
    return [data[name] for name in names]


def items(data: Any, where: str, most: int = MAX_LAYERS) -> list[Any]:
    """A JSON array of at most `most` items, checked."""
    if not isinstance(data, list) or len(data) > most:
        raise Invalid(f"{where} must be a list of at most {most} items")
    return data


def _group_to_json(group: Group) -> dict[str, Any]:
    return {
        "kind": group.kind,
        "heads": group.heads,
        "engine_tokens": group.engine_tokens,
        "engine_blocks": group.engine_blocks,
        "window": group.window,
        "digest": group.digest,
        "layers": [
            {
                "index": layer.index,
                "parts": [[p.name, p.width, p.dtype, p.granularity, p.scale_dtype] for p in layer.parts],
            }
            for layer in group.layers
        ],
    }


def _group_from_json(data: Any) -> Group:
    kind, heads, tokens, blocks, window, digest, layers = fields(
        data, "group", "kind", "heads", "engine_tokens", "engine_blocks", "window", "digest", "layers"
    )
    read = []
    for layer in items(layers, "group.layers"):
        index, parts = fields(layer, "layer", "index", "parts")
        for part in items(parts, "layer.parts", 8):
            if not isinstance(part, list) or len(part) != 5 or not all(isinstance(part[i], str) for i in (0, 2, 3, 4)):
                raise Invalid("a part must be [name, width, dtype, granularity, scale_dtype]")
        read.append(Layer(index, tuple(Part(*part) for part in parts)))
    if not isinstance(kind, str):
        raise Invalid("group.kind must be a string")
    return Group(kind, heads, tokens, tuple(read), blocks, window, digest)


def attention(
    layers: int,
    heads: int,
    width: int,
    *,
    engine_tokens: int,
    engine_blocks: int = 1,
    dtype: str = "e4m3fn",
    granularity: str = "head",
    excluded: frozenset[int] | tuple[int, ...] = (),
    native_dtype: str = "bf16",
    window: int | None = None,
) -> Layout:
    """The common case in one call: K and V of one width in every layer, one format, `excluded` layers native."""
    quantized = tuple(Part(name, width, dtype, granularity if dtype in FP8 else "none") for name in ("k", "v"))
    native = tuple(Part(name, width, native_dtype) for name in ("k", "v"))
    return Layout(
        (
            Group(
                "attention",
                heads,
                engine_tokens,
                tuple(Layer(i, native if i in excluded else quantized) for i in range(layers)),
                engine_blocks,
                window,
            ),
        )
    )


def opaque(nbytes: int, digest: str, *, engine_tokens: int, layers: int = 1, engine_blocks: int = 1) -> Layout:
    """Blocks of uninterpreted bytes: `nbytes` per layer and block; `digest` (64 hex digits) names what they mean."""
    part = (Part("bytes", nbytes, "u8"),)
    return Layout(
        (Group("opaque", 1, engine_tokens, tuple(Layer(i, part) for i in range(layers)), engine_blocks, None, digest),)
    )
