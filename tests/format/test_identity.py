"""Identity: any field changed changes every key (I1), keys are the same in every process, and what is malformed is
refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import Invalid
from kvtier.format.fingerprint import resolve_revision
from kvtier.format.identity import (
    MAX_DESCRIPTION_BYTES,
    NO_CONTEXT,
    Description,
    HashScheme,
    canonical_json,
    chain_hashes,
    check_revision,
    derive_keys,
    diff,
    f32_hex,
    f64_hex,
    hex_f32,
    namespace_digest,
    pack_scales,
    parse_description,
    request_context,
)
from kvtier.format.layout import STATIC, Group, Layer, Layout, Part, Range, attention, opaque
from tests.support.paths import ROOT

R1, R2 = "1" * 40, "2" * 40


def fit(layout: Layout, value: float = 0.5) -> dict[str, str]:
    """Scales for every static part of a layout."""
    return pack_scales(
        {
            (layer.index, part.name): [value] * (1 if part.granularity == "tensor" else group.heads)
            for group in layout.groups
            for layer in group.layers
            for part in layer.parts
            if part.granularity in STATIC
        }
    )


RICH_LAYOUT = Layout(
    (
        Group(
            "attention",
            2,
            16,
            (Layer(0, (Part("k", 8, "e4m3fn", "head"), Part("v", 6, "e5m2", "token-head", "bf16"))),),
            2,
            128,
        ),
        Group(
            "attention",
            1,
            16,
            (Layer(3, (Part("k", 8, "bf16"), Part("v", 8, "e4m3fn", "tensor"))), Layer(4, (Part("k", 8, "fp16"),))),
        ),
        Group("latent", 1, 64, (Layer(5, (Part("latent", 576, "bf16"), Part("index", 132, "u8"))),)),
        Group("opaque", 1, 16, (Layer(6, (Part("bytes", 100, "u8"),)),), digest="0" * 64),
    )
)
RICH = Description(
    "org/model",
    R1,
    RICH_LAYOUT,
    HashScheme("sha256_cbor", "seed", 16, 1, 32),
    "a" * 64,
    "amax",
    1,
    fit(RICH_LAYOUT),
    {"theta": f64_hex(1e5), "dimensions": 64},
    "plain-1",
    "NHD",
    "avx512",
)


# --- I1: any field changed changes every key


class Refused:
    """Stands for a change that the types do not allow."""


TEXTS = (
    "other",
    "latent",
    "attention",
    "opaque",
    "bf16",
    "fp16",
    "u8",
    "e4m3fn",
    "fp32",
    "head",
    "tensor",
    "channel",
    "none",
    "1" * 64,
    R2,
)


def variants(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, changed copy or Refused) for changes of every field below a value, found by walking the types: no field
    can be forgotten."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            for where, changed in variants(getattr(value, field.name), f"{path}.{type(value).__name__}:{field.name}"):
                yield where, rebuilt(value, field.name, changed)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            for where, changed in variants(item, f"{path}[{i}]"):
                yield where, Refused if changed is Refused else (*value[:i], changed, *value[i + 1 :])
        if len(value) > 1:
            yield f"{path}#shorter", value[:-1]
            yield f"{path}#order", value[::-1]
    elif isinstance(value, Mapping):
        for name in value:
            yield f"{path}.{name}#absent", {k: v for k, v in value.items() if k != name}
            yield f"{path}.{name}#renamed", {("x" + k if k == name else k): v for k, v in value.items()}
            for where, changed in variants(value[name], f"{path}.{name}"):
                yield where, {**value, name: changed}
        yield f"{path}#more", {**value, "more": "x"}
    elif isinstance(value, str):
        for text in (*TEXTS, value + "x", value[:-1] + ("1" if value[-1:] == "0" else "0")):
            if text != value:
                yield path, text
    elif isinstance(value, int):
        yield from ((path, number) for number in (value + 1, value - 1, str(value), None))
    elif value is None:
        yield from ((path, other) for other in (7, "x", "0" * 64, ""))
    else:
        raise AssertionError(f"{path} is of a type this walk does not know: {type(value)}")


def rebuilt(value: Any, name: str, changed: Any) -> Any:
    if changed is Refused:
        return Refused
    try:
        return replace(value, **{name: changed})
    except Invalid:
        if name != "layout":
            return Refused
    try:
        return replace(value, layout=changed, scales=fit(changed))  # the scales follow the layout
    except Invalid:
        return Refused


def keys(description: Description, tenant: str = "local") -> set[bytes]:
    """Keys of two content hashes in every group, under two request contexts."""
    found: set[bytes] = set()
    hashes = bytes(description.hashing.nbytes) + bytes([1]) * description.hashing.nbytes
    for group in range(len(description.layout.groups)):
        resolved = description.layout.resolve(Range(group))
        for context in (NO_CONTEXT, request_context(salt="a")):
            found |= set(
                derive_keys(
                    namespace_digest(description, tenant), resolved, context, hashes, description.hashing.nbytes
                )
            )
    return found


def test_any_field_changed_changes_digest_and_every_key() -> None:
    base = keys(RICH)
    assert len(base) == 16
    reached: dict[str, int] = {}
    seen = {RICH.canonical: RICH.digest}
    for path, changed in variants(RICH, ""):
        fields = re.findall(r"\w+:\w+", path)
        for field in fields:
            reached.setdefault(field, 0)
        if changed is Refused:
            continue
        for field in fields:
            reached[field] += 1
        assert changed.canonical != RICH.canonical, path
        assert changed.digest != RICH.digest, path
        assert seen.setdefault(changed.canonical, changed.digest) == changed.digest
        assert not keys(changed) & base, path
        assert diff(RICH, changed), path
        assert parse_description(changed.canonical) == changed, path
    assert len(set(seen.values())) == len(seen), "different descriptions, different digests"
    every = {
        f"{cls.__name__}:{f.name}"
        for cls in (Description, HashScheme, Layout, Group, Layer, Part)
        for f in dataclasses.fields(cls)
    }
    assert every <= set(reached), f"fields never walked: {sorted(every - set(reached))}"
    assert {field for field in every if not reached[field]} == {"Description:format"}, (
        "only the format of this version is read and written"
    )


def test_every_bit_of_every_scale_counts() -> None:
    digests = {RICH.digest}
    count = 0
    for name, text in RICH.scales.items():
        for bit in range(4 * len(text)):
            changed = f"{int(text, 16) ^ (1 << bit):0{len(text)}x}"
            try:
                other = replace(RICH, scales={**RICH.scales, name: changed})
            except Invalid:
                assert bit % 32 == 31, "only a sign makes a positive scale invalid here"
                continue
            count += 1
            digests.add(other.digest)
    assert len(digests) == count + 1 == 3 * 31 + 1


def test_keys_differ_by_tenant_range_context_and_content() -> None:
    layout = attention(4, 4, 8, engine_tokens=16, dtype="bf16")
    description = Description("m", R1, layout, HashScheme("x", "0", 16))
    halves = [(0, 2), (2, 4), (0, 4), (1, 2)]
    found: set[bytes] = set()
    total = 0
    for tenant, layers, heads, context in product(
        ("local", "other"), halves, halves, (NO_CONTEXT, request_context(b"w"), request_context(salt="w"))
    ):
        derived = derive_keys(
            namespace_digest(description, tenant),
            layout.resolve(Range(0, layers, heads)),
            context,
            bytes(range(64)),
            32,
        )
        assert len(derived) == 2 and all(len(key) == 32 for key in derived)
        found |= set(derived)
        total += 2
    assert len(found) == total == 192


def test_a_description_cannot_be_changed_through_what_it_was_made_from() -> None:
    scales, rope = dict(RICH.scales), dict(RICH.rope)
    made = replace(RICH, scales=scales, rope=rope)
    scales["0.k"] = "3f800000" * 2
    rope["theta"] = "other"
    assert made.digest == RICH.digest
    with pytest.raises(TypeError):
        made.rope["theta"] = "x"  # type: ignore[index]


# --- the bytes behind digests and keys, written down once more

KEPT = {
    "window": attention(2, 2, 8, engine_tokens=16, dtype="bf16", window=4096),
    "excluded": attention(3, 2, 8, engine_tokens=16, engine_blocks=4, granularity="block-head", excluded=(0, 2)),
    "token scales": attention(1, 2, 64, engine_tokens=16, granularity="token-head"),
    "latent": Layout((Group("latent", 1, 64, (Layer(0, (Part("latent", 576, "bf16"),)),), 2),)),
    "opaque": opaque(4096, "ab" * 32, engine_tokens=16, layers=2, engine_blocks=3),
    "groups": Layout(
        (
            Group("attention", 2, 16, (Layer(1, (Part("k", 8, "bf16"), Part("v", 16, "fp16"))),), window=128),
            Group("attention", 1, 32, (Layer(0, (Part("k", 8, "e4m3fn", "channel", "fp16"),)),)),
        )
    ),
}

GOLDEN = {
    "window": "535d93f0d0dc197fff8c42216bb6fad5",
    "excluded": "9b97ae175391cabc6a1e4c1bbb5f45c7",
    "token scales": "1a56163ef2093a92384d2b30a9f2a802",
    "latent": "1b0902820ca15b40f08f98f921fa3331",
    "opaque": "4e034afcdc2f7eb15d90bd8c8c875c29",
    "groups": "c7f54233c8a2be12e665aa2fa20ce878",
}


@pytest.mark.parametrize(("name", "digest"), GOLDEN.items())
def test_every_kind_of_layout_keeps_its_digest(name: str, digest: str) -> None:
    """Blocks that are stored are found under these for ever, and by keys whose range stands in them."""
    description = Description("org/model", R1, KEPT[name], HashScheme("x", "0", 16))
    assert description.digest.hex()[:32] == digest
    assert Layout.from_json(KEPT[name].to_json()) == KEPT[name]


def test_digests_and_keys_are_these_bytes() -> None:
    """A plain second writing of the scheme, and one golden key: stored blocks are found by it for ever."""
    description = Description(
        "org/model", R1, attention(2, 2, 8, engine_tokens=16, dtype="bf16"), HashScheme("x", "0", 16)
    )
    part = '[["k",8,"bf16","none","fp32"],["v",8,"bf16","none","fp32"]]'
    layers = f'[{{"index":0,"parts":{part}}},{{"index":1,"parts":{part}}}]'
    group = (
        '{"digest":null,"engine_blocks":1,"engine_tokens":16,"heads":2,"kind":"attention",'
        f'"layers":{layers},"window":null}}'
    )
    text = (
        '{"artifact":null,"backend":"plain","encoding":{"codec":0,"rule":"none"},"format":1,'
        '"hash":{"algorithm":"x","block_tokens":16,"bytes":32,"lookahead":0,"seed":"0"},'
        f'"layout":{{"groups":[{group}]}},"model":"org/model","packing":null,"physical":"plain","revision":"{R1}",'
        '"rope":{},"scales":{}}'
    )
    assert description.canonical.decode() == text
    assert description.digest == blake2b(text.encode(), digest_size=32, person=b"kvtier.desc.1").digest()
    namespace = namespace_digest(description, "local")
    assert namespace == blake2b(description.digest + b"local", digest_size=32, person=b"kvtier.ns.1").digest()
    context = request_context(b"\x01\x02", "salt")
    expected = struct.pack("<Q", 2) + b"\x01\x02" + struct.pack("<Q", 4) + b"salt"
    assert context == blake2b(expected, digest_size=32, person=b"kvtier.ctx.1").digest()
    (key,) = derive_keys(namespace, (0, 1, 2, 0, 2), context, bytes(range(32)), 32)
    raw = namespace + struct.pack("<5H", 0, 1, 2, 0, 2) + context + bytes(range(32))
    assert key == blake2b(raw, digest_size=32, person=b"kvtier.key.1").digest()
    assert key.hex() == "7d27d882dc78366123897e34e655b449b01102bcb17c4ec0571ba3a0a20bd6e6"


def test_chained_hashes_are_these_bytes_and_skip_the_tail() -> None:
    first, second = chain_hashes(range(39), 16)
    one = blake2b(bytes(32) + struct.pack("<16I", *range(16)), digest_size=32, person=b"kvtier.chain.1").digest()
    assert first == one
    assert (
        second == blake2b(one + struct.pack("<16I", *range(16, 32)), digest_size=32, person=b"kvtier.chain.1").digest()
    )
    assert chain_hashes(range(15), 16) == [] and len(chain_hashes(range(48), 16)) == 3
    assert chain_hashes(range(32), 16, b"seed")[0] != first
    assert chain_hashes([99, *range(1, 32)], 16)[1] != second, "a hash covers everything before it"
    for tokens, size in (([-1] * 16, 16), ([2**32] * 16, 16), (range(16), 0), (range(16), -1)):
        with pytest.raises(Invalid):
            chain_hashes(tokens, size)


@pytest.mark.long
@given(st.lists(st.tuples(st.binary(max_size=40), st.text(max_size=10)), min_size=2, max_size=8, unique=True))
def test_contexts_differ_unless_they_are_equal(pairs: list[tuple[bytes, str]]) -> None:
    contexts = {request_context(adapter, salt) for adapter, salt in pairs}
    assert len(contexts) == len(pairs)


def test_absent_and_empty_are_one_context() -> None:
    assert request_context() == request_context(b"", "") == request_context(None, None) == NO_CONTEXT == bytes(32)
    assert request_context(b"a", "") != request_context(b"", "a") != request_context(b"a")
    assert request_context(b"ab", "c") != request_context(b"a", "bc")
    assert request_context(salt="\udc80") != request_context(salt="?"), (
        "text that is not UTF-8 is not folded into other text"
    )
    for adapter, salt in (
        (b"", 1),
        (b"", True),
        (b"", 1.0),
        (b"", ()),
        (b"", ("a", None)),
        (5, ""),
        ("a", ""),
        (b"", b"a"),
    ):
        with pytest.raises(Invalid, match="an adapter digest is bytes and a salt is text"):
            request_context(adapter, salt)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("namespace", "context", "hashes", "nbytes"),
    [
        (bytes(31), bytes(32), b"", 32),
        (bytes(32), b"", b"", 32),
        (bytes(32), bytes(32), bytes(33), 32),
        (bytes(32), bytes(32), b"", 0),
        (bytes(32), bytes(32), b"", 65),
    ],
)
def test_keys_are_made_of_whole_hashes(namespace: bytes, context: bytes, hashes: bytes, nbytes: int) -> None:
    with pytest.raises(Invalid):
        derive_keys(namespace, (0, 0, 1, 0, 1), context, hashes, nbytes)


# --- numbers


@given(st.floats(width=32))
def test_an_f32_is_its_bits(value: float) -> None:
    text = f32_hex(value)
    assert len(text) == 8 and struct.pack(">f", hex_f32(text)) == struct.pack(">f", value)


def test_numbers_are_told_apart_by_their_bits() -> None:
    assert f32_hex(1.0) == "3f800000" and f64_hex(1.0) == "3ff0000000000000"
    assert f32_hex(0.0) != f32_hex(-0.0) and f64_hex(0.1) != f64_hex(0.1 + 2**-56)
    assert pack_scales({(1, "k"): [1.0, 0.5], (0, "v"): [2.0]}) == {"1.k": "3f8000003f000000", "0.v": "40000000"}
    with pytest.raises(Invalid, match="does not fit an f32"):
        f32_hex(1e39)


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"revision": "main"}, "resolve a branch to its commit"),
        ({"revision": ""}, "revision must be a commit"),
        ({"revision": "/models/m"}, "fingerprint a local directory"),
        ({"revision": "A" * 40}, "revision must be a commit"),
        ({"revision": R1 + "\n"}, "revision must be a commit"),
        ({"revision": None}, "revision must be a commit"),
        ({"revision": "fingerprint:" + "g" * 64}, "revision must be a commit"),
        ({"model": ""}, "model must be"),
        ({"model": "a\0b"}, "model must be"),
        ({"model": "a\nb"}, "model must be"),
        ({"model": "x" * 1025}, "model must be"),
        ({"model": "\ud800"}, "model must be"),
        ({"model": 5}, "model must be"),
        ({"rule": ""}, "rule must be"),
        ({"backend": None}, "backend must be"),
        ({"physical": "\t"}, "physical must be"),
        ({"packing": ""}, "packing must be"),
        ({"artifact": "a" * 63}, "artifact must be null or 64"),
        ({"artifact": "A" * 64}, "artifact must be null or 64"),
        ({"artifact": b"a" * 64}, "artifact must be null or 64"),
        ({"codec": -1}, "codec"),
        ({"codec": True}, "codec"),
        ({"codec": 65536}, "codec"),
        ({"hashing": HashScheme("", "0", 16)}, "hash.algorithm"),
        ({"hashing": HashScheme("x", "", 16)}, "hash.seed"),
        ({"hashing": HashScheme("x", "0", 0)}, "hash.block_tokens"),
        ({"hashing": HashScheme("x", "0", 16, -1)}, "hash.lookahead"),
        ({"hashing": HashScheme("x", "0", 16, 0, 7)}, "hash.bytes"),
        ({"hashing": HashScheme("x", "0", 16, 0, 65)}, "hash.bytes"),
        ({"hashing": HashScheme("x", "0", 16.0)}, "hash.block_tokens"),  # type: ignore[arg-type]
        ({"rope": {"theta": 1e5}}, "a float goes through f64_hex"),
        ({"rope": {"theta": True}}, "rope.theta must be text or an integer"),
        ({"rope": {"theta": None}}, "rope.theta must be text or an integer"),
        ({"rope": {"": "x"}}, "rope field"),
        ({"rope": {"theta": "x" * 1025}}, "rope.theta"),
        ({"rope": {f"field{i}": "x" * 1024 for i in range(256)}}, f"at most {MAX_DESCRIPTION_BYTES} bytes"),
        ({"format": 2}, "format 1, not 2"),
        ({"format": True}, "format 1, not True"),
    ],
)
def test_fields_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        replace(RICH, **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.k": None}, "odd: 0.k"),
        ({"0.v": "3f000000"}, "odd: 0.v"),
        ({"9.k": "3f000000"}, "odd: 9.k"),
        ({"0.k": "3f000000"}, "2 times 8 lower-case hex"),
        ({"3.v": "3f0000003f000000"}, "1 times 8 lower-case hex"),
        ({"3.v": "3F000000"}, "lower-case hex"),
        ({"3.v": 5}, "lower-case hex"),
        ({"3.v": "00000000"}, "scale 0 of 3.v must be finite and greater than 0, not 0.0"),
        ({"3.v": "80000000"}, "greater than 0, not -0.0"),
        ({"3.v": "bf800000"}, "greater than 0, not -1.0"),
        ({"3.v": "7f800000"}, "finite and greater than 0, not inf"),
        ({"3.v": "ff800000"}, "finite and greater than 0, not -inf"),
        ({"0.k": "3f0000007fc00000"}, "scale 1 of 0.k must be finite and greater than 0, not nan"),
    ],
)
def test_scales_are_checked(change: dict[str, Any], message: str) -> None:
    scales = {name: text for name, text in {**RICH.scales, **change}.items() if text is not None}
    with pytest.raises(Invalid, match=message):
        replace(RICH, scales=scales)
    for name, text in (("3.v", "00000001"), ("3.v", "7f7fffff")):
        assert replace(RICH, scales={**RICH.scales, name: text}).scales[name] == text, "smallest and largest f32"


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


def spoiled(path: tuple[Any, ...], *value: Any) -> bytes:
    """RICH as JSON with the value at `path` replaced, or removed if none is given."""
    data = copy.deepcopy(RICH.to_json())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    if value:
        inner[path[-1]] = value[0]
    else:
        del inner[path[-1]]
    return canonical_json(data)


@pytest.mark.parametrize("path", list(places(RICH.to_json())), ids=lambda path: ".".join(map(str, path)))
def test_every_field_is_checked_when_read(path: tuple[Any, ...]) -> None:
    """A wrong value anywhere is refused by name or is another description with another digest; nothing else is
    raised."""
    outcomes = []
    for wrong in (
        None,
        True,
        False,
        -1,
        0,
        1.5,
        2**31,
        2**63 - 1,
        10**400,
        "",
        "\0",
        "x",
        [],
        {},
        [[]],
        {"a": 1},
        ["x"] * 2000,
        float("nan"),
    ):
        raw = spoiled(path, wrong)
        if raw == RICH.canonical:
            continue
        try:
            found = parse_description(raw)
        except Invalid as error:
            outcomes.append(str(error))
        else:
            assert found.canonical == raw and found.digest != RICH.digest
    assert len(outcomes) >= 9 and all(outcomes)
    if isinstance(path[-1], str) and path[0] != "rope":
        with pytest.raises(Invalid, match=r"lacks|odd:"):
            parse_description(spoiled(path))
        with pytest.raises(Invalid, match=r"unknown fields|odd:"):
            parse_description(spoiled((*path[:-1], "zzz"), 1))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"hello",
        b"\xff\xfe\x00",
        b"\x80\x04K\x01.",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"1" * 5000,
        RICH.canonical[:-1],
        RICH.canonical + b"}",
        RICH.canonical + b" ",
        b" " + RICH.canonical,
        RICH.canonical.replace(b":", b": ", 1),
        RICH.canonical.replace(b'"amax"', b'"\\u0061max"'),
        RICH.canonical.replace(b'"codec":1', b'"codec":1.0'),
        RICH.canonical.replace(b'"codec":1', b'"codec":1e0'),
        b'{"format":1,' + RICH.canonical[1:],
        RICH.canonical.replace(b'{"artifact"', b'{"tenant":"root","artifact"'),
        RICH.canonical.decode().encode("utf-16"),
        b"x" * (MAX_DESCRIPTION_BYTES + 1),
    ],
)
def test_a_description_has_one_form(raw: bytes) -> None:
    with pytest.raises(Invalid):
        parse_description(raw)


@given(st.integers(0, len(RICH.canonical) - 1), st.integers(1, 255))
def test_a_damaged_description_is_refused_or_another(position: int, flip: int) -> None:
    raw = bytearray(RICH.canonical)
    raw[position] ^= flip
    try:
        found = parse_description(bytes(raw))
    except Invalid:
        return
    assert found.canonical == raw and found.digest != RICH.digest


def test_names_beyond_ascii_are_kept_apart_and_round_trip() -> None:
    composed, decomposed = replace(RICH, model="caf\u00e9"), replace(RICH, model="cafe\u0301")
    assert composed.canonical.isascii() and composed.digest != decomposed.digest
    assert parse_description(composed.canonical).model == "caf\u00e9"
    assert json.loads(composed.canonical)["model"] == "caf\u00e9"


@pytest.mark.parametrize("tenant", ["", "a\nb", "x" * 1025, None, 5])
def test_tenants_are_checked(tenant: Any) -> None:
    with pytest.raises(Invalid, match="tenant"):
        namespace_digest(RICH, tenant)


# --- differences in words


def test_differences_name_the_field_and_both_values() -> None:
    assert diff(RICH, RICH) == []
    live = replace(RICH, revision=R2, rope={"theta": f64_hex(1e6), "dimensions": 64}, packing=None)
    assert [str(d) for d in diff(RICH, live)] == [
        "packing: avx512 stored, null live",
        f"revision: {R1} stored, {R2} live",
        f"rope.theta: {f64_hex(1e5)} stored, {f64_hex(1e6)} live",
    ]
    live = replace(RICH, scales={**RICH.scales, "0.k": f32_hex(0.5) + f32_hex(0.0312), "3.v": f32_hex(1.0)})
    assert [str(d) for d in diff(RICH, live)] == [
        "k_scale of layer 0, head 1: 0.5 stored, 0.0311999992 live",
        "v_scale of layer 3: 0.5 stored, 1 live",
    ]
    fewer = Layout(RICH_LAYOUT.groups[1:])
    found = [str(d) for d in diff(RICH, replace(RICH, layout=fewer, scales=fit(fewer)))]
    assert found[0].startswith("layout.groups: [") and found[1] == "k_scale of layer 0: 2 values stored, absent live"


def test_a_long_list_of_differences_is_cut() -> None:
    layout = attention(40, 2, 8, engine_tokens=16)
    stored, live = (
        Description("m", R1, layout, HashScheme("x", "0", 16), scales=fit(layout, value)) for value in (0.5, 1.0)
    )
    found = diff(stored, live)
    assert len(found) == 51 and str(found[-1]) == "and 110 more fields: ... stored, ... live"
    assert len(diff(stored, live, most=160)) == 160


# --- cases


def test_kvb_06_same_bytes_other_layout() -> None:
    """Equal sizes, other order: another namespace. Ranges of other ranks: another key under the same namespace."""
    layout = attention(2, 16, 8, engine_tokens=16, dtype="fp16")
    base = Description("m", R1, layout, HashScheme("x", "0", 16), physical="NHD")
    group = layout.groups[0]
    swapped = Layout((replace(group, layers=tuple(Layer(layer.index, layer.parts[::-1]) for layer in group.layers)),))
    interleaved = Layout(
        (replace(group, layers=tuple(Layer(layer.index, (Part("kv", 16, "fp16"),)) for layer in group.layers)),)
    )
    reordered = Layout((replace(group, layers=group.layers[::-1]),))
    per_layer = Layout(tuple(replace(group, layers=(layer,)) for layer in group.layers))
    others = [replace(base, physical="HND"), replace(base, physical="cross-layer")]
    others += [replace(base, layout=other) for other in (swapped, interleaved, reordered, per_layer)]
    assert all(other.layout.extents().body_bytes == layout.extents().body_bytes for other in others[:-1]), (
        "sizes cannot tell"
    )
    assert len({base.digest, *(other.digest for other in others)}) == 7
    every = [keys(description) for description in (base, *others)]
    assert len(set().union(*every)) == sum(map(len, every))
    assert [str(d) for d in diff(base, others[0])] == ["physical: NHD stored, HND live"]

    namespace = namespace_digest(base, "local")
    ranges = [Range(), Range(heads=(0, 8)), Range(heads=(8, 16)), Range(layers=(0, 1)), Range(layers=(1, 2))]
    found = [derive_keys(namespace, layout.resolve(range_), NO_CONTEXT, bytes(32), 32)[0] for range_ in ranges]
    assert len(set(found)) == 5, "TP=1, both ranks of TP=2, both ranks of PP=2"
    assert (
        layout.extents(ranges[1]).body_bytes == layout.extents(ranges[2]).body_bytes == layout.extents().body_bytes // 2
    )


def test_kvb_08_model_updated_under_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = attention(2, 2, 8, engine_tokens=16)
    hashes = b"".join(bytes([n]) * 32 for n in range(1, 9))

    def namespace_keys(model: str, revision: str, scale: float) -> list[bytes]:
        description = Description(
            model, revision, layout, HashScheme("x", "0", 16), "a" * 64, "amax", 1, fit(layout, scale)
        )
        return derive_keys(namespace_digest(description, "local"), layout.resolve(Range()), NO_CONTEXT, hashes, 32)

    stored = set(namespace_keys("org/m", R1, 0.5))
    assert len(stored) == 8
    assert not stored & set(namespace_keys("org/m", R2, 0.5)), "another revision"
    assert not stored & set(namespace_keys("org/m", R1, 0.25)), "other scales"
    assert stored == set(namespace_keys("org/m", R1, 0.5))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    local = tmp_path / "models" / "m"
    local.mkdir(parents=True)
    (local / "model.bin").write_bytes(b"a" * 100)
    before = set(namespace_keys(*resolve_revision(str(local)), 0.5))
    assert before == set(namespace_keys(*resolve_revision(str(local)), 0.5))
    (local / "model.bin").write_bytes(b"b" * 100)
    assert not before & set(namespace_keys(*resolve_revision(str(local)), 0.5)), "weights replaced in place"

    hub = tmp_path / "hub" / "models--org--m"
    found = []
    for commit in (R1, R2):
        (hub / "refs").mkdir(parents=True, exist_ok=True)
        (hub / "snapshots" / commit).mkdir(parents=True)
        (hub / "refs" / "main").write_text(commit)
        found.append(set(namespace_keys(*resolve_revision("org/m", "main"), 0.5)))
    assert found[0] == stored and not found[0] & found[1], "main is the commit it points to, before and after it moves"
    for branch_or_path in ("main", str(local), ""):
        with pytest.raises(Invalid):
            check_revision(branch_or_path)


def interpreters() -> list[str]:
    """This interpreter and whichever other supported versions start on this machine; floor 0 up to identity needs the
    standard library only."""
    found = [sys.executable]
    for name in ("python3.11", "python3.12", "python3.13"):
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", ""], capture_output=True, timeout=30, check=False).returncode == 0:
            found.append(path)
    return found


@pytest.mark.long
def test_kvb_10_every_process_derives_the_same_keys() -> None:
    """50 fresh interpreters, hash seeds unset, 0, 1 and random. Values that Python holds to be equal are refused or
    kept apart."""
    available = interpreters()
    outputs = set()
    for i in range(50):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        environment["PYTHONPATH"] = str(ROOT)
        seed = (None, "0", "1", "random")[i % 4]
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        command = [available[i % len(available)], "-S", str(ROOT / "tests/support/programs/derive_keys.py")]
        outputs.add(
            subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
        )
    assert len(outputs) == 1
    lines = [line.rsplit(" ", 1) for line in outputs.pop().splitlines()]
    assert len(lines) == 24
    refused = {name for name, key in lines if key == "Invalid"}
    unsure = ("()", "('a', None)", "True", "1.0")
    assert refused == {f"{place} {value}" for place in ("salt", "rope") for value in unsure} | {"salt 1", "rope None"}
    found: dict[str, list[str]] = {}
    for name, key in lines:
        if key != "Invalid":
            found.setdefault(key, []).append(name)
    shared = [names for names in found.values() if len(names) > 1]
    assert shared == [["salt None", "salt ''"]], "absent and empty are one; everything else differs"
