"""Tests of the Triton kernels, on the interpreter unless there is a GPU. Collected only where triton is installed:
`make test-kernels` brings it. `test_reference.py` is collected everywhere: it needs torch alone, and skips without.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = find_spec("triton") is not None and find_spec("torch") is not None
FILES = {path.name for path in Path(__file__).parent.glob("test_*.py")}
collect_ignore = [] if HERE else sorted(FILES - {"test_reference.py"})

if HERE:
    import torch

    torch.set_num_threads(2)
    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton, which reads it once
        import kvtier_kernels.interpreter  # noqa: F401


def pytest_configure(config: pytest.Config) -> None:
    # Triton 3.6's interpreter, in every loop with bounds from a tensor.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")
    # numpy, where kernels meet NaN and Inf on purpose.
    config.addinivalue_line("filterwarnings", "ignore:.*encountered in:RuntimeWarning")
    config.addinivalue_line("filterwarnings", "ignore:prefill with head dim 256:RuntimeWarning")
