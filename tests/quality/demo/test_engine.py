"""The demo's engine: the model predicts as it should, and a continuation over stored tiles equals one pass."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gguf")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

import torch.nn.functional as F  # noqa: E402
from kvtier_kernels.reference import Tile  # noqa: E402

from kvtier.quality import smollm, texts  # noqa: E402
from kvtier.quality.demo.engine import Prefill, continuation  # noqa: E402
from tests.quality.demo.model import needs_model  # noqa: E402


@needs_model
def test_the_model_predicts_as_it_should_and_a_continuation_equals_one_pass() -> None:
    torch.set_num_threads(1)
    model = smollm.load()
    plain = torch.tensor(
        model.encode("The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France.")
    )
    with torch.inference_mode():
        perplexity = F.cross_entropy(model.run(plain, 0, Prefill(), len(plain))[:-1], plain[1:]).exp().item()
    # LlamaForCausalLM of transformers 5.24.0 with these weights and KV in f32 says 10.6325; bf16 KV moves it a little.
    assert perplexity == pytest.approx(10.6325, rel=0.02)

    tokens = torch.tensor(model.encode(texts.evaluation_text())[:200])
    whole = model.run(tokens, 0, Prefill(), 72)
    first = Prefill()
    model.run(tokens[:128], 0, first)
    prefix = [
        [Tile(keys[:, :64], values[:, :64]), Tile(keys[:, 64:], values[:, 64:], start=64)]
        for keys, values in first.cache
    ]
    # bf16 KV of the 72 new tokens may round the other way where f32 sums were made in another order; logits are up to
    # 40.
    torch.testing.assert_close(model.run(tokens[128:], 128, continuation(prefix, 128), 72), whole, rtol=0, atol=0.3)
    wrong = model.run(tokens[128:], 128, continuation(prefix[::-1], 128), 72)
    assert float((wrong - whole).abs().max()) > 3, "and the wrong prefix does not"
