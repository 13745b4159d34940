"""Commands about the daemon and its namespaces: status, namespaces, show, diff, drop, ttl."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli import output
from kvtier.cli.app import Common, command
from kvtier.cli.inputs import description_of, duration, duration_text
from kvtier.cli.output import Exit, message, size
from kvtier.client.api import Client, NamespaceInfo
from kvtier.errors import Invalid
from kvtier.format.description_file import read_description
from kvtier.format.identity import diff as differences

NEAREST = "nearest"
Name = Annotated[str, typer.Argument(help="Beginning of a digest, at least 4 hex digits, or a description file.")]
Digest = Annotated[str, typer.Argument(help="Beginning of a namespace's digest, at least 4 hex digits.")]


@command()
def status(
    common: Common,
    check: Annotated[
        bool, typer.Option("--check", help="Also compare the ledger with ground truth (role admin; slow).")
    ] = False,
) -> Exit:
    """What the daemon holds and has done since it started."""
    with common.client() as client:
        found = client.status(check_integrity=check, deadline=common.deadline)

    def show() -> None:
        rows = [
            (name, value, size(value) if "bytes" in name else "")
            for name, value in sorted(found.items())
            if not name.endswith("_total")
        ]
        rows += [
            (name, value, size(value) if "bytes" in name else "")
            for name, value in sorted(found.items())
            if name.endswith("_total")
        ]
        output.table(
            ("what", "value", ""),
            [
                (name, f"{value:,}" if isinstance(value, int) and name != "pid" else str(value), note)
                for name, value, note in rows
            ],
        )

    output.result(found, common.json, show)
    return Exit.OK


@command()
def namespaces(common: Common) -> Exit:
    """List the namespaces of your tenant; of every tenant for an admin."""
    with common.client() as client:
        found = client.list_namespaces(deadline=common.deadline)

    def show() -> None:
        rows = [
            (
                n.description.hex()[:16],
                n.tenant,
                n.model,
                n.revision[:20],
                n.blocks,
                size(n.nbytes),
                duration_text(n.ttl),
            )
            for n in found
        ]
        output.table(("description", "tenant", "model", "revision", "blocks", "size", "ttl"), rows)

    output.result({"namespaces": [_plain(one) for one in found]}, common.json, show)
    return Exit.OK


@command()
def show(
    common: Common,
    name: Digest,
    description: Annotated[
        bool, typer.Option("--description", help="Print the description alone, a file that other commands take.")
    ] = False,
) -> Exit:
    """Show one namespace: who it is, what it holds, its description."""
    with common.client() as client:
        info, data = client.show(name, deadline=common.deadline)
    if description:
        print(json.dumps(data, indent=1, sort_keys=True))
        return Exit.OK

    def print_it() -> None:
        output.table(("what", "value"), [(key, str(value)) for key, value in _plain(info).items()])
        print(json.dumps(data, indent=1, sort_keys=True))

    output.result({"namespace": _plain(info), "description": data}, common.json, print_it)
    return Exit.OK


@command()
def diff(
    common: Common,
    stored: Annotated[
        str, typer.Argument(help="Beginning of a digest, a description file, or `nearest`: the one most like LIVE.")
    ],
    live: Name,
) -> Exit:
    """Say in which fields two namespaces differ. Exit code 1 if they do, as diff(1) has it."""
    with common.client() as client:
        lines = _differences(client, stored, live, common.deadline)
    output.result({"differences": lines}, common.json, lambda: print("\n".join(lines) if lines else "no difference"))
    return Exit.NEGATIVE if lines else Exit.OK


@command()
def drop(common: Common, name: Digest, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> Exit:
    """Forget a namespace and all its blocks (role admin)."""
    with common.client() as client:
        info, _ = client.show(name, deadline=common.deadline)
        what = (
            f"namespace {info.description.hex()[:16]} of tenant {info.tenant} ({info.model}): {info.blocks} "
            f"blocks, {size(info.nbytes)}"
        )
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
    common: Common,
    name: Digest,
    after: Annotated[str, typer.Argument(help="A time such as 90s, 30m, 24h or 7d, or `off`.")],
) -> Exit:
    """Let blocks of a namespace be forgotten that nobody has put or used for so long (role admin)."""
    seconds = duration(after)
    with common.client() as client:
        info = client.set_ttl(name, seconds, deadline=common.deadline)
    what = (
        f"namespace {info.description.hex()[:16]} of tenant {info.tenant} ({info.model}): time-to-live "
        f"{duration_text(info.ttl)}"
    )
    output.result({"namespace": _plain(info)}, common.json, lambda: print(what))
    return Exit.OK


def _differences(client: Client, stored: str, live: str, deadline: float) -> list[str]:
    if stored == NEAREST:
        return client.explain(description_of(live, client, deadline), deadline=deadline)
    left, right = (read_description(Path(name)) if _is_file(name) else None for name in (stored, live))
    if left is None and right is None:
        return client.diff(stored, live, deadline=deadline)
    left = left or description_of(stored, client, deadline)
    right = right or description_of(live, client, deadline)
    return [str(difference) for difference in differences(left, right)]


def _is_file(name: str) -> bool:
    return name.endswith(".json") or os.sep in name or os.path.exists(name)


def _plain(info: NamespaceInfo) -> dict[str, Any]:
    """As JSON has it: digests in hex, sizes under their name on the wire."""
    data = asdict(info)
    data["bytes"] = data.pop("nbytes")
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in data.items()}
