"""The gRPC transport: the verbs for other hosts and languages, operators, and processes that cannot map the arena.

One rule: the server knows who calls before it reads what the caller sends. So every method is served as a stream of
requests, even one with a single message, because gRPC would otherwise receive that message first. On Unix sockets the
file's mode decides who connects; on TCP a token does, and only grpc.health.v1 answers without one. Threads, calls
under way, puts and gets among them, and every wait have a limit. Each put or get has a session of its own, so nothing
stays held after it. Thread-safe.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvtier.errors import Invalid, KvtierError, NotFound, Stale, Unauthenticated, Unavailable
from kvtier.protocol import rpc
from kvtier.protocol.frames import Verb
from kvtier.protocol.limits import CHUNK, PATIENCE, STALL
from kvtier.protocol.v1 import kvtier_pb2 as pb
from kvtier.server import streams
from kvtier.server.access import Certificates, Tokens
from kvtier.server.in_flight import Call, InFlight, Places
from kvtier.server.logs import fields
from kvtier.server.sessions import ADMIN, READ, Peer, Session
from kvtier.server.settings import Listen, check_listener
from kvtier.server.socket_claim import SocketClaim
from kvtier.server.verbs import HANDLERS, Service

WORKERS = 16  # more threads only raise latency: 4 of them reach what 16 do, in calls and in bytes a second
MAX_TRANSFERS = 12  # puts, gets and reflection streams at once: small calls always find a thread
MAX_TRANSFERS_EACH = 8  # of one tenant: another one always finds a place
MAX_CALLS = 64  # under way or waiting for a thread, of each kind of listener
MAX_CONNECTIONS = 256  # of all TCP listeners, silent ones included
MAX_HEALTH = 4  # health checks, which need no token, being read at once

HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"

_ANYONE = Peer("", READ)
Who = Callable[[Any], tuple[Peer, str]]  # from a call's context: the peer, and its name in the log
Messages = Iterator[bytes]
Stream = Generator[bytes, None, None]

log = logging.getLogger(__name__)


class GrpcServer:
    """Listens on `addresses`; `ports` are those of the TCP ones.

    `unix_peer` is who calls on a Unix socket without a token, None: no one may. `live` and `ready` are what health
    checks are told. Raises Invalid for a TCP listener without the tokens or TLS that it needs, Unavailable if an
    address is taken. Answers calls after `start`; `close` ends all threads.
    """

    def __init__(
        self,
        service: Service,
        addresses: Sequence[Listen],
        *,
        unix_peer: Peer | None,
        unix_mode: int = 0o600,
        tokens: Tokens | None = None,
        certificates: Certificates | None = None,
        live: Callable[[], bool] = lambda: True,
        ready: Callable[[], bool] = lambda: True,
        ping: float = rpc.PING,
    ) -> None:
        self._service, self._tokens, self._certificates = service, tokens, certificates
        self._unix_peer, self._unix_mode = unix_peer, unix_mode
        self._health = {"": live, rpc.SERVICE: ready}
        self._options = rpc.server_options(ping)
        self._calls = InFlight()
        self._transfers = Places(MAX_TRANSFERS, MAX_TRANSFERS_EACH, "puts and gets")
        self._health_places = Places(MAX_HEALTH, MAX_HEALTH, "health checks")
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="grpc")
        self._servers: list[Any] = []
        self._claims: list[SocketClaim] = []
        self.ports: list[int] = []
        try:
            self._listen([a for a in addresses if a.path is not None], [a for a in addresses if a.path is None])
        except BaseException:
            self.close(0)
            raise

    # -- life

    def start(self) -> None:
        """Begins to answer."""
        for server in self._servers:
            server.start()
        self._calls.start()

    def alive(self) -> bool:
        """Whether the thread that ends calls runs."""
        return self._calls.alive()

    def close(self, grace: float = PATIENCE) -> None:
        """Takes no more calls, gives those under way `grace` seconds, then cuts them. Removes the sockets."""
        for stopped in [server.stop(grace) for server in self._servers]:
            stopped.wait(grace + PATIENCE)
        self._calls.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        while self._claims:
            self._claims.pop().close()

    def gauges(self) -> dict[str, int]:
        """Calls under way, puts and gets among them, and calls cut so far for standing still or lasting too long."""
        calls, transfers = len(self._calls), self._transfers.taken
        return {"grpc_calls": calls, "grpc_bulk_calls": transfers, "grpc_cut_total": self._calls.cut}

    def _listen(self, unix: list[Listen], tcp: list[Listen]) -> None:
        for address in tcp:
            check_listener("grpc", address, self._tokens is not None, self._certificates is not None)
        if unix:
            server = self._server(self._unix_caller, [])
            for address in unix:
                assert address.path is not None
                self._bind_unix(server, address.path)
        if tcp:
            most, patience = "grpc.max_allowed_incoming_connections", "grpc.server_handshake_timeout_ms"
            server = self._server(self._token_caller, [(most, MAX_CONNECTIONS), (patience, int(PATIENCE * 1000))])
            for address in tcp:
                self._bind_tcp(server, f"{address.host}:{address.port}")

    def _server(self, who: Who, limits: list[tuple[str, int]]) -> Any:
        server = grpc.server(self._pool, options=[*self._options, *limits], maximum_concurrent_rpcs=MAX_CALLS)
        verbs = {}
        for verb, name in rpc.METHODS.items():
            verbs[name] = self._one(name, who, HANDLERS[verb].role, partial(self._verb, verb))
        verbs[rpc.PUT] = self._one(rpc.PUT, who, HANDLERS[Verb.RESERVE].role, self._put)
        verbs[rpc.GET] = self._many(rpc.GET, who, HANDLERS[Verb.LEASE].role, self._get)
        server.add_registered_method_handlers(rpc.SERVICE, verbs)
        server.add_registered_method_handlers(HEALTH, {"Check": self._one("health", None, READ, self._check)})
        reflect = self._many("reflection", who, READ, self._reflect)
        server.add_registered_method_handlers(REFLECTION, {"ServerReflectionInfo": reflect})
        self._servers.append(server)
        return server

    def _bind_unix(self, server: Any, path: Path) -> None:
        self._claims.append(SocketClaim(path))
        before = os.umask(0o177)  # gRPC binds and listens at once: no other user may connect before the mode is set
        try:
            server.add_insecure_port(f"unix:{path}")
            path.chmod(self._unix_mode)
        except (RuntimeError, OSError):
            raise Unavailable(f"cannot listen on {path}: choose a place for it where the daemon may write") from None
        finally:
            os.umask(before)

    def _bind_tcp(self, server: Any, where: str) -> None:
        try:
            if self._certificates is None:
                self.ports.append(server.add_insecure_port(where))
            else:
                self.ports.append(server.add_secure_port(where, _credentials(self._certificates)))
        except RuntimeError:
            why = "the port is taken, or the address is not this host's"
            raise Unavailable(f"cannot listen on {where}: {why}") from None

    # -- who calls

    def _unix_caller(self, context: Any) -> tuple[Peer, str]:
        authorization = _authorization(context)
        if self._tokens is not None and (authorization is not None or self._unix_peer is None):
            return self._token_caller(context)
        if self._unix_peer is None:
            raise Unauthenticated("this socket needs a token, and the daemon has no token file")
        return self._unix_peer, "unix"

    def _token_caller(self, context: Any) -> tuple[Peer, str]:
        assert self._tokens is not None
        token = self._tokens.check(_authorization(context), context.peer())
        return token.peer, token.name

    # -- one call

    def _one(self, name: str, who: Who | None, role: int, work: Callable[[Call, Session, Messages], bytes]) -> Any:
        """A method with one answer. `who` None: it answers everyone."""
        series = self._service.meters.series("grpc", name.lower())

        def handle(requests: Messages, context: Any) -> bytes:
            began = time.perf_counter()
            with self._calls.begin(context) as call:
                try:
                    answer = work(call, self._enter(call, who, role, name), requests)
                    call.sent = len(answer)
                    failure = None
                except grpc.RpcError:
                    series.add(time.perf_counter() - began, Unavailable.code, call.received, 0)
                    raise  # the client is gone, or the call was cut: there is no one to answer
                except Exception as error:
                    failure = self._failure(name, error)
            series.add(time.perf_counter() - began, failure.code if failure else 0, call.received, call.sent)
            if failure is not None:
                context.abort(*rpc.status_of(failure))
            return answer

        return grpc.stream_unary_rpc_method_handler(handle)

    def _many(self, name: str, who: Who, role: int, work: Callable[[Call, Session, Messages], Stream]) -> Any:
        """A method with a stream of answers. gRPC closes the generator of a client that is gone: nothing stays held."""
        series = self._service.meters.series("grpc", name.lower())

        def handle(requests: Messages, context: Any) -> Iterator[bytes]:
            began = time.perf_counter()
            code = Unavailable.code
            failure = None
            with self._calls.begin(context) as call:
                try:
                    with closing(work(call, self._enter(call, who, role, name), requests)) as answers:
                        for answer in answers:
                            call.sent += len(answer)
                            call.waits = time.monotonic()
                            yield answer
                            call.waits = 0.0
                    code = 0
                except grpc.RpcError:
                    raise
                except Exception as error:
                    failure = self._failure(name, error)
                    code = failure.code
                finally:
                    series.add(time.perf_counter() - began, code, call.received, call.sent)
            if failure is not None:
                context.abort(*rpc.status_of(failure))

        return grpc.stream_stream_rpc_method_handler(handle)

    def _enter(self, call: Call, who: Who | None, role: int, name: str) -> Session:
        """Who calls, as a session that holds nothing. Raises Unauthenticated, Denied."""
        if who is None:
            return Session(b"", _ANYONE, self._service.store)
        peer, caller = who(call.context)
        session = Session(b"", peer, self._service.store)
        session.allow(role)
        call.patience = STALL
        if role >= ADMIN:
            said = {"verb": name, "tenant": peer.tenant, "by": caller, "from": call.context.peer()}
            log.info("admin call", extra={"fields": said})
        return session

    def _failure(self, name: str, error: Exception) -> KvtierError:
        if isinstance(error, KvtierError):
            return error
        if isinstance(error, DecodeError):
            return Invalid(f"the body is not the message that {name} takes")
        log.error("call failed", exc_info=error, extra=fields(verb=name))
        return KvtierError("internal error; see the daemon's log")

    # -- methods

    def _verb(self, verb: int, call: Call, session: Session, requests: Messages) -> bytes:
        handler = HANDLERS[verb]
        message = handler.request.FromString(_first(call, requests))
        self._check_boot(message)
        return handler.call(self._service, session, message).SerializeToString()

    def _put(self, call: Call, caller: Session, requests: Messages) -> bytes:
        with self._transfers.take(caller.peer.tenant):
            first = call.next(requests)
            is_message, raw = rpc.open_chunk(first) if first is not None else (False, b"")
            if not is_message:
                raise Invalid("a put begins with a Chunk that holds a PutRequest")
            request = pb.PutRequest.FromString(bytes(raw))
            self._check_boot(request.keys)
            with self._session(caller) as session:
                pieces = _pieces(call, requests)
                return streams.put(self._service, session, request, pieces, call.until).SerializeToString()

    def _get(self, call: Call, caller: Session, requests: Messages) -> Stream:
        with self._transfers.take(caller.peer.tenant):
            request = pb.Keys.FromString(_first(call, requests))
            self._check_boot(request)
            with self._session(caller) as session:
                items = streams.get(self._service, session, request, call.until)
                with closing(items):
                    for item in items:
                        yield rpc.data_chunk(item) if isinstance(item, memoryview) else rpc.message_chunk(item)

    @contextmanager
    def _session(self, caller: Session) -> Iterator[Session]:
        """A session of one call, whose end gives everything back."""
        session = self._service.sessions.open(caller.peer, None)
        try:
            yield session
        finally:
            self._service.sessions.leave(session)

    def _check_boot(self, message: Any) -> None:
        """Refuses a handle of an earlier daemon: after a restart the same number may be another namespace's."""
        if "handle" not in message.DESCRIPTOR.fields_by_name:
            return
        if not message.boot:
            raise Invalid("a handle goes with the boot number of the RegisterReply that gave it")
        if message.boot != self._service.boot:
            raise Stale("the daemon was started anew: register the description again")

    def _check(self, call: Call, _: Session, requests: Messages) -> bytes:
        with self._health_places.take(""):
            asked = health_pb2.HealthCheckRequest.FromString(call.next(requests) or b"").service
        verdict = self._health.get(asked)
        if verdict is None:
            raise NotFound(f'no such service; "" is the daemon, "{rpc.SERVICE}" whether it takes calls')
        serving = health_pb2.HealthCheckResponse
        return bytes(serving(status=serving.SERVING if verdict() else serving.NOT_SERVING).SerializeToString())

    def _reflect(self, call: Call, caller: Session, requests: Messages) -> Stream:
        with self._transfers.take(caller.peer.tenant):
            servicer = reflection.ReflectionServicer((rpc.SERVICE, HEALTH, REFLECTION), descriptor_pool.Default())
            asked = map(reflection_pb2.ServerReflectionRequest.FromString, iter(lambda: call.next(requests), None))
            for answer in servicer.ServerReflectionInfo(asked, call.context):
                yield answer.SerializeToString()


def _first(call: Call, requests: Messages) -> bytes:
    raw = call.next(requests)
    if raw is None:
        raise Invalid("the call has no request message")
    return raw


def _pieces(call: Call, requests: Messages) -> Iterator[memoryview]:
    while (raw := call.next(requests)) is not None:
        is_message, piece = rpc.open_chunk(raw)
        if is_message:
            raise Invalid("after the PutRequest come bodies only")
        if len(piece) > CHUNK:
            raise Invalid(f"a piece of {len(piece)} bytes; the limit is {CHUNK}")
        yield piece


def _authorization(context: Any) -> str | None:
    """The Authorization header. Two of them count as none."""
    found = [value for name, value in context.invocation_metadata() if name == "authorization"]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else None


def _credentials(certificates: Certificates) -> Any:
    """Server credentials that ask at every handshake whether the files have changed."""

    def configuration(files: tuple[bytes, bytes, bytes | None]) -> Any:
        chain, key, client_ca = files
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=client_ca)

    used = certificates.current()
    latest = [used]

    def fetch() -> Any:
        files = certificates.current()
        if files is latest[0]:
            return None  # as before
        latest[0] = files
        return configuration(files)

    mutual = certificates.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(configuration(used), fetch, require_client_authentication=mutual)
