"""The KV artifact: what makes quantized KV meaningful, a manifest and the scale values that go with it.

An artifact is a directory with `manifest.json` (canonical JSON) and `scales.safetensors`. Its digest covers the
manifest, which contains the digest of the scale values, so any change of either is another artifact and another
namespace. An artifact is whole or refused, and never overwritten. Values are immutable, hence thread-safe; `save` and
`load` block on disk.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from kvtier.errors import Invalid
from kvtier.format.files import naming, read_file
from kvtier.format.identity import (
    MAX_TEXT,
    Description,
    Difference,
    HashScheme,
    all_one,
    canonical_json,
    check_revision,
    check_text,
    differences,
    pack_scales,
)
from kvtier.format.layout import STATIC, Layout, Part, check_int, fields, items
from kvtier.format.tensors import Tensor, read_safetensors, to_f32

FORMAT = 1  # version of the manifest's schema
MANIFEST = "manifest.json"
SCALES = "scales.safetensors"
MAX_MANIFEST_BYTES = 256 * 1024
# What the quantizer takes as a static scale; an artifact may hold others, of another quantizer.
LEAST_SCALE, MOST_SCALE = 2.0**-64, 2.0**119

_PERSON_SCALES = b"kvtier.scales.1"
_PERSON_ARTIFACT = b"kvtier.art.1"
_MANIFEST_FIELDS = (
    "format", "model", "revision", "encoding", "excluded", "backend", "calibration", "calibrated_position", "report",
    "scales",
)  # fmt: skip

Scales = Mapping[tuple[int, str], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class PartFormat:
    """Number format and scale granularity of one part ("k", "v", ...) in quantized layers, in `layout.Part`'s words."""

    dtype: str
    granularity: str

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or not isinstance(self.granularity, str):
            raise Invalid("dtype and granularity of a part must be text")
        Part("part", 1, self.dtype, self.granularity)


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """One calibration: where it came from, the number format, and every static scale.

    model, revision      what was calibrated; the revision is a commit or a content fingerprint
    parts                number format per part
    rule, codec          how scales come about, and the version of the quantizer's rounding and clamping; as in
                         `identity.Description`
    excluded             indices of the layers that stay native, ascending
    backend              the attention backend's cache format
    calibration          what names the calibration data, e.g. a digest
    calibrated_position  the largest token position seen; None where nobody knows (imported scales)
    report               errors measured at calibration: text and integers (a float as text, or by `f32_hex`)
    scales               {(layer index, part): f32 [heads], or [1] for granularity "tensor"}, for every part with static
                         scales

    Two artifacts are equal if and only if their digests are.
    """

    model: str
    revision: str
    parts: Mapping[str, PartFormat]
    rule: str
    codec: int
    backend: str
    calibration: str
    scales: Scales = field(default_factory=dict)
    excluded: tuple[int, ...] = ()
    calibrated_position: int | None = None
    report: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "rule", "backend", "calibration"):
            check_text(name, getattr(self, name))
        check_revision(self.revision)
        check_int("codec", self.codec, 0, 65535)
        if self.calibrated_position is not None:
            check_int("calibrated_position", self.calibrated_position, 0, 2**31 - 1)
        for index in self.excluded:
            check_int("excluded layer", index, 0, 65535)
        if list(self.excluded) != sorted(set(self.excluded)):
            raise Invalid("excluded layers must be ascending and without repetition")
        if not self.parts:
            raise Invalid("an artifact must say the format of at least one part")
        for name, form in self.parts.items():
            Part(name, 1, form.dtype, form.granularity)  # checks the name
        for name, value in self.report.items():
            check_text("report field", name)
            if type(value) is not int and not (isinstance(value, str) and len(value) <= MAX_TEXT):
                raise Invalid(f"report.{name} must be text or an integer, not {value!r:.80}")
        own = {key: np.array(values) for key, values in self.scales.items()}
        _check_scales(own, self.parts, self.excluded)
        for values in own.values():
            values.flags.writeable = False
        for name, mapping in (("scales", own), ("parts", dict(self.parts)), ("report", dict(self.report))):
            object.__setattr__(self, name, MappingProxyType(mapping))
        object.__setattr__(self, "excluded", tuple(self.excluded))
        if len(self.canonical) > MAX_MANIFEST_BYTES:
            raise Invalid(f"a manifest has at most {MAX_MANIFEST_BYTES} bytes, not {len(self.canonical)}")

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Artifact) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_json(self) -> dict[str, Any]:
        """The manifest as plain data of a closed schema. Scale values are in it as their digest."""
        parts = {name: {"dtype": form.dtype, "granularity": form.granularity} for name, form in self.parts.items()}
        return {
            "format": FORMAT,
            "model": self.model,
            "revision": self.revision,
            "encoding": {"parts": parts, "rule": self.rule, "codec": self.codec},
            "excluded": list(self.excluded),
            "backend": self.backend,
            "calibration": self.calibration,
            "calibrated_position": self.calibrated_position,
            "report": dict(self.report),
            "scales": self.scales_digest,
        }

    @property
    def canonical(self) -> bytes:
        """The one byte string of the manifest: JSON, sorted keys, no spaces, ASCII, no floats."""
        return canonical_json(self.to_json())

    @property
    def scales_digest(self) -> str:
        """64 hex digits over names and bits of all scales, whatever their order in a file."""
        return blake2b(canonical_json(pack_scales(self.scales)), digest_size=32, person=_PERSON_SCALES).hexdigest()

    @property
    def digest(self) -> str:
        """64 hex digits over the manifest, thus over everything: the field `artifact` of a description."""
        return blake2b(self.canonical, digest_size=32, person=_PERSON_ARTIFACT).hexdigest()

    @property
    def uncalibrated(self) -> bool:
        """Whether every scale is 1.0, as where nobody has calibrated; False where scales come with the tokens."""
        return all_one(pack_scales(self.scales))

    def describe(
        self,
        layout: Layout,
        hashing: HashScheme,
        *,
        rope: Mapping[str, str | int] | None = None,
        physical: str = "plain",
        packing: str | None = None,
    ) -> Description:
        """The description of KV that was quantized with this artifact. Raises Invalid where the layout says another
        format than the artifact, or has layers whose scales the artifact lacks, or lacks layers that the artifact has
        scales for."""
        for layer in (layer for group in layout.groups for layer in group.layers):
            for part in layer.parts:
                form = None if layer.index in self.excluded else self.parts.get(part.name)
                wanted = ("native", "none") if form is None else (form.dtype, form.granularity)
                found = ("native", "none") if form is None and part.native else (part.dtype, part.granularity)
                if found != wanted:
                    said = f"the layout says {' '.join(found)}, the artifact {' '.join(wanted)}"
                    raise Invalid(f"{part.name} of layer {layer.index}: {said}")
        form_of = (self.digest, self.rule, self.codec, pack_scales(self.scales), rope or {}, self.backend)
        return Description(self.model, self.revision, layout, hashing, *form_of, physical, packing)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the artifact as a new directory: whole or not at all, and on disk when this returns. The same artifact
        saved again is a no-op.

        Raises Invalid if something else is there already, OSError if the disk refuses.
        """
        target = Path(os.path.abspath(directory))
        if target.is_dir() and any(target.iterdir()):
            if load(target) != self:
                raise Invalid(f"{target} holds another artifact already; artifacts are not overwritten")
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.parent / f".{target.name}.{secrets.token_hex(8)}"
        aside.mkdir()
        try:
            tensors = {_tensor_name(*key): np.asarray(values) for key, values in self.scales.items()}
            _write(aside / SCALES, safetensors.numpy.save(tensors))
            _write(aside / MANIFEST, self.canonical)
            _sync_directory(aside)
            try:
                os.rename(aside, target)
            except OSError as error:  # another writer was first
                raise Invalid(f"{target} cannot be created: {error.strerror}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        _sync_directory(target.parent)


def load(directory: str | os.PathLike[str]) -> Artifact:
    """The artifact in `directory`. Raises Invalid, naming the file, for what `save` would not have written. Blocks."""
    manifest, weights = Path(directory) / MANIFEST, Path(directory) / SCALES
    raw = read_file(manifest, MAX_MANIFEST_BYTES)
    with naming(manifest):
        arguments, scales_digest = _parse_manifest(raw)
    tensors = read_safetensors(weights)
    with naming(weights):
        scales = {_scale_key(name): _scale_vector(name, tensor) for name, tensor in tensors.items()}
        _check_scales(scales, arguments["parts"], arguments["excluded"])
    with naming(manifest):
        artifact = Artifact(scales=scales, **arguments)
        if artifact.scales_digest != scales_digest:
            found = f"those in {SCALES} have {artifact.scales_digest}"
            raise Invalid(f"it belongs to scales with digest {scales_digest}, {found}")
        if artifact.canonical != raw:
            raise Invalid("not in canonical form (sorted keys, no spaces, no duplicate keys)")
    return artifact


def rank_heads(heads: int, ranks: int, rank: int) -> tuple[int, int]:
    """The KV heads [lo, hi) of one tensor-parallel rank: a whole share, or one head that ranks / heads of them hold
    together. Raises Invalid where neither divides the other: a share is never cut."""
    check_int("ranks", ranks, 1, 65536)
    check_int("rank", rank, 0, ranks - 1)
    if heads % ranks == 0:
        each = heads // ranks
        return rank * each, (rank + 1) * each
    if ranks % heads:
        raise Invalid(f"{heads} KV heads cannot be shared by {ranks} ranks")
    return rank // (ranks // heads), rank // (ranks // heads) + 1


def rank_scales(artifact: Artifact, ranks: int, rank: int) -> dict[tuple[int, str], NDArray[np.float32]]:
    """The scales that one tensor-parallel rank loads: those of its heads; one for the tensor as it is."""
    found = {}
    for (layer, part), values in artifact.scales.items():
        if artifact.parts[part].granularity == "tensor":
            found[layer, part] = values
        else:
            low, high = rank_heads(values.size, ranks, rank)
            found[layer, part] = values[low:high]
    return found


def diff(stored: Artifact, live: Artifact, most: int = 50) -> list[Difference]:
    """The fields in which two artifacts differ, the first `most`; scales as numbers. None if and only if equal."""
    left, right = ({**artifact.to_json(), "scales": pack_scales(artifact.scales)} for artifact in (stored, live))
    return differences(left, right, most)


def _parse_manifest(raw: bytes) -> tuple[dict[str, Any], str]:
    """The arguments of Artifact but the scales, and the digest of the scales. Values are checked by Artifact."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"not JSON: {error}") from None
    version, model, revision, encoding, excluded, backend, calibration, position, report, scales_digest = fields(
        data, "manifest", *_MANIFEST_FIELDS
    )
    if type(version) is not int or version != FORMAT:
        raise Invalid(f"this version reads and writes format {FORMAT}, not {version!r:.80}")
    parts, rule, codec = fields(encoding, "encoding", "parts", "rule", "codec")
    for name, value in (("parts", parts), ("report", report)):
        if not isinstance(value, dict):
            raise Invalid(f"{name} must be an object")
    formats = {name: fields(form, f"format of {name}", "dtype", "granularity") for name, form in parts.items()}
    return {
        "model": model,
        "revision": revision,
        "parts": {name: PartFormat(*form) for name, form in formats.items()},
        "rule": rule,
        "codec": codec,
        "backend": backend,
        "calibration": calibration,
        "excluded": tuple(items(excluded, "excluded", 65536)),
        "calibrated_position": position,
        "report": report,
    }, scales_digest


