"""Questions and deletes in the background: a thread asks Redis what it has and tells it what to forget, many at once.

The answers go to `Presence`. `question` takes no lock, so that `find` may be called under any lock. Deletes count as
done here at once and are kept until Redis has taken them, `MAX_DELETES` at most.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Collection, Sequence
from itertools import islice

from kvtier.errors import Unavailable
from kvtier.tiers.redis.calls import Calls
from kvtier.tiers.redis.exchange import Refused
from kvtier.tiers.redis.presence import Presence

MAX_ASKED = 16_384  # questions that wait for an answer
ASK_BATCH = 512
ASK_PATIENCE = 0.25  # seconds after which an answer that has not come counts as a no for now
MAX_DELETES = 65_536
DELETE_PATIENCE = 0.05  # seconds that a delete waits for Redis to have forgotten
DELETE = "delete"
TICK = 0.1  # seconds between looks at deletes that Redis did not take
log = logging.getLogger(__name__)


class Asker:
    """Fills `presence`. `close` ends the thread."""

    def __init__(self, calls: Calls, presence: Presence) -> None:
        self._calls, self._presence = calls, presence
        self._asked: dict[bytes, float] = {}  # questions on their way, since when
        self._questions: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # its put takes no lock of Python's
        self._deletes: dict[bytes, None] = {}  # to be sent, in order
        self._deleting: frozenset[bytes] = frozenset()  # being sent
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="redis-asker", daemon=True)
        self.thread.start()

    def question(self, key: bytes, now: float) -> None:
        """To be asked, unless it is already. No lock."""
        if key not in self._asked and len(self._asked) < MAX_ASKED:
            self._asked[key] = now
            self._questions.put(key)

    def asking(self, key: bytes, now: float) -> bool:
        """Whether an answer is to be had soon. No lock."""
        since = self._asked.get(key)
        return since is not None and now - since < ASK_PATIENCE

    def forgetting(self, key: bytes) -> bool:
        """Whether it is deleted, and Redis may not know yet. No lock."""
        return key in self._deletes or key in self._deleting

    def waiting_deletes(self) -> int:
        return len(self._deletes) + len(self._deleting)

    def delete(self, keys: Sequence[bytes]) -> None:
        """To be forgotten. Waits until Redis has, `DELETE_PATIENCE` at most; not at all while it fails."""
        lock = self._calls.lock
        with lock:
            self._deletes.update(dict.fromkeys(keys))
            while len(self._deletes) > MAX_DELETES:
                del self._deletes[next(iter(self._deletes))]
                self._calls.totals.lost_deletes += 1
        self._presence.hear((key, False) for key in keys)
        self._questions.put(None)
        if keys and self._calls.breaker.closed:
            with lock:
                lock.wait_for(lambda: not any(map(self.forgetting, keys)), DELETE_PATIENCE)

    def keep(self, keys: Collection[bytes], patience: float) -> set[bytes]:
        """Before these are written: waits for deletes under way; takes back those that wait, and returns them."""
        lock = self._calls.lock
        with lock:
            lock.wait_for(lambda: self._deleting.isdisjoint(keys), patience)
            again = {key for key in keys if key in self._deletes}
            for key in again:
                del self._deletes[key]
            return again

    def check_integrity(self) -> None:
        assert len(self._deletes) <= MAX_DELETES and len(self._asked) <= MAX_ASKED + 64

    def close(self, patience: float) -> None:
        self._stop.set()
        self._questions.put(None)
        self.thread.join(patience)

    def _run(self) -> None:
        while not self._stop.is_set():
            keys = self._next()
            try:
                self._forget()
                if keys and self._calls.breaker.closed:
                    began = time.monotonic()
                    self._presence.hear(list(zip(keys, self._calls.exist(keys), strict=True)), began=began)
            except Unavailable:
                pass  # counted; who asks again asks anew
            except Exception:  # a fault of ours must not end asking for good
                log.exception("asking redis failed")
            finally:
                for key in keys:
                    self._asked.pop(key, None)

    def _next(self) -> list[bytes]:
        """What is to be asked now; empty after a tick, or when there is something to delete."""
        keys: list[bytes] = []
        try:
            key = self._questions.get(timeout=TICK)
            while key is not None:
                keys.append(key)
                if len(keys) == ASK_BATCH:
                    break
                key = self._questions.get_nowait()
        except queue.Empty:
            pass
        return keys

    def _forget(self) -> None:
        calls, lock = self._calls, self._calls.lock
        while self._deletes and calls.breaker.closed:
            with lock:
                keys = list(islice(self._deletes, ASK_BATCH))
                self._deleting = frozenset(keys)
                for key in keys:
                    del self._deletes[key]
            done = False
            try:
                answers = calls.ask([calls.name_of(key) for key in keys], "write_faults", b"UNLINK", b"?")
                done = True
                if refused := [answer for answer in answers if isinstance(answer, Refused)]:
                    calls.refusal(refused[0], DELETE)
                    calls.count("lost_deletes", len(refused))
                else:
                    calls.taken(DELETE)
            finally:
                self._presence.hear([(key, False) for key in keys])
                with lock:
                    if not done:
                        self._deletes = dict.fromkeys(keys) | self._deletes
                    self._deleting = frozenset()
                    lock.notify_all()
