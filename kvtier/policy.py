"""Who goes first, who may hold how much, what is worth writing down: pure functions and small state objects, no clock, no I/O.

The room asks, the ledger executes. Its order today is least recently used, tails before heads, over all slot sizes by age. `Reuse` and `Ghosts` are
the order that `replay` judges: blocks are told apart by how often they were used (their *rank*), and what a rank is worth at an age is learned from
what came back. Ranks never grow from a head to its tail and worth never grows with age, so tails go before heads. Pins are leases: never victims.
Time is counted in ticks: blocks put or used since the start. Not thread-safe: the owner holds its lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

SESSION_SHARE = 0.25  # of the arena, that one session may hold leased and reserved
PIN_SHARE = 0.10  # of the arena, that operators may pin
TENANT_SHARE = 0.50  # of the arena, that all sessions of one tenant may hold

# Each constant was varied over nine traces and six sizes (docs/policy.md); none moves the mean hit ratio by more than 0.005 when doubled or halved.
RANKS = 8  # uses that are told apart: 1 ... 7, and 8 or more. 6 and 12 do as well, 4 loses 0.004
BUCKETS = 82  # of age: two an octave, up to 2**40 ticks
PRIOR = 8.0  # blocks' worth of belief in "as likely to come back within as long again as it has waited", which is least recently used
KEEP = 0.95  # of the counts, at each lesson: with a lesson every half a capacity they are forgotten as fast as ghosts are
MIN_STEP = 1024  # ticks between lessons at least: a lesson costs about 1 ms
GHOSTS, WAYS = 8, 4  # evicted blocks remembered per block held, 8 bytes each; 4 to a set, the oldest of which is overwritten
SAMPLE = 65_536  # ghosts looked at in a lesson at most
HALF = 0.5  # of the write budget's burst, kept for blocks that were used again

_RANK, _TICK, _TAG = 20, 23, 0xFFFFF  # a ghost: tick | rank (3 bits) | tag (20 bits); a false match once in 250,000 questions
Floats = npt.NDArray[np.float64]


def source(own: int, oldest: Mapping[int, int]) -> int | None:
    """From which size class to take room for class `own`: `oldest` maps a class to the age of its oldest unleased block.

    The class with the oldest block gives; `own` gives when it is as old as any, because that evicts one block and not a slab. None: nobody can.
    """
    if not oldest:
        return None
    least = min(oldest.values())
    return own if oldest.get(own) == least else min(size for size, age in oldest.items() if age == least)


def slab_to_empty(ages: Mapping[int, float]) -> int | None:
    """Which slab of a class to empty for another class: the one whose blocks are oldest on average. None: all hold something in use."""
    return min(ages, key=lambda slab: (ages[slab], slab), default=None)


def admit(rank: int, left: float) -> bool:
    """Whether to write a block of this rank to the SSD; `left` is the share of the write budget's burst that is left (1: no limit).

    What was used again is always worth its bytes; what was used once (rank 0) only while half the burst is left. Of equal bytes written this
    keeps more hits than writing in order of arrival (docs/policy.md). A block that was refused is offered again at its second use.
    """
    return rank > 0 or left > HALF


def tick_before(marks: Sequence[tuple[float, int]], moment: float) -> int:
    """The newest tick not after `moment`, of marks (seconds, tick) in their order; 0 if there is none.

    A namespace's time-to-live: its unleased blocks whose age column is at most `tick_before(marks, now - ttl)` have expired.
    """
    return max((tick for seconds, tick in marks if seconds <= moment), default=0)


def bucket(age: int) -> int:
    """The bucket of an age in ticks."""
    n = age.bit_length()
    return min(BUCKETS - 1, 2 * (n - 2) + (age >> (n - 2))) if n > 1 else age


_START: Floats = np.array([float(b) if b < 2 else float((2 + (b & 1)) << ((b >> 1) - 1)) for b in range(BUCKETS + 1)])
_WIDTH: Floats = np.diff(_START)


def census(ranks: npt.NDArray[Any], ages: npt.NDArray[Any]) -> Floats:
    """[RANKS, BUCKETS]: how many of these blocks are of each rank and age."""
    at = np.clip(np.searchsorted(_START, ages, "right") - 1, 0, BUCKETS - 1)
    return np.bincount(ranks.astype(np.int64) * BUCKETS + at, minlength=RANKS * BUCKETS).reshape(RANKS, BUCKETS).astype(np.float64)


class Reuse:
    """What a block of a rank and age is worth: the most hits per tick of room that keeping it on promises, over all horizons.

    `hit` when a block is used again, `gone` when a ghost is overwritten, `learn` now and then. `worth[rank][bucket(age)]` is the price list.
    """

    def __init__(self) -> None:
        self.hits = [0.0] * (RANKS * BUCKETS)
        self.lost = [0.0] * (RANKS * BUCKETS)
        self.worth: list[list[float]] = []
        self._price(np.zeros((RANKS, BUCKETS)), np.zeros((RANKS, BUCKETS)))

    def hit(self, rank: int, age: int) -> None:
        """A block of this rank was used again after `age` ticks."""
        self.hits[rank * BUCKETS + bucket(age)] += 1.0

    def gone(self, rank: int, age: int) -> None:
        """A block of this rank was not used again for `age` ticks; nothing more will be known of it."""
        self.lost[rank * BUCKETS + bucket(age)] += 1.0

    def learn(self, living: Floats) -> None:
        """New prices. `living` is the census of what is held or remembered: it has waited so far. Costs about 1 ms."""
        hits, lost = (np.array(counts).reshape(RANKS, BUCKETS) for counts in (self.hits, self.lost))
        self._price(hits, hits + lost + living)
        self.hits, self.lost = (hits * KEEP).ravel().tolist(), (lost * KEEP).ravel().tolist()

    def _price(self, hits: Floats, ends: Floats) -> None:
        """Kaplan-Meier: of the blocks that reached a bucket, how many came back in it; then the best ratio of hits to time over all horizons.

        Too few observations lean on all ranks together, and these on the prior. Made monotone in age and rank, which keeps tails before heads.
        """
        reached = ends[:, ::-1].cumsum(1)[:, ::-1]
        time = (reached - ends / 2) * _WIDTH
        prior = 1.0 / np.maximum(1.0, _START[:-1] + _WIDTH / 2)
        pooled = (hits.sum(0) + PRIOR * prior * _WIDTH) / (time.sum(0) + PRIOR * _WIDTH)
        rate = (hits + PRIOR * pooled * _WIDTH) / (time + PRIOR * _WIDTH)
        alive, spent = np.ones((RANKS, BUCKETS + 1)), np.zeros((RANKS, BUCKETS + 1))
        alive[:, 1:] = np.exp(-np.minimum((rate * _WIDTH).cumsum(1), 500.0))
        spent[:, 1:] = ((alive[:, :-1] + alive[:, 1:]) / 2 * _WIDTH).cumsum(1)
        seen = int(np.flatnonzero(ends.any(0)).max(initial=8)) + 1  # no horizon beyond what was observed
        gain = alive[:, :seen, None] - alive[:, None, 1 : seen + 1]
        cost = spent[:, None, 1 : seen + 1] - spent[:, :seen, None]
        ahead = np.triu(np.ones((seen, seen), bool)) & (cost > 1e-30)
        worth = rate.copy()
        worth[:, :seen] = (np.where(ahead, gain, 0.0) / np.where(ahead, cost, 1.0)).max(2)
        worth = np.maximum.accumulate(np.minimum.accumulate(worth, 1), 0)
        self.worth = worth.tolist()


class Ghosts:
    """Rank and last tick of evicted blocks, by 64 bits of their key: GHOSTS * 8 bytes for each of `blocks`, touched as they are used."""

    def __init__(self, blocks: int) -> None:
        self._sets = max(1, blocks * GHOSTS // WAYS)
        self._array = np.zeros(self._sets * WAYS, np.uint64)
        self._table = self._array.data.cast("B").cast("Q")

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    def remember(self, key: int, rank: int, tick: int) -> tuple[int, int] | None:
        """A block was evicted, last used at `tick` (1 or later). Returns (rank, tick) of the ghost that is overwritten for it."""
        at = (key * self._sets >> 64) * WAYS
        ghosts = self._table[at : at + WAYS].tolist()
        old = min(ghosts)
        self._table[at + ghosts.index(old)] = tick << _TICK | rank << _RANK | key & _TAG
        return (old >> _RANK & 7, old >> _TICK) if old else None

    def recall(self, key: int) -> tuple[int, int] | None:
        """(rank, tick) of a block that comes back; it is a ghost no more. None: not remembered."""
        at = (key * self._sets >> 64) * WAYS
        for i, ghost in enumerate(self._table[at : at + WAYS].tolist(), at):
            if ghost and not (ghost ^ key) & _TAG:
                self._table[i] = 0
                return ghost >> _RANK & 7, ghost >> _TICK
        return None

    def living(self, tick: int) -> Floats:
        """Census of what is remembered, from a sample of it."""
        stride = -(-len(self._array) // SAMPLE)
        ghosts = self._array[::stride]
        ghosts = ghosts[ghosts > 0]
        ranks = ghosts >> np.uint64(_RANK) & np.uint64(7)
        return census(ranks, tick - (ghosts >> np.uint64(_TICK)).astype(np.int64)) * stride
