"""How a client hangs on to a daemon over gRPC: the channel, who it says it is, what failures are called, and what is
left of it after a fork.

gRPC connects and reconnects by itself, with jittered pauses of 0.1 to 1 s; calls in between fail at once with what the
last attempt met. Every call has a deadline. A fork child leaves its parent's channel alone and makes its own. gRPC does
not always survive a fork (threads of the parent that were calling leave its locks taken), so the child's first call
runs aside, and if that never returns gRPC is given up there. Thread-safe.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from kvtier.errors import Deadline, Invalid, KvtierError, Unauthenticated, Unavailable
from kvtier.protocol import rpc
from kvtier.protocol.frames import Verb

_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_TOKEN = re.compile(r"[!-~]{1,256}")
_GRACE = 0.5  # seconds beyond a deadline until a call in a fork child counts as stuck

log = logging.getLogger(__name__)


class _OpenChannel:
    """One gRPC channel and its methods, of one process."""

    def __init__(self, target: str, credentials: Any, options: list[tuple[str, int]]) -> None:
        if credentials:
            self.channel = grpc.secure_channel(target, credentials, options)
        else:
            self.channel = grpc.insecure_channel(target, options)
        self.unary = {name: self.channel.unary_unary(f"/{rpc.SERVICE}/{name}") for name in rpc.METHODS.values()}
        self.put = self.channel.stream_unary(f"/{rpc.SERVICE}/{rpc.PUT}")
        self.get = self.channel.unary_stream(f"/{rpc.SERVICE}/{rpc.GET}")


class GrpcChannel:
    """Calls as raw messages.

    `scheme` is grpc+unix, grpc or grpcs, `rest` a path or host:port; files are PEM. Raises Invalid for these. Does no
    I/O but reading the files; connects with the first call.
    """

    def __init__(
        self,
        scheme: str,
        rest: str,
        *,
        token: str | None = None,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        ping: float = rpc.PING,
    ) -> None:
        self.target = f"unix:{os.path.abspath(rest)}" if scheme == "grpc+unix" else _host_port(rest)
        if scheme != "grpcs" and (ca or cert or key):
            raise Invalid(f"ca, cert and key belong to TLS: write grpcs://, not {scheme}")
        if bool(cert) != bool(key):
            raise Invalid("cert and key belong together: give both, or neither")
        if token is not None and not _TOKEN.fullmatch(token):
            raise Invalid("a token is 1 to 256 printable characters without spaces")
        if token is not None and scheme == "grpc" and not _loopback(rest):
            raise Invalid(f"a token would cross the network to {rest} in clear: write grpcs://{rest}")
        self._metadata = (("authorization", f"Bearer {token}"),) if token is not None else None
        self._credentials = None
        if scheme == "grpcs":
            self._credentials = grpc.ssl_channel_credentials(_read("ca", ca), _read("key", key), _read("cert", cert))
        self._options = rpc.client_options(ping)
        self._closed = False
        self._reachable = True
        self._proven = True  # in a fork child: once a call has returned
        self._setup()
        _live.add(self)

    def _setup(self) -> None:
        self._lock = threading.Lock()
        self._open_channel: _OpenChannel | None = None
        self._stuck = False

    def close(self) -> None:
        """Closes the channel; calls under way fail."""
        with self._lock:
            self._closed = True
            opened, self._open_channel = self._open_channel, None
        if opened is not None:
            opened.channel.close()

    def unary(self, method: str, raw: bytes, deadline: float) -> bytes:
        """One message out, one back. Raises KvtierError of any kind."""

        def call() -> Any:
            return self._open().unary[method](raw, timeout=deadline, metadata=self._metadata)

        answer: bytes = self._named(call if self._proven else lambda: self._aside(call, deadline))
        return answer

    def upload(self, messages: Iterator[bytes], deadline: float) -> bytes:
        """A put: these messages out, one back. Raises KvtierError of any kind. `messages` is read by another thread."""
        self._prove(deadline)
        answer: bytes = self._named(lambda: self._open().put(messages, timeout=deadline, metadata=self._metadata))
        return answer

    @contextmanager
    def download(self, raw: bytes, deadline: float) -> Iterator[Iterator[bytes]]:
        """A get: one message out, an iterator over those that come. Leaving ends it. Errors become KvtierError."""
        self._prove(deadline)
        opened = self._open()
        try:
            stream = opened.get(raw, timeout=deadline, metadata=self._metadata)
        except ValueError:
            raise Unavailable("the client is closed") from None
        try:
            yield self._messages(stream)
        finally:
            stream.cancel()

    def _messages(self, stream: Iterator[bytes]) -> Iterator[bytes]:
        while True:
            message = self._named(lambda: next(stream, None))
            if message is None:
                return
            yield message

    def _open(self) -> _OpenChannel:
        opened = self._open_channel
        if opened is not None:
            return opened
        with self._lock:
            if self._closed:
                raise Unavailable("the client is closed")
            if self._stuck:
                way = "start it anew (multiprocessing: spawn), or use the unix transport"
                raise Unavailable(f"gRPC did not survive the fork of this process: {way}")
            if self._open_channel is None:
                self._open_channel = _OpenChannel(self.target, self._credentials, self._options)
            return self._open_channel

    def _prove(self, deadline: float) -> None:
        """In a fork child: no stream before a small call has come back."""
        if not self._proven:
            self.unary(rpc.METHODS[Verb.STATUS], b"", deadline)

    def _aside(self, call: Callable[[], Any], deadline: float) -> Any:
        """Runs a call on a thread that may hang for ever, as it does if the fork left a lock of gRPC's taken."""
        done: list[Any] = []

        def run() -> None:
            try:
                done.append(call())
            except BaseException as error:
                done.append(error)

        thread = threading.Thread(target=run, name="kvtier-first-call", daemon=True)
        thread.start()
        thread.join(deadline + _GRACE)
        if not done:
            self._lock, self._open_channel, self._stuck = threading.Lock(), None, True
            raise Deadline(f"no answer within {deadline * 1000:g} ms")
        self._proven = True
        if isinstance(done[0], BaseException):
            raise done[0]
        return done[0]

    def _named(self, call: Callable[[], Any]) -> Any:
        """What `call` returns; what gRPC raises becomes an error of ours."""
        try:
            answer = call()
        except grpc.RpcError as error:
            named = self._name(error)
        except ValueError:  # closed by another thread
            named = Unavailable("the client is closed")
        else:
            if not self._reachable:
                self._reachable = True
                log.info("kvtier: %s answers again", self.target)
            return answer
        if self._reachable and not self._closed and isinstance(named, Unavailable | Unauthenticated):
            self._reachable = False
            log.warning("kvtier: %s; until that changes every lookup is a miss", named)
        raise named

    def _name(self, error: Any) -> KvtierError:
        """An error of gRPC, by its code alone. What its text says of TLS goes into words for people only."""
        code, details = error.code(), error.details() or ""
        if code is not grpc.StatusCode.UNAVAILABLE:
            return rpc.error_of(code, details)
        refused = re.search(r"CERTIFICATE_VERIFY_FAILED: ([^:]*)", details)
        if refused:
            return Unavailable(f"the certificate of {self.target} is refused: {refused[1]}")
        if "Hostname Verification Check failed" in details:
            return Unavailable(f"the certificate of {self.target} is refused: it is for another host name")
        if "WRONG_VERSION_NUMBER" in details:
            return Unavailable(f"{self.target} does not speak TLS: write grpc://, if it is on this host")
        if "Socket closed" in details and not self.target.startswith("unix:"):
            certificate = "does it ask for a certificate of the client's?"
            hint = certificate if self._credentials else "does it speak TLS (grpcs://)?"
            return Unavailable(f"{self.target} closed the connection: {hint}")
        return Unavailable(f"no daemon at {self.target}: {details[: rpc.MAX_DETAILS]}")

    def _after_fork(self) -> None:
        if self._open_channel is not None:
            _inherited.append(self._open_channel)  # its end would reach into threads that do not exist here
            self._proven = False
        self._setup()


def _host_port(rest: str) -> str:
    match = _HOST_PORT.fullmatch(rest)
    if not match or not 0 < int(match[2]) < 65536:
        raise Invalid(f"{rest!r:.200} is not host:port: write grpcs://cache.example:50051, or grpc://[::1]:50051")
    return rest


def _loopback(rest: str) -> bool:
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(name: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise Invalid(f"{name}: cannot read {path}: {error.strerror}") from None


_live: weakref.WeakSet[GrpcChannel] = weakref.WeakSet()
_inherited: list[_OpenChannel] = []


def _fork_children_start_afresh() -> None:
    for channel in list(_live):
        channel._after_fork()


os.register_at_fork(after_in_child=_fork_children_start_afresh)
