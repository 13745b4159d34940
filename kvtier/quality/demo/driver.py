"""The main job on real input: KV of a language model is stored as FP8, survives the death of its engine, and is
attended to again.

    python -m kvtier.quality.demo [--json FILE] [--prompt N] [--positions N] [--block N] [--threads N]
    [--attention reference|kernels]

This driver imports no torch. It starts a daemon and two engine processes (`kvtier.quality.demo.engine`), kills the
first one with SIGKILL, asks for the same prefix under another revision and under changed scales, and prints what it
saw. Exit code 0 only if every promise held. Every wait has a deadline, and whatever was started is ended."""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

import kvtier
from kvtier.format import artifact
from kvtier.format.identity import Description, parse_description

LEAST_TOP1 = 0.88  # share of positions whose first choice equals the native one's
PATIENCE = 240.0  # seconds for one step of an engine; the whole demo takes about one minute on two cores
INTERPRETED = 900.0  # the same where Triton's interpreter, a thousand times slower than a kernel, does the attention
SOON = 30.0  # seconds for the daemon to start or stop
CALL = 5.0  # deadline of one call, far above the default: on a busy machine a late answer must not look like a miss
ARENA = "512MiB"
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")  # shown short; whole in the JSON


class Failed(Exception):
    """A process did not do its part; the message says which and shows the end of its log."""


class Process:
    """A child whose stdout a thread of its own reads, so that every wait can have a deadline. stderr goes to a log."""

    def __init__(self, name: str, directory: Path, *command: str) -> None:
        self.name = name
        self._log = directory / f"{name}.log"
        # Waiting threads of torch sleep instead of spinning: on two busy cores a prefill takes 4 s, not 10.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        with open(self._log, "wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, *command], stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        assert self.popen.stdout is not None
        self._lines: queue.Queue[str | None] = queue.Queue(10_000)
        threading.Thread(target=self._read, args=(self.popen.stdout,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)

    def line(self, until: float) -> str:
        """The next line of stdout. Raises Failed at its end or at the time `until` (monotonic)."""
        try:
            line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise Failed(f"{self.name} took too long\n{self.tail()}") from None
        if line is None:
            raise Failed(f"{self.name} ended with {self.popen.wait(SOON)}\n{self.tail()}")
        return line

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def end(self, number: int) -> int:
        """Sends a signal and waits for the end; the exit status, negative for a signal. Raises Failed if it stays."""
        self.popen.send_signal(number)
        try:
            return self.popen.wait(SOON)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self.name} outlives signal {number}\n{self.tail()}") from None

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait(SOON)


class Bars:
    """One progress bar per step of an engine, made when the step first reports."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console)
        self._tasks: dict[str, TaskID] = {}

    def update(self, label: str, done: int, total: int) -> None:
        if label not in self._tasks:
            self._tasks[label] = self.progress.add_task(escape(label), total=total)
        self.progress.update(self._tasks[label], completed=done)


def await_event(engine: Process, event: str, bars: Bars, patience: float = PATIENCE) -> dict[str, Any]:
    """The engine's next event of this name; its progress moves the bars meanwhile."""
    until = time.monotonic() + patience
    while True:
        message: dict[str, Any] = json.loads(engine.line(until))
        if message["event"] == event:
            return message
        if message["event"] == "progress":
            bars.update(f"{engine.name}: {message['what']}", message["done"], message["total"])


@contextmanager
def daemon(directory: Path, socket: Path) -> Iterator[Process]:
    """A daemon that accepts calls on `socket`; ended on exit."""
    with Process(
        "kvtier-server", directory, "-m", "kvtier.server", "--socket", str(socket), "--arena-bytes", ARENA
    ) as process:
        line = process.line(time.monotonic() + SOON)
        if not line.startswith("ready"):
            raise Failed(f"kvtier-server said {line!r}\n{process.tail()}")
        try:
            yield process
        except Failed as failure:  # the daemon's side of it
            raise Failed(f"{failure}\nlog of {process.name}:\n{process.tail()}") from None


