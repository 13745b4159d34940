"""What the daemon exports: gauges read at the moment of a scrape, counters that never fall, in a registry of its own.

Labels are few and fixed: tier, transport, verb, kind, reason, and the first 16 hex digits of a description's digest for the namespaces that hold most
bytes (`TOP`), the rest together as "other". Never a key, hash, salt, token, tenant or request id. A scrape takes the store's lock for microseconds;
it is called by the endpoint's threads, never by a transport's. docs/operations.md lists every family, and a test compares.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.meters import BOUNDS, KINDS
from kvtier.service import Service
from kvtier.store import CAP, COLD, MISS
from kvtier.version import __version__

TOP = 32  # namespaces with a label of their own
CPU = "cpu"  # the arena as a tier


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its name without suffix, the key of `Service.report` it is read from ("": computed), help, labels."""

    name: str
    key: str
    help: str
    labels: tuple[str, ...] = ()


GAUGES = (
    Family("kvtier_arena_bytes", "arena_bytes", "Capacity for blocks."),
    Family("kvtier_arena_ready_bytes", "arena_ready_bytes", "Of it backed by memory already."),
    Family("kvtier_arena_used_bytes", "used_bytes", "Slots taken, their padding included."),
    Family("kvtier_blocks", "", "Sealed blocks.", ("tier", "namespace")),
    Family("kvtier_block_bytes", "", "Bytes of sealed blocks, without padding.", ("tier", "namespace")),
    Family("kvtier_namespaces", "namespaces", "Namespaces registered."),
    Family("kvtier_leased_blocks", "leased_blocks", "Blocks that somebody reads."),
    Family("kvtier_leased_bytes", "leased_bytes", "Their slots."),
    Family("kvtier_reserved_blocks", "reserved_blocks", "Slots that are being filled."),
    Family("kvtier_reserved_bytes", "reserved_bytes", "Their bytes."),
    Family("kvtier_pinned_blocks", "pinned_blocks", "Blocks that an operator has pinned."),
    Family("kvtier_pinned_bytes", "pinned_bytes", "Their slots."),
    Family("kvtier_sessions", "sessions", "Clients with a session."),
    Family("kvtier_lane_sockets", "lane_sockets", "Open lane sockets."),
    Family("kvtier_lane_strangers", "lane_strangers", "Lane sockets that have not said a valid hello yet."),
    Family("kvtier_grpc_calls", "grpc_calls", "gRPC calls under way."),
    Family("kvtier_grpc_bulk_calls", "grpc_bulk_calls", "Puts and gets among them."),
    Family("kvtier_limbo_sessions", "limbo_sessions", "Sessions without a socket whose process still lives and may touch slots."),
    Family("kvtier_limbo_bytes", "limbo_bytes", "Slots that wait for the end of such processes."),
    Family("kvtier_settle_queue_blocks", "settle_queue_blocks", "Blocks waiting to be copied to a lower tier; 0 where there is none."),
    Family("kvtier_ready", "", "1 while calls are accepted and every background thread runs."),
    Family("kvtier_start_time_seconds", "start_time", "When this daemon started, unix time."),
    Family("kvtier_build_info", "", "Always 1; what is running.", ("version", "python")),
)
COUNTERS = (
    Family("kvtier_lookup_keys", "lookup_keys_total", "Keys asked for by lookups."),
    Family("kvtier_lookup_hits", "lookup_hits_total", "Leading keys of lookups that were known.", ("tier",)),
    Family("kvtier_lookup_misses", "", "Keys of lookups that were no hit: absent (where a lookup ended), behind (after it).", ("reason",)),
    Family("kvtier_load_keys", "lease_keys_total", "Keys asked for by leases and gets."),
    Family("kvtier_loaded_blocks", "leased_blocks_total", "Blocks that leases and gets were given.", ("tier",)),
    Family("kvtier_loaded_bytes", "leased_bytes_total", "Their slots.", ("tier",)),
    Family("kvtier_load_failures", "", "Keys that leases and gets were not given, by reason: miss, cold, cap.", ("reason",)),
    Family("kvtier_sealed_blocks", "sealed_blocks_total", "Blocks stored."),
    Family("kvtier_sealed_bytes", "sealed_bytes_total", "Their bytes."),
    Family("kvtier_already_blocks", "already_blocks_total", "Blocks written in vain: another writer was first."),
    Family("kvtier_aborted_blocks", "aborted_blocks_total", "Slots given back without being sealed."),
    Family("kvtier_evicted_blocks", "evicted_blocks_total", "Blocks forgotten to make room.", ("tier",)),
    Family("kvtier_evicted_bytes", "evicted_bytes_total", "Their bytes.", ("tier",)),
    Family("kvtier_deleted_blocks", "deleted_blocks_total", "Blocks forgotten on demand."),
    Family("kvtier_drained_slabs", "drained_slabs_total", "Slabs emptied for another block size."),
    Family("kvtier_full", "full_total", "Reservations refused for want of room or by a cap."),
    Family("kvtier_bad_headers", "bad_headers_total", "Blocks dropped because a writer had changed their header."),
    Family("kvtier_lane_refused", "lane_refused", "Lane sockets closed at once: too many."),
    Family("kvtier_grpc_cut", "grpc_cut_total", "gRPC calls ended by the daemon: they stood still or took too long."),
    Family("kvtier_errors", "", "Calls that ended with an error, by kind.", ("transport", "kind")),
    Family("kvtier_received_bytes", "", "Bytes of requests; what moves through the mapped arena is in sealed and loaded bytes.", ("transport",)),
    Family("kvtier_sent_bytes", "", "Bytes of answers.", ("transport",)),
)
CALLS = Family("kvtier_call_seconds", "", "From a whole request to its answer, without the wire.", ("transport", "verb"))


