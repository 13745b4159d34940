"""Keys of one namespace under salts and rope settings of every kind, one a line: the same from every interpreter.
Needs the standard library only."""

from __future__ import annotations

from typing import Any

from kvtier.errors import Invalid
from kvtier.format.identity import (
    CHAIN,
    Description,
    HashScheme,
    chain_hashes,
    derive_keys,
    namespace_digest,
    request_context,
)
from kvtier.format.layout import Range, attention

NAMES: tuple[Any, ...] = (None, "", "None", (), ("a", None), 1, True, 1.0, "1", "True", "1.0", "()")

layout = attention(2, 2, 8, engine_tokens=16, dtype="bf16")
hashes = b"".join(chain_hashes(range(256), 16))
for extras in NAMES:
    for place in ("salt", "rope"):
        try:
            rope = {"x": extras} if place == "rope" else {}
            description = Description("m", "1" * 40, layout, HashScheme(CHAIN, "0", 16), rope=rope)
            context = request_context(salt=extras) if place == "salt" else bytes(32)
            keys = derive_keys(namespace_digest(description, "local"), layout.resolve(Range()), context, hashes, 32)
            print(place, repr(extras), b"".join(keys).hex())
        except Invalid:
            print(place, repr(extras), "Invalid")
