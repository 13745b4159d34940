"""What the daemon exports: gauges read at the moment of a scrape, counters that never fall, in a registry of its own.

Labels are few and fixed: tier, transport, verb, kind, reason, and the first 16 hex digits of a description's digest
for the namespaces that hold most bytes (`TOP`), the rest together as "other". Never a key, hash, salt, token, tenant
or request id. A scrape takes the store's lock for microseconds; it is called by the endpoint's threads, never by a
transport's. docs/watch.md lists every family, and a test compares.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.protocol.stops import Stop
from kvtier.server.meters import BOUNDS, KINDS
from kvtier.server.verbs import Service
from kvtier.tiers.tier import Tier
from kvtier.version import __version__

TOP = 32  # namespaces with a label of their own
CPU = "cpu"  # the arena as a tier
OTHER = "other"


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
    Family("kvtier_leased_blocks", "leased_blocks", "Blocks that clients are reading."),
    Family("kvtier_leased_bytes", "leased_bytes", "Their slots."),
    Family("kvtier_reserved_blocks", "reserved_blocks", "Slots that are being filled."),
    Family("kvtier_reserved_bytes", "reserved_bytes", "Their bytes."),
    Family("kvtier_pinned_blocks", "pinned_blocks", "Blocks that an operator has pinned."),
    Family("kvtier_pinned_bytes", "pinned_bytes", "Their slots."),
    Family("kvtier_sessions", "sessions", "Clients with a session."),
    Family("kvtier_lane_sockets", "lane_sockets", "Open sockets of the Unix transport."),
    Family("kvtier_lane_strangers", "lane_strangers", "Of them without a valid hello yet."),
    Family("kvtier_grpc_calls", "grpc_calls", "gRPC calls under way."),
    Family("kvtier_grpc_bulk_calls", "grpc_bulk_calls", "Puts and gets among them."),
    Family("kvtier_limbo_sessions", "limbo_sessions",
        "Sessions without a socket whose process still lives and may touch slots."),
    Family("kvtier_limbo_bytes", "limbo_bytes", "Slots that wait for the end of such processes."),
    Family("kvtier_tier_capacity_bytes", "", "Capacity of a lower tier.", ("tier",)),
    Family("kvtier_tier_used_bytes", "", "Of it taken.", ("tier",)),
    Family("kvtier_tier_degraded", "", "1 while faults or lack of space keep blocks out of a lower tier.", ("tier",)),
    Family("kvtier_tier_breaker", "", "Whether a remote tier is called: 0 yes, 1 a trial is under way, 2 no.",
        ("tier",)),
    Family("kvtier_promoting_blocks", "promoting_blocks", "Blocks on their way up from a lower tier."),
    Family("kvtier_settle_queue_blocks", "settle_queue_blocks",
        "Blocks waiting to be copied to a lower tier; 0 where there is none."),
    Family("kvtier_ready", "", "1 while calls are accepted and every background thread runs."),
    Family("kvtier_start_time_seconds", "start_time", "When this daemon started, unix time."),
    Family("kvtier_build_info", "", "Always 1; what is running.", ("version", "python")),
)  # fmt: skip
COUNTERS = (
    Family("kvtier_lookup_keys", "lookup_keys_total", "Keys asked for by lookups."),
    Family("kvtier_lookup_hits", "",
        "Leading keys of lookups that were known: in the arena (cpu), or behind the first that is only below (lower).",
        ("tier",)),
    Family("kvtier_lookup_misses", "",
        "Keys of lookups that were no hit: absent (where a lookup ended), behind (after it).", ("reason",)),
    Family("kvtier_load_keys", "lease_keys_total", "Keys asked for by leases and gets."),
    Family("kvtier_loaded_blocks", "leased_blocks_total", "Blocks that leases and gets were given.", ("tier",)),
    Family("kvtier_loaded_bytes", "leased_bytes_total", "Their slots.", ("tier",)),
    Family("kvtier_load_failures", "", "Keys that leases and gets were not given, by reason: miss, cold, cap.",
        ("reason",)),
    Family("kvtier_sealed_blocks", "sealed_blocks_total", "Blocks stored."),
    Family("kvtier_sealed_bytes", "sealed_bytes_total", "Their bytes."),
    Family("kvtier_already_blocks", "already_blocks_total", "Blocks written in vain: another writer was first."),
    Family("kvtier_aborted_blocks", "aborted_blocks_total", "Slots given back without being sealed."),
    Family("kvtier_evicted_blocks", "", "Blocks forgotten to make room.", ("tier",)),
    Family("kvtier_evicted_bytes", "evicted_bytes_total", "Bytes of those in the arena.", ("tier",)),
    Family("kvtier_expired_blocks", "",
        "Blocks forgotten because they were not used for their namespace's time-to-live.", ("tier",)),
    Family("kvtier_deleted_blocks", "deleted_blocks_total", "Blocks forgotten on demand."),
    Family("kvtier_drained_slabs", "drained_slabs_total", "Slabs emptied for another block size."),
    Family("kvtier_full", "full_total", "Reservations refused for want of room or by a cap."),
    Family("kvtier_bad_headers", "bad_headers_total", "Blocks dropped because a writer had changed their header."),
    Family("kvtier_lane_refused", "lane_refused", "Sockets of the Unix transport closed at once: too many."),
    Family("kvtier_grpc_cut", "grpc_cut_total", "gRPC calls ended by the daemon: they stood still or took too long."),
    Family("kvtier_settled_blocks", "settled_blocks_total", "Blocks copied to a lower tier."),
    Family("kvtier_settled_bytes", "settled_bytes_total", "Their bytes."),
    Family("kvtier_settle_dropped_blocks", "settle_dropped_blocks_total",
        "Blocks left out: the queue was full, or the budget spent."),
    Family("kvtier_settle_refused_blocks", "settle_refused_blocks_total", "Blocks that a lower tier did not take."),
    Family("kvtier_promoted_blocks", "promoted_blocks_total", "Blocks copied up from a lower tier."),
    Family("kvtier_promoted_bytes", "promoted_bytes_total", "Their bytes."),
    Family("kvtier_promotion_failures", "",
        "Blocks that did not come up, by reason: lost (failed their check), failed, refused (no room).", ("reason",)),
    Family("kvtier_tier_lost_blocks", "", "Blocks of a lower tier that failed their check.", ("tier",)),
    Family("kvtier_tier_faults", "", "Reads and writes that a lower tier's medium failed.", ("tier",)),
    Family("kvtier_tier_missed_blocks", "", "Blocks that a lower tier was thought to have and no longer had.",
        ("tier",)),
    Family("kvtier_errors", "", "Calls that ended with an error, by kind.", ("transport", "kind")),
    Family("kvtier_received_bytes", "",
        "Bytes of requests; what moves through the mapped arena is in sealed and loaded bytes.", ("transport",)),
    Family("kvtier_sent_bytes", "", "Bytes of answers.", ("transport",)),
)  # fmt: skip
_BELOW = (
    "promoting_blocks", "settle_queue_blocks", "settled_blocks_total", "settled_bytes_total",
    "settle_dropped_blocks_total", "settle_refused_blocks_total", "promoted_blocks_total", "promoted_bytes_total",
    "promotion_lost_blocks_total", "promotion_failed_blocks_total", "promotion_refused_blocks_total",
)  # fmt: skip
_NOTHING_BELOW = dict.fromkeys(_BELOW, 0)  # what the report lacks where there is no lower tier
Report = Mapping[str, Any]
Values = dict[str, dict[tuple[str, ...], float]]  # by family: labels -> value
CALLS = Family(
    "kvtier_call_seconds", "", "From a whole request to its answer, without the wire.", ("transport", "verb")
)


class Exporter(Collector):
    """Reads everything at a scrape. `transports`: gauges of both transports; `ready`: whether the daemon is."""

    def __init__(
        self, service: Service, transports: Callable[[], Mapping[str, int]], ready: Callable[[], bool]
    ) -> None:
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
        report: dict[str, Any] = {**_NOTHING_BELOW, **self._service.report(), **self._transports()}
        computed = {**self._blocks(), **self._counted(report), **self._lower(report), **self._calls_of_transports()}
        for family in GAUGES:
            yield _fill(GaugeMetricFamily(family.name, family.help, labels=family.labels), family, report, computed)
        for family in COUNTERS:
            yield _fill(CounterMetricFamily(family.name, family.help, labels=family.labels), family, report, computed)
        yield self._histogram()

    def _blocks(self) -> Values:
        """Blocks and bytes by tier and namespace: the `TOP` with most bytes by name, the others in one sum."""
        store = self._service.store
        names = {namespace.handle: namespace.description_digest.hex()[:16] for namespace in store.namespaces.all()}
        lower = [(tier.name, tier.blocks_by_namespace()) for tier in self._tiers()]
        found = [(CPU, store.blocks_by_namespace()), *lower]
        ranked: Counter[str] = Counter()
        for _, by_handle in found:
            for handle, (_, nbytes) in by_handle.items():
                ranked[names.get(handle, OTHER)] += nbytes  # other: dropped, its blocks are going
        ranked.pop(OTHER, None)
        named = {name for name, _ in ranked.most_common(TOP)}
        blocks: dict[tuple[str, ...], float] = {(tier, OTHER): 0 for tier, _ in found}
        total = dict(blocks)
        for tier, by_handle in found:
            for handle, (n, nbytes) in by_handle.items():
                name = names.get(handle, OTHER)
                label = (tier, name if name in named else OTHER)
                blocks[label] = blocks.get(label, 0) + n
                total[label] = total.get(label, 0) + nbytes
        return {"kvtier_blocks": blocks, "kvtier_block_bytes": total}

    def _tiers(self) -> list[Tier]:
        tiering = self._service.tiering
        return tiering.tiers if tiering is not None else []

    def _lower(self, report: Report) -> Values:
        """What each tier below the arena says of itself, and where lookups and promotions ended there."""
        below = {tier.name: tier.gauges() for tier in self._tiers()}

        def each(*names: str) -> dict[tuple[str, ...], float]:
            return {(tier,): sum(said.get(name, 0) for name in names) for tier, said in below.items()}

        warm, reasons = report["lookup_warm_total"], ("lost", "failed", "refused")
        failures: dict[tuple[str, ...], float] = {
            (reason,): report[f"promotion_{reason}_blocks_total"] for reason in reasons
        }
        return {
            "kvtier_tier_capacity_bytes": each("capacity_bytes"),
            "kvtier_tier_used_bytes": each("used_bytes"),
            "kvtier_tier_degraded": each("degraded"),
            "kvtier_tier_breaker": each("breaker"),
            "kvtier_tier_missed_blocks": each("missed_blocks_total"),
            "kvtier_tier_lost_blocks": each("lost_blocks_total"),
            "kvtier_tier_faults": each("read_faults_total", "write_faults_total"),
            "kvtier_evicted_blocks": {(CPU,): report["evicted_blocks_total"], **each("evicted_blocks_total")},
            "kvtier_expired_blocks": {(CPU,): report["expired_blocks_total"], **each("expired_blocks_total")},
            "kvtier_lookup_hits": {(CPU,): warm, ("lower",): max(0, report["lookup_hits_total"] - warm)},
            "kvtier_promotion_failures": failures,
        }

    def _counted(self, report: Report) -> Values:
        absent = report["lookup_misses_total"]
        behind = max(0, report["lookup_keys_total"] - report["lookup_hits_total"] - absent)
        unserved = self._service.store.counters.unserved
        miss, cold, cap = unserved[Stop.MISS], unserved[Stop.COLD], unserved[Stop.CAP]
        return {
            "kvtier_lookup_misses": {("absent",): absent, ("behind",): behind},
            "kvtier_load_failures": {("miss",): miss, ("cold",): cold, ("cap",): cap},
            "kvtier_ready": {(): float(self._ready())},
            "kvtier_build_info": {(__version__, ".".join(map(str, sys.version_info[:3]))): 1},
        }

    def _calls_of_transports(self) -> Values:
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


def _fill(metric: GaugeMetricFamily | CounterMetricFamily, family: Family, report: Report, computed: Values) -> Metric:
    if family.key:
        # The one label of such a family is the tier.
        metric.add_metric((CPU,) if family.labels else (), report[family.key])
    else:
        for labels, value in sorted(computed[family.name].items()):
            metric.add_metric(labels, value)
    return metric