class Exporter(Collector):
    """Reads everything at a scrape. `transports` are what lane and door say of themselves; `ready` is whether the daemon is."""

    def __init__(self, service: Service, transports: Callable[[], Mapping[str, int]], ready: Callable[[], bool]) -> None:
        self._service = service
        self._transports = transports
        self._ready = ready
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def page(self) -> bytes:
        """The text of a scrape."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known to be unique, and registering must not read the store."""
        return []

    def collect(self) -> Iterator[Metric]:
        report: dict[str, Any] = {"settle_queue_blocks": 0, **self._service.report(), **self._transports()}
        computed = {**self._blocks(), **self._counted(report), **self._calls_of_transports()}
        for family in GAUGES:
            yield _fill(GaugeMetricFamily(family.name, family.help, labels=family.labels), family, report, computed)
        for family in COUNTERS:
            yield _fill(CounterMetricFamily(family.name, family.help, labels=family.labels), family, report, computed)
        yield self._histogram()

    def _blocks(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Blocks and bytes by namespace: the `TOP` with most bytes by name, the others in one sum."""
        store = self._service.store
        names = {namespace.handle: namespace.description_digest.hex()[:16] for namespace in store.namespaces.all()}
        sums: dict[str, list[int]] = {}
        for handle, (blocks, nbytes) in store.blocks_by_namespace().items():
            entry = sums.setdefault(names.get(handle, "other"), [0, 0])  # other: dropped, its blocks are going
            entry[0] += blocks
            entry[1] += nbytes
        ranked = sorted(sums, key=lambda name: (name == "other", -sums[name][1], name))
        counts: dict[tuple[str, ...], float] = {(CPU, "other"): 0}
        total: dict[tuple[str, ...], float] = {(CPU, "other"): 0}
        for place, name in enumerate(ranked):
            label = (CPU, name if place < TOP else "other")
            counts[label] = counts.get(label, 0) + sums[name][0]
            total[label] = total.get(label, 0) + sums[name][1]
        return {"kvtier_blocks": counts, "kvtier_block_bytes": total}

    def _counted(self, report: Mapping[str, Any]) -> dict[str, dict[tuple[str, ...], float]]:
        absent = report["lookup_misses_total"]
        behind = max(0, report["lookup_keys_total"] - report["lookup_hits_total"] - absent)
        unserved = self._service.store.counters.unserved
        return {
            "kvtier_lookup_misses": {("absent",): absent, ("behind",): behind},
            "kvtier_load_failures": {("miss",): unserved[MISS], ("cold",): unserved[COLD], ("cap",): unserved[CAP]},
            "kvtier_ready": {(): float(self._ready())},
            "kvtier_build_info": {(__version__, ".".join(map(str, sys.version_info[:3]))): 1},
        }

    def _calls_of_transports(self) -> dict[str, dict[tuple[str, ...], float]]:
        errors: dict[tuple[str, ...], float] = {}
        received: dict[tuple[str, ...], float] = {}
        sent: dict[tuple[str, ...], float] = {}
        for series in self._service.meters.snapshots():
            transport = series.transport
            received[transport,] = received.get((transport,), 0) + series.received
            sent[transport,] = sent.get((transport,), 0) + series.sent
            for code, kind in KINDS.items():
                errors[transport, kind] = errors.get((transport, kind), 0) + series.ended[code]
        return {"kvtier_errors": errors, "kvtier_received_bytes": received, "kvtier_sent_bytes": sent}

    def _histogram(self) -> Metric:
        histogram = HistogramMetricFamily(CALLS.name, CALLS.help, labels=CALLS.labels)
        for series in self._service.meters.snapshots():
            if not any(series.buckets):
                continue
            total, buckets = 0, []
            for bound, n in zip((*map(str, BOUNDS), "+Inf"), series.buckets, strict=True):
                total += n
                buckets.append((bound, total))
            histogram.add_metric((series.transport, series.verb), buckets, series.seconds)
        return histogram


def _fill(
    metric: GaugeMetricFamily | CounterMetricFamily,
    family: Family,
    report: Mapping[str, Any],
    computed: Mapping[str, Mapping[tuple[str, ...], float]],
) -> Metric:
    if family.key:
        metric.add_metric((CPU,) if family.labels else (), report[family.key])  # the one label of such a family is the tier
    else:
        for labels, value in sorted(computed[family.name].items()):
            metric.add_metric(labels, value)
    return metric
