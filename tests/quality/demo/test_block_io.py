"""KV into a body and back: every format of a mixed layout, ranges of layers and heads, padding, and what must not be
stored."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.errors import Invalid
from kvtier.format.layout import Group, Layer, Layout, Part, Range, attention
from kvtier.format.views import part_view, scale_view

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from kvtier_kernels import reference  # noqa: E402

from kvtier.client.torch_views import DTYPES  # noqa: E402
from kvtier.quality.demo.block_io import read_tiles, write_block  # noqa: E402

LAYOUT = Layout(
    (
        Group(
            "attention",
            heads=4,
            engine_tokens=8,
            engine_blocks=2,
            layers=(
                Layer(0, (Part("k", 24, "e4m3fn", "channel"), Part("v", 24, "e4m3fn", "token-head"))),
                Layer(3, (Part("k", 24, "bf16"), Part("v", 24, "fp16"))),
                Layer(5, (Part("k", 24, "e4m3fn", "head"), Part("v", 24, "e4m3fn", "tensor"))),
                Layer(6, (Part("k", 24, "e4m3fn", "block-head"), Part("v", 24, "fp32"))),
            ),
        ),
    )
)
SCALES = {(5, "k"): np.array([0.01, 0.02, 0.03, 0.04], np.float32), (5, "v"): np.array([0.05], np.float32)}
RANGES = [Range(), Range(0, (1, 3)), Range(0, (0, None), (1, 3)), Range(0, (2, 3), (3, 4))]


def content_for(range_: Range, seed: int = 0) -> list[list[torch.Tensor]]:
    """[layer][part] of random normal content, native parts in their own dtype."""
    extents = LAYOUT.extents(range_)
    generator = torch.Generator().manual_seed(seed)
    heads = extents.heads[1] - extents.heads[0]
    return [
        [
            torch.randn(heads, extents.group.tokens, part.width, generator=generator).to(
                DTYPES[part.dtype] if part.native else torch.bfloat16
            )
            for part in layer.parts
        ]
        for layer in extents.group.layers[extents.layers[0] : extents.layers[1]]
    ]


@pytest.mark.parametrize("range_", RANGES, ids=str)
def test_a_block_holds_what_the_number_format_says(range_: Range) -> None:
    extents = LAYOUT.extents(range_)
    content = content_for(range_)
    body = np.full(extents.body_bytes, 0x7F, np.uint8)  # a slot that was used before
    counts = write_block(body, extents, content, SCALES)
    layers = extents.group.layers[extents.layers[0] : extents.layers[1]]
    covered = np.zeros(extents.body_bytes, bool)
    for i, layer in enumerate(layers):
        for j, part in enumerate(layer.parts):
            stored, scales = part_view(body, extents, i, j), scale_view(body, extents, i, j)
            part_view(covered.view(np.uint8), extents, i, j).view(np.uint8)[...] = 1
            scale_view(covered.view(np.uint8), extents, i, j).view(np.uint8)[...] = 1
            if part.native:
                assert stored.tobytes() == content[i][j].contiguous().view(torch.uint8).numpy().tobytes()
                assert (layer.index, part.name) not in counts
                continue
            static = SCALES.get((layer.index, part.name))
            if part.granularity == "head":
                static = static[slice(*extents.heads)]
            expected = reference.quantize(
                content[i][j],
                part.granularity,
                None if static is None else torch.from_numpy(static.copy()),
                engine_blocks=2,
            )
            assert stored.tobytes() == expected.codes.view(torch.uint8).numpy().tobytes()
            assert scales.tobytes() == expected.scales.numpy().tobytes()
            for got, wanted in zip(counts[layer.index, part.name], expected.counts, strict=True):
                assert torch.equal(got, wanted)
    marks = covered.view(np.uint8)
    assert not body[marks == 0].any(), "padding is zero, whatever the slot held before"
    again = np.zeros(extents.body_bytes, np.uint8)
    write_block(again, extents, content, SCALES)
    assert again.tobytes() == body.tobytes(), "equal KV makes equal bytes"


@pytest.mark.parametrize("range_", [Range(), Range(0, (0, None), (1, 3))], ids=str)
def test_tiles_lie_in_the_body_and_attend_to_what_was_written(range_: Range) -> None:
    extents = LAYOUT.extents(range_)
    content = content_for(range_)
    body = np.empty(extents.body_bytes, np.uint8)
    write_block(body, extents, content, SCALES)
    body.flags.writeable = False
    first = body.__array_interface__["data"][0]
    queries = torch.randn(2 * (extents.heads[1] - extents.heads[0]), 3, 24, generator=torch.Generator().manual_seed(1))
    tiles = read_tiles(body, extents, start=32)
    assert len(tiles) == 4
    for tile, (keys, values) in zip(tiles, content, strict=True):
        assert (tile.start, tile.used) == (32, None)
        for tensor in (tile.keys, tile.values, tile.key_scales, tile.value_scales):
            assert tensor is None or first <= tensor.data_ptr() < first + body.nbytes
        got = reference.attention(queries, [tile], start=100).output
        native = reference.attention(
            queries, [reference.Tile(keys.float(), values.float(), start=32)], start=100
        ).output
        # FP8 rounds by up to 2^-4; averaged over 16 keys the output moves less. A wrong offset or scale moves it by its
        # own size.
        assert float((got - native).abs().max()) < 0.15 * float(native.abs().max()) + 0.05


def test_what_is_not_finite_is_counted_where_it_is() -> None:
    content = content_for(Range())
    content[2][0][1, 3, 5] = float("nan")
    content[0][1][2, 0, 0] = float("inf")
    body = np.empty(LAYOUT.extents().body_bytes, np.uint8)
    counts = write_block(body, LAYOUT.extents(), content, SCALES)
    bad = {key: seen.nonfinite.tolist() for key, seen in counts.items() if seen.nonfinite.any()}
    assert bad == {(5, "k"): [0, 1, 0, 0], (0, "v"): [0, 0, 1, 0]}


def test_content_that_does_not_fit_is_refused() -> None:
    extents = LAYOUT.extents()
    body = np.empty(extents.body_bytes, np.uint8)
    good = content_for(Range())
    for wrong, message in (
        (good[:3], "4 layers, not 3"),
        ([good[0][:1], *good[1:]], "2 parts, not 1"),
        ([[good[0][0][:, :15], good[0][1]], *good[1:]], "k of layer 0"),
        ([good[0], [good[1][0].half(), good[1][1]], *good[2:]], "k of layer 3 is bf16"),
    ):
        with pytest.raises(Invalid, match=message):
            write_block(body, extents, wrong, SCALES)
    with pytest.raises(KeyError):
        write_block(body, extents, good, {})
    with pytest.raises(Invalid, match="contiguous run"):
        write_block(body[1:], extents, good, SCALES)
    with pytest.raises(Invalid, match="e4m3fn only, not e5m2"):
        other = attention(1, 1, 8, engine_tokens=8, dtype="e5m2", granularity="block-head").extents()
        write_block(np.empty(other.body_bytes, np.uint8), other, [[torch.zeros(1, 8, 8)] * 2], {})


def test_a_layer_without_k_and_v_has_no_tiles() -> None:
    latent = Layout((Group("latent", 1, 16, (Layer(0, (Part("latent", 64, "bf16"),)),)),)).extents()
    with pytest.raises(Invalid, match="not k and v"):
        read_tiles(np.zeros(latent.body_bytes, np.uint8), latent, 0)
