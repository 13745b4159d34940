"""A client of the last version is served as before: its own code, from a zip, against the daemon of this version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, MiB, body, description, hashes, is_body
from tests.support.last_version import FOLDER
from tests.support.paths import ROOT

PROGRAM = ROOT / "tests" / "support" / "programs" / "last_client.py"
NBYTES = 1024


@pytest.mark.parametrize("transport", ["unix", "grpc"])
def test_a_client_of_the_last_version_is_served(tmp_path: Path, transport: str) -> None:
    with Daemon(8 * MiB, "--ssd", f"path={tmp_path / 'ssd'},size=4MiB,free=0") as daemon, daemon.client() as client:
        ns = client.register(description(NBYTES))
        assert client.put(ns, hashes(range(100, 105)), [body(n, NBYTES) for n in range(100, 105)]) == 5
        address = daemon.address if transport == "unix" else f"grpc+unix:{daemon.socket}.grpc"
        done = subprocess.run(
            [sys.executable, PROGRAM, address],
            env={**os.environ, "PYTHONPATH": str(FOLDER / "client.zip")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        written = [*range(8), *range(10, 13)]
        found = client.get(ns, hashes(written))
        assert len(found) == len(written), found.reason
        assert all(is_body(one, n) for one, n in zip(found, written, strict=True))
        assert client.lookup(ns, hashes([8])) == 0 and client.lookup(ns, hashes([9])) == 0, "what it deleted"