def ask(client: kvtier.Client, description: Description, hashes: list[bytes]) -> dict[str, Any]:
    """Hits of the prefix under this description, whether the daemon really answered, and how the nearest namespace that
    it knows differs."""
    differences = client.explain(description, deadline=CALL)  # before the lookup, which makes this namespace known, too
    answer = client.lookup(client.register(description), hashes, deadline=CALL)
    return {"hits": int(answer), "answered": not answer.error, "differences": differences}


def strangers(socket: Path, scales: artifact.Artifact, description: Description, hashes: list[bytes]) -> dict[str, Any]:
    """The same prefix asked for as stored, by another revision of the model, and after one head was calibrated anew."""

    def live(other: artifact.Artifact) -> Description:
        return other.describe(
            description.layout, description.hashing, rope=description.rope, physical=description.physical
        )

    layer = min(17, max(index for index, _ in scales.scales))
    changed = {key: np.array(values) for key, values in scales.scales.items()}
    head = min(2, changed[layer, "k"].size - 1)
    changed[layer, "k"][head] *= 2
    with kvtier.Client(f"unix:{socket}") as client:
        return {
            "same": ask(client, description, hashes),
            "other_revision": ask(client, live(replace(scales, revision="fingerprint:" + "0" * 64)), hashes),
            "other_scales": ask(client, live(replace(scales, scales=changed)), hashes),
            "changed_scale": f"k_scale of layer {layer}, head {head}",
        }


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All the work; returns the figures. Raises Failed where a process does not do its part."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as name:
        directory = Path(name)
        socket, scales = directory / "kvtier.sock", directory / "artifact"
        options = ["--socket", str(socket), "--artifact", str(scales)]
        for option in ("prompt", "positions", "block", "threads", "attention"):
            options += [f"--{option}", str(getattr(arguments, option))]
        bars = Bars(console)
        with daemon(directory, socket) as server, bars.progress:
            with Process("engine A", directory, "-m", "kvtier.quality.demo.engine", "store", *options) as engine:
                stored = await_event(engine, "stored", bars)
                killed = engine.end(signal.SIGKILL)
            console.print(f"engine A stored {stored['blocks']} blocks and was killed with SIGKILL; the daemon lives on")
            with Process("engine B", directory, "-m", "kvtier.quality.demo.engine", "restore", *options) as engine:
                result = await_event(
                    engine, "result", bars, PATIENCE if arguments.attention == "reference" else INTERPRETED
                )
            description, hashes = (
                parse_description(result.pop("description").encode()),
                [bytes.fromhex(h) for h in result.pop("hashes")],
            )
            others = strangers(socket, artifact.load(scales), description, hashes)
            stopped = server.end(signal.SIGTERM)
    figures = {"stored": stored, "result": result, **others, "engine_a_exit": killed, "daemon_exit": stopped}
    figures["python"], figures["cores"] = platform.python_version(), os.cpu_count()
    figures["prompt"], figures["block"], figures["model"] = arguments.prompt, arguments.block, description.model
    figures["ratio"] = result["bytes_bf16"] / result["bytes_bodies"]
    figures["seconds"] = time.monotonic() - began
    figures["promises"] = promises(figures)
    return figures


def promises(figures: dict[str, Any]) -> dict[str, bool]:
    """What the demo promises, and whether it was seen."""
    result, blocks, before_last = (
        figures["result"],
        figures["prompt"] // figures["block"],
        (figures["prompt"] - 1) // figures["block"],
    )
    right, control = result["restored"]["top1"], result["control"]["top1"]
    revision, scales = figures["other_revision"], figures["other_scales"]

    def named(answer: dict[str, Any], field: str) -> bool:
        return any(line.startswith(f"{field}:") for line in answer["differences"])

    kernels = (
        {}
        if result["kernels"] is None
        else {"through the Triton kernels every answer is the reference's": result["kernels"]["top1"] == 1.0}
    )
    return kernels | {
        f"engine A stored all {blocks} whole blocks and died of SIGKILL": figures["stored"]["blocks"] == blocks
        and figures["engine_a_exit"] == -signal.SIGKILL,
        f"a fresh process restored the {before_last} that end before the prompt's last token": result["blocks_restored"]
        == before_last,
        f"top-1 agreement with native KV is at least {LEAST_TOP1}": right >= LEAST_TOP1,
        "the driver finds the prefix under the same description": figures["same"]["hits"] == blocks,
        "0 hits under another revision, which is named": revision["hits"] == 0
        and revision["answered"]
        and named(revision, "revision"),
        "0 hits under changed scales, and the scale is named": scales["hits"] == 0
        and scales["answered"]
        and named(scales, figures["changed_scale"]),
        "with scales x 20 agreement falls below half": control < right / 2,
        "the daemon stopped cleanly": figures["daemon_exit"] == 0,
    }


