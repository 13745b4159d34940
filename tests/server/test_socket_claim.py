"""The claim of a socket's path within one process. Against other daemons: test_lifecycle.py."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvtier.errors import Unavailable
from kvtier.server.socket_claim import SocketClaim


def test_a_claimed_path_is_refused_until_it_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "k.sock"
    claim = SocketClaim(path)
    with pytest.raises(Unavailable, match="another daemon serves"):
        SocketClaim(path)
    claim.close()
    SocketClaim(path).close()


def test_a_stale_socket_is_removed_and_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "k.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    claim = SocketClaim(path)
    assert not path.exists()
    claim.release()
    path.write_text("precious")
    for _ in range(2):  # a refused claim keeps no lock
        with pytest.raises(Unavailable, match="is not a socket"):
            SocketClaim(path)
    assert path.read_text() == "precious"
