"""The verbs: what a request means, checked against every limit, and the answer. Both transports serve them from here.

`HANDLERS`, below `Service`, is the table of which role may call what. A method takes a session and a request and
returns the reply; errors are raised as `kvtier.errors`. Keys are derived here, outside any lock. Thread-safe: the pins
are under a lock of their own.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from kvtier.errors import Invalid
from kvtier.format.identity import NO_CONTEXT, derive_keys, diff
from kvtier.protocol.frames import Verb
from kvtier.protocol.limits import MAX_KEYS, MAX_RUNS, MAX_WAIT_MS
from kvtier.protocol.stops import Stop
from kvtier.protocol.v1 import kvtier_pb2 as pb
from kvtier.server.logs import fields
from kvtier.server.meters import Meters
from kvtier.server.sessions import ADMIN, READ, WRITE, Bounds, Peer, Session, Sessions
from kvtier.store.expiry import Expiry
from kvtier.store.namespaces import Namespace, check_hashes
from kvtier.store.store import Store
from kvtier.tiers.tiering import Tiering
from kvtier.version import __version__

log = logging.getLogger(__name__)


class Service:
    """Verbs over one store. `boot` names this life of the daemon: 8 random bytes, in every reply."""

    def __init__(self, store: Store, sessions: Sessions) -> None:
        self.store = store
        self.sessions = sessions
        self.expiry = Expiry(store)  # the daemon starts it
        self.tiering: Tiering | None = None  # set by the daemon where a lower tier is configured
        self.meters = Meters()  # transports count their calls here
        self.gauges: list[Callable[[], dict[str, int]]] = []  # of transports: part of the status
        self._pin_lock = threading.Lock()
        self._pinners: dict[str, Session] = {}  # by tenant: the daemon's own sessions, whose leases are the pins
        self._pins: dict[tuple[str, bytes], tuple[Session, int]] = {}  # (tenant, key) -> the lease that pins it
        self._next_pin = 0
        self.boot = int.from_bytes(os.urandom(8), "little") | 1
        self.started = time.time()  # unix seconds

    def register(self, session: Session, request: pb.RegisterRequest) -> pb.RegisterReply:
        namespace = self.store.namespaces.register(request.description, session.peer.tenant)
        handle, digest, description = namespace.handle, namespace.digest, namespace.description_digest
        return pb.RegisterReply(handle=handle, namespace=digest, description=description, boot=self.boot)

    def lookup(self, session: Session, request: pb.LookupRequest) -> pb.LookupReply:
        namespace = self.store.namespaces.get(request.handle, session.peer.tenant)
        nbytes = namespace.description.hashing.nbytes
        if len(request.run) > MAX_RUNS:
            raise Invalid(f"{len(request.run)} runs in one call; the limit is {MAX_RUNS}")
        check_hashes(b"".join(run.hashes for run in request.run), nbytes, MAX_KEYS)
        reply = pb.LookupReply()
        for run in request.run:
            keys = _keys(namespace, run, request.context)
            known, warm = self.store.lookup_tiers(keys)
            reply.known.append(known)
            reply.warm.append(warm)
            if known < len(keys) and self.tiering is not None:
                reply.later |= self.tiering.unsure(keys[known : known + 1])[0]
            if request.bitmap:
                reply.bitmap.append(_bitmap(self.store.known_each(keys)))
        return reply

    def prefetch(self, session: Session, request: pb.Keys) -> pb.Count:
        """Starts promotion of cold blocks and returns how many are under way."""
        namespace, keys = self.blocks_of(session, request)
        if self.tiering is None:
            return pb.Count(n=0, stop=Stop.NO_TIER)  # type: ignore[arg-type]
        return pb.Count(n=self.tiering.promoter.start(keys, namespace, namespace.extents(range_of(request))))

    def flush(self, session: Session, request: pb.Keys) -> pb.Count:
        """Waits until lower tiers have the blocks, `wait_ms` at most. Returns how many leading ones they have."""
        namespace, keys = self.blocks_of(session, request)
        if self.tiering is None:
            return pb.Count(n=0, stop=Stop.NO_TIER)  # type: ignore[arg-type]
        until = time.monotonic() + min(request.wait_ms, MAX_WAIT_MS) / 1000
        settled = self.tiering.flush(keys, namespace, until)
        return pb.Count(n=settled, stop=Stop.END if settled == len(keys) else Stop.MISS)  # type: ignore[arg-type]

    def reserve(self, session: Session, request: pb.Keys) -> pb.Slots:
        namespace, keys, hashes = self.new_blocks_of(session, request)
        context = request.context or NO_CONTEXT
        return pb.Slots(offset=session.reserve(request.id, namespace, range_of(request), context, keys, hashes))

    def seal(self, session: Session, request: pb.Held) -> pb.Count:
        return pb.Count(n=session.seal(request.id, _entries(request)))

    def abort(self, session: Session, request: pb.Held) -> pb.Count:
        return pb.Count(n=session.abort(request.id, _entries(request)))

    def lease(self, session: Session, request: pb.Keys) -> pb.Slots:
        offsets, stop = session.lease(request.id, self.blocks_of(session, request)[1])
        return pb.Slots(offset=offsets, stop=stop)  # type: ignore[arg-type]

    def release(self, session: Session, request: pb.Held) -> pb.Count:
        return pb.Count(n=session.release(request.id, _entries(request)))

    def delete(self, session: Session, request: pb.Keys) -> pb.Count:
        return pb.Count(n=self.store.delete(self.blocks_of(session, request)[1]))

    def explain(self, session: Session, request: pb.ExplainRequest) -> pb.ExplainReply:
        lines, nearest = self.store.namespaces.explain(request.description, session.peer.tenant)
        return pb.ExplainReply(line=lines, nearest=nearest)

    def status(self, session: Session, request: pb.StatusRequest) -> pb.StatusReply:
        if request.check_integrity:
            session.allow(ADMIN)
            self.sessions.check_integrity()
            if self.tiering is not None:
                self.tiering.check_integrity()
        return pb.StatusReply(json=json.dumps(self.report()))

    def list_namespaces(self, session: Session, request: pb.ListRequest) -> pb.ListReply:
        blocks = self.store.blocks_by_namespace()
        peer = session.peer
        shown = [ns for ns in self.store.namespaces.all() if peer.role >= ADMIN or ns.tenant == peer.tenant]
        return pb.ListReply(namespace=[_info(ns, blocks, self.expiry.of(ns)) for ns in shown])

    def show_namespace(self, session: Session, request: pb.ShowRequest) -> pb.ShowReply:
        namespace = self._named(session, request.name)
        info = _info(namespace, self.store.blocks_by_namespace(), self.expiry.of(namespace))
        return pb.ShowReply(info=info, description=namespace.description.canonical)

    def diff_namespaces(self, session: Session, request: pb.DiffRequest) -> pb.ExplainReply:
        stored, live = self._named(session, request.stored), self._named(session, request.live)
        lines = map(str, diff(stored.description, live.description))
        return pb.ExplainReply(line=lines, nearest=stored.description_digest)

    def drop_namespace(self, session: Session, request: pb.DropRequest) -> pb.Count:
        namespace = self._named(session, request.name)
        with self._pin_lock:
            for (tenant, key), (pins, id_) in list(self._pins.items()):
                if tenant == namespace.tenant and self.store.belongs(key, namespace):
                    pins.release(id_, ())
                    del self._pins[tenant, key]
        dropped = self.store.drop(namespace)
        shown = namespace.description_digest.hex()[:16]
        log.info("namespace dropped", extra=fields(namespace=shown, tenant=namespace.tenant, blocks=dropped))
        return pb.Count(n=dropped)

    def set_ttl(self, session: Session, request: pb.TtlRequest) -> pb.NamespaceInfo:
        namespace = self._named(session, request.name)
        self.expiry.set(namespace, request.seconds)
        shown = namespace.description_digest.hex()[:16]
        log.info("time-to-live set", extra=fields(namespace=shown, tenant=namespace.tenant, seconds=request.seconds))
        return _info(namespace, self.store.blocks_by_namespace(), request.seconds)

    def pin(self, session: Session, request: pb.Keys) -> pb.Count:
        """Keeps leading known blocks, at most a tenth of the arena, by leases of the daemon's own until `unpin`."""
        namespace, keys = self.blocks_of(session, request)
        tenant = session.peer.tenant
        pinned = 0
        with self._pin_lock:
            for key in keys:
                if (tenant, key) not in self._pins:
                    if self._pinned_bytes() + namespace.extents(range_of(request)).slot_bytes > self.store.pin_cap:
                        return pb.Count(n=pinned, stop=Stop.CAP)  # type: ignore[arg-type]
                    pins = self._pinners.get(tenant)
                    if pins is None:
                        pins = self._pinners[tenant] = self.sessions.open(Peer(tenant, ADMIN), None, own=True)
                    self._next_pin += 1
                    if not pins.lease(self._next_pin, [key])[0]:
                        return pb.Count(n=pinned, stop=Stop.MISS)  # type: ignore[arg-type]
                    self._pins[tenant, key] = (pins, self._next_pin)
                pinned += 1
        return pb.Count(n=pinned)

    def unpin(self, session: Session, request: pb.Keys) -> pb.Count:
        _, keys = self.blocks_of(session, request)
        freed = 0
        with self._pin_lock:
            for key in keys:
                held = self._pins.pop((session.peer.tenant, key), None)
                if held is not None:
                    held[0].release(held[1], ())
                    freed += 1
        return pb.Count(n=freed)

    def blocks_of(self, session: Session, request: pb.Keys) -> tuple[Namespace, list[bytes]]:
        """The namespace of a request's handle and the keys of its blocks. Raises Stale, Invalid."""
        namespace = self.store.namespaces.get(request.handle, session.peer.tenant)
        return namespace, _keys(namespace, request, request.context)

    def new_blocks_of(self, session: Session, request: pb.Keys) -> tuple[Namespace, list[bytes], list[bytes]]:
        """The same for blocks that are to be written, whose size the request says, and their hashes."""
        namespace = self.store.namespaces.get(request.handle, session.peer.tenant)
        expected = namespace.extents(range_of(request)).block_bytes
        if request.nbytes != expected:
            raise Invalid(f"blocks of this namespace and range have {expected} bytes, not {request.nbytes}")
        keys, raw = _keys(namespace, request, request.context), request.hashes
        step = namespace.description.hashing.nbytes
        return namespace, keys, [raw[at : at + step] for at in range(0, len(raw), step)]

    def _named(self, session: Session, name: str) -> Namespace:
        return self.store.namespaces.named(name, None if session.peer.role >= ADMIN else session.peer.tenant)

    def _pinned_bytes(self) -> int:
        return sum(pins.held_bytes for pins in self._pinners.values())

    def report(self) -> dict[str, Any]:
        """Gauges and counters as one flat object."""
        counters = self.store.counters
        numbers = {f"{name}_total": getattr(counters, name) for name in counters.__slots__ if name != "unserved"}
        return {
            "boot": f"{self.boot:016x}",
            "pid": os.getpid(),
            "version": __version__,
            "start_time": self.started,
            "pinned_blocks": len(self._pins),
            "pinned_bytes": self._pinned_bytes(),
            "namespaces": len(self.store.namespaces.all()),
            **self.store.gauges(),
            **self.sessions.gauges(),
            **{name: value for gauges in self.gauges for name, value in gauges().items()},
            **(self.tiering.gauges() | self.tiering.faults() if self.tiering is not None else {}),
            **numbers,
        }


