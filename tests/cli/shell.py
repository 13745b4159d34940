"""`kvtier` within this process, against one address."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kvtier.cli.app import app, load_commands
from kvtier.cli.output import Exit
from kvtier.client.api import Client
from kvtier.format.identity import Description

load_commands()


BODY = 1000  # bytes a caller gives; the layout pads it


N = 12


class Shell:
    """Runs commands in this process against one address; a directory of files beside it."""

    def __init__(self, address: str, directory: Path) -> None:
        self.directory = directory
        self._environment = {"KVTIER_ADDRESS": address, "TERM": "dumb"}
        self._runner = CliRunner()

    def __call__(self, *arguments: object, stdin: bytes | None = None, **environment: str) -> Any:
        return self._runner.invoke(app, list(map(str, arguments)), input=stdin, env=self._environment | environment)

    def json(self, *arguments: object, code: Exit = Exit.OK) -> Any:
        """The object a command prints under --json; asserts the exit code, and that stdout is that one line."""
        done = self(*arguments, "--json")
        assert done.exit_code == code, done.output
        assert done.stdout.count("\n") == 1
        return json.loads(done.stdout)

    def write(self, name: str, data: bytes | str) -> Path:
        path = self.directory / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path


def shell_body_bytes(described: Description) -> int:
    return Client("unix:/nowhere").register(described).extents().body_bytes
