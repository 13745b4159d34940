"""What every test may use. Hypothesis runs without per-example deadlines (machines differ) and prints what reproduces a
failure.

Tests marked `torch` begin with `torch = pytest.importorskip("torch")` and `pytestmark = pytest.mark.torch`: without
torch they are skipped aloud, and `make test-torch` runs them where it is.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support.daemon import Daemon, Patient

# gRPC reads this when it is imported. With its own handlers for fork it aborts one in 30 of the children that
# subprocess forks with a preexec_fn, as tests.support.daemon does (grpcio 1.85).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # tests import bench and each other's helpers from the root
    sys.path.insert(0, str(ROOT))

settings.register_profile("kvtier", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvtier")


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    """A daemon for the tests of a module."""
    from tests.support.daemon import Daemon  # here: tests of the kernels run where the daemon's libraries are not

    with Daemon() as daemon:
        yield daemon


@pytest.fixture
def daemon(running: Daemon) -> Iterator[Daemon]:
    """The one that the module's tests share, empty before each."""
    yield running
    gc.collect()
    running.empty()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Patient]:
    """A client that waits as long as a busy machine needs."""
    with daemon.client() as made:
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What failed at the first try, in full: the second try must not hide it (`.ci/run`)."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"first try of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
