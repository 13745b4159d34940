"""What it costs where no FP8 attention fits: `expand` (FP8 is stored, pages are native) and `native` (BF16 is stored)
against the FP8 path.

    .venv-torch/bin/python -m bench.fallback [--quick] [--strict] [--json FILE]

computed   a prefix comes back over the link and is attended to: bytes over the rates of `bench.roofline`, models at
           full size; nothing measured
measured   one layer on this CPU by the plain torch reference: the same three ways, in turns. It is the specification,
           not a fast path: its attention upcasts, so on a CPU the FP8 path does not gain what it gains where bandwidth
           is the limit
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

try:
    import torch
except ImportError:
    raise SystemExit(
        "bench.fallback needs torch: say make venv-torch, then .venv-torch/bin/python -m bench.fallback"
    ) from None
from kvtier_kernels.reference import Tile, attention, dequantize, quantize

from bench.harness import Effort, end_cleanly, interleave, ratios
from bench.report import Report
from bench.roofline import BANDWIDTH, LINK, MODELS, Model

CONTEXTS = (8192, 32768, 131072)
HEADS, GROUP, WIDTH, TOKENS = 8, 4, 128, 64
WAYS = ("FP8", "expand", "native")


def floors(model: Model, context: int) -> dict[str, tuple[float, float]]:
    """Of each way: (ms until the context is back in pages, ms of attention of one decode step)."""
    native, fp8 = (model.layers * context * model.token_bytes(kind) for kind in (None, "head"))
    read = model.tokens_read(context) / BANDWIDTH * 1e3
    slow, quick = read * model.token_bytes(None), read * model.token_bytes("head")
    link, memory = 1e3 / LINK, 1e3 / BANDWIDTH
    return {
        "FP8": (fp8 * link + 2 * fp8 * memory, quick),
        "expand": (fp8 * link + (fp8 + native) * memory, slow),
        "native": (native * link + 2 * native * memory, slow),
    }


def computed(report: Report) -> None:
    """Floors at full size."""
    for model in MODELS:
        for context in CONTEXTS:
            found = floors(model, context)
            for n, what in enumerate(("restore", "attention of a decode step")):
                for way in WAYS:
                    case = f"computed, {model.name}, {context:,} tokens, {way}"
                    report.add(case, what, found[way][n], "ms", found["FP8"][n], found[way][n] / found["FP8"][n])


class Layer:
    """K and V of one layer's context in blocks, in each form, and the pages that they come back into."""

    def __init__(self, blocks: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.native = [
            [torch.randn(HEADS, TOKENS, WIDTH, generator=generator).bfloat16() for _ in "kv"] for _ in range(blocks)
        ]
        self.fp8 = [[quantize(part, "block-head") for part in block] for block in self.native]
        self.pages = [[torch.empty_like(part) for part in block] for block in self.native]
        self.fp8_pages = [
            [(torch.empty_like(part.codes), torch.empty_like(part.scales)) for part in block] for block in self.fp8
        ]
        self.query = torch.randn(HEADS * GROUP, 1, WIDTH, generator=generator)
        self.blocks = blocks

    def restore_fp8(self) -> None:
        for block, pages in zip(self.fp8, self.fp8_pages, strict=True):
            for part, (codes, scales) in zip(block, pages, strict=True):
                codes.view(torch.uint8).copy_(part.codes.view(torch.uint8))
                scales.copy_(part.scales)

    def restore_expand(self) -> None:
        for block, pages in zip(self.fp8, self.pages, strict=True):
            for part, page in zip(block, pages, strict=True):
                page.copy_(dequantize(part.codes, part.scales, "block-head"))

    def restore_native(self) -> None:
        for block, pages in zip(self.native, self.pages, strict=True):
            for part, page in zip(block, pages, strict=True):
                page.copy_(part)

    def attend_fp8(self) -> torch.Tensor:
        tiles = [
            Tile(k, v, ks, vs, "block-head", "block-head", start=i * TOKENS)
            for i, ((k, ks), (v, vs)) in enumerate(self.fp8_pages)
        ]
        return attention(self.query, tiles, start=self.blocks * TOKENS).output

    def attend_native(self) -> torch.Tensor:
        tiles = [Tile(k, v, start=i * TOKENS) for i, (k, v) in enumerate(self.pages)]
        return attention(self.query, tiles, start=self.blocks * TOKENS).output


def measured(report: Report, quick: bool) -> None:
    """One layer on this CPU."""
    torch.set_num_threads(1)
    layer = Layer(4 if quick else 64)
    restores: dict[str, Callable[[], object]] = {
        "FP8": layer.restore_fp8,
        "expand": layer.restore_expand,
        "native": layer.restore_native,
    }
    moved = interleave(restores, Effort.of(quick, 15, 0.06))
    layer.restore_fp8()
    layer.restore_expand()
    error = (layer.attend_fp8() - layer.attend_native()).abs().max().item()
    assert error < 0.01, f"the two ways differ by {error}"
    attended = interleave({"FP8": layer.attend_fp8, "native": layer.attend_native}, Effort.of(quick, 15, 0.06))
    attended["expand"] = attended["native"]  # the same pages, the same attention
    tokens = layer.blocks * TOKENS
    for what, done in (("restore", moved), ("attention of a decode step", attended)):
        for way in WAYS:
            case = f"measured, one layer on this CPU, {tokens:,} tokens, {way}"
            report.add(case, what, 1e3 / done[way].rate, "ms", 1e3 / done["FP8"].rate, ratios(done["FP8"], done[way]))


def main(
    quick: Annotated[bool, typer.Option(help="Walk through everything, measure nothing worth reading.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a mark is missed (there are none).")] = False,
    json: Annotated[Path | None, typer.Option(help="Keep the rows in this file.")] = None,
) -> None:
    """The fallbacks beside the FP8 path."""
    end_cleanly()
    report = Report("bench.fallback", sys.argv[1:])
    report.machine["libraries"] |= {"torch": importlib.metadata.version("torch")}
    computed(report)
    measured(report, quick)
    raise SystemExit(report.finish(json, strict))


if __name__ == "__main__":
    typer.run(main)
