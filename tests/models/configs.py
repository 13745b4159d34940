"""Published configurations of four models, and an artifact for one of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.format.artifact import Artifact, PartFormat
from kvtier.models.capacity import Choice
from kvtier.models.model_config import ModelCaches, caches_of

GiB, MiB, KiB = 2**30, 2**20, 2**10


LLAMA: dict[str, Any] = {  # Llama-3.1-8B
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


GPT_OSS: dict[str, Any] = {  # gpt-oss-20b
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
}


GEMMA: dict[str, Any] = {  # gemma-2-9b, whose config does not list its layers
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "hidden_size": 3584,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}


DEEPSEEK: dict[str, Any] = {  # DeepSeek-V2-Lite
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}


FP8 = Choice()


NATIVE = Choice(dtype="bf16", granularity="none")


def model(config: dict[str, Any], **changes: Any) -> ModelCaches:
    return caches_of({**config, **changes}, "m")


def bundle(value: float = 0.5, position: int | None = 511, excluded: tuple[int, ...] = (31,)) -> Artifact:
    form = PartFormat("e4m3fn", "tensor")
    scales = {
        (layer, part): np.array([value], np.float32) for layer in range(32) for part in "kv" if layer not in excluded
    }
    return Artifact("m", "a" * 40, {"k": form, "v": form}, "amax", 1, "plain", "none", scales, excluded, position)
