"""numpy and torch views over a body: the right bytes at the right place, without a copy, for every kind of layout."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.errors import Invalid
from kvtier.format import layout
from kvtier.format.layout import Extents, Group, Layer, Layout, Part, Range
from kvtier.format.views import part_view, scale_view

HEX = "ab" * 32


def mixed_layout() -> Layout:
    """K and V of different width, format and granularity, an excluded layer, 2-byte scales, a latent group and an
    opaque one."""
    attention = Group(
        "attention",
        heads=4,
        engine_tokens=8,
        engine_blocks=2,
        layers=(
            Layer(0, (Part("k", 24, "e4m3fn", "channel"), Part("v", 8, "e4m3fn", "token-head"))),
            Layer(1, (Part("k", 24, "bf16"), Part("v", 8, "fp16"))),
            Layer(2, (Part("k", 5, "e4m3fn", "block-head", "bf16"), Part("v", 3, "fp32"))),
            Layer(3, (Part("k", 24, "e4m3fn", "head"), Part("v", 8, "e4m3fn", "tensor"))),
        ),
    )
    latent = Group(
        "latent",
        heads=1,
        engine_tokens=16,
        layers=(Layer(4, (Part("latent", 576, "bf16"),)), Layer(5, (Part("record", 656, "u8"),))),
    )
    opaque = Group("opaque", heads=1, engine_tokens=16, layers=(Layer(6, (Part("bytes", 100, "u8"),)),), digest=HEX)
    return Layout((attention, latent, opaque))


RANGES = [
    Range(),
    Range(0, (1, 4), (0, None)),
    Range(0, (0, None), (1, 3)),
    Range(0, (3, 4), (3, 4)),
    Range(1),
    Range(2),
]


def random_body(extents: Extents, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, extents.body_bytes, dtype=np.uint8)


def every_part(extents: Extents) -> list[tuple[int, int, Part]]:
    layers = extents.group.layers[extents.layers[0] : extents.layers[1]]
    return [(layer, part, spec) for layer in range(len(layers)) for part, spec in enumerate(layers[layer].parts)]


@pytest.mark.parametrize("range_", RANGES, ids=str)
def test_a_view_shows_the_bytes_that_the_layout_gives_to_its_part(range_: Range) -> None:
    extents = mixed_layout().extents(range_)
    body = random_body(extents)
    for layer, part, spec in every_part(extents):
        elements, scales = part_view(body, extents, layer, part), scale_view(body, extents, layer, part)
        tokens, width = (1, spec.width) if extents.group.kind == "opaque" else (extents.group.tokens, spec.width)
        heads = extents.heads[1] - extents.heads[0]
        assert elements.shape == (heads, tokens, width)
        assert scales.shape == (heads, extents.group.scale_count(spec))
        for head in range(heads):
            for view, start, size in (
                (elements, extents.data[layer][part], extents.group.data_bytes(spec)),
                (scales, extents.scales[layer][part], extents.group.scale_bytes(spec)),
            ):
                at = head * extents.head_stride + start
                assert view[head].tobytes() == body[at : at + size].tobytes()


@pytest.mark.parametrize("range_", RANGES, ids=str)
def test_views_of_all_parts_are_disjoint_and_write_the_body_itself(range_: Range) -> None:
    extents = mixed_layout().extents(range_)
    body = np.zeros(extents.body_bytes, np.uint8)
    written = 0
    for layer, part, _ in every_part(extents):
        for view in (part_view(body, extents, layer, part), scale_view(body, extents, layer, part)):
            assert view.size == 0 or np.shares_memory(view, body)
            assert not view.view(np.uint8 if view.itemsize == 1 else f"u{view.itemsize}").any(), "two views share bytes"
            view[...] = np.frombuffer(b"\x01" * view.itemsize, view.dtype)[0]
            written += view.nbytes
            assert int(np.count_nonzero(body)) == written


def test_dtypes() -> None:
    extents = mixed_layout().extents()
    body = random_body(extents)
    assert [part_view(body, extents, layer, part).dtype for layer, part, _ in every_part(extents)] == [
        np.uint8, np.uint8, np.uint16, np.uint16, np.uint8, np.float32, np.uint8, np.uint8,
    ]  # fmt: skip
    assert scale_view(body, extents, 0, 0).dtype == np.float32
    assert scale_view(body, extents, 2, 0).dtype == np.uint16


def test_a_view_of_a_read_only_body_is_read_only() -> None:
    extents = mixed_layout().extents()
    body = random_body(extents)
    body.flags.writeable = False
    for view in (part_view(body, extents, 0, 0), scale_view(body, extents, 0, 0)):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0


@pytest.mark.parametrize(("layer", "part"), [(-1, 0), (4, 0), (0, -1), (0, 2)])
def test_an_index_outside_the_range_is_refused(layer: int, part: int) -> None:
    extents = mixed_layout().extents()
    body = random_body(extents)
    for view in (part_view, scale_view):
        with pytest.raises(Invalid, match="is not in"):
            view(body, extents, layer, part)


def test_a_body_of_another_size_or_form_is_refused() -> None:
    extents = mixed_layout().extents()
    body = random_body(extents)
    for wrong in (
        body[:-1],
        np.append(body, np.uint8(0)),
        body.view(np.int8),
        np.repeat(body, 2)[::2],
        body.reshape(2, -1),
    ):
        with pytest.raises(Invalid, match="contiguous run"):
            part_view(wrong, extents, 0, 0)


def test_the_common_layout() -> None:
    extents = layout.attention(2, 3, 64, engine_tokens=64).extents()
    body = np.zeros(extents.body_bytes, np.uint8)
    part_view(body, extents, 1, 1)[2, 63, 63] = 0x7E
    # 3 heads of 2 layers of (2 scales padded to 16) + K + V: the last code of the last head is the last byte.
    assert extents.body_bytes == 3 * 2 * (16 + 2 * 64 * 64)
    assert np.flatnonzero(body).tolist() == [extents.body_bytes - 1]
