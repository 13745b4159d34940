"""Tests that want a GPU. `tests/gpu/run.sh --dry-run` walks through them on the interpreter, with smaller sizes."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

HERE = find_spec("triton") is not None and find_spec("torch") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]

if HERE:
    import torch

    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        os.environ["TRITON_INTERPRET"] = "1"
        import kvtier_kernels.interpreter  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
