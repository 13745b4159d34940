"""Hit ratios of every policy on the three traces of tests/data, with Belady above them: CSV, and curves as PNG where
matplotlib is installed.

`python -m bench.policy [--out bench/results]`. Beside each ratio stands the CPU time of a touched block. The first line
of the CSV is the command."""

from __future__ import annotations

import importlib
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.harness import ROOT, progress
from kvtier.cli.simulator import POLICIES, SHARES, belady, distinct, hit_ratio, load
from kvtier.store import eviction

TRACES = ("conversation", "agents", "one_shot")
Row = tuple[str, int, int, str, float, float]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def measure() -> list[Row]:
    """(trace, percent of the distinct blocks, blocks, policy, hit ratio, CPU microseconds a touched block)."""
    rows: list[Row] = []
    with progress("replaying", len(TRACES) * len(SHARES) * (len(POLICIES) + 1)) as tick:
        for trace in TRACES:
            requests = load(ROOT / "tests" / "data" / f"{trace}.npz")
            touched, blocks = sum(map(len, requests)), distinct(requests)
            for share in SHARES:
                capacity = blocks * share // 100
                for name in [*POLICIES, "belady"]:
                    began = time.process_time()
                    ratio = (
                        belady(requests, capacity)
                        if name == "belady"
                        else hit_ratio(requests, POLICIES[name](capacity))
                    )
                    rows.append((trace, share, capacity, name, ratio, (time.process_time() - began) / touched * 1e6))
                    tick()
    return rows


def missed(rows: list[Row]) -> list[str]:
    """Where kvtier's policy is more than 0.01 below the best of the simple ones, or takes more than 10 us a block."""
    found = {(trace, share, name): (ratio, cpu) for trace, share, _, name, ratio, cpu in rows}
    lines = []
    for trace, share in dict.fromkeys(row[:2] for row in rows):
        best = max(found[trace, share, name][0] for name in ("lru", "s3-fifo", "arc"))
        ours, cpu = found[trace, share, "kvtier"]
        if ours < best - 0.01 or cpu > 10:
            lines.append(f"{trace} {share} %: {ours:.4f}, best {best:.4f}, {cpu:.1f} us")
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """The curves. Needs matplotlib."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, len(TRACES), figsize=(15, 4.5))
    for axis, trace in zip(axes, TRACES, strict=True):
        for name in [*POLICIES, "belady"]:
            points = [(share, ratio) for t, share, _, n, ratio, _ in rows if (t, n) == (trace, name)]
            axis.plot(*zip(*points, strict=True), marker="o", label=name, linestyle="--" if name == "belady" else "-")
        axis.set(title=trace, xscale="log", xlabel="capacity, percent of the distinct blocks", ylabel="hit ratio")
        axis.set_xticks(SHARES, [str(share) for share in SHARES])
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="folder for policy.csv and policy.png")] = ROOT / "bench" / "results",
) -> None:
    """Replay all traces with all policies."""
    rows = measure()
    out.mkdir(parents=True, exist_ok=True)
    lines = [
        f"# {shlex.join(['python', '-m', 'bench.policy', *sys.argv[1:]])}",
        "trace,percent,blocks,policy,hit_ratio,cpu_us_per_block",
    ]
    lines += [
        f"{trace},{share},{blocks},{name},{ratio:.4f},{cpu:.2f}" for trace, share, blocks, name, ratio, cpu in rows
    ]
    (out / "policy.csv").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    print(f"ghosts: {eviction.GHOSTS * 8} bytes a block held; missed: {'; '.join(missed(rows)) or 'none'}")
    try:
        draw(rows, out / "policy.png")
    except ImportError:
        print("no curves: matplotlib is not installed", file=sys.stderr)


if __name__ == "__main__":
    app()
