"""The bytes of a block: the page docs/format.md is true, and every way to be malformed is refused by name. All bytes
here are made by hand."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import numpy as np
import pytest
import xxhash

from kvtier.errors import Lost
from kvtier.format import block, layout
from kvtier.format.identity import DIGEST_BYTES, HASH_BYTES, NO_CONTEXT, derive_keys
from kvtier.format.layout import MAX_BLOCK_BYTES, SLOT_ALIGN, Group, Layer, Layout, Part, Range
from kvtier.format.views import part_view, scale_view
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "format.md").read_text("utf-8")
KEY, NAMESPACE, CONTEXT, HASH = bytes(range(32)), b"n" * 32, b"c" * 32, b"h" * 20
BODY = 544  # of the page's example: one layer, two heads of width 8, 16 tokens

# field -> (offset, form, value): the header of the example, as the page gives it
FIELDS: dict[str, tuple[int, str, int | bytes]] = {
    "magic": (0, "8s", b"KVTIER\r\n"),
    "version": (8, "<H", 1),
    "hash bytes": (10, "<H", len(HASH)),
    "group": (12, "<H", 0),
    "layer_lo": (14, "<H", 0),
    "layer_hi": (16, "<H", 1),
    "head_lo": (18, "<H", 0),
    "head_hi": (20, "<H", 2),
    "nbytes": (24, "<Q", 256 + BODY),
    "key": (32, "32s", KEY),
    "namespace": (64, "32s", NAMESPACE),
    "context": (96, "32s", CONTEXT),
    "content hash": (128, "64s", HASH),
    "tokens": (192, "<I", 16),
    "scales": (196, "<I", 256),
    "payload": (200, "<I", 272),
}


def raw(**changed: int | bytes) -> bytearray:
    """The example's block, written field by field; names in `changed` have _ for spaces."""
    made = bytearray(256 + BODY)
    made[256:] = bytes(i % 113 for i in range(BODY))
    for name, (offset, form, value) in FIELDS.items():
        struct.pack_into(form, made, offset, changed.pop(name.replace(" ", "_"), value))
    assert not changed
    return made


def example() -> Layout:
    return layout.attention(1, 2, 8, engine_tokens=16, granularity="block-head")


# --- the page


