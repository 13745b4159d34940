"""KV scales out of a checkpoint into an artifact: every tensor understood and every value good, or nothing and a list
of what is wrong.

Reads the safetensors files of a local directory: headers whole, then the few scales. What an engine would replace in
silence (a missing q_scale, one kv_scale for both, a value of 0) is either refused or written into the artifact's
report. Values keep every bit. Blocks on disk; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import Invalid
from kvtier.format.artifact import LEAST_SCALE, MOST_SCALE, Artifact, PartFormat
from kvtier.format.files import naming, open_file
from kvtier.format.fingerprint import resolve_revision
from kvtier.format.identity import MAX_TEXT, canonical_json, f32_hex, pack_scales
from kvtier.format.scale_names import ScaleName, odd, parse
from kvtier.format.tensors import Tensor, read_header, to_f32
from kvtier.models.model_config import ModelCaches, caches_of, read_config

CODEC = 1  # of the quantizer whose rules the values are checked against: `kvtier_kernels.reference.CODEC`
MAX_FILES = 10_000
MAX_SCALE_BYTES = 1 << 20  # of one scale tensor
MOST_PROBLEMS = 40  # named in one refusal

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Found:
    """One scale tensor as it stands in a file: `values` is a vector of one number or of one for each head."""

    name: str
    file: str
    said: ScaleName
    dtype: str
    values: Vector


@dataclass(slots=True)
class Import:
    """What an import found. `problems` is empty or nothing may be used; `notes` are for the reader and for the
    artifact's report."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    scales: dict[tuple[int, str], Vector] = field(default_factory=dict)
    queries: dict[int, Vector] = field(default_factory=dict)
    missing: tuple[int, ...] = ()
    seen: set[int] = field(default_factory=set)  # layers with a scale, good or bad
    styles: set[str] = field(default_factory=set)


def import_scales(
    checkpoint: str | Path,
    revision: str | None = None,
    *,
    model: str | None = None,
    allow_missing: bool = False,
    allow_extra: bool = False,
    uncalibrated: bool = False,
) -> tuple[Artifact, list[str]]:
    """The artifact of a checkpoint's own scales, and what a reader should know.

    model          the name to record, if not the directory's
    allow_missing  layers without scales become excluded ones (native), instead of an error
    allow_extra    scales of layers that the model lacks are passed over, instead of an error
    uncalibrated   scales that are all 1.0 are taken, instead of an error: they mean that nobody has calibrated

    Raises Invalid with one line for each thing that is wrong: tensor, layer and file. Writes nothing.
    """
    root = Path(checkpoint)
    config = read_config(root / "config.json")
    with naming(root / "config.json"):
        caches = caches_of(config, root.resolve().name)
        _check_scheme(config)
    if (extra := root / "hf_quant_config.json").exists():
        with naming(extra):
            _check_modelopt(read_config(extra))
    heads = _heads(caches)
    found = Import()
    tensors = read_scales(root, heads, found, allow_extra)
    _assemble(tensors, heads, found, allow_missing)
    if not found.seen and not found.problems:
        found.problems = [f"{root}: no KV scales in any safetensors file: kvtier calibrate makes some"]
    elif not found.problems and not found.scales:
        found.problems = [f"{root}: no layer of the model has KV scales"]
    if found.problems:
        raise Invalid(_listed(found.problems))
    granularity = {part: _granularity(found, part) for part in "kv"}
    if not uncalibrated and all(np.all(values == 1.0) for values in found.scales.values()):
        raise Invalid(
            f"{root}: every scale is 1.0, which means that nothing was calibrated; say so with --uncalibrated to "
            "import it all the same"
        )
    name, exact = resolve_revision(str(root), revision)
    form = {part: PartFormat("e4m3fn", granularity[part]) for part in "kv"}
    digest = blake2b(canonical_json(pack_scales(found.scales)), digest_size=16).hexdigest()
    report: dict[str, str | int] = {
        "source": f"checkpoint ({', '.join(sorted(found.styles))} names)",
        "layers": len(found.scales) // 2,
    }
    report |= {f"note.{index:03}": note[:1000] for index, note in enumerate(found.notes)}
    report |= _query_report(found)
    made = Artifact(
        model or name,
        exact,
        form,
        "checkpoint",
        CODEC,
        "plain",
        f"imported:{digest}",
        found.scales,
        found.missing,
        None,
        report,
    )
    return made, found.notes


