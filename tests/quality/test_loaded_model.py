"""What a loaded model says of its caches."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


from kvtier.quality import evaluate  # noqa: E402
from kvtier.quality.loaded_model import of  # noqa: E402
from kvtier.quality.texts import Sample  # noqa: E402
from tests.quality.small_model import make, samples, text  # noqa: E402


def test_layers_with_a_window_beside_full_ones_stay_native() -> None:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention"],
        use_sliding_window=True,
        sliding_window=16,
        max_position_embeddings=512,
    )
    mixed = of(transformers.Qwen2ForCausalLM(config).eval(), lambda line: list(line.encode()), str, "mixed", "b" * 40)
    assert mixed.caches.windowed == {0} and make().caches.windowed == frozenset()
    settings = evaluate.EvaluationSettings(
        schemes=("token-head", "kivi", "head"), lengths=(64,), sequences=1, factor=0, passages=0
    )
    made = evaluate.run(mixed, settings, samples(), lambda length, number: [Sample("t", tuple(text(length, 3)))])
    assert [sorted(result.scheme.excluded) for result in made.cells[0].results] == [[], [0], []]
    assert set(made.cells[0].results[1].tallies) == {(1, "k"), (1, "v")}
