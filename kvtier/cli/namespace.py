"""Commands about namespaces: namespaces, namespace, show, diff, drop, ttl."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from kvtier.cli import output
from kvtier.cli.app import Common, command
from kvtier.cli.inputs import BlockSize, EngineBlocks, description_of, duration, duration_text, is_file
from kvtier.cli.output import Exit, message, size
from kvtier.client.api import Client, NamespaceInfo
from kvtier.errors import Invalid
from kvtier.format.files import read_description
from kvtier.format.identity import diff as differences
from kvtier.models.checkpoint import VLLM_SEED, Assumed, describe

NEAREST = "nearest"
Name = Annotated[str, Argument(help="Beginning of a digest, at least 4 hex digits, or a description file.")]
Digest = Annotated[str, Argument(help="Beginning of a namespace's digest, at least 4 hex digits.")]


@command()
def namespaces(common: Common) -> Exit:
    """List the namespaces of your tenant; of every tenant for an admin."""
    with common.client() as client:
        found = client.list_namespaces(deadline=common.deadline)

    def show() -> None:
        rows = []
        for n in found:
            row = (n.description.hex()[:16], n.tenant, n.model, n.revision[:20], n.blocks, size(n.nbytes))
            rows.append((*row, duration_text(n.ttl)))
        output.table(("description", "tenant", "model", "revision", "blocks", "size", "ttl"), rows)

    output.result({"namespaces": [_plain(one) for one in found]}, common.json, show)
    return Exit.OK


@command()
def show(
    common: Common,
    name: Digest,
    description: Annotated[
        bool, Option("--description", help="Print the description alone, a file that other commands take.")
    ] = False,
) -> Exit:
    """Show one namespace: who it is, what it holds, its description."""
    with common.client() as client:
        info, data = client.show(name, deadline=common.deadline)
    if description:
        print(_text(data))
        return Exit.OK

    def print_it() -> None:
        output.table(("what", "value"), [(key, str(value)) for key, value in _plain(info).items()])
        print(_text(data))

    output.result({"namespace": _plain(info), "description": data}, common.json, print_it)
    return Exit.OK


@command()
def diff(
    common: Common,
    stored: Annotated[
        str, Argument(help="Beginning of a digest, a description file, or `nearest`: the one most like LIVE.")
    ],
    live: Name,
) -> Exit:
    """Say in which fields two namespaces differ. Exit code 1 if they do, as diff(1) has it."""
    with common.client() as client:
        lines = _differences(client, stored, live, common.deadline)
    output.result({"differences": lines}, common.json, lambda: print("\n".join(lines) if lines else "no difference"))
    return Exit.NEGATIVE if lines else Exit.OK


@command()
def drop(common: Common, name: Digest, yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False) -> Exit:
    """Forget a namespace and all its blocks (role admin)."""
    with common.client() as client:
        info, _ = client.show(name, deadline=common.deadline)
        what = f"{_named(info)}: {info.blocks} blocks, {size(info.nbytes)}"
        if not yes:
            if not sys.stdin.isatty():
                raise Invalid(f"this would forget {what}: say --yes")
            if not typer.confirm(f"Forget {what}?", err=True):
                message("nothing was dropped")
                return Exit.NEGATIVE
        dropped = client.drop(info.namespace.hex(), deadline=max(common.deadline, 60.0))
    output.result({"dropped_blocks": dropped, "namespace": _plain(info)}, common.json, lambda: print(f"dropped {what}"))
    return Exit.OK


@command()
def ttl(
    common: Common, name: Digest, after: Annotated[str, Argument(help="A time such as 90s, 30m, 24h or 7d, or `off`.")]
) -> Exit:
    """Let blocks of a namespace be forgotten that nobody has put or used for so long (role admin)."""
    seconds = duration(after)
    with common.client() as client:
        info = client.set_ttl(name, seconds, deadline=common.deadline)
    what = f"{_named(info)}: time-to-live {duration_text(info.ttl)}"
    output.result({"namespace": _plain(info)}, common.json, lambda: print(what))
    return Exit.OK


@command()
def namespace(
    common: Common,
    model: Annotated[str, Argument(help="Directory of the model.")],
    kv_cache_dtype: Annotated[str, Option("--kv-cache-dtype", help="auto or fp8, as vLLM is told.")] = "auto",
    dtype: Annotated[
        str, Option("--dtype", help="The model's dtype, where vLLM is told another than the checkpoint has.")
    ] = "",
    block_size: BlockSize = 16,
    engine_blocks: EngineBlocks = 1,
    backend: Annotated[str, Option("--backend", help="Attention backend; counts for FP8 only.")] = "FLASH_ATTN",
    layout: Annotated[str, Option("--layout", help="Physical layout of vLLM's cache.")] = "LBHNC",
    cpu: Annotated[str, Option("--cpu", help="Instruction set of a CPU engine: vec, amx ...")] = "",
    algorithm: Annotated[str, Option("--hash", help="vLLM's prefix_caching_hash_algo.")] = "sha256",
    seed: Annotated[str, Option("--seed", help="PYTHONHASHSEED of the engine.")] = VLLM_SEED,
    full: Annotated[bool, Option("--full", help="Fingerprint every byte of the weights.")] = False,
    save: Annotated[
        Path | None, Option("--save", help="Write the description to this file, for `kvtier diff nearest FILE`.")
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
        save.write_text(_text(data) + "\n", "ascii")

    def print_it() -> None:
        print(_text(data))
        for note in notes:
            message(note)
        print(f"digest {description.digest.hex()}")

    output.result({"description": data, "digest": description.digest.hex(), "notes": notes}, common.json, print_it)
    return Exit.OK


def _differences(client: Client, stored: str, live: str, deadline: float) -> list[str]:
    if stored == NEAREST:
        return client.explain(description_of(live, client, deadline), deadline=deadline)
    left, right = (read_description(Path(name)) if is_file(name) else None for name in (stored, live))
    if left is None and right is None:
        return client.diff(stored, live, deadline=deadline)
    left = left or description_of(stored, client, deadline)
    right = right or description_of(live, client, deadline)
    return [str(difference) for difference in differences(left, right)]


def _text(description: dict[str, Any]) -> str:
    """A description as people read it and other commands take it."""
    return json.dumps(description, indent=1, sort_keys=True)


def _named(info: NamespaceInfo) -> str:
    return f"namespace {info.description.hex()[:16]} of tenant {info.tenant} ({info.model})"


def _plain(info: NamespaceInfo) -> dict[str, Any]:
    """As JSON has it: digests in hex, sizes under their name on the wire."""
    data = asdict(info)
    data["bytes"] = data.pop("nbytes")
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in data.items()}
