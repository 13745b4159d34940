"""What makes two blocks interchangeable, and the key that follows from it.

A *description* states everything that must be equal for two blocks to be interchangeable and is constant for one engine
life. Its canonical JSON has a digest; the daemon mixes the tenant in; a block's key is a hash over that, the range, the
request context and the engine's content hash. So isolation holds by construction: a field changed anywhere changes
every key. Pure functions over immutable values.

No floats anywhere: an f32 is 8 hex digits of its bits, an f64 is 16 (`f32_hex`, `f64_hex`), so equality is equality of
bits.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from kvtier.errors import Invalid
from kvtier.format.layout import STATIC, Layout, check_int, fields

FORMAT = 1  # version of the block format and of this schema; a field of every description
MAX_DESCRIPTION_BYTES = 256 * 1024
MAX_TEXT = 1024
MAX_DEPTH = 16  # of brackets in a description, which needs 7
DIGEST_BYTES = 32
HASH_BYTES = (8, 64)  # content hashes of engines have between these many bytes
NO_CONTEXT = bytes(32)

_PERSON_DESCRIPTION = b"kvtier.desc.1"
_PERSON_NAMESPACE = b"kvtier.ns.1"
_PERSON_KEY = b"kvtier.key.1"
_PERSON_CONTEXT = b"kvtier.ctx.1"
_PERSON_CHAIN = b"kvtier.chain.1"
_REVISION = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}|fingerprint:[0-9a-f]{64}")
# a bracket, or a whole string, which may lack its end
_TOKEN = re.compile(rb'[][{}]|"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_ONE = "3f800000"  # 1.0 in the form of `f32_hex`
_HEX64 = re.compile(r"[0-9a-f]{64}")
_RANGE = struct.Struct("<5H")
_FIELDS = (
    "format", "model", "revision", "artifact", "encoding", "scales", "layout", "rope", "hash", "backend", "physical",
    "packing",
)  # fmt: skip


def f32_hex(value: float) -> str:
    """The bits of `value` rounded to f32, as 8 hex digits. Raises Invalid if it is finite and no f32 comes near."""
    try:
        return struct.pack(">f", value).hex()
    except OverflowError:
        raise Invalid(f"{value!r} does not fit an f32") from None


def f64_hex(value: float) -> str:
    """The bits of an f64, as 16 hex digits."""
    return struct.pack(">d", value).hex()


def hex_f32(text: str) -> float:
    """The f32 whose bits are these 8 hex digits."""
    return float(struct.unpack(">f", bytes.fromhex(text))[0])


def canonical_json(data: Any) -> bytes:
    """The one byte string of plain data: JSON, sorted keys, no spaces, ASCII. The caller keeps floats out."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


@dataclass(frozen=True, slots=True)
class HashScheme:
    """How the engine hashes content. Any of these changes silently between engine versions, so all of them are
    identity.

    algorithm     e.g. "sha256_cbor", or CHAIN for `chain_hashes`
    seed          what the chain starts from, as text (a digest, or the seed itself)
    block_tokens  tokens under one hash (the engine's block size)
    lookahead     following tokens that a hash also covers
    nbytes        bytes of one content hash, 8 to 64
    """

    algorithm: str
    seed: str
    block_tokens: int
    lookahead: int = 0
    nbytes: int = 32


CHAIN = "kvtier-chain-1"


