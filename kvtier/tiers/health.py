"""Which kinds of calls to a tier's medium fail now: one gauge, a log line at beginning and end, pauses in between.

A tier is degraded while any kind fails. `write` faults also pause writing, 1 s at first and 30 s at most, so that a
broken disk costs one try and not one a block. Not thread-safe: the tier holds its lock.
"""

from __future__ import annotations

import logging
import time

PAUSE = (1.0, 30.0)  # seconds: first and longest
WRITE, READ, SPACE, INDEX = "write", "read", "space", "index"
log = logging.getLogger(__name__)


class Health:
    """Of the tier called `name`. pause: seconds, first and longest."""

    def __init__(self, name: str, pause: tuple[float, float] | None = None) -> None:
        self._name, self._pause = name, pause or PAUSE
        self._faults: dict[str, str] = {}
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    @property
    def degraded(self) -> bool:
        return bool(self._faults)

    @property
    def fault(self) -> str:
        """What failed first, for people; "" while all is well."""
        return next(iter(self._faults.values()), "")

    def paused(self, kind: str) -> bool:
        """Whether calls of this kind are to be left out for now."""
        return time.monotonic() < self._not_before.get(kind, 0.0)

    def bad(self, kind: str, reason: str, pause: bool = True) -> None:
        """A call of this kind failed."""
        if not self._faults:
            log.warning("tier degraded", extra={"fields": {"tier": self._name, "reason": reason}})
        self._faults.setdefault(kind, reason)
        if pause:
            first, longest = self._pause
            failures = self._failures[kind] = self._failures.get(kind, 0) + 1
            self._not_before[kind] = time.monotonic() + min(longest, first * 2.0 ** min(failures - 1, 10))

    def good(self, kind: str) -> None:
        """A call of this kind worked. Cheap while all is well."""
        if not self._faults:
            return
        self._failures.pop(kind, None)
        self._not_before.pop(kind, None)
        if self._faults.pop(kind, None) is not None and not self._faults:
            log.warning("tier recovered", extra={"fields": {"tier": self._name}})
