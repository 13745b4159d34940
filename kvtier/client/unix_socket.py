"""One connection of a client to the daemon's unix socket: the hello, then calls in order. The next call may be sent
before the last is answered.

A release may go without an answer (`post`); the answer to any later call tells that it arrived. Not thread-safe:
`connection` lends a socket to one call at a time. A socket that fails, or is given up with an answer still on its way,
must be closed: what it would say next is not known.
"""

from __future__ import annotations

import array
import itertools
import os
import socket
import weakref
from collections import deque

from kvtier.errors import Deadline, Invalid, KvtierError, Unavailable, from_code
from kvtier.protocol import frames
from kvtier.protocol.frames import QUIET, Verb
from kvtier.protocol.v1 import kvtier_pb2 as pb

MAX_POSTED = 64  # releases on their way that nothing has told of; the next one is a call


class ErrorAnswer(Exception):
    """Carries an error that the daemon answered with: the call failed, the socket is fine."""

    def __init__(self, error: KvtierError) -> None:
        super().__init__(error)
        self.error = error


class UnixSocket:
    """One socket after its hello.

    posted   (request id, id) of releases that may not have arrived, oldest first
    fd       the arena's, if it was asked for and given
    """

    def __init__(self, path: str, hello: pb.HelloRequest, deadline: float) -> None:
        """Connects and says hello. Raises Unavailable, Deadline or what the daemon answers."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._deadline = 0.0
        self._requests = itertools.count(1)
        self._sent: deque[int] = deque()  # calls without an answer yet
        self.posted: deque[tuple[int, int]] = deque()
        self.fd: int | None = None
        _open.add(self)
        try:
            self._set_deadline(deadline)
            self.sock.connect(path)
            pidfd = os.pidfd_open(os.getpid())
            try:
                body = frames.pack(Verb.HELLO, 0, int(deadline * 1000), hello.SerializeToString())
                self.sock.sendmsg([body], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))])
            finally:
                os.close(pidfd)
            self.boot, self.hello = self._read_hello(deadline)
        except BlockingIOError:
            self.close()
            raise Deadline(f"the daemon at {path} did not answer within {deadline:g} s") from None
        except (OSError, frames.Closed) as error:
            self.close()
            why = getattr(error, "strerror", None) or "it closed the connection"
            raise Unavailable(f"no daemon at {path}: {why}") from None
        except Invalid as error:  # nothing the caller can mend
            self.close()
            raise Unavailable(f"no daemon of this version at {path}: {error}") from None
        except BaseException:
            self.close()
            raise
        self._buffer = frames.Buffer()

    def _read_hello(self, deadline: float) -> tuple[int, pb.HelloReply]:
        data, ancillary, _, _ = self.sock.recvmsg(frames.MAX_HELLO, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.fd = array.array("i", payload[:4])[0]
        if not data:
            raise frames.Closed
        buffer = memoryview(bytearray(frames.HEADER.size + frames.MAX_HELLO))
        buffer[: len(data)] = data
        status, _, boot, body = frames.continue_receive(self.sock, buffer, len(data), deadline)
        if status:
            raise from_code(status, bytes(body).decode(errors="replace"))
        return boot, pb.HelloReply.FromString(bytes(body))

    def call(self, verb: int, body: bytes, deadline: float) -> bytes:
        """One call and its answer, each wait within `deadline` seconds. Raises ErrorAnswer, Deadline or Unavailable."""
        self.send(verb, body, deadline)
        return self.answer()

    def send(self, verb: int, body: bytes, deadline: float) -> None:
        """Sends one call; `deadline` holds for its answer too. Raises Deadline or Unavailable."""
        self._sent.append(self._push(verb, body, deadline))

    def post(self, id_: int, deadline: float) -> None:
        """Sends a release for which no answer comes. Raises Deadline or Unavailable."""
        self.posted.append((0, id_))  # before it is sent: what breaks half-way may have arrived or not
        request = self._push(Verb.RELEASE | QUIET, pb.Held(id=id_).SerializeToString(), deadline)
        self.posted[-1] = (request, id_)

    def answer(self) -> bytes:
        """The answer to the oldest call without one. Raises ErrorAnswer; Deadline, Unavailable: transport faults."""
        request = self._sent.popleft()
        try:
            status, answered, _, reply = self._buffer.receive(self.sock, self._deadline)
        except (BlockingIOError, TimeoutError, frames.Idle):
            raise Deadline(f"no answer within {self._deadline * 1000:g} ms") from None
        except (OSError, frames.Closed, KvtierError) as error:
            raise _broken(error) from None
        if answered != request:
            raise Unavailable("the daemon answered another call")
        posted = self.posted
        while posted and posted[0][0] < request:
            posted.popleft()
        if status:
            raise ErrorAnswer(from_code(status, bytes(reply).decode(errors="replace")))
        answer = bytes(reply)
        self._buffer.done()
        return answer

    @property
    def waiting(self) -> int:
        """Calls that are sent and not answered."""
        return len(self._sent)

    def close(self) -> None:
        """Ends the connection and wakes whoever reads from it."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected
        self.forget()

    def forget(self) -> None:
        """Closes this process's descriptors and no more: in a fork child, where the parent's connection lives on."""
        self.sock.close()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _push(self, verb: int, body: bytes, deadline: float) -> int:
        if deadline != self._deadline:
            self._set_deadline(deadline)
        request = next(self._requests)
        try:
            self.sock.sendall(frames.pack(verb, request, int(deadline * 1000), body))
        except (BlockingIOError, TimeoutError):
            raise Deadline(f"not sent within {deadline * 1000:g} ms") from None
        except OSError as error:
            raise _broken(error) from None
        return request

    def _set_deadline(self, deadline: float) -> None:
        frames.set_timeouts(self.sock, deadline, deadline)
        self._deadline = deadline


def _broken(error: BaseException) -> Unavailable:
    return Unavailable(f"the connection broke: {str(error) or 'closed by the daemon'}")


# all that are open, those lent and those that are just connecting too
_open: weakref.WeakSet[UnixSocket] = weakref.WeakSet()


def forget_all() -> None:
    """In a fork child: closes what it inherited."""
    for one in list(_open):
        one.forget()
