"""`kvtier replay TRACE`: what an arena would hit on a trace, in BF16 with LRU and in FP8 with kvtier's order."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from kvtier.cli import output
from kvtier.cli.app import Common, command
from kvtier.cli.output import Exit
from kvtier.cli.simulator import BELADY, POLICIES, SHARES, at_bytes, at_shares, distinct, load
from kvtier.errors import Invalid
from kvtier.server.settings import parse_size

NAMES = (*POLICIES, BELADY)
Rows = list[dict[str, Any]]


@command()
def replay(
    common: Common,
    trace: Annotated[
        Path,
        Argument(
            help="Requests: JSON lines with hash_ids, as Mooncake publishes them, or the columns of tests/data (.npz)."
        ),
    ],
    nbytes: Annotated[
        str, Option("--bytes", help="An arena of this size, such as 600GiB: BF16 with LRU beside FP8 with every order.")
    ] = "",
    shape: Annotated[str, Option("--layout", help="Layers, KV heads and width of a head of the model.")] = "32,8,128",
    tokens: Annotated[int, Option("--tokens", min=16, help="Tokens of one of the trace's blocks.")] = 512,
    plot: Annotated[
        Path | None,
        Option("--plot", help="Draw hit ratios at 1 to 40 % of the distinct blocks into this file (PNG, SVG)."),
    ] = None,
) -> Exit:
    """Replay a trace of requests: hit ratios of LRU, S3-FIFO, ARC, kvtier's order and Belady's, which knows the future.

    With --bytes in that much memory, else at 1 to 40 % of the distinct blocks.
    """
    size = parse_size(nbytes) if nbytes else 0
    sides = _sides(shape)
    pyplot = _pyplot() if plot is not None else None
    requests = load(trace)
    if not requests:
        raise Invalid(f"{trace} has no request")
    runs = (1 + len(NAMES) if size else 0) + (len(SHARES) * len(NAMES) if not size or plot else 0)
    with output.progress("replaying", runs * len(requests), unit="requests") as advance:
        found = at_bytes(requests, size, tokens, sides, list(POLICIES), advance) if size else []
        curves = at_shares(requests, list(POLICIES), advance) if not size or plot else []
    data: dict[str, Any] = {"trace": str(trace), "requests": len(requests), "distinct_blocks": distinct(requests)}
    data["rows"] = found or curves
    if size:
        data |= {"arena_bytes": size, **_doubling(found)}
    if plot is not None:
        _draw(pyplot, curves, found, plot, trace.stem)
    output.result(data, common.json, lambda: _print(found, curves, data, plot))
    return Exit.OK


def _sides(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and 0 < int(part) < 2**16 for part in parts):
        wanted = "write layers,KV heads,width of a head, such as 32,8,128"
        raise Invalid(f"--layout {text!r:.80} is not three numbers: {wanted}")
    layers, heads, width = map(int, parts)
    return layers, heads, width


def _doubling(rows: Rows) -> dict[str, Any]:
    """How many times the blocks FP8 holds, counted in slots and slabs, and what that and the order give."""
    before = rows[0]
    ours = next(row for row in rows if row["format"] != before["format"] and row["policy"] == "kvtier")
    times = ours["blocks"] / before["blocks"]
    return {"times_the_blocks": times, "before": before["hit_ratio"], "after": ours["hit_ratio"]}


def _print(found: Rows, curves: Rows, data: dict[str, Any], plot: Path | None) -> None:
    if found:
        columns = ("format", "policy", "slot bytes", "blocks", "hit ratio")
        fields = ("format", "policy", "slot_bytes", "blocks")
        output.table(columns, [(*(row[name] for name in fields), f"{row['hit_ratio']:.4f}") for row in found])
        print(
            f"In {data['arena_bytes']:,} bytes FP8 holds {data['times_the_blocks']:.3f} times the blocks of BF16. "
            f"BF16 with LRU hits {data['before']:.4f}, FP8 with kvtier's order {data['after']:.4f}."
        )
    else:
        by_share = {share: [r for r in curves if r["share"] == share] for share in SHARES}
        output.table(
            ("% of blocks", "blocks", *NAMES),
            [(share, rows[0]["blocks"], *(f"{r['hit_ratio']:.4f}" for r in rows)) for share, rows in by_share.items()],
        )
    if plot is not None:
        output.message(f"curves in {plot}")


def _pyplot() -> Any:
    """matplotlib, drawing into files only. Raises Invalid where it is not installed, before anything is replayed."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise Invalid("--plot needs matplotlib: pip install 'kvtier[bench]'") from None


def _draw(pyplot: Any, curves: Rows, found: Rows, path: Path, title: str) -> None:
    """Hit ratio over capacity, a line per order; with --bytes a mark at what BF16 and FP8 hold."""
    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    for name in NAMES:
        points = [(row["blocks"], row["hit_ratio"]) for row in curves if row["policy"] == name]
        axis.plot(*zip(*points, strict=True), marker="o", label=name, linestyle="--" if name == BELADY else "-")
    for row in _formats(found):
        axis.axvline(row["blocks"], color="grey", linewidth=0.8)
        axis.annotate(row["format"], (row["blocks"], 0.02), rotation=90, xycoords=("data", "axes fraction"), fontsize=8)
    axis.set(title=title, xscale="log", xlabel="blocks held", ylabel="hit ratio")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:  # a suffix that it has no writer for
        raise Invalid(f"{path}: {error!s:.200}") from None
    pyplot.close(figure)


def _formats(found: Rows) -> Sequence[dict[str, Any]]:
    """The first row of each format."""
    return list({row["format"]: row for row in reversed(found)}.values())
