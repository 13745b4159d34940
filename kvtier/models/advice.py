"""When quantized KV pays and when it does not: the rules of thumb, applied to one model and one use. Pure functions
over a plan's numbers.

Published figures are named as such; they are of other machines and say what to measure, not what to expect.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.format.artifact import Artifact
from kvtier.format.layout import FP8
from kvtier.models.capacity import Choice, is_quantized
from kvtier.models.model_config import ModelCaches

WIDE_HEAD = 256
PUBLISHED_BREAK_EVEN = 7010  # tokens; Llama-3.1-8B, H100, FlashAttention 3, decode over FP8 against BF16
LONG = 32768


@dataclass(frozen=True, slots=True)
class Advice:
    """One rule that applies: what was found, and what to do about it."""

    topic: str
    found: str
    do: str


def advise(
    caches: ModelCaches, choice: Choice, context: int, ratio: float, break_even: float | None, measured: bool
) -> list[Advice]:
    """The rules that apply at this context length. `ratio`: tokens that fit in FP8 per token that fits natively;
    `break_even` of decode, None for never, which counts only if it was `measured`."""
    found: list[Advice] = []
    if choice.dtype not in FP8:
        return found
    quantized = [layer for layer in caches.cached if is_quantized(layer, choice)]
    windows = [layer for layer in caches.cached if layer.window is not None]
    states = len(caches.layers) - len(caches.cached)
    if measured and (break_even is None or context < break_even):
        says = "at no length" if break_even is None else f"from {break_even:,.0f} tokens on"
        found.append(
            Advice(
                "short contexts",
                f"{context:,} tokens; FP8 decodes faster {says}",
                "keep BF16 for latency: FP8 buys room here, not speed",
            )
        )
    elif not measured and context < PUBLISHED_BREAK_EVEN:
        found.append(
            Advice(
                "short contexts",
                f"{context:,} tokens; on an H100 with Llama-3.1-8B FP8 decoded faster from {PUBLISHED_BREAK_EVEN:,} "
                "on (published)",
                "measure inter-token latency at two lengths in both formats and give --itl-native and --itl-fp8",
            )
        )
    if any(max(layer.widths) >= WIDE_HEAD and layer.kind == "attention" for layer in quantized):
        found.append(
            Advice(
                "wide heads",
                "head_dim 256: FP8 prefill was 1.6 times slower than BF16 on Hopper (published)",
                "measure prefill before switching on",
            )
        )
    if windows and len(windows) < len(caches.cached):
        kept = "quantized" if choice.sliding else "native"
        do = (
            "their bytes are few and quality suffers there first: leave --sliding off"
            if choice.sliding
            else "right: a window's bytes do not grow"
        )
        found.append(
            Advice(
                "sliding windows",
                f"{len(windows)} of {len(caches.cached)} layers look back a window; they are {kept}",
                do,
            )
        )
    if states:
        found.append(
            Advice(
                "recurrent layers",
                f"{states} of {len(caches.layers)} layers keep a state of constant size, which is not counted here",
                "FP8 halves only what the attention layers keep",
            )
        )
    if any(layer.kind == "latent" for layer in quantized):
        found.append(
            Advice(
                "MLA",
                "the latent is small already, and its rotary part is sensitive",
                "leave it native unless memory is short",
            )
        )
    if ratio < 1.5:
        found.append(
            Advice(
                "effective ratio",
                f"{ratio:.2f}, far from 2",
                "what stays native takes the gain: is the trouble worth it?",
            )
        )
    if context >= LONG:
        found.append(
            Advice(
                "long contexts",
                "on Hopper a 128k needle test fell from 91 % to 13 % where FP8 products were summed in one level, 89 "
                "% with two (published)",
                "run kvtier evaluate at this length, with needles, on the engine's own kernel",
            )
        )
    return found


def beyond_calibration(scales: Artifact, context: int) -> Advice | None:
    """What to say about using these scales for `context` tokens; None if all positions
    were seen."""
    if scales.calibrated_position is None:
        return Advice(
            "calibrated length",
            "nobody knows up to which position these scales were calibrated",
            "evaluate at the length you serve",
        )
    if context - 1 > scales.calibrated_position:
        return Advice(
            "calibrated length",
            f"calibrated on {scales.calibrated_position + 1:,} tokens, used up to {context:,}",
            "calibrate on texts as long as those you serve: later positions may clip",
        )
    return None


def uncalibrated(scales: Artifact) -> Advice | None:
    """What to say about scales that are all 1.0; None for others."""
    if not scales.uncalibrated:
        return None
    return Advice(
        "scale 1.0",
        "every scale is 1.0: nothing was calibrated",
        "values beyond 448 clip; run kvtier calibrate and kvtier evaluate",
    )
