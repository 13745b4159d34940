"""Who goes first, who may hold how much, what is worth writing down, and what has not been used for too long.

Blocks are told apart by how often they were used, and what a use count is worth at an age is learned from what came back; before that the order
is least recently used. Use counts never grow from a head to its tail and worth never grows with age, so tails go before heads. Pins are leases:
never victims. Time is counted in ticks, blocks put or used since the start: no clock, no I/O. `Eviction` reads and writes the columns of its
ledger, of which it is the other half; nothing else does. Not thread-safe: the owner holds its lock, but for `Aging`, which takes it.
"""

from __future__ import annotations

import heapq
import mmap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.store.ledger import SEALED, USES, Ledger
from kvtier.store.store_counters import Counters

SESSION_SHARE = 0.25  # of the arena, that one session may hold leased and reserved
PIN_SHARE = 0.10  # of the arena, that operators may pin
TENANT_SHARE = 0.50  # of the arena, that all sessions of one tenant may hold

# Each constant was varied over nine traces and six sizes (docs/eviction.md); none moves the mean hit ratio by more than 0.005 when doubled or halved.
# 8 uses are told apart: 1 ... 7, and 8 or more. 6 and 12 do as well, 4 loses 0.004; a ghost has three bits for it
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
    """[USES, BUCKETS]: how many of these blocks are of each rank and age."""
    at = np.clip(np.searchsorted(_START, ages, "right") - 1, 0, BUCKETS - 1)
    return (
        np.bincount(ranks.astype(np.int64) * BUCKETS + at, minlength=USES * BUCKETS)
        .reshape(USES, BUCKETS)
        .astype(np.float64)
    )


class Reuse:
    """What a block of a rank and age is worth: the most hits per tick of room that keeping it on promises, over all horizons.

    `hit` when a block is used again, `gone` when a ghost is overwritten, `learn` now and then. `worth[rank][bucket(age)]` is the price list.
    """

    def __init__(self) -> None:
        self.hits = [0.0] * (USES * BUCKETS)
        self.lost: Floats = np.zeros((USES, BUCKETS))
        self.worth: list[list[float]] = []
        self._price(np.zeros((USES, BUCKETS)), np.zeros((USES, BUCKETS)))

    def hit(self, rank: int, age: int) -> None:
        """A block of this rank was used again after `age` ticks."""
        self.hits[rank * BUCKETS + bucket(age)] += 1.0

    def gone(self, ranks: npt.NDArray[Any], ages: npt.NDArray[Any]) -> None:
        """Blocks of these ranks were not used again for so many ticks; nothing more will be known of them."""
        self.lost += census(ranks, ages)

    def learn(self, living: Floats) -> None:
        """New prices. `living` is the census of what is held or remembered: it has waited so far. Costs about 1 ms."""
        hits: Floats = np.array(self.hits).reshape(USES, BUCKETS)
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
        alive, spent = np.ones((USES, BUCKETS + 1)), np.zeros((USES, BUCKETS + 1))
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


_TOP = USES - 1


