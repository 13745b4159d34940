"""Names of tensors: which are KV scales, and that one which is not understood is said to be so."""

from __future__ import annotations

import pytest

from kvtier.format.scale_names import ScaleName, is_scale, odd, parse


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.layers.3.self_attn.k_scale", ScaleName(3, "k", False, "own")),
        ("model.layers.0.self_attn.attn.v_scale", ScaleName(0, "v", False, "own")),
        ("layers.11.attention.kv_scale", ScaleName(11, "kv", False, "own")),
        ("model.layers.0.self_attn.k_proj.k_scale", ScaleName(0, "k", False, "projection")),
        ("model.layers.2.self_attn.qkv_proj.v_scale", ScaleName(2, "v", False, "fused")),
        ("model.layers.2.self_attn.k_cache.scale", ScaleName(2, "k", False, "cache")),
        ("model.layers.2.self_attn.v_proj.output_scale", ScaleName(2, "v", False, "output")),
        ("transformer.h.7.attn.k_zero_point", ScaleName(7, "k", True, "zero")),
        ("transformer.h.7.attn.v_proj.v_zero_point", ScaleName(7, "v", True, "zero")),
    ],
)
def test_a_name_says_layer_part_and_style(name: str, found: ScaleName) -> None:
    assert parse(name) == found and is_scale(name) and not odd(name)


@pytest.mark.parametrize(
    "name",
    [
        "k_scale",  # of no layer
        "model.layers.00.self_attn.k_scale",  # no such number
        "model.layers.0.mlp.k_scale",  # of no attention
        "model.layers.0.self_attn.k_proj.v_scale",  # of two projections
        "model.layers.0.cross_attn.v_cache.scale",
    ],
)
def test_what_looks_like_a_scale_and_is_not_understood_is_odd(name: str) -> None:
    assert parse(name) is None and odd(name) and is_scale(name)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "task_scale"])
def test_other_tensors_are_neither(name: str) -> None:
    assert parse(name) is None and not odd(name) and not is_scale(name)


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("model.layers.0.self_attn.k_scale", True),
        ("model.layers.0.self_attn.k_proj.k_scale", True),
        ("model.layers.0.self_attn.attn.v_scale", True),
        ("layers.3.kv_scale", True),
        ("q_scale", True),
        ("model.layers.0.self_attn.k_proj.output_scale", True),
        ("transformer.h.0.attention.prob_scale", True),
        ("model.layers.0.mlp.up_proj.weight_scale", False),
        ("model.layers.0.self_attn.q_proj.weight", False),
        ("task_scale", False),
    ],
)
def test_which_tensors_are_scales_of_attention(name: str, scale: bool) -> None:
    assert is_scale(name) is scale
