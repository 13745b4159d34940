"""Objects of an engine (LMCache's, or vLLM's chunks) into the daemon and back: one copy, from buffer to mapped arena.

Called from the adapter's own threads, any number at once; every call to the daemon has a deadline and every method one
of its own, after which it touches no buffer any more. Failures cost objects, never an exception: what is not there, not
whole or not in time is left out. What lookups hold is at most an eighth of the arena, half of a session's share: moving
never starves.
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
from kvtier.connectors.common import object_naming as naming
from kvtier.connectors.common.lookups import Heartbeat, label
from kvtier.connectors.common.object_naming import ObjectForm, Space, Spaces
from kvtier.errors import Invalid, KvtierError
from kvtier.format.layout import Range
from kvtier.protocol.stops import Stop

CALL_SECONDS = 2.0  # deadline of one call to the daemon, the heartbeat's beat included
STORE_SECONDS = 60.0  # for a store; LMCache's locks on its buffers last 300 s
PLACE_SECONDS = 5.0  # ... of which so long without finding a place: then the rest is dropped
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
        return naming.content_hash(self.key)


Bundle = tuple[Space, bytes, list[Item]]  # items of one namespace and request context


class ObjectTransfer:
    """A session with the daemon at `socket`."""

    def __init__(self, socket: str, spaces: Spaces, count: Callable[[str, int], None], name: str = "lmcache") -> None:
        self._client, self._spaces, self._count = Client(f"unix:{socket}"), spaces, count
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
            except KvtierError:
                self.heartbeat.lost()
        return self._arena

    def _batch(self, space: Space) -> int:
        """Objects of one call: a quarter of what a session may hold at most, as several threads are at it."""
        return max(1, min(BATCH_BYTES, self._arena_bytes() // BATCH_SHARE) // space.slot_bytes)

    # -- bundles

    def bundles(
        self, keys: Sequence[Any], forms: Sequence[ObjectForm | Space | None], objects: Sequence[Any] | None = None
    ) -> list[Bundle]:
        """The keys by namespace and context, in order. Left out: what lacks a namespace, a safe hash or its size."""
        found: dict[tuple[int, bytes], Bundle] = {}
        for at, (key, form) in enumerate(zip(keys, forms, strict=True)):
            space = self._spaces.find(key.model_name, form) if isinstance(form, ObjectForm) else form
            if space is None or len(key.chunk_hash) < naming.MIN_HASH_BYTES:
                continue
            view = None
            if objects is not None:
                view = np.frombuffer(objects[at].byte_array, np.uint8)
                if view.size != space.nbytes:
                    self._count("wrong_size_objects", 1)
                    continue
            context = naming.context_of(key.cache_salt)
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
        except KvtierError:
            self.heartbeat.lost()
            return
        for line in lines[:MAX_LINES]:
            log.info("kvtier: namespace %s is new here: %s", space.registered.digest.hex()[:16], line)

    def bundles_of(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[Bundle]:
        """The same for keys that come with their objects."""
        return self.bundles(keys, [naming.form_of_object(one) for one in objects], objects)

    # -- store

    def store(self, bundle: Bundle, until: float, stored: Callable[[Space, Sequence[Item]], None]) -> int:
        """Stores a bundle's items in order, until that time, and tells `stored` of each batch. Returns how many."""
        space, context, items = bundle
        place, size, done = time.monotonic() + PLACE_SECONDS, self._batch(space), 0
        while done < len(items) and self.heartbeat.healthy and not self.closing.is_set() and time.monotonic() < until:
            batch = items[done : done + size]
            try:
                got, why = self._fill(space, context, batch)
            except Invalid as error:  # one block alone is more than a session may hold
                self._count("store_dropped_too_large", len(items) - done)
                log.warning("kvtier: objects are not stored: %s", error)
                break
            if got:
                stored(space, batch[:got])
                done += got
                place = time.monotonic() + PLACE_SECONDS
            if got == len(batch):
                continue
            if why != "full" or time.monotonic() > place:
                self._count(f"store_dropped_{why}", len(items) - done)
                break
            if len(batch) > 1:
                size = max(1, len(batch) // 2)
            else:
                self.closing.wait(0.005)
        return done

    def _fill(self, space: Space, context: bytes, items: Sequence[Item]) -> tuple[int, str]:
        """Reserves, copies and seals: (how many leading items are stored, why not all, as `label` has it)."""
        got, why = len(items), ""
        for part, (low, high) in zip(space.ranges, space.cuts, strict=True):
            hashes = b"".join(item.hash for item in items[:got])
            with self._client.fill(space.registered, hashes, **_call(part, context)) as slots:
                if slots.error:
                    self.heartbeat.judge(slots)
                    return 0, label(slots)
                given = [(slot, item.view) for slot, item in zip(slots, items, strict=False)]
                pairs = [(slot, view[low:high]) for slot, view in given if slot is not None and view is not None]
                copy(pairs)
                for slot, _ in pairs:
                    slot[high - low :] = 0
            if slots.sealed < got:
                got, why = slots.sealed, label(slots)
            if not got:
                break
        return got, why

    # -- lookup

    def known(self, space: Space, context: bytes, hashes: Sequence[bytes], stop: int = 0) -> list[int] | None:
        """Which of these the daemon has whole, in any tier. None: no answer. `stop` = MISS: the first is absent."""
        found: list[int] = []
        first_missing = 0
        if stop != Stop.MISS:
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
        if not all(self.heartbeat.judge(answer) for answer in answers):
            return None
        each = len(space.ranges)
        return [min(answers[at : at + each]) for at in range(0, len(answers), each)]

    def hold(
        self, space: Space, context: bytes, hashes: Sequence[bytes], held_bytes: int
    ) -> tuple[list[Lease], int, int | None]:
        """Leases leading blocks, as far as `held_bytes` leave a place, and starts to bring up cold ones behind.

        (the leases, one for each piece; how many blocks each has at least; where the next one stands: Stop.MISS,
        another stop, 0 where it was not asked for, None where the daemon does not answer)
        """
        most = max(0, self._arena_bytes() // HELD_SHARE - held_bytes) // space.slot_bytes
        leases: list[Lease] = []
        held, stop = min(len(hashes), most), 0
        for part in space.ranges if held else ():
            lease = self._client.lease(space.registered, b"".join(hashes[:held]), **_call(part, context))
            leases.append(lease.__enter__())
            if len(lease) == held:
                continue
            held, stop = len(lease), lease.stop
            if not self.heartbeat.judge(lease):
                self.release(leases)
                return [], 0, None
            if stop == Stop.COLD:
                self._fetch(space, context, hashes[held:])
        if held:
            return leases, held, stop
        self.release(leases)
        return [], 0, stop

    def release(self, leases: Iterable[Lease]) -> None:
        """Ends leases."""
        for lease in leases:
            lease.__exit__(None, None, None)

    def _fetch(self, space: Space, context: bytes, hashes: Sequence[bytes]) -> None:
        """Starts promoting the next cold blocks."""
        ahead = b"".join(hashes[: max(1, FETCH_AHEAD // len(space.ranges))])
        for part in space.ranges:
            self.heartbeat.judge(self._client.prefetch(space.registered, ahead, **_call(part, context)))

    # -- load

    def load(self, bundle: Bundle, until: float) -> tuple[list[Item], list[Item]]:
        """Copies a bundle's items into their buffers, until that time: (those that are whole, those that are lost)."""
        space, context, left = bundle
        pause, size = PAUSE, self._batch(space)
        good, lost = list[Item](), list[Item]()
        while left and self.heartbeat.healthy and not self.closing.is_set() and time.monotonic() < until:
            got, short = self._read(space, context, left[:size])
            good += left[:got]
            left = left[got:]
            if short is None:
                continue
            if not self.heartbeat.judge(short):
                break
            if short.stop == Stop.COLD:
                pause = PAUSE if got else min(LONGEST_PAUSE, 2 * pause)
                self._fetch(space, context, [item.hash for item in left])
                self.closing.wait(pause)
            elif short.stop == Stop.CAP:
                self.closing.wait(0.0 if got else 0.005)  # our own loads hold all we may: they end
            else:
                self.closing.wait(PAUSE)
                known = self.known(space, context, [item.hash for item in left], short.stop)
                if known is None:
                    break
                there = {left[at].at for at in known}
                lost += [item for item in left if item.at not in there]
                left = [item for item in left if item.at in there]
        return good, lost

    def _read(self, space: Space, context: bytes, items: Sequence[Item]) -> tuple[int, Lease | None]:
        """Leases and copies: (how many leading items are whole in their buffers, the lease that has less)."""
        got, short = len(items), None
        self.release_spent()
        for part, (low, high) in zip(space.ranges, space.cuts, strict=True):
            hashes = b"".join(item.hash for item in items[:got])
            blocks = self._client.lease(space.registered, hashes, **_call(part, context)).__enter__()
            try:
                pairs = zip(items, blocks, strict=False)
                copy((item.view[low:high], body[: high - low]) for item, body in pairs if item.view is not None)
                if len(blocks) < got:
                    got, short = len(blocks), blocks
            finally:
                self._spent.append(blocks)
            if not got:
                break
        return got, short

    def release_spent(self) -> None:
        """Ends the leases of loads. Called once their task is answered: the engine need not wait for this call."""
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
        answers = (self._client.delete(space.registered, hashes, **_call(part, context)) for part in space.ranges)
        return all(map(self.heartbeat.judge, answers))


def _call(part: Range, context: bytes) -> dict[str, Any]:
    """Options of one call to the daemon."""
    return {"range_": part, "context": context, "deadline": CALL_SECONDS}
