"""Where a daemon listens when no setting says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.protocol import addresses


def test_the_runtime_directory_is_used_where_there_is_no_system_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert addresses.default_socket() == tmp_path / "kvtier.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert addresses.default_socket() == Path("/tmp/kvtier.sock")
    monkeypatch.setattr(Path, "is_dir", lambda path: path == Path("/run/kvtier"))
    assert addresses.default_socket() == Path("/run/kvtier/kvtier.sock")


def test_grpc_is_beside_it() -> None:
    assert addresses.grpc_beside("/run/kvtier/kvtier.sock") == "/run/kvtier/kvtier.sock.grpc"
