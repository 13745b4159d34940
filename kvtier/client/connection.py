"""How a client hangs on to a daemon: sockets, the session they share, the mapped arena, and what to do when any of it
goes away.

Connects on first use. Threads share a small pool of sockets. An idle *session* socket keeps the session when a
call's own socket breaks or times out, and tells at once when the daemon goes: then the old arena is unmapped as soon as
no lease or fill is open on it, and only then is the next daemon's mapped (memory never doubles). After a failure the
next attempt waits a jittered 50 ms to 1 s; calls in between fail at once. After fork the child has no connection, no
views and starts afresh. Thread-safe.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from google.protobuf.message import DecodeError

from kvtier.client.mapping import Mapping
from kvtier.client.unix_socket import MAX_POSTED, ErrorAnswer, UnixSocket, forget_all
from kvtier.errors import Deadline, KvtierError, NotFound, Unavailable
from kvtier.protocol import frames
from kvtier.protocol.backing import POPULATE_STEP
from kvtier.protocol.frames import Verb
from kvtier.protocol.limits import HELLO_DEADLINE, MAX_DRAINED
from kvtier.protocol.v1 import kvtier_pb2 as pb

MAX_SOCKETS = 16  # calls of one client under way at once; more wait within their deadline
MAX_OPEN = 4096  # as many ids as a session may have open
_BACKOFF = (0.05, 1.0)  # seconds: first and longest
_TICK = 1.0  # seconds between looks at debts

log = logging.getLogger(__name__)


class Unmappable(Unavailable):
    """The daemon answers, but its memory cannot be mapped here: gRPC is the way."""


class Attachment:
    """One session with one life of a daemon. `users` counts open leases and fills on its mapping."""

    def __init__(self, session_socket: UnixSocket) -> None:
        """Takes over the session socket's file descriptor. Raises Unmappable."""
        if session_socket.fd is None:
            raise Unmappable("the daemon cannot watch this process (no pidfd), so it does not share its memory")
        fd, session_socket.fd = session_socket.fd, None
        hello = session_socket.hello
        self.boot, self.session, self.tenant, self.role = session_socket.boot, hello.session, hello.tenant, hello.role
        try:
            self.mapping = Mapping(fd, hello.arena_bytes)
        except (OSError, ValueError, OverflowError) as error:
            what = f"the daemon's {hello.arena_bytes} bytes of memory"
            raise Unmappable(f"{what} cannot be mapped: {error}") from None
        self.memory = self.mapping.array
        self.ids = itertools.count(1)
        self.users = 0
        self.gone = False
        # (verb, id): releases and aborts that may not have arrived
        self.debts: deque[tuple[int, int]] = deque(maxlen=MAX_OPEN)
        self.session_socket = session_socket
        self.idle: deque[UnixSocket] = deque()


