"""From the index on disk to what is live, and back: records as columns, a million in seconds. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.tiers.ssd.journal import FORGET, PUT, RECORD, NamespaceEntry, Records

Described = dict[int, tuple[str, bytes]]  # number of a namespace -> (tenant, description)


def read(entries: Iterable[NamespaceEntry | bytes]) -> tuple[Records, Described]:
    """The live records in the order they were put, and every namespace that was told."""
    parts: list[bytes] = []
    described: Described = {}
    for entry in entries:
        if isinstance(entry, bytes):
            parts.append(entry)
        else:
            described[entry[0]] = entry[1:]
    return latest(np.frombuffer(b"".join(parts), RECORD)), described


def latest(records: Records) -> Records:
    """What is left of puts and forgets, in the order of puts: of each key the last that was not forgotten after, unless
    a later put took its slot. A slot once given to another block is lost to the earlier one for good, also if the later
    was forgotten since and the earlier's end is not told."""
    keys = keys_of(records)
    puts = np.flatnonzero(records["kind"] == PUT)
    order = puts[np.argsort(records["page"][puts], kind="stable")]
    pages = records["page"][order]
    # of two on one slot the later has written over the earlier
    final = np.append(pages[1:] != pages[:-1], True)[: len(pages)]
    if len(puts) < len(records) or len(set(keys)) != len(keys):
        last: dict[bytes, int] = {}
        for i, (key, kind) in enumerate(zip(keys, records["kind"].tolist(), strict=True)):
            last.pop(key, None)
            if kind == PUT:
                last[key] = i
        alive = np.zeros(len(records), np.bool_)
        alive[order[final]] = True
        mine = np.fromiter(last.values(), np.int64, len(last))
        return records[mine[alive[mine]]]
    return records if final.all() else records[np.sort(order[final])]


def renumber(records: Records, numbers: Mapping[int, int]) -> Records:
    """The records of these namespaces, each under its new number."""
    if not numbers:
        return records[:0].copy()
    known = np.isin(records["namespace"], np.fromiter(numbers, np.uint32, len(numbers)))
    found = records[known].copy()
    old = np.fromiter(sorted(numbers), np.uint32, len(numbers))
    new = np.array([numbers[int(number)] for number in old], np.uint32)
    found["namespace"] = new[np.searchsorted(old, found["namespace"])]
    return found


def namespaces_of(records: Records) -> set[int]:
    """The numbers of the namespaces that these are of."""
    return set(np.unique(records["namespace"]).tolist())


def keys_of(records: Records) -> list[bytes]:
    """The key of each record."""
    raw = np.ascontiguousarray(records["key"]).tobytes()
    return [raw[at : at + 32] for at in range(0, len(raw), 32)]


def forgets(keys: Sequence[bytes]) -> Records:
    """A record for each key that is forgotten."""
    records = np.zeros(len(keys), RECORD)
    records["kind"] = FORGET
    records["key"] = np.frombuffer(b"".join(keys), "V32")
    return records


def puts(keys: Sequence[bytes], **columns: Sequence[int] | npt.NDArray[np.uint32]) -> Records:
    """A record for each key that is put; columns by the record's names."""
    records = np.zeros(len(keys), RECORD)
    records["kind"] = PUT
    for name, values in columns.items():
        records[name] = values
    records["key"] = np.frombuffer(b"".join(keys), "V32")
    return records


def join(first: Records, second: Records) -> Records:
    """One after the other."""
    return np.concatenate((first, second)) if len(first) else second


def sealed_records(columns: dict[str, npt.NDArray[Any]], keys: Sequence[bytes], numbers: Mapping[int, int]) -> Records:
    """Records of what `Ledger.copy_sealed` gave, oldest first; `numbers` are those of the namespaces, by handle. Blocks
    of others are left out. Takes longer than the copy (20 ms a million): not under the ledger's lock."""
    order = np.argsort(columns["age"], kind="stable")
    rows = columns["row"][order].tolist()
    records = puts([keys[row] for row in rows])
    for name in ("nbytes", "page", "slot", "namespace", "checksum"):
        records[name] = columns[name][order]
    return renumber(records, numbers)