def read_scales(root: Path, heads: Mapping[int, int], found: Import, allow_extra: bool) -> list[Found]:
    """All good KV scales in the directory's safetensors files. Adds to `found` what is wrong with names, layers,
    formats, shapes and values."""
    files = sorted(root.glob("*.safetensors"))
    if not files or len(files) > MAX_FILES:
        raise Invalid(f"{root} has {len(files)} safetensors files; KV scales are read from no other kind of file")
    tensors: list[Found] = []
    problems = found.problems
    places: dict[str, str] = {}
    for file in files:
        spans, _ = read_header(file)
        for name, span in sorted(spans.items()):
            said, where = parse(name), f"{name} in {file.name}"
            if said is None:
                if odd(name):
                    problems.append(f"{where} looks like a KV scale, but not of an attention layer that is understood")
                continue
            if name in places:
                problems.append(f"{where} stands in {places[name]} as well")
            places[name] = file.name
            if said.layer not in heads:
                if not allow_extra:
                    problems.append(
                        f"{where}: the model has no layer {said.layer} that keeps K and V (allow it with --allow-extra)"
                    )
                continue
            found.seen.add(said.layer)
            if span.nbytes > MAX_SCALE_BYTES:
                problems.append(f"{where} has {span.nbytes} bytes, too many for scales")
                continue
            with open_file(file) as stream:
                stream.seek(span.start)
                tensor = Tensor(span.dtype, span.shape, stream.read(span.nbytes))
            try:
                values = vector(tensor, heads[said.layer], said)
            except Invalid as error:
                problems.append(f"{where} (layer {said.layer}): {error}")
            else:
                tensors.append(Found(name, file.name, said, tensor.dtype, values))
    return tensors


def vector(tensor: Tensor, heads: int, said: ScaleName) -> Vector:
    """The values of a scale tensor as one number or one per head, bit for bit. Raises Invalid for another format,
    shape, or a bad value."""
    shape = list(tensor.shape)
    if said.zero_point:
        if any(tensor.data):  # zero in any format; an offset in FP8 codes has no meaning here
            raise Invalid("a zero point other than 0: asymmetric FP8 is not supported")
        return np.zeros(1, np.float32)
    values = to_f32(tensor)
    long = [size for size in shape if size != 1]
    # (heads, 1, 1) is llm-compressor's per-head shape; what has two long axes is not one scale per head.
    if len(long) > 1 or values.size not in (1, heads):
        raise Invalid(f"shape {shape} is neither one scale nor one for each of {heads} KV heads")
    values = values.reshape(-1)
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= LEAST_SCALE) & (values <= MOST_SCALE)))
    if bad.size:
        where = f" of head {bad[0]}" if values.size > 1 else ""
        raise Invalid(f"the value{where} is {values[bad[0]]!s}: a scale is finite and from 2^-64 to 2^119")
    return values