class Connection:
    """The attachment of one client, made and remade as needed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._pid = os.getpid()
        self._setup()
        _live.add(self)

    def _setup(self) -> None:
        self._lock = threading.Condition()
        self._attachment: Attachment | None = None
        self._retired: list[Attachment] = []
        self._drained: deque[bytes] = deque(maxlen=MAX_DRAINED)  # lost sessions of which no copy is under way any more
        self._connecting = False
        self._lent = 0
        self._failures = 0
        self._not_before = 0.0
        self._last_error = ""
        self._reachable = True
        self._closed = False

    def attach(self, deadline: float) -> Attachment:
        """The current attachment, made if need be. Raises Unavailable (at once while backing off), Deadline, or the
        answer to a hello.
        """
        attachment = self._attachment
        if attachment is not None and not attachment.gone:
            return attachment
        until = time.monotonic() + deadline
        with self._lock:
            while self._connecting:
                if not self._lock.wait(until - time.monotonic()):
                    raise Deadline("another thread is still connecting")
            if self._attachment is not None and not self._attachment.gone:
                return self._attachment
            if self._closed:
                raise Unavailable("the client is closed")
            if time.monotonic() < self._not_before:
                raise Unavailable(self._last_error)
            if not self._reap():
                raise Unavailable("leases or fills on an earlier daemon's blocks are still open: end them first")
            self._connecting = True
            drained = list(self._drained)
        hello = pb.HelloRequest(protocol=1, map=True, drained=drained)
        made = self._attach(hello, min(HELLO_DEADLINE, max(0.001, deadline)))
        with self._lock:
            self._connecting = False
            self._attachment = made
            self._drained = deque([session for session in self._drained if session not in drained], MAX_DRAINED)
            self._failures = 0
            self._lock.notify_all()
            closed = self._closed
            if not self._reachable:
                self._reachable = True
                log.info("kvtier: %s answers again", self.path)
        if closed:
            self.lost(made)
            raise Unavailable("the client is closed")
        for work, name in ((_watch, "kvtier-session"), (_populate, "kvtier-populate")):
            threading.Thread(target=work, args=(weakref.ref(self), made), name=name, daemon=True).start()
        return made

    def _attach(self, hello: pb.HelloRequest, deadline: float) -> Attachment:
        """A new session and its mapping. Whatever goes wrong ends this thread's turn: another may try after a pause."""
        session_socket = None
        try:
            session_socket = UnixSocket(self.path, hello, deadline)
            return Attachment(session_socket)
        except BaseException as error:
            if session_socket is not None:
                session_socket.close()
            self._failed(error)
            if isinstance(error, OSError | DecodeError):
                raise Unavailable(f"cannot attach to the daemon: {error}") from None
            raise

    def call(self, attachment: Attachment, verb: int, body: bytes, deadline: float) -> bytes:
        """One call on a socket of this attachment.

        Raises KvtierError of any kind. A socket that breaks is not the end: the session socket tells that.
        """
        sock, deadline = self._borrow(attachment, deadline)
        broken = True
        try:
            reply = sock.call(verb, body, deadline)
            broken = False
            return reply
        except ErrorAnswer as answered:
            broken = False
            raise answered.error from None
        finally:
            self._give_back(attachment, sock, broken)

    @contextmanager
    def several(self, attachment: Attachment, deadline: float) -> Iterator[UnixSocket]:
        """A socket of this attachment for calls that overlap. An answer that the caller leaves unread costs it."""
        sock, _ = self._borrow(attachment, deadline)
        broken = True
        try:
            yield sock
            broken = False
        except ErrorAnswer:
            broken = False
            raise
        finally:
            self._give_back(attachment, sock, broken=broken or sock.waiting > 0)

    def release(self, attachment: Attachment, ids: Sequence[int], deadline: float) -> None:
        """Ends leases without waiting for an answer. Never raises. What may not have arrived is a debt (`finish`)."""
        if attachment.gone:
            return
        try:
            sock, _ = self._borrow(attachment, deadline)
        except KvtierError:
            attachment.debts.extend((Verb.RELEASE, id_) for id_ in ids)
            return
        room = MAX_POSTED - len(sock.posted)
        try:
            for id_ in ids[:room]:
                sock.post(id_, deadline)
        except KvtierError:
            attachment.debts.extend((Verb.RELEASE, id_) for id_ in ids)  # a release said twice is said once
            self._give_back(attachment, sock, broken=True)
            return
        self._give_back(attachment, sock)
        if len(ids) > room:
            self.finish(attachment, Verb.RELEASE, ids[room:], deadline)

    def finish(self, attachment: Attachment, verb: int, ids: Sequence[int], deadline: float) -> None:
        """Releases or aborts ids. Never raises, and takes no longer than `deadline` in all.

        What got no answer is a debt: it is paid once the daemon answers again, else the session's end says it.
        """
        until = time.monotonic() + deadline
        for i, id_ in enumerate(ids):
            if attachment.gone:
                return
            left = deadline if i == 0 else max(0.001, until - time.monotonic())
            try:
                self.call(attachment, verb, pb.Held(id=id_).SerializeToString(), left)
            except (Deadline, Unavailable):
                attachment.debts.extend((verb, owed) for owed in ids[i:])
                return
            except KvtierError:
                pass  # NotFound: the call that would have opened this id never arrived

    def pay(self, attachment: Attachment) -> None:
        """Says again what got no answer, once idle sockets have told what arrived. Never raises; what fails again stays
        a debt."""
        self._confirm(attachment)
        for _ in range(len(attachment.debts)):
            try:
                verb, id_ = attachment.debts.popleft()
            except IndexError:
                return
            left = len(attachment.debts)
            self.finish(attachment, verb, [id_], HELLO_DEADLINE)
            if len(attachment.debts) > left:
                return

    def _confirm(self, attachment: Attachment) -> None:
        """Asks each idle socket that has posted releases whether they arrived: it may have broken since, and might not
        be borrowed again. What did not arrive becomes a debt. Ends at the first that does not answer."""
        for _ in range(MAX_SOCKETS):
            with self._lock:
                sock = next((one for one in attachment.idle if one.posted), None)
                if sock is None or attachment.gone:
                    return
                attachment.idle.remove(sock)
                self._lent += 1
            broken = True
            try:
                sock.call(Verb.RELEASE, pb.Held(id=sock.posted[-1][1]).SerializeToString(), HELLO_DEADLINE)
                broken = False
            except ErrorAnswer:
                broken = False
            except KvtierError:
                return
            finally:
                self._give_back(attachment, sock, broken)

    def use(self, attachment: Attachment) -> None:
        """One more lease or fill reads or writes the mapping. Raises Unavailable if the attachment is gone."""
        with self._lock:
            if attachment.gone:
                raise Unavailable("the daemon went away")
            attachment.users += 1

    def unuse(self, attachment: Attachment) -> None:
        """A lease or fill has ended; the last one on a lost attachment unmaps it."""
        with self._lock:
            attachment.users -= 1
            if not attachment.gone or attachment.users or attachment not in self._retired:
                return
            self._reap()
            self._drained.append(attachment.session)
        self._goodbye()

    def _goodbye(self) -> None:
        """Of a closed client, which connects no more: says now which sessions are drained, if the daemon is there."""
        with self._lock:
            if not self._closed or not self._drained:
                return
            drained = list(self._drained)
            self._drained.clear()
        try:
            UnixSocket(self.path, pb.HelloRequest(protocol=1, drained=drained), HELLO_DEADLINE).close()
        except (KvtierError, OSError, DecodeError):
            pass  # the end of the process says it

    def lost(self, attachment: Attachment) -> None:
        """The daemon behind this attachment went away, or its session did."""
        with self._lock:
            if attachment.gone:
                return
            attachment.gone = True
            if not self._closed:
                self._reachable = False
                log.warning("kvtier: the daemon at %s went away; until it is back every lookup is a miss", self.path)
            if self._attachment is attachment:
                self._attachment = None
            self._retired.append(attachment)
            for sock in (attachment.session_socket, *attachment.idle):  # lent ones are closed when they come back
                attachment.debts.extend((Verb.RELEASE, id_) for _, id_ in sock.posted)
                sock.close()
            attachment.idle.clear()
            self._lock.notify_all()
            self._reap()
            if attachment.debts and not attachment.users:
                self._drained.append(attachment.session)

    def close(self) -> None:
        """Closes sockets and mapping. What is still leased stays mapped and pinned until these leases end."""
        with self._lock:
            self._closed = True
            attachment = self._attachment
        if attachment is not None:
            self.lost(attachment)
        self._goodbye()

    def _borrow(self, attachment: Attachment, deadline: float) -> tuple[UnixSocket, float]:
        """A socket of the pool, or a new one, and what is left of the deadline."""
        with self._lock:
            if attachment.idle and not attachment.gone:
                self._lent += 1
                return attachment.idle.pop(), deadline
        until = time.monotonic() + deadline
        with self._lock:
            while True:
                if attachment.gone:
                    raise Unavailable("the daemon went away")
                if attachment.idle:
                    self._lent += 1
                    return attachment.idle.pop(), max(0.001, until - time.monotonic())
                if self._lent < MAX_SOCKETS:
                    self._lent += 1
                    break
                if not self._lock.wait(until - time.monotonic()):
                    raise Deadline(f"all {MAX_SOCKETS} sockets of this client are busy")
        try:
            hello = pb.HelloRequest(protocol=1, session=attachment.session)
            sock = UnixSocket(self.path, hello, min(HELLO_DEADLINE, deadline))
            return sock, max(0.001, until - time.monotonic())
        except BaseException as error:
            self._give_back(attachment, None)
            if isinstance(error, NotFound):  # another daemon took the socket's path
                self.lost(attachment)
            if isinstance(error, NotFound | OSError | DecodeError):
                raise Unavailable(f"no socket for this call: {error}") from None
            raise

    def _give_back(self, attachment: Attachment, sock: UnixSocket | None, broken: bool = False) -> None:
        with self._lock:
            self._lent -= 1
            if sock is not None:
                if broken or attachment.gone:
                    attachment.debts.extend((Verb.RELEASE, id_) for _, id_ in sock.posted)
                    sock.close()
                else:
                    attachment.idle.append(sock)
            self._lock.notify()

    def _failed(self, error: BaseException) -> None:
        first, longest = _BACKOFF
        with self._lock:
            self._connecting = False
            self._failures += 1
            pause = min(longest, first * 2 ** min(self._failures - 1, 10)) * random.uniform(0.5, 1.0)
            self._not_before = time.monotonic() + pause
            self._last_error = str(error) or type(error).__name__
            if self._reachable and not isinstance(error, Unmappable):
                self._reachable = False
                log.warning("kvtier: %s; until it is there every lookup is a miss", error)
            self._lock.notify_all()

    def _reap(self) -> bool:
        """Unmaps lost attachments that nobody uses. True if none is left. Under the lock."""
        for attachment in self._retired:
            if not attachment.users:
                attachment.__dict__.pop("memory", None)
                attachment.mapping.close()
        self._retired = [attachment for attachment in self._retired if attachment.users]
        return not self._retired

    def _after_fork(self) -> None:
        """In the child: the parent's mapping is fenced off and never unmapped by us, and nothing is attached."""
        inherited = [*self._retired, *([self._attachment] if self._attachment else [])]
        for attachment in inherited:
            attachment.mapping.guard_after_fork()
            attachment.gone = True
        self._setup()
        self._pid = os.getpid()