@dataclass(frozen=True, slots=True)
class Handler:
    """One verb: how its request is read, the least role that may call it, and the method of `Service` that answers."""

    request: type[Message]
    role: int
    call: Callable[[Service, Session, Any], Message]
    undo: bool = False  # an answer that cannot be delivered is taken back
    most_fields: int = 0  # top-level fields that the request may have, where sub-messages repeat; 0: not looked at


# Which role may call what, on both transports. A role may also do what the roles before it may: read, write, admin.
# Over gRPC, Put needs the role of RESERVE and Get that of LEASE.
HANDLERS: dict[int, Handler] = {
    Verb.REGISTER: Handler(pb.RegisterRequest, READ, Service.register),
    Verb.LOOKUP: Handler(pb.LookupRequest, READ, Service.lookup, most_fields=MAX_RUNS + 8),
    Verb.PREFETCH: Handler(pb.Keys, READ, Service.prefetch),
    Verb.RESERVE: Handler(pb.Keys, WRITE, Service.reserve, undo=True),
    Verb.SEAL: Handler(pb.Held, WRITE, Service.seal),
    Verb.ABORT: Handler(pb.Held, WRITE, Service.abort),
    Verb.LEASE: Handler(pb.Keys, READ, Service.lease, undo=True),
    Verb.RELEASE: Handler(pb.Held, READ, Service.release),
    Verb.FLUSH: Handler(pb.Keys, READ, Service.flush),
    Verb.DELETE: Handler(pb.Keys, WRITE, Service.delete),
    Verb.EXPLAIN: Handler(pb.ExplainRequest, READ, Service.explain),
    Verb.STATUS: Handler(pb.StatusRequest, READ, Service.status),
    Verb.LIST: Handler(pb.ListRequest, READ, Service.list_namespaces),
    Verb.SHOW: Handler(pb.ShowRequest, READ, Service.show_namespace),
    Verb.DIFF: Handler(pb.DiffRequest, READ, Service.diff_namespaces),
    Verb.DROP: Handler(pb.DropRequest, ADMIN, Service.drop_namespace),
    Verb.PIN: Handler(pb.Keys, ADMIN, Service.pin),
    Verb.UNPIN: Handler(pb.Keys, ADMIN, Service.unpin),
    Verb.TTL: Handler(pb.TtlRequest, ADMIN, Service.set_ttl),
}


