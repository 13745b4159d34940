"""The L2 adapter that LMCache's storage manager drives: tasks, answers, inventory. `ObjectTransfer` moves the bytes.

Its one rule: nothing here waits for the daemon on LMCache's threads, and nothing raises. Each task's id is answered
exactly once, by a failure where need be. `delete` alone waits, at most DELETE_SECONDS, as LMCache reads the usage right
behind it; the deletion goes on by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import KeyEntry, KeyListPage
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvtier.client.copier import copy
from kvtier.connectors.common import objects as transfers
from kvtier.connectors.common.object_naming import MIN_HASH_BYTES, Space, Spaces, form_of
from kvtier.connectors.common.objects import Item, ObjectTransfer
from kvtier.connectors.common.worker_pool import PendingAnswers, WorkerPool, WorkItem
from kvtier.connectors.lmcache.inventory import Hold, Holds, Inventory
from kvtier.connectors.lmcache.lmcache_settings import KvtierL2AdapterConfig

TESTED = "0.5.6"
LOADERS = 2
MAX_WAITING = 4096  # tasks in a queue; more fail at once
WAIT_SECONDS = 60.0  # in a queue; LMCache's locks on a task's buffers end 300 s after its submission
DELETE_SECONDS = 2.0
CLOSE_SECONDS = 15.0  # longer than any task goes on once it is told to end
log = logging.getLogger(__name__)


class KvtierL2Adapter(L2AdapterInterface):
    """See `docs/lmcache.md`. Made by LMCache, with checked settings or plain parameters."""

    config_class_name = "KvtierL2AdapterConfig"

    def __init__(self, config: KvtierL2AdapterConfig | Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        if not isinstance(config, KvtierL2AdapterConfig):
            config = KvtierL2AdapterConfig.from_dict(config)
        super().__init__(max_capacity_bytes=config.max_capacity_bytes)
        if not logging.getLogger("kvtier").handlers:
            init_logger("kvtier")  # our log goes where LMCache's goes
        self._socket = config.socket
        self._spaces = Spaces(config.descriptions)
        self._inventory, self._holds = Inventory(), Holds()
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._undescribed: set[str] = set()
        self._short = False
        self._traffic = ObjectTransfer(config.socket, self._spaces, self._count)
        self._ids = count()
        self._events = [create_event_notifier() for _ in range(3)]
        self._answers: list[PendingAnswers[Any]] = [PendingAnswers(event) for event in self._events]
        self._stores, self._lookups, self._loads = self._answers
        self._asking = WorkerPool("lookup", 1, limit=MAX_WAITING, idle=self._tend, tick=1.0)
        self._storing = WorkerPool("store", 1, limit=MAX_WAITING)
        self._loading = WorkerPool("load", LOADERS, limit=MAX_WAITING, idle=self._traffic.release_spent, tick=1.0)
        self._pools = (self._asking, self._storing, self._loading)
        self._closed = threading.Event()

    # -- event descriptors

    def get_store_event_fd(self) -> int:
        return int(self._events[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events[1].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events[2].fileno())

    def _submit(self, pool: WorkerPool, answers: PendingAnswers[Any], run: Callable[[], Any], failed: Any) -> int:
        """Queues a task whose answer is what `run` returns, or `failed`. Returns its id."""
        task, until = next(self._ids), time.monotonic() + WAIT_SECONDS
        pool.give(WorkItem(run, lambda answer: answers.answer(task, answer), failed, until))
        return task

    # -- store

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Objects stay LMCache's and unchanged until the task is answered."""
        run = partial(self._store, list(keys), list(objects))
        return self._submit(self._storing, self._stores, run, L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stores.fetch_all()

    def _store(self, keys: list[Any], objects: list[Any]) -> Any:
        """All or nothing is what LMCache is told; what was stored before a failure stays, and is accounted for."""
        self._meet(keys)
        done, nbytes, until = 0, 0, time.monotonic() + transfers.STORE_SECONDS
        for bundle in self._traffic.bundles_of(keys, objects):
            stored = self._traffic.store(bundle, until, self._enter)
            done += stored
            nbytes += stored * bundle[0].nbytes
        self._count("stored_objects", done)
        self._count("stored_bytes", nbytes)
        self._count("store_failed_objects", len(keys) - done)
        return L2StoreResult(done == len(keys), nbytes)

    # -- lookup and lock

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any] | None) -> int:
        run = partial(self._lookup, list(keys), dict(group_layout_descs or {}))
        return self._submit(self._asking, self._lookups, run, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any | None:
        return self._lookups.fetch(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Only takes a note; the leases end on our own thread."""
        self._holds.unlock(keys)
        self._asking.wake()

    def _lookup(self, keys: list[Any], layouts: dict[int, Any]) -> Any:
        """What the daemon has, in any tier; the leading part of it is held until it is unlocked. A layout that LMCache
        does not say is that under which this process has stored the key."""
        self._meet(keys)
        bitmap = Bitmap(len(keys))
        said = {group: form_of(layout.shapes, layout.dtypes) for group, layout in layouts.items()}
        said = {group: form for group, form in said.items() if form.nbytes}
        forms = [said.get(key.object_group_id) or self._inventory.space(key) for key in keys]
        for space, context, items in self._traffic.bundles(keys, forms):
            known = self._hold(space, context, items)
            if known is None:
                self._count("lookup_failures", 1)
                continue
            there = [items[at] for at in known]
            for item in there:
                bitmap.set(item.at)
            self._enter(space, there)
            if there:
                self._notify_keys_accessed([item.key for item in there])
            absent = set(range(len(items))) - set(known)
            self._forget([items[at].key for at in absent if self._inventory.space(items[at].key) is space])
        self._count("lookup_objects", len(keys))
        self._count("lookup_hits", bitmap.popcount())
        return bitmap

    def _hold(self, space: Space, context: bytes, items: Sequence[Item]) -> list[int] | None:
        """Which of the items the daemon has; the leading warm ones are held. None: it does not answer."""
        hashes = [item.hash for item in items]
        leases, held, stop = self._traffic.hold(space, context, hashes, self._holds.nbytes)
        if stop is None:
            return None
        if held:
            self._holds.add([item.key for item in items[:held]], space, leases)
        rest = self._traffic.known(space, context, hashes[held:], stop)
        return None if rest is None else [*range(held), *(held + at for at in rest)]

    def _tend(self) -> None:
        """Between lookups, and every second without one."""
        self._traffic.release(self._holds.ended())
        self._traffic.look()

    # -- load

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Once the task is answered its buffers are not touched any more."""
        run = partial(self._load, list(keys), list(objects))
        return self._submit(self._loading, self._loads, run, Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any | None:
        return self._loads.fetch(task_id)

    def _load(self, keys: list[Any], objects: list[Any]) -> Any:
        bitmap, until = Bitmap(len(keys)), time.monotonic() + transfers.LOAD_SECONDS
        for space, context, items in self._traffic.bundles_of(keys, objects):
            places = self._holds.borrow([item.key for item in items], space)
            try:
                _copy_held(space, items, places)
            finally:
                self._holds.give_back(places)
            good = [item for item, place in zip(items, places, strict=True) if place is not None]
            if rest := [item for item, place in zip(items, places, strict=True) if place is None]:
                more, lost = self._traffic.load((space, context, rest), until)
                good += more
                self._forget([item.key for item in lost])
            for item in good:
                bitmap.set(item.at)
            self._count("loaded_objects", len(good))
            self._count("loaded_bytes", len(good) * space.nbytes)
        self._count("load_failed_objects", len(keys) - bitmap.popcount())
        return bitmap

    # -- what LMCache's eviction, quotas and operators ask for

    def delete(self, keys: list[Any]) -> None:
        """Makes the daemon forget these objects, for every server and engine that shares it."""
        done, until = threading.Event(), time.monotonic() + WAIT_SECONDS
        self._asking.give(WorkItem(partial(self._delete, list(keys)), lambda _: done.set(), None, until))
        done.wait(DELETE_SECONDS)

    def _delete(self, keys: list[Any]) -> None:
        """A key that this process has not met may be stored in any form of its model that it has."""
        places: list[tuple[Any, Space]] = []
        for key in keys:
            space = self._inventory.space(key)
            places += [(key, one) for one in ([space] if space else self._spaces.of_model(key.model_name))]
        for bundle in self._traffic.bundles([key for key, _ in places], [space for _, space in places]):
            if self._traffic.delete(bundle):
                self._forget([item.key for item in bundle[2]])

    def list_l2_keys(self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None) -> Any:
        """What this process has stored or found since it started: the daemon's own index holds hashes alone."""
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, not {page_size}")
        if cursor is not None and not (cursor.isascii() and cursor.isdigit()):
            raise ValueError(f"{cursor!r:.80} is not a cursor that this adapter gave")
        found, after = self._inventory.page(model_name, page_size, -1 if cursor is None else int(cursor))
        entries = tuple(KeyEntry(key.to_encoded_object_key(), nbytes) for key, nbytes in found)
        return KeyListPage(entries, None if after is None else str(after))

    def report_status(self) -> dict[str, Any]:
        """`is_healthy` speaks of this adapter: an absent daemon costs hits, it is no reason to restart LMCache."""
        with self._counting:
            counts = dict(self._counts)
        return {
            "is_healthy": self._closed.is_set() or all(pool.alive for pool in self._pools),
            "type": "KvtierL2Adapter",
            "socket": self._socket,
            "daemon": "answers" if self._traffic.connected else "away",
            "namespaces": {model: base.digest.hex()[:16] for model, base in self._spaces.bases.items()},
            "objects_met": len(self._inventory),
            "locked_objects": len(self._holds),
            **counts,
        }

    def close(self) -> None:
        """Ends tasks, threads and sessions. Tasks that have not begun are answered as failed."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._traffic.closing.set()
        until = time.monotonic() + CLOSE_SECONDS
        for pool in self._pools:
            pool.close(max(0.1, until - time.monotonic()))
        self._traffic.release(self._holds.ended(everything=True))
        self._traffic.close()
        for answers in self._answers:
            answers.close()

    # -- the inventory

    def _enter(self, space: Space, items: Sequence[Item]) -> None:
        """Tells listeners of what they do not know yet."""
        fresh, gone = self._inventory.enter([item.key for item in items], space)
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [nbytes for _, nbytes in gone])
        if fresh:
            self._notify_keys_stored(fresh, [space.nbytes] * len(fresh))

    def _forget(self, keys: Sequence[Any]) -> None:
        """The daemon has these no more."""
        if gone := self._inventory.remove(keys):
            self._notify_keys_deleted([key for key, _ in gone], [nbytes for _, nbytes in gone])

    def _meet(self, keys: Sequence[Any]) -> None:
        """Says once of each model that nobody has described it, and once that hashes are of no use."""
        for model in {key.model_name for key in keys} - self._spaces.bases.keys() - self._undescribed:
            if len(self._undescribed) < 64:
                self._undescribed.add(model)
                log.warning("kvtier: adapter_params has no namespace for the model %r: nothing of it is stored", model)
        if not self._short and any(len(key.chunk_hash) < MIN_HASH_BYTES for key in keys):
            self._short = True
            how = "by Python's own hash, which differs between processes"
            log.warning("kvtier: LMCache hashes chunks %s: nothing is stored; use blake3", how)

    def _count(self, name: str, n: int) -> None:
        with self._counting:
            self._counts[name] += n


def _copy_held(space: Space, items: Sequence[Item], places: Sequence[tuple[Hold, int] | None]) -> None:
    """Copies items out of what a lookup holds, without a call to the daemon."""
    copy(
        (item.view[low:high], place[0].leases[piece][place[1]][: high - low])
        for item, place in zip(items, places, strict=True)
        if item.view is not None and place is not None
        for piece, (low, high) in enumerate(space.cuts)
    )
