"""What the daemon says of itself.

Names and labels, the rule of counting (KVB-25, as far as no connector is needed), health, and who may read it.
"""

from __future__ import annotations

import http.client
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.client.api import Client
from kvtier.errors import BY_CODE, Invalid, Stale
from kvtier.format.identity import request_context
from kvtier.protocol.frames import Verb
from kvtier.server.meters import BOUNDS, KINDS
from kvtier.server.metrics import CALLS, COUNTERS, GAUGES, TOP
from tests.support.daemon import Daemon, MiB, Raw, body, content_hash, description, hashes, put, until

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def fetch(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Watched(Daemon):
    """A daemon that exports."""

    def __init__(self, *arguments: str) -> None:
        self.port = free_port()
        super().__init__(64 * MiB, "--metrics", str(self.port), *arguments)

    def scrape(self) -> Samples:
        """Every sample by name and labels."""
        status, text = fetch(self.port, "/metrics")
        assert status == 200
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Watched]:
    with Watched() as running:
        yield running


# --- names and labels


def test_every_family_is_there_and_follows_the_conventions(daemon: Watched) -> None:
    with daemon.client() as client:
        put(client, client.register(description()), range(3))
    _, text = fetch(daemon.port, "/metrics")
    found = {family.name: family for family in text_string_to_metric_families(text)}
    for family in (*GAUGES, *COUNTERS, CALLS):
        assert re.fullmatch(r"kvtier_[a-z_]+", family.name) and family.help.endswith((".", "."))
        assert found[family.name].documentation == family.help
        assert all(set(sample.labels) - {"le"} == set(family.labels) for sample in found[family.name].samples)
    ours = {name for name in found if name.startswith("kvtier_")}
    assert ours == {family.name for family in (*GAUGES, *COUNTERS, CALLS)}, (
        "nothing is exported that the tables do not have"
    )
    assert all(found[family.name].type == "counter" for family in COUNTERS)
    assert all(sample.name.endswith("_total") for family in COUNTERS for sample in found[family.name].samples)
    assert found[CALLS.name].type == "histogram"
    assert "process_resident_memory_bytes" in found and "process_open_fds" in found


def test_labels_are_few_and_hold_nothing_of_a_caller(daemon: Watched) -> None:
    """A key, a hash, a salt, a token, a session id or a model's name would be a label per request, and a leak."""
    salt = "a-very-secret-salt"
    with daemon.client() as client:
        ns = client.register(description(model="org/secret-model"))
        put(client, ns, range(5), context=request_context(None, salt))
        client.lookup(ns, hashes([1, 2]), context=request_context(None, salt))
        _, text = fetch(daemon.port, "/metrics")
    for secret in (
        salt,
        "secret-model",
        request_context(None, salt).hex(),
        content_hash(1).hex(),
        content_hash(1).hex()[:16],
    ):
        assert secret not in text
    allowed = {
        "tier": r"cpu|lower|ssd|redis",
        "namespace": r"[0-9a-f]{16}|other",
        "transport": r"lane|grpc",
        "verb": r"[a-z]+",
        "kind": "|".join(KINDS.values()),
        "reason": r"absent|behind|miss|cold|cap|lost|failed|refused",
        "le": r"[0-9.e+-]+|\+Inf",
        "version": r"[0-9.]+",
        "python": r"[0-9.]+",
    }
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for label, text_value in sample.labels.items():
                assert re.fullmatch(allowed[label], text_value), (sample.name, label, text_value)
    assert set(KINDS) == set(BY_CODE) and len(set(KINDS.values())) == len(KINDS)