class Eviction:
    """The order of one ledger's blocks."""

    def __init__(self, ledger: Ledger, learns: bool = True) -> None:
        self._ledger = ledger
        self._learns = learns
        self._reuse = Reuse()
        self._ghosts: Ghosts | None = None
        self._blocks = 0  # that the ghosts are for
        self._lesson = MIN_STEP

    @property
    def nbytes(self) -> int:
        """Of the ghosts."""
        return self._ghosts.nbytes if self._ghosts is not None else 0

    def used(self, rows: Sequence[int]) -> list[int]:
        """These blocks, head first and each once, are about to be leased. Those that somebody leases already are in use still: no use more.

        Returns those that were used for the second time.
        """
        ledger, hits = self._ledger, self._reuse.hits
        tick, leases, ages, ranks, kept = ledger.tick, ledger._leases, ledger._age, ledger._rank, ledger._kept
        again: list[int] = []
        low, at, then, before = _TOP, 0, -1, -1
        for row in rows:
            rank = ranks[row]
            if leases[row] and row not in kept:
                low = min(low, rank)
                continue
            age = ages[row]
            if age != then or rank != before:  # what was used together has one age
                then, before = age, rank
                at = rank * BUCKETS + bucket(tick - age)
            hits[at] += 1.0
            if rank < low:
                if not rank:
                    again.append(row)
                ranks[row] = low = rank + 1
            elif rank > low:
                ranks[row] = low
        return again

    def recall(self, keys: Sequence[bytes], present: Sequence[int | None], use: int = 1) -> bytes:
        """Ranks for blocks that are put, head first: of every key the row, None where there is none. One rank for each None.

        A ghost is used up by it. `use` is 0 for blocks that come up from a lower tier: the lease that follows is their use.
        """
        if self._ghosts is None:
            return bytes(present.count(None))
        absent = [key for key, row in zip(keys, present, strict=True) if row is None]
        ghosts = self._ghosts.recall(absent)
        if not ghosts:
            return bytes(len(absent))
        ranks, low, found = self._ledger._rank, _TOP, bytearray()
        for row in present:
            if row is not None:
                low = min(low, ranks[row])
                continue
            ghost = ghosts.get(len(found))
            if ghost is None:
                low = 0
            else:
                rank, tick = ghost
                self._reuse.hit(rank, self._ledger.tick - tick)
                low = min(low, rank + use)
            found.append(low)
        return bytes(found)

    def least(self, size: int) -> tuple[float, int] | None:
        """Worth and age of the next victim of a size class, which order size classes too; None if nobody can go."""
        return min((head[:2] for head in self._heads(size)), default=None)

    def victims(self, size: int, n: int) -> list[int]:
        """Up to `n` unleased rows of a size class, the next one first. Does not modify."""
        heads, rows = self._heads(size), list[int]()
        heapq.heapify(heads)
        while heads and len(rows) < n:
            *_, rank, row = heads[0]
            run, following = self._ledger.from_oldest(row, n - len(rows))
            rows += run
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, self._head(rank, following))
        return rows

    def evicted(self, rows: Sequence[int]) -> None:
        """These are about to be forgotten for want of room: what is remembered of them."""
        if self._ghosts is None:
            return
        ledger = self._ledger
        gone = self._ghosts.remember(
            map(ledger.key, rows), map(ledger._rank.__getitem__, rows), map(ledger._age.__getitem__, rows)
        )
        if len(gone):
            self._reuse.gone(rank_of(gone), ledger.tick - tick_of(gone))

    def learn(self) -> None:
        """Before an eviction: room for ghosts, and a lesson once half as many blocks as there are were used since the last. 2 ms then."""
        ledger = self._ledger
        if not self._learns:
            return
        if self._ghosts is None or 2 * self._blocks < ledger.known:
            self._blocks = ledger.known
            self._ghosts = Ghosts(self._blocks)
        if ledger.tick < self._lesson:
            return
        self._lesson = ledger.tick + max(MIN_STEP, ledger.known // 2)
        stride = -(-len(ledger._state) // SAMPLE)
        mine = np.flatnonzero(np.frombuffer(ledger._state, np.uint8)[::stride] == SEALED)
        ranks, ages = (
            np.frombuffer(column, column.typecode)[::stride][mine].astype(np.int64)
            for column in (ledger._rank, ledger._age)
        )
        self._reuse.learn(census(ranks, ledger.tick - ages) * stride + self._ghosts.living(ledger.tick))

    def _heads(self, size: int) -> list[tuple[float, int, int, int]]:
        return [self._head(rank, row) for rank, row in self._ledger.oldest(size)]

    def _head(self, rank: int, row: int) -> tuple[float, int, int, int]:
        """(worth, age, rank, row)"""
        age = self._ledger._age[row]
        return self._reuse.worth[rank][bucket(self._ledger.tick - age)], age, rank, row


STEP = 2048  # blocks of one step


class Aging:
    """The ages of one ledger's blocks. `forget` takes sealed, unleased rows out of it; it is called under `lock`."""

    def __init__(
        self, ledger: Ledger, lock: AbstractContextManager[Any], counters: Counters, forget: Callable[[list[int]], None]
    ) -> None:
        self._ledger = ledger
        self._lock = lock
        self._counters = counters
        self._forget = forget

    def tick(self) -> int:
        """The ledger's tick now: what is put or used from here on is younger."""
        with self._lock:
            return self._ledger.tick

    def expired(self, handle: int, tick: int) -> list[bytes]:
        """Keys of up to `STEP` unleased blocks of a namespace whose last use was at this tick or before. Does not modify."""
        with self._lock:
            return self._ledger.expired(handle, tick, STEP)

    def forget(self, keys: Sequence[bytes], tick: int) -> int:
        """Forgets those of these blocks that are unleased and no younger still. Returns how many."""
        with self._lock:
            rows = self._ledger.idle_rows(keys, tick)
            self._forget(rows)
            self._counters.expired_blocks += len(rows)
            return len(rows)

    def renew(self, keys: Sequence[bytes]) -> None:
        """Those of these blocks that are unleased count as used now."""
        with self._lock:
            rows = self._ledger.idle_rows(keys)
            self._ledger.lease(rows)
            self._ledger.release(rows)