@dataclass(frozen=True, slots=True)
class Description:
    """Everything that makes blocks interchangeable and is constant for one engine life.

    model      the model's name
    revision   a commit (40 or 64 hex digits) or "fingerprint:<64 hex>" of local weights; never a branch name or a path
    layout     shapes, order and number format per layer and part
    hashing    how content hashes are made
    artifact   digest of the KV artifact (64 hex digits), None where there is none (always for native KV)
    rule       how scales come about: "static", "amax", ... ("none" for native KV)
    codec      version of the quantizer's rounding and clamping rules, 0 for native KV
    scales     every static scale: {"<layer index>.<part>": 8 hex digits per head (or once for granularity "tensor")}
    rope       settings of the rotary embedding, as text and integers (floats by `f64_hex`)
    backend    the attention backend's cache *format* (not its kernel's name)
    physical   physical cache layout of the engine, e.g. "NHD"
    packing    instruction set and packing of a CPU engine; None where bytes are plain
    """

    model: str
    revision: str
    layout: Layout
    hashing: HashScheme
    artifact: str | None = None
    rule: str = "none"
    codec: int = 0
    scales: Mapping[str, str] = field(default_factory=dict)
    rope: Mapping[str, str | int] = field(default_factory=dict)
    backend: str = "plain"
    physical: str = "plain"
    packing: str | None = None
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT or type(self.format) is not int:
            raise Invalid(f"this version reads and writes format {FORMAT}, not {self.format!r}")
        for name in ("model", "rule", "backend", "physical"):
            check_text(name, getattr(self, name))
        if self.packing is not None:
            check_text("packing", self.packing)
        check_revision(self.revision)
        if self.artifact is not None and not (isinstance(self.artifact, str) and _HEX64.fullmatch(self.artifact)):
            raise Invalid("artifact must be null or 64 lower-case hex digits")
        check_text("hash.algorithm", self.hashing.algorithm)
        check_text("hash.seed", self.hashing.seed)
        for name, value, low, high in (
            ("codec", self.codec, 0, 65535),
            ("hash.block_tokens", self.hashing.block_tokens, 1, 65536),
            ("hash.lookahead", self.hashing.lookahead, 0, 65536),
            ("hash.bytes", self.hashing.nbytes, *HASH_BYTES),
        ):
            check_int(name, value, low, high)
        for name, rope_value in self.rope.items():
            check_text("rope field", name)
            text = isinstance(rope_value, str) and len(rope_value) <= MAX_TEXT and rope_value.isprintable()
            if type(rope_value) is not int and not text:
                wanted = "text or an integer (a float goes through f64_hex)"
                raise Invalid(f"rope.{name} must be {wanted}, not {rope_value!r}")
        _check_scales(self)
        object.__setattr__(self, "scales", MappingProxyType(dict(self.scales)))  # the caller's dicts may change later
        object.__setattr__(self, "rope", MappingProxyType(dict(self.rope)))
        if len(self.canonical) > MAX_DESCRIPTION_BYTES:
            raise Invalid(f"a description has at most {MAX_DESCRIPTION_BYTES} bytes, not {len(self.canonical)}")

    def to_json(self) -> dict[str, Any]:
        """Plain data of the closed schema: what is hashed, sent and stored."""
        return {
            "format": self.format,
            "model": self.model,
            "revision": self.revision,
            "artifact": self.artifact,
            "encoding": {"rule": self.rule, "codec": self.codec},
            "scales": dict(self.scales),
            "layout": self.layout.to_json(),
            "rope": dict(self.rope),
            "hash": {
                "algorithm": self.hashing.algorithm,
                "seed": self.hashing.seed,
                "block_tokens": self.hashing.block_tokens,
                "lookahead": self.hashing.lookahead,
                "bytes": self.hashing.nbytes,
            },
            "backend": self.backend,
            "physical": self.physical,
            "packing": self.packing,
        }

    @classmethod
    def from_json(cls, data: Any) -> Description:
        """The description that `to_json` wrote. Raises Invalid for anything outside the closed schema."""
        version, model, revision, artifact, encoding, scales, layout, rope, hashing, backend, physical, packing = (
            fields(data, "description", *_FIELDS)
        )
        rule, codec = fields(encoding, "encoding", "rule", "codec")
        scheme = HashScheme(*fields(hashing, "hash", "algorithm", "seed", "block_tokens", "lookahead", "bytes"))
        for name, value in (("scales", scales), ("rope", rope)):
            if not isinstance(value, dict):
                raise Invalid(f"{name} must be an object")
        form = (artifact, rule, codec, scales, rope, backend, physical, packing, version)
        return cls(model, revision, Layout.from_json(layout), scheme, *form)

    @property
    def canonical(self) -> bytes:
        """The one byte string of this description: JSON, sorted keys, no spaces, ASCII."""
        return canonical_json(self.to_json())

    @property
    def digest(self) -> bytes:
        """blake2b-256 of the canonical bytes: what client and daemon compare, and what people are shown."""
        return blake2b(self.canonical, digest_size=DIGEST_BYTES, person=_PERSON_DESCRIPTION).digest()


def parse_description(raw: bytes) -> Description:
    """The description in these canonical bytes. Raises Invalid: too long, not JSON, not canonical, not the schema."""
    if len(raw) > MAX_DESCRIPTION_BYTES:
        raise Invalid(f"a description has at most {MAX_DESCRIPTION_BYTES} bytes, not {len(raw)}")
    _check_depth(raw)
    try:
        data = json.loads(raw)
    except ValueError as error:
        raise Invalid(f"a description must be JSON: {error}") from None
    description = Description.from_json(data)
    if description.canonical != raw:
        raise Invalid("the description is not in canonical form (sorted keys, no spaces, no duplicate keys)")
    return description


