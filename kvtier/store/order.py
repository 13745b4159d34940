"""Which block of a ledger goes next: `policy` kept up over its columns. Of the oldest unleased block of each rank the one that is worth least goes.

The store says what is used, put and evicted; ranks are a column of the ledger, ghosts and what was learned are here. Before it has learned, or with
`learns` off (the SSD tier), the order is least recently used. No I/O. Not thread-safe: whoever owns the ledger holds its lock around every call.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from kvtier.store import policy
from kvtier.store.ledger import RANKS, SEALED, Ledger

_TOP = RANKS - 1


class Order:
    """The order of one ledger's blocks."""

    def __init__(self, ledger: Ledger, learns: bool = True) -> None:
        self._ledger = ledger
        self._learns = learns
        self._reuse = policy.Reuse()
        self._ghosts: policy.Ghosts | None = None
        self._blocks = 0  # that the ghosts are for
        self._lesson = policy.MIN_STEP

    @property
    def nbytes(self) -> int:
        """Of the ghosts."""
        return self._ghosts.nbytes if self._ghosts is not None else 0

    def used(self, rows: Sequence[int]) -> list[int]:
        """These blocks, head first and each once, are about to be leased. Those that somebody leases already are in use still: no use more.

        Returns those that were used for the second time.
        """
        ledger, hits = self._ledger, self._reuse.hits
        tick, leases, ages, ranks, kept = ledger.tick, ledger.leases, ledger.age, ledger.rank, ledger.kept
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
                at = rank * policy.BUCKETS + policy.bucket(tick - age)
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
        ranks, low, found = self._ledger.rank, _TOP, bytearray()
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
            map(ledger.key, rows), map(ledger.rank.__getitem__, rows), map(ledger.age.__getitem__, rows)
        )
        if len(gone):
            self._reuse.gone(policy.rank_of(gone), ledger.tick - policy.tick_of(gone))

    def learn(self) -> None:
        """Before an eviction: room for ghosts, and a lesson once half as many blocks as there are were used since the last. 2 ms then."""
        ledger = self._ledger
        if not self._learns:
            return
        if self._ghosts is None or 2 * self._blocks < ledger.known:
            self._blocks = ledger.known
            self._ghosts = policy.Ghosts(self._blocks)
        if ledger.tick < self._lesson:
            return
        self._lesson = ledger.tick + max(policy.MIN_STEP, ledger.known // 2)
        stride = -(-len(ledger.state) // policy.SAMPLE)
        mine = np.flatnonzero(np.frombuffer(ledger.state, np.uint8)[::stride] == SEALED)
        ranks, ages = (
            np.frombuffer(column, column.typecode)[::stride][mine].astype(np.int64)
            for column in (ledger.rank, ledger.age)
        )
        self._reuse.learn(policy.census(ranks, ledger.tick - ages) * stride + self._ghosts.living(ledger.tick))

    def _heads(self, size: int) -> list[tuple[float, int, int, int]]:
        return [self._head(rank, row) for rank, row in self._ledger.oldest(size)]

    def _head(self, rank: int, row: int) -> tuple[float, int, int, int]:
        """(worth, age, rank, row)"""
        age = self._ledger.age[row]
        return self._reuse.worth[rank][policy.bucket(self._ledger.tick - age)], age, rank, row
