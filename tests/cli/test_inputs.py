"""What commands are given: token ids, ranges, request contexts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.cli.inputs import chain_seed, context_of, read_tokens, span, token_hashes
from kvtier.errors import Invalid
from kvtier.format.identity import CHAIN, Description, HashScheme, chain_hashes, request_context
from kvtier.format.layout import attention


def test_tokens_make_the_documented_chain(tmp_path: Path) -> None:
    described = Description(
        "m",
        "1" * 40,
        attention(2, 2, 8, engine_tokens=4, dtype="bf16", engine_blocks=2),
        HashScheme(CHAIN, "0" * 64, 4),
    )
    assert token_hashes(described, 0, range(21)) == chain_hashes(range(21), 4)[1::2], (
        "a block of two engine blocks has the last one's hash"
    )
    engine = Description(
        "m", "1" * 40, attention(2, 2, 8, engine_tokens=4, dtype="bf16"), HashScheme("sha256_cbor", "0", 4)
    )
    with pytest.raises(Invalid, match="made by 'sha256_cbor', which only its engine can do"):
        token_hashes(engine, 0, range(8))
    assert chain_seed("0" * 64) == bytes(32) and chain_seed("0") == b"0" and chain_seed("ü") == "ü".encode()
    path = tmp_path / "t"
    for text in ("1 2 3", "[1, 2,3]\n", "1,2,\n3"):
        path.write_text(text)
        assert read_tokens(path) == [1, 2, 3]
    for text in ("", "[]", "1 -2", "1.5", "0x3", "99999999999", "ü"):
        path.write_text(text)
        with pytest.raises(Invalid):
            read_tokens(path)


def test_spans_and_contexts() -> None:
    assert [span(text, "heads") for text in (":", "3:", ":4", "3:4")] == [(0, None), (3, None), (0, 4), (3, 4)]
    assert context_of("", "", None) == bytes(32) and context_of("ab" * 32, "", None) == bytes.fromhex("ab" * 32)
    assert context_of("", "abcd", None) == request_context(bytes.fromhex("abcd"), None)
    for wrong in (("AB" * 32, "", None), ("ab" * 32, "ab", None), ("", "abc", None)):
        with pytest.raises(Invalid):
            context_of(*wrong)
