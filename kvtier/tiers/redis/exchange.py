"""Questions to Redis and their answers, whole or the connection is closed. Only this and connections.py import redis.

redis-py makes the connections and reads short answers with hiredis; blocks are sent from the arena and received into it
on the same socket, without a copy between. A connection is marked before a question goes out and cleared after the
answer's last byte was read. If an exception comes in between, the next thread that takes the connection finds the mark
and connects anew. So no answer ever reaches another question.

A `RedisConnection` belongs to one thread at a time. Every wait ends within the timeout of a question, or twice that.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import redis
from redis import exceptions

from kvtier.errors import Lost
from kvtier.tiers.redis.location import Address
from kvtier.tiers.redis.value import FRONT_BYTES

WINDOW = 2**20  # bytes under way before an answer is read: many small values at once, of a MiB and more one by one
MOST_UNDER_WAY = 128  # questions
JOIN = 16 * 1024  # shorter pieces are sent together
ROUNDS = 5  # redirections of a cluster that are followed

# OpenSSL's codes of the alerts by which a server refuses the certificate of this end, or its absence.
REFUSED_CERTIFICATE = {
    "SSLV3_ALERT_BAD_CERTIFICATE", "SSLV3_ALERT_CERTIFICATE_EXPIRED", "SSLV3_ALERT_CERTIFICATE_REVOKED",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN", "SSLV3_ALERT_NO_CERTIFICATE", "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED", "TLSV1_ALERT_UNKNOWN_CA",
}  # fmt: skip

Piece = bytes | memoryview


class Down(Exception):
    """No answer, or not one that Redis gives. `permanent`: trying again cannot help, the settings are wrong."""

    def __init__(self, reason: str, permanent: bool = False) -> None:
        super().__init__(reason)
        self.permanent = permanent


class Busy(Down):
    """All connections were in use for too long: nothing was sent."""


class Refused(Exception):
    """Redis answered with an error. `kind` is what the caller can do about it: full, readonly, denied, other."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Nodes(Protocol):
    """What knows which node has a name and how to connect to it: RedisConnections."""

    def address_of(self, connection: RedisConnection, name: bytes) -> Address: ...
    def moved(self, slot: int, address: Address) -> None: ...
    def connect(self, address: Address) -> Any: ...


@dataclass(slots=True)
class RedisQuestion:
    """One command: the name that says which node of a cluster it is for, its bytes, and what reads the answer."""

    name: bytes
    pieces: tuple[Piece, ...]
    receive: Callable[[Any], Any]
    nbytes: int


