"""What callers hold: accounts under tenants, and writers' reservations. Plain data, changed under the store's lock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.store.namespaces import Namespace


@dataclass(slots=True, eq=False)
class Tenant:
    """What all sessions of one tenant hold, in bytes; a slot held by several of them counts once."""

    name: str
    held: int = 0


@dataclass(slots=True, eq=False)
class Account:
    """What one session holds, in bytes of slots leased and reserved."""

    tenant: Tenant
    held: int = 0
    own: bool = False  # the daemon's own (pins): its leases are not counted as loads
    leased: set[int] = field(default_factory=set)  # rows, of movers only: a session keeps its own
    reserved: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Reservation:
    """Slots taken for a writer. `rows[i]` is None where key i was present already or entry i is finished; `lost` were
    aborted or dropped."""

    namespace: Namespace
    nbytes: int
    rows: list[int | None]
    pages: list[int]
    headers: list[bytes]
    lost: set[int] = field(default_factory=set)

    @property
    def open(self) -> bool:
        return any(row is not None for row in self.rows)

    def stored(self, indices: Sequence[int]) -> int:
        """How many of these entries, all finished, are stored: sealed by anyone, or present from the start."""
        return len(indices) - sum(i in self.lost for i in indices) if self.lost else len(indices)
