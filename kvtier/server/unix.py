"""The Unix transport: the fast path for processes on this host, a socket over which slots travel by reference.

One thread per socket answers its calls in order. The first frame is a hello: it opens or joins a session, and its
answer hands out the arena's file descriptor if the daemon has a pidfd of the client. Every wait has a limit of
`PATIENCE` (2 s): for a hello, for the rest of a frame that has begun (a last piece may come as much later still), and
for a client to take its answer. A malformed call gets an error or a closed socket and stores nothing; a process that
goes on sending such calls is answered more and more slowly. Thread-safe.
"""

from __future__ import annotations

import array
import fcntl
import logging
import os
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from google.protobuf.message import DecodeError

from kvtier.errors import Invalid, KvtierError, Unavailable
from kvtier.protocol import frames
from kvtier.protocol.fields import check_fields
from kvtier.protocol.frames import Verb
from kvtier.protocol.limits import MAX_DRAINED, PATIENCE, SESSION_ID
from kvtier.protocol.v1 import kvtier_pb2 as pb
from kvtier.server.logs import fields
from kvtier.server.meters import Series
from kvtier.server.sessions import ROLES, Peer, Session
from kvtier.server.socket_claim import SocketClaim
from kvtier.server.verbs import HANDLERS, Service
from kvtier.version import __version__

PROTOCOL = 1
MAX_UNKNOWN = 64  # sockets that have not sent a valid hello
MAX_SOCKETS = 2048
FIRST_REFUSAL, MAX_REFUSAL = 0.001, 0.1  # seconds that a malformed call costs: the first of a row, and at most
MAX_LARGE = 8  # frames above `frames.SMALL` that are in memory at once, each with up to 4 MiB of what is made of it
_SO_PEERPIDFD = 77
_STACK_BYTES = 512 * 1024

Hello = tuple[int, pb.HelloRequest]  # the number of the request, and what it says
log = logging.getLogger(__name__)


