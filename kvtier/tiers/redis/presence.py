"""What Redis was last heard to have: a bounded cache of yes and no by key, so that asking costs no I/O.

A yes counts for `HOLD` seconds and is worth asking anew after `FRESH`. A no counts for `ABSENT`: another daemon may put
the block at any moment. The oldest answers are forgotten first. Reads take no lock (dict reads are atomic); writes take
one of its own.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable

MAX_SEEN = 65_536  # answers; about 250 bytes each
HOLD, FRESH, ABSENT = 10.0, 2.0, 1.0  # seconds


class Presence:
    """Answers by key. A yes may carry the handle of the namespace and the block's bytes, where these are known."""

    def __init__(self, most: int = MAX_SEEN) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._answers: dict[bytes, tuple[bool, float, int]] = {}  # yes or no, when, handle (0: not known)
        self._by_handle: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: bytes, now: float) -> bool | None:
        """Yes, no, or None: not known any more."""
        answer = self._answers.get(key)
        if answer is None or now - answer[1] > (HOLD if answer[0] else ABSENT):
            return None
        return answer[0]

    def fresh(self, key: bytes, now: float) -> bool:
        """Whether a yes is so young that it need not be asked anew."""
        answer = self._answers.get(key)
        return answer is not None and answer[0] and now - answer[1] <= FRESH

    def hear(self, answers: Iterable[tuple[bytes, bool]], handle: int = 0, began: float = 0.0) -> None:
        """Keeps answers. A yes to a question that `began` before a no was heard does not count: it is older."""
        now = time.monotonic()
        with self._lock:
            for key, here in answers:
                before = self._answers.get(key)
                if here and before is not None and not before[0] and before[1] >= began > 0.0:
                    continue
                known = handle or (before[2] if before is not None else 0)
                self._remove(key)
                if len(self._answers) >= self._most:
                    self._remove(next(iter(self._answers)))
                self._answers[key] = (here, now, known)
                if here and known:
                    self._by_handle[known] = self._by_handle.get(known, 0) + 1

    def forget(self, handle: int) -> list[bytes]:
        """Turns all that is known of a namespace into no. Returns the keys."""
        with self._lock:
            mine = [key for key, (here, _, of) in self._answers.items() if here and of == handle]
        self.hear((key, False) for key in mine)
        return mine

    def handles(self) -> set[int]:
        with self._lock:
            return set(self._by_handle)

    def check_integrity(self) -> None:
        with self._lock:
            counts = Counter(handle for here, _, handle in self._answers.values() if here and handle)
            assert counts == self._by_handle
            assert len(self._answers) <= self._most

    def _remove(self, key: bytes) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None and answer[0] and answer[2]:
            left = self._by_handle[answer[2]] - 1
            if left:
                self._by_handle[answer[2]] = left
            else:
                del self._by_handle[answer[2]]