def _assemble(tensors: list[Found], heads: Mapping[int, int], found: Import, allow_missing: bool) -> None:
    """Fills scales, queries, notes and problems from tensors of good values."""
    by_layer: dict[int, dict[str, list[Found]]] = {}
    for one in tensors:
        found.styles.add(one.said.style)
        if one.said.zero_point:
            found.notes.append(f"{one.name} is 0 and was passed over: the format is symmetric")
            continue
        by_layer.setdefault(one.said.layer, {}).setdefault(one.said.part, []).append(one)
    for layer in sorted(by_layer):
        parts = {part: _one(group, found) for part, group in by_layer[layer].items()}
        fused = parts.pop("kv", None)
        if fused is not None:
            found.notes.append(f"{fused.name}: one scale for both, used for K and for V of layer {layer}")
            for part in "kv":
                other = parts.setdefault(part, fused)
                if not np.array_equal(other.values, fused.values):
                    found.problems.append(
                        f"{fused.name} in {fused.file} and {other.name} in {other.file} (layer {layer}) differ"
                    )
        if "q" in parts:
            found.queries[layer] = parts["q"].values
        for part in "kv":
            if part in parts:
                found.scales[layer, part] = parts[part].values
            elif fused is None and ("k" in parts or "v" in parts or "q" in parts):
                there = next(iter(parts.values()))
                found.problems.append(f"layer {layer} has {there.name} in {there.file}, but no {part}_scale")
    missing = sorted(set(heads) - found.seen)
    if missing and found.seen:
        if allow_missing:
            found.missing = tuple(missing)
            found.notes.append(f"layers without scales stay native: {_ranges(missing)}")
        else:
            found.problems.append(
                f"layers without any scale: {_ranges(missing)} (leave them native with --allow-missing)"
            )
    if found.scales and not found.queries:
        found.notes.append("no q_scale: a kernel that quantizes queries uses the layer's k_scale")


def _one(group: list[Found], found: Import) -> Found:
    """The scale of one part of one layer, which may stand under several names if these agree."""
    first = group[0]
    for other in group[1:]:
        if not np.array_equal(first.values, other.values):
            found.problems.append(
                f"{first.name} in {first.file} and {other.name} in {other.file} (layer {first.said.layer}) differ"
            )
    return first


def _granularity(found: Import, part: str) -> str:
    """ "tensor" or "head", the same in all layers of a part."""
    sizes = {layer: values.size for (layer, name), values in found.scales.items() if name == part}
    single = [layer for layer, size in sizes.items() if size == 1]
    if single and len(single) < len(sizes):
        raise Invalid(
            f"{part}_scale is one number in layers {_ranges(single)} and one for each head in the others: which of "
            "them is meant?"
        )
    return "tensor" if single else "head"


def _query_report(found: Import) -> dict[str, str | int]:
    """What stands in the report about q_scale: values as hex of f32, or the fall-back by its name."""
    if not found.queries:
        return {"q_scale": "k"}
    if any(8 * values.size > MAX_TEXT for values in found.queries.values()):
        raise Invalid(f"q_scale has more values than the {MAX_TEXT // 8} that a report has room for")
    return {
        f"q_scale.{layer}": "".join(f32_hex(float(value)) for value in values)
        for layer, values in sorted(found.queries.items())
    }


def _heads(caches: ModelCaches) -> dict[int, int]:
    """{layer: KV heads} of the layers that keep K and V."""
    if any(layer.kind == "latent" for layer in caches.layers):
        raise Invalid("MLA keeps one latent instead of K and V: k_scale and v_scale do not apply to it")
    return {layer.index: layer.heads for layer in caches.cached}


def _check_scheme(config: Mapping[str, Any]) -> None:
    """Raises Invalid for a KV scheme of compressed-tensors that is not symmetric static FP8 per tensor or head."""
    quantization = config.get("quantization_config") or {}
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
    if not isinstance(scheme, Mapping):
        return
    for key, good in (
        ("num_bits", (8,)),
        ("type", ("float",)),
        ("strategy", ("tensor", "attn_head")),
        ("dynamic", (False, None)),
        ("symmetric", (True,)),
    ):
        if key in scheme and scheme[key] not in good:
            raise Invalid(f"kv_cache_scheme.{key} is {scheme[key]!r:.80}; this imports {' or '.join(map(repr, good))}")


def _check_modelopt(config: Mapping[str, Any]) -> None:
    inner = config.get("quantization")
    kind = inner.get("kv_cache_quant_algo") if isinstance(inner, Mapping) else None
    if kind not in (None, "FP8"):
        raise Invalid(f"kv_cache_quant_algo is {kind!r:.80}; this imports FP8")


def _ranges(numbers: list[int]) -> str:
    """ "0-3, 7" of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _listed(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    more = [f"and {len(problems) - MOST_PROBLEMS} more"] if len(problems) > MOST_PROBLEMS else []
    return "\n  ".join([f"{len(problems)} things are wrong, nothing was imported:", *problems[:MOST_PROBLEMS], *more])
