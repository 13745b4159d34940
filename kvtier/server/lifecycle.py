"""One life of the daemon: builds its parts, serves, and takes them down in the opposite order.

Order of a start: health pages, the claim of the socket, the first step of the arena backed by memory, then calls are
accepted ("ready"); the rest of the arena is backed in the background. SIGTERM: no new calls, calls under way finish
within a limit. SIGHUP: tokens and certificates are read again. `start`, `stop`, `reload` and `beat` belong to the main
thread; any thread may call `problems`.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kvtier.errors import Full, Invalid, KvtierError
from kvtier.protocol.backing import POPULATE_STEP
from kvtier.server import malloc
from kvtier.server.access import Certificates, Tokens
from kvtier.server.http import Endpoint, Page
from kvtier.server.logs import fields
from kvtier.server.sessions import ADMIN, WRITE, Peer, Sessions
from kvtier.server.settings import Config
from kvtier.server.unix import UnixServer
from kvtier.server.verbs import Service
from kvtier.store.arena import Arena
from kvtier.store.store import Store
from kvtier.tiers.redis.location import RedisLocation
from kvtier.tiers.ssd import directory
from kvtier.tiers.ssd.disk import Disk
from kvtier.tiers.ssd.ssd import Ssd
from kvtier.tiers.tier import Tier
from kvtier.tiers.tiering import Tiering
from kvtier.tiers.write_behind import Budget

if TYPE_CHECKING:
    from kvtier.server.grpc import GrpcServer
    from kvtier.server.metrics import Exporter
    from kvtier.tiers.redis.redis import Redis

SWITCH_INTERVAL = 0.0005  # seconds; with the default 5 ms a client's long lookup delays the others tenfold
DRAIN = 10.0  # seconds that write-behind goes on after the last call
ALIVE = 30.0  # seconds without a beat of the main thread after which /live says no
log = logging.getLogger(__name__)


def _redis(where: RedisLocation) -> Redis:
    """The Redis tier, whose library comes with the extra of that name. Raises Invalid."""
    try:
        from kvtier.tiers.redis.redis import Redis
    except ImportError as error:
        raise Invalid(f"the setting redis needs what `pip install kvtier[redis]` brings: {error}") from None
    return Redis(where)


class Component(Protocol):
    """Something with threads of its own whose end makes the daemon not ready."""

    def alive(self) -> bool: ...


def grpc_peer(config: Config) -> tuple[Peer | None, int]:
    """Who calls on a gRPC Unix socket without a token, and that socket's mode: gRPC does not say which user connected.

    So the socket's mode decides: one that only the daemon's own user and root can open makes its callers admins of
    tenant `local`, a wider one writers. Where `users` is set and there are tokens, every caller on a wide socket needs
    one.
    """
    if config.users and config.token_file is not None:
        return None, config.socket_mode
    mode = 0o600 if config.users else config.socket_mode
    return Peer("local", WRITE if mode & 0o077 else ADMIN), mode


class Daemon:
    """Everything that serves. `start` may raise Invalid, Unavailable (address taken), Full (memory)."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._stop = threading.Event()
        self._populator: threading.Thread | None = None
        self._parts: dict[str, Component] = {}
        self._reloads: dict[str, Callable[[], None]] = {}
        self._undo: list[Callable[[], object]] = []  # what `stop` calls, the last first
        self._accepting = False
        self._said: list[str] = []
        self._beat = time.monotonic()
        self._tokens: Tokens | None = None
        self._certificates: Certificates | None = None
        self.grpc: GrpcServer | None = None
        self._exporter: Exporter | None = None  # while there is an endpoint and something to show

    def start(self) -> None:
        """Returns when calls are accepted; whatever was begun is undone if it raises."""
        began = time.monotonic()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        seconds = round(time.monotonic() - began, 3)
        socket, capacity = self.config.socket, self.store.capacity
        log.info("ready", extra=fields(socket=socket, arena_bytes=capacity, seconds=seconds))

    def _start(self) -> None:
        config = self.config
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._read_credentials()
        if config.metrics is not None:
            self._open_endpoint()
        self.arena = Arena(config.arena_bytes)
        self.store = Store(self.arena, poison=config.poison)
        self.sessions = Sessions(self.store)
        self._undo.append(self.sessions.close)
        self._parts["process watcher"] = self.sessions
        self.service = Service(self.store, self.sessions)
        self.unix = UnixServer(config.socket, self.service, config.peer, config.socket_mode)
        self._undo.append(self.unix.close)
        self._build_tiers()
        self._undo.append(self.service.expiry.close)
        self._build_grpc()
        self.arena.populate(self._stop, limit=POPULATE_STEP)
        if config.metrics is not None:
            from kvtier.server.metrics import Exporter  # its libraries cost 40 ms and 5 MB

            self._exporter = Exporter(self.service, self.transports, lambda: not self.problems())
        gc.collect()
        gc.freeze()  # what lives as long as the daemon is never walked again
        self.unix.start()
        self._parts["Unix transport"] = self.unix
        if self.grpc is not None:
            self.grpc.start()
            self._parts["gRPC transport"] = self.grpc
        self.service.expiry.start()
        self._parts["expiry"] = self.service.expiry
        self._accepting = True
        self._populator = threading.Thread(target=self._populate, name="populate", daemon=True)
        self._populator.start()

    def stop(self) -> None:
        """Ends all threads, gives memory back; idempotent. Attached clients keep their mappings until they notice."""
        self._stop.set()
        self._accepting = False
        while self._undo:
            self._undo.pop()()
        if self._populator is not None:
            self._populator.join(10)
            self._populator = None

    def reload(self) -> None:
        """Reads tokens and certificates again; what cannot be read stays as it was, and a log line says why."""
        for what, again in self._reloads.items():
            try:
                again()
            except (KvtierError, OSError) as error:
                log.error("reload failed", extra=fields(what=what, reason=error))
            else:
                log.info("reloaded", extra=fields(what=what))

    def problems(self) -> list[str]:
        """Why the daemon is not ready; empty if it is."""
        if not self._accepting:
            return ["stopping" if self._stop.is_set() else "starting"]
        return [f"the thread of the {name} has died" for name, part in self._parts.items() if not part.alive()]

    def beat(self) -> bool:
        """To be called every second or so: says in the log what changed. Returns whether the daemon is ready."""
        self._beat = time.monotonic()
        problems = self.problems()
        if problems != self._said:
            if problems:
                log.error("not ready", extra=fields(reason="; ".join(problems)))
            else:
                log.info("ready again")
            self._said = problems
        return not problems

    def transports(self) -> dict[str, int]:
        """Gauges and counters of both transports; zeros for gRPC where it is off."""
        nothing = dict.fromkeys(("grpc_calls", "grpc_bulk_calls", "grpc_cut_total"), 0)
        return {**self.unix.gauges(), **(self.grpc.gauges() if self.grpc is not None else nothing)}

    def _read_credentials(self) -> None:
        config = self.config
        if config.token_file is not None:
            self._tokens = Tokens(config.token_file)
            self._reloads["tokens"] = self._tokens.reload
        if config.tls_cert is not None and config.tls_key is not None:
            self._certificates = Certificates(config.tls_cert, config.tls_key, config.tls_client_ca)
            self._reloads["certificates"] = self._certificates.reload

    def _build_tiers(self) -> None:
        """Opens the lower tiers, the fastest first. Before calls are accepted; undone after they have ended."""
        tiers: list[Tier] = []
        budgets: dict[str, Budget] = {}
        try:
            if (ssd := self.config.ssd) is not None:
                disk = Ssd(ssd.path, ssd.size, self.store.namespaces.register, sync=ssd.sync, min_free=ssd.free)
                tiers.append(disk)
                budgets[disk.name] = Budget(ssd.write, ssd.daily)
                with directory.explained(ssd.path):
                    ttls = directory.read_ttls(ssd.path, Disk())
                self.service.expiry.attach(disk.aging, ttls, lambda ttls: directory.write_ttls(ssd.path, ttls, Disk()))
            if self.config.redis is not None:
                shared = _redis(self.config.redis)
                tiers.append(shared)
                budgets[shared.name] = Budget(self.config.redis.write)
                self._parts["Redis tier"] = shared
        except BaseException:
            for tier in tiers:
                tier.close()
            raise
        if not tiers:
            return
        tiering = Tiering(self.store, tiers, budgets)
        # Closed after the Unix transport, when nothing is sealed any more.
        self._undo.insert(len(self._undo) - 1, lambda: tiering.close(DRAIN))
        self.service.tiering = tiering
        self._parts["lower tiers"] = tiering

    def _build_grpc(self) -> None:
        if not self.config.grpc:
            return
        malloc.tune()
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else gRPC writes a line for every handshake that fails
        from kvtier.server.grpc import GrpcServer  # gRPC and what belongs to it cost 0.1 s and 5 MB

        peer, mode = grpc_peer(self.config)
        self.grpc = GrpcServer(
            self.service,
            self.config.grpc,
            unix_peer=peer,
            unix_mode=mode,
            tokens=self._tokens,
            certificates=self._certificates,
            live=lambda: time.monotonic() - self._beat < ALIVE,
            ready=lambda: not self.problems(),
        )
        self._undo.append(self.grpc.close)
        self.service.gauges.append(self.grpc.gauges)
        tcp = [listen.host for listen in self.config.grpc if listen.path is None]
        where = [str(listen) for listen in self.config.grpc if listen.path is not None]
        where += [f"{host}:{port}" for host, port in zip(tcp, self.grpc.ports, strict=True)]
        log.info("grpc listen", extra=fields(addresses=",".join(where), tls=self._certificates is not None))

    def _open_endpoint(self) -> None:
        assert self.config.metrics is not None
        health = {"/live": (False, self._live_page), "/ready": (False, self._ready_page)}
        pages = {"/metrics": (True, self._metrics_page), **health}
        permit = self._tokens.permit if self._tokens is not None else None
        secure = None if self.config.metrics.loopback else self._certificates
        tls = secure.context if secure is not None else None
        endpoint = Endpoint(self.config.metrics, pages, permit, tls)
        self._undo.append(endpoint.close)
        log.info("metrics listen", extra=fields(address=f"{self.config.metrics.host}:{endpoint.port}"))

    def _metrics_page(self) -> Page:
        exporter = self._exporter
        return Page(200, exporter.page(), exporter.content_type) if exporter is not None else Page(503, b"starting\n")

    def _live_page(self) -> Page:
        late = time.monotonic() - self._beat
        if late < ALIVE:
            return Page(200, b"live\n")
        return Page(503, f"the main thread has not moved for {late:.0f} s\n".encode())

    def _ready_page(self) -> Page:
        problems = "".join(f"{problem}\n" for problem in self.problems())
        return Page(503, problems.encode()) if problems else Page(200, b"ready\n")

    def _populate(self) -> None:
        began = time.monotonic()
        try:
            self.arena.populate(self._stop)
        except Full as error:
            ready, nbytes = self.arena.ready_bytes, self.arena.nbytes
            log.error("arena not backed", extra=fields(ready_bytes=ready, arena_bytes=nbytes, reason=error))
        else:
            if not self._stop.is_set():
                seconds = round(time.monotonic() - began, 3)
                log.info("arena backed", extra=fields(arena_bytes=self.arena.nbytes, seconds=seconds))
