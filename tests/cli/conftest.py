"""A daemon for the commands, and a namespace with blocks in it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.inputs import chain_seed
from kvtier.format.identity import CHAIN, Description, HashScheme, chain_hashes
from kvtier.format.layout import opaque
from tests.cli.shell import BODY, N, Shell, shell_body_bytes
from tests.support.daemon import Daemon, MiB


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(64 * MiB) as running:
        yield running


@pytest.fixture
def shell(daemon: Daemon, tmp_path: Path) -> Shell:
    return Shell(daemon.address, tmp_path)


@pytest.fixture
def stored(shell: Shell, request: pytest.FixtureRequest) -> dict[str, Any]:
    """A namespace of its own with N blocks in it: description file, digest, tokens, hashes, bodies."""
    described = Description(
        "org/m", "2" * 40, opaque(BODY, "cd" * 32, engine_tokens=4), HashScheme(CHAIN, request.node.name, 4)
    )
    nbytes = shell_body_bytes(described)
    given = {
        "description": shell.write("d.json", json.dumps(described.to_json(), indent=2)),
        "digest": described.digest.hex(),
        "tokens": shell.write("tokens", " ".join(map(str, range(4 * N + 3)))),
        "hashes": chain_hashes(range(4 * N), 4, chain_seed(request.node.name)),
        "bodies": shell.write("bodies", os.urandom(N * nbytes)),
        "nbytes": nbytes,
    }
    done = shell("put", given["description"], "--tokens", given["tokens"], "-i", given["bodies"])
    assert done.exit_code == 0, done.output
    return given
