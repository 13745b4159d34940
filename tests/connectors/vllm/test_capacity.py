"""`kvtier plan` against what a real engine reports of its own cache: tokens and concurrency within 1 %."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvtier.models import capacity
from kvtier.models.capacity import Choice
from kvtier.models.model_config import read_caches
from tests.connectors.vllm.engine import Engine
from tests.connectors.vllm.models import make

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

_REPORT = re.compile(r"KV cache size: ([\d,]+) tokens, Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
GiB = 2**30  # what the engines of these tests have for KV


def reported(model: Path, **options: Any) -> tuple[int, int, float]:
    """(tokens, context, concurrency) from the engine's log."""
    with Engine(model, None, **options) as engine:
        match = _REPORT.search(engine.said())
    assert match is not None, "the engine says its capacity otherwise than expected"
    return int(match[1].replace(",", "")), int(match[2].replace(",", "")), float(match[3])


@pytest.mark.parametrize(
    ("dtype", "block", "context"),
    [("auto", 32, 1000), ("fp8", 32, 1000)],  # 1,000 tokens do not fill their last block
)
def test_a_plan_is_within_one_percent_of_the_engine(tiny: Path, dtype: str, block: int, context: int) -> None:
    choice = Choice("bf16", "none", block) if dtype == "auto" else Choice("e4m3fn", "tensor", block)
    planned = capacity.pool(read_caches(tiny), choice, GiB, context)
    tokens, length, concurrency = reported(tiny, block_size=block, max_model_len=context, kv_cache_dtype=dtype)
    assert length == context
    assert planned.tokens == pytest.approx(tokens, rel=0.01)
    assert planned.concurrency == pytest.approx(concurrency, rel=0.01)


def test_a_hybrid_plan_is_within_one_percent_of_the_engine(tmp_path: Path) -> None:
    """Layers with a window beside full ones: groups of unequal need over one pool."""
    import json

    model = make(tmp_path / "hybrid", num_hidden_layers=4)
    config = json.loads((model / "config.json").read_text())
    config |= {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 256,
    }
    (model / "config.json").write_text(json.dumps(config))
    tokens, length, concurrency = reported(model, block_size=32, max_model_len=1000, max_num_batched_tokens=1024)
    planned = capacity.pool(read_caches(model), Choice("bf16", "none", 32, in_flight=1024), GiB, length)
    assert planned.tokens == pytest.approx(tokens, rel=0.01)
    assert planned.concurrency == pytest.approx(concurrency, rel=0.01)
