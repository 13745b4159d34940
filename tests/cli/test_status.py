"""`kvtier status` against a real daemon."""

from __future__ import annotations

from tests.cli.shell import Shell
from tests.support.daemon import Daemon


def test_status_names_what_the_daemon_counts(shell: Shell, daemon: Daemon) -> None:
    found = shell.json("status")
    assert found["pid"] == daemon.pid and found["arena_bytes"] > 0 and found["sealed_blocks_total"] >= 0
    assert shell.json("status", "--check")["boot"] == found["boot"]
    text = shell("status").stdout
    assert all(name in text for name in found)