def _check_scales(scales: Scales, parts: Mapping[str, PartFormat], excluded: Collection[int]) -> None:
    """Every scale is a finite positive f32; every quantized layer has exactly the static parts, of one head count."""
    static = {name for name, form in parts.items() if form.granularity in STATIC}
    for (layer, part), values in scales.items():
        check_int("layer of a scale", layer, 0, 65535)
        where = f"{part}_scale of layer {layer}"
        if part not in static:
            raise Invalid(f"{where}: {part} has no static scales in this artifact")
        if layer in excluded:
            raise Invalid(f"{where}: the layer is excluded")
        if not isinstance(values, np.ndarray) or values.dtype != np.float32 or values.ndim != 1 or not values.size:
            raise Invalid(f"{where} must be a vector of f32")
        if parts[part].granularity == "tensor" and values.size != 1:
            raise Invalid(f"{where} must be the one of the tensor, not {values.size} values")
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if bad.size:
            raise Invalid(f"{where}, head {bad[0]} must be finite and greater than 0, not {values[bad[0]]}")
    layers = sorted({layer for layer, _ in scales})
    if static and not layers:
        raise Invalid(f"no scales, though {', '.join(sorted(static))} has static ones")
    for layer in layers:
        if missing := sorted(part for part in static if (layer, part) not in scales):
            raise Invalid(f"{missing[0]}_scale of layer {layer} is missing")
        counts = {scales[layer, part].size for part in static if parts[part].granularity == "head"}
        if len(counts) > 1:
            raise Invalid(f"the scales of layer {layer} are for unequal numbers of heads: {sorted(counts)}")


_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,4})\.([A-Za-z_][A-Za-z0-9_]*)_scale")


def _tensor_name(layer: int, part: str) -> str:
    return f"layers.{layer}.{part}_scale"


def _scale_key(name: str) -> tuple[int, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise Invalid(f"tensor {name!r:.200} is not called layers.<index>.<part>_scale")
    return int(match[1]), match[2]


def _scale_vector(name: str, tensor: Tensor) -> NDArray[np.float32]:
    if tensor.dtype != "F32" or len(tensor.shape) != 1:
        raise Invalid(f"tensor {name} must be a vector of F32, not {tensor.dtype} of shape {list(tensor.shape)}")
    return to_f32(tensor)


def _write(path: Path, raw: bytes) -> None:
    with open(path, "xb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
