"""Which tensor of a checkpoint is a KV scale, by its name: llm-compressor and compressed-tensors, ModelOpt, Quark, and
what vLLM accepts beside.

One rule: a name that looks like a KV scale and is not understood is said to be so (`odd`), never passed over, because a
scale that nobody reads becomes a silent 1.0. Pure functions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LAYER = r"(?:^|\.)(?:layers|layer|h|blocks)\.(?P<layer>0|[1-9]\d{0,4})\."
_ATTENTION = r"(?:self_attn|self_attention|attention|attn)(?:\.(?:self|attn|impl))?\."
_KINDS = {
    "own": r"(?P<own>k|v|q|kv)_scale",  # compressed-tensors; kv_scale: one for both, deprecated
    "projection": r"(?P<projection>k|v|q)_proj\.(?P=projection)_scale",  # ModelOpt
    "fused": r"qkv_proj\.(?P<fused>k|v|q)_scale",
    "cache": r"(?P<cache>k|v)_cache\.scale",
    "output": r"(?P<output>k|v|q)_proj\.output_scale",  # Quark
    "zero": r"(?:(?:k|v|q|qkv)_proj\.)?(?P<zero>k|v|q|kv)_zero_point",
}
_NAME = re.compile(f"{_LAYER}{_ATTENTION}(?:{'|'.join(_KINDS.values())})$")
_LOOKS = re.compile(r"(?:^|[._])(?:(?:k|v|q|kv)_(?:scale|zero_point)|(?:k|v|kv)_cache[._]scale)$")


@dataclass(frozen=True, slots=True)
class ScaleName:
    """part "k", "v", "q", or "kv" for one scale of both; `zero_point` if it is one of these instead; `style` is a word
    for reports."""

    layer: int
    part: str
    zero_point: bool
    style: str


def parse(name: str) -> ScaleName | None:
    """What a tensor's name says, None if it is no KV scale that is understood."""
    match = _NAME.search(name)
    if match is None:
        return None
    style = next(kind for kind in _KINDS if match[kind] is not None)
    return ScaleName(int(match["layer"]), match[style], style == "zero", style)


def odd(name: str) -> bool:
    """Whether a name looks like a KV scale and is not understood."""
    return _LOOKS.search(name) is not None and parse(name) is None


def is_scale(name: str) -> bool:
    """Whether a tensor may matter to KV as a scale: understood, or alike in name, or any scale of the attention."""
    return _LOOKS.search(name) is not None or (name.endswith("_scale") and "attn" in name.replace("attention", "attn"))
