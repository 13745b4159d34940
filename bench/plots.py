"""Curves of what is kept in bench/results: `python -m bench.plots [--out DIR]`. Needs matplotlib (`pip install
'kvtier[bench]'`).

versus.png    kvtier's speed over each peer's, the median of the trials and p10 to p90
scaling.png   cost a block over blocks known, speed over clients, speed over block size
trace.png     tokens from the store, BF16 with LRU and FP8 with kvtier's order; the store's answers over engines
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.docs import RESULTS, kept

Points = list[tuple[float, float]]


def points(name: str, case: str, metric: str) -> Points:
    """(the number in the case, the value) of the rows whose case matches this pattern with one group, in order."""
    found = []
    for row in kept(name)["rows"]:
        number = re.fullmatch(case, row["case"])
        if number and row["metric"] == metric:
            found.append((float(number[1].replace(",", "")), row["value"]))
    return sorted(found)


def lines(axis: Any, title: str, label: tuple[str, str], curves: dict[str, Points], logarithmic: str = "x") -> None:
    """Curves with a legend."""
    for name, curve in curves.items():
        if curve:
            axis.plot(*zip(*curve, strict=True), marker="o", label=name)
    axis.set(title=title, xlabel=label[0], ylabel=label[1], ylim=(0, None))
    if "x" in logarithmic:
        axis.set_xscale("log", base=2 if "2" in logarithmic else 10)
    axis.grid(alpha=0.3)
    axis.legend()


def versus(pyplot: Any, out: Path) -> None:
    """A bar a peer and verb."""
    spread = {(row["case"], row["metric"]): row["value"] for row in kept("versus")["rows"]}
    bars = []
    for row in kept("versus")["rows"]:
        if " over " in row["metric"] and " of the ratio" not in row["metric"]:
            low, high = (spread[row["case"], f"{row['metric']}, p{p} of the ratio"] for p in (10, 90))
            bars.append((row["case"], row["value"], max(0.0, row["value"] - low), max(0.0, high - row["value"])))
    figure, axis = pyplot.subplots(figsize=(9, 0.35 * len(bars) + 1.2))
    names, values, below, above = zip(*reversed(bars), strict=True)
    axis.barh(names, values, xerr=(below, above), color="#4878a8")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set(title="speed of kvtier over that of the peer, same run", xscale="log")
    axis.grid(alpha=0.3, axis="x")
    save(pyplot, figure, out / "versus.png")


def scaling(pyplot: Any, out: Path) -> None:
    """Three panels."""
    figure, (blocks, clients, sizes) = pyplot.subplots(1, 3, figsize=(15, 4.2))
    keys = {"lookup": "1000", "lease": "32"}
    cost = {verb: points("scaling", f"{verb} of {n}, ([0-9,]+) blocks known", "a block") for verb, n in keys.items()}
    lines(blocks, "cost a block", ("blocks known", "us"), cost)
    speed = {verb: points("scaling", rf"{verb} 32 x 256 KiB, (\d+) clients", "all together") for verb in ("put", "get")}
    lines(clients, "32 x 256 KiB a call", ("clients", "GB/s"), speed, "x2")
    over = {verb: points("scaling", rf"{verb}, 32 MiB in blocks of (\d+) KiB", "speed") for verb in ("put", "get")}
    lines(sizes, "32 MiB a call", ("KiB of a block", "GB/s"), over, "x2")
    save(pyplot, figure, out / "scaling.png")


def trace(pyplot: Any, out: Path) -> None:
    """Two panels."""
    figure, (hits, engines) = pyplot.subplots(1, 2, figsize=(12, 4.2))
    rows = [
        row
        for row in kept("trace")["rows"]
        if row["metric"] == "tokens from the store" and row["case"].count(", ") == 2
    ]
    mixes = dict.fromkeys(row["case"].rsplit(", ", 2)[0] for row in rows)
    ratio = {row["case"]: row["ratio"] for row in rows}
    for n, name in enumerate(("BF16", "FP8")):
        for state, colour in (("cold", 0.9), ("warm", 0.5)):
            places = [i + 0.2 * (2 * n + (state == "warm")) for i in range(len(mixes))]
            heights = [ratio.get(f"{mix}, {name}, {state}", 0.0) for mix in mixes]
            hits.bar(
                places,
                heights,
                0.18,
                label=f"{name}, {state}",
                alpha=colour,
                color="#888888" if name == "BF16" else "#4878a8",
            )
    hits.set_xticks([i + 0.3 for i in range(len(mixes))], list(mixes))
    hits.set(title="share of the input's tokens from the store", ylim=(0, 1))
    hits.legend()
    shown = {
        what: points("trace", r".*, FP8, (\d+) engines", what)
        for what in ("lookup, p50", "lookup, p99", "load, p50", "load, p99")
    }
    lines(engines, "the store's answers", ("engines at once", "ms"), shown, "x2")
    save(pyplot, figure, out / "trace.png")


def save(pyplot: Any, figure: Any, path: Path) -> None:
    """Into a file whose bytes depend on the figures alone."""
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def main(out: Annotated[Path, typer.Option(help="Where the files go.")] = RESULTS) -> None:
    """Draw what is kept."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        print("no curves: matplotlib is not installed. Say: pip install 'kvtier[bench]'", file=sys.stderr)
        raise SystemExit(2) from None
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in {"versus": versus, "scaling": scaling, "trace": trace}.items():
        if (RESULTS / f"{name}.json").exists():
            draw(pyplot, out)


if __name__ == "__main__":
    typer.run(main)
