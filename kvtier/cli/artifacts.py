"""Commands about artifacts: import-scales, and artifact show | diff | verify. Only `verify` may ask a daemon."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Argument, Option

from kvtier.cli import output
from kvtier.cli.app import Common, app, command
from kvtier.cli.inputs import Revision, description_of
from kvtier.cli.output import Exit, message
from kvtier.format import artifact as bundle
from kvtier.format.artifact import Artifact, rank_scales
from kvtier.format.files import read_description
from kvtier.format.identity import Description, Difference, differences, hex_f32, pack_scales
from kvtier.models.advice import beyond_calibration, uncalibrated
from kvtier.models.scale_import import import_scales

group = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)
app.add_typer(group, name="artifact", help="Look at KV artifacts: show, diff, verify.")
Directory = Annotated[Path, Argument(help="Directory of an artifact.")]


@command("import-scales")
def import_(
    common: Common,
    checkpoint: Annotated[Path, Argument(help="Directory with config.json and safetensors files.")],
    save: Annotated[
        Path, Option("--save", help="Directory to write the artifact to; must not exist, or hold the same one.")
    ],
    revision: Revision = "",
    model: Annotated[str, Option("--model", help="The model's name. [default: the directory's]")] = "",
    allow_missing: Annotated[bool, Option("--allow-missing", help="Layers without scales stay native.")] = False,
    allow_extra: Annotated[
        bool, Option("--allow-extra", help="Pass over scales of layers that the model lacks.")
    ] = False,
    one: Annotated[bool, Option("--uncalibrated", help="Take scales that are all 1.0.")] = False,
) -> Exit:
    """Import a checkpoint's KV scales as an artifact: all of them or nothing, with everything that is wrong named."""
    allowed = {"allow_missing": allow_missing, "allow_extra": allow_extra, "uncalibrated": one}
    made, notes = import_scales(checkpoint, revision or None, model=model or None, **allowed)
    made.save(save)
    for note in notes:
        message(note)
    output.result({**_plain(made), "notes": notes}, common.json, lambda: _print(made, made.scales))
    return Exit.OK


@command("show", group)
def show(
    common: Common,
    directory: Directory,
    tp: Annotated[int, Option("--tp", min=1, max=1024, help="Tensor-parallel ranks.")] = 1,
    rank: Annotated[int, Option("--rank", min=0, max=1023, help="Show the scales of this rank.")] = 0,
    scales: Annotated[bool, Option("--scales", help="Print every scale.")] = False,
    context: Annotated[
        int, Option("--context", min=0, help="Warn if tokens of such a context were never calibrated.")
    ] = 0,
) -> Exit:
    """Show an artifact: where it comes from, its formats, its scales and those in use for queries, its digest."""
    found = bundle.load(directory)
    part = rank_scales(found, tp, rank)
    advice = (uncalibrated(found), beyond_calibration(found, context) if context else None)
    warnings = [one for one in advice if one is not None]
    values = {f"{layer}.{name}": [float(value) for value in vector] for (layer, name), vector in sorted(part.items())}
    data = {**_plain(found), "scales": values, "queries": _queries(found, part)}
    data["warnings"] = [one.found for one in warnings]

    def print_it() -> None:
        _print(found, part)
        if scales:
            rows = [(layer, name, _values(vector)) for (layer, name), vector in sorted(part.items())]
            output.table(("layer", "part", "scales"), rows)

    output.result(data, common.json, print_it)
    output.warn(warnings)
    return Exit.OK


@command("diff", group)
def diff(
    common: Common,
    first: Directory,
    second: Annotated[Path, Argument(help="Directory of another artifact.")],
    most: Annotated[int, Option("--most", min=1, max=100_000, help="Differences to print.")] = 50,
) -> Exit:
    """Compare two artifacts, field by field and scale by scale. Exit code 1 if they differ."""
    return _say(common, bundle.diff(bundle.load(first), bundle.load(second), most), "the same artifact")


@command("verify", group)
def verify(
    common: Common,
    directory: Directory,
    live: Annotated[
        str,
        Argument(
            help="A live engine's namespace (beginning of its digest), a description file, or a checkpoint directory."
        ),
    ],
    most: Annotated[int, Option("--most", min=1, max=100_000, help="Differences to print.")] = 50,
) -> Exit:
    """Check an artifact against the scales that a live engine has loaded (its namespace states them), or against a
    checkpoint. Exit code 1 if one differs."""
    found = bundle.load(directory)
    if os.path.isdir(live):
        other, _ = import_scales(live, allow_missing=True, allow_extra=True, uncalibrated=True)
        differing = against(found, other.revision, pack_scales(other.scales))
        return _say(common, differing, f"the scales of {live} are those of the artifact", most)
    if live.endswith(".json") or os.sep in live:
        description = read_description(Path(live))
    else:
        with common.client() as client:
            description = description_of(live, client, common.deadline)
    return _say(common, against_live(found, description), "the live scales are those of the artifact", most)


