"""What an order of eviction is worth, judged on a trace of requests: behind `kvtier replay TRACE --bytes N`.

One rule: hit ratio = blocks of the unbroken prefix that are present / all blocks referenced; a request's blocks are
then put or used, the tail first. Policies are LRU, S3-FIFO and ARC as in their papers, Belady, which knows the future,
and kvtier's (`eviction.Reuse`). Traces are Mooncake's JSON lines or the columns that `save` writes. Numbers only: no
bytes of blocks, no daemon. One process, one thread."""

from __future__ import annotations

import heapq
import json
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from kvtier.errors import Invalid
from kvtier.format.layout import Extents, attention
from kvtier.format.slots import default_slab
from kvtier.store import eviction
from kvtier.store.ledger import USES

BELADY = "belady"
SHARES = (1, 2, 5, 10, 20, 40)  # percent of the distinct blocks
MAX_TRACE_BYTES = 2**30
Requests = list[list[int]]
_U64 = 2**64 - 1


class Policy(Protocol):
    """A cache of `capacity` blocks."""

    def has(self, block: int) -> bool:
        """Whether the block is present. Does not modify."""

    def use(self, blocks: Sequence[int]) -> None:
        """A request used these blocks, head first: they are put or used, tail first."""


class Lru:
    """Least recently used."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def has(self, block: int) -> bool:
        return block in self._held

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block in self._held:
                self._held.move_to_end(block)
            else:
                if len(self._held) >= self._capacity:
                    self._held.popitem(last=False)
                self._held[block] = None


class S3Fifo:
    """S3-FIFO (SOSP'23): a small queue of a tenth, a main queue, and ghosts of as many blocks as the main queue."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small_size = max(1, capacity // 10)
        self._main_size = capacity - self._small_size
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def has(self, block: int) -> bool:
        return block in self._uses

    def use(self, blocks: Sequence[int]) -> None:
        uses = self._uses
        for block in reversed(blocks):
            if block in uses:
                uses[block] = min(3, uses[block] + 1)
                continue
            while len(uses) >= self._capacity:
                if len(self._small) >= self._small_size or not self._main:
                    self._evict_small()
                else:
                    self._evict_main()
            if block in self._ghosts:
                del self._ghosts[block]
                self._main.append(block)
            else:
                self._small.append(block)
            uses[block] = 0

    def _evict_small(self) -> None:
        while self._small:
            block = self._small.popleft()
            if not self._uses[block]:
                del self._uses[block]
                self._ghosts[block] = None
                if len(self._ghosts) > self._main_size:
                    self._ghosts.popitem(last=False)
                return
            self._main.append(block)
            self._uses[block] = 0
            if len(self._main) > self._main_size:
                self._evict_main()

    def _evict_main(self) -> None:
        while self._main:
            block = self._main.popleft()
            if not self._uses[block]:
                del self._uses[block]
                return
            self._uses[block] -= 1
            self._main.append(block)


class Arc:
    """ARC (FAST'03): lists of blocks used once and more than once, their ghosts, and a target between them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        self._once: OrderedDict[int, None] = OrderedDict()
        self._often: OrderedDict[int, None] = OrderedDict()
        self._ghosts_once: OrderedDict[int, None] = OrderedDict()
        self._ghosts_often: OrderedDict[int, None] = OrderedDict()

    def has(self, block: int) -> bool:
        return block in self._once or block in self._often

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._use(block)

    def _use(self, block: int) -> None:
        once, often, b1, b2 = self._once, self._often, self._ghosts_once, self._ghosts_often
        if block in once:
            del once[block]
        elif block in often:
            del often[block]
        elif block in b1:
            self._target = min(self._capacity, self._target + max(len(b2) / len(b1), 1.0))
            self._replace(False)
            del b1[block]
        elif block in b2:
            self._target = max(0.0, self._target - max(len(b1) / len(b2), 1.0))
            self._replace(True)
            del b2[block]
        else:
            self._make_room()
            once[block] = None
            return
        often[block] = None

    def _make_room(self) -> None:
        once, b1 = self._once, self._ghosts_once
        if len(once) + len(b1) == self._capacity:
            if len(once) < self._capacity:
                b1.popitem(last=False)
                self._replace(False)
            else:
                once.popitem(last=False)
            return
        total = len(once) + len(b1) + len(self._often) + len(self._ghosts_often)
        if total >= self._capacity:
            if total >= 2 * self._capacity:
                self._ghosts_often.popitem(last=False)
            self._replace(False)

    def _replace(self, from_b2: bool) -> None:
        once = self._once
        if once and (len(once) > self._target or (from_b2 and len(once) == self._target) or not self._often):
            self._ghosts_once[once.popitem(last=False)[0]] = None
        else:
            self._ghosts_often[self._often.popitem(last=False)[0]] = None


class Kvtier:
    """kvtier's order: of the oldest blocks of each use count the one worth least goes; see `eviction.Reuse`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tick = 0
        self._lists: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(USES)]  # block -> tick of its last use
        self._count: dict[int, int] = {}
        self._reuse = eviction.Reuse()
        self._ghosts = eviction.Ghosts(capacity)
        self._step = max(eviction.MIN_STEP, capacity // 2)
        self._lesson = self._step

    def has(self, block: int) -> bool:
        return block in self._count

    def use(self, blocks: Sequence[int]) -> None:
        self._tick += len(blocks)
        tick, held, lists = self._tick, self._count, self._lists
        for block, count in zip(reversed(blocks), reversed(self._use_counts(blocks)), strict=True):
            old = held.get(block)
            if old is not None:
                del lists[old][block]
            elif len(held) >= self._capacity:
                self._evict()
            held[block] = count
            lists[count][block] = tick
        if tick >= self._lesson:
            self._lesson = tick + self._step
            self._learn()

    def _use_counts(self, blocks: Sequence[int]) -> list[int]:
        """The use count of each block after this use, never more than that of the block before it."""
        counts, low, tick = [], USES - 1, self._tick
        absent = [block for block in blocks if block not in self._count]
        back = self._ghosts.recall([mixed(block) for block in absent]) if absent else {}
        ghosts = {absent[i]: ghost for i, ghost in back.items()}
        for block in blocks:
            count = self._count.get(block)
            if count is not None:
                then = self._lists[count][block]
            else:
                ghost = ghosts.get(block)
                if ghost is None:
                    low = 0
                    counts.append(0)
                    continue
                count, then = ghost
            self._reuse.hit(count, tick - then)
            low = min(low, count + 1)
            counts.append(low)
        return counts

    def _evict(self) -> None:
        worth, tick = self._reuse.worth, self._tick
        least, giver = (float("inf"), 0), 0
        for count, blocks in enumerate(self._lists):
            if blocks:
                then = next(iter(blocks.values()))
                offer = (worth[count][eviction.bucket(tick - then)], then)
                if offer < least:
                    least, giver = offer, count
        block, then = self._lists[giver].popitem(last=False)
        del self._count[block]
        gone = self._ghosts.remember([mixed(block)], [giver], [then])
        if len(gone):
            self._reuse.gone(eviction.count_of(gone), tick - eviction.tick_of(gone))

    def _learn(self) -> None:
        counts = np.repeat(np.arange(USES), [len(blocks) for blocks in self._lists])
        ticks = np.array([then for blocks in self._lists for then in blocks.values()], np.int64)
        self._reuse.learn(eviction.census(counts, self._tick - ticks) + self._ghosts.living(self._tick))


POLICIES: dict[str, Callable[[int], Policy]] = {"lru": Lru, "s3-fifo": S3Fifo, "arc": Arc, "kvtier": Kvtier}


def mixed(block: int) -> bytes:
    """64 well-mixed bits of a trace's block number (splitmix64), as a key's first 8 bytes are."""
    x = (block + 0x9E3779B97F4A7C15) & _U64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _U64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _U64
    return (x ^ x >> 31).to_bytes(8, sys.byteorder)


def hit_ratio(requests: Requests, cache: Policy, tick: Callable[[int], object] | None = None) -> float:
    """Replays the requests. `tick` is told how many were done, every 256."""
    hits = total = 0
    for done, blocks in enumerate(requests, 1):
        total += len(blocks)
        for block in blocks:
            if not cache.has(block):
                break
            hits += 1
        cache.use(blocks)
        if tick is not None and not done % 256:
            tick(done)
    return hits / max(1, total)


def belady(requests: Requests, capacity: int) -> float:
    """The hit ratio of evicting what is used again last. It knows the future: nothing real reaches it."""
    following: dict[int, int] = {}
    uses = []
    for at in range(len(requests) - 1, -1, -1):
        uses.append([following.get(block, len(requests)) for block in requests[at]])
        following.update(dict.fromkeys(requests[at], at))
    held: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits = total = 0
    for blocks, nexts in zip(requests, reversed(uses), strict=True):
        total += len(blocks)
        for block in blocks:
            if block not in held:
                break
            hits += 1
        for block, again in zip(reversed(blocks), reversed(nexts), strict=True):
            held[block] = again
            heapq.heappush(heap, (-again, block))
            while len(held) > capacity:
                again, gone = heapq.heappop(heap)
                if held.get(gone) == -again:
                    del held[gone]
    return hits / max(1, total)


def distinct(requests: Requests) -> int:
    """How many different blocks a trace has."""
    return len({block for blocks in requests for block in blocks})


def load(path: Path) -> Requests:
    """A trace: JSON lines with `hash_ids` as of Mooncake, or the columns of `save` (.npz). Raises Invalid."""
    try:
        if path.stat().st_size > MAX_TRACE_BYTES:
            raise Invalid(f"{path} has more than {MAX_TRACE_BYTES} bytes")
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as columns:
                ids, ends = (columns[name].cumsum().tolist() for name in ("ids", "lengths"))
            return [ids[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        with path.open(encoding="utf-8") as lines:
            return [[int(block) for block in json.loads(line)["hash_ids"]] for line in lines if line.strip()]
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Invalid(f"{path} is not a trace: {error!s:.200}") from None


def save(path: Path, requests: Requests) -> None:
    """Writes a trace as compressed columns: lengths of the requests, and differences of block numbers."""
    ids = np.array([block for blocks in requests for block in blocks], np.int64)
    np.savez_compressed(
        path,
        lengths=np.array([len(blocks) for blocks in requests], np.uint16),
        ids=np.diff(ids, prepend=0).astype(np.int32),
    )


def blocks_held(nbytes: int, extents: Extents) -> int:
    """Blocks of these extents in an arena of `nbytes`: header, scales, padding of slots and rest of slabs counted."""
    slab = default_slab(nbytes)
    return nbytes // slab * (slab // extents.slot_bytes)


Tick = Callable[[int], object]  # is told how many requests were replayed since it was told last


def at_shares(requests: Requests, names: Sequence[str], tick: Tick | None = None) -> list[dict[str, object]]:
    """Hit ratios of these policies, and Belady's, at `SHARES` percent of the distinct blocks."""
    rows: list[dict[str, object]] = []
    for share in SHARES:
        capacity = max(1, distinct(requests) * share // 100)
        rows += [
            {"share": share, "blocks": capacity, "policy": name, "hit_ratio": _ratio(requests, name, capacity, tick)}
            for name in [*names, BELADY]
        ]
    return rows


def at_bytes(
    requests: Requests,
    nbytes: int,
    tokens: int,
    shape: tuple[int, int, int],
    names: Sequence[str],
    tick: Tick | None = None,
) -> list[dict[str, object]]:
    """Hit ratios in `nbytes` of arena: BF16 with LRU, FP8 with these policies and Belady. A trace's block is `tokens`
    of a model of this shape.

    A kvtier block is 16 tokens here, so that it fits the largest slot; a trace's block is as many of them as it has
    tokens. Raises Invalid."""
    rows: list[dict[str, object]] = []
    for dtype, chosen in (("bf16", ["lru"]), ("e4m3fn", [*names, BELADY])):
        extents = attention(*shape, engine_tokens=16, dtype=dtype).extents()
        capacity = blocks_held(nbytes, extents) // max(1, tokens // 16)
        if not capacity:
            raise Invalid(f"{nbytes} bytes hold no block of {tokens} tokens in {dtype}")
        for name in chosen:
            ratio = _ratio(requests, name, capacity, tick)
            row: dict[str, object] = {"format": dtype, "slot_bytes": extents.slot_bytes, "blocks": capacity}
            rows.append(row | {"policy": name, "hit_ratio": ratio})
    return rows


def _ratio(requests: Requests, name: str, capacity: int, tick: Tick | None) -> float:
    done = 0

    def tell(now: int) -> None:
        nonlocal done
        if tick is not None:
            tick(now - done)
        done = now

    ratio = belady(requests, capacity) if name == BELADY else hit_ratio(requests, POLICIES[name](capacity), tell)
    tell(len(requests))
    return ratio
