"""The namespace of a running engine: what its ranks report, merged, and what only the engine's configuration says.

The scheduler half calls this once, after the weights are loaded and the engine has fixed its hash seed. Fields that all
ranks share must agree, and every rank must have reported; else there is no namespace and the connector stays off.
Blocks on disk while local weights are fingerprinted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.errors import Invalid
from kvtier.format.identity import Description
from kvtier.format.layout import FP8, Group, Layer, Layout, Part, Range

RankId = tuple[int, int]  # (pipeline rank, tensor rank)
_SHARED = ("kind", "heads_total", "tokens", "window", "digest")  # of a group, on all its ranks


@dataclass(frozen=True, slots=True)
class EngineNamespace:
    """`ranges`: for each rank the part of each group that it holds, None where it holds nothing of it."""

    description: Description
    ranges: dict[RankId, list[Range | None]]
    mode: str


def refusal(reason: str) -> str:
    """A report that says why a rank cannot take part."""
    return json.dumps({"refused": reason})


def read_reports(reports: Mapping[RankId, str]) -> dict[RankId, dict[str, Any]]:
    """The ranks' reports as data. Raises Invalid with a rank's reason to refuse, and if not every rank has reported."""
    data = {rank: json.loads(text) for rank, text in sorted(reports.items())}
    for rank, said in data.items():
        if "refused" in said:
            raise Invalid(f"rank {rank}: {said['refused']}")
    rows, columns = {pp for pp, _ in data}, {tp for _, tp in data}
    if not data or len(data) != len(rows) * len(columns):
        raise Invalid(f"the ranks {sorted(data)} have reported, which is not all of them")
    return data


def merge(data: dict[RankId, dict[str, Any]], engine_blocks: int, **common: Any) -> EngineNamespace:
    """The namespace of all ranks. Raises Invalid, with rank and field, where ranks disagree on what they share."""
    first = _agreed(data)
    index = _layer_indices(data)
    groups: list[Group] = []
    scales: dict[str, str] = {}
    ranges: dict[RankId, list[Range | None]] = {rank: [] for rank in data}
    for number in range(len(first["groups"])):
        held = {rank: group for rank, said in data.items() if (group := said["groups"][number]) is not None}
        shape = next(iter(held.values()))
        layers: dict[int, Layer] = {}
        for rank, group in held.items():
            for name in _SHARED:
                if group[name] != shape[name]:
                    found = f"{name} of group {number} is {group[name]!r} on {rank}"
                    raise Invalid(f"ranks disagree: {found} and {shape[name]!r} elsewhere")
            for layer_name, formats, values in group["layers"]:
                at = index[_key(rank, group["kind"], layer_name)]
                times = engine_blocks if group["kind"] == "opaque" else 1
                layer = Layer(at, tuple(Part(n, w * times, d, g) for n, w, d, g in formats))
                if layers.setdefault(at, layer) != layer:
                    raise Invalid(f"ranks disagree on the format of layer {layer_name}: {rank} has {formats}")
                _add_scales(scales, layer, group, values, rank)
        order = sorted(layers)
        for rank in data:
            own = [index[_key(rank, shape["kind"], layer[0])] for layer in held[rank]["layers"]] if rank in held else []
            ranges[rank].append(_range(number, held.get(rank, {}), own, order))
        ordered = tuple(layers[at] for at in order)
        kind, heads, tokens, window, digest = (shape[name] for name in _SHARED)
        groups.append(Group(kind, heads, tokens, ordered, engine_blocks, window, digest))
    quantized = any(part.dtype in FP8 for group in groups for layer in group.layers for part in layer.parts)
    common |= {name: first[name] for name in ("backend", "physical", "packing")}
    common |= {"rule": first.get("rule", "checkpoint" if quantized else "none"), "codec": first.get("codec", 0)}
    description = Description(layout=Layout(tuple(groups)), scales=scales, **common)
    for rank, parts in ranges.items():
        for part in parts:
            if part is not None:
                description.layout.extents(part)  # raises Invalid where a block would be too large
        if all(part is None for part in parts):
            raise Invalid(f"rank {rank} holds no layer")
    return EngineNamespace(description, ranges, first["mode"])


def _agreed(data: dict[RankId, dict[str, Any]]) -> dict[str, Any]:
    """What the first rank reports, once all agree with it on what they share."""
    first = next(iter(data.values()))
    for rank, said in data.items():
        for name in ("physical", "backend", "packing", "mode"):
            if said[name] != first[name]:
                found = f"{name} is {said[name]!r} on {rank}"
                raise Invalid(f"ranks disagree: {found} and {first[name]!r} on {next(iter(data))}")
        if len(said["groups"]) != len(first["groups"]):
            raise Invalid(f"ranks disagree on the number of KV cache groups: {len(said['groups'])} on {rank}")
    return first


def _key(rank: RankId, kind: str, name: str) -> tuple[int, str]:
    """What a layer is, across ranks: opaque bytes differ on tensor ranks, so there each has layers of its own."""
    return (rank[1] if kind == "opaque" else 0, name)


def _layer_indices(data: dict[RankId, dict[str, Any]]) -> dict[tuple[int, str], int]:
    """A number for every layer: the model's own where these are unique, else its place in the order of the names."""
    held = [(rank, group) for rank, said in data.items() for group in said["groups"] if group]
    keys = {_key(rank, group["kind"], layer[0]) for rank, group in held for layer in group["layers"]}
    numbers = {key: [int(n) for n in re.findall(r"(?<![^.])\d+(?![^.])", key[1])] for key in keys}
    own = {key: found[0] for key, found in numbers.items() if len(found) == 1}
    if len(set(own.values())) == len(keys):
        return own
    return {key: at for at, key in enumerate(sorted(keys, key=lambda key: (key[0], numbers[key], key[1])))}


def _add_scales(scales: dict[str, str], layer: Layer, group: dict[str, Any], values: Any, rank: RankId) -> None:
    """Enters a rank's scales: the one of the tensor, which all ranks share, or those of its heads in their place."""
    for part, own in zip(layer.parts, values, strict=True):
        if not own:
            continue
        name = f"{layer.index}.{part.name}"
        if part.granularity == "head":
            full = scales.get(name, "." * 8 * group["heads_total"])
            low, high = 8 * group["head_lo"], 8 * (group["head_lo"] + group["heads"])
            if full[low:high].strip(".") not in ("", "".join(own)):
                raise Invalid(f"ranks disagree on {part.name}_scale of layer {layer.index}: rank {rank} has {own}")
            scales[name] = full[:low] + "".join(own) + full[high:]
        elif scales.setdefault(name, own[0]) != own[0]:
            found = f"rank {rank} has {own[0]}, others {scales[name]}"
            raise Invalid(f"ranks disagree on {part.name}_scale of layer {layer.index}: {found}")


def _range(number: int, group: dict[str, Any], own: list[int], order: list[int]) -> Range | None:
    """The part of a group that a rank holds."""
    if not own:
        return None
    low = order.index(min(own))
    if order[low : low + len(own)] != sorted(own):
        raise Invalid(f"a rank's layers of group {number} are not consecutive: {sorted(own)} of {order}")
    heads = (0, 1) if group["kind"] != "attention" else (group["head_lo"], group["head_lo"] + group["heads"])
    return Range(number, (low, low + len(own)), heads)
