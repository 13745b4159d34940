"""`kvtier status`: what the daemon holds and has done."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from kvtier.cli import output
from kvtier.cli.app import Common, command
from kvtier.cli.output import Exit, size


@command()
def status(
    common: Common,
    check: Annotated[
        bool, Option("--check", help="Also compare the ledger with ground truth (role admin; slow).")
    ] = False,
) -> Exit:
    """What the daemon holds and has done since it started."""
    with common.client() as client:
        found = client.status(check_integrity=check, deadline=common.deadline)

    def show() -> None:
        rows = []
        for name in sorted(found, key=lambda name: (name.endswith("_total"), name)):  # counters after levels
            value = found[name]
            text = f"{value:,}" if isinstance(value, int) and name != "pid" else str(value)
            rows.append((name, text, size(value) if "bytes" in name else ""))
        output.table(("what", "value", ""), rows)

    output.result(found, common.json, show)
    return Exit.OK
