"""Counting of calls: nothing is lost between threads, and a snapshot is a copy."""

from __future__ import annotations

import threading

from kvtier.errors import Full
from kvtier.server.meters import Meters


def test_adding_to_a_series_loses_nothing_between_threads() -> None:
    series = Meters().series("lane", "lookup")
    threads = [
        threading.Thread(target=lambda: [series.add(3e-5, code, 2, 3) for code in (0, 5, 99) for _ in range(2000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = series.snapshot()
    assert sum(seen.buckets) == seen.buckets[2] == 24_000 and seen.received == 48_000 and seen.sent == 72_000
    assert seen.ended[0] == seen.ended[Full.code] == seen.ended[1] == 8_000, "a code nobody knows is an internal error"


def test_a_snapshot_stays_as_it_is() -> None:
    meters = Meters()
    series = meters.series("grpc", "get")
    assert meters.series("grpc", "get") is series
    series.add(100.0, 0, 1, 1)
    (seen,) = meters.snapshots()
    series.add(1e-6, Full.code, 1, 1)
    assert (sum(seen.buckets), seen.buckets[-1], seen.received, seen.ended[Full.code]) == (1, 1, 1, 0)
    assert (seen.transport, seen.verb) == ("grpc", "get")