def _info(namespace: Namespace, blocks: dict[int, tuple[int, int]], ttl: int) -> pb.NamespaceInfo:
    n, nbytes = blocks.get(namespace.handle, (0, 0))
    info = pb.NamespaceInfo(namespace=namespace.digest, description=namespace.description_digest, blocks=n, ttl=ttl)
    info.tenant, info.bytes = namespace.tenant, nbytes
    info.model, info.revision = namespace.description.model, namespace.description.revision
    return info


def range_of(request: pb.Keys | pb.Run) -> Bounds:
    """The range of a request as it stands there, unchecked."""
    return (request.group, request.layer_lo, request.layer_hi, request.head_lo, request.head_hi)


def _entries(request: pb.Held) -> Sequence[int]:
    if len(request.index) > MAX_KEYS:
        raise Invalid(f"{len(request.index)} entries in one call; the limit is {MAX_KEYS}")
    return request.index


def _keys(namespace: Namespace, request: pb.Keys | pb.Run, context: bytes) -> list[bytes]:
    """Checks range, context and hashes of a request and derives its keys."""
    resolved = range_of(request)
    namespace.check(resolved)
    nbytes = namespace.description.hashing.nbytes
    check_hashes(request.hashes, nbytes, MAX_KEYS)
    return derive_keys(namespace.digest, resolved, context or NO_CONTEXT, request.hashes, nbytes)


def _bitmap(known: list[bool]) -> bytes:
    bits = sum(1 << i for i, here in enumerate(known) if here)
    return bits.to_bytes((len(known) + 7) // 8, "little")
