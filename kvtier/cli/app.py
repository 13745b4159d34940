"""The commands of `kvtier` and what they have in common: an address, credentials, a deadline, --json, exit codes."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer import Option

from kvtier.cli import output
from kvtier.cli.output import Exit
from kvtier.client.api import Client
from kvtier.errors import Invalid, KvtierError
from kvtier.format.files import read_file
from kvtier.protocol.addresses import default_socket
from kvtier.version import __version__

MAX_TOKEN_BYTES = 4096
# Files of this folder that have commands: a new verb is a function with `@command()` in one of them, or in a new one.
COMMAND_FILES = (
    "kvtier.cli.artifacts",
    "kvtier.cli.bench",
    "kvtier.cli.blocks",
    "kvtier.cli.doctor",
    "kvtier.cli.fsck",
    "kvtier.cli.namespace",
    "kvtier.cli.plan",
    "kvtier.cli.quality",
    "kvtier.cli.replay",
    "kvtier.cli.status",
    "kvtier.cli.token",
)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Look into a kvtier daemon and put, get, pin and drop what it keeps.\n\n"
    "Exit codes: 0 done, 1 the answer is no, 2 wrong usage, 3 no daemon, 4 refused, 5 a fault of the service.",
)


def _shared(name: str, meaning: str) -> Any:
    """An option that every command has, which the environment may set too."""
    return Option(f"--{name}", envvar=f"KVTIER_{name.upper().replace('-', '_')}", help=meaning)


@dataclass(frozen=True, slots=True)
class Common:
    """The options every command has."""

    address: Annotated[
        str, _shared("address", "unix:/path, grpc+unix:/path, grpc://host:port or grpcs://host:port.")
    ] = ""
    token_file: Annotated[
        Path | None, _shared("token-file", "File with the token alone, for grpc:// and grpcs://.")
    ] = None
    ca: Annotated[Path | None, _shared("ca", "PEM of the authorities behind the daemon's certificate.")] = None
    cert: Annotated[Path | None, _shared("cert", "PEM of this client's own certificate.")] = None
    key: Annotated[Path | None, _shared("key", "PEM of its private key.")] = None
    deadline: Annotated[float, Option("--deadline", min=0.001, max=3600, help="Seconds to wait for each call.")] = 5.0
    json: Annotated[bool, Option("--json", help="One JSON object on stdout instead of a table.")] = False

    def client(self) -> Client:
        """The client these options mean; nothing is connected yet."""
        secret = None
        if self.token_file is not None:
            secret = read_file(self.token_file, MAX_TOKEN_BYTES, pipes=True).decode("ascii", "replace").strip()
        files = {name: str(path) for name in ("ca", "cert", "key") if (path := getattr(self, name)) is not None}
        return Client(self.where, token=secret, **files)

    @property
    def where(self) -> str:
        """The address, or the default socket of this host."""
        return self.address or f"unix:{default_socket()}"

    @contextmanager
    def connected(self) -> Any:
        """A client of a daemon that answered once: from then on what is missing is a miss. Raises KvtierError."""
        with self.client() as client:
            client.status(deadline=self.deadline)
            yield client


def command(name: str = "", to: typer.Typer = app) -> Callable[[Callable[..., Exit]], Callable[..., None]]:
    """Registers a command; errors become exit codes. A parameter that is a dataclass (`Common`) means its fields."""

    def register(function: Callable[..., Exit]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())
        groups = {p.name: hints[p.name] for p in parameters if is_dataclass(hints[p.name])}
        flat = []
        for p in parameters:
            flat += _fields(groups[p.name]) if p.name in groups else [p.replace(annotation=hints[p.name])]

        @functools.wraps(function)
        def run(**values: Any) -> None:
            made = {name: kind(**{f.name: values.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
            raise SystemExit(_run(lambda: function(**made, **values), made["common"].json))

        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in flat]
        run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in keyword}
        to.command(name or function.__name__.replace("_", "-"))(run)
        return run

    return register


def _fields(kind: Any) -> list[inspect.Parameter]:
    """The fields of a dataclass of options as parameters."""
    hints = get_type_hints(kind, include_extras=True)
    one, empty = inspect.Parameter, inspect.Parameter.empty
    defaults = {f.name: empty if f.default is MISSING else f.default for f in fields(kind)}
    return [one(name, one.KEYWORD_ONLY, default=at, annotation=hints[name]) for name, at in defaults.items()]


def _run(call: Callable[[], Exit], as_json: bool) -> Exit:
    try:
        return call()
    except KvtierError as error:
        return output.failure(error, as_json)
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return Exit.OK
    except OSError as error:  # a file of ours: full disk, no permission
        return output.failure(Invalid(f"{error.filename or 'a file'}: {error.strerror}"), as_json)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, Option("--version", help="Print the version and end.")] = False) -> None:
    """What stands before a command."""
    if version:
        print(__version__)
        raise SystemExit(Exit.OK)


def load_commands() -> None:
    """Imports the files of the commands, each of which registers its own."""
    for name in COMMAND_FILES:
        importlib.import_module(name)


def main() -> None:
    """Entry point of `kvtier`."""
    load_commands()
    # What the client would log is said once, by the command.
    logging.getLogger("kvtier").addHandler(logging.NullHandler())
    app()
