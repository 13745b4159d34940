"""Whether the kernels may be used on this device: each runs once on a seeded block whose scales are not 1, and is
compared with `reference`.

Run it when an engine starts, before any block is stored or restored. A kernel that raises, compiles to nonsense or
differs is named with what was seen, and whoever asked uses mode `native` instead and counts it (a metric, `reasons` as
its text): wrong attention is never an option, fewer hits are. Takes seconds on a GPU, most of them compilation; blocks
the caller. Any thread may call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import kvtier.format.layout as layout
from kvtier_kernels import paged, reference
from kvtier_kernels.attention import decode
from kvtier_kernels.batch_plan import BatchPlan, plan
from kvtier_kernels.expand import Expander
from kvtier_kernels.gather import gather
from kvtier_kernels.prefill import prefill
from kvtier_kernels.quantize import quantize
from kvtier_kernels.restore import restore

CLOSE = 1e-3  # relative, of attention; the kernels' own error is below 5e-4
SCALES = ((0.011, 0.37), (0.05, 0.009))  # of K and V, per head: unequal, none of them 1, small enough to clip


@dataclass
class SelfTestReport:
    """kernel -> "" or why it must not be used."""

    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        return not any(self.reasons.values())


def run(
    device: torch.device, width: int, page: int = 16, granularity: str = "head",
    dtype: torch.dtype = torch.bfloat16, seed: int = 1,
) -> SelfTestReport:  # fmt: skip
    """Every kernel on this device, for one head dim, page size, granularity and native format. Never raises."""
    report = SelfTestReport()
    try:
        case = _Case(device, width, page, granularity, dtype, seed)
    except Exception as error:  # whatever it is, the kernels cannot be used
        return SelfTestReport({"set-up": f"{type(error).__name__}: {error}"})
    for name, check in case.checks.items():
        try:
            report.reasons[name] = check()
        except Exception as error:
            report.reasons[name] = f"{type(error).__name__}: {error}"[:300]
    return report


class _Case:
    """Three pages of two KV heads, two to become FP8, the last native; and what the reference makes of them."""

    def __init__(self, device: torch.device, width: int, page: int, kind: str, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kv = torch.randn(3, 2, page, 2 * width, generator=generator).to(dtype).to(device)
        self.cache = self._cache(self.kv, width, kind)
        native = "bf16" if dtype == torch.bfloat16 else "fp16"
        one = layout.attention(1, 2, width, engine_tokens=page, granularity=kind, native_dtype=native)
        extents = one.extents()
        self.plan: BatchPlan = plan(extents, [self.cache])
        self.pages = torch.tensor([[2], [0]], device=device)
        self.bodies = torch.zeros(2, extents.slot_bytes, dtype=torch.uint8, device=device)
        self.statics = torch.tensor([SCALES], device=device) if kind == "head" else None
        self.parts = [self.kv[i, ..., j * width : (j + 1) * width].float() for i in (2, 0) for j in (0, 1)]
        static = [torch.tensor(scales) for scales in SCALES] if kind == "head" else [None, None]
        self.wanted = [reference.quantize(x.cpu(), kind, static[i % 2]) for i, x in enumerate(self.parts)]
        self.granularity, self.width = kind, width
        self.queries = torch.randn(5, 6, width, generator=generator).to(dtype).to(device)
        keys, values = (self.kv[1, ..., j * width : (j + 1) * width].cpu().clone() for j in (0, 1))
        self.native = reference.Tile(keys, values, start=2 * page, used=page - 3)
        checks = (self.quantize, self.expand, self.restore, self.decode, self.prefill, self.gather)
        self.checks: dict[str, Callable[[], str]] = {check.__name__: check for check in checks}

    @staticmethod
    def _cache(kv: torch.Tensor, width: int, kind: str) -> paged.Paged:
        flags = torch.zeros(len(kv), dtype=torch.uint8, device=kv.device)
        return paged.interleaved(kv, width, flags, (kind, kind))

    def quantize(self) -> str:
        quantize(self.plan, self.pages, self.bodies, self.statics)
        extents, heads = self.plan.extents, []
        for i, quantized in enumerate(self.wanted):
            at, body = i % 2, self.bodies[i // 2].cpu()
            for head in range(2):
                start = head * extents.head_stride
                for offsets, x in ((extents.data, quantized.codes), (extents.scales, quantized.scales)):
                    first, raw = start + offsets[0][at], x[head].contiguous().view(torch.uint8).flatten()
                    heads.append(int((body[first : first + len(raw)] != raw).sum()))
        return f"{sum(heads)} bytes differ from the reference" if sum(heads) else ""

    def expand(self) -> str:
        spare = self.kv.clone()
        cache = self._cache(spare, self.width, self.granularity)
        Expander(enabled=True).expand(plan(self.plan.extents, [cache]), self.bodies, self.pages)
        differing = 0
        for i, quantized in enumerate(self.wanted):
            plain = reference.dequantize(quantized.codes, quantized.scales, self.granularity).to(spare.dtype)
            found = spare[(2, 0)[i // 2], ..., i % 2 * self.width : (i % 2 + 1) * self.width].cpu()
            differing += int((found.view(torch.int16) != plain.view(torch.int16)).sum())
        return f"{differing} elements differ from the reference" if differing else ""

    def restore(self) -> str:
        restore(self.plan, self.bodies, self.pages)
        flags = self.cache.flags
        assert flags is not None
        if flags.tolist() != [1, 0, 1]:
            return f"flags are {flags.tolist()}"
        codes = [plane.codes[page].cpu() for page in (2, 0) for plane in self.cache if plane.codes is not None]
        differing = sum(int((a != b.codes.view(torch.uint8)).sum()) for a, b in zip(codes, self.wanted, strict=True))
        return f"{differing} codes differ in the slots" if differing else ""

    def decode(self) -> str:
        queries, most = self.queries[-1:], 3 * self.native.keys.shape[1]
        out, lse = decode(queries, self.cache, *self._sequence(), most, dtype=torch.float32)
        return self._compare(out, lse, queries)

    def prefill(self) -> str:
        starts = torch.tensor([0, 5], dtype=torch.int32, device=self.kv.device)
        table, lengths = self._sequence()
        out, lse = prefill(self.queries, self.cache, table, starts, lengths, 5, dtype=torch.float32)
        return self._compare(out, lse, self.queries)

    def gather(self) -> str:
        again = torch.zeros_like(self.bodies)
        counts = torch.zeros(2, 1, 2, 2, dtype=torch.int32, device=again.device)
        gather(self.plan, self.pages, again, counts)
        size = self.plan.extents.body_bytes
        differing = int((again[:, :size] != self.bodies[:, :size]).sum())
        return f"{differing} bytes differ after a round trip" if differing else ""

    def _sequence(self) -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=self.kv.device)
        used = self.native.start + (self.native.used or 0)
        return table, torch.tensor([used], dtype=torch.int32, device=self.kv.device)

    def _compare(self, out: torch.Tensor, lse: torch.Tensor, queries: torch.Tensor) -> str:
        page, kind = self.native.keys.shape[1], self.granularity
        tiles = [
            reference.Tile(k.codes, v.codes, k.scales, v.scales, kind, kind, start=i * page)
            for i, (k, v) in enumerate(zip(self.wanted[::2], self.wanted[1::2], strict=True))
        ]
        used = self.native.start + (self.native.used or 0)
        right = reference.attention(queries.cpu().transpose(0, 1), [*tiles, self.native], start=used - len(queries))
        error = float((out.cpu().transpose(0, 1) - right.output).norm() / right.output.norm())
        shift = float((lse.cpu().T - right.lse).abs().max())
        return "" if error < CLOSE and shift < CLOSE else f"relative error {error:.1e}, log-sum-exp off by {shift:.1e}"
