"""Writes checkpoints with llm-compressor: a small random Llama whose KV scales it has calibrated.

    python -m tests.llmcompressor.write DIRECTORY

DIRECTORY/tensor and DIRECTORY/attn_head are what llm-compressor saved; DIRECTORY/seen.json has the scales that the
compressed model held in memory, as hex of f32, and the versions. Everything is made of seeds and asks no network: three
things that `oneshot` would fetch are given to it instead.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, HEADS = 2, 2


def write(root: Path) -> None:
    """Both checkpoints, and what was in memory."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    source = root / "source"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
    words = {f"t{i}": i for i in range(config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")), pad_token="t2", unk_token="t0"
    )
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, config.vocab_size, (64,), generator=generator).tolist() for _ in range(4)]
    seen: dict[str, Any] = {
        "versions": {name: version(name) for name in ("llmcompressor", "compressed-tensors", "transformers", "torch")}
    }
    for strategy in ("tensor", "attn_head"):
        model = LlamaForCausalLM.from_pretrained(
            source, dtype=torch.bfloat16
        )  # its configuration is read again from there
        data = Dataset.from_dict({"input_ids": texts, "attention_mask": [[1] * len(text) for text in texts]})
        scheme = {
            "num_bits": 8,
            "type": "float",
            "strategy": strategy,
            "dynamic": False,
            "symmetric": True,
            "observer": "static_minmax",
        }
        recipe = QuantizationModifier(kv_cache_scheme=scheme)
        oneshot(
            model=model,
            processor=tokenizer,
            dataset=data,
            recipe=recipe,
            max_seq_length=64,
            num_calibration_samples=len(texts),
        )
        seen[strategy] = {
            f"{layer}.{part}": [
                np.float32(value).tobytes()[::-1].hex() for value in tensor.detach().float().flatten().tolist()
            ]
            for layer in range(LAYERS)
            for part in "kv"
            for tensor in [getattr(model.model.layers[layer].self_attn, f"{part}_scale")]
        }
        model.save_pretrained(root / strategy, save_compressed=True)
    (root / "seen.json").write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n")
    shutil.rmtree(source)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