def table(heading: str) -> list[list[str]]:
    """Rows of the first table under a heading of the page, without its head."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    return rows[2:]


def test_the_page_lists_every_byte_of_the_header() -> None:
    end = 0
    for offset, size, *_ in table("Header"):
        assert int(offset) == end, "a hole in the table"
        end += int(size)
    assert end == layout.HEADER_BYTES == 256
    listed = {name: (int(offset), int(size)) for offset, size, name, _ in table("Header") if name != "zero"}
    assert listed == {name: (offset, struct.calcsize(form)) for name, (offset, form, _) in FIELDS.items()}


def test_the_page_tells_the_limits_of_the_code() -> None:
    numbers = {int(n.replace(",", "")) for n in re.findall(r"\b\d[\d,]*\b", PAGE.split("\n## Header\n")[1])}
    for limit in (
        MAX_BLOCK_BYTES,
        layout.MAX_GROUPS,
        layout.MAX_LAYERS,
        layout.MAX_HEADS,
        layout.MAX_TOKENS,
        layout.MAX_WIDTH,
        SLOT_ALIGN,
        *HASH_BYTES,
    ):
        assert limit in numbers, limit
    assert MAX_BLOCK_BYTES == (16 << 20) + 256 and DIGEST_BYTES == 32


def test_the_example_of_the_page_is_what_the_layout_says() -> None:
    extents = example().extents()
    assert (extents.head_stride, extents.block_bytes, extents.slot_bytes) == (272, 800, 4096)
    assert (extents.scales, extents.data) == (((0, 4),), ((16, 144),))
    offsets = re.findall(r"^ *(\d+)  ", PAGE.split("\n## Example\n")[1], re.MULTILINE)
    assert [int(offset) for offset in offsets] == [0, 256, 260, 264, 272, 400, 528, 800]


@pytest.mark.parametrize("granularity", sorted(layout.GRANULARITIES - {"none"}))
def test_sizes_follow_the_formulas_of_the_page(granularity: str) -> None:
    group = Group(
        "attention",
        heads=3,
        engine_tokens=5,
        engine_blocks=2,
        layers=(
            Layer(0, (Part("k", 7, "e4m3fn", granularity, "bf16"), Part("v", 9, "bf16"))),
            Layer(1, (Part("k", 3, "fp32"), Part("v", 1, "e5m2", granularity))),
        ),
    )
    scales = {"tensor": (1, 1), "head": (1, 1), "block-head": (2, 2), "token-head": (10, 10), "channel": (14, 2)}[
        granularity
    ]
    runs = [pad(2 * scales[0]) + pad(70) + pad(180), pad(4 * scales[1]) + pad(120) + pad(10)]
    extents = Layout((group,)).extents()
    assert extents.head_stride == sum(runs)
    assert extents.block_bytes == 256 + 3 * sum(runs)
    assert extents.data[1][0] == runs[0] + pad(4 * scales[1])


def pad(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def test_scales_and_elements_stand_where_the_page_says() -> None:
    body = np.frombuffer(bytes(raw()[256:]), np.uint8)
    extents = example().extents()
    for head in (0, 1):
        start = 272 * head
        for part, (scale, data) in enumerate(((0, 16), (4, 144))):
            assert (
                scale_view(body, extents, 0, part)[head].tobytes() == body[start + scale : start + scale + 4].tobytes()
            )
            assert (
                part_view(body, extents, 0, part)[head].tobytes() == body[start + data : start + data + 128].tobytes()
            )


# --- writing


def test_headers_are_the_bytes_of_the_page() -> None:
    extents = example().extents()
    template = block.header_template(NAMESPACE, (0, 0, 1, 0, 2), CONTEXT, extents, len(HASH))
    other_key, other_hash = b"k" * 32, b"g" * len(HASH)
    rows = block.headers(template, [KEY, other_key], [HASH, other_hash])
    assert rows.shape == (2, 256) and rows.dtype == np.uint8
    assert rows[0].tobytes() == raw()[:256]
    assert rows[1].tobytes() == raw(key=other_key, content_hash=other_hash)[:256]


def test_a_header_of_every_kind_of_layout_is_read_back() -> None:
    latent = Group("latent", 1, 16, (Layer(0, (Part("latent", 576, "bf16"),)), Layer(1, (Part("record", 656, "u8"),))))
    opaque = Group("opaque", 1, 544, (Layer(2, (Part("bytes", 1000, "u8"),)),), digest="ab" * 32)
    mixed = Group(
        "attention", 8, 16, (Layer(3, (Part("k", 192, "bf16"), Part("v", 128, "e4m3fn", "channel", "fp16"))),), 4
    )
    whole = Layout((latent, opaque, mixed))
    for range_ in (Range(0), Range(0, (1, 2)), Range(1), Range(2), Range(2, (0, 1), (3, 5))):
        extents, resolved = whole.extents(range_), whole.resolve(range_)
        for nbytes in HASH_BYTES:
            (key,) = derive_keys(NAMESPACE, resolved, NO_CONTEXT, b"x" * nbytes, nbytes)
            template = block.header_template(NAMESPACE, resolved, NO_CONTEXT, extents, nbytes)
            bytes_ = block.headers(template, [key], [b"x" * nbytes]).tobytes() + bytes(extents.body_bytes)
            found = block.verify(bytes_, key)
            assert (found.resolved, found.nbytes, found.tokens) == (resolved, extents.block_bytes, extents.group.tokens)
            assert (found.namespace, found.context, found.content_hash) == (NAMESPACE, NO_CONTEXT, b"x" * nbytes)
            assert (found.scales, found.payload) == (256, 256 + extents.data[0][0])


# --- reading: what is whole


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_a_whole_block_passes_in_any_buffer(form: Callable[[bytearray], bytes | bytearray | memoryview]) -> None:
    made = raw()
    before = bytes(made)
    header = block.verify(form(made), KEY, xxhash.xxh3_64_intdigest(bytes(made)))
    assert header.key == KEY and header.content_hash == HASH and header.hash_bytes == 20
    assert made == before, "checking changed the block"


def test_the_checksum_is_xxh3_64_over_header_and_body() -> None:
    made = bytes(raw())
    assert block.digest(made) == xxhash.xxh3_64_intdigest(made)
    assert block.digest(b"") == 0x2D06800538D394C2, "seed 0: the published value for no bytes"


@pytest.mark.parametrize(
    "field",
    [
        "group",
        "layer_lo",
        "layer_hi",
        "head_lo",
        "head_hi",
        "tokens",
        "payload",
        "hash_bytes",
        "namespace",
        "context",
        "content_hash",
        "key",
    ],
)
def test_the_largest_values_are_read(field: str) -> None:
    extreme: dict[str, int | bytes] = {
        "group": 63,
        "layer_lo": 0,
        "layer_hi": 1024,
        "head_lo": 1,
        "head_hi": 1024,
        "tokens": 65536,
        "payload": 784,
        "hash_bytes": 64,
        "namespace": b"\xff" * 32,
        "context": b"\xff" * 32,
        "content_hash": b"\xff" * 20,
        "key": b"\xff" * 32,
    }
    block.parse_header(raw(**{field: extreme[field]}))


def test_the_largest_block_is_read() -> None:
    block.parse_header(raw(nbytes=MAX_BLOCK_BYTES))


# --- reading: a test for each way to be malformed


def refused(made: bytes | bytearray, words: str) -> None:
    """`made` is refused with these words, by both doors, and unchanged."""
    before = bytes(made)
    with pytest.raises(Lost, match=words):
        block.parse_header(made)
    with pytest.raises(Lost, match=words):
        block.verify(made, KEY, block.digest(bytes(made)))
    assert made == before


@pytest.mark.parametrize("length", [0, 1, 8, 255])
def test_shorter_than_a_header(length: int) -> None:
    refused(raw()[:length], f"at least 256 bytes, not {length}")


@pytest.mark.parametrize(
    "magic",
    [
        bytes(8),
        b"KVTIER\n\n",
        b"KVTIER\n\r",
        b"kvtier\r\n",
        b"\x80\x04\x95\x00\x00\x00\x00\x00",
        b"\x7f" * 8,
        b"PK\x03\x04\x00\x00\x00\x00",
    ],
    ids=repr,
)
def test_another_magic(magic: bytes) -> None:
    """Zeros, line ends in text mode, another case, a pickle, poison, an archive as torch writes it."""
    refused(raw(magic=magic), "not a block")


@pytest.mark.parametrize("version", [0, 2, 256, 65535])
def test_another_version(version: int) -> None:
    refused(raw(version=version), f"version {version}; this version reads 1")


@pytest.mark.parametrize("nbytes", [0, 7, 65, 65535])
def test_a_content_hash_of_impossible_length(nbytes: int) -> None:
    refused(raw(hash_bytes=nbytes, content_hash=b""), f"content hash of {nbytes} bytes")


@pytest.mark.parametrize("at", [22, 23, *range(204, 256), *range(128 + len(HASH), 192)])
def test_a_byte_that_must_be_zero(at: int) -> None:
    made = raw()
    made[at] = 1
    refused(made, "reserved bytes")


@pytest.mark.parametrize(
    "range_",
    [
        {"layer_lo": 1},
        {"layer_hi": 0},
        {"layer_lo": 5, "layer_hi": 4},
        {"layer_hi": 1025},
        {"head_lo": 2},
        {"head_hi": 0},
        {"head_lo": 3},
        {"head_hi": 1025},
        {"head_lo": 65535, "head_hi": 65535},
        {"group": 64},
        {"group": 65535},
    ],
    ids=str,
)
def test_an_empty_or_impossible_range(range_: dict[str, int]) -> None:
    refused(raw(**range_), "no such range")


@pytest.mark.parametrize("tokens", [0, 65537, 2**31, 2**32 - 1])
def test_impossible_tokens(tokens: int) -> None:
    refused(raw(tokens=tokens), f"a block of {tokens} tokens")


@pytest.mark.parametrize("nbytes", [0, 255, 256, 257, 272, 801, MAX_BLOCK_BYTES + 16, 2**31, 2**63 - 1, 2**64 - 1])
def test_impossible_nbytes(nbytes: int) -> None:
    refused(raw(nbytes=nbytes), "sizes that do not fit")


@pytest.mark.parametrize("scales", [0, 255, 272, 2**32 - 1])
def test_scales_that_do_not_follow_the_header(scales: int) -> None:
    refused(raw(scales=scales), "sizes that do not fit")


@pytest.mark.parametrize("payload", [0, 240, 255, 257, 264, 800, 816, 2**32 - 1])
def test_a_payload_outside_or_off_its_alignment(payload: int) -> None:
    refused(raw(payload=payload), "sizes that do not fit")


@pytest.mark.parametrize("change", [-544, -1, 1, 3296])
def test_a_length_that_is_not_nbytes(change: int) -> None:
    """Truncated behind the header, one byte short, one byte over, and with the rest of its slot."""
    made = raw()
    made = made[:change] if change < 0 else made + bytes(change)
    with pytest.raises(Lost, match=f"block of 800 bytes in {800 + change}"):
        block.verify(made, KEY, block.digest(bytes(made)))
    assert block.parse_header(made).nbytes == 800, "the header alone cannot tell"


@pytest.mark.parametrize("at", [0, 15, 31])
def test_a_whole_block_of_another_key(at: int) -> None:
    """Misdirected, or a stale copy of another key's slot: its checksum is right for what it is, so the key has to
    tell."""
    made = raw()
    wanted = bytearray(KEY)
    wanted[at] ^= 1
    with pytest.raises(Lost, match="another key"):
        block.verify(made, bytes(wanted), block.digest(bytes(made)))


def test_any_flipped_byte_is_noticed_with_a_checksum() -> None:
    made = raw()
    right = block.digest(bytes(made))
    for at in range(len(made)):
        made[at] ^= 0x40
        with pytest.raises(Lost):
            block.verify(made, KEY, right)
        made[at] ^= 0x40
    block.verify(made, KEY, right)


def test_without_a_checksum_the_body_is_not_read() -> None:
    made = raw()
    made[300] ^= 1
    block.verify(made, KEY)
    with pytest.raises(Lost, match="checksum"):
        block.verify(made, KEY, block.digest(bytes(raw())))


def test_a_checksum_of_zero_is_a_checksum() -> None:
    with pytest.raises(Lost, match="instead of 0000000000000000"):
        block.verify(raw(), KEY, 0)
