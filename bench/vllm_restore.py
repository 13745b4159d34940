"""What restoring a prefix saves against computing it again, in vLLM on CPU, and what asking costs the scheduler.

Run it in vLLM's environment, which `make test-vllm` makes: .venv-vllm/bin/python -m bench.vllm_restore

restore   SmolLM2-135M, prompts of 2k and 4k tokens: time to the first token in a fresh engine that has it from the
          store, over that in a fresh engine that computes it. Both after a warm-up on another prompt of the same length
          (compilations, first touch of the cache).
lookup    `get_num_new_matched_tokens` over 500 requests of a tiny model: with a live daemon, one that is stopped, and
          none; and what these requests leave behind.
"""

from __future__ import annotations

import json as json_
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.harness import MiB, end_cleanly, median, percentile
from bench.report import Report
from tests.connectors.vllm.engine import Engine, prompt
from tests.connectors.vllm.models import make
from tests.connectors.vllm.patience import PRODUCTION
from tests.support.daemon import Daemon

RESTORE_MARK = 0.2
LIVE_MARK, SILENT_MARK = 2.0, 10.0  # milliseconds


def export(directory: Path) -> Path:
    """SmolLM2-135M-Instruct (4-bit weights, decoded) as a plain Llama checkpoint in BF16, for engines that read
    safetensors."""
    from safetensors.torch import save_file

    from kvtier.quality.smollm import load

    model = load()
    shape, weights = model.shape, model.weights
    layer_names = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        **{n: f"self_attn.{n}_proj" for n in "qkvo"},
    }
    layer_names |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    tensors = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["norm"]}
    for layer in range(shape.layers):
        tensors |= {
            f"model.layers.{layer}.{theirs}.weight": weights[f"{layer}.{ours}"] for ours, theirs in layer_names.items()
        }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": weights["0.gate"].shape[0],
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.width,
        "vocab_size": weights["embedding"].shape[0],
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.theta,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json_.dumps(config, indent=1))
    return directory


def restoring(report: Report, model: Path, lengths: list[int], rounds: int) -> None:
    """Time to the first token, restored over recomputed."""
    options: dict[str, Any] = {
        "max_model_len": max(lengths) + 64,
        "max_num_batched_tokens": max(lengths) + 64,
        "max_num_seqs": 2,
    }
    with Daemon(4096 * MiB) as daemon:  # all prompts of all rounds: nothing is evicted
        times: dict[tuple[str, int], list[float]] = {}
        for kind in ("recompute", "restore"):
            for number in range(rounds):
                with Engine(model, daemon.socket, **options) as engine:
                    engine.ask("limits", **PRODUCTION)
                    for place, length in enumerate(lengths):
                        # else a longer prompt would begin with the shorter one, which the engine holds itself
                        base = 10_000 * place
                        for warm in range(2):
                            engine.run(
                                prompt(base + 900 + 10 * number + warm + (5 if kind == "restore" else 0), length),
                                max_tokens=1,
                            )
                        answer = engine.run(prompt(base + number, length), max_tokens=1)
                        external = answer["external"]
                        assert (external >= length - 128) == (kind == "restore"), (
                            kind,
                            external,
                            engine.said()[-2000:],
                        )
                        times.setdefault((kind, length), []).append(answer["seconds"])
                        engine.ask("settle")
    for length in lengths:
        slow, quick = times["recompute", length], times["restore", length]
        report.add(f"restore, {length} tokens", "time to first token, recomputed", median(slow), "s")
        ratios = [b / a for a, b in zip(slow, quick, strict=True)]
        report.add(
            f"restore, {length} tokens",
            "time to first token, restored",
            median(quick),
            "s",
            median(slow),
            median(ratios),
        )
        report.add(
            f"restore, {length} tokens",
            "restored over recomputed",
            median(ratios),
            "ratio",
            1.0,
            None,
            ("<=", RESTORE_MARK),
        )


def asking(report: Report, model: Path, requests: int) -> None:
    """The scheduler's lookups, and what many requests leave behind."""
    with Daemon(256 * MiB) as daemon, Engine(model, daemon.socket, block_size=32) as engine:
        engine.ask("limits", **PRODUCTION)
        engine.ask("watch")
        for seed in range(8):
            engine.run(prompt(seed), max_tokens=1)
        engine.ask("settle")
        before = engine.ask("state")
        for number in range(requests):
            if number % 10 == 0:
                engine.ask("forget")
            engine.run(prompt(number % 16), max_tokens=1)
        engine.ask("settle")
        _times(report, "a live daemon", engine.ask("watched"), LIVE_MARK)
        after, status = engine.ask("state"), daemon.status()
        report.add(
            f"{requests} requests", "threads more", after["threads"] - before["threads"], "", None, None, ("<=", 0)
        )
        report.add(f"{requests} requests", "bytes leased or reserved", status["held_bytes"], "B", None, None, ("<=", 0))
        report.add(f"{requests} requests", "anonymous memory more", (after["rss"] - before["rss"]) / MiB, "MiB")
        with daemon.stopped():
            for number in range(50):
                engine.run(prompt(100 + number), max_tokens=1)
            _times(report, "a stopped daemon", engine.ask("watched"), SILENT_MARK)
        os.kill(daemon.pid, 9)
        daemon.kill()
        for number in range(50):
            engine.run(prompt(200 + number), max_tokens=1)
        _times(report, "no daemon", engine.ask("watched"), SILENT_MARK)
        daemon.start()


def _times(report: Report, case: str, seconds: list[float], mark: float) -> None:
    report.add(f"lookup, {case}", "p99", percentile(seconds, 99) * 1000, "ms", None, None, ("<=", mark))
    report.add(f"lookup, {case}", "p50", median(seconds) * 1000, "ms")
    report.add(f"lookup, {case}", "worst", max(seconds) * 1000, "ms")


def main(
    quick: Annotated[bool, typer.Option(help="Walk through everything, measure nothing worth reading.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a mark is missed.")] = False,
    rounds: Annotated[int, typer.Option(help="Fresh engines of each kind.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Keep the rows in this file.")] = None,
) -> None:
    """vLLM on CPU: restore against recompute, and the cost of asking."""
    end_cleanly()
    arguments = [
        *(["--quick"] if quick else []),
        *(["--strict"] if strict else []),
        *(["--rounds", str(rounds)] if rounds != 3 else []),
        *(["--json", str(json)] if json else []),
    ]
    report = Report("bench.vllm_restore", arguments)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        restoring(
            report, export(Path(directory) / "smollm2"), [2048] if quick else [2048, 4096], 1 if quick else rounds
        )
        asking(report, make(Path(directory) / "tiny"), 40 if quick else 500)
    raise SystemExit(report.finish(json, strict))


if __name__ == "__main__":
    typer.run(main)
