"""What a lower tier must do. It keeps whole blocks, byte for byte as they stand in the arena, and may fail at any time.

Failure is a miss. `write` and `read` may block on a disk or a network within the deadline they are given; they raise
OSError, Lost or Unavailable and the caller counts it. Tiers never encode, never merge and never call upwards. All
methods are thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.store.namespaces import Namespace


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A sealed block on its way down: its whole slot, of which the first `nbytes`, with `checksum`, are the block."""

    key: bytes
    namespace: Namespace
    slot: memoryview
    nbytes: int
    checksum: int


def find_any(tiers: Sequence[Tier], keys: Sequence[bytes]) -> list[bool]:
    """For each key whether one of these tiers has it; each is asked only for what is still missing. No I/O."""
    found = [False] * len(keys)
    for tier in tiers:
        if missing := [key for key, here in zip(keys, found, strict=True) if not here]:
            answers = iter(tier.find(missing))
            found = [here or next(answers) for here in found]
    return found


class Tier(Protocol):
    """One lower tier."""

    name: str

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether the block is here, as far as is known without waiting. Does not modify, does no I/O. A
        tier that would have to ask over a network asks in the background; `unsure` is true of such keys until the
        answer is there."""

    def unsure(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether `find` may say more in some milliseconds. Always false where a tier knows what it holds.
        No I/O."""

    def write(self, blocks: Sequence[Outgoing]) -> list[bool]:
        """Keeps blocks, evicting by its own rules. For each whether it is here now; no after a fault. Blocks on I/O."""

    def read(self, key: bytes, slot: memoryview, nbytes: int) -> int:
        """Reads a block of `nbytes` into `slot` and returns its checksum, verified. Blocks on I/O. Raises NotFound if
        it is not here, Lost if it is not whole (it is forgotten then), Unavailable for a fault that may pass."""

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forgets these blocks; returns how many were known."""

    def drop(self, namespace: Namespace) -> int:
        """Forgets all blocks of a namespace; returns how many."""

    def handles(self) -> set[int]:
        """Handles of the namespaces whose blocks it holds, as far as it knows."""

    def blocks_by_namespace(self) -> dict[int, tuple[int, int]]:
        """{handle: (blocks, their bytes)}; empty where the tier cannot know. No I/O."""

    def gauges(self) -> dict[str, int]:
        """Numbers for operators: blocks, bytes, capacity, degraded (0 or 1), and counters ending in _total."""

    def fault(self) -> str:
        """What is wrong now, for people; "" if nothing is."""

    def check_integrity(self) -> None:
        """Asserts that what it holds in memory agrees with itself; slow."""

    def close(self) -> None:
        """Ends threads and files. Calls after this fail."""
