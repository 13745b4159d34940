"""Which namespace, block and request context an object of LMCache is.

An object key of LMCache says model name, rank, object group, chunk hash and salt; not what the bytes mean. That comes
from two sides: the description that the operator gives for the model, and shapes and dtypes that LMCache gives with
each object. Both stand in the namespace of the object: the opaque layout's digest is over shapes and dtypes, and the
description's digest is a field. Name, rank, group and chunk hash make the content hash; the salt makes the request
context. Pure but for a bounded cache; thread-safe.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from kvtier.client.answers import RegisteredNamespace
from kvtier.format.identity import MAX_TEXT, Description, HashScheme, canonical_json, hex_f32, request_context
from kvtier.format.layout import HEADER_BYTES, MAX_BLOCK_BYTES, MAX_LAYERS, Group, Layer, Layout, Part, Range, pad

ALGORITHM = "LMCache object key, kvtier 1"
MIN_HASH_BYTES = 16  # Python's own hash, which LMCache falls back to, has 8, and differs between processes
MAX_PIECE_BYTES = MAX_BLOCK_BYTES - HEADER_BYTES
MAX_SCALES_TEXT = 64 << 10
MAX_FORMS = 256  # shapes that one server stores; each is a namespace of the daemon
_PERSON_OBJECT = b"kvtier.lmc.obj1"
_PERSON_FORM = b"kvtier.lmc.form1"


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """What an object consists of: dtype and shape of its tensors, which lie back to back, and their bytes in all."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    nbytes: int

    @property
    def text(self) -> str:
        """As people read it, cut to fit a field of a description: the digest is what counts."""
        whole = " + ".join(f"{dtype}{list(shape)}" for dtype, shape in self.tensors)
        return whole if len(whole) <= MAX_TEXT else f"{whole[: MAX_TEXT - 3]}..."

    @property
    def digest(self) -> str:
        whole = canonical_json([[dtype, *shape] for dtype, shape in self.tensors])
        return blake2b(whole, digest_size=32, person=_PERSON_FORM).hexdigest()


def form_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> ObjectForm:
    """Out of torch's shapes and dtypes."""
    return _form(tuple(shapes), tuple(dtypes))


@lru_cache(maxsize=1024)  # the objects of a task are alike
def _form(shapes: tuple[Any, ...], dtypes: tuple[Any, ...]) -> ObjectForm:
    pairs = [(tuple(map(int, shape)), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    tensors = tuple((str(dtype).removeprefix("torch."), shape) for shape, dtype in pairs)
    return ObjectForm(tensors, sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs))


def form_of_object(found: Any) -> ObjectForm:
    """Of a memory object. LMCache's own benchmark makes some that have a shape and no list of shapes."""
    metadata = found.metadata
    return form_of(metadata.shapes or [metadata.shape], metadata.dtypes or [metadata.dtype])


class Space:
    """The namespace of the objects of one model and form.

    ranges   a block for each piece of an object: one, or several where it is larger than a block may be
    cuts     first byte and end of each piece within the object
    """

    def __init__(self, base: Description, form: ObjectForm) -> None:
        count = -(-form.nbytes // MAX_PIECE_BYTES)
        step = pad(-(-form.nbytes // count))
        self.cuts = tuple((low, min(low + step, form.nbytes)) for low in range(0, form.nbytes, step))
        self.ranges = tuple(Range(0, (at, at + 1)) for at in range(len(self.cuts)))
        self.nbytes = form.nbytes
        self.introduced = False  # whether the log has said how it differs from what the daemon has
        self.registered = RegisteredNamespace(self.describe(base, form, [high - low for low, high in self.cuts]))
        self.slot_bytes = sum(self.registered.extents(part).slot_bytes for part in self.ranges)

    def describe(self, base: Description, form: ObjectForm, pieces: Sequence[int]) -> Description:
        """The description, given how long each piece is; another engine's objects override this."""
        digest, hashing = base.digest.hex(), HashScheme(ALGORITHM, base.digest.hex(), 1)
        opaque = opaque_bytes(base, pieces, form.digest, {"lmcache.description": digest})
        return replace(opaque, hashing=hashing, backend="LMCache object", physical=form.text)


def opaque_bytes(base: Description, pieces: Sequence[int], digest: str, more: Mapping[str, str | int]) -> Description:
    """Of the base what still holds for opaque bytes: one group of them, with a layer for each piece. Such a layout has
    no static scales, so they stand among the settings, where a difference can be read, as does what is `more`."""
    layers = tuple(Layer(at, (Part("bytes", nbytes, "u8"),)) for at, nbytes in enumerate(pieces))
    layout = Layout((Group("opaque", 1, 1, layers, digest=digest),))
    return replace(base, layout=layout, scales={}, rope={**base.rope, **readable(base.scales), **more})


def readable(scales: Mapping[str, str]) -> dict[str, str]:
    """Scales as decimal numbers, which tell every f32 apart; none where they would not fit a description."""
    found = {}
    for name, packed in scales.items():
        layer, _, part = name.partition(".")
        values = (f"{hex_f32(packed[at : at + 8]):.9g}" for at in range(0, len(packed), 8))
        found[f"{part}_scale of layer {layer}"] = ", ".join(values)
    fits = sum(map(len, found.values())) < MAX_SCALES_TEXT and all(len(text) <= MAX_TEXT for text in found.values())
    return found if fits else {}


def content_hash(key: Any) -> bytes:
    """32 bytes for all of an object key but its salt."""
    hasher = blake2b(digest_size=32, person=_PERSON_OBJECT)
    model, rank, group = key.model_name.encode("utf-8", "surrogatepass"), str(key.kv_rank), str(key.object_group_id)
    for value in (model, rank.encode(), group.encode(), key.chunk_hash):
        hasher.update(struct.pack("<Q", len(value)) + value)
    return hasher.digest()


@lru_cache(maxsize=4096)
def context_of(salt: str) -> bytes:
    """The request context of a cache salt; no salt, no context."""
    return request_context(salt=salt)


class Spaces:
    """The namespaces in use: one per model and form, made when it is first seen."""

    def __init__(self, descriptions: Mapping[str, Description]) -> None:
        self.bases = dict(descriptions)
        self._lock = threading.Lock()
        self._made: dict[tuple[str, ObjectForm], Space] = {}

    def find(self, model: str, form: ObjectForm) -> Space | None:
        """None for a model without a description, an empty or much too large object, and one form too many."""
        base = self.bases.get(model)
        if base is None or not 0 < form.nbytes <= MAX_LAYERS * MAX_PIECE_BYTES:
            return None
        with self._lock:
            space = self._made.get((model, form))
            if space is None and len(self._made) < MAX_FORMS:
                space = self._made[model, form] = Space(base, form)
            return space

    def of_model(self, model: str) -> list[Space]:
        """Every one made for a model so far."""
        with self._lock:
            return [space for (name, _), space in self._made.items() if name == model]
