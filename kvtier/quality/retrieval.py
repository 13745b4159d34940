"""Copying from far back, and needles in many documents: what an average perplexity hides.

Scored teacher-forced (how likely is the right answer), which separates schemes even where the model is too weak to
answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.errors import Invalid
from kvtier.quality.compare import Interval, Step, interval
from kvtier.quality.loaded_model import LoadedModel
from kvtier.quality.schemes import Quantizer, Scheme

PASSAGE, CUE = 28, 8  # tokens of a hidden passage, and of its beginning that the question repeats


@dataclass(frozen=True, slots=True)
class Retrieval:
    """One scheme on one kind of retrieval: contexts, mean answer NLL per token, shares of right tokens and answers."""

    kind: str
    scheme: str
    nll: Interval
    correct: Interval
    exact: Interval


@dataclass(frozen=True, slots=True)
class Scored:
    """A continuation after a context: mean negative log-likelihood per token, share of first choices, all or not."""

    nll: float
    correct: float
    exact: bool


def score(
    loaded: LoadedModel,
    context: Sequence[int],
    queries: Sequence[tuple[Sequence[int], Sequence[int]]],
    schemes: Sequence[Scheme | None],
) -> list[list[Scored]]:
    """Per scheme (None: native) and query (cue, answer): how well the answer's tokens are predicted after context and
    cue. The context is read once; each query sees the context alone."""
    found = []
    for scheme in schemes:
        cache = Quantizer(scheme).new_cache(loaded)
        for _ in loaded.passes(torch.tensor(list(context)), cache):
            pass
        state = save_state(cache)
        scored = []
        for cue, answer in queries:
            restore_state(cache, state)
            logits = loaded.logits(torch.tensor([*cue, *answer[:-1]]), cache)[len(cue) - 1 :].float().log_softmax(-1)
            targets = torch.tensor(list(answer), device=logits.device)
            right = logits.argmax(-1) == targets
            scored.append(
                Scored(
                    float(-logits.gather(1, targets[:, None]).mean()), float(right.float().mean()), bool(right.all())
                )
            )
        found.append(scored)
    return found


def copies(
    newline: Sequence[int], filler: Sequence[int], words: Sequence[Sequence[int]], length: int, passages: int, seed: int
) -> tuple[list[int], list[tuple[Any, Any]]]:
    """A context of `length` tokens with passages of shuffled words hidden in filler, and (cue, answer) of each:
    long-range copy. `words` are many, so that hardly one stands in two passages: else the beginning of a passage does
    not say how it goes on."""
    chance = random.Random(seed)
    made = []
    for _ in range(passages):
        ids: list[int] = list(newline)
        while len(ids) < PASSAGE:
            ids += [token for word in chance.sample(list(words), min(PASSAGE, len(words))) for token in word]
        made.append(ids[:PASSAGE])
    return _hide(list(filler), [[*ids, *newline] for ids in made], length, chance), [
        (ids[:CUE], ids[CUE:]) for ids in made
    ]


def needles(
    encode: Callable[[str], list[int]], filler: Sequence[int], length: int, count: int, seed: int
) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """A context of documents with one fact in each, and (question, answer) of each: several needles."""
    chance = random.Random(seed)
    cities = [
        "Oslo",
        "Lima",
        "Cairo",
        "Perth",
        "Quito",
        "Turin",
        "Dakar",
        "Kyoto",
        "Sofia",
        "Minsk",
        "Accra",
        "Hanoi",
        "Riga",
        "Leeds",
        "Tunis",
        "Ghent",
    ]
    chosen = chance.sample(cities, min(count, len(cities)))
    codes = {city: f"{chance.randrange(10_000, 99_999)}" for city in chosen}
    facts = [
        encode(f"\n\nNote: the access code of the office in {city} is {code}.\n\n") for city, code in codes.items()
    ]
    context = _hide(list(filler), facts, length, chance)
    return context, [
        (
            encode(f"\n\nQuestion: what is the access code of the office in {city}?\nAnswer: it is"),
            encode(f" {codes[city]}"),
        )
        for city in chosen
    ]


def measure(
    loaded: LoadedModel,
    kind: str,
    contexts: Sequence[tuple[list[int], list[tuple[Any, Any]]]],
    schemes: Sequence[Scheme | None],
    step: Step | None = None,
) -> list[Retrieval]:
    """Scores every scheme (None: native) over contexts; intervals are over contexts."""
    per_scheme: list[list[list[Scored]]] = [[] for _ in schemes]
    for done, (context, queries) in enumerate(contexts, 1):
        for mine, scored in zip(per_scheme, score(loaded, context, queries, schemes), strict=True):
            mine.append(scored)
        if step is not None:
            step(done, len(contexts))
    found = []
    for scheme, runs in zip(schemes, per_scheme, strict=True):
        nll, correct, exact = (
            [sum(getattr(s, name) for s in run) / len(run) for run in runs] for name in ("nll", "correct", "exact")
        )
        intervals = [interval(values) for values in (nll, correct, exact)]
        assert all(one is not None for one in intervals)
        found.append(Retrieval(kind, "native" if scheme is None else scheme.name, *intervals))  # type: ignore[arg-type]
    return found


def _hide(filler: list[int], pieces: Sequence[Sequence[int]], length: int, chance: random.Random) -> list[int]:
    """Filler cut to what is left of `length`, with the pieces at random places."""
    budget = length - sum(map(len, pieces))
    if budget < 16 or len(filler) < budget:
        raise Invalid(f"{length} tokens are too few for what is to be hidden in them, or the filler is too short")
    cuts = sorted(chance.randrange(8, budget) for _ in pieces)
    context, at = [], 0
    for cut, piece in zip(cuts, pieces, strict=True):
        context += [*filler[at:cut], *piece]
        at = cut
    return context + filler[at:budget]


def save_state(cache: Any) -> list[dict[str, Any]]:
    """What a cache holds now, without copying: `restore_state` brings it back there, as often as asked."""
    return [dict(layer.__dict__) for layer in cache.layers]


def restore_state(cache: Any, state: list[dict[str, Any]]) -> None:
    """Undoes what came after `save_state`. Updates replace tensors, never write into them: the old ones are whole."""
    for layer, held in zip(cache.layers, state, strict=True):
        layer.__dict__.clear()
        layer.__dict__.update(held)
