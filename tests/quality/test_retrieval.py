"""Copies and needles on a small random model, scored after the context alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


from kvtier.errors import Invalid  # noqa: E402
from kvtier.quality import retrieval  # noqa: E402
from kvtier.quality.loaded_model import LoadedModel  # noqa: E402
from kvtier.quality.retrieval import restore_state, save_state  # noqa: E402
from kvtier.quality.schemes import Quantizer, Scheme  # noqa: E402
from tests.quality.small_model import filled, text  # noqa: E402


def test_a_saved_state_comes_back_as_often_as_asked(loaded: LoadedModel) -> None:
    for scheme in (None, Scheme("s", "channel", "token-head"), Scheme("s", "token-head", "token-head")):
        cache = filled(loaded, scheme, text(37))
        state = save_state(cache)
        first = loaded.logits(torch.tensor(text(20, 5)), cache)
        restore_state(cache, state)
        assert torch.equal(loaded.logits(torch.tensor(text(20, 5)), cache), first)


def test_continuations_are_scored_after_the_context_alone(loaded: LoadedModel) -> None:
    context, queries = text(50), [(text(4, 1), text(3, 2)), (text(2, 3), text(5, 4))]
    scheme = Scheme("s", "token-head", "token-head")
    for plan in (None, scheme):
        scored = retrieval.score(loaded, context, queries, [plan])[0]
        for (cue, answer), found in zip(queries, scored, strict=True):
            cache = Quantizer(plan).attach(loaded.empty_cache(), [0, 1])
            logits = loaded.logits(torch.tensor([*context, *cue, *answer]), cache).float()
            wanted = torch.nn.functional.cross_entropy(logits[-len(answer) - 1 : -1], torch.tensor(answer))
            assert found.nll == pytest.approx(float(wanted), abs=1e-3)
            assert not found.exact or found.correct == 1


def test_retrieval_contexts_hide_what_they_ask_for(loaded: LoadedModel) -> None:
    words = [loaded.encode(f" {word}") for word in ("river", "stone", "market", "garden", "silver", "winter")]
    context, queries = retrieval.copies(loaded.encode("\n\n"), text(600), words, 500, 4, 0)
    assert len(context) == 500 and len(queries) == 4
    for cue, answer in queries:
        whole = [*cue, *answer]
        assert any(context[i : i + len(whole)] == whole for i in range(len(context)))
    context, queries = retrieval.needles(loaded.encode, text(900), 800, 5, 0)
    assert len(context) == 800 and len({bytes(cue) for cue, _ in queries}) == 5
    for _, answer in queries:
        assert loaded.decode(answer).strip() in loaded.decode(context)
    with pytest.raises(Invalid, match="too few"):
        retrieval.copies([10], text(600), words, 100, 4, 0)
    found = retrieval.measure(loaded, "copy", [(context, queries)], [None, Scheme("s", "token-head", "token-head")])
    assert [one.scheme for one in found] == ["native", "s"] and found[0].nll.mean == pytest.approx(
        found[1].nll.mean, rel=0.2
    )
