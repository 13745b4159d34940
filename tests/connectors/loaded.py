"""What importing a connector with its real engine loads of the server."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.daemon import ROOT


def server_modules(module: str, name: str) -> object:
    """Modules of the server's rooms in a fresh interpreter that has imported this class."""
    command = [sys.executable, "-m", "tests.support.programs.import_class", module, name]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])  # an engine may print before
