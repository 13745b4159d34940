"""What a client holds, and what happens when a client dies.

A session owns the reservations and leases of one Client object; its sockets join it. No lease runs out by time: the
daemon holds a pidfd of the client's process, and when the process ends, everything that it held is returned at once.
If the last socket closes while the process lives, what the session holds goes to *limbo*: nothing of it is reused
before the process ends, joins again, or says that its copies are done. Without a pidfd the end of the last socket ends
the session. Thread-safe: a lock per session and one for the registry, the store's lock inside a session's.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtier.errors import Denied, Full, Invalid, KvtierError, NotFound
from kvtier.format.block import digest
from kvtier.protocol.limits import MAX_OPEN, SESSION_ID
from kvtier.server.logs import fields
from kvtier.store.accounts import Account, Reservation
from kvtier.store.namespaces import Namespace
from kvtier.store.store import Store

MAX_SESSIONS = 1024
MAX_SOCKETS = 64  # of one session
MAX_FINISHED = 4096  # ids remembered per session, so that repeating seal, abort and release is harmless
READ, WRITE, ADMIN = range(3)
ROLES = ("read", "write", "admin")
T = TypeVar("T")
Bounds = tuple[int, int, int, int, int]  # of a range: group, layer_lo, layer_hi, head_lo, head_hi
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end: kernel-checked for Unix sockets, by token elsewhere. pid 0: unknown."""

    tenant: str
    role: int
    uid: int = -1
    pid: int = 0


