"""From the records of an index to what is live: the last word on each key and on each slot, under the numbers of
namespaces as they are now."""

from __future__ import annotations

import numpy as np

from kvtier.store.ledger import Ledger
from kvtier.tiers.ssd import recovery
from kvtier.tiers.ssd.journal import Records


def key(n: int) -> bytes:
    return n.to_bytes(32, "little")


def put(n: int, page: int, namespace: int = 1) -> Records:
    return recovery.puts([key(n)], nbytes=[100], page=[page], slot=[4096], namespace=[namespace], checksum=[n])


def live(*records: Records) -> list[int]:
    """The numbers of the keys that are left, in order."""
    left = recovery.latest(np.concatenate(records))
    return [int.from_bytes(one, "little") for one in recovery.keys_of(left)]


def test_the_last_word_on_a_key_counts() -> None:
    assert live(put(1, 0), put(2, 1)) == [1, 2]
    assert live(put(1, 0), put(2, 1), recovery.forgets([key(1)])) == [2]
    assert live(put(1, 0), recovery.forgets([key(1)]), put(1, 5)) == [1]
    assert live(put(1, 0), put(2, 1), put(1, 3)) == [2, 1], "in the order of the last puts"
    assert live(recovery.forgets([key(7)]), put(1, 0)) == [1], "one that was never put"


def test_a_slot_belongs_to_its_last_owner_for_good() -> None:
    assert live(put(1, 0), put(2, 0)) == [2]
    assert live(put(1, 0), put(2, 0), recovery.forgets([key(2)])) == [], "the earlier bytes are written over"
    assert live(put(1, 0), put(2, 0), put(1, 4)) == [2, 1]


def test_entries_are_records_and_descriptions() -> None:
    entries = [(1, "local", b"one"), put(1, 0).tobytes(), (2, "other", b"two"), put(2, 1, namespace=2).tobytes()]
    records, described = recovery.read(entries)
    assert described == {1: ("local", b"one"), 2: ("other", b"two")}
    assert recovery.namespaces_of(records) == {1, 2} and recovery.keys_of(records) == [key(1), key(2)]
    assert len(recovery.read([])[0]) == 0


def test_namespaces_get_new_numbers_and_unknown_ones_are_left_out() -> None:
    records = np.concatenate([put(1, 0, namespace=7), put(2, 1, namespace=3), put(3, 2, namespace=9)])
    found = recovery.renumber(records, {3: 30, 7: 70})
    assert found["namespace"].tolist() == [70, 30] and recovery.keys_of(found) == [key(1), key(2)]
    assert len(recovery.renumber(records, {})) == 0 and records["namespace"].tolist() == [7, 3, 9]


def test_a_snapshot_of_an_empty_ledger_has_no_records() -> None:
    assert len(recovery.sealed_records(*Ledger().copy_sealed(), {1: 1})) == 0
