"""`kvtier-server`: flags to settings, signals to the life cycle, errors to exit codes (0, 2 usage or configuration, 3 bind or lock, 4 resources)."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from kvtier.daemon.config import Config, default_socket, memory_limit, parse_size
from kvtier.daemon.lifecycle import Daemon
from kvtier.errors import Full, Invalid, KvtierError, Unavailable

EXIT_CODES: dict[type[KvtierError], int] = {Invalid: 2, Unavailable: 3, Full: 4}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def serve(
    socket: Annotated[
        Path | None, typer.Option(help="Path of the Unix socket. [default: /run/kvtier/kvtier.sock or the user's runtime directory]")
    ] = None,
    arena_bytes: Annotated[str, typer.Option(help="Shared memory for blocks, e.g. 16GiB. [default: a quarter of the memory limit]")] = "",
    socket_mode: Annotated[str, typer.Option(help="Permissions of the socket, octal.")] = "600",
    poison: Annotated[bool, typer.Option("--poison", hidden=True)] = False,
) -> None:
    """Keep KV cache blocks for the engines of this host."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        try:
            mode = int(socket_mode, 8)
        except ValueError:
            raise Invalid(f"--socket-mode {socket_mode!r} is not octal: write 660, say") from None
        nbytes = parse_size(arena_bytes) if arena_bytes else memory_limit() // 4
        daemon = Daemon(Config(socket or default_socket(), nbytes, mode, poison))
        daemon.start()
    except KvtierError as error:
        print(f"kvtier-server: {error}", file=sys.stderr)
        raise SystemExit(EXIT_CODES.get(type(error), 1)) from None
    print(f"ready: unix:{daemon.config.socket} arena {daemon.store.capacity} bytes", flush=True)
    stop.wait()
    daemon.stop()


def main() -> None:
    """Entry point of `kvtier-server`."""
    app()