def _watch(owner: weakref.ref[Connection], attachment: Attachment) -> None:
    """Waits on the session socket for the end of the stream, and pays debts. Holds no reference to the connection, so a
    forgotten client can be collected.
    """
    session_socket = attachment.session_socket
    try:
        frames.set_timeouts(session_socket.sock, _TICK, _TICK)
        while not attachment.gone:
            try:
                if not session_socket.sock.recv(1):  # nothing is ever sent here
                    break
            except BlockingIOError:
                connection = owner()
                if connection is None:
                    break
                connection.pay(attachment)
                del connection
    except OSError:
        pass  # closed meanwhile
    connection = owner()
    if connection is not None:
        connection.lost(attachment)
    else:
        session_socket.close()


def _populate(owner: weakref.ref[Connection], attachment: Attachment) -> None:
    """Makes page table entries for what the daemon has backed with memory, and follows it until all of it is."""
    done = 0
    while not attachment.gone:
        connection = owner()
        if connection is None:
            return
        try:
            status = json.loads(pb.StatusReply.FromString(connection.call(attachment, Verb.STATUS, b"", 1.0)).json)
            ready, total = status["arena_ready_bytes"], status["arena_bytes"]
            while done < ready and not attachment.gone:
                connection.use(attachment)
                try:
                    attachment.mapping.populate(done, min(POPULATE_STEP, ready - done))
                finally:
                    connection.unuse(attachment)
                done += POPULATE_STEP
        except (KvtierError, OSError):
            return  # only a convenience: the copies will fault instead
        del connection
        if done >= total:
            return
        time.sleep(0.2)


_live: weakref.WeakSet[Connection] = weakref.WeakSet()


def _fork_children_start_afresh() -> None:
    forget_all()
    for connection in list(_live):
        connection._after_fork()


os.register_at_fork(after_in_child=_fork_children_start_afresh)
