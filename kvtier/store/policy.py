"""Who goes first, who may hold how much, what is worth writing down: pure functions and small state objects, no clock, no I/O.

`order` asks for the arena, the ledger executes, `replay` judges. Blocks are told apart by how often they were used (their *rank*), and what a rank is
worth at an age is learned from what came back; before that it is least recently used. Ranks never grow from a head to its tail and worth never grows
with age, so tails go before heads. Pins are leases: never victims.
Time is counted in ticks: blocks put or used since the start. Not thread-safe: the owner holds its lock.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.store import ledger

SESSION_SHARE = 0.25  # of the arena, that one session may hold leased and reserved
PIN_SHARE = 0.10  # of the arena, that operators may pin
TENANT_SHARE = 0.50  # of the arena, that all sessions of one tenant may hold

# Each constant was varied over nine traces and six sizes (docs/eviction.md); none moves the mean hit ratio by more than 0.005 when doubled or halved.
RANKS = (
    ledger.RANKS
)  # 8 uses are told apart: 1 ... 7, and 8 or more. 6 and 12 do as well, 4 loses 0.004; a ghost has three bits for it
BUCKETS = 82  # of age: two an octave, up to 2**40 ticks
PRIOR = 8.0  # blocks' worth of belief in "as likely to come back within as long again as it has waited", which is least recently used
KEEP = (
    0.95  # of the counts, at each lesson: with a lesson every half a capacity they are forgotten as fast as ghosts are
)
MIN_STEP = 1024  # ticks between lessons at least: a lesson costs about 1 ms
GHOSTS, WAYS = (
    8,
    4,
)  # evicted blocks remembered per block held, 8 bytes each; 4 to a set, the oldest of which is overwritten
SAMPLE = 65_536  # ghosts looked at in a lesson at most
HALF = 0.5  # of the write budget's burst, kept for blocks that were used again

WAITING = 1024  # ghosts at most that go into the table together: one at a time they cost 1.2 us each, so 0.2

_RANK, _TICK, _TAG = (
    np.uint64(20),
    np.uint64(23),
    np.uint64(0xFFFFF),
)  # a ghost: tick | rank (3 bits) | tag (20 bits); false once in 250,000 questions
Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]
_NONE: Words = np.zeros(0, np.uint64)


def source(own: int, oldest: Mapping[int, Any]) -> int | None:
    """From which size class to take room for class `own`: `oldest` maps a class to what its next victim is worth, or to that one's age.

    The class with the least gives; `own` gives when it has as little as any, because that evicts one block and not a slab. None: nobody can.
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
    keeps more hits than writing in order of arrival (docs/eviction.md). A block that was refused is offered again at its second use.
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


def rank_of(ghosts: Words) -> npt.NDArray[np.int64]:
    """Ranks of ghosts."""
    return (ghosts >> _RANK & np.uint64(7)).astype(np.int64)


def tick_of(ghosts: Words) -> npt.NDArray[np.int64]:
    """Ticks of the last use of ghosts."""
    return (ghosts >> _TICK).astype(np.int64)


def census(ranks: npt.NDArray[Any], ages: npt.NDArray[Any]) -> Floats:
    """[RANKS, BUCKETS]: how many of these blocks are of each rank and age."""
    at = np.clip(np.searchsorted(_START, ages, "right") - 1, 0, BUCKETS - 1)
    return (
        np.bincount(ranks.astype(np.int64) * BUCKETS + at, minlength=RANKS * BUCKETS)
        .reshape(RANKS, BUCKETS)
        .astype(np.float64)
    )


