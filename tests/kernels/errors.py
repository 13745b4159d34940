"""The error table of docs/kernels.md: each attention kernel against float64, by head dim and mode.

    python -m tests.kernels.errors            (TRITON_INTERPRET=1 is set where there is no GPU)

Relative error is |out - exact| / |out|, the worst of the sequences; lse is the worst absolute error of the log-sum-exp.
Random normal K, V and queries.
"""

from __future__ import annotations

import os
import warnings

import torch

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    os.environ["TRITON_INTERPRET"] = "1"
    import kvtier_kernels.interpreter  # noqa: F401

import triton
from kvtier_kernels.paged import WIDTHS

from tests.kernels.cases import DEVICE, Case

MODES = ("head", "block-head", "token-head", "channel", "kivi")


def main() -> None:
    warnings.simplefilter("ignore")
    print("| kernel | head dim | mode | relative error | lse |\n|---|---|---|---|---|")

    def row(kernel: str, width: int, mode: str, found: tuple[float, float]) -> None:
        print(f"| {kernel} | {width} | {mode} | {found[0]:.1e} | {found[1]:.1e} |", flush=True)

    lengths, counts = (33, 100), (20, 30)
    for width in WIDTHS:
        for kind in MODES:
            row(
                "decode",
                width,
                f"FP8 {kind} and BF16 pages",
                Case(width=width, kinds=kind, lengths=lengths, group=4, heads=1).decode_errors(),
            )
        native = Case(width=width, fp8="none", lengths=lengths, group=4, heads=1)
        row("decode", width, "BF16 only, in bf16", native.decode_errors())
        for kind in ("head", "kivi") if width <= 128 else ("head",):
            mixed = Case(width=width, kinds=kind, lengths=lengths, group=4, heads=1)
            row("prefill", width, f"FP8 {kind} and BF16 pages", mixed.prefill_errors(counts))
        for dots in ("qk", "qk+pv") if width <= 128 else ():
            case = Case(width=width, kinds="head", fp8="all", lengths=lengths, group=4, heads=1)
            row("prefill", width, f"FP8 head, FP8 dots {dots}", case.prefill_errors(counts, dots))
    print(f"\nTriton {triton.__version__}, {'interpreter' if DEVICE.type == 'cpu' else torch.cuda.get_device_name()}.")


if __name__ == "__main__":
    main()
