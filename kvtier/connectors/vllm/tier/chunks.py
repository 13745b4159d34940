"""Which namespace and block a chunk of vLLM's CPU offloading is, and whether the description given fits the engine.

A tier of vLLM sees a name of a model, sizes and bytes; not its weights, scales or revision. That comes from the
description that the operator gives (`kvtier namespace`); it is a field of the namespace by its digest, beside all that
vLLM does say. What can be compared is compared at the start: local weights with the revision that is described, and the
bytes of a token. Reads files at the start only; thread-safe.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvtier.connectors.common.object_naming import ObjectForm, Space, opaque_bytes, readable
from kvtier.connectors.common.settings_checks import check_choice, check_names, socket_of
from kvtier.errors import Invalid
from kvtier.format.files import read_description
from kvtier.format.fingerprint import resolve_revision
from kvtier.format.identity import Description, HashScheme, canonical_json

ALGORITHM = "vLLM offload key, kvtier 1"
KNOWN = ("namespace", "socket", "check")
CHECKS = ("sampled", "full", "off")
_PERSON_KEY = b"kvtier.vllm.off1"
_PERSON_FORM = b"kvtier.vllm.chk1"


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What a user may say beside `type` and `module_path`.

    namespace   file with the description of what this engine serves, as `kvtier namespace MODEL --save FILE` writes it;
                required
    socket      the daemon's socket
    check       "sampled" or "full": how vLLM's weights are compared with the description; "off": it is believed
    """

    description: Description
    socket: str
    check: str


def read(said: Mapping[str, Any]) -> TierSettings:
    """Settings out of a tier's configuration. Raises Invalid, saying what to write."""
    check_names("the tier", said, KNOWN)
    file, socket, check = said.get("namespace"), socket_of(said), said.get("check", "sampled")
    if not isinstance(file, str) or not file:
        raise Invalid(
            "kvtier does not store what has no identity: a tier of vLLM is told neither revision nor scales of the "
            'model. Write "namespace": "FILE" beside "type" and "module_path", with a file that '
            "`kvtier namespace MODEL --save FILE` has written"
        )
    check_choice("check", check, CHECKS)
    return TierSettings(read_description(Path(file)), socket, check)


@dataclass(frozen=True, slots=True)
class Engine:
    """All that vLLM says of the bytes of a chunk. Any of it changes the namespace.

    model        path or hub id that vLLM was given; not in the namespace, which has the description's name
    version      vLLM's own: it alone knows how it lays out what kvtier does not interpret
    platform     vLLM's name of it, and its kind of FP8
    dtype        vLLM's name of the cache's number format
    layout       physical layout of the cache, and of the chunk
    groups       per KV cache group: its number, tokens of a block, names of its layers
    ranks        sizes: world, tensor, pipeline, prefill context and decode context parallel
    worker_bytes of one block on one rank
    copies       ranks whose bytes stand in a chunk
    chunk_blocks blocks of a chunk; chunk_bytes: of a chunk, with vLLM's padding
    hash_tokens  tokens under one hash; seed: what vLLM's hashes start from
    cpu          whether it computes on a CPU; not in the namespace, which has the platform
    """

    model: str
    version: str
    platform: str
    dtype: str
    layout: str
    groups: tuple[tuple[int, int, tuple[str, ...]], ...]
    ranks: tuple[int, ...]
    worker_bytes: int
    copies: int
    chunk_blocks: int
    chunk_bytes: int
    hash_tokens: int
    seed: str = field(default="", repr=False)
    cpu: bool = False

    @property
    def settings(self) -> dict[str, str | int]:
        """For the namespace, each by a name of its own, so that a difference can be read."""
        layers = blake2b(canonical_json([list(names) for _, _, names in self.groups]), digest_size=16).hexdigest()
        as_they_are = ("version", "platform", "worker_bytes", "copies", "chunk_blocks", "chunk_bytes")
        return {f"vllm.{name}": getattr(self, name) for name in as_they_are} | {
            "vllm.cache_dtype": self.dtype,
            "vllm.layers": layers,
            "vllm.block_tokens": ", ".join(f"{number}: {tokens}" for number, tokens, _ in self.groups)[:1024],
            "vllm.ranks": ", ".join(map(str, self.ranks)),
        }


class ChunkSpace(Space):
    """The namespace of an engine's chunks: opaque bytes, in pieces where a chunk exceeds a block. Raises Invalid."""

    def __init__(self, base: Description, engine: Engine) -> None:
        self._engine = engine
        super().__init__(base, ObjectForm((), engine.chunk_bytes))

    def describe(self, base: Description, form: ObjectForm, pieces: Sequence[int]) -> Description:
        """What holds of the operator's description for opaque bytes, all of it by digest, and what the engine says."""
        engine, base_digest = self._engine, base.digest.hex()
        more = {**engine.settings, "vllm.description": base_digest}
        whole = canonical_json([base_digest, {**base.rope, **readable(base.scales), **more}, engine.layout])
        opaque = opaque_bytes(base, pieces, blake2b(whole, digest_size=32, person=_PERSON_FORM).hexdigest(), more)
        seed = blake2b(engine.seed.encode(), digest_size=16).hexdigest()
        hashing = HashScheme(ALGORITHM, seed, engine.hash_tokens)
        return replace(opaque, hashing=hashing, backend="vLLM offload chunk", physical=engine.layout)


def content_hash(key: bytes) -> bytes:
    """32 bytes for an offload key of vLLM: block hash (cache salt and adapter's name are in it) and KV cache group."""
    return blake2b(key, digest_size=32, person=_PERSON_KEY).digest()


def compare(base: Description, engine: Engine, check: str) -> None:
    """Raises Invalid where the description may not be that of this engine. May read weights' fingerprints."""
    if engine.cpu and base.packing is None:
        raise Invalid(
            "the namespace is that of a GPU engine, but this one computes on a CPU, which packs K by its instruction "
            "set: write it anew with --cpu"
        )
    _compare_bytes(base, engine)
    if check == "off":
        return
    advice = "write it anew by `kvtier namespace`"
    if os.path.exists(engine.model):
        _, found = resolve_revision(engine.model, full=check == "full")
    elif engine.model != base.model:
        raise Invalid(f"the namespace is that of {base.model}, but vLLM serves {engine.model}: {advice}")
    else:
        _, found = resolve_revision(engine.model)
        advice += ", or, if vLLM was given a revision, give it the directory of that revision instead: "
        advice += "a tier is not told the revision"
    if found != base.revision:
        raise Invalid(f"the namespace is that of revision {base.revision}, but {engine.model} is {found}: {advice}")


def _compare_bytes(base: Description, engine: Engine) -> None:
    """The bytes of a token are those described, give or take half: what differs by more has another dtype or shape.
    Nothing is said of caches of several groups, of opaque ones, and where context parallelism or pipelines spread
    tokens or layers."""
    (_, tensor, *others), group = engine.ranks, base.layout.groups[0]
    several = len(base.layout.groups) > 1 or len(engine.groups) > 1
    if several or group.kind == "opaque" or any(size > 1 for size in others):
        return
    block = sum(group.data_bytes(part) for layer in group.layers for part in layer.parts) * group.heads
    described = block / group.tokens * max(1, tensor // group.heads)
    found = engine.worker_bytes * tensor / engine.groups[0][1]
    if not 2 * described < 3 * found < 4.5 * described:
        said = f"the namespace describes {described:g} bytes of KV a token, but vLLM keeps {found:g} (cache dtype "
        said += f"{engine.dtype}): it is that of another model or --kv-cache-dtype. "
        raise Invalid(f"{said}Write it anew by `kvtier namespace`")
