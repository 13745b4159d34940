"""Which namespace, block and context an object of LMCache is. Needs no LMCache: keys, shapes and dtypes are plain
here."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from kvtier.connectors.common.object_naming import (
    MAX_FORMS,
    MAX_PIECE_BYTES,
    ObjectForm,
    Space,
    Spaces,
    content_hash,
    context_of,
    form_of,
)
from kvtier.format.identity import NO_CONTEXT, Description, f32_hex
from kvtier.format.layout import MAX_LAYERS, attention
from tests.support.daemon import MiB, description


@dataclass(frozen=True)
class Dtype:
    """As torch has them."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True)
class Key:
    """LMCache's ObjectKey."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


E4M3, E5M2, FP32 = Dtype("float8_e4m3fn", 1), Dtype("float8_e5m2", 1), Dtype("float32", 4)
SHAPE, SCALES = (2, 4, 256, 512), (2, 4, 8)
FORM = form_of([SHAPE, SCALES], [E4M3, FP32])


def base(scale: float = 0.05, **fields: object) -> Description:
    scales = {f"{layer}.{part}": f32_hex(scale) * 8 for layer in range(4) for part in "kv"}
    return description(layout=attention(4, 8, 64, engine_tokens=16), rule="checkpoint", scales=scales, **fields)


def test_a_form_counts_all_its_tensors() -> None:
    assert ObjectForm((("float8_e4m3fn", SHAPE), ("float32", SCALES)), 2 * 4 * 256 * 512 + 2 * 4 * 8 * 4) == FORM
    assert FORM.text == "float8_e4m3fn[2, 4, 256, 512] + float32[2, 4, 8]"
    assert len(form_of([SHAPE] * 100, [E4M3] * 100).text) == 1024


def test_any_dtype_shape_or_order_changes_the_namespace() -> None:
    forms = [
        FORM,
        form_of([SHAPE, SCALES], [E5M2, FP32]),
        form_of([(2, 4, 512, 256), SCALES], [E4M3, FP32]),
        form_of([SCALES, SHAPE], [FP32, E4M3]),
        form_of([SHAPE], [E4M3]),
        form_of([(FORM.nbytes,)], [Dtype("uint8", 1)]),
    ]
    digests = {Space(base(), form).registered.digest for form in forms}
    assert len(digests) == len(forms)
    assert Space(base(), form_of([SHAPE, SCALES], [E4M3, FP32])).registered.digest in digests


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "org/other"},
        {"revision": "2" * 40},
        {"scale": 0.0625},
        {"artifact": "ab" * 32},
        {"codec": 2},
        {"rope": {"rope_theta": 1}},
        {"backend": "other"},
        {"physical": "HND"},
        {"packing": "amx"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_any_field_of_the_description_changes_the_namespace(changed: dict[str, object]) -> None:
    assert Space(base(**changed), FORM).registered.digest != Space(base(), FORM).registered.digest


def test_scales_can_be_read_in_the_namespace_unless_they_are_too_many() -> None:
    settings = Space(base(), FORM).registered.description.rope
    assert settings["k_scale of layer 3"] == ", ".join(["0.0500000007"] * 8)
    many = {f"{layer}.{part}": f32_hex(0.05) * 128 for layer in range(60) for part in "kv"}
    layout = attention(60, 128, 64, engine_tokens=16)
    crowded = [
        description(layout=layout, rule="checkpoint", scales={**many, **more})
        for more in ({}, {"7.k": f32_hex(0.0625) * 128})
    ]
    spaces = [Space(one, FORM) for one in crowded]
    assert not any("scale" in name for name in spaces[0].registered.description.rope)
    assert spaces[0].registered.digest != spaces[1].registered.digest


def test_all_of_a_key_but_its_salt_is_in_the_content_hash() -> None:
    key = Key(bytes(32), "org/m", 0x01000100, 0)
    others = [
        replace(key, chunk_hash=bytes(31) + b"\1"),
        replace(key, chunk_hash=bytes(16)),
        replace(key, model_name="org/n"),
        replace(key, kv_rank=0x02000200),
        replace(key, object_group_id=1),
        replace(key, kv_rank=0, object_group_id=0x01000100),
        replace(key, model_name="org/m1", kv_rank=6777472),
    ]
    assert len({content_hash(one) for one in (key, *others)}) == 1 + len(others)
    assert content_hash(replace(key, cache_salt="a")) == content_hash(key)


def test_a_salt_is_a_context_and_none_is_none() -> None:
    assert context_of("") == NO_CONTEXT
    assert len({context_of(""), context_of("a"), context_of("b")}) == 3


@pytest.mark.parametrize(
    ("nbytes", "pieces"),
    [
        (1, 1),
        (17, 1),
        (MAX_PIECE_BYTES, 1),
        (MAX_PIECE_BYTES + 1, 2),
        (32 * MiB, 2),
        (40 * MiB + 3, 3),
        (1024 * MiB, 64),
    ],
)
def test_an_object_is_cut_into_pieces_that_fit_a_block(nbytes: int, pieces: int) -> None:
    space = Space(base(), form_of([(nbytes,)], [E4M3]))
    assert len(space.cuts) == len(space.ranges) == pieces
    assert [low for low, _ in space.cuts] == [0, *(high for _, high in space.cuts[:-1])] and space.cuts[-1][1] == nbytes
    for part, (low, high) in zip(space.ranges, space.cuts, strict=True):
        assert high - low <= space.registered.extents(part).body_bytes < high - low + 16


def test_spaces_are_made_once_and_are_limited() -> None:
    spaces = Spaces({"org/m": base()})
    assert spaces.find("org/m", FORM) is spaces.find("org/m", FORM)
    assert spaces.find("org/other", FORM) is None
    assert spaces.find("org/m", form_of([(0,)], [E4M3])) is None
    assert spaces.find("org/m", form_of([(MAX_LAYERS * MAX_PIECE_BYTES + 1,)], [E4M3])) is None
    made = [spaces.find("org/m", form_of([(n,)], [E4M3])) for n in range(1, MAX_FORMS + 1)]
    assert made[MAX_FORMS - 2] is not None and made[MAX_FORMS - 1] is None
    assert len(spaces.of_model("org/m")) == MAX_FORMS and spaces.of_model("org/other") == []


def test_the_connector_says_what_it_has() -> None:
    import kvtier.connectors.lmcache as connector

    with pytest.raises(AttributeError, match="Nothing"):
        _ = connector.Nothing
