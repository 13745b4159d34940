"""What a config.json says of the caches, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.errors import Invalid
from kvtier.models import capacity
from kvtier.models.model_config import caches_of, read_caches
from tests.models.configs import GPT_OSS, LLAMA, NATIVE, model


def test_a_config_is_read_or_refused_by_name(tmp_path: Path) -> None:
    assert {layer.window for layer in model(LLAMA, sliding_window=4096, use_sliding_window=False).layers} == {None}
    assert {layer.window for layer in model(LLAMA, sliding_window=4096).layers} == {4096}
    assert [layer.window for layer in model(LLAMA, sliding_window=512, sliding_window_pattern=4).layers][:5] == [
        512,
        512,
        512,
        None,
        512,
    ]
    assert [
        layer.window
        for layer in model(GPT_OSS, layer_types=["chunked_attention"] * 24, attention_chunk_size=8192).layers
    ][:1] == [8192]
    assert model(LLAMA, torch_dtype="torch.float16").dtype == "fp16"
    assert model({"text_config": LLAMA, "vision_config": {}}).layers == model(LLAMA).layers
    assert len(model(LLAMA, num_kv_shared_layers=10).layers) == 22
    qwen = model(LLAMA, layer_types=["linear_attention"] * 3 * 8 + ["full_attention"] * 8)
    assert (
        len(qwen.cached) == 8 and sum(group.payload_bytes for group in capacity.group_sizes(qwen, NATIVE)) == 8 * 4096
    )
    wide = model(
        LLAMA,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=2,
        layer_types=GPT_OSS["layer_types"] + ["full_attention"] * 8,
        sliding_window=64,
    )
    assert (wide.layers[0].widths, wide.layers[1].widths, wide.layers[1].heads) == ((256, 256), (512, 512), 2)
    for config, message in (
        ({**LLAMA, "num_hidden_layers": None}, "num_hidden_layers"),
        ({**LLAMA, "torch_dtype": "float8"}, "dtype"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "32 layers"),
        ({**LLAMA, "layer_types": ["cross_attention"] * 32}, "cross_attention"),
        ({**LLAMA, "layer_types": ["mamba"] * 32}, "no layer keeps bytes"),
        ({**LLAMA, "hybrid_override_pattern": "M*M*"}, "hybrid_override_pattern"),
        ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads"),
    ):
        with pytest.raises(Invalid, match=message.replace("*", r"\*")):
            caches_of(config, "m")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(Invalid, match=r"config\.json: not an object"):
        read_caches(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_caches(tmp_path).model == tmp_path.name
