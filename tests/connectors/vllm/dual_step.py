"""The GPU's backend on Triton's interpreter against the CPU's: the same steps of an engine through both classes as vLLM
calls them.

    TRITON_INTERPRET=1 python -m tests.connectors.vllm.dual_step

Prints one line a case: the worst relative difference of an output. The caches must be equal in every byte, and so must
the flags.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

assert os.environ.get("TRITON_INTERPRET") == "1"  # before triton is imported

import kvtier_kernels.interpreter  # noqa: E402, F401
import torch  # noqa: E402
from kvtier_kernels import paged, reference  # noqa: E402

from kvtier.connectors.vllm.backend import flags, gpu  # noqa: E402
from kvtier.connectors.vllm.backend.declared import KINDS  # noqa: E402
from tests.connectors.vllm import cpu_backend  # noqa: E402

HEADS, KV_HEADS, WIDTH, PAGE, PAGES = 6, 2, 64, 16, 24


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def cache_of(order: str) -> torch.Tensor:
    """[pages, heads, tokens, K | V] in a physical order, with FP8 in half of the pages."""
    shapes = {
        "LBHNC": (PAGES, KV_HEADS, PAGE, 2 * WIDTH),
        "LBNHC": (PAGES, PAGE, KV_HEADS, 2 * WIDTH),
        "BLHNC": (PAGES, 3, KV_HEADS, PAGE, 2 * WIDTH),
    }
    raw = random(*shapes[order], seed=1)
    cache = raw.transpose(1, 2) if order == "LBNHC" else raw[:, 1] if order == "BLHNC" else raw
    page_flags = flags.fix(cache)
    for number, plane in enumerate(paged.interleaved(cache, WIDTH, page_flags, KINDS)):
        assert plane.codes is not None and plane.scales is not None
        for page in range(1, PAGES, 2):
            made = reference.quantize(
                random(KV_HEADS, PAGE, WIDTH, seed=100 * page + number), "block-head", powers=True
            )
            plane.codes[page], plane.scales[page] = made.codes.view(torch.uint8), made.scales[:, :, None]
    page_flags[1::2] = 1
    return cache


def step(
    impl: Any, cache: torch.Tensor, tables: list[list[int]], lengths: list[int], counts: list[int], seed: int
) -> torch.Tensor:
    """One step of the engine: `counts` new tokens of each sequence, at its end, and padding behind them."""
    total, padded = sum(counts), sum(counts) + 3
    key, value, query = (
        random(padded, KV_HEADS, WIDTH, seed=seed),
        random(padded, KV_HEADS, WIDTH, seed=seed + 1),
        random(padded, HEADS, WIDTH, seed=seed + 2),
    )
    slots = [
        table[at // PAGE] * PAGE + at % PAGE
        for table, end, n in zip(tables, lengths, counts, strict=True)
        for at in range(end - n, end)
    ]
    impl.do_kv_cache_update(None, key, value, cache, torch.tensor([*slots, -1, -1, -1]))
    widest = max(map(len, tables))
    metadata = SimpleNamespace(
        num_actual_tokens=total,
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.tensor([table + [0] * (widest - len(table)) for table in tables], dtype=torch.int32),
        causal=True,
    )
    output = torch.zeros(padded, HEADS, WIDTH, dtype=torch.bfloat16)
    impl.forward(None, query, key, value, cache, metadata, output)
    return output[:total].float()


def main() -> None:
    """Every case in both classes."""
    options: dict[str, Any] = {
        "plain": {},
        "window": {"sliding_window": 24},
        "cap": {"logits_soft_cap": 20.0},
        "sinks": {"sinks": torch.linspace(-1, 2, HEADS)},
    }
    for order in ("LBHNC", "LBNHC", "BLHNC"):
        for name, more in options.items() if order == "LBHNC" else [("plain", {})]:
            ends, outputs = [], []
            for kind in (cpu_backend.CpuDualImpl, gpu.GpuDualImpl):
                cache = cache_of(order)
                impl = kind(
                    HEADS,
                    WIDTH,
                    WIDTH**-0.5,
                    KV_HEADS,
                    None,
                    **{"sliding_window": None, "kv_cache_dtype": "auto", **more},
                )
                # Two restored pages and a chunk behind them; a sequence all of its own, in pages that were FP8; then
                # both go on by a token.
                tables = [[3, 5, 7, 2], [9, 11]]
                found = [
                    step(impl, cache, tables, [50, 20], [18, 20], 10),
                    step(impl, cache, tables, [51, 21], [1, 1], 20),
                ]
                outputs.append(found)
                ends.append((cache.clone(), flags.of(cache).clone()))
            assert torch.equal(ends[0][0].view(torch.int16), ends[1][0].view(torch.int16)), "caches differ"
            assert torch.equal(ends[0][1], ends[1][1]) and ends[0][1][[3, 5, 7, 2, 9, 11]].tolist() == [
                1,
                1,
                0,
                0,
                0,
                0,
            ]
            worst = max(float((a - b).norm() / a.norm()) for a, b in zip(*outputs, strict=True))
            print(f"{order} {name}: {worst:.1e}")
            assert worst < 5e-3, "both round to BF16 at the end"


if __name__ == "__main__":
    main()