def against(stored: Artifact, revision: str, scales: dict[str, str]) -> list[Difference]:
    """How an artifact differs from a model that was found with these scales: revision, and scale by scale."""
    left = {"revision": stored.revision, "scales": pack_scales(stored.scales)}
    return differences(left, {"revision": revision, "scales": scales}, 100_000)


def against_live(stored: Artifact, live: Description) -> list[Difference]:
    """The same for an engine's namespace, which may name its artifact."""
    found = against(stored, live.revision, dict(live.scales))
    if live.artifact is not None:
        sides = ((stored.digest, stored.codec), (live.artifact, live.codec))
        left, right = ({"artifact": digest, "codec": codec} for digest, codec in sides)
        found = differences(left, right, 2) + found
    return found


def _say(common: Common, found: list[Difference], same: str, most: int = 100_000) -> Exit:
    lines = [str(one) for one in found]

    def print_it() -> None:
        for line in lines[:most] or [same]:
            print(line)
        if len(lines) > most:
            print(f"... and {len(lines) - most} more")

    output.result({"same": not lines, "differences": lines}, common.json, print_it)
    return Exit.NEGATIVE if lines else Exit.OK


def _plain(one: Artifact) -> dict[str, Any]:
    """The manifest, its digest, and the mark of scales that nobody has calibrated."""
    return {"manifest": one.to_json(), "digest": one.digest, "uncalibrated": one.uncalibrated}


def _queries(one: Artifact, scales: bundle.Scales) -> dict[str, list[float]]:
    """The scale of queries that a kernel uses in each layer: the checkpoint's, or that of K where it has none."""
    found = {}
    for layer in sorted({layer for layer, part in scales if part == "k"}):
        said = _hex(one.report.get(f"q_scale.{layer}", ""))
        own = np.frombuffer(bytes.fromhex(said), ">f4") if said else scales[layer, "k"]
        found[str(layer)] = [float(value) for value in own]
    return found


def _hex(value: str | int) -> str:
    """Digits of f32 values in a report, which may hold anything: "" unless they are such."""
    return value if isinstance(value, str) and re.fullmatch(r"(?:[0-9a-f]{8})+", value) else ""


def _print(one: Artifact, scales: bundle.Scales) -> None:
    if one.uncalibrated:
        print("UNCALIBRATED: every scale is 1.0")
    position = "unknown" if one.calibrated_position is None else f"{one.calibrated_position:,}"
    rows = [
        ("digest", one.digest),
        ("model", one.model),
        ("revision", one.revision),
        ("formats", ", ".join(f"{name}: {f.dtype} per {f.granularity}" for name, f in sorted(one.parts.items()))),
        ("rule, codec, backend", f"{one.rule}, {one.codec}, {one.backend}"),
        ("calibration", one.calibration),
        ("largest calibrated position", position),
        ("native layers", ", ".join(map(str, one.excluded)) or "none"),
        ("q_scale in use", "the checkpoint's" if any(key.startswith("q_scale.") for key in one.report) else "k_scale"),
        *(
            (f"report: {key}", str(value))
            for key, value in sorted(one.report.items())
            if not key.startswith(("q_scale", "sensitivity."))
        ),
    ]
    costs = {
        int(key.removeprefix("sensitivity.")): _hex(value)
        for key, value in one.report.items()
        if re.fullmatch(r"sensitivity\.\d{1,5}", key)
    }
    costs = {layer: value for layer, value in costs.items() if len(value) == 8}
    if costs:
        worst = sorted(costs, key=lambda layer: -hex_f32(costs[layer]))[:5]
        rows.append(
            (
                "KL of a layer alone, the worst",
                ", ".join(f"layer {layer}: {hex_f32(costs[layer]):.5f}" for layer in worst),
            )
        )
    output.table(("what", "value"), rows)
    if scales:
        layers = sorted({layer for layer, _ in scales})
        spans = [(layer, _span(scales, layer, "k"), _span(scales, layer, "v")) for layer in layers]
        output.table(("layer", "k_scale", "v_scale"), spans)


def _span(scales: bundle.Scales, layer: int, part: str) -> str:
    vector = scales.get((layer, part))
    if vector is None:
        return "-"
    low, high = vector.min(), vector.max()
    return f"{low!s}" if low == high else f"{low!s} to {high!s}"


def _values(vector: np.ndarray[Any, np.dtype[np.float32]]) -> str:
    return " ".join(str(value) for value in vector)