class Reuse:
    """What a block of a rank and age is worth: the most hits per tick of room that keeping it on promises, over all horizons.

    `hit` when a block is used again, `gone` when a ghost is overwritten, `learn` now and then. `worth[rank][bucket(age)]` is the price list.
    """

    def __init__(self) -> None:
        self.hits = [0.0] * (RANKS * BUCKETS)
        self.lost: Floats = np.zeros((RANKS, BUCKETS))
        self.worth: list[list[float]] = []
        self._price(np.zeros((RANKS, BUCKETS)), np.zeros((RANKS, BUCKETS)))

    def hit(self, rank: int, age: int) -> None:
        """A block of this rank was used again after `age` ticks."""
        self.hits[rank * BUCKETS + bucket(age)] += 1.0

    def gone(self, ranks: npt.NDArray[Any], ages: npt.NDArray[Any]) -> None:
        """Blocks of these ranks were not used again for so many ticks; nothing more will be known of them."""
        self.lost += census(ranks, ages)

    def learn(self, living: Floats) -> None:
        """New prices. `living` is the census of what is held or remembered: it has waited so far. Costs about 1 ms."""
        hits: Floats = np.array(self.hits).reshape(RANKS, BUCKETS)
        self._price(hits, hits + self.lost + living)
        self.hits[:] = (hits * KEEP).ravel().tolist()
        self.lost *= KEEP

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
    """Rank and last tick of evicted blocks, by the first 64 bits of their key: GHOSTS * 8 bytes for each of `blocks`, touched as they are used.

    A ghost is an integer that says its `rank_of` and `tick_of`. Those of the last evictions wait in a dict until they go into the table together.
    """

    def __init__(self, blocks: int, waiting: int = WAITING) -> None:
        self._sets = max(1, blocks * GHOSTS // WAYS)
        memory = mmap.mmap(-1, self._sets * WAYS * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(
                mmap.MADV_NOHUGEPAGE
            )  # numpy asks for them: at a million blocks the first ghosts would then zero 64 MiB in one call
        self._table = np.frombuffer(memory, np.uint64).reshape(self._sets, WAYS)
        self._waiting: dict[bytes, int] = {}  # tick and rank in one number: pairs would wake the garbage collector
        self._most = min(waiting, max(32, blocks // 32))

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def remember(self, keys: Iterable[bytes], ranks: Iterable[int], ticks: Iterable[int]) -> Words:
        """These blocks were evicted, last used at these ticks (1 or later). Returns the ghosts that were overwritten."""
        self._waiting.update(
            zip(keys, [tick << 3 | rank for rank, tick in zip(ranks, ticks, strict=True)], strict=True)
        )
        if len(self._waiting) < self._most:
            return _NONE
        words, told = _words(self._waiting), np.fromiter(self._waiting.values(), np.uint64, len(self._waiting))
        at, first = np.unique(self._set_of(words), return_index=True)
        later = set(range(len(words))).difference(first.tolist()) if len(first) < len(words) else ()
        self._waiting = (
            {key: ghost for i, (key, ghost) in enumerate(self._waiting.items()) if i in later} if later else {}
        )  # two of one set
        sets = self._table[at]
        way = sets.argmin(1)
        self._table[at, way] = told[first] << _RANK | words[first] & _TAG
        old: Words = sets[np.arange(len(way)), way]
        return old[old > 0]

    def recall(self, keys: Sequence[bytes]) -> dict[int, tuple[int, int]]:
        """{index: (rank, tick)} of those that come back; they are ghosts no more."""
        found: dict[int, tuple[int, int]] = {}
        words = _words(keys)
        at = self._set_of(words)
        sets = self._table[at]
        alike = (sets ^ words[:, None]) & _TAG == 0
        if alike.any():
            which, way = (alike & (sets > 0)).nonzero()
            self._table[at[which], way] = 0
            ghosts = sets[which, way]
            found = dict(
                zip(which.tolist(), zip(rank_of(ghosts).tolist(), tick_of(ghosts).tolist(), strict=True), strict=True)
            )
        if not self._waiting.keys().isdisjoint(keys):
            back = {i: self._waiting.pop(key) for i, key in enumerate(keys) if key in self._waiting}
            found |= {i: (ghost & 7, ghost >> 3) for i, ghost in back.items()}
        return found

    def living(self, tick: int) -> Floats:
        """Census of what is remembered, from a sample of it."""
        ghosts = self._table.ravel()
        stride = -(-len(ghosts) // SAMPLE)
        ghosts = ghosts[::stride]
        ghosts = ghosts[ghosts > 0]
        return census(rank_of(ghosts), tick - tick_of(ghosts)) * stride

    def _set_of(self, words: Words) -> Words:
        return (words >> _RANK) % np.uint64(self._sets)


def _words(keys: Collection[bytes]) -> Words:
    """The first 8 bytes of each key as a number. All are of one length, a multiple of 8."""
    return np.frombuffer(b"".join(keys), np.uint64).reshape(len(keys), -1)[:, 0]