def command(*words: bytes | int) -> bytes:
    """A command's bytes."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        text = b"%d" % word if isinstance(word, int) else word
        parts.append(b"$%d\r\n%s\r\n" % (len(text), text))
    return b"".join(parts)


def ask(name: bytes, *words: bytes | int) -> RedisQuestion:
    """A short question about a name, with a short answer."""
    raw = command(*words)
    return RedisQuestion(name, (raw,), _short, len(raw))


def ask_to_keep(name: bytes, front: bytes, block: memoryview, ttl: int) -> RedisQuestion:
    """SET of a block behind its front; the answer is b"OK"."""
    tail = (b"\r\n$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(ttl)), ttl)) if ttl else b"\r\n"
    nbytes = len(front) + len(block)
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s" % (5 if ttl else 3, len(name), name, nbytes, front)
    return RedisQuestion(name, (head, block, tail), _short, len(head) + len(block) + len(tail))


def ask_for(name: bytes, block: memoryview, until: float) -> RedisQuestion:
    """The value under a name, its block straight into `block`, and no more: the front, or None if there is no value."""
    raw = command(b"GETRANGE", name, 0, FRONT_BYTES + len(block))  # one byte too many: shows what is longer
    return RedisQuestion(name, (raw,), lambda connection: _receive_block(connection, block, until), len(raw))


class RedisConnection:
    """One thread's connection: a redis-py connection to each node. `marked` while an answer is outstanding."""

    def __init__(self, nodes: Nodes, generation: int) -> None:
        self._nodes, self.generation = nodes, generation
        self.by_node: dict[Address, Any] = {}
        self.marked = self.taken = False

    def drop(self) -> None:
        connections, self.by_node = self.by_node, {}
        for connection in connections.values():
            connection.disconnect()
        self.marked = False

    def tell(self, address: Address, *words: bytes | int) -> Any:
        """One short question to one node. Raises Down, Refused."""
        (answer,) = self._exchange(address, [ask(b"", *words)])
        if isinstance(answer, Exception):
            raise _refused(answer)
        return answer

    def ask(self, questions: Sequence[RedisQuestion]) -> list[Any]:
        """The answers in order, Refused in the place of a refusal. Raises Down, Lost for a value that is no block."""
        answers: list[Any] = [None] * len(questions)
        left = list(range(len(questions)))
        for attempt in range(ROUNDS):
            groups: dict[Address, list[int]] = {}
            for i in left:
                groups.setdefault(self._nodes.address_of(self, questions[i].name), []).append(i)
            left = []
            for address, group in groups.items():
                for i, answer in zip(group, self._exchange(address, [questions[i] for i in group]), strict=True):
                    if isinstance(answer, exceptions.MovedError):
                        self._nodes.moved(answer.slot_id, _address(answer, address))
                        left.append(i)
                    elif isinstance(answer, exceptions.AskError):
                        answer = self._asked(_address(answer, address), questions[i])
                        left += [i] if isinstance(answer, exceptions.AskError | exceptions.TryAgainError) else []
                    elif isinstance(answer, exceptions.TryAgainError):
                        left.append(i)
                    answers[i] = answer
            if not left:
                break
            time.sleep(0.01 * attempt)
        return [_refused(answer) if isinstance(answer, Exception) else answer for answer in answers]

    def _asked(self, address: Address, question: RedisQuestion) -> Any:
        """A question about a slot that is on its way to another node."""
        self.tell(address, b"ASKING")  # by itself: hiredis would read on into a block that follows
        return self._exchange(address, [question])[0]

    def _connection(self, address: Address) -> Any:
        connection = self.by_node.get(address)
        if connection is None or connection._sock is None:
            connection = self.by_node[address] = self._nodes.connect(address)
        return connection

    def _exchange(self, address: Address, questions: Sequence[RedisQuestion]) -> list[Any]:
        """All questions to one node, a window at a time. ResponseErrors stand among the answers. Raises Down, Lost."""
        connection = self._connection(address)
        answers: list[Any] = []
        self.marked = True
        try:
            sent = under_way = 0
            while len(answers) < len(questions):
                batch: list[Piece] = []
                for question in questions[sent : len(answers) + MOST_UNDER_WAY]:
                    if under_way and under_way + question.nbytes > WINDOW:
                        break
                    batch.extend(question.pieces)
                    under_way += question.nbytes
                    sent += 1
                if batch:
                    connection.send_packed_command(_joined(batch), check_health=False)
                question = questions[len(answers)]
                try:
                    answers.append(question.receive(connection))
                except exceptions.ResponseError as error:
                    answers.append(error)
                under_way -= question.nbytes
        except (exceptions.RedisError, OSError) as error:
            raise down(error, address) from error
        self.marked = False
        return answers


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same bytes in fewer pieces: neighbours that are short become one."""
    found: list[Piece] = []
    for short, group in groupby(pieces, lambda piece: len(piece) <= JOIN):
        run = list(group)
        found += [b"".join(run)] if short else run
    return found


def _short(connection: Any) -> Any:
    """By hiredis. Its parser keeps nothing: as many answers are read as were asked for, and these are short."""
    return connection.read_response()


def _receive_block(connection: Any, block: memoryview, until: float) -> bytes | None:
    """See `ask_for`. The socket is redis-py's own: a second buffer would cost as much as the socket."""
    sock = connection._sock
    line = b"$%d\r\n" % (FRONT_BYTES + len(block))
    head = memoryview(bytearray(len(line) + FRONT_BYTES))
    got = 0
    while got < len(head):
        got += _some(sock, head[got:], until)
        if head[: min(got, len(line))] != line[:got]:
            _other(connection, sock, bytes(head[:got]), until)
            return None
    end = memoryview(bytearray(2))
    for part in (block, end):
        got = 0
        while got < len(part):
            got += _some(sock, part[got:], until)
    if bytes(end) != b"\r\n":
        raise redis.InvalidResponse("a value without its end")
    return bytes(head[len(line) :])


