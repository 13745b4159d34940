"""Models and daemons for the tests with vLLM. Everything here is skipped, aloud, where vLLM is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, MiB

# Without vLLM the files are not even imported; `make test-vllm` says where it cannot run. (A plain search for "vllm"
# would find this folder.)
collect_ignore_glob = [] if find_spec("vllm") and find_spec("vllm.distributed") else ["test_*.py"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in BF16."""
    from tests.connectors.vllm.models import make

    return make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One daemon for a file's engines."""
    with Daemon(256 * MiB) as made:
        yield made
        made.quiet()