class UnixServer:
    """Listens on `path`. `peers` decides who a connecting process is (uid, gid, pid -> Peer), or raises Denied. Raises
    Unavailable if another daemon serves this path. `start` returns at once.
    """

    def __init__(self, path: Path, service: Service, peers: Callable[[int, int, int], Peer], mode: int = 0o600) -> None:
        self._path = path
        self._service = service
        self._peers = peers
        self._lock = threading.Condition()
        self._sockets: set[socket.socket] = set()
        self._greeting = 0
        self._refused = 0
        self._closing = False
        self._large = threading.Semaphore(MAX_LARGE)
        self._refusals = Refusals()
        self._meters: dict[int, Series] = {verb: service.meters.series("lane", verb.name.lower()) for verb in Verb}
        self._unknown = service.meters.series("lane", "unknown")
        self._claim = SocketClaim(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._listener.bind(str(path))
            path.chmod(mode)
            self._listener.listen(128)
        except OSError as error:
            self._listener.close()
            self._claim.release()
            raise Unavailable(f"cannot listen on {path}: {error.strerror}") from None
        self._acceptor = threading.Thread(target=self._accept, name="unix-accept", daemon=True)

    def start(self) -> None:
        self._acceptor.start()

    def alive(self) -> bool:
        """Whether the accepting thread runs."""
        return self._acceptor.is_alive()

    def close(self) -> None:
        """Stops accepting, lets calls finish (at most twice `PATIENCE`), closes every socket, removes the path."""
        with self._lock:
            self._closing = True
            sockets = list(self._sockets)
        self._listener.shutdown(socket.SHUT_RDWR)
        if self._acceptor.ident is not None:
            self._acceptor.join(PATIENCE)
        self._listener.close()
        for sock in sockets:
            try:
                sock.shutdown(socket.SHUT_RD)  # the thread answers the call it is in, then reads the end of the stream
            except OSError:
                pass  # gone already
        with self._lock:
            if not self._lock.wait_for(lambda: not self._sockets, PATIENCE):
                log.warning("calls cut off", extra=fields(sockets=len(self._sockets)))
        self._claim.close()

    def gauges(self) -> dict[str, int]:
        with self._lock:
            sockets, greeting, refused = len(self._sockets), self._greeting, self._refused
        return {"lane_sockets": sockets, "lane_strangers": greeting, "lane_refused": refused}

    def _accept(self) -> None:
        failing = False
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                if not failing:
                    log.warning("accepting fails", extra=fields(socket=self._path, reason=error.strerror))
                failing = True
                time.sleep(0.1)  # out of descriptors: let some close
                continue
            if failing:
                log.info("accepting again", extra=fields(socket=self._path))
                failing = False
            with self._lock:
                full = self._greeting >= MAX_UNKNOWN or len(self._sockets) >= MAX_SOCKETS or self._closing
                if not full:
                    self._greeting += 1
                    self._sockets.add(sock)
                self._refused += full
            if full:
                sock.close()
                continue
            before = threading.stack_size(_STACK_BYTES)
            try:
                threading.Thread(target=self._serve, args=(sock,), name="unix", daemon=True).start()
            except RuntimeError:
                self._drop(sock, greeting=True)
                log.warning("no thread for another socket", extra=fields(socket=self._path))
            finally:
                threading.stack_size(before)

    def _drop(self, sock: socket.socket, greeting: bool) -> None:
        sock.close()
        with self._lock:
            self._sockets.discard(sock)
            self._greeting -= greeting
            self._lock.notify_all()

    def _serve(self, sock: socket.socket) -> None:
        session: Session | None = None
        greeting = True
        began = time.perf_counter()
        try:
            frames.set_timeouts(sock, PATIENCE, PATIENCE)
            session = self._hello(sock)
            self._meters[Verb.HELLO].add(time.perf_counter() - began, 0, 0, 0)
            with self._lock:
                self._greeting -= 1
            greeting = False
            self._calls(sock, session)
        except (OSError, frames.Closed, frames.Idle):
            pass  # the peer is gone, or sent nothing
        except KvtierError as error:
            (self._meters[Verb.HELLO] if greeting else self._unknown).add(time.perf_counter() - began, error.code, 0, 0)
            self._refusals.wait(error, _credentials(sock)[2])
            _refuse(sock, error, self._service.boot)
        except Exception:
            log.exception("lane socket failed")
        finally:
            try:
                if session is not None:
                    self._service.sessions.leave(session)
            finally:
                self._drop(sock, greeting)

    def _hello(self, sock: socket.socket) -> Session:
        """Reads the first frame and answers it. Raises as `frames.receive` does; KvtierError for a refused hello."""
        buffer = memoryview(bytearray(frames.HEADER.size + frames.MAX_HELLO))
        passed = array.array("i")
        until = time.monotonic() + PATIENCE
        try:
            data, ancillary, _, _ = sock.recvmsg(len(buffer), socket.CMSG_LEN(4 * 4), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            raise frames.Idle from None
        try:
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    passed.frombytes(payload[: len(payload) // 4 * 4])
            request, message = self._read_hello(sock, buffer, data, until)
            uid, gid, pid = _credentials(sock)
            peer = self._peers(uid, gid, pid)
            for old in message.drained:
                self._service.sessions.drained(old, peer)
            pidfd = _pidfd(sock, passed, pid)
        finally:
            for fd in passed:
                os.close(fd)
        if message.session:
            if pidfd is not None:
                os.close(pidfd)
            session = self._service.sessions.join(message.session, peer)
        else:
            session = self._service.sessions.open(peer, pidfd)
        try:
            self._welcome(sock, request, session, message.map and self._service.sessions.watched(session))
        except BaseException:  # the client is gone before its answer: this socket does not keep the session
            self._service.sessions.leave(session)
            raise
        return session

    def _welcome(self, sock: socket.socket, request: int, session: Session, mapped: bool) -> None:
        """Answers a hello, with the arena's file descriptor if `mapped`."""
        arena, peer = self._service.store.arena, session.peer
        reply = pb.HelloReply(session=session.id, tenant=peer.tenant, role=ROLES[peer.role], server=__version__)
        rights = []
        if mapped:
            reply.arena_bytes, reply.ready_bytes = arena.nbytes, arena.ready_bytes
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [arena.fd]))]
        sock.sendmsg([frames.pack(0, request, self._service.boot, reply.SerializeToString())], rights)

    def _read_hello(self, sock: socket.socket, buffer: memoryview, first: bytes, until: float) -> Hello:
        if not first:
            raise frames.Closed
        buffer[: len(first)] = first
        kind, request, _, body = frames.continue_receive(sock, buffer, len(first), until - time.monotonic())
        if kind != Verb.HELLO:
            raise Invalid(f"the first frame must be a hello, not verb {kind}")
        try:
            message = pb.HelloRequest.FromString(bytes(body))
        except DecodeError:
            raise Invalid("the hello is not a HelloRequest") from None
        if message.protocol != PROTOCOL:
            raise Invalid(f"this daemon speaks protocol {PROTOCOL}, not {message.protocol}")
        if len(message.drained) > MAX_DRAINED or len(message.session) not in (0, SESSION_ID):
            raise Invalid(f"a hello names at most {MAX_DRAINED} drained sessions, of {SESSION_ID} bytes each")
        return request, message

    def _calls(self, sock: socket.socket, session: Session) -> None:
        buffer, boot = frames.Buffer(self._large), self._service.boot
        try:
            while True:
                try:
                    verb, request, _, body = buffer.receive(sock, PATIENCE)
                except frames.Idle:
                    continue
                except frames.Closed:
                    return
                began = time.perf_counter()
                quiet = verb == Verb.RELEASE | frames.QUIET
                if quiet:
                    verb = Verb.RELEASE
                status, reply, undo = self._answer(session, verb, body)
                sent = 0 if quiet else frames.HEADER.size + len(reply)
                series = self._meters.get(verb, self._unknown)
                series.add(time.perf_counter() - began, status, frames.HEADER.size + len(body), sent)
                buffer.done()
                if status == Invalid.code:
                    self._refusals.wait(Invalid(), session.peer.pid)
                elif not status:
                    self._refusals.forgive(session.peer.pid)
                if quiet:
                    continue
                try:
                    sock.sendall(frames.pack(status, request, boot, reply))
                except OSError:
                    if undo:
                        session.undo(undo)
                    return
                del reply  # an idle socket keeps nothing of its last call
        finally:
            buffer.done()

    def _answer(self, session: Session, verb: int, body: memoryview) -> tuple[int, bytes, int]:
        """Serves one call: (status, body of the answer, id to take back if the answer cannot be delivered, or 0)."""
        handler = HANDLERS.get(verb)
        try:
            if handler is None:
                raise Invalid(f"unknown verb {verb}")
            session.allow(handler.role)
            if handler.most_fields:
                check_fields(body, handler.most_fields)
            message = handler.request.FromString(body)  # type: ignore[arg-type]
            reply = handler.call(self._service, session, message).SerializeToString()
            return 0, reply, message.id if handler.undo else 0  # type: ignore[attr-defined]
        except KvtierError as error:
            return error.code, _text(error), 0
        except DecodeError:
            return Invalid.code, f"the body is not the message that verb {verb} takes".encode(), 0
        except Exception:
            log.exception("verb failed", extra=fields(verb=verb))
            return KvtierError.code, b"internal error; see the daemon's log", 0


class Refusals:
    """Makes malformed calls slow: each in a row of one process waits twice as long as the last, until a good call.
    Otherwise a loop of bad input would keep the interpreter from all other clients. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_a_row: OrderedDict[int, int] = OrderedDict()  # by process

    def wait(self, error: KvtierError, pid: int) -> None:
        """Waits if it was the sender's mistake."""
        if isinstance(error, Invalid):
            with self._lock:
                n = self._in_a_row.pop(pid, 0)
                self._in_a_row[pid] = min(n + 1, 16)
                if len(self._in_a_row) > MAX_UNKNOWN:
                    self._in_a_row.popitem(last=False)
            time.sleep(min(MAX_REFUSAL, FIRST_REFUSAL * 2**n))

    def forgive(self, pid: int) -> None:
        """The process has made a good call."""
        if pid in self._in_a_row:
            with self._lock:
                self._in_a_row.pop(pid, None)


def _text(error: KvtierError) -> bytes:
    return str(error).encode(errors="backslashreplace")  # it may quote what the caller sent


def _refuse(sock: socket.socket, error: KvtierError, boot: int) -> None:
    try:
        sock.sendall(frames.pack(error.code, 0, boot, _text(error)))
    except OSError:
        pass  # the peer is gone


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(uid, gid, pid) of the process that connected, as the kernel saw it."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid, gid, pid


def _pidfd(sock: socket.socket, passed: array.array[int], pid: int) -> int | None:
    """A pidfd of the peer: the kernel's (6.5 and later), a copy of one that it passed if that is its own, or None."""
    try:
        (fd,) = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))
        return int(fd)
    except OSError:
        pass
    for fd in passed if pid else ():  # 0: a process of another pid namespace; all of these look alike here
        try:
            info = Path(f"/proc/self/fdinfo/{fd}").read_text()
        except OSError:
            continue
        if any(line.split() == ["Pid:", str(pid)] for line in info.splitlines()):
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    return None
