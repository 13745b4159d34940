"""A small random model, texts for it, and results made up."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from kvtier.quality.compare import Result
from kvtier.quality.loaded_model import LoadedModel, of
from kvtier.quality.schemes import Quantizer, Scheme
from kvtier.quality.texts import Sample

WIDTH = 16


TEXT = bytes(range(32, 127)) * 40


def model(layers: int = 2, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=WIDTH,
        max_position_embeddings=4096,
        initializer_range=0.2,
        **changes,
    )
    return transformers.LlamaForCausalLM(config).eval()


def make(layers: int = 2, **changes: Any) -> LoadedModel:
    return of(
        model(layers, **changes),
        lambda text: list(text.encode("ascii", "replace")),
        lambda ids: bytes(ids).decode(),
        "tiny",
        "b" * 40,
    )


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(32, 127, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def samples(number: int = 3, length: int = 64) -> list[Sample]:
    return [Sample("chat" if i % 2 else "code", tuple(text(length, i))) for i in range(number)]


def filled(loaded: LoadedModel, scheme: Scheme | None, tokens: list[int], step: int = 256) -> Any:
    cache = Quantizer(scheme).attach(loaded.empty_cache(), [0, 1])
    for at in range(0, len(tokens), step):
        loaded.logits(torch.tensor(tokens[at : at + step]), cache)
    return cache


def result(name: str, *kl: float, sequences: int = 2, length: int = 512) -> Result:
    """A scheme with this KL in each run of `length` positions."""
    scheme = (
        Scheme(name, "bf16", "bf16")
        if name == "bf16"
        else Scheme(name, "head", "head", {(0, "k"): torch.tensor([0.1]), (0, "v"): torch.tensor([0.1])})
    )
    made = Result(scheme)
    for _ in range(sequences):
        trace = np.repeat(np.array(kl, np.float32), length)
        made.kl.append(trace)
        for values in (made.nll, made.native_nll, made.top1):
            values.append(np.ones_like(trace))
    return made
