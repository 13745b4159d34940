"""`kvtier token`: a token for the token file, used over TCP."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from kvtier.cli.output import Exit
from tests.cli.shell import BODY, Shell, shell_body_bytes
from tests.support.daemon import Daemon, MiB, description


def test_a_token_opens_the_door_and_only_its_digest_is_kept(shell: Shell, tmp_path: Path) -> None:
    """Made for a file, used over TCP: what the file holds is no token."""
    file = tmp_path / "tokens"
    secret = shell("token", "alice", "team", "write", "--file", file).stdout
    second = shell.json("token", "bob", "team", "read")
    file.write_text(file.read_text() + second["line"] + "\n")
    assert (
        file.stat().st_mode & 0o077 == 0
        and secret.strip() not in file.read_text()
        and second["token"] not in file.read_text()
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Daemon(16 * MiB, "--grpc", f"127.0.0.1:{port}", "--token-file", str(file)) as daemon:
        over_tcp = Shell(f"grpc://127.0.0.1:{port}", tmp_path)
        right, wrong = shell.write("right", secret), shell.write("wrong", "0" * 64)
        assert over_tcp("status", "--token-file", right).exit_code == Exit.OK
        for refused in (
            ["status"],
            ["status", "--token-file", wrong],
            ["get", "abcd", "--hash", "ab" * 32, "-o", "x", "--token-file", wrong],
        ):
            done = over_tcp(*refused)
            assert done.exit_code == Exit.REFUSED and "token" in done.stderr, done.output
        path = shell.write("d.json", json.dumps(description(BODY).to_json()))
        bodies = shell.write("b", bytes(2 * shell_body_bytes(description(BODY))))
        which = ["--hash", "ab" * 32, "--hash", "cd" * 32]
        assert over_tcp("put", path, *which, "-i", bodies, "--token-file", right).exit_code == Exit.OK
        assert (
            over_tcp(
                "get", path, *which, "-o", tmp_path / "back", "--token-file", shell.write("bob", second["token"])
            ).exit_code
            == Exit.OK
        )
        assert (tmp_path / "back").read_bytes() == bodies.read_bytes()
        log = daemon.log.read_text()
    assert secret.strip() not in log and second["token"] not in log and "0" * 64 not in log
    assert (
        shell("token", "a b", "team", "write").exit_code == Exit.USAGE
        and shell("token", "alice", "team", "owner").exit_code == Exit.USAGE
    )
