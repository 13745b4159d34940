"""What the tests with LMCache share. Its tests are not even imported where it is not installed; `make test-lmcache`
says where it cannot run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.daemon import PATIENCE, Daemon, MiB

# LMCache reports its use to its makers unless told not to; tests of other connectors' environments do without these
# files.
os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="WARNING")

# (A plain search for "lmcache" would find this folder.)
collect_ignore_glob = [] if find_spec("lmcache") and find_spec("lmcache.v1") else ["test_*.py"]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(256 * MiB) as made:
        yield made


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that no busy machine misses, except in tests of deadlines (`impatient`): the others ask what the answer
    is, not how soon it comes."""
    if "lmcache" in request.keywords and "impatient" not in request.fixturenames:
        from kvtier.connectors.common import objects

        monkeypatch.setattr(objects, "CALL_SECONDS", PATIENCE)
        monkeypatch.setattr(objects, "LOAD_SECONDS", PATIENCE)


@pytest.fixture
def impatient() -> None:
    """The deadlines that users have."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The description of the model that most tests store, as a file."""
    from tests.connectors.lmcache.stack import describe

    return describe(tmp_path / "model.json")
