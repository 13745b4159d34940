"""Native against quantized, position by position: the same tokens through one model with several caches,
teacher-forced, in lockstep.

Free-running text differs after a few tokens under any change, so it separates nothing; what is compared is the
prediction at each position. Intervals are over sequences, never over tokens: positions of one sequence are not
independent. With one sequence there is no interval, and none is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.quality.loaded_model import CHUNK, LoadedModel
from kvtier.quality.schemes import Quantizer, Scheme, Tally

EDGES = (0, 512, 2048, 4096, 8192, 16384, 32768, 65536, 131072)  # positions that begin a bucket

Step = Callable[[int, int], None]
Trace = NDArray[np.float32]

# 97.5 % points of Student's t for 1, 2, ... degrees of freedom: a sequence or two give wide intervals, as they should.
_POINTS = """12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 2.201 2.179 2.160 2.145
2.131 2.120 2.110 2.101 2.093 2.086"""
_T = tuple(map(float, _POINTS.split()))


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over sequences and half of its 95 % interval; None where there is one sequence only."""

    mean: float
    half: float | None
    sequences: int

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + (f" ±{self.half:.4f}" if self.half is not None else "")


@dataclass(slots=True)
class Result:
    """One scheme over the sequences of one text and length: per sequence and position, KL(native || scheme), negative
    log-likelihood, top-1 equal."""

    scheme: Scheme
    kl: list[Trace] = field(default_factory=list)
    nll: list[Trace] = field(default_factory=list)
    native_nll: list[Trace] = field(default_factory=list)
    top1: list[Trace] = field(default_factory=list)
    tallies: dict[tuple[int, str], Tally] = field(default_factory=dict)

    def over(self, values: list[Trace], low: int = 0, high: int | None = None) -> Interval | None:
        """The mean over positions [low, high) of each sequence, then over sequences; None if no sequence gets there."""
        return interval([float(trace[low:high].mean()) for trace in values if len(trace) > low])

    def buckets(self) -> list[tuple[int, int]]:
        """Ranges of positions that at least one sequence reaches."""
        longest = max(len(trace) for trace in self.kl)
        ends = (*EDGES[1:], 2**40)
        return [(low, min(high, longest)) for low, high in zip(EDGES, ends, strict=True) if low < longest]

    @property
    def perplexity(self) -> float:
        return math.exp(min(700.0, float(np.mean([trace.mean() for trace in self.nll]))))

    @property
    def native_perplexity(self) -> float:
        return math.exp(min(700.0, float(np.mean([trace.mean() for trace in self.native_nll]))))

    @property
    def clipped(self) -> float:
        """Share of quantized elements that did not fit their scale."""
        return sum(t.clipped for t in self.tallies.values()) / max(1, sum(t.elements for t in self.tallies.values()))


def interval(values: Sequence[float]) -> Interval | None:
    """Mean and 95 % interval of independent values."""
    if not values:
        return None
    n, mean = len(values), float(np.mean(values))
    if n == 1:
        return Interval(mean, None, 1)
    t = _T[n - 2] if n - 2 < len(_T) else 2.0
    return Interval(mean, t * float(np.std(values, ddof=1)) / math.sqrt(n), n)


def compare(
    loaded: LoadedModel, sequences: Sequence[Sequence[int]], schemes: Sequence[Scheme], step: Step | None = None
) -> list[Result]:
    """Runs every sequence natively and under each scheme, chunk by chunk. Position i predicts token i + 1."""
    results = [Result(scheme) for scheme in schemes]
    total, done = sum(len(sequence) - 1 for sequence in sequences), 0
    for sequence in sequences:
        tokens = torch.tensor(sequence)
        quantizers = [Quantizer(scheme) for scheme in schemes]
        native, caches = loaded.empty_cache(), [quantizer.new_cache(loaded) for quantizer in quantizers]
        rows: list[list[list[torch.Tensor]]] = [[[], [], [], []] for _ in schemes]
        for at in range(0, len(tokens) - 1, CHUNK):
            piece = tokens[at : min(at + CHUNK, len(tokens) - 1)]
            base = loaded.logits(piece, native).float().log_softmax(-1)
            targets = tokens[at + 1 : at + 1 + len(piece)].to(base.device)
            native_nll = -base.gather(1, targets[:, None])[:, 0]
            for cache, row in zip(caches, rows, strict=True):
                other = loaded.logits(piece, cache).float().log_softmax(-1)
                row[0].append((base.exp() * (base - other)).sum(-1))
                row[1].append(-other.gather(1, targets[:, None])[:, 0])
                row[2].append(native_nll)
                row[3].append((base.argmax(-1) == other.argmax(-1)).float())
            done += len(piece)
            if step is not None:
                step(done, total)
        for result, row, quantizer in zip(results, rows, quantizers, strict=True):
            for values, parts in zip((result.kl, result.nll, result.native_nll, result.top1), row, strict=True):
                values.append(torch.cat(parts).cpu().numpy())
            _merge(result.tallies, quantizer.tallies)
    return results


def _merge(into: dict[tuple[int, str], Tally], more: dict[tuple[int, str], Tally]) -> None:
    for key, tally in more.items():
        if tally.amax is not None:
            into.setdefault(key, Tally()).add(tally.elements, tally.clipped, tally.nonfinite, tally.amax)