def report(figures: dict[str, Any], console: Console) -> None:
    """The figures as a table."""
    result, stored = figures["result"], figures["stored"]
    right, control = result["restored"], result["control"]
    tail = figures["prompt"] - result["tokens_restored"]
    table = Table(show_header=False, title=f"{figures['model']}, Python {figures['python']}", title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    table.add_column()

    def row(what: str, figure: str, note: str = "") -> None:
        table.add_row(escape(what), escape(figure), escape(note))

    blocks = f"{result['blocks_restored']} blocks of {figures['block']}"
    row(
        "tokens restored",
        f"{result['tokens_restored']:,}",
        f"{blocks}; the last {tail} of {figures['prompt']:,} are computed anew",
    )
    row("bytes, BF16", f"{result['bytes_bf16']:,}", "of the same tokens")
    row(
        "bytes, FP8 + scales",
        f"{result['bytes_bodies']:,}",
        f"{result['bytes_codes']:,} codes; scales per head, padded to 16 bytes a layer",
    )
    row("effective ratio", f"{figures['ratio']:.3f}")
    row("elements clipped", f"{stored['clipped']:,}", "by scales that were calibrated on other topics")
    row("seconds to recompute", f"{result['seconds_recompute']:.2f}", "prefill of these tokens")
    row(
        "seconds to restore",
        f"{result['seconds_restore']:.3f}",
        "connect, look up, lease, views over the slots; no copy",
    )
    table.add_section()
    spread = f"+-{right['top1_standard_error']:.3f}"
    row(
        "top-1 agreement with native",
        f"{right['top1']:.3f}",
        f"{spread} over {result['positions']} teacher-forced positions",
    )
    row("KL(native || restored)", f"{right['kl']:.5f}", "nats a token")
    row("perplexity", f"{right['perplexity']:.3f}", f"native {result['native_perplexity']:.3f}")
    if result["kernels"] is not None:
        row(
            "kernels against reference",
            f"{result['kernels']['top1']:.3f}",
            f"top-1 agreement, KL {result['kernels']['kl']:.1e}, same restored blocks",
        )
    table.add_section()
    for key, what in (
        ("same", "same description"),
        ("other_revision", "another revision"),
        ("other_scales", "changed scales"),
    ):
        asked = figures[key]
        row(
            f"hits, {what}", str(asked["hits"]), "\n".join(_DIGEST.sub(r"\1...", line) for line in asked["differences"])
        )
    table.add_section()
    row("control: scales x 20", f"{control['top1']:.3f}", f"top-1 agreement; KL {control['kl']:.2f}")
    console.print(table)
    console.print(
        "The model's weights are dequantized from 4 bits; the text is that of pydoc_data.topics.\n", highlight=False
    )
    for promise, held in figures["promises"].items():
        console.print(f"[green]yes[/]  {promise}" if held else f"[bold red]NO[/]   {promise}")
    console.print(f"{figures['seconds']:.0f} s")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that the demo hands to its engines."""
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the prompt (default 2000)")
    said = "tokens after the prompt, each predicted from the ones before it (default 512)"
    parser.add_argument("--positions", type=int, default=512, help=said)
    parser.add_argument("--block", type=int, default=64, help="tokens of a block (default 64)")
    threads = min(2, os.cpu_count() or 1)
    parser.add_argument("--threads", type=int, default=threads, help="threads of an engine (default 2)")
    said = "kernels: once more through Triton, and compare"
    parser.add_argument("--attention", choices=("reference", "kernels"), default="reference", help=said)


def main() -> int:
    """Entry point: 0 if every promise held."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtier.quality.demo", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    add_options(parser)
    arguments = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=130)
    try:
        figures = run(arguments, console)
    except Failed as failure:
        console.print(f"[bold red]failed[/]: {escape(str(failure))}")
        return 1
    report(figures, console)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if all(figures["promises"].values()) else 1
