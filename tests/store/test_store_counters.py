"""Counters of a store: each verb moves its own, and nothing else."""

from __future__ import annotations

from dataclasses import asdict

from kvtier.protocol.stops import Stop
from kvtier.store.store_counters import Counters
from tests.support.inside import Inside


def moved(before: Counters, after: Counters) -> set[str]:
    one, two = asdict(before), asdict(after)
    return {name for name in one if one[name] != two[name]}


def copied(counters: Counters) -> Counters:
    return Counters(**{**asdict(counters), "unserved": counters.unserved.copy()})


def test_each_verb_moves_its_own_counters() -> None:
    with Inside(8 << 20) as inside:
        space, counters = inside.space(4096), inside.store.counters
        session = inside.session()
        before = copied(counters)
        inside.put(session, 1, space, [1, 2])
        assert moved(before, counters) == {"sealed_blocks", "sealed_bytes"} and counters.sealed_blocks == 2
        before = copied(counters)
        assert inside.store.lookup(space.keys([1, 2, 3])) == 2
        assert moved(before, counters) == {"lookup_keys", "lookup_hits", "lookup_warm", "lookup_misses"}
        before = copied(counters)
        session.lease(7, space.keys([1, 9]))
        assert moved(before, counters) == {"lease_keys", "leased_blocks", "leased_bytes", "unserved"}
        assert counters.unserved == {Stop.MISS: 1}
        session.release(7, ())
        before = copied(counters)
        assert inside.store.delete(space.keys([1])) == 1
        assert moved(before, counters) == {"deleted_blocks"}
