"""The calls that the gRPC server has under way, and what ends them: limits of a call and of a wait for its client.

A gRPC handler cannot wait with a deadline for a client that sends or takes nothing, and would keep its thread from
other calls. So one thread looks at all calls four times a second and cancels the late ones; the handler's wait then
ends with grpc.RpcError. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvtier.errors import Full
from kvtier.protocol.limits import LONGEST, PATIENCE

_LOOK_EVERY = 0.25


class Call:
    """One call. `until`: when it must have ended, by the client's deadline or ours; `waits`: since when it waits for
    its client, or 0. `patience` is how many seconds it may wait: few until it is known who calls.
    """

    __slots__ = ("context", "cut", "patience", "received", "sent", "until", "waits")

    def __init__(self, context: Any) -> None:
        self.context = context
        self.patience = PATIENCE
        self.until = time.monotonic() + min(LONGEST, context.time_remaining())
        self.waits = 0.0
        self.cut = False
        self.received = self.sent = 0  # bytes

    def next(self, requests: Iterator[bytes]) -> bytes | None:
        """The next message, None at the end. Raises grpc.RpcError if the client is gone or the call was cut."""
        self.waits = time.monotonic()
        raw = next(requests, None)
        self.waits = 0.0
        self.received += len(raw or b"")
        return raw

    def late(self, now: float) -> bool:
        """Whether it has to end."""
        waits = self.waits  # one look: the handler changes it meanwhile
        return now > self.until or (waits > 0 and now - waits > self.patience)


class Places:
    """A number of calls of one kind that may be under way at once, `each` of one tenant at most."""

    def __init__(self, most: int, each: int, what: str) -> None:
        self._most, self._each, self._what = most, each, what
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """How many there are now."""
        with self._lock:
            return self._taken.total()

    @contextmanager
    def take(self, tenant: str) -> Iterator[None]:
        """One place, until the end of the block. Raises Full, at once."""
        with self._lock:
            if self._taken.total() >= self._most:
                raise Full(f"full, retry: {self._most} {self._what} are under way")
            if self._taken[tenant] >= self._each:
                raise Full(f"full, retry: {self._each} {self._what} of this tenant are under way")
            self._taken[tenant] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[tenant] -= 1
                if not self._taken[tenant]:
                    del self._taken[tenant]


class InFlight:
    """All calls of a server. `cut` counts those that were ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[Call] = set()
        self.cut = 0
        self._stop = threading.Event()
        self._reaper = threading.Thread(target=self._reap, name="grpc-reaper", daemon=True)

    def __len__(self) -> int:
        return len(self._calls)

    def start(self) -> None:
        """Begins to end calls."""
        self._reaper.start()

    def alive(self) -> bool:
        """Whether the thread that ends calls runs."""
        return self._reaper.is_alive()

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._reaper.ident is not None:
            self._reaper.join(PATIENCE)

    @contextmanager
    def begin(self, context: Any) -> Iterator[Call]:
        """A call, until the end of the block."""
        call = Call(context)
        with self._lock:
            self._calls.add(call)
        try:
            yield call
        finally:
            with self._lock:
                self._calls.discard(call)

    def _reap(self) -> None:
        while not self._stop.wait(_LOOK_EVERY):
            now = time.monotonic()
            with self._lock:
                late = [call for call in self._calls if not call.cut and call.late(now)]
                self.cut += len(late)
            for call in late:
                call.cut = True
                call.context.cancel()
