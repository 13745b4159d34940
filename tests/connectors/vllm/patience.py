"""The connector's limits in seconds, as no machine misses them however busy it is: for tests that ask what the answer
is, not how soon it comes.

In production a beat, a call or a load that takes too long is a miss by design, and the test machine may well stop for
as long as that.
"""

from __future__ import annotations

from kvtier.client import connection
from kvtier.connectors.common import lookups, mover
from tests.support.daemon import PATIENCE

_MODULES = {
    "MISS_AFTER": lookups,
    "MISSED": lookups,
    "LOAD_SECONDS": mover,
    "SYNC_SECONDS": mover,
    "CALL_SECONDS": mover,
    "HELLO_DEADLINE": connection,
}
PRODUCTION: dict[str, float] = {name: getattr(module, name) for name, module in _MODULES.items()}


def be_patient(**seconds: float) -> None:
    """Sets the limits of this process: those given, and all others to `PATIENCE`."""
    for name, module in _MODULES.items():
        setattr(module, name, seconds.get(name, PATIENCE))
