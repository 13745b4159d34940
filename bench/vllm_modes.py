"""What the modes of the vLLM connector move over the link, and how long a restore takes, on CPU.

Run it in vLLM's environment, which `make test-vllm` makes: .venv-vllm/bin/python -m bench.vllm_modes

SmolLM2-135M, prompts of 2k and 4k tokens, one engine a mode: a prompt is computed and saved, the engine forgets it, and
it comes back from the daemon. `native` and `expand` run on vLLM's own attention, `dual` on kvtier's in plain torch,
which is there to be right: its time to the first token says nothing about a GPU. Restore is the connector's own clock,
from plan to end; the ceiling of a row is `native` of the same length."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.harness import MiB, end_cleanly, median
from bench.report import Report
from bench.vllm_restore import export
from tests.connectors.vllm.dual import DualEngine
from tests.connectors.vllm.engine import prompt
from tests.support.daemon import Daemon

MODES = ("native", "dual", "expand")
COUNTED = {
    "bytes over the link": ("load_bytes", "B"),
    "restore": ("load_seconds", "s"),
    "of it expanding": ("expand_seconds", "s"),
    "bytes written by expanding": ("expand_bytes", "B"),
}
BYTES_MARK = 0.52  # of native, scales and padding included


def measure(mode: str, model: Path, lengths: list[int], rounds: int) -> dict[tuple[int, str], list[float]]:
    """{(tokens, what): one value a round} of one engine."""
    found: dict[tuple[int, str], list[float]] = {}
    options: dict[str, Any] = {
        "max_model_len": max(lengths) + 64,
        "max_num_batched_tokens": max(lengths) + 64,
        "max_num_seqs": 2,
    }
    with (
        Daemon(2048 * MiB) as daemon,
        DualEngine(
            model, daemon.socket, dual=mode == "dual", settings={"mode": mode}, block_size=32, **options
        ) as engine,
    ):
        for place, length in enumerate(lengths):
            for number in range(rounds + 1):  # the first is a warm-up
                tokens = prompt(10_000 * place + number, length)
                engine.run(tokens, max_tokens=1)
                engine.ask("settle")
                assert engine.ask("forget")
                before = engine.ask("counters")
                answer = engine.run(tokens, max_tokens=1)
                after = engine.ask("counters")
                assert answer["served"] >= length - 32, (mode, answer)
                if not number:
                    continue
                for what, (name, _) in COUNTED.items():
                    found.setdefault((length, what), []).append(after.get(name, 0) - before.get(name, 0))
                found.setdefault((length, "time to first token"), []).append(answer["seconds"])
    return found


def main(
    quick: Annotated[bool, typer.Option(help="Walk through everything, measure nothing worth reading.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a mark is missed.")] = False,
    rounds: Annotated[int, typer.Option(help="Prompts of each length.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Keep the rows in this file.")] = None,
) -> None:
    """vLLM on CPU: bytes and seconds of a restore in each mode."""
    end_cleanly()
    arguments = [
        *(["--quick"] if quick else []),
        *(["--strict"] if strict else []),
        *(["--rounds", str(rounds)] if rounds != 3 else []),
        *(["--json", str(json)] if json else []),
    ]
    report = Report("bench.vllm_modes", arguments)
    lengths, rounds = ([2048], 1) if quick else ([2048, 4096], rounds)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        model = export(Path(directory) / "smollm2")
        found = {mode: measure(mode, model, lengths, rounds) for mode in MODES}
    for length in lengths:
        for mode in MODES:
            for what in (
                "bytes over the link",
                "restore",
                "of it expanding",
                "bytes written by expanding",
                "time to first token",
            ):
                value, ceiling = median(found[mode][length, what]), median(found["native"][length, what])
                if "expanding" in what and mode != "expand":
                    continue
                unit = COUNTED[what][1] if what in COUNTED else "s"
                mark = ("<=", BYTES_MARK * ceiling) if what == "bytes over the link" and mode != "native" else None
                report.add(
                    f"{mode}, {length} tokens",
                    what,
                    value,
                    unit,
                    ceiling or None,
                    value / ceiling if ceiling else None,
                    mark,
                )
    raise SystemExit(report.finish(json, strict))


if __name__ == "__main__":
    typer.run(main)
