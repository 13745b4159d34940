"""The way to one Redis, to a cluster, or to the primary that Sentinels name: which node has what, and who may use which connection.

Thread-safe. Wires are kept by thread, so that one whose thread was interrupted in the middle of a call goes to nobody else before it is cleaned.
After a fault or a failover `reset` makes everybody look up the nodes and connect anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.crc import key_slot
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from kvtier.tiers.redis.exchange import Busy, Down, RedisConnection, Refused, down
from kvtier.tiers.redis.location import Address, RedisLocation

CONNECT = 1.0  # seconds
SLOTS = 16_384
_TCP: Any = Connection
_TLS: Any = SSLConnection
_UNIX: Any = UnixDomainSocketConnection
_SENTINEL: Any = Sentinel
_PLAIN: dict[str, Any] = {
    "protocol": 2,
    "retry": Retry(NoBackoff(), 0),
}  # RESP2: nothing comes that was not asked for; retries are ours


class Link:
    """The way to one Redis, cluster or Sentinel-watched primary. At most `where.connections` wires at once; who finds none free waits."""

    def __init__(self, where: RedisLocation) -> None:
        self.where = where
        self._lock = threading.Condition(threading.Lock())
        self._wires: dict[
            int, RedisConnection
        ] = {}  # by thread: one that died in the middle of a call leaves nothing that another could mistake for its own
        self._free: list[RedisConnection] = []  # on their way to who waits
        self._queue: list[object] = []  # who waits
        self._closed = False
        self.generation = 0  # connections of an earlier one are not used any more
        self.dropped_total = 0  # connections given up with an answer outstanding
        self._primary: Address | None = None
        self._slots: list[Address] = []
        self._nodes: tuple[Address, ...] = where.nodes

    @contextmanager
    def wire(self) -> Iterator[RedisConnection]:
        """A wire for this thread. Raises Busy if none gets free within the timeout, Down after `close`."""
        wire = self._take()
        try:
            yield wire
        finally:
            with self._lock:
                wire.taken = False
                if self._closed:
                    wire.drop()
                if self._queue and self._wires.get(threading.get_ident()) is wire:  # who waits goes first
                    self._free.append(self._wires.pop(threading.get_ident()))
                    self._lock.notify_all()

    def once(self, work: Callable[[RedisConnection], Any]) -> Any:
        """Runs `work` with a wire; once more on new connections if old ones fail, which may have died unnoticed. Raises Down, Lost, Refused."""
        with self.wire() as wire:
            used = wire.connected
            try:
                return work(wire)
            except Down as error:
                wire.drop()
                if not used or error.settled or isinstance(error.__cause__, TimeoutError | redis.TimeoutError):
                    self.reset()
                    raise
            self.reset()
            wire.generation = self.generation
            try:
                return work(wire)
            except Down:
                wire.drop()
                raise

    def reset(self) -> None:
        """Forgets which node does what and uses no connection of before again: after a failover or a fault."""
        with self._lock:
            self.generation += 1
            self._primary = None
            self._slots = []

    def close(self) -> None:
        """Closes all connections; those in use when their question is done."""
        with self._lock:
            self._closed = True
            for wire in (*self._wires.values(), *self._free):
                if not wire.taken:
                    wire.drop()
            self._lock.notify_all()

    def open_connections(self) -> int:
        """How many there are."""
        with self._lock:
            return sum(len(wire.connections) for wire in (*self._wires.values(), *self._free))

    def primaries(self, wire: RedisConnection) -> list[Address]:
        """All nodes that hold blocks."""
        if self.where.cluster:
            return list(dict.fromkeys(self._map(wire)))
        return [self._single()]

    # -- inside

    def _take(self) -> RedisConnection:
        me = threading.get_ident()
        with self._lock:
            if self._closed:
                raise Down("closed")
            wire = self._wires.get(me)
            if wire is None:
                wire = self._wires[me] = self._wait_for_one()
            wire.taken = True
            generation = self.generation
        if wire.marked:
            self.dropped_total += 1
        if wire.marked or wire.generation != generation:
            wire.drop()
            wire.generation = generation
        return wire

    def _wait_for_one(self) -> RedisConnection:
        """A wire that nobody uses, in the order in which threads came. Under the lock. Raises Busy, Down."""
        turn, until = object(), time.monotonic() + self.where.timeout
        self._queue.append(turn)
        try:
            while True:
                if self._queue[0] is turn and (wire := self._spare()) is not None:
                    return wire
                left = until - time.monotonic()
                if left <= 0:
                    raise Busy(f"all {self.where.connections} connections are in use")
                self._lock.wait(left)
                if self._closed:
                    raise Down("closed")
        finally:
            self._queue.remove(turn)
            self._lock.notify_all()

    def _spare(self) -> RedisConnection | None:
        if self._free:
            return self._free.pop()
        if len(self._wires) < self.where.connections:
            return RedisConnection(self, self.generation)
        alive = {thread.ident for thread in threading.enumerate()}
        idle = next((ident for ident, one in self._wires.items() if not one.taken or ident not in alive), None)
        return self._wires.pop(idle) if idle is not None else None

    def address_of(self, wire: RedisConnection, name: bytes) -> Address:
        """The node that has this name. May ask the cluster or a Sentinel."""
        return self._map(wire)[key_slot(name)] if self.where.cluster else self._single()

    def moved(self, slot: int, address: Address) -> None:
        """The cluster says that a slot is elsewhere now."""
        with self._lock:
            if self._slots:
                self._slots[slot] = address

    def connect(self, address: Address) -> Any:
        """A new connection, ready for questions. Raises Down."""
        where = self.where
        options: dict[str, Any] = {
            "socket_timeout": where.timeout,
            "socket_connect_timeout": min(CONNECT, where.timeout),
        }
        options |= {"username": where.user, "password": where.secret(), "db": where.db, **_PLAIN}
        if where.unix:
            made = _UNIX(path=address[0], **options)
        elif where.tls:
            made = _TLS(host=address[0], port=address[1], **options, **self._tls())
        else:
            made = _TCP(host=address[0], port=address[1], **options)
        try:
            made.connect()
        except (RedisError, OSError) as error:
            made.disconnect()
            raise down(error, address) from error
        return made

    def _single(self) -> Address:
        if not self.where.sentinel:
            return self.where.nodes[0]
        with self._lock:
            if self._primary is not None:
                return self._primary
        timeout = min(CONNECT, self.where.timeout)
        options: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": timeout, **_PLAIN}
        if self.where.tls:
            options |= {"ssl": True, **self._tls()}
        sentinel = _SENTINEL(list(self.where.nodes), **options)
        try:
            host, port = sentinel.discover_master(self.where.sentinel)
        except MasterNotFoundError as error:
            raise Down(f"no Sentinel knows a working primary called {self.where.sentinel}") from error
        except (RedisError, OSError) as error:
            raise down(error, self.where.nodes[0]) from error
        finally:
            for one in sentinel.sentinels:
                one.close()
        with self._lock:
            self._primary = (str(host), int(port))
            return self._primary

    def _tls(self) -> dict[str, str]:
        files = {"ssl_ca_certs": self.where.ca, "ssl_certfile": self.where.cert, "ssl_keyfile": self.where.key}
        return {name: str(path) for name, path in files.items() if path is not None}

    def _map(self, wire: RedisConnection) -> list[Address]:
        """Which node has which slot, asked of whoever answers first."""
        with self._lock:
            if self._slots:
                return self._slots
        fault: Down | Refused | None = None
        for node in dict.fromkeys((*self._nodes, *self.where.nodes)):
            try:
                ranges = wire.tell(node, b"CLUSTER", b"SLOTS")
            except (Down, Refused) as error:
                fault = error if isinstance(error, Down) else Down(f"{node[0]}:{node[1]}: {error}", settled=True)
                continue
            slots: list[Address | None] = [None] * SLOTS
            for low, high, primary, *_ in ranges:
                host = primary[0].decode() if primary[0] else ""
                slots[low : high + 1] = [(host if host not in ("", "?") else node[0], int(primary[1]))] * (
                    high + 1 - low
                )
            if None in slots:
                fault = Down("the cluster has slots that no node serves")
                continue
            with self._lock:
                self._slots = [slot for slot in slots if slot is not None]
                self._nodes = tuple(dict.fromkeys(self._slots))
                return self._slots
        raise fault or Down("no node of the cluster answers")
