"""Sizes and offsets: checked against a plain laying-out of bytes, and every malformed layout refused by name (case
KVB-07, layout part)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import Invalid
from kvtier.format.identity import Description, HashScheme, derive_keys, namespace_digest, pack_scales
from kvtier.format.layout import (
    DYNAMIC,
    FP8,
    HEADER_BYTES,
    ITEM_BYTES,
    MAX_BLOCK_BYTES,
    SCALE_BYTES,
    STATIC,
    Extents,
    Group,
    Layer,
    Layout,
    Part,
    Range,
    attention,
    opaque,
    pad,
)

# --- any layout


def parts(kind: str) -> st.SearchStrategy[Part]:
    if kind == "opaque":
        return st.builds(Part, st.just("bytes"), st.integers(1, 5000), st.just("u8"))
    quantized = st.tuples(st.sampled_from(sorted(FP8)), st.sampled_from(sorted(STATIC | DYNAMIC)))
    native = st.tuples(st.sampled_from(sorted(set(ITEM_BYTES) - FP8)), st.just("none"))
    return st.builds(
        lambda name, width, form, scale: Part(name, width, form[0], form[1], scale),
        st.sampled_from(["k", "v", "latent", "record", "index"]),
        st.integers(1, 70),
        quantized | native,
        st.sampled_from(sorted(SCALE_BYTES)),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    indices = iter(draw(st.lists(st.integers(0, 65535), min_size=12, max_size=12, unique=True)))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["attention", "latent", "opaque"]))
        most = 1 if kind == "opaque" else 3
        layers = tuple(
            Layer(
                next(indices),
                tuple(draw(st.lists(parts(kind), min_size=1, max_size=most, unique_by=lambda part: part.name))),
            )
            for _ in range(draw(st.integers(1, 4)))
        )
        groups.append(
            Group(
                kind,
                draw(st.integers(1, 5)) if kind == "attention" else 1,
                draw(st.integers(1, 40) | st.just(544)),
                layers,
                draw(st.integers(1, 3)),
                draw(st.none() | st.integers(1, 4096)),
                "ab" * 32 if kind == "opaque" else None,
            )
        )
    return Layout(tuple(groups))


@st.composite
def layouts_and_ranges(draw: st.DrawFn) -> tuple[Layout, Range]:
    layout = draw(layouts())
    index = draw(st.integers(0, len(layout.groups) - 1))
    ends = []
    for size in (len(layout.groups[index].layers), layout.groups[index].heads):
        low = draw(st.integers(0, size - 1))
        ends.append((low, draw(st.integers(low + 1, size))))
    return layout, Range(index, ends[0], ends[1])


def lay_out(layout: Layout, range_: Range) -> tuple[int, dict[tuple[int, int, int, str], tuple[int, int]]]:
    """(body bytes, {(head, layer, part, "scales" or "data"): (start, bytes)}): the format's sentence done literally,
    byte by byte."""
    group = layout.groups[range_.group]
    tokens = group.engine_tokens * group.engine_blocks
    where: dict[tuple[int, int, int, str], tuple[int, int]] = {}
    position = 0

    def align() -> None:
        nonlocal position
        while position % 16:
            position += 1

    for head in range(*range_.heads):  # type: ignore[arg-type]
        for number, layer in enumerate(group.layers[range_.layers[0] : range_.layers[1]]):
            for i, part in enumerate(layer.parts):
                count = {"none": 0, "tensor": 1, "head": 1}.get(part.granularity)
                if part.granularity == "block-head":
                    count = group.engine_blocks
                elif part.granularity == "token-head":
                    count = tokens
                elif part.granularity == "channel":
                    count = group.engine_blocks * part.width
                assert count is not None
                nbytes = count * (4 if part.scale_dtype == "fp32" else 2)
                where[head, number, i, "scales"] = (position, nbytes)
                position += nbytes
            align()
            for i, part in enumerate(layer.parts):
                if group.kind == "opaque":
                    nbytes = part.width
                else:
                    item = 1 if part.dtype in ("e4m3fn", "e5m2", "e4m3fnuz", "u8") else 4 if part.dtype == "fp32" else 2
                    nbytes = tokens * part.width * item
                where[head, number, i, "data"] = (position, nbytes)
                position += nbytes
                align()
    return position, where


@given(layouts_and_ranges())
def test_extents_are_what_the_format_says(case: tuple[Layout, Range]) -> None:
    layout, range_ = case
    size, where = lay_out(layout, range_)
    extents = layout.extents(range_)
    group = layout.groups[range_.group]
    assert extents.body_bytes == size and extents.block_bytes == 256 + size
    assert extents.slot_bytes % 4096 == 0 and 0 <= extents.slot_bytes - extents.block_bytes < 4096
    low, high = extents.heads
    for (head, number, i, what), (start, nbytes) in where.items():
        part = group.layers[extents.layers[0] + number].parts[i]
        run = (head - low) * extents.head_stride
        if what == "scales":
            assert (run + extents.scales[number][i], group.scale_bytes(part)) == (start, nbytes)
        else:
            assert (run + extents.data[number][i], group.data_bytes(part)) == (start, nbytes)
            assert start % 16 == 0
    ordered = sorted(span for span in where.values() if span[1])
    ends = [0, *(start + nbytes for start, nbytes in ordered)]
    starts = [*(start for start, _ in ordered), size]
    assert all(0 <= start - end < 16 for start, end in zip(starts, ends, strict=True)), (
        "no overlap, no hole but padding"
    )
    assert (high - low) * extents.head_stride == size


@given(layouts_and_ranges())
def test_a_range_of_heads_is_one_run_of_the_whole(case: tuple[Layout, Range]) -> None:
    layout, range_ = case
    part, whole = layout.extents(range_), layout.extents(replace(range_, heads=(0, None)))
    assert (part.head_stride, part.scales, part.data) == (whole.head_stride, whole.scales, whole.data)
    assert part.body_bytes == (part.heads[1] - part.heads[0]) * whole.head_stride


@given(layouts_and_ranges())
def test_a_layer_looks_the_same_in_every_range(case: tuple[Layout, Range]) -> None:
    layout, range_ = case
    some, whole = layout.extents(range_), layout.extents(replace(range_, layers=(0, None)))
    first = some.layers[0]
    shift = whole.scales[first][0]
    for number in range(len(some.data)):
        assert [x + shift for x in some.scales[number]] == list(whole.scales[first + number])
        assert [x + shift for x in some.data[number]] == list(whole.data[first + number])


@given(layouts())
def test_plain_data_round_trips(layout: Layout) -> None:
    assert Layout.from_json(layout.to_json()) == layout
    assert Layout.from_json(copy.deepcopy(layout.to_json())).to_json() == layout.to_json()


def test_pad() -> None:
    assert [pad(n) for n in (0, 1, 15, 16, 17)] == [0, 16, 16, 16, 32]
    assert [pad(n, 4096) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def test_the_usual_block_by_hand() -> None:
    """Llama-3.1-8B: 32 layers, 8 heads of 128, 16 tokens, one f32 scale per head for K and for V."""
    extents = attention(32, 8, 128, engine_tokens=16).extents()
    assert extents.scales[0] == (0, 4) and extents.data[0] == (16, 16 + 2048)
    assert extents.scales[1] == (4112, 4116) and extents.data[1] == (4128, 4128 + 2048)
    assert extents.head_stride == 32 * (16 + 2 * 2048)
    assert (extents.body_bytes, extents.block_bytes, extents.slot_bytes) == (8 * 131584, 256 + 8 * 131584, 1056768)


def test_excluded_layers_are_native_and_stand_among_the_others() -> None:
    layout = attention(3, 2, 64, engine_tokens=16, excluded=(1,), window=1024)
    natives = [[part.native for part in layer.parts] for layer in layout.groups[0].layers]
    assert natives == [[False, False], [True, True], [False, False]]
    extents = layout.extents()
    assert extents.data[0] == (16, 16 + 1024)
    assert extents.data[1] == (2064, 2064 + 2048), "no scales, twice the bytes"
    assert extents.data[2] == (6160 + 16, 6160 + 16 + 1024)
    assert layout.groups[0].window == 1024
    assert all(
        part.native
        for layer in attention(3, 2, 64, engine_tokens=16, dtype="fp16").groups[0].layers
        for part in layer.parts
    )


def test_opaque_bytes_have_one_head_and_no_structure() -> None:
    extents = opaque(1000, "0" * 64, engine_tokens=16, layers=3, engine_blocks=2).extents()
    assert extents.data == ((0,), (1008,), (2016,)) and extents.body_bytes == 3024
    assert (
        opaque(1000, "0" * 64, engine_tokens=16).extents().body_bytes
        == opaque(1000, "0" * 64, engine_tokens=32).extents().body_bytes
    )


# --- ranges


def test_open_ends_are_filled_in() -> None:
    layout = attention(4, 8, 64, engine_tokens=16)
    assert layout.resolve(Range()) == (0, 0, 4, 0, 8)
    assert layout.resolve(Range(0, (1, None), (4, 8))) == (0, 1, 4, 4, 8)
    assert layout.extents(Range(heads=(4, 8))) == layout.extents(Range(0, (0, 4), (4, None)))


@pytest.mark.parametrize(
    "range_",
    [
        Range(1),
        Range(-1),
        Range(0, (0, 0)),
        Range(0, (0, 5)),
        Range(0, (-1, 2)),
        Range(0, (3, 2)),
        Range(0, (4, None)),
        Range(0, (0, 2**16)),
        Range(0, heads=(0, 9)),
        Range(0, heads=(8, None)),
        Range(0, heads=(2, 2)),
        Range(2**63),
    ],
)
def test_a_range_outside_the_layout_is_refused(range_: Range) -> None:
    layout = attention(4, 8, 64, engine_tokens=16)
    with pytest.raises(Invalid, match=r"group -?\d+ is not in|is empty or outside"):
        layout.extents(range_)


# --- limits


def test_the_largest_block() -> None:
    assert opaque(MAX_BLOCK_BYTES - HEADER_BYTES, "0" * 64, engine_tokens=16).extents().block_bytes == 16 * 2**20 + 256
    with pytest.raises(Invalid, match="the largest is 16777472: use fewer tokens, layers or heads"):
        opaque(MAX_BLOCK_BYTES - HEADER_BYTES + 1, "0" * 64, engine_tokens=16).extents()
    wide = attention(64, 64, 256, engine_tokens=16)
    with pytest.raises(Invalid, match="fewer tokens, layers or heads"):
        wide.extents()
    assert wide.extents(Range(heads=(0, 31))).block_bytes <= MAX_BLOCK_BYTES, "a range of it is allowed"


K = Part("k", 8, "e4m3fn", "head")
U8 = Part("bytes", 8, "u8")
ONE = (Layer(0, (K,)),)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Part("", 8, "bf16"), "identifier"),
        (lambda: Part("k v", 8, "bf16"), "identifier"),
        (lambda: Part("k" * 33, 8, "bf16"), "identifier"),
        (lambda: Part(7, 8, "bf16"), "identifier"),  # type: ignore[arg-type]
        (lambda: Part("k", 0, "bf16"), "width of k"),
        (lambda: Part("k", -1, "bf16"), "width of k"),
        (lambda: Part("k", True, "bf16"), "width of k"),
        (lambda: Part("k", 8.0, "bf16"), "width of k"),  # type: ignore[arg-type]
        (lambda: Part("k", 2**31, "bf16"), "width of k"),
        (lambda: Part("k", 8, "int4"), "dtype of k"),
        (lambda: Part("k", 8, "e4m3fn", "row"), "granularity of k"),
        (lambda: Part("k", 8, "e4m3fn", "head", "fp64"), "scale_dtype of k"),
        (lambda: Part("k", 8, "e4m3fn"), "needs a scale granularity"),
        (lambda: Part("k", 8, "bf16", "head"), "a native one has none"),
        (lambda: Layer(-1, (K,)), "layer index"),
        (lambda: Layer(65536, (K,)), "layer index"),
        (lambda: Layer(0, ()), "1 to 8 parts"),
        (lambda: Layer(0, tuple(Part(f"p{i}", 8, "bf16") for i in range(9))), "1 to 8 parts"),
        (lambda: Layer(0, (K, K)), "two parts of one name"),
        (lambda: Group("mamba", 1, 16, ONE), "group kind"),
        (lambda: Group("attention", 0, 16, ONE), "heads"),
        (lambda: Group("attention", 1025, 16, ONE), "heads"),
        (lambda: Group("attention", 1, 0, ONE), "engine_tokens"),
        (lambda: Group("attention", 1, 2**63 - 1, ONE), "engine_tokens"),
        (lambda: Group("attention", 1, 16, ONE, 0), "engine_blocks"),
        (lambda: Group("attention", 1, 544, ONE, 121), "tokens of a block"),
        (lambda: Group("attention", 1, 16, ONE, 1, 0), "window"),
        (lambda: Group("attention", 1, 16, ()), "1 to 1024 layers"),
        (lambda: Group("attention", 1, 16, tuple(Layer(i, (K,)) for i in range(1025))), "1 to 1024 layers"),
        (lambda: Group("attention", 1, 16, (Layer(0, (Part("k", 65537, "bf16"),)),)), "width of k in layer 0"),
        (lambda: Group("latent", 2, 16, ONE), r"the one head \[0, 1\)"),
        (lambda: Group("opaque", 2, 16, (Layer(0, (U8,)),), digest="0" * 64), r"the one head \[0, 1\)"),
        (lambda: Group("attention", 1, 16, ONE, digest="0" * 64), "an opaque group, and only one"),
        (lambda: Group("opaque", 1, 16, (Layer(0, (U8,)),)), "an opaque group, and only one"),
        (lambda: Group("opaque", 1, 16, (Layer(0, (U8,)),), digest="0" * 63), "64 lower-case hex"),
        (lambda: Group("opaque", 1, 16, (Layer(0, (U8,)),), digest="A" * 64), "64 lower-case hex"),
        (lambda: Group("opaque", 1, 16, (Layer(0, (K,)),), digest="0" * 64), "one part of dtype u8"),
        (lambda: Group("opaque", 1, 16, (Layer(0, (U8, K)),), digest="0" * 64), "one part of dtype u8"),
        (lambda: Layout(()), "1 to 64 groups"),
        (lambda: Layout(tuple(Group("attention", 1, 16, (Layer(i, (K,)),)) for i in range(65))), "1 to 64 groups"),
        (lambda: Layout((Group("attention", 1, 16, ONE), Group("attention", 2, 16, ONE))), "one group only"),
        (lambda: Layout((Group("attention", 1, 16, ONE + ONE),)), "one group only"),
    ],
)
def test_limits_and_contradictions_are_refused(build: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        build()


# --- plain data from elsewhere

RICH = Layout(
    (
        Group(
            "attention",
            2,
            16,
            (Layer(0, (K, Part("v", 6, "e4m3fn", "token-head", "bf16"))), Layer(1, (Part("k", 8, "bf16"),))),
            2,
            128,
        ),
        Group("latent", 1, 64, (Layer(2, (Part("latent", 576, "bf16"),)),)),
        Group("opaque", 1, 16, (Layer(3, (U8,)),), digest="0" * 64),
    )
)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value within plain data."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


def holder(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        data = data[key]
    return data


WRONG = (None, True, -1, 0, 0.5, 2**31, 2**63 - 1, "", "x", "\0", [], {}, [[]], {"a": 1}, ["x"] * 2000)


@pytest.mark.parametrize("path", list(places(RICH.to_json())), ids=str)
def test_every_field_is_checked_when_read(path: tuple[Any, ...]) -> None:
    """Any wrong value anywhere is refused by name, or is another valid layout; missing and unknown fields are
    refused."""
    refused = 0
    for wrong in WRONG:
        data = RICH.to_json()
        holder(data, path)[path[-1]] = wrong
        try:
            found = Layout.from_json(data)
        except Invalid as error:
            assert str(error)
            refused += 1
        else:
            assert found.to_json() == data
    assert refused > len(WRONG) // 2
    data = RICH.to_json()
    del holder(data, path)[path[-1]]
    if isinstance(path[-1], str):
        with pytest.raises(Invalid, match=f"lacks {path[-1]}"):
            Layout.from_json(data)
        data = RICH.to_json()
        holder(data, path)["extra"] = 1
        with pytest.raises(Invalid, match="unknown fields: extra"):
            Layout.from_json(data)


@pytest.mark.parametrize(
    "data", [None, [], "x", 1, {}, {"groups": {}}, {"groups": None}, {"groups": [[]]}, {"groups": ["x"]}]
)
def test_what_is_no_layout_is_refused(data: Any) -> None:
    with pytest.raises(Invalid):
        Layout.from_json(data)


# --- KVB-07: block granularity, and MLA records


def key_of(layout: Layout, content: bytes = bytes(32), group: int = 0) -> bytes:
    """The key of one block of a group, all layers and heads."""
    static = {
        (layer.index, part.name): [1.0] * (1 if part.granularity == "tensor" else group_.heads)
        for group_ in layout.groups
        for layer in group_.layers
        for part in layer.parts
        if part.granularity in STATIC
    }
    description = Description("m", "a" * 40, layout, HashScheme("x", "0", 16), scales=pack_scales(static))
    return derive_keys(namespace_digest(description, "local"), layout.resolve(Range(group)), bytes(32), content, 32)[0]


def test_groups_of_544_and_16_tokens_each_use_their_own_size() -> None:
    bf16 = (Part("k", 8, "bf16"), Part("v", 8, "bf16"))
    layout = Layout((Group("attention", 2, 544, (Layer(0, bf16),)), Group("attention", 2, 16, (Layer(1, bf16),))))
    large, small = layout.extents(Range(0)), layout.extents(Range(1))
    assert (layout.groups[0].tokens, layout.groups[1].tokens) == (544, 16)
    assert large.body_bytes == 34 * small.body_bytes, "34 pages of 16 tokens"
    for tokens, (in_large, in_small) in {1088: (2, 68), 1089: (2, 68), 543: (0, 33)}.items():
        assert [tokens // group.tokens for group in layout.groups] == [in_large, in_small], (
            "an incomplete tail has no block"
        )
    assert key_of(layout, group=0) != key_of(layout, group=1)


def test_several_engine_blocks_in_one_block() -> None:
    one, four = attention(2, 2, 8, engine_tokens=16), attention(2, 2, 8, engine_tokens=16, engine_blocks=4)
    sixty_four = attention(2, 2, 8, engine_tokens=64)
    assert four.groups[0].tokens == 64 and four.extents().data == sixty_four.extents().data
    assert len({key_of(one), key_of(four), key_of(sixty_four)}) == 3, "equal sizes, other meaning"
    dynamic = [attention(1, 1, 8, engine_tokens=16, engine_blocks=4, granularity=name) for name in sorted(DYNAMIC)]
    counts = {
        layout.groups[0].layers[0].parts[0].granularity: layout.groups[0].scale_count(
            layout.groups[0].layers[0].parts[0]
        )
        for layout in dynamic
    }
    assert counts == {"block-head": 4, "token-head": 64, "channel": 32}


def test_the_size_of_a_group_is_its_own_not_a_global_one() -> None:
    layout = Layout(
        tuple(
            Group("attention", 1, tokens, (Layer(i, (Part("k", 4, "u8"),)),)) for i, tokens in enumerate((256, 64, 4))
        )
    )
    assert [layout.extents(Range(i)).body_bytes for i in range(3)] == [1024, 256, 16]
    assert [group["engine_tokens"] for group in layout.to_json()["groups"]] == [256, 64, 4], "and is shown so"


def latent(*parts_: Part, tokens: int = 64) -> Layout:
    return Layout((Group("latent", 1, tokens, (Layer(0, parts_),)),))


def test_latents_and_packed_records_never_share_a_namespace() -> None:
    plain = latent(Part("latent", 576, "bf16"))
    quantized = latent(Part("latent", 576, "e4m3fn", "tensor"))
    record = latent(Part("record", 656, "u8"))  # 512 FP8 values, 4 f32 scales, 64 bf16 values, packed by the engine
    padded = latent(Part("latent", 656, "u8"))
    two = latent(Part("index", 132, "u8"), Part("latent", 576, "u8"))
    swapped = latent(Part("index", 576, "u8"), Part("latent", 132, "u8"))
    raw = opaque(656 * 64, "0" * 64, engine_tokens=64)
    assert plain.extents().body_bytes == 64 * 576 * 2
    assert record.extents().body_bytes == 64 * 656 == raw.extents().body_bytes
    assert (
        two.extents().data == ((0, 64 * 132),)
        and two.extents().body_bytes == 64 * (132 + 576) == swapped.extents().body_bytes
    )
    every = [plain, quantized, record, padded, two, swapped, raw]
    assert len({key_of(layout) for layout in every}) == len(every)


def test_a_block_of_one_layer_with_parts_of_132_and_576() -> None:
    """Each part has its own width: nothing is cut with the width of its neighbour."""
    layout = latent(Part("index", 132, "u8"), Part("latent", 576, "bf16"), tokens=16)
    extents: Extents = layout.extents()
    (index, values), group = extents.data[0], layout.groups[0]
    assert index == 0 and group.data_bytes(group.layers[0].parts[0]) == 2112
    assert values == 2112 and group.data_bytes(group.layers[0].parts[1]) == 18432
    assert extents.body_bytes == 20544