def _check_depth(raw: bytes) -> None:
    """Raises Invalid beyond MAX_DEPTH brackets: Python 3.13's parser would overrun a small thread's stack and die."""
    if not raw.isascii() or b"\0" in raw:  # else strings would not be where they seem to be
        raise Invalid("a description must be JSON in ASCII, other characters as \\u escapes")
    depth = 0
    for token in _TOKEN.finditer(raw):  # not in one call of re, which would hold the interpreter against everyone
        kind = raw[token.start()]
        if kind in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise Invalid(f"a description is nested at most {MAX_DEPTH} deep")
        elif kind in b"]}":
            depth -= 1


def namespace_digest(description: Description, tenant: str) -> bytes:
    """32 bytes that name a namespace: the description's digest under a tenant, which only the daemon sets."""
    check_text("tenant", tenant)
    return blake2b(description.digest + tenant.encode(), digest_size=DIGEST_BYTES, person=_PERSON_NAMESPACE).digest()


def request_context(adapter: bytes | None = None, salt: str | None = None) -> bytes:
    """32 bytes for what varies per request: digest of the adapter's *weights* (not its name) and cache salt. Zeros if
    there is neither.

    Absent and empty are the same identity. The raw salt leaves this function only inside the hash. Raises Invalid for
    other types than these two: what Python holds to be equal (1, True, 1.0) must not become one salt.
    """
    if not isinstance(adapter, bytes | None) or not isinstance(salt, str | None):
        found = f"{type(adapter).__name__} and {type(salt).__name__}"
        raise Invalid(f"an adapter digest is bytes and a salt is text, not {found}")
    if not adapter and not salt:
        return NO_CONTEXT
    hasher = blake2b(digest_size=DIGEST_BYTES, person=_PERSON_CONTEXT)
    for value in (adapter or b"", (salt or "").encode("utf-8", "surrogatepass")):
        hasher.update(struct.pack("<Q", len(value)) + value)
    return hasher.digest()


def derive_keys(
    namespace: bytes, resolved: tuple[int, int, int, int, int], context: bytes, hashes: bytes, hash_bytes: int
) -> list[bytes]:
    """The 32-byte keys of concatenated content hashes.

    key = blake2b-256(namespace digest | group, layer_lo, layer_hi, head_lo, head_hi as u16 | request context | content
    hash)

    `resolved` comes from `Layout.resolve`. The fixed prefix is hashed once a call (306 us for 1,000 keys, against 474
    us for one-shot hashing).
    """
    if len(namespace) != DIGEST_BYTES or len(context) != 32:
        raise Invalid("a namespace digest and a request context have 32 bytes each")
    check_int("bytes of a hash", hash_bytes, *HASH_BYTES)
    if len(hashes) % hash_bytes:
        raise Invalid(f"{len(hashes)} bytes of hashes are not a multiple of {hash_bytes}")
    base = blake2b(namespace + _RANGE.pack(*resolved) + context, digest_size=32, person=_PERSON_KEY)
    keys = []
    for start in range(0, len(hashes), hash_bytes):
        hasher = base.copy()
        hasher.update(hashes[start : start + hash_bytes])
        keys.append(hasher.digest())
    return keys


def chain_hashes(tokens: Iterable[int], block_tokens: int, seed: bytes = bytes(32)) -> list[bytes]:
    """Content hashes for clients without an engine (algorithm CHAIN): one per whole block, an incomplete tail has none.

    hash_0 = blake2b-256(seed | ids of block 0), hash_i = blake2b-256(hash_{i-1} | ids of block i), ids as u32
    little-endian.
    """
    check_int("block_tokens", block_tokens, 1, 65536)
    ids = list(tokens)
    if any(not 0 <= token < 2**32 for token in ids):
        raise Invalid("token ids must fit in 32 bits")
    hashes, previous = [], seed
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        block = struct.pack(f"<{block_tokens}I", *ids[start : start + block_tokens])
        previous = blake2b(previous + block, digest_size=32, person=_PERSON_CHAIN).digest()
        hashes.append(previous)
    return hashes


def pack_scales(scales: Mapping[tuple[int, str], Iterable[float]]) -> dict[str, str]:
    """{(layer index, part): scales} in the form of `Description.scales`."""
    return {f"{layer}.{part}": "".join(map(f32_hex, values)) for (layer, part), values in scales.items()}


