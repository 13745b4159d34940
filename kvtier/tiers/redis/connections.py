"""Connections to a Redis, a cluster, or the primary that Sentinels name: which node has what, which thread uses which.

Thread-safe. Connections are kept by thread: one whose thread was interrupted in the middle of a call is cleaned before
another thread gets it. After a fault or a failover `reset` makes all threads look up the nodes and connect anew.
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
# RESP2: nothing comes that was not asked for; retries are ours.
_PLAIN: dict[str, Any] = {"protocol": 2, "retry": Retry(NoBackoff(), 0)}


class RedisConnections:
    """At most `location.connections` at once; a thread that finds none free waits for one."""

    def __init__(self, location: RedisLocation) -> None:
        self.location = location
        self._lock = threading.Condition(threading.Lock())
        # A thread that died in the middle of a call leaves nothing that another could take for its own.
        self._by_thread: dict[int, RedisConnection] = {}
        self._free: list[RedisConnection] = []  # given up for threads that wait
        self._queue: list[object] = []  # threads that wait, in order
        self.generation = 0  # connections of an earlier one are not used any more
        self.dropped_total = 0  # connections given up with an answer outstanding
        self._closed = False
        self._primary: Address | None = None
        self._slots: list[Address] = []
        self._nodes: tuple[Address, ...] = location.nodes

    @contextmanager
    def connection(self) -> Iterator[RedisConnection]:
        """A connection for this thread. Raises Busy if none gets free within the timeout, Down after `close`."""
        connection = self._take()
        try:
            yield connection
        finally:
            with self._lock:
                connection.taken = False
                if self._closed:
                    connection.drop()
                if self._queue and self._by_thread.get(threading.get_ident()) is connection:  # waiting threads go first
                    self._free.append(self._by_thread.pop(threading.get_ident()))
                    self._lock.notify_all()

    def once(self, work: Callable[[RedisConnection], Any]) -> Any:
        """Runs `work`; once more on new connections if old ones fail, which may be dead. Raises Down, Lost, Refused."""
        with self.connection() as connection:
            used = bool(connection.by_node)  # its sockets may have died unnoticed
            try:
                return work(connection)
            except Down as error:
                connection.drop()
                if not used or error.permanent or isinstance(error.__cause__, TimeoutError | redis.TimeoutError):
                    self.reset()
                    raise
            self.reset()
            connection.generation = self.generation
            try:
                return work(connection)
            except Down:
                connection.drop()
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
            for connection in (*self._by_thread.values(), *self._free):
                if not connection.taken:
                    connection.drop()
            self._lock.notify_all()

    def open_connections(self) -> int:
        with self._lock:
            return sum(len(connection.by_node) for connection in (*self._by_thread.values(), *self._free))

    def primaries(self, connection: RedisConnection) -> list[Address]:
        if self.location.cluster:
            return list(dict.fromkeys(self._map(connection)))
        return [self._single()]

    def _take(self) -> RedisConnection:
        me = threading.get_ident()
        with self._lock:
            if self._closed:
                raise Down("closed")
            connection = self._by_thread.get(me)
            if connection is None:
                connection = self._by_thread[me] = self._wait_for_one()
            connection.taken = True
            generation = self.generation
        if connection.marked:
            self.dropped_total += 1
        if connection.marked or connection.generation != generation:
            connection.drop()
            connection.generation = generation
        return connection

    def _wait_for_one(self) -> RedisConnection:
        """A connection that is not in use, in the order in which threads came. Under the lock. Raises Busy, Down."""
        turn, until = object(), time.monotonic() + self.location.timeout
        self._queue.append(turn)
        try:
            while True:
                if self._queue[0] is turn and (connection := self._spare()) is not None:
                    return connection
                left = until - time.monotonic()
                if left <= 0:
                    raise Busy(f"all {self.location.connections} connections are in use")
                self._lock.wait(left)
                if self._closed:
                    raise Down("closed")
        finally:
            self._queue.remove(turn)
            self._lock.notify_all()

    def _spare(self) -> RedisConnection | None:
        if self._free:
            return self._free.pop()
        if len(self._by_thread) < self.location.connections:
            return RedisConnection(self, self.generation)
        alive = {thread.ident for thread in threading.enumerate()}
        idle = next((ident for ident, one in self._by_thread.items() if not one.taken or ident not in alive), None)
        return self._by_thread.pop(idle) if idle is not None else None

    def address_of(self, connection: RedisConnection, name: bytes) -> Address:
        """The node that has this name. May ask the cluster or a Sentinel."""
        return self._map(connection)[key_slot(name)] if self.location.cluster else self._single()

    def moved(self, slot: int, address: Address) -> None:
        """The cluster says that a slot is elsewhere now."""
        with self._lock:
            if self._slots:
                self._slots[slot] = address

    def connect(self, address: Address) -> Any:
        """A new connection, ready for questions. Raises Down."""
        location, (host, port) = self.location, address
        options = {**_PLAIN, "socket_timeout": location.timeout}
        options["socket_connect_timeout"] = min(CONNECT, location.timeout)
        options |= {"username": location.user, "password": location.secret(), "db": location.db}
        if location.unix:
            made = _UNIX(path=host, **options)
        elif location.tls:
            made = _TLS(host=host, port=port, **options, **self._tls())
        else:
            made = _TCP(host=host, port=port, **options)
        try:
            made.connect()
        except (RedisError, OSError) as error:
            made.disconnect()
            raise down(error, address) from error
        return made

    def _single(self) -> Address:
        if not self.location.sentinel:
            return self.location.nodes[0]
        with self._lock:
            if self._primary is not None:
                return self._primary
        timeout = min(CONNECT, self.location.timeout)
        options: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": timeout, **_PLAIN}
        if self.location.tls:
            options |= {"ssl": True, **self._tls()}
        sentinel = _SENTINEL(list(self.location.nodes), **options)
        try:
            host, port = sentinel.discover_master(self.location.sentinel)
        except MasterNotFoundError as error:
            raise Down(f"no Sentinel knows a working primary called {self.location.sentinel}") from error
        except (RedisError, OSError) as error:
            raise down(error, self.location.nodes[0]) from error
        finally:
            for one in sentinel.sentinels:
                one.close()
        with self._lock:
            self._primary = (str(host), int(port))
            return self._primary

    def _tls(self) -> dict[str, str]:
        files = {"ssl_ca_certs": self.location.ca, "ssl_certfile": self.location.cert, "ssl_keyfile": self.location.key}
        return {name: str(path) for name, path in files.items() if path is not None}

    def _map(self, connection: RedisConnection) -> list[Address]:
        """Which node has which slot, asked of the first node that answers."""
        with self._lock:
            if self._slots:
                return self._slots
        fault: Down | Refused | None = None
        for node in dict.fromkeys((*self._nodes, *self.location.nodes)):
            try:
                ranges = connection.tell(node, b"CLUSTER", b"SLOTS")
            except (Down, Refused) as error:
                fault = error if isinstance(error, Down) else Down(f"{node[0]}:{node[1]}: {error}", permanent=True)
                continue
            slots: list[Address | None] = [None] * SLOTS
            for low, high, primary, *_ in ranges:
                host = primary[0].decode() if primary[0] else "?"
                address = (node[0] if host == "?" else host, int(primary[1]))  # "?": the node that answers
                slots[low : high + 1] = [address] * (high + 1 - low)
            if None in slots:
                fault = Down("the cluster has slots that no node serves")
                continue
            with self._lock:
                self._slots = [slot for slot in slots if slot is not None]
                self._nodes = tuple(dict.fromkeys(self._slots))
                return self._slots
        raise fault or Down("no node of the cluster answers")
