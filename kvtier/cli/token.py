"""`kvtier token`: a new token for the daemon's token file, which keeps only its digest. Talks to no daemon."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from kvtier.cli import output
from kvtier.cli.app import Common, command
from kvtier.cli.output import Exit
from kvtier.server.access import issue


@command()
def token(
    common: Common,
    name: Annotated[str, Argument(help="Who will use it: for people and the log.")],
    tenant: Annotated[str, Argument(help="Whose blocks it reaches.")],
    role: Annotated[str, Argument(help="read, write or admin.")],
    file: Annotated[
        Path | None, Option("--file", help="Token file to add the line to; made with mode 600 if it is not there.")
    ] = None,
) -> Exit:
    """Make a token (256 random bits). Without --file the line for the token file is printed after it."""
    secret, line = issue(name, tenant, role)
    if file is not None:
        with open(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as stream:
            stream.write(line + "\n")
    said = secret if file is not None else f"{secret}\n{line}"
    output.result({"token": secret, "line": line}, common.json, lambda: print(said))
    return Exit.OK
