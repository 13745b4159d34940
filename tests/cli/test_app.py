"""What all commands have in common: each file of commands is listed, and each command has the common options."""

from __future__ import annotations

import typer
from typer.testing import CliRunner

from kvtier.cli.app import COMMAND_FILES, app, load_commands
from tests.support.paths import ROOT

load_commands()


def test_every_file_of_commands_is_listed() -> None:
    marks = ("@command(", "@app.command(")
    found = {path.stem for path in (ROOT / "kvtier" / "cli").glob("*.py") if any(m in path.read_text() for m in marks)}
    assert {f"kvtier.cli.{name}" for name in found - {"app"}} == set(COMMAND_FILES) and list(COMMAND_FILES) == sorted(
        COMMAND_FILES
    )


def test_every_command_has_the_common_options() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {"status", "get", "put", "plan", "doctor"} <= set(commands)
    for name, one in commands.items():
        options = {word for parameter in one.params for word in parameter.opts}
        if name not in ("artifact", "bench"):  # a group, and what hands its arguments on
            assert {"--address", "--token-file", "--deadline", "--json"} <= options, name


def test_a_wrong_option_is_a_usage_error() -> None:
    assert CliRunner().invoke(app, ["status", "--nonsense"]).exit_code == 2
