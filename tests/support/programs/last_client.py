"""A client of the last version at work: python last_client.py ADDRESS, with client.zip as PYTHONPATH.

Finds blocks 100 to 104 (put by a client of this version), and leaves blocks 0 to 7 and 10 to 12 behind. Block n has the
bytes that `tests.support.daemon.body` makes of n.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

import kvtier

NBYTES = 1024


def body(n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """See `tests.support.daemon.body`."""
    made = ((31 * n + np.arange(NBYTES)) % 113).astype(np.uint8)
    made[:8] = np.frombuffer(n.to_bytes(8, "little"), np.uint8)
    return made


def hashes(first: int, end: int) -> bytes:
    """Content hashes of these blocks, concatenated."""
    return b"".join(n.to_bytes(32, "little") for n in range(first, end))


def right(found: Any, first: int, end: int) -> bool:
    """Whether these are the bodies of these blocks."""
    return len(found) == end - first and all(np.array_equal(one, body(n)) for n, one in enumerate(found, first))


def main() -> None:
    """See the top of this file."""
    assert "client.zip" in str(kvtier.__file__), f"not the last version: {kvtier.__file__}"
    identity, layout = (importlib.import_module(f"kvtier.{name}") for name in ("identity", "layout"))
    scheme = identity.HashScheme(identity.CHAIN, "0", 16)
    description = identity.Description("org/m", "1" * 40, layout.opaque(NBYTES, "ab" * 32, engine_tokens=16), scheme)
    wait = 20.0
    with kvtier.Client(sys.argv[1]) as client:
        assert client.status(deadline=wait)["used_bytes"] > 0
        ns = client.register(description)
        assert client.explain(description, deadline=wait) == []
        assert client.lookup(ns, hashes(100, 106), deadline=wait) == 5
        assert right(client.get(ns, hashes(100, 105), deadline=wait), 100, 105)
        assert client.put(ns, hashes(0, 10), [body(n) for n in range(10)], deadline=wait) == 10
        with client.fill(ns, hashes(9, 13), deadline=wait) as slots:
            assert [slot is None for slot in slots] == [True, False, False, False]
            for n, slot in enumerate(slots, 9):
                if slot is not None:
                    slot[:] = body(n)
        assert slots.sealed == 4 and slots.reason == ""
        with client.lease(ns, hashes(0, 14), deadline=wait) as blocks:
            assert right(blocks, 0, 13) and blocks.reason == "miss"
        assert client.flush(ns, hashes(0, 13), deadline=wait) == 13
        assert client.prefetch(ns, hashes(0, 13), deadline=wait) == 0, "all of them are in memory"
        assert client.delete(ns, hashes(8, 10), deadline=wait) == 2
        answer = client.lookup(ns, hashes(8, 10), deadline=wait)
        assert answer == 0 and answer.reason == "miss"
        assert [one.model for one in client.list_namespaces(deadline=wait)] == ["org/m"]


if __name__ == "__main__":
    main()
