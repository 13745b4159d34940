"""What the connector counts, in vLLM's form: sums over ranks and steps, and the Prometheus counters made of them.

Values travel as one flat dict: "name" or "name:label".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier.connectors.common.counters import COUNTERS, GAUGES


@dataclass
class KvtierStats(KVConnectorStats):
    """Sums since the last collection; gauges as they stand."""

    data: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: float = 1, label: str = "") -> None:
        """Counts."""
        key = f"{name}:{label}" if label else name
        self.data[key] = self.data.get(key, 0) + value

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KvtierStats:
        for key, value in other.data.items():
            gauge = key.partition(":")[0] in GAUGES
            self.data[key] = min(self.data.get(key, value), value) if gauge else self.data.get(key, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        names = ("hit_tokens", "load_served_blocks", "load_failed_blocks", "save_blocks")
        return {name: self.data[name] for name in names if self.data.get(name)}

    def is_empty(self) -> bool:
        return not self.data


class KvtierPromMetrics(KVConnectorPromMetrics):
    """vllm:kvtier_* counters and gauges, per engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._metrics: dict[str, Any] = {}
        for table, kind in ((COUNTERS, Counter), (GAUGES, Gauge)):
            for name, (meaning, label) in table.items():
                options: dict[str, Any] = {"multiprocess_mode": "mostrecent"} if kind is Gauge else {}
                options |= {"documentation": meaning, "labelnames": [*labelnames, label] if label else labelnames}
                self._metrics[name] = metric_types[kind](name=f"vllm:kvtier_{name}", **options)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one collection's sums."""
        for key, value in transfer_stats_data.items():
            name, _, label = key.partition(":")
            metric = self._metrics.get(name)
            if metric is not None:
                metric = metric.labels(*self.per_engine_labelvalues[engine_idx], *([label] if label else []))
                metric.set(value) if name in GAUGES else metric.inc(value)
