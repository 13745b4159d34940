"""What `tests/data/last_version/` keeps, and whether a client is served all of it: blocks that the last version wrote
(see its README).
"""

from __future__ import annotations

import json
from typing import Any

from kvtier.client.api import Client
from kvtier.format.identity import NO_CONTEXT, parse_description
from tests.support.daemon import body, hashes, until
from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "data" / "last_version"
KEPT: dict[str, Any] = json.loads((FOLDER / "blocks.json").read_text())


def assert_served(client: Client, namespaces: dict[str, dict[str, Any]]) -> int:
    """Asserts that every block that must be whole comes back byte for byte, and none that must be absent. Returns how
    many came back.
    """
    return sum(_served(client, name, kept) for name, kept in namespaces.items())


def _served(client: Client, name: str, kept: dict[str, Any]) -> int:
    ns = client.register(parse_description(kept["description"].encode()))
    nbytes, context = ns.extents().body_bytes, bytes.fromhex(kept["context"]) or NO_CONTEXT
    whole, served = hashes(kept["whole"]), 0
    until(lambda: client.lookup(ns, whole, context=context) == len(kept["whole"]), f"{name} is known")
    for n in kept["whole"] + kept["either"]:
        found = client.get(ns, hashes([n]), context=context)
        assert len(found) == 1 or n in kept["either"], f"block {n} of {name} is lost"
        assert all((view == body(n, nbytes)).all() for view in found), f"block {n} of {name} is another"
        served += len(found)
    for n in kept["absent"]:
        assert client.lookup(ns, hashes([n]), context=context) == 0, f"block {n} of {name} is back"
        assert not client.get(ns, hashes([n]), context=context)
    return served