def test_most_namespaces_share_one_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest have a label of their own, the others one together.

    The sum over all labels and tiers is the total.
    """
    with Watched() as daemon, daemon.client() as client:
        for n in range(TOP + 5):
            ns = client.register(description(model=f"org/{n}"))
            put(client, ns, range(TOP + 5 - n))
        samples = daemon.scrape()
        blocks = {labels: n for (name, labels), n in samples.items() if name == "kvtier_blocks"}
        total = sum(range(1, TOP + 6))
        assert len(blocks) == TOP + 1 and sum(blocks.values()) == total == daemon.status()["known_blocks"]
        assert value(samples, "kvtier_blocks", tier="cpu", namespace="other") == sum(range(1, 6)), "the five smallest"
        first = client.register(description(model="org/0")).digest.hex()[:16]
        assert value(samples, "kvtier_blocks", tier="cpu", namespace=first) == TOP + 5
        nbytes = sum(n for (name, _), n in samples.items() if name == "kvtier_block_bytes")
        assert nbytes == total * ns.extents().block_bytes
        client.drop(first)
        samples = daemon.scrape()
        assert ("kvtier_blocks", (("namespace", first), ("tier", "cpu"))) not in samples, (
            "a dropped namespace has no label"
        )


# --- counting


def test_queries_are_counted_once_and_hits_are_what_was_known() -> None:
    """KVB-25: 10 requests of 10 blocks, 4 of each stored.

    One request opts out, so nothing is asked for it; "ask again" asks the daemon once.

    Nine lookups ask 90 keys and know 36; nine loads of the 4 known ones ask 36; one finds its blocks deleted meanwhile:
    32 served, 4 not.
    """
    with Watched() as daemon, daemon.client() as client:
        ns = client.register(description(512))
        requests = [range(100 * r, 100 * r + 10) for r in range(10)]
        for numbers in requests:
            put(client, ns, numbers[:4])
        before = daemon.scrape()
        for r, numbers in enumerate(requests[:9]):
            known = client.lookup(ns, hashes(numbers), deadline=5.0)
            assert known == 4
            if r == 8:
                assert client.delete(ns, hashes(numbers[:4])) == 4
            with client.lease(ns, hashes(numbers[:4]), deadline=5.0) as blocks:
                assert len(blocks) == (0 if r == 8 else 4)
        after = daemon.scrape()

        def grown(name: str, **labels: str) -> float:
            return value(after, name, **labels) - value(before, name, **labels)

        assert grown("kvtier_lookup_keys_total") == 90
        assert grown("kvtier_lookup_hits_total", tier="cpu") == 36
        assert (
            grown("kvtier_lookup_misses_total", reason="absent") == 9
            and grown("kvtier_lookup_misses_total", reason="behind") == 45
        )
        assert grown("kvtier_load_keys_total") == 36
        assert grown("kvtier_loaded_blocks_total", tier="cpu") == 32
        assert grown("kvtier_load_failures_total", reason="miss") == 4
        assert (
            grown("kvtier_load_failures_total", reason="cap") == grown("kvtier_load_failures_total", reason="cold") == 0
        )
        assert grown("kvtier_deleted_blocks_total") == 4
        daemon.kill()
        daemon.start()
        fresh = daemon.scrape()
        assert value(fresh, "kvtier_lookup_keys_total") == value(fresh, "kvtier_load_keys_total") == 0, (
            "a restart, and only that, begins anew"
        )
        assert value(fresh, "kvtier_start_time_seconds") > value(after, "kvtier_start_time_seconds")


def test_pins_are_no_loads_and_a_cap_is_a_reason(daemon: Watched) -> None:
    """What an operator pins is leased by the daemon itself.

    What a session's cap put off is counted as that and not as a miss.
    """
    with daemon.client() as client:
        ns = client.register(description(MiB))
        put(client, ns, range(20))
        before = daemon.scrape()
        assert client.pin(ns, hashes(range(3))) == 3
        pinned = daemon.scrape()
        assert value(pinned, "kvtier_pinned_blocks") == 3
        assert value(pinned, "kvtier_load_keys_total") == value(before, "kvtier_load_keys_total")
        assert client.unpin(ns, hashes(range(3))) == 3
        with client.lease(ns, hashes(range(20)), deadline=5.0) as blocks:
            held = daemon.scrape()
            assert 0 < len(blocks) < 20 and blocks.reason.startswith("full")
            assert (
                value(held, "kvtier_leased_blocks") == len(blocks)
                and value(held, "kvtier_leased_bytes") >= len(blocks) * MiB
            )
        asked = value(held, "kvtier_load_keys_total") - value(before, "kvtier_load_keys_total")
        capped = value(held, "kvtier_load_failures_total", reason="cap") - value(
            before, "kvtier_load_failures_total", reason="cap"
        )
        assert (asked, capped) == (20, 20 - len(blocks))
        assert client.delete(ns, hashes(range(20))) == 20
        until(lambda: value(daemon.scrape(), "kvtier_leased_blocks") == 0, "the lease is given back")


def test_calls_bytes_and_errors_are_counted_by_verb_and_kind(daemon: Watched) -> None:
    before = daemon.scrape()
    with Raw(daemon.socket) as raw:
        assert raw.call(Verb.LOOKUP, b"")[0] == Stale.code, "a handle nobody gave"
        assert raw.call(250, b"")[0] == Invalid.code
        assert raw.call(Verb.STATUS, b"")[0] == 0
    after = until(lambda: (s := daemon.scrape())["kvtier_lane_sockets", ()] == 0 and s, "the socket is closed")

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - before.get((name, tuple(sorted(labels.items()))), 0)

    assert grown("kvtier_errors_total", transport="lane", kind="stale") == 1
    assert grown("kvtier_errors_total", transport="lane", kind="invalid") == 1
    for verb in ("lookup", "status", "unknown", "hello"):
        assert grown("kvtier_call_seconds_count", transport="lane", verb=verb) == 1
        buckets = [
            n
            for (name, labels), n in after.items()
            if name == "kvtier_call_seconds_bucket" and ("verb", verb) in labels
        ]
        assert len(buckets) == len(BOUNDS) + 1 and sorted(buckets) == buckets
    assert grown("kvtier_received_bytes_total", transport="lane") == 3 * 24, "three empty bodies"
    assert grown("kvtier_sent_bytes_total", transport="lane") > 3 * 24


def test_counters_never_fall_while_everything_moves(daemon: Watched) -> None:
    """Four writers and readers on sockets of their own.

    Every scrape stands at or above the one before, histogram included.
    """
    stop = threading.Event()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with daemon.client() as client:
                ns = client.register(description(256, model=f"org/w{number}"))
                at = number << 40
                while not stop.is_set():
                    at += 8
                    put(client, ns, range(at, at + 8), deadline=20.0)
                    client.get(ns, hashes(range(at, at + 12)), deadline=20.0)
                    client.lookup(ns, hashes(range(at, at + 12)), deadline=20.0)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    try:
        last: Samples = {}
        for _ in range(40):
            samples = daemon.scrape()
            for (name, labels), n in samples.items():
                if name.endswith(("_total", "_count", "_sum", "_bucket")) and not name.startswith("process_"):
                    assert n >= last.get((name, labels), 0), (name, labels)
            last = samples
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert not failures


def test_the_limbo_and_reservation_gauges_follow_what_is_held(daemon: Watched) -> None:
    with daemon.client() as client:
        ns = client.register(description(1000))
        with client.fill(ns, hashes(range(900, 905)), deadline=5.0) as slots:
            held = daemon.scrape()
            assert value(held, "kvtier_reserved_blocks") == 5 == sum(slot is not None for slot in slots)
            assert value(held, "kvtier_reserved_bytes") == 5 * ns.extents().slot_bytes
        assert value(daemon.scrape(), "kvtier_reserved_blocks") == 0
    client = daemon.client()
    with client.lease(ns, hashes(range(900, 905)), deadline=5.0) as blocks:
        assert len(blocks) == 5
        client.close()
        limbo = until(lambda: (s := daemon.scrape())["kvtier_limbo_sessions", ()] == 1 and s, "the session is in limbo")
        assert value(limbo, "kvtier_limbo_bytes") == 5 * ns.extents().slot_bytes
    until(lambda: value(daemon.scrape(), "kvtier_limbo_bytes") == 0, "the last view is gone")


def test_no_secret_reaches_a_log_line() -> None:
    """Salts, contexts, hashes and session ids pass by.

    Lines about limbo and drops name tenants, pids and digests of descriptions.
    """
    salt = "a-very-secret-salt"
    context = request_context(None, salt)
    with Watched() as daemon:
        client = daemon.client()
        ns = client.register(description())
        put(client, ns, range(8), context=context)
        with client.lease(ns, hashes(range(8)), context=context, deadline=5.0) as blocks, Raw(daemon.socket) as raw:
            assert len(blocks) == 8
            sessions = [raw.session, client._connection._attachment.session]  # type: ignore[union-attr]
            client.close()
            until(lambda: "session in limbo" in daemon.log.read_text(), "the log tells of limbo")
        with daemon.client() as admin:
            admin.drop(ns.digest.hex())
        log = daemon.log.read_text()
    assert "namespace dropped" in log and ns.digest.hex()[:16] in log
    for secret in (salt, context.hex(), content_hash(3).hex(), *(session.hex() for session in sessions)):
        assert secret not in log


def test_a_lower_tier_shows_under_its_own_label(tmp_path: Path) -> None:
    """With an SSD below.

    Blocks of each tier by namespace, what is only below counts as a hit of the lower tiers, and what came up again.
    """
    with Watched("--ssd", f"path={tmp_path},size=64MiB") as daemon, daemon.client() as client:
        ns = client.register(description(1000))
        name = ns.digest.hex()[:16]
        put(client, ns, range(8))
        assert client.flush(ns, hashes(range(8)), deadline=20.0) == 8
        samples = daemon.scrape()
        for tier in ("cpu", "ssd"):
            assert value(samples, "kvtier_blocks", tier=tier, namespace=name) == 8
        assert value(samples, "kvtier_settled_blocks_total") == 8 and value(samples, "kvtier_settle_queue_blocks") == 0
        assert (
            0
            < value(samples, "kvtier_tier_used_bytes", tier="ssd")
            <= value(samples, "kvtier_tier_capacity_bytes", tier="ssd")
        )
        assert value(samples, "kvtier_tier_degraded", tier="ssd") == 0
    with Watched("--ssd", f"path={tmp_path},size=64MiB") as daemon, daemon.client() as client:
        ns = client.register(description(1000))
        assert client.lookup(ns, hashes(range(10)), deadline=5.0) == 8
        samples = daemon.scrape()
        assert (
            value(samples, "kvtier_lookup_hits_total", tier="lower") == 8
            and value(samples, "kvtier_lookup_hits_total", tier="cpu") == 0
        )
        assert client.prefetch(ns, hashes(range(8))) == 8
        until(lambda: len(client.get(ns, hashes(range(8)))) == 8, "they come up")
        samples = daemon.scrape()
        assert (
            value(samples, "kvtier_promoted_blocks_total") == 8
            and value(samples, "kvtier_blocks", tier="cpu", namespace=name) == 8
        )
        assert value(samples, "kvtier_promotion_failures_total", reason="lost") == 0


def test_bodies_are_not_looked_at() -> None:
    """The gauges cost the same however large blocks are: `Client` moves bytes, the daemon counts slots."""
    with Watched() as daemon, Client(daemon.address) as client:
        ns = client.register(description(MiB))
        assert client.put(ns, hashes([1]), [body(1, MiB)]) == 1
        assert value(daemon.scrape(), "kvtier_arena_used_bytes") == ns.extents().slot_bytes
