"""What is done to K and V on their way into a cache is the number format's reference, to the last bit."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from kvtier_kernels.reference import dequantize, quantize  # noqa: E402

from kvtier.errors import Invalid  # noqa: E402
from kvtier.quality.loaded_model import LoadedModel, of  # noqa: E402
from kvtier.quality.schemes import Quantizer, Scheme  # noqa: E402
from tests.quality.small_model import WIDTH, filled, text  # noqa: E402


@pytest.mark.parametrize(
    ("k", "v"), [("tensor", "head"), ("head", "tensor"), ("token-head", "token-head"), ("head", "token-head")]
)
def test_what_attention_reads_is_what_the_format_decodes_to(loaded: LoadedModel, k: str, v: str) -> None:
    native = filled(loaded, None, text(40), 7).layers[0]
    scales = {
        (0, part): torch.tensor([0.01] if kind == "tensor" else [0.01, 0.003]) for part, kind in (("k", k), ("v", v))
    }
    scheme = Scheme("s", k, v, scales, frozenset((1,)))
    cache = filled(loaded, scheme, text(40), 7)
    for part, kind, got, x in (
        ("k", k, cache.layers[0].keys, native.keys),
        ("v", v, cache.layers[0].values, native.values),
    ):
        found = quantize(x[0], kind, scales[0, part] if kind in ("tensor", "head") else None)
        assert torch.equal(got[0], dequantize(found.codes, found.scales, kind))
        assert not torch.equal(got, x)


def test_formats_of_whole_blocks_leave_the_open_tail_native(loaded: LoadedModel) -> None:
    tokens, scheme = text(60), Scheme("s", "channel", "block-head")
    for step in (256, 16, 5, 1):
        # in the same steps: a matmul of another shape rounds differently
        native = filled(loaded, None, tokens, step).layers[0].keys[0]
        keys = filled(loaded, scheme, tokens, step).layers[0].keys[0]
        found = quantize(native[:, :48], "channel", engine_blocks=3)
        assert torch.equal(keys[:, :48], dequantize(found.codes, found.scales, "channel"))
        assert torch.equal(keys[:, 48:], native[:, 48:])


def test_excluded_layers_and_the_baseline_are_untouched(loaded: LoadedModel) -> None:
    tokens = text(40)
    plain = filled(loaded, None, tokens)
    assert not isinstance(plain.layers[0].__dict__.get("update"), type(lambda: 0)), (
        "nothing is attached for the baseline"
    )
    scheme = Scheme("s", "token-head", "token-head", {}, frozenset((0,)))
    other = filled(loaded, scheme, tokens)
    assert torch.equal(other.layers[0].keys, plain.layers[0].keys) and torch.equal(
        other.layers[0].values, plain.layers[0].values
    )
    assert not torch.equal(other.layers[1].keys, plain.layers[1].keys)


def test_clips_are_counted_and_gaps_refused(loaded: LoadedModel) -> None:
    quantizer = Quantizer(
        Scheme("s", "tensor", "tensor", {(layer, part): torch.tensor([1e-4]) for layer in range(2) for part in "kv"})
    )
    cache = quantizer.attach(loaded.empty_cache(), [0, 1])
    loaded.logits(torch.tensor(text(32)), cache)
    native = filled(loaded, None, text(32)).layers[0].keys
    tally = quantizer.tallies[0, "k"]
    assert (
        tally.elements == native.numel() and tally.clipped == int((native.abs() > 464e-4).sum()) > 0 == tally.nonfinite
    )
    assert tally.amax is not None and tally.amax.tolist() == native[0].abs().amax(dim=(1, 2)).tolist()
    with pytest.raises(Invalid, match="k_scale of layer 0 is missing"):
        filled(loaded, Scheme("s", "head", "head"), text(8))
    with pytest.raises(Invalid, match="'row' is no granularity"):
        Scheme("s", "row", "head")


def test_a_window_that_drops_tokens_takes_no_whole_blocks() -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=WIDTH,
        sliding_window=8,
    )
    windowed = of(transformers.MistralForCausalLM(config).eval(), list, str, "w", "b" * 40)
    assert {layer.window for layer in windowed.caches.layers} == {8}
    with pytest.raises(Invalid, match="layer 0 has a sliding window"):
        filled(windowed, Scheme("s", "block-head", "block-head"), text(40))
    scheme = Scheme("s", "token-head", "token-head")
    assert not torch.equal(
        filled(windowed, scheme, text(40)).layers[0].keys, filled(windowed, None, text(40)).layers[0].keys
    )
