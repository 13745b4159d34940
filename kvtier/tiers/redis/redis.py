"""The Redis tier: blocks shared between hosts, one string each, whole or absent, in an engine that others operate.

`find` answers from what was heard lately and never waits: unknown keys are asked in the background, and `unsure` says
so meanwhile. Deletes go the same way. Reads and writes are calls with a timeout. When Redis fails the breaker opens,
every answer is "not here" at once, and a thread of the tier's own tries until it is back. A miss after a yes is a miss:
Redis evicts, and others delete. Thread-safe; no lock is held over I/O. The value's format is docs/redis.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from operator import methodcaller

from kvtier.errors import Lost, NotFound, Unavailable
from kvtier.format import block
from kvtier.store.namespaces import Namespace
from kvtier.tiers.health import READ, SPACE, WRITE
from kvtier.tiers.redis.asker import Asker
from kvtier.tiers.redis.calls import Calls
from kvtier.tiers.redis.exchange import Refused, ask_for, ask_to_keep
from kvtier.tiers.redis.location import RedisLocation
from kvtier.tiers.redis.presence import Presence
from kvtier.tiers.redis.upkeep import Upkeep
from kvtier.tiers.redis.value import FRONT_BYTES, front, read_front
from kvtier.tiers.tier import Outgoing

# Unknown keys of one `find` that are asked: so many, or so many for each that is answered. Mostly the first is a no.
ASK_FIRST, ASK_MORE = 32, 4
PATIENCE = 5.0  # seconds that `close` waits for calls under way


class Redis:
    """Blocks in the Redis at `location`. Connects at once: raises Invalid where the settings are wrong (password,
    rights, certificate); a Redis that is merely not there is waited for in the background."""

    name = "redis"

    def __init__(self, location: RedisLocation) -> None:
        self._calls = Calls(location)
        self._calls.first()
        self._presence = Presence()
        self._users, self._closing = 0, False
        self._asker = Asker(self._calls, self._presence)
        self._upkeep = Upkeep(self._calls)

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether it was lately heard to be here. No lock; what is unknown is asked in the background."""
        if not self._calls.breaker.closed:
            return [False] * len(keys)
        now, presence, asker = time.monotonic(), self._presence, self._asker
        found, asked, answered = [], 0, 0
        for key in keys:
            known = False if asker.forgetting(key) else presence.get(key, now)
            found.append(bool(known))
            if known is None:
                if asked < max(ASK_FIRST, ASK_MORE * answered):
                    asker.question(key, now)
                asked += 1
            else:
                answered += 1
                if known and not presence.fresh(key, now):
                    asker.question(key, now)
        return found

    def unsure(self, keys: Sequence[bytes]) -> list[bool]:
        if not self._calls.breaker.closed:
            return [False] * len(keys)
        now = time.monotonic()
        return [self._asker.asking(key, now) and self._presence.get(key, now) is None for key in keys]

    def handles(self) -> set[int]:
        """Handles of the namespaces of which this process wrote blocks lately."""
        return self._presence.handles()

    def blocks_by_namespace(self) -> dict[int, tuple[int, int]]:
        return {}

    def write(self, blocks: Sequence[Outgoing]) -> list[bool]:
        """Keeps blocks that are not there already. False for what Redis refuses. Raises Unavailable while it fails."""
        with self._used():
            calls, presence = self._calls, self._presence
            if calls.health.paused(WRITE):
                raise Unavailable(f"redis takes no blocks for now: {calls.health.fault}")
            dropping = self._upkeep.dropping
            going = [out for out in blocks if not out.namespace.dropped and out.namespace.digest not in dropping]
            wanted = {out.key: out for out in going}
            again = self._asker.keep(wanted, calls.location.timeout)
            now = time.monotonic()
            here = {key for key in wanted if key not in again and presence.fresh(key, now)}
            doubtful = [key for key in wanted if key not in here and key not in again]
            for key, length in zip(doubtful, calls.lengths(doubtful), strict=True):
                if length == FRONT_BYTES + wanted[key].nbytes:  # of another length: no block, written over
                    here.add(key)
            self._send([out for key, out in wanted.items() if key not in here], here)
            for key in here:
                presence.hear([(key, True)], wanted[key].namespace.handle)
            if gone := [key for key in here if wanted[key].namespace.dropped]:
                self._asker.delete(gone)
            return [out.key in here and not out.namespace.dropped for out in blocks]

    def read(self, key: bytes, slot: memoryview, nbytes: int) -> int:
        """Reads a block into `slot`; its checksum, verified. Raises NotFound, Unavailable, Lost (and deletes it)."""
        with self._used():
            calls, began = self._calls, time.monotonic()
            if self._asker.forgetting(key):
                raise NotFound("deleted from Redis")
            question = ask_for(calls.name_of(key), slot[:nbytes], began + calls.location.timeout)
            try:
                (answer,) = calls.call(lambda connection: connection.ask([question]), "read_faults")
                if isinstance(answer, Refused):
                    calls.refusal(answer, READ)
                    raise Unavailable(f"redis: {answer}")
                if answer is None:
                    self._presence.hear([(key, False)])
                    calls.count("missed_blocks")
                    raise NotFound("not in Redis")
                checksum = read_front(answer, key, nbytes)
                header = block.verify(slot[:nbytes], key, checksum)
            except Lost:
                calls.count("lost_blocks")
                self._asker.delete([key])
                raise
            if header.namespace in self._upkeep.dropping:
                raise NotFound("its namespace was dropped")
            slot[nbytes:] = bytes(len(slot) - nbytes)
            self._presence.hear([(key, True)], began=began)
            calls.count("read_blocks")
            calls.count("read_bytes", nbytes)
            calls.taken(READ)
            return checksum

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forgets these: here at once, in Redis within 50 ms or once it answers again. How many were known here."""
        now, asker = time.monotonic(), self._asker
        known = sum(bool(self._presence.get(key, now)) for key in set(keys) if not asker.forgetting(key))
        asker.delete(keys)
        return known

    def drop(self, namespace: Namespace) -> int:
        """Forgets a namespace's blocks: here at once, in Redis in the background, by going through all names. Returns
        how many were known here. A namespace that was only crowded out of this daemon's registry is not dropped: its
        blocks are other daemons' too."""
        if not namespace.crowded:
            self._upkeep.dropping[namespace.digest] = None
        return len(self._presence.forget(namespace.handle))

    def gauges(self) -> dict[str, int]:
        """Numbers for operators. capacity, used, blocks, evicted: what Redis said of all it has, a few seconds ago."""
        calls = self._calls
        with calls.lock:
            return {
                **self._upkeep.server,
                "degraded": int(calls.health.degraded or not calls.breaker.closed),
                "breaker": calls.breaker.state,
                "breaker_opened_total": calls.breaker.opened_total,
                "connections": calls.connections.open_connections(),
                "connections_dropped_total": calls.connections.dropped_total,
                "known_keys": len(self._presence),
                "waiting_deletes": self._asker.waiting_deletes(),
                **{f"{name}_total": n for name, n in asdict(calls.totals).items()},
            }

    def fault(self) -> str:
        return self._calls.health.fault or self._calls.breaker.reason

    def look(self) -> None:
        with self._used():
            self._upkeep.look()

    def alive(self) -> bool:
        return self._asker.thread.is_alive() and self._upkeep.thread.is_alive()

    def check_integrity(self) -> None:
        self._presence.check_integrity()
        self._asker.check_integrity()

    def close(self) -> None:
        """Waits for calls under way, `PATIENCE` at most, then ends threads and connections."""
        lock = self._calls.lock
        with lock:
            self._closing = True
            lock.wait_for(lambda: not self._users, PATIENCE)
        self._asker.close(PATIENCE)
        self._upkeep.close(PATIENCE)
        self._calls.connections.close()

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Raises Unavailable once `close` was called, and while the breaker is open."""
        calls = self._calls
        with calls.lock:
            if self._closing:
                raise Unavailable("the Redis tier is closed")
            self._users += 1
        try:
            if not calls.breaker.closed:
                raise Unavailable(f"redis fails: {calls.breaker.reason}")
            yield
        finally:
            with calls.lock:
                self._users -= 1
                if self._closing:
                    calls.lock.notify_all()

    def _send(self, blocks: Sequence[Outgoing], here: set[bytes]) -> None:
        """SET of each; adds the keys of those that Redis took to `here`. Raises Unavailable."""
        calls = self._calls
        for again in (True, False):
            if not blocks:
                return
            questions = []
            for out in blocks:
                head = front(out.key, out.nbytes, out.checksum)
                questions.append(ask_to_keep(calls.name_of(out.key), head, out.slot[: out.nbytes], calls.location.ttl))
            answers = list(zip(blocks, calls.call(methodcaller("ask", questions), "write_faults"), strict=True))
            refused = [(out, answer) for out, answer in answers if isinstance(answer, Refused)]
            taken = [out for out, answer in answers if not isinstance(answer, Refused)]
            here.update(out.key for out in taken)
            calls.count("written_blocks", len(taken))
            calls.count("written_bytes", sum(out.nbytes for out in taken))
            if not refused:
                calls.taken(WRITE, SPACE)
                return
            if not (again and refused[0][1].kind == "readonly"):
                calls.count("refused_blocks", len(refused))
                calls.refusal(refused[0][1], WRITE)
                return
            calls.connections.reset()  # a failover: the same name is another server now
            blocks = [out for out, _ in refused]