def _other(connection: Any, sock: Any, raw: bytes, until: float) -> None:
    """An answer that is not as long as asked: returns if there is no value. Raises ResponseError, Lost."""
    part = memoryview(bytearray(256))
    while b"\r\n" not in raw and len(raw) < 4096:
        raw += bytes(part[: _some(sock, part, until)])
    line, _, rest = raw.partition(b"\r\n")
    if line.startswith(b"-"):
        raise connection._parser.parse_error(line[1:].decode(errors="replace"))
    if line == b"$-1":
        return
    if line == b"$0":
        while len(rest) < 2:
            rest += bytes(part[: _some(sock, part[:2], until)])
        return
    if line.startswith(b"$") and line[1:].isdigit():
        # The connection stays marked: bytes of the value are still to come.
        raise Lost(f"a value of {int(line[1:])} bytes at least")
    raise redis.InvalidResponse("not an answer to GETRANGE")


def _some(sock: Any, into: memoryview, until: float) -> int:
    n: int = sock.recv_into(into)
    if n == 0:
        raise ConnectionResetError("the server closed the connection")
    if time.monotonic() > until:
        raise TimeoutError("the answer takes too long")
    return n


def _address(error: exceptions.AskError, asked: Address) -> Address:
    return (error.host or asked[0]), int(error.port)


def _refused(error: Exception) -> Refused:
    """What an answer means for the caller. Raises Down for one that says that the server cannot work now."""
    text = f"{type(error).__name__}: {error}"[:200]
    if isinstance(error, exceptions.MovedError):
        reason = "this is one node of a cluster, and others have blocks too: write cluster = true"
        raise Down(reason, permanent=True) from error
    if isinstance(
        error,
        exceptions.BusyLoadingError | exceptions.ClusterDownError | exceptions.TryAgainError | exceptions.AskError,
    ):
        raise Down(text) from error
    if isinstance(error, exceptions.OutOfMemoryError):
        return Refused("full", "out of memory, and its policy evicts nothing")
    if isinstance(error, exceptions.ReadOnlyError):
        return Refused("readonly", "a replica: it takes no writes")
    if isinstance(error, exceptions.NoPermissionError):
        return Refused("denied", str(error)[:200])
    return Refused("other", text)


def down(error: Exception, address: Address) -> Down:
    """What failed, by classes and codes of redis-py and OpenSSL, and a reason that says what to look at."""
    node = f"{address[0]}:{address[1]}" if address[1] else address[0]
    text = str(error)[:200]
    if isinstance(error, exceptions.AuthenticationError):
        return Down(f"{node} refuses user and password: {text or 'wrong or missing'}", permanent=True)
    if isinstance(error, exceptions.NoPermissionError):
        return Down(f"{node} refuses this user a command: {text}", permanent=True)
    if isinstance(error, socket.timeout | redis.TimeoutError):
        return Down(f"{node} does not answer in time")
    if (fault := _tls_fault(error)) is not None:
        if isinstance(fault, ssl.SSLCertVerificationError):
            return Down(f"{node} shows a certificate that `ca` does not vouch for: {text}", permanent=True)
        if fault.reason in REFUSED_CERTIFICATE:
            return Down(f"{node} wants another certificate of this end: {text}", permanent=True)
        return Down(f"{node} does not speak TLS, or not as this end does: {text}", permanent=True)
    return Down(f"{node}: {text or type(error).__name__}")


def _tls_fault(error: BaseException | None) -> ssl.SSLError | None:
    """The fault of TLS from which an error of redis-py comes. None if there is none, or the connection ended."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return None if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError) else error
