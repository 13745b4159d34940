"""Which block goes first, how much a caller may hold, what is worth writing to the SSD, and what has expired.

Blocks are told apart by how often they were used; what a use count is worth at an age is learned from what came back,
and before that the order is least recently used. Use counts never grow along a prefix and worth never grows with age,
so of one prefix the last block goes first. Leased blocks, also pins, never go. Time is counted in ticks, blocks put or
used since the start: no clock, no I/O. Not thread-safe: the owner holds its lock around every call, but for `Aging`,
which takes that lock itself.
"""

from __future__ import annotations

import heapq
import mmap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.store.ledger import USES, Ledger
from kvtier.store.store_counters import Counters

SESSION_SHARE = 0.25  # of the arena, that one session may hold leased and reserved
PIN_SHARE = 0.10  # of the arena, that operators may pin
TENANT_SHARE = 0.50  # of the arena, that all sessions of one tenant may hold

# Each constant was varied over nine traces and six sizes (docs/eviction.md); none moves the mean hit ratio by more than
# 0.005 when doubled or halved. 8 uses are told apart: 1 ... 7, and 8 or more. 6 and 12 do as well, 4 loses 0.004; a
# ghost has three bits for it.
BUCKETS = 82  # of age: two an octave, up to 2**40 ticks
# Blocks' worth of belief in "as likely to come back within as long again as it has waited": least recently used.
PRIOR = 8.0
# Of the counts, at each lesson: with a lesson every half a capacity they are forgotten as fast as ghosts are.
KEEP = 0.95
MIN_STEP = 1024  # ticks between lessons at least: a lesson costs about 1 ms
# Evicted blocks remembered per block held, 8 bytes each; 4 to a set, the oldest of which is overwritten.
GHOSTS, WAYS = 8, 4
SAMPLE = 65_536  # ghosts looked at in a lesson at most
HALF = 0.5  # of the write budget's burst, kept for blocks that were used again
WAITING = 1024  # ghosts at most that go into the table together: one at a time they cost 1.2 us each, so 0.2
STEP = 2048  # blocks of one step of `Aging`
_TOP = USES - 1

# A ghost: tick | use count (3 bits) | tag (20 bits). It is taken for another block's once in 250,000 questions.
_COUNT, _TICK, _TAG = np.uint64(20), np.uint64(23), np.uint64(0xFFFFF)
Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]
_NONE: Words = np.zeros(0, np.uint64)


def source(own: int, oldest: Mapping[int, Any]) -> int | None:
    """From which size class to take slots for class `own`; `oldest`: {class: worth, or age, of its next victim}. The
    class with the least gives; `own` gives when it has as little as any, because that evicts one block and not a slab.
    None: none can."""
    if not oldest:
        return None
    least = min(oldest.values())
    return own if oldest.get(own) == least else min(size for size, age in oldest.items() if age == least)


def slab_to_empty(ages: Mapping[int, float]) -> int | None:
    """Which slab to empty for another class: the oldest on average. None: all hold something in use."""
    return min(ages, key=lambda slab: (ages[slab], slab), default=None)


def admit(count: int, left: float) -> bool:
    """Whether to write a block of this use count to the SSD; `left`: the free share of the write budget's burst (1: no
    limit).

    What was used again is always worth its bytes; what was used once (use count 0) only while half the burst is left.
    Of equal bytes written this keeps more hits than writing in order of arrival (docs/eviction.md). A refused block is
    offered again at its second use.
    """
    return count > 0 or left > HALF


def tick_before(marks: Sequence[tuple[float, int]], moment: float) -> int:
    """The newest tick not after `moment`, of marks (seconds, tick) in their order; 0 if there is none. A namespace's
    time-to-live: its unleased blocks of a tick up to `tick_before(marks, now - ttl)` have expired."""
    return max((tick for seconds, tick in marks if seconds <= moment), default=0)


def bucket(age: int) -> int:
    """The bucket of an age in ticks."""
    n = age.bit_length()
    return min(BUCKETS - 1, 2 * (n - 2) + (age >> (n - 2))) if n > 1 else age


_START: Floats = np.array([float(b) if b < 2 else float((2 + (b & 1)) << ((b >> 1) - 1)) for b in range(BUCKETS + 1)])
_WIDTH: Floats = np.diff(_START)


def count_of(ghosts: Words) -> npt.NDArray[np.int64]:
    """Use counts of ghosts."""
    return (ghosts >> _COUNT & np.uint64(7)).astype(np.int64)


