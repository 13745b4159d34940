"""The outlier twin: a model that computes the same function with a few channels of K and V made very large. A built-in
stress, not a real model.

K channels are multiplied by c and the queries' divided, V channels multiplied and the columns that read them divided. c
is a power of two, so nothing is rounded: the native model's logits do not change, while scales that do not fit clip. It
separates scale 1.0 from calibrated scales, which small models in their natural state do not. Changes weights in place
and puts them back; one twin at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvtier.errors import Invalid
from kvtier.quality.loaded_model import LoadedModel

PAIRS, VALUES = 2, 2  # rotation pairs of K and channels of V that grow, per KV head


@contextmanager
def outliers(loaded: LoadedModel, factor: int, seed: int = 0) -> Iterator[None]:
    """Within the block the model is its own twin. Raises Invalid for models whose projections are not four plain ones
    with full rotation."""
    if factor < 1 or factor & (factor - 1):
        raise Invalid(f"the factor must be a power of two, so that nothing is rounded, not {factor}")
    plans = _plans(loaded, seed)
    try:
        _multiply(plans, float(factor))
        yield
    finally:
        _multiply(plans, 1.0 / factor)


def _plans(loaded: LoadedModel, seed: int) -> list[tuple[Any, list[int], list[int], list[int], list[int]]]:
    """(attention, K rows, Q rows, V rows, columns of the output projection) of each layer."""
    generator = torch.Generator().manual_seed(seed)
    config = loaded.model.config
    queries, heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    plans = []
    for layer in loaded.caches.cached:
        attention = getattr(loaded.model.model.layers[layer.index], "self_attn", None)
        if attention is None or any(
            not isinstance(getattr(attention, f"{name}_proj", None), torch.nn.Linear) for name in "qkvo"
        ):
            raise Invalid(f"layer {layer.index} has other projections than q, k, v and o: it has no twin")
        if hasattr(attention, "k_norm") or getattr(config, "partial_rotary_factor", None) not in (None, 1.0):
            raise Invalid(
                "norms or partial rotation between the projections and the cache: the twin would not be the same "
                "function"
            )
        width, group = layer.widths[0], queries // heads
        rows: tuple[list[int], ...] = ([], [], [], [])
        for head in range(heads):
            for pair in torch.randperm(width // 2, generator=generator)[:PAIRS].tolist():
                for channel in (pair, pair + width // 2):  # a rotation mixes these two, so both grow alike
                    rows[0].append(head * width + channel)
                    rows[1].extend(q * width + channel for q in range(head * group, (head + 1) * group))
            for channel in torch.randperm(layer.widths[1], generator=generator)[:VALUES].tolist():
                rows[2].append(head * layer.widths[1] + channel)
                rows[3].extend(q * layer.widths[1] + channel for q in range(head * group, (head + 1) * group))
        plans.append((attention, *rows))
    return plans


def _multiply(plans: list[tuple[Any, list[int], list[int], list[int], list[int]]], factor: float) -> None:
    with torch.no_grad():
        for attention, keys, queries, values, columns in plans:
            k, q, v = attention.k_proj, attention.q_proj, attention.v_proj
            for projection, rows, by in ((k, keys, factor), (q, queries, 1 / factor), (v, values, factor)):
                projection.weight[rows] *= by
                if projection.bias is not None:
                    projection.bias[rows] *= by
            attention.o_proj.weight[:, columns] *= 1 / factor
