"""Messages to the service manager. The whole exchange with one is in test_main.py."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvtier.server.systemd import notify, watchdog_seconds


def test_lines_arrive_as_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        assert notify("READY=1", "STATUS=up")
        assert manager.recv(100) == b"READY=1\nSTATUS=up"


def test_nobody_listens_is_no_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    assert not notify("READY=1") and watchdog_seconds() is None
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "absent"))
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert not notify("READY=1") and watchdog_seconds() is None
    monkeypatch.delenv("WATCHDOG_PID")
    assert watchdog_seconds() == 1.5
