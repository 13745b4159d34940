"""The command about a model that no engine has loaded yet: namespace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli import output
from kvtier.cli.app import Common, command
from kvtier.cli.output import Exit, message
from kvtier.models.checkpoint import VLLM_SEED, Assumed, describe


@command()
def namespace(
    common: Common,
    model: Annotated[str, typer.Argument(help="Directory of the model.")],
    kv_cache_dtype: Annotated[str, typer.Option("--kv-cache-dtype", help="auto or fp8, as vLLM is told.")] = "auto",
    dtype: Annotated[
        str, typer.Option("--dtype", help="The model's dtype, where vLLM is told another than the checkpoint has.")
    ] = "",
    block_size: Annotated[int, typer.Option("--block-size", min=1, max=65536, help="Tokens of an engine block.")] = 16,
    engine_blocks: Annotated[
        int, typer.Option("--engine-blocks", min=1, max=4096, help="Engine blocks in a kvtier block.")
    ] = 1,
    backend: Annotated[str, typer.Option("--backend", help="Attention backend; counts for FP8 only.")] = "FLASH_ATTN",
    layout: Annotated[str, typer.Option("--layout", help="Physical layout of vLLM's cache.")] = "LBHNC",
    cpu: Annotated[str, typer.Option("--cpu", help="Instruction set of a CPU engine: vec, amx ...")] = "",
    algorithm: Annotated[str, typer.Option("--hash", help="vLLM's prefix_caching_hash_algo.")] = "sha256",
    seed: Annotated[str, typer.Option("--seed", help="PYTHONHASHSEED of the engine.")] = VLLM_SEED,
    full: Annotated[bool, typer.Option("--full", help="Fingerprint every byte of the weights.")] = False,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the description to this file, for `kvtier diff nearest FILE`.")
    ] = None,
) -> Exit:
    """Work out the namespace that a vLLM engine will use for a model, from its files; say what is assumed. Asks no
    daemon."""
    assumed = Assumed(
        kv_cache_dtype, dtype or None, block_size, engine_blocks, algorithm, seed, backend, layout, cpu or None
    )
    description, notes = describe(model, assumed, full=full)
    data = description.to_json()
    if save is not None:
        save.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", "ascii")

    def show() -> None:
        print(json.dumps(data, indent=1, sort_keys=True))
        for note in notes:
            message(note)
        print(f"digest {description.digest.hex()}")

    output.result({"description": data, "digest": description.digest.hex(), "notes": notes}, common.json, show)
    return Exit.OK
