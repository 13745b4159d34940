"""The bytes' way: objects of LMCache into slots of the daemon and back, one copy each way, straight between its buffers
and the mapped arena.

Called from the adapter's own threads, any number at once; every call to the daemon has a deadline and every method one
of its own, after which it touches no buffer any more. Failures cost objects, never an exception: what is not there, not
whole or not in time is left out. What lookups hold is at most an eighth of the arena, half of what a session may hold,
so that holding never starves moving.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvtier.client.answers import Body, Lease
from kvtier.client.api import Client
from kvtier.client.copier import copy
from kvtier.connectors.common.lookups import Heartbeat, answered, label
from kvtier.connectors.common.object_naming import (
    MIN_HASH_BYTES,
    ObjectForm,
    Space,
    Spaces,
    content_hash,
    context_of,
    form_of_object,
)
from kvtier.errors import Invalid, KvtierError
from kvtier.format.layout import Range
from kvtier.protocol.v1 import kvtier_pb2 as pb

CALL_SECONDS = 2.0  # deadline of one call to the daemon, the heartbeat's beat included
STORE_SECONDS = 60.0  # for a store; LMCache's locks on its buffers last 300 s
ROOM_SECONDS = 5.0  # ... of which so long without finding room: then the rest is dropped
LOAD_SECONDS = 10.0  # for a load, with what has to come up from a lower tier
BATCH_BYTES = 64 << 20  # reserved or leased at once
HELD_SHARE = 8  # lookups hold at most this part of the arena
BATCH_SHARE = 16  # ... and one call reserves or leases at most this part
FETCH_AHEAD = 64  # cold blocks on their way at once
PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds until a load looks again whether cold blocks have come
MAX_LINES = 5  # of what differs from the nearest namespace
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Item:
    """An object of a task: its place in the task, its key, and its bytes where it has any."""

    at: int
    key: Any
    view: Body | None = None

    @cached_property
    def hash(self) -> bytes:
        """Its content hash; what is copied out of a hold does without."""
        return content_hash(self.key)


Bundle = tuple[Space, bytes, list[Item]]  # items of one namespace and request context


class ObjectTransfer:
    """A session with the daemon at `socket`."""

    def __init__(self, socket: str, spaces: Spaces, count: Callable[[str, int], None], name: str = "lmcache") -> None:
        self._client = Client(f"unix:{socket}")
        self._spaces, self._count = spaces, count
        self._spent: deque[Lease] = deque()  # of loads, copied out of and not released yet
        self._arena = 0  # bytes; 0: not known
        self.closing = threading.Event()
        self.heartbeat = Heartbeat(self._client, name, CALL_SECONDS)
        for model, base in spaces.bases.items():
            log.info("kvtier: namespace %s for %s", base.digest.hex()[:16], model)
        self.heartbeat.start(self._client.register(next(iter(spaces.bases.values()))))

    def close(self) -> None:
        """Ends the session; what it held is the daemon's again."""
        self.closing.set()
        self.heartbeat.stop()
        self.release_spent()
        self._client.close()

    @property
    def connected(self) -> bool:
        """Whether the daemon has answered and did so last."""
        return self.heartbeat.healthy and self._arena > 0

    def look(self) -> bool:
        """The same, after connecting where need be."""
        return self._arena_bytes() > 0

    def _arena_bytes(self) -> int:
        """The size of the daemon's arena; 0 while nobody knows."""
        if not self.heartbeat.healthy:
            self._arena = 0  # it may come back with another
        elif not self._arena:
            try:
                self._arena = int(self._client.status(deadline=CALL_SECONDS)["arena_bytes"])
            except KvtierError as error:
                self.heartbeat.judge(str(error))
        return self._arena

    def _batch(self, space: Space) -> int:
        """Objects of one call: a quarter of what a session may hold at most, as several threads are at it."""
        return max(1, min(BATCH_BYTES, self._arena_bytes() // BATCH_SHARE) // space.slot_bytes)

    # -- bundles

    def bundles(
        self, keys: Sequence[Any], forms: Sequence[ObjectForm | Space | None], objects: Sequence[Any] | None = None
    ) -> list[Bundle]:
        """The keys by namespace and context, in order. Left out: what has no namespace or safe hash, objects of another
        size than their shapes."""
        found: dict[tuple[int, bytes], Bundle] = {}
        for at, (key, form) in enumerate(zip(keys, forms, strict=True)):
            space = self._spaces.find(key.model_name, form) if isinstance(form, ObjectForm) else form
            if space is None or len(key.chunk_hash) < MIN_HASH_BYTES:
                continue
            view = None
            if objects is not None:
                view = np.frombuffer(objects[at].byte_array, np.uint8)
                if view.size != space.nbytes:
                    self._count("wrong_size_objects", 1)
                    continue
            context = context_of(key.cache_salt)
            found.setdefault((id(space), context), (space, context, []))[2].append(Item(at, key, view))
        for space, _, _ in found.values():
            self.introduce(space)
        return list(found.values())

    def introduce(self, space: Space) -> None:
        """Says once of a namespace how it differs from the nearest that the daemon has, if it is new there."""
        if space.introduced or not self.heartbeat.healthy:
            return
        space.introduced = True
        try:
            lines = self._client.explain(space.registered.description, deadline=CALL_SECONDS)
        except KvtierError as error:
            self.heartbeat.judge(str(error))
            return
        for line in lines[:MAX_LINES]:
            log.info("kvtier: namespace %s is new here: %s", space.registered.digest.hex()[:16], line)

    def bundles_of(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[Bundle]:
        """The same for keys that come with their objects."""
        return self.bundles(keys, [form_of_object(one) for one in objects], objects)

    # -- store

    def store(self, bundle: Bundle, until: float, stored: Callable[[Space, Sequence[Item]], None]) -> int:
        """Stores a bundle's items in order, until that time, and tells `stored` of each batch. How many are in the
        daemon now, from the front."""
        space, context, items = bundle
        room, size, done = time.monotonic() + ROOM_SECONDS, self._batch(space), 0
        while done < len(items) and self.heartbeat.healthy and not self.closing.is_set() and time.monotonic() < until:
            batch = items[done : done + size]
            try:
                got, reason = self._fill(space, context, batch)
            except Invalid as error:  # one block alone is more than a session may hold
                self._count("store_dropped_too_large", len(items) - done)
                log.warning("kvtier: objects are not stored: %s", error)
                break
            if got:
                stored(space, batch[:got])
                done += got
                room = time.monotonic() + ROOM_SECONDS
            if got == len(batch):
                continue
            if not reason.startswith("full") or time.monotonic() > room:
                self._count(f"store_dropped_{label(reason)}", len(items) - done)
                break
            if len(batch) > 1:
                size = max(1, len(batch) // 2)
            else:
                self.closing.wait(0.005)
        return done

    def _fill(self, space: Space, context: bytes, items: Sequence[Item]) -> tuple[int, str]:
        """Reserves, copies and seals: (how many leading items are stored, the reason why not all)."""
        got, reason = len(items), ""
        for part, (low, high) in zip(space.ranges, space.cuts, strict=True):
            hashes = b"".join(item.hash for item in items[:got])
            with self._client.fill(
                space.registered, hashes, range_=part, context=context, deadline=CALL_SECONDS
            ) as slots:
                if slots.reason:
                    self.heartbeat.judge(slots.reason)
                    return 0, slots.reason
                pairs = [
                    (slot, item.view[low:high])
                    for slot, item in zip(slots, items, strict=False)
                    if slot is not None and item.view is not None
                ]
                copy(pairs)
                for slot, _ in pairs:
                    slot[high - low :] = 0
            if slots.sealed < got:
                got, reason = slots.sealed, slots.reason
            if not got:
                break
        return got, reason

    # -- lookup

    def known(self, space: Space, context: bytes, hashes: Sequence[bytes], stop: int = 0) -> list[int] | None:
        """Which of these the daemon has whole, in any tier. None: it does not answer. `stop` = pb.MISS: it has said
        that the first is not there."""
        found: list[int] = []
        first_missing = 0
        if stop != pb.MISS:
            leading = self._leading(space, context, [hashes])
            if leading is None:
                return None
            found, first_missing = list(range(leading[0])), leading[0]
        rest = range(first_missing + 1, len(hashes))
        single = self._leading(space, context, [hashes[at : at + 1] for at in rest])
        if single is None:
            return None
        return found + [at for at, there in zip(rest, single, strict=True) if there]

    def _leading(self, space: Space, context: bytes, lists: Sequence[Sequence[bytes]]) -> list[int] | None:
        """For each list how many leading entries have all their pieces."""
        if not self.heartbeat.healthy:
            return None
        if not any(lists):
            return [0] * len(lists)
        runs: list[tuple[Range, bytes]] = [(part, b"".join(hashes)) for hashes in lists for part in space.ranges]
        answers = self._client.lookup_runs(space.registered, runs, context=context, deadline=CALL_SECONDS)
        if not all(self.heartbeat.judge(answer.reason) for answer in answers):
            return None
        each = len(space.ranges)
        return [min(answers[at : at + each]) for at in range(0, len(answers), each)]

    def hold(
        self, space: Space, context: bytes, hashes: Sequence[bytes], held_bytes: int
    ) -> tuple[list[Lease], int, int | None]:
        """Leases leading blocks, as far as there is room beside `held_bytes`, and starts to bring up those behind that
        are cold.

        (the leases, one for each piece; how many blocks each has at least; where the next one stands: pb.MISS, another
        stop, 0 where it was not asked for, None where the daemon does not answer)
        """
        most = max(0, self._arena_bytes() // HELD_SHARE - held_bytes) // space.slot_bytes
        leases: list[Lease] = []
        held, stop = min(len(hashes), most), 0
        for part in space.ranges if held else ():
            lease = self._client.lease(
                space.registered, b"".join(hashes[:held]), range_=part, context=context, deadline=CALL_SECONDS
            )
            leases.append(lease.__enter__())
            if len(lease) == held:
                continue
            held, stop = len(lease), lease.stop
            if not self.heartbeat.judge(lease.reason):
                self.release(leases)
                return [], 0, None
            if stop == pb.COLD:
                self._fetch(space, context, hashes[held:])
        if not held:
            self.release(leases)
            return [], 0, stop
        return leases, held, stop

    def release(self, leases: Iterable[Lease]) -> None:
        """Ends leases."""
        for lease in leases:
            lease.__exit__(None, None, None)

    def _fetch(self, space: Space, context: bytes, hashes: Sequence[bytes]) -> None:
        """Starts promoting the next cold blocks."""
        ahead = b"".join(hashes[: max(1, FETCH_AHEAD // len(space.ranges))])
        for part in space.ranges:
            self.heartbeat.judge(
                self._client.prefetch(
                    space.registered, ahead, range_=part, context=context, deadline=CALL_SECONDS
                ).reason
            )

    # -- load

    def load(self, bundle: Bundle, until: float) -> tuple[list[Item], list[Item]]:
        """Copies a bundle's items into their buffers, until that time: (those that are whole in theirs, those that the
        daemon has no more)."""
        space, context, left = bundle
        pause, size = PAUSE, self._batch(space)
        good: list[Item] = []
        lost: list[Item] = []
        while left and self.heartbeat.healthy and not self.closing.is_set() and time.monotonic() < until:
            got, stop, reason = self._read(space, context, left[:size])
            good += left[:got]
            whole = got == len(left[:size])
            left = left[got:]
            if whole:
                continue
            if not answered(reason):
                self.heartbeat.judge(reason)
            elif stop == pb.COLD:
                pause = PAUSE if got else min(LONGEST_PAUSE, 2 * pause)
                self._fetch(space, context, [item.hash for item in left])
                self.closing.wait(pause)
            elif stop == pb.CAP:
                self.closing.wait(0.0 if got else 0.005)  # our own loads hold all we may: they end
            else:
                self.closing.wait(PAUSE)
                known = self.known(space, context, [item.hash for item in left], stop)
                if known is None:
                    break
                there = {left[at].at for at in known}
                lost += [item for item in left if item.at not in there]
                left = [item for item in left if item.at in there]
        return good, lost

    def _read(self, space: Space, context: bytes, items: Sequence[Item]) -> tuple[int, int, str]:
        """Leases and copies: (how many leading items are whole in their buffers, where and why the lease stopped)."""
        got, stop, reason = len(items), 0, ""
        self.release_spent()
        for part, (low, high) in zip(space.ranges, space.cuts, strict=True):
            hashes = b"".join(item.hash for item in items[:got])
            blocks = self._client.lease(
                space.registered, hashes, range_=part, context=context, deadline=CALL_SECONDS
            ).__enter__()
            try:
                pairs = zip(items, blocks, strict=False)
                copy((item.view[low:high], body[: high - low]) for item, body in pairs if item.view is not None)
                if len(blocks) < got:
                    got, stop, reason = len(blocks), blocks.stop, blocks.reason
            finally:
                self._spent.append(blocks)
            if not got:
                break
        return got, stop, reason

    def release_spent(self) -> None:
        """Ends the leases of loads. Called once their task is answered: it costs a call that LMCache need not wait
        for."""
        while self._spent:
            try:
                lease = self._spent.popleft()
            except IndexError:  # another thread was quicker
                return
            lease.__exit__(None, None, None)

    # -- delete

    def delete(self, bundle: Bundle) -> bool:
        """Makes the daemon forget a bundle's items, for everyone. Whether it answered."""
        space, context, items = bundle
        hashes = b"".join(item.hash for item in items)
        return all(
            self.heartbeat.judge(
                self._client.delete(
                    space.registered, hashes, range_=part, context=context, deadline=CALL_SECONDS
                ).reason
            )
            for part in space.ranges
        )