class Session:
    """One client's reservations and leases, by ids that the client chose."""

    def __init__(self, session_id: bytes, peer: Peer, store: Store, own: bool = False) -> None:
        self.id = session_id
        self.peer = peer
        self.sockets = 0
        self.limbo = False
        self.drained = False  # its client has said that none of its copies is under way any more
        self._store = store
        self._account: Account = store.account(peer.tenant, own)
        self._lock = threading.Lock()
        self._ended = False
        self._reservations: dict[int, Reservation] = {}
        self._leases: dict[int, list[int | None]] = {}  # row per key in the request's order, None once released
        # id -> (entries of a reservation, those that were lost); None: it was given up before it was given
        self._finished: OrderedDict[int, tuple[int, Set[int]] | None] = OrderedDict()

    def allow(self, role: int) -> None:
        """Raises Denied if the peer's role is less."""
        if self.peer.role < role:
            has = f"tenant {self.peer.tenant} is connected with role {ROLES[self.peer.role]}"
            raise Denied(f"this needs role {ROLES[role]}; {has}")

    def reserve(
        self, id_: int, namespace: Namespace, at: Bounds, context: bytes, keys: list[bytes], hashes: list[bytes]
    ) -> list[int]:
        """Store.reserve under an id. Offset or PRESENT per key."""
        self._check_new(id_)
        reservation, offsets = self._store.reserve(self._account, namespace, at, context, keys, hashes)
        if not reservation.open:  # everything is present: nothing to seal
            with self._lock:
                self._check_unused(id_)
                self._remember(id_, len(keys))
            return offsets
        try:
            self._keep(self._reservations, id_, reservation)
        except KvtierError:
            self._store.abort(self._account, reservation, range(len(keys)))
            raise
        return offsets

    def seal(self, id_: int, indices: Sequence[int], checksums: Sequence[int] | None = None) -> int:
        """Makes entries visible (no indices: all). Returns how many are stored, aborted ones excepted. Idempotent."""
        reservation = self._open(id_, give_up=False)
        if reservation is None:
            with self._lock:
                entries, lost = self._finished.get(id_) or (0, frozenset())
            return sum(i not in lost for i in _entries(indices, entries))
        try:
            return self._store.seal(self._account, reservation, _entries(indices, len(reservation.rows)), checksums)
        finally:
            self._finish(id_, reservation)

    def abort(self, id_: int, indices: Sequence[int]) -> int:
        """Gives entries of a reservation back (no indices: all). Returns how many slots were freed. Idempotent."""
        reservation = self._open(id_, give_up=True)
        if reservation is None:
            return 0
        freed = self._store.abort(self._account, reservation, _entries(indices, len(reservation.rows)))
        self._finish(id_, reservation)
        return freed

    def lease(self, id_: int, keys: list[bytes]) -> tuple[list[int], int]:
        """Store.lease under an id: (offsets of the leading part, why it stopped). An empty answer opens nothing."""
        self._check_new(id_)
        rows, offsets, stop = self._store.lease(self._account, keys)
        if not rows:
            with self._lock:
                self._check_unused(id_)
                self._remember(id_)
            return offsets, stop
        held: list[int | None] = list(rows)
        try:
            self._keep(self._leases, id_, held)
        except KvtierError:
            self._store.release(self._account, list(dict.fromkeys(rows)))
            raise
        return offsets, stop

    def release(self, id_: int, indices: Sequence[int]) -> int:
        """Ends a lease, or some of its entries. Returns how many entries were released. Idempotent."""
        with self._lock:
            rows = self._leases.get(id_)
            if rows is None:
                self._check_finished(id_, give_up=True)
                return 0
            if not indices:
                del self._leases[id_]
                going = [row for row in rows if row is not None]
                self._remember(id_)
                released = len(going)
                going = list(dict.fromkeys(going))
            else:
                entries = [i for i in dict.fromkeys(_entries(indices, len(rows))) if rows[i] is not None]
                candidates = dict.fromkeys(row for i in entries if (row := rows[i]) is not None)
                for i in entries:
                    rows[i] = None
                released = len(entries)
                left = set(rows)
                going = [row for row in candidates if row not in left]
                if left == {None}:
                    del self._leases[id_]
                    self._remember(id_)
            self._store.release(self._account, going)
        return released

    def checksum(self, id_: int, index: int, block: memoryview) -> int:
        """The digest of an entry of an open lease with the bytes `block`; computed once and kept in the ledger."""
        row = self._leases[id_][index]
        assert row is not None
        known = self._store.checksums([row])[0]
        if not known:
            known = digest(block)
            self._store.learn_checksum(row, known)
        return known

    def undo(self, id_: int) -> None:
        """Takes back a reserve or lease whose answer could not be delivered."""
        with self._lock:
            reserved, leased = id_ in self._reservations, id_ in self._leases
        if reserved:
            self.abort(id_, ())
        elif leased:
            self.release(id_, ())

    def end(self) -> None:
        """Returns everything, once. Later calls of this session fail."""
        with self._lock:
            self._ended = True
            reservations, leases = list(self._reservations.values()), list(self._leases.values())
            self._reservations.clear()
            self._leases.clear()
        for reservation in reservations:
            self._store.abort(self._account, reservation, range(len(reservation.rows)))
        for rows in leases:
            self._store.release(self._account, list(dict.fromkeys(row for row in rows if row is not None)))

    @property
    def held_bytes(self) -> int:
        """Bytes of slots leased and reserved."""
        return self._account.held

    def holdings(self) -> tuple[Account, dict[int, int], set[int]]:
        """What `Store.check_integrity` compares: (account, {row: leases}, reserved rows)."""
        with self._lock:
            leases: Counter[int] = Counter()
            for rows in self._leases.values():
                leases.update({row for row in rows if row is not None})
            reserved = {row for r in self._reservations.values() for row in r.rows if row is not None}
            return self._account, dict(leases), reserved

    def _check_new(self, id_: int) -> None:
        with self._lock:
            self._check_unused(id_)

    def _check_unused(self, id_: int) -> None:
        if self._ended:
            raise NotFound("the session has ended")
        if not 0 < id_ < 2**64 or id_ in self._reservations or id_ in self._leases or id_ in self._finished:
            raise Invalid(f"id {id_} is 0 or was used before in this session")
        if len(self._reservations) + len(self._leases) >= MAX_OPEN:
            raise Full(f"full, retry: the session has {MAX_OPEN} reservations and leases open")

    def _keep(self, table: dict[int, T], id_: int, held: T) -> None:
        """Enters what was taken. Raises as `_check_new` does: the id may be used by now, or the session have ended."""
        with self._lock:
            self._check_unused(id_)
            table[id_] = held

    def _open(self, id_: int, give_up: bool) -> Reservation | None:
        """The open reservation of an id, None for a finished one. Raises NotFound for one that never was."""
        with self._lock:
            found = self._reservations.get(id_)
            if found is None:
                self._check_finished(id_, give_up)
            return found

    def _check_finished(self, id_: int, give_up: bool) -> None:
        """Under the lock. Raises NotFound for an id that was never given. `give_up`: it can be given no more then, as
        the call that would have given it may still be on its way."""
        if self._finished.get(id_) is None:
            if give_up:
                self._note(id_, None)
            raise NotFound(f"id {id_} was not given in this session, or was finished long ago")

    def _finish(self, id_: int, reservation: Reservation) -> None:
        with self._lock:
            if id_ in self._reservations and not reservation.open:
                del self._reservations[id_]
                self._remember(id_, len(reservation.rows), reservation.lost)

    def _remember(self, id_: int, entries: int = 0, lost: Set[int] = frozenset()) -> None:
        """Under the lock. Of a lease nothing is kept but its id."""
        self._note(id_, (entries, lost))

    def _note(self, id_: int, how: tuple[int, Set[int]] | None) -> None:
        self._finished[id_] = how
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)


def _entries(indices: Sequence[int], size: int) -> Sequence[int]:
    if not indices:
        return range(size)
    if any(not 0 <= i < size for i in indices):
        raise Invalid(f"an index is outside the {size} entries of this id")
    return list(dict.fromkeys(indices))


def _fields(session: Session) -> dict[str, Any]:
    peer = session.peer
    return fields(tenant=peer.tenant, uid=peer.uid, pid=peer.pid, held_bytes=session.held_bytes)


