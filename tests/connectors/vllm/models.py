"""Tiny models as safetensors directories: random weights from a seed, hence the same each time, with whatever a case
wants changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def make(path: Path, seed: int = 0, **config: Any) -> Path:
    """A Llama of 2 layers, 4 query and 2 KV heads of 64. An initializer range of 0.2 gives varied tokens; with 0.02 one
    repeats."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **config,
    }
    LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16).save_pretrained(path)
    return path


def scale(source: Path, target: Path, k: float, v: float) -> Path:
    """A copy with a compressed-tensors scheme for the KV cache and these scales in every layer. `target` is
    replaced."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([k])
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([v])
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    scheme = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
        "observer": "minmax",
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme,
    }
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


def adapter(path: Path, seed: int) -> Path:
    """A LoRA adapter of rank 8 for the tiny model's attention, with weights from this seed. `path` is replaced."""
    import torch
    from safetensors.torch import save_file

    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for name, out in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128), ("o_proj", 256)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, 256) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, 8) * 0.2
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path
