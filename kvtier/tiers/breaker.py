"""Whether to call a service that fails: closed (calls go), open (none do), half-open (one trial is under way).

Some failures in a row open it. After a pause, longer each time up to a limit, its owner makes one trial in a thread of
its own: no caller ever is the trial, so no caller waits for a service that was down a moment ago. Thread-safe; `closed`
is read without a lock.
"""

from __future__ import annotations

import random
import threading
import time

AFTER = 2  # failures in a row. Each may have taken a whole timeout
# Seconds until the next trial: first and longest; with a trial of 1 s a service that is back is used again within 6 s.
PAUSE = (0.25, 4.0)
CLOSED, HALF_OPEN, OPEN = 0, 1, 2


class Breaker:
    """Of one service."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = self._trials = 0
        self._not_before = 0.0
        self.state = CLOSED
        self.opened_total = 0
        self.reason = ""

    @property
    def closed(self) -> bool:
        return self.state == CLOSED

    def good(self) -> bool:
        """A call was answered. Whether that closed it."""
        if self.state == CLOSED and not self._failures:
            return False
        with self._lock:
            was, self.state, self._failures, self._trials, self.reason = self.state, CLOSED, 0, 0, ""
            return was != CLOSED

    def bad(self, reason: str, *, trial: bool = False) -> bool:
        """A call was not answered. Whether that opened it. While it is open only trials count: others began before."""
        with self._lock:
            if self.state != CLOSED and not trial:
                return False
            self._failures += 1
            self.reason = reason
            if not trial and self._failures < AFTER:
                return False
            first, longest = PAUSE
            pause = min(longest, first * 2.0 ** min(self._trials, 10)) * random.uniform(0.75, 1.0)
            self._trials += 1
            self._not_before = time.monotonic() + pause
            opened = self.state == CLOSED
            self.state = OPEN
            self.opened_total += opened
            return opened

    def due(self) -> bool:
        """Whether a trial is due; then it is half-open until `good` or `bad(..., trial=True)`."""
        with self._lock:
            if self.state != OPEN or time.monotonic() < self._not_before:
                return False
            self.state = HALF_OPEN
            return True
