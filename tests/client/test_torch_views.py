"""torch views over a body: the bytes that the numpy views show, without a copy."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from kvtier.errors import Invalid
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


@pytest.mark.torch
@pytest.mark.parametrize("range_", RANGES, ids=str)
def test_torch_views_show_the_same_bytes_without_a_copy(range_: Range) -> None:
    torch = pytest.importorskip("torch")
    from kvtier.client.torch_views import DTYPES, body_tensor, part_tensor, scale_tensor

    extents = mixed_layout().extents(range_)
    body = random_body(extents)
    for whole in (body, body_tensor(body, extents)):
        for layer, part, spec in every_part(extents):
            for tensor, view, name in (
                (part_tensor(whole, extents, layer, part), part_view(body, extents, layer, part), spec.dtype),
                (scale_tensor(whole, extents, layer, part), scale_view(body, extents, layer, part), spec.scale_dtype),
            ):
                assert tensor.dtype == DTYPES[name]
                assert tuple(tensor.shape) == view.shape
                assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == view.tobytes()
                if view.size:
                    assert tensor.data_ptr() == view.__array_interface__["data"][0]


@pytest.mark.torch
@pytest.mark.filterwarnings("error")
def test_torch_views_of_a_read_only_body_keep_it_alive_and_do_not_warn() -> None:
    torch = pytest.importorskip("torch")
    from kvtier.client.torch_views import part_tensor

    extents = mixed_layout().extents()
    body = random_body(extents)
    body.flags.writeable = False
    expected = part_view(body, extents, 0, 0).tobytes()
    tensor, alive = part_tensor(body, extents, 0, 0), weakref.ref(body)
    del body
    gc.collect()
    assert alive() is not None, "the tensor must hold what it looks at"
    assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == expected
    del tensor
    gc.collect()
    assert alive() is None, "and nothing else may"


@pytest.mark.torch
def test_torch_views_refuse_what_they_cannot_show() -> None:
    torch = pytest.importorskip("torch")
    from kvtier.client.torch_views import part_tensor, scale_tensor

    extents = mixed_layout().extents()
    for wrong in (
        torch.zeros(extents.body_bytes - 1, dtype=torch.uint8),
        torch.zeros(extents.body_bytes, dtype=torch.int8),
    ):
        with pytest.raises(Invalid, match="contiguous run"):
            part_tensor(wrong, extents, 0, 0)
    # One 2-byte K scale, then 4-byte V scales at byte 2: numpy reads them, torch cannot.
    parts = (Part("k", 4, "e4m3fn", "head", "fp16"), Part("v", 4, "e4m3fn", "head"))
    odd = Layout((Group("attention", 1, 4, (Layer(0, parts),)),)).extents()
    body = random_body(odd)
    assert scale_view(body, odd, 0, 1).tobytes() == body[2:6].tobytes()
    with pytest.raises(Invalid, match="multiple of 4"):
        scale_tensor(body, odd, 0, 1)
