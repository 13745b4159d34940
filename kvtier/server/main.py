"""`kvtier-server`: flags become settings, signals steer the life cycle, errors become exit codes (`EXIT_CODES`)."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.errors import Full, Invalid, KvtierError, Unavailable
from kvtier.server.lifecycle import Daemon
from kvtier.server.logs import fields, setup
from kvtier.server.sessions import ROLES
from kvtier.server.settings import BY_NAME, DEFAULT_FILE, Config, load
from kvtier.server.systemd import notify, watchdog_seconds
from kvtier.version import __version__

# 0: ended by a signal; 2: usage or configuration; 3: an address or a claim cannot be had; 4: memory or other resources.
EXIT_CODES: dict[type[Exception], int] = {
    Invalid: 2, Unavailable: 3, Full: 4, OSError: 4, MemoryError: 4, RuntimeError: 4,
}  # fmt: skip
BEAT = 1.0  # seconds
log = logging.getLogger(__name__)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class LogFormat(StrEnum):
    """How a log line is written."""

    text = "text"
    json = "json"


def _option(name: str) -> Any:
    setting = BY_NAME[name]
    meaning = f"{setting.meaning[0].upper()}{setting.meaning[1:]}. [default: {setting.default}]"
    return typer.Option(setting.flag, help=meaning)


@app.command()
def serve(
    config: Annotated[
        Path | None,
        typer.Option(help=f"TOML file of settings; flags override it. [default: {DEFAULT_FILE}, if it is there]"),
    ] = None,
    socket: Annotated[Path | None, _option("socket")] = None,
    socket_mode: Annotated[str | None, _option("socket_mode")] = None,
    users: Annotated[list[str] | None, _option("users")] = None,
    arena_bytes: Annotated[str | None, _option("arena_bytes")] = None,
    grpc: Annotated[list[str] | None, _option("grpc")] = None,
    token_file: Annotated[Path | None, _option("token_file")] = None,
    tls_cert: Annotated[Path | None, _option("tls_cert")] = None,
    tls_key: Annotated[Path | None, _option("tls_key")] = None,
    tls_client_ca: Annotated[Path | None, _option("tls_client_ca")] = None,
    metrics: Annotated[str | None, _option("metrics")] = None,
    ssd: Annotated[str | None, _option("ssd")] = None,
    redis: Annotated[str | None, _option("redis")] = None,
    log_format: Annotated[LogFormat, typer.Option(help="key=value lines, or JSON objects.")] = LogFormat.text,
    check: Annotated[bool, typer.Option("--check", help="Check the settings, print them as JSON and end.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
    poison: Annotated[bool, typer.Option("--poison", hidden=True)] = False,
) -> None:
    """Keep KV cache blocks for the engines of this host.

    Exit codes: 0 after SIGTERM or SIGINT, 2 usage or configuration, 3 an address or lock cannot be had, 4 memory or
    other resources.
    """
    if version:
        print(__version__)
        return
    setup(log_format)
    signals = Signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    flags: dict[str, Any] = {"socket": socket, "socket_mode": socket_mode, "users": users or None}
    flags |= {"arena_bytes": arena_bytes, "grpc": grpc or None, "metrics": metrics, "ssd": ssd, "redis": redis}
    flags |= {"token_file": token_file, "tls_cert": tls_cert, "tls_key": tls_key, "tls_client_ca": tls_client_ca}
    try:
        settings = load(config, flags, poison=poison)
        if check:
            print(json.dumps(shown(settings)))
            return
        daemon = Daemon(settings)
        daemon.start()
    except (KvtierError, OSError, MemoryError, RuntimeError) as error:
        print(f"kvtier-server: {error}", file=sys.stderr)
        raise SystemExit(next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)) from None
    print(f"ready: unix:{settings.socket} arena {daemon.store.capacity} bytes", flush=True)
    run(daemon, signals)


def run(daemon: Daemon, signals: Signals) -> None:
    """From ready to stopped; tells the service manager. SIGHUP reloads, SIGTERM and SIGINT drain, a second kills."""
    watchdog = watchdog_seconds()
    interval = min(BEAT, watchdog or BEAT)
    notify("READY=1", f"STATUS=arena of {daemon.store.capacity} bytes")
    while True:
        received = signals.wait(interval)
        if daemon.beat() and watchdog is not None:
            notify("WATCHDOG=1")
        if signal.SIGHUP in received:
            daemon.reload()
        if received & {signal.SIGTERM, signal.SIGINT}:
            break
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    began = time.monotonic()
    notify("STOPPING=1")
    log.info("stopping")
    daemon.stop()
    log.info("stopped", extra=fields(seconds=round(time.monotonic() - began, 3)))


class Signals:
    """Signals as numbers to read: nothing runs inside a handler. They wait in a pipe until `wait` is called."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, lambda *_: None)

    def wait(self, seconds: float) -> set[int]:
        """The signals that came, after the first or after `seconds`."""
        try:
            select.select([self._read], [], [], seconds)
            return set(os.read(self._read, 256))
        except BlockingIOError:
            return set()


def shown(config: Config) -> dict[str, Any]:
    """The settings as plain data, under the names of the file. Paths of secrets are shown, never what is in them."""
    kinds = ((u, "any" if u.kind == "any" else f"{u.kind}:{u.number}") for u in config.users)
    users = [f"{kind} {u.tenant} {ROLES[u.role]}" for u, kind in kinds]
    values: dict[str, Any] = {setting.name: getattr(config, setting.name) for setting in BY_NAME.values()}
    values |= {"socket_mode": f"{config.socket_mode:03o}", "users": users, "grpc": list(map(str, config.grpc))}
    plain = (int, list, type(None))
    return {name: value if isinstance(value, plain) else str(value) for name, value in values.items()}


def main() -> None:
    """Entry point of `kvtier-server`."""
    app()