def all_one(scales: Mapping[str, str]) -> bool:
    """Whether there are static scales in this form and every one is 1.0: the mark of KV that nobody has calibrated."""
    return bool(scales) and all(value and value == _ONE * (len(value) // len(_ONE)) for value in scales.values())


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two descriptions differ, in words."""

    field: str
    left: str
    right: str

    def __str__(self) -> str:
        return f"{self.field}: {self.left} stored, {self.right} live"


def diff(stored: Description, live: Description, most: int = 50) -> list[Difference]:
    """The fields in which two descriptions differ, the first `most`; scales as numbers. None if and only if equal."""
    return differences(stored.to_json(), live.to_json(), most)


def differences(stored: dict[str, Any], live: dict[str, Any], most: int = 50) -> list[Difference]:
    """The fields in which two JSON objects differ, the first `most`. A field `scales` is as `Description.scales`."""
    found: list[Difference] = []
    _walk("", stored, live, found)
    if len(found) > most:
        found[most:] = [Difference(f"and {len(found) - most} more fields", "...", "...")]
    return found


def _walk(path: str, left: Any, right: Any, found: list[Difference]) -> None:
    if left == right and type(left) is type(right):
        return
    if isinstance(left, dict) and isinstance(right, dict):
        for name in sorted(set(left) | set(right)):
            here = f"{path}.{name}" if path else name
            if path == "scales":
                _walk_scales(name, left.get(name), right.get(name), found)
            elif name not in left or name not in right:
                found.append(Difference(here, _short(left.get(name, "absent")), _short(right.get(name, "absent"))))
            else:
                _walk(here, left[name], right[name], found)
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            _walk(f"{path}[{i}]", a, b, found)
    else:
        found.append(Difference(path, _short(left), _short(right)))


def _walk_scales(name: str, left: str | None, right: str | None, found: list[Difference]) -> None:
    """`name` is "<layer>.<part>"; values are runs of 8 hex digits."""
    layer, part = name.split(".", 1)
    label = f"{part}_scale of layer {layer}"
    if left is None or right is None or len(left) != len(right):
        found.append(Difference(label, *("absent" if v is None else f"{len(v) // 8} values" for v in (left, right))))
        return
    for head in range(len(left) // 8):
        a, b = left[8 * head : 8 * head + 8], right[8 * head : 8 * head + 8]
        if a != b:
            where = f"{label}, head {head}" if len(left) > 8 else label
            found.append(Difference(where, f"{hex_f32(a):.9g}", f"{hex_f32(b):.9g}"))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 120 else text[:117] + "..."


def check_revision(revision: Any) -> None:
    """Raises Invalid unless `revision` is a commit or a content fingerprint."""
    if not (isinstance(revision, str) and _REVISION.fullmatch(revision)):
        raise Invalid(
            "revision must be a commit (40 or 64 hex digits) or 'fingerprint:' and 64 hex digits, not "
            f"{revision!r:.200}: "
            "resolve a branch to its commit, fingerprint a local directory (kvtier.format.fingerprint)"
        )


def check_text(name: str, value: Any) -> None:
    """Raises Invalid unless `value` is 1 to MAX_TEXT printable characters."""
    if not (isinstance(value, str) and 1 <= len(value) <= MAX_TEXT and value.isprintable()):
        raise Invalid(f"{name} must be 1 to {MAX_TEXT} printable characters, not {value!r:.80}")


def _check_scales(description: Description) -> None:
    """Exactly the static parts have scales, one per head (or one for the tensor), each finite and positive."""
    wanted = {
        f"{layer.index}.{part.name}": 1 if part.granularity == "tensor" else group.heads
        for group in description.layout.groups
        for layer in group.layers
        for part in layer.parts
        if part.granularity in STATIC
    }
    if set(wanted) != set(description.scales):
        odd = sorted(set(wanted) ^ set(description.scales))
        rule = "static scales must be given for exactly the parts with granularity tensor or head"
        raise Invalid(f"{rule}; odd: {', '.join(odd)[:200]}")
    for name, count in wanted.items():
        text = description.scales[name]
        if not (isinstance(text, str) and len(text) == 8 * count and set(text) <= set("0123456789abcdef")):
            raise Invalid(f"scales of {name} must be {count} times 8 lower-case hex digits")
        for head in range(count):
            bits = int(text[8 * head : 8 * head + 8], 16)
            if not 0 < bits < 0x7F800000:
                raise Invalid(f"scale {head} of {name} must be finite and greater than 0, not {hex_f32(f'{bits:08x}')}")
