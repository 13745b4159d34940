"""Floors, computed and not measured: the bytes that attention, quantization and restore must move, and the least time a
device can take for them.

    python -m bench.roofline [--bandwidth B/s] [--link B/s]

Bytes come from `kvtier.format.layout`, scales and padding included. A floor is bytes over the stated bandwidth; a
kernel's measured time is to be given as a share of it (`bench.kernels`). The expected ratio is that of FP8 to BF16
bytes: no FP8 attention can beat it, and one that reads whole pages should come near."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.format import layout

BANDWIDTH = 4.3e12  # B/s of device memory: H200's 4.8e12 by its data sheet, at the 90 % that copies reach
LINK = 55e9  # B/s between host and device: PCIe 5.0 x16 as copies see it
CONTEXTS = (8192, 32768, 131072)
BATCHES = (1, 8)
GRANULARITIES = ("head", "block-head", "token-head")


@dataclass(frozen=True, slots=True)
class Model:
    """Shapes from the models' published configurations. window: of `windowed` of the layers, the others see everything.
    weight_bytes: read a step."""

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    width: int
    weight_bytes: float
    window: int = 0
    windowed: int = 0

    def tokens_read(self, context: int) -> int:
        """Tokens times layers that one query reads."""
        return (self.layers - self.windowed) * context + self.windowed * min(self.window or context, context)

    def token_bytes(self, granularity: str | None, tokens: int = 16) -> float:
        """Bytes of K and V of one token in one layer, with what the block's layout adds; None: native."""
        made = layout.attention(
            1,
            self.kv_heads,
            self.width,
            engine_tokens=tokens,
            granularity=granularity or "head",
            excluded=() if granularity else (0,),
        )
        return made.extents().body_bytes / tokens


MODELS = (
    Model("Llama-3.1-8B", 32, 32, 8, 128, 16.06e9),
    # Weights in MXFP4; a step of one sequence reads the active experts, about 3.6e9 parameters.
    Model("gpt-oss-20b", 24, 64, 8, 64, 2.4e9, window=128, windowed=12),
    Model("Gemma-2-9B (head dim 256)", 42, 16, 8, 256, 18.5e9, window=4096, windowed=21),
)


@dataclass(frozen=True, slots=True)
class Floor:
    """Decode at one batch and context. Times in ms; ratio of FP8 to BF16 for attention alone and for the whole step
    with its weights."""

    model: str
    batch: int
    context: int
    granularity: str
    bf16: float
    fp8: float
    ratio: float
    step_ratio: float


def decode_floors(bandwidth: float) -> Iterator[Floor]:
    """Attention of one decode step over a context that is all FP8, against all BF16."""
    for model in MODELS:
        weights = model.weight_bytes / bandwidth * 1e3
        for batch in BATCHES:
            for context in CONTEXTS:
                read = batch * model.tokens_read(context) / bandwidth * 1e3
                native = read * model.token_bytes(None)
                for granularity in GRANULARITIES:
                    fp8 = read * model.token_bytes(granularity)
                    yield Floor(
                        model.name,
                        batch,
                        context,
                        granularity,
                        native,
                        fp8,
                        fp8 / native,
                        (fp8 + weights) / (native + weights),
                    )


def move_floors(model: Model, context: int, bandwidth: float, link: float) -> dict[str, float]:
    """ms for the KV of a context: quantizing it (reads BF16, writes FP8), bringing it back over the link, and the
    scatter into pages."""
    native, fp8 = (model.layers * context * model.token_bytes(kind) for kind in (None, "head"))
    return {
        "quantize": (native + fp8) / bandwidth * 1e3,
        "link BF16": native / link * 1e3,
        "link FP8": fp8 / link * 1e3,
        "scatter FP8": 2 * fp8 / bandwidth * 1e3,
        "expand": (native + fp8) / bandwidth * 1e3,
    }


def scale_cost(width: int, tokens: int) -> dict[str, float]:
    """Bytes that scales add to a head's K and V of one layer, as a share of their codes; padding to 16 bytes
    included."""
    costs = {}
    for name, kinds, dtype in (
        ("head", ("head", "head"), "fp32"),
        ("block-head", ("block-head", "block-head"), "fp32"),
        ("token-head", ("token-head", "token-head"), "fp32"),
        ("K channel, V token", ("channel", "token-head"), "fp32"),
        ("K channel, V token, small scales", ("channel", "token-head"), "bf16"),
    ):
        parts = tuple(
            layout.Part(part, width, "e4m3fn", kind, dtype if kind in layout.DYNAMIC else "fp32")
            for part, kind in zip("kv", kinds, strict=True)
        )
        group = layout.Group("attention", 1, tokens, (layout.Layer(0, parts),))
        codes = 2 * width * tokens
        costs[name] = layout.Layout((group,)).extents().body_bytes / codes - 1
    return costs


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def main() -> None:
    """Entry point: three tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.roofline", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH, help="of device memory, B/s")
    parser.add_argument("--link", type=float, default=LINK, help="between host and device, B/s")
    arguments = parser.parse_args()
    print(
        f"Computed floors, nothing measured: {arguments.bandwidth / 1e12:.1f} TB/s of memory, "
        f"{arguments.link / 1e9:.0f} GB/s of link.\n"
    )
    rows = [
        [
            f.model,
            f"{f.batch}",
            f"{f.context:,}",
            f.granularity,
            f"{f.bf16:.3f}",
            f"{f.fp8:.3f}",
            f"{f.ratio:.3f}",
            f"{f.step_ratio:.2f}",
        ]
        for f in decode_floors(arguments.bandwidth)
    ]
    print(table(["model", "batch", "context", "scales", "BF16 ms", "FP8 ms", "ratio", "ratio of the whole step"], rows))
    print("\nKV of one sequence, ms:\n")
    rows = []
    for model in MODELS:
        for context in CONTEXTS:
            floors = move_floors(model, context, arguments.bandwidth, arguments.link)
            rows.append([model.name, f"{context:,}", *(f"{ms:.2f}" for ms in floors.values())])
    print(table(["model", "context", *floors], rows))
    print("\nBytes that scales add to the codes:\n")
    rows = [
        [name, *(f"{scale_cost(width, tokens)[name]:.1%}" for width in (64, 128) for tokens in (16, 64))]
        for name in scale_cost(128, 16)
    ]
    print(table(["scales", "D64, 16 tokens", "D64, 64 tokens", "D128, 16 tokens", "D128, 64 tokens"], rows))


if __name__ == "__main__":
    main()
