"""What the Redis tier does by itself, in one thread: the trial of an open breaker, a look at Redis's memory now and
then, going through all names for a drop. No caller waits for it."""

from __future__ import annotations

import logging
import threading
import time
from operator import methodcaller

from kvtier.errors import Unavailable
from kvtier.tiers.redis.calls import Calls
from kvtier.tiers.redis.exchange import RedisConnection, Refused
from kvtier.tiers.redis.value import FRONT_BYTES

TICK, LOOK_EVERY = 0.1, 5.0  # seconds between looks at the breaker, and at what Redis says of its memory
DROP = "drop"
SCAN = 1000  # names of one step of a drop
_NAMESPACE = slice(FRONT_BYTES + 64, FRONT_BYTES + 96)  # of a value: the header's field
log = logging.getLogger(__name__)


class Upkeep:
    """`server`: what Redis last said of itself. `dropping`: digests of namespaces whose blocks are being removed."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.server = {"capacity_bytes": 0, "used_bytes": 0, "blocks": 0, "evicted_blocks_total": 0}
        self.dropping: dict[bytes, None] = {}
        self._looked = 0.0
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="redis-upkeep", daemon=True)
        self.thread.start()

    def look(self) -> None:
        """Asks Redis what it says of its memory, now. Raises Unavailable."""
        self._calls.call(self._look, "read_faults")

    def close(self, patience: float) -> None:
        """Ends the thread, after the call that it makes now."""
        self._stop.set()
        self.thread.join(patience)

    def _run(self) -> None:
        calls = self._calls
        while not self._stop.wait(TICK):
            try:
                if calls.breaker.due():
                    calls.trial()
                if not calls.breaker.closed:
                    continue
                if time.monotonic() - self._looked > LOOK_EVERY:
                    self._looked = time.monotonic()
                    self.look()
                if self.dropping:
                    self._drop(next(iter(self.dropping)))
            except Unavailable:
                pass  # counted
            except Exception:  # a fault of ours must not end upkeep for good
                log.exception("redis upkeep failed")

    def _look(self, connection: RedisConnection) -> None:
        """INFO of every primary. Where the user may not ask, the numbers stay as they are."""
        calls, total = self._calls, dict.fromkeys(self.server, 0)
        for address in calls.connections.primaries(connection):
            try:
                lines = connection.tell(address, b"INFO").decode(errors="replace").splitlines()
            except Refused:
                return
            numbers = dict(line.split(":", 1) for line in lines if ":" in line)
            keyspace = numbers.get(f"db{calls.location.db}", "keys=0")
            total["capacity_bytes"] += int(numbers.get("maxmemory", 0))
            total["used_bytes"] += int(numbers.get("used_memory", 0))
            total["evicted_blocks_total"] += int(numbers.get("evicted_keys", 0))
            total["blocks"] += int(keyspace.partition("keys=")[2].partition(",")[0] or 0)
        self.server = total

    def _drop(self, digest: bytes) -> None:
        """Goes through all names in steps, forgets this namespace's blocks. From the beginning after a fault."""
        calls = self._calls
        for address in calls.call(calls.connections.primaries, "read_faults"):
            cursor = b"0"
            while not self._stop.is_set():
                scan = (b"SCAN", cursor, b"MATCH", calls.prefix + b"*", b"COUNT", SCAN)
                try:
                    cursor, names = calls.call(methodcaller("tell", address, *scan), "read_faults")
                except Refused as error:
                    calls.refusal(error, DROP)
                    break
                calls.taken(DROP)
                heads = calls.ask(names, "read_faults", b"GETRANGE", b"?", _NAMESPACE.start, _NAMESPACE.stop - 1)
                mine = [name for name, head in zip(names, heads, strict=True) if head == digest]
                calls.ask(mine, "write_faults", b"UNLINK", b"?")
                if cursor == b"0":
                    break
        if not self._stop.is_set():
            self.dropping.pop(digest, None)
