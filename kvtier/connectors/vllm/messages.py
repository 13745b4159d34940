"""What the halves tell each other: plans go to every worker with each step, reports come back with its output."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvtier.connectors.common.jobs import Load, Save
from kvtier.connectors.common.ranks import RankId
from kvtier.format.layout import Range


@dataclass
class StepPlan(base.KVConnectorMetadata):
    """One step. `fence`: engine blocks that it hands to a new owner. `description`: canonical bytes of the namespace,
    and `ranges`, what each rank holds of it: once, in the first plan that has them. `idle`: it computes nothing."""

    description: bytes = b""
    ranges: dict[RankId, list[Range | None]] = field(default_factory=dict)
    fence: set[int] = field(default_factory=set)
    loads: list[Load] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False


@dataclass
class StepReport(base.KVConnectorWorkerMetadata):
    """What became of loads and saves: id -> (ranks that say so, the fewest leading blocks any of them has)."""

    loads: dict[int, tuple[int, int]] = field(default_factory=dict)
    saves: dict[int, tuple[int, int]] = field(default_factory=dict)

    def aggregate(self, other: base.KVConnectorWorkerMetadata) -> StepReport:
        """Merges another rank's report of the same step into this one."""
        assert isinstance(other, StepReport)
        for mine, theirs in ((self.loads, other.loads), (self.saves, other.saves)):
            for id_, (ranks, blocks) in theirs.items():
                before = mine.get(id_)
                mine[id_] = (ranks, blocks) if before is None else (before[0] + ranks, min(before[1], blocks))
        return self


@dataclass
class Handshake(base.KVConnectorHandshakeMetadata):
    """What one rank has really loaded, as the JSON of `engine_caches.RankCaches.report`."""

    json: str
