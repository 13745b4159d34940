"""`kvtier-server` as an operator and a service manager see it: exit codes, signals, the notify socket, log lines."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

from kvtier.server.settings import BY_NAME
from tests.support.daemon import MiB, die_with_parent, read_line
from tests.support.paths import ROOT

PATIENCE = 30.0


# --- the command


def server(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtier.server", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_check_prints_what_would_be_used_and_no_flag_is_ignored(tmp_path: Path) -> None:
    for name in ("tokens", "cert", "key", "ca"):
        (tmp_path / name).touch(0o600)
    flags = {
        "socket": str(tmp_path / "k.sock"),
        "socket_mode": "660",
        "users": "any guests read",
        "arena_bytes": "64MiB",
        "grpc": "[::1]:50051",
        "token_file": str(tmp_path / "tokens"),
        "tls_cert": str(tmp_path / "cert"),
        "tls_key": str(tmp_path / "key"),
        "tls_client_ca": str(tmp_path / "ca"),
        "ssd": f"path={tmp_path},size=8MiB",
        "redis": "url=redis://host:6379",
        "metrics": "9464",
    }
    assert set(flags) == set(BY_NAME), "a new setting is given here too"
    found = server("--check", *(word for name, text in flags.items() for word in (BY_NAME[name].flag, text)))
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    given = {"arena_bytes": 64 * MiB, "users": [flags["users"]], "grpc": [flags["grpc"]], "metrics": "127.0.0.1:9464"}
    tables = {name: said.pop(name) for name in ("ssd", "redis")}
    assert said == {name: text for name, text in flags.items() if name not in tables} | given
    assert tables["ssd"].startswith(f"path={tmp_path},size={8 * MiB}") and "host:6379" in tables["redis"]
    assert {path.name for path in tmp_path.iterdir()} == {"tokens", "cert", "key", "ca"}, "a check makes nothing"


def test_exit_code_2_for_usage_and_configuration(tmp_path: Path) -> None:
    assert server("--no-such-flag").returncode == 2
    toml = tmp_path / "k.toml"
    toml.write_text("metric = 9464")
    found = server("--config", str(toml))
    assert found.returncode == 2 and "did you mean metrics?" in found.stderr and found.stdout == ""
    found = server("--socket", str(tmp_path / "k.sock"), "--grpc", "127.0.0.1:0")
    assert found.returncode == 2 and "write token_file" in found.stderr


def test_exit_code_3_for_an_address_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = server("--socket", str(tmp_path / "k.sock"), "--arena-bytes", "64MiB", "--metrics", str(port))
    assert found.returncode == 3 and "choose another address for `metrics`" in found.stderr
    assert not (tmp_path / "k.sock").exists()


def test_exit_code_4_for_memory_that_is_not_there(tmp_path: Path) -> None:
    """A limit on the address space stands for a machine that has less than it promised."""
    program = (
        "import resource, sys; from kvtier.server.main import main; "
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)); "
        f"sys.argv = ['kvtier-server', '--socket', {str(tmp_path / 'k.sock')!r}, "
        "'--arena-bytes', '4GiB', '--grpc', 'off']; main()"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert found.returncode == 4, found.stderr
    assert "cannot map an arena of" in found.stderr


class Manager:
    """systemd's side of the notify socket."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "notify.sock"
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self.sock.bind(str(self.path))
        self.sock.settimeout(PATIENCE)

    def hear(self, wanted: str) -> list[str]:
        """Reads until a message has this line; returns that message."""
        while True:
            lines = self.sock.recv(4096).decode().split("\n")
            if wanted in lines:
                return lines


def test_a_life_as_a_service(tmp_path: Path) -> None:
    """READY when calls are accepted, watchdog, SIGHUP, SIGTERM with STOPPING and exit code 0; every line parses."""
    manager = Manager(tmp_path)
    sock = tmp_path / "k.sock"
    environment = {**os.environ, "NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "200000"}
    environment.pop("WATCHDOG_PID", None)
    arguments = ["--socket", str(sock), "--arena-bytes", "64MiB", "--socket-mode", "660", "--log-format", "json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtier.server", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    with manager.sock, process:
        try:
            manager.hear("READY=1")
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(sock))
            assert stat.S_IMODE(sock.stat().st_mode) == 0o660
            assert process.stdout is not None and read_line(process.stdout.fileno(), PATIENCE).startswith(
                f"ready: unix:{sock} arena "
            )
            manager.hear("WATCHDOG=1")
            process.send_signal(signal.SIGHUP)
            manager.hear("WATCHDOG=1")
            process.send_signal(signal.SIGTERM)
            manager.hear("STOPPING=1")
            _, log = process.communicate(timeout=PATIENCE)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0 and not sock.exists()
    lines = [json.loads(line) for line in log.decode().splitlines()]
    assert [line["event"] for line in lines if line["event"] in ("ready", "stopping", "stopped")] == [
        "ready",
        "stopping",
        "stopped",
    ]
    assert all({"time", "level", "module", "event"} <= set(line) and line["level"] == "info" for line in lines)