def tick_of(ghosts: Words) -> npt.NDArray[np.int64]:
    """Ticks of the last use of ghosts."""
    return (ghosts >> _TICK).astype(np.int64)


def census(counts: npt.NDArray[Any], ages: npt.NDArray[Any]) -> Floats:
    """[USES, BUCKETS]: how many of these blocks are of each use count and age."""
    at = np.clip(np.searchsorted(_START, ages, "right") - 1, 0, BUCKETS - 1)
    blocks = np.bincount(counts.astype(np.int64) * BUCKETS + at, minlength=USES * BUCKETS)
    return blocks.reshape(USES, BUCKETS).astype(np.float64)


class Reuse:
    """What a block of a use count and age is worth: the most hits per tick that keeping it promises, over all horizons.
    `hit` when blocks are used again, `gone` when a ghost is overwritten, `learn` now and then.
    `worth[count][bucket(age)]` is the result."""

    def __init__(self) -> None:
        self.hits = [0.0] * (USES * BUCKETS)
        self.lost: Floats = np.zeros((USES, BUCKETS))
        self.worth: list[list[float]] = []
        self._price(np.zeros((USES, BUCKETS)), np.zeros((USES, BUCKETS)))

    def hit(self, count: int, age: int, n: int = 1) -> None:
        """`n` blocks of this use count were used again after `age` ticks."""
        self.hits[count * BUCKETS + bucket(age)] += n

    def gone(self, counts: npt.NDArray[Any], ages: npt.NDArray[Any]) -> None:
        """Blocks of these use counts were not used again for so many ticks; they are not watched any more."""
        self.lost += census(counts, ages)

    def learn(self, living: Floats) -> None:
        """New prices. `living` is the census of what is held or remembered: it has waited so far. Costs about 1 ms."""
        hits: Floats = np.array(self.hits).reshape(USES, BUCKETS)
        self._price(hits, hits + self.lost + living)
        self.hits[:] = (hits * KEEP).ravel().tolist()
        self.lost *= KEEP

    def _price(self, hits: Floats, ends: Floats) -> None:
        """Kaplan-Meier: of the blocks that reached a bucket, how many came back in it; then the best ratio of hits to
        time over all horizons. Too few observations lean on all use counts together, and these on the prior. Made
        monotone in age and use count, so that of one prefix the last block goes first."""
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
    """Use count and last tick of evicted blocks, by the first 64 bits of their key. GHOSTS * 8 bytes for each of
    `blocks`. Paged in as used. A ghost is an integer with `count_of` and `tick_of`. Those of the last evictions wait in
    a dict until they go into the table together."""

    def __init__(self, blocks: int, waiting: int = WAITING) -> None:
        self._sets = max(1, blocks * GHOSTS // WAYS)
        memory = mmap.mmap(-1, self._sets * WAYS * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            # numpy asks for huge pages: at a million blocks the first ghosts would then zero 64 MiB in one call
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._table = np.frombuffer(memory, np.uint64).reshape(self._sets, WAYS)
        self._waiting: dict[bytes, int] = {}  # tick and count in one number: pairs would wake the garbage collector
        self._most = min(waiting, max(32, blocks // 32))

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def remember(self, keys: Iterable[bytes], counts: Iterable[int], ticks: Iterable[int]) -> Words:
        """These blocks were evicted, last used at these ticks (1 or later). Returns the overwritten ghosts."""
        told = [tick << 3 | count for count, tick in zip(counts, ticks, strict=True)]
        self._waiting.update(zip(keys, told, strict=True))
        if len(self._waiting) < self._most:
            return _NONE
        words, new = _words(self._waiting), np.fromiter(self._waiting.values(), np.uint64, len(self._waiting))
        at, first = np.unique(self._set_of(words), return_index=True)
        # Of several that fall into one set, one goes into the table now.
        later = set(range(len(words))).difference(first.tolist()) if len(first) < len(words) else ()
        self._waiting = {k: ghost for i, (k, ghost) in enumerate(self._waiting.items()) if i in later} if later else {}
        sets = self._table[at]
        way = sets.argmin(1)
        self._table[at, way] = new[first] << _COUNT | words[first] & _TAG
        old: Words = sets[np.arange(len(way)), way]
        return old[old > 0]

    def recall(self, keys: Sequence[bytes]) -> dict[int, tuple[int, int]]:
        """{index: (use count, tick)} of those that come back; they are ghosts no more."""
        found: dict[int, tuple[int, int]] = {}
        words = _words(keys)
        at = self._set_of(words)
        sets = self._table[at]
        alike = (sets ^ words[:, None]) & _TAG == 0
        if alike.any():
            which, way = (alike & (sets > 0)).nonzero()
            self._table[at[which], way] = 0
            ghosts = sets[which, way]
            uses = zip(count_of(ghosts).tolist(), tick_of(ghosts).tolist(), strict=True)
            found = dict(zip(which.tolist(), uses, strict=True))
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
        return census(count_of(ghosts), tick - tick_of(ghosts)) * stride

    def _set_of(self, words: Words) -> Words:
        return (words >> _COUNT) % np.uint64(self._sets)


def _words(keys: Collection[bytes]) -> Words:
    """The first 8 bytes of each key as a number. All are of one length, a multiple of 8."""
    return np.frombuffer(b"".join(keys), np.uint64).reshape(len(keys), -1)[:, 0]


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
        return self._ghosts.nbytes if self._ghosts is not None else 0

    def used(self, rows: Sequence[int]) -> list[int]:
        """These blocks, in the order of their prefix and each once, are about to be leased. Returns those used for the
        second time."""
        runs, again = self._ledger.use(rows)
        for count, age, n in runs:
            self._reuse.hit(count, age, n)
        return again

    def recall(self, keys: Sequence[bytes], present: Sequence[int | None], use: int = 1) -> bytes:
        """A use count for each None in `present`, which has the row of every key, the prefix's first block first; None:
        about to be put. Takes their ghosts away. `use` is 0 for blocks from a lower tier: the lease that follows is
        their use."""
        if self._ghosts is None:
            return bytes(present.count(None))
        absent = [key for key, row in zip(keys, present, strict=True) if row is None]
        ghosts = self._ghosts.recall(absent)
        if not ghosts:
            return bytes(len(absent))
        low, found = _TOP, bytearray()
        counts = iter(self._ledger.uses(row for row in present if row is not None))
        for row in present:
            if row is not None:
                low = min(low, next(counts))
                continue
            ghost = ghosts.get(len(found))
            if ghost is None:
                low = 0
            else:
                count, tick = ghost
                self._reuse.hit(count, self._ledger.tick - tick)
                low = min(low, count + use)
            found.append(low)
        return bytes(found)

    def least(self, size: int) -> tuple[float, int] | None:
        """Worth and age of the next victim of a size class, which order size classes too; None if none can go."""
        return min((head[:2] for head in self._heads(size)), default=None)

    def victims(self, size: int, n: int) -> list[int]:
        """Up to `n` unleased rows of a size class, the next one first. Does not modify."""
        heads, rows = self._heads(size), list[int]()
        heapq.heapify(heads)
        while heads and len(rows) < n:
            *_, count, row = heads[0]
            run, behind = self._ledger.from_oldest(row, n - len(rows))
            rows += run
            if behind is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, self._head(count, *behind))
        return rows

    def evicted(self, rows: Sequence[int]) -> None:
        """These are about to be forgotten to free their slots: remembers them as ghosts."""
        if self._ghosts is None:
            return
        gone = self._ghosts.remember(*self._ledger.history(rows))
        if len(gone):
            self._reuse.gone(count_of(gone), self._ledger.tick - tick_of(gone))

    def learn(self) -> None:
        """Before an eviction. Gives a lesson (2 ms) when half as many blocks as there are were used since the last."""
        ledger = self._ledger
        if not self._learns:
            return
        if self._ghosts is None or 2 * self._blocks < ledger.known:
            self._blocks = ledger.known
            self._ghosts = Ghosts(self._blocks)
        if ledger.tick < self._lesson:
            return
        self._lesson = ledger.tick + max(MIN_STEP, ledger.known // 2)
        counts, ages, stride = ledger.sample(SAMPLE)
        self._reuse.learn(census(counts, ages) * stride + self._ghosts.living(ledger.tick))

    def _heads(self, size: int) -> list[tuple[float, int, int, int]]:
        return [self._head(*head) for head in self._ledger.oldest(size)]

    def _head(self, count: int, tick: int, row: int) -> tuple[float, int, int, int]:
        """(worth, tick of the last use, use count, row)"""
        return self._reuse.worth[count][bucket(self._ledger.tick - tick)], tick, count, row


class Aging:
    """Blocks of one ledger that were not used for too long: what `Expiry` asks of a tier. `forget` takes sealed,
    unleased rows out of the ledger; it is called under `lock`."""

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
        """Keys of up to `STEP` unleased blocks of a namespace, last used at this tick or before. Does not modify."""
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