class Sessions:
    """All sessions of a daemon, and the thread that waits for the end of their processes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._by_id: dict[bytes, Session] = {}
        self._by_pidfd: dict[int, Session] = {}
        self._pidfds: dict[bytes, int] = {}
        self._poll = select.epoll()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll.register(self._wake_read, select.EPOLLIN)
        self._watcher = threading.Thread(target=self._watch, name="pidfd-watch", daemon=True)
        self._watcher.start()

    def open(self, peer: Peer, pidfd: int | None, own: bool = False) -> Session:
        """A new session. Takes over `pidfd`; without one (no mapped arena) the end of the last socket ends the session.
        `own`: one of the daemon's own, for pins. Raises Full.
        """
        session = Session(os.urandom(SESSION_ID), peer, self._store, own)
        with self._lock:
            if len(self._by_id) >= MAX_SESSIONS:
                if pidfd is not None:
                    os.close(pidfd)
                raise Full(f"full, retry: {MAX_SESSIONS} sessions are open")
            if pidfd is not None:
                self._poll.register(pidfd, select.EPOLLIN)
                self._by_pidfd[pidfd] = session
                self._pidfds[session.id] = pidfd
            self._by_id[session.id] = session
            session.sockets = 1
        return session

    def join(self, session_id: bytes, peer: Peer) -> Session:
        """One more socket, of the same user and process; ends limbo and `drained`. Raises NotFound, Denied, Full."""
        with self._lock:
            session = self._find(session_id, peer)
            if session.sockets >= MAX_SOCKETS:
                raise Full(f"full, retry: the session has {MAX_SOCKETS} sockets")
            session.sockets += 1
            session.limbo = session.drained = False
            return session

    def leave(self, session: Session) -> None:
        """A socket closed. The last one ends the session, or puts it in limbo if it holds slots and its process lives,
        not `drained`.
        """
        with self._lock:
            session.sockets -= 1
            if session.sockets or session.id not in self._by_id:
                return
            limbo = bool(session.held_bytes) and session.id in self._pidfds and not session.drained
            if limbo:
                session.limbo = True
            else:
                self._forget(session)
        if limbo:
            log.warning("session in limbo", extra=_fields(session))
        else:
            session.end()

    def drained(self, session_id: bytes, peer: Peer) -> None:
        """The client says that no copy of an earlier session of its process is still under way. That session ends. A
        client closes its sockets before it says so. If threads that read them have not noticed yet, the last of them
        ends the session.
        """
        with self._lock:
            try:
                session = self._find(session_id, peer)
            except NotFound:
                return
            if session.sockets:
                session.drained = True
                return
            self._forget(session)
        session.end()

    def watched(self, session: Session) -> bool:
        """Whether the end of the session's process will be seen: only then may it map the arena."""
        return session.id in self._pidfds

    def gauges(self) -> dict[str, int]:
        with self._lock:
            sessions = list(self._by_id.values())
        return {
            "sessions": len(sessions),
            "sockets": sum(s.sockets for s in sessions),
            "limbo_sessions": sum(s.limbo for s in sessions),
            "limbo_bytes": sum(s.held_bytes for s in sessions if s.limbo),
            "held_bytes": sum(s.held_bytes for s in sessions),
        }

    def check_integrity(self) -> None:
        """Asserts that sessions and store agree. Only exact while no call is under way."""
        with self._lock:
            sessions = list(self._by_id.values())
        self._store.check_integrity([session.holdings() for session in sessions])

    def alive(self) -> bool:
        """Whether the thread that waits for processes runs."""
        return self._watcher.is_alive()

    def close(self) -> None:
        """Ends the watcher and forgets the pidfds; sessions stay as they are, and may still be left."""
        os.write(self._wake_write, b"x")
        self._watcher.join(5)
        with self._lock:
            self._poll.close()
            for fd in (self._wake_read, self._wake_write, *self._by_pidfd):
                os.close(fd)
            self._by_pidfd.clear()

    def _find(self, session_id: bytes, peer: Peer) -> Session:
        session = self._by_id.get(session_id)
        if session is None:
            raise NotFound("no such session")
        if (session.peer.uid, session.peer.pid) != (peer.uid, peer.pid):
            raise Denied("the session belongs to another user or process")
        return session

    def _forget(self, session: Session) -> None:
        del self._by_id[session.id]
        session.limbo = False
        pidfd = self._pidfds.pop(session.id, None)
        if pidfd is not None and self._by_pidfd.pop(pidfd, None) is not None:  # after `close` it is closed already
            self._poll.unregister(pidfd)
            os.close(pidfd)

    def _watch(self) -> None:
        while True:
            self._poll.poll()
            with self._lock:
                # Asked again under the lock: a number seen before may by now be the pidfd of a process that lives.
                ready = [fd for fd, _ in self._poll.poll(0)]
                if self._wake_read in ready:
                    return
                ended = [session for fd in ready if (session := self._by_pidfd.get(fd)) is not None]
                for session in ended:
                    self._forget(session)
            for session in ended:
                said = _fields(session)
                try:
                    session.end()
                except Exception:  # a fault of ours in one session must not keep the others' slots
                    log.exception("returning slots failed", extra=said)
                if said["fields"]["held_bytes"]:
                    log.info("process ended with slots", extra=said)
