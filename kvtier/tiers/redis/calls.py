"""Calls to Redis as the tier's parts make them: breaker and health hear how each went, refusals become a reason in
words, everything is counted. Nothing here holds `lock` over I/O. Thread-safe."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtier.errors import Invalid, Unavailable
from kvtier.tiers.breaker import Breaker
from kvtier.tiers.health import READ, SPACE, WRITE, Health
from kvtier.tiers.redis.connections import RedisConnections
from kvtier.tiers.redis.exchange import Busy, Down, RedisConnection, Refused, ask
from kvtier.tiers.redis.location import RedisLocation

PAUSE = (0.5, 4.0)  # seconds of no writing after a refusal, first and longest: a failover is over within 10 s
CONNECTION = "connection"  # a kind of fault: Redis does not answer
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(slots=True)
class RedisTotals:
    """Totals since the start."""

    asked_keys: int = 0
    lost_blocks: int = 0
    lost_deletes: int = 0
    missed_blocks: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    read_faults: int = 0
    refused_blocks: int = 0
    write_faults: int = 0
    written_blocks: int = 0
    written_bytes: int = 0


class Calls:
    """Calls to the Redis at `location`. `first` is to be called once, before all others."""

    def __init__(self, location: RedisLocation) -> None:
        self.location, self.connections, self.breaker = location, RedisConnections(location), Breaker()
        self.lock = threading.Condition(threading.Lock())  # for what all parts of the tier count and note
        self.health, self.totals = Health("redis", PAUSE), RedisTotals()
        self.prefix = f"{location.prefix}:1:".encode()
        self.probe = self.prefix + b"probe"

    def name_of(self, key: bytes) -> bytes:
        return self.prefix + key.hex().encode()

    def call(self, work: Callable[[RedisConnection], T], counter: str) -> T:
        """One call with a connection. A fault counts under `counter`. Raises Unavailable, Lost."""
        try:
            done: T = self.connections.once(work)
        except Busy as error:  # says nothing about Redis
            raise Unavailable(f"redis: {error}") from None
        except (Down, Invalid) as error:  # Invalid: the password's file has gone
            self.count(counter)
            self.down(str(error))
            raise Unavailable(f"redis: {error}") from None
        self.up()
        return done

    def ask(self, names: Sequence[bytes], counter: str, *words: bytes | int) -> list[Any]:
        """The same command for each name, which stands in place of `b"?"`. Refused in the place of a refusal."""
        if not names:
            return []
        questions = [ask(name, *(name if word == b"?" else word for word in words)) for name in names]
        return self.call(lambda connection: connection.ask(questions), counter)

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these Redis has now. Raises Unavailable."""
        self.count("asked_keys", len(keys))
        answers = self.ask([self.name_of(key) for key in keys], "read_faults", b"EXISTS", b"?")
        for answer in answers:
            if isinstance(answer, Refused):
                self.refusal(answer, READ)
                raise Unavailable(f"redis: {answer}")
        self.taken(READ)
        return [answer == 1 for answer in answers]

    def lengths(self, keys: Sequence[bytes]) -> list[int]:
        """Bytes under each key's name now, front and block; 0: none, or of another kind. Raises Unavailable."""
        self.count("asked_keys", len(keys))
        answers = self.ask([self.name_of(key) for key in keys], "read_faults", b"STRLEN", b"?")
        for answer in answers:
            if isinstance(answer, Refused) and answer.kind == "denied":
                self.refusal(answer, READ)
        return [0 if isinstance(answer, Refused) else int(answer) for answer in answers]

    def down(self, reason: str, trial: bool = False) -> None:
        if self.breaker.bad(reason, trial=trial):
            with self.lock:
                self.health.bad(CONNECTION, reason, pause=False)

    def up(self) -> None:
        if self.breaker.good():
            with self.lock:
                self.health.good(CONNECTION)

    def refusal(self, refused: Refused, kind: str) -> None:
        """Redis answers, and says no. Refused writes are not tried for a while."""
        with self.lock:
            self.health.bad(SPACE if refused.kind == "full" else kind, f"redis: {refused}", pause=False)
            if kind == WRITE:
                self.health.bad(WRITE, f"redis: {refused}")

    def taken(self, *kinds: str) -> None:
        """Redis took what it may have refused before."""
        if self.health.degraded:
            with self.lock:
                for kind in kinds:
                    self.health.good(kind)

    def count(self, name: str, n: int = 1) -> None:
        with self.lock:
            setattr(self.totals, name, getattr(self.totals, name) + n)

    def first(self) -> None:
        """Connects and tries every command that is needed. Raises Invalid for what starting again cannot mend:
        password, rights, certificate. A Redis that is merely not there opens the breaker."""
        self.location.check_files()
        try:
            refused = self.connections.once(self._rights)
        except Down as error:
            if error.permanent:
                self.connections.close()
                raise Invalid(f"redis: {error}") from None
            while self.breaker.closed:
                self.down(str(error))
            return
        except Refused as error:
            refused = error
        if refused is not None:
            if refused.kind == "denied":
                self.connections.close()
                refusal = f"redis: the user may not do what this tier needs: {refused}"
                raise Invalid(f"{refusal}; docs/redis.md has the rights")
            self.refusal(refused, WRITE)
        log.info("redis opened", extra={"fields": {"where": self.location}})

    def trial(self) -> None:
        """The one trial of a breaker that is half-open."""
        self.connections.reset()
        try:
            self.connections.once(lambda connection: connection.ask([ask(self.probe, b"EXISTS", self.probe)]))
        except (Down, Invalid) as error:
            self.down(str(error), trial=True)
        except BaseException as error:
            self.down(type(error).__name__, trial=True)
            raise
        else:
            self.up()

    def _rights(self, connection: RedisConnection) -> Refused | None:
        """What Redis refuses of the commands of a block's life; None if nothing."""
        probe = self.probe
        questions = [
            ask(probe, b"SET", probe, b"1", b"EX", 10),
            ask(probe, b"EXISTS", probe),
            ask(probe, b"GETRANGE", probe, 0, 0),
            ask(probe, b"STRLEN", probe),
            ask(probe, b"UNLINK", probe),
        ]
        elsewhere = [probe + b":%d" % n for n in range(16)]  # a node of a cluster refuses some of these
        answers = connection.ask(questions + [ask(name, b"EXISTS", name) for name in elsewhere])
        refused = [answer for answer in answers if isinstance(answer, Refused)]
        return min(refused, key=lambda one: one.kind != "denied", default=None)
