"""The verbs as messages: what a request means, checked against every limit, and the answer. The same for the lane and for gRPC.

A method takes a session and a request and returns the reply; errors are raised as `kvtier.errors`. Keys are derived here, outside any lock.
Thread-safe: it holds no state of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from kvtier.errors import Invalid
from kvtier.frames import Verb
from kvtier.identity import NO_CONTEXT, derive_keys
from kvtier.namespaces import Namespace, check_hashes
from kvtier.session import ADMIN, READ, WRITE, Session, Sessions
from kvtier.store import MAX_KEYS, NO_TIER, Store
from kvtier.v1 import kvtier_pb2 as pb

MAX_RUNS = 256


class Service:
    """Verbs over one store. `boot` names this life of the daemon: 8 random bytes, in every reply."""

    def __init__(self, store: Store, sessions: Sessions) -> None:
        self.store = store
        self.sessions = sessions
        self.boot = int.from_bytes(os.urandom(8), "little") | 1

    def register(self, session: Session, request: pb.RegisterRequest) -> pb.RegisterReply:
        namespace = self.store.namespaces.register(request.description, session.peer.tenant)
        return pb.RegisterReply(handle=namespace.handle, namespace=namespace.digest, description=namespace.description_digest)

    def lookup(self, session: Session, request: pb.LookupRequest) -> pb.LookupReply:
        namespace = self.store.namespaces.get(request.handle, session.peer.tenant)
        nbytes = namespace.description.hashing.nbytes
        if len(request.run) > MAX_RUNS:
            raise Invalid(f"{len(request.run)} runs in one call; the limit is {MAX_RUNS}")
        check_hashes(b"".join(run.hashes for run in request.run), nbytes, MAX_KEYS)
        reply = pb.LookupReply()
        for run in request.run:
            keys = _keys(namespace, run, request.context)
            known = self.store.lookup(keys)
            reply.known.append(known)
            reply.warm.append(known)
            if request.bitmap:
                reply.bitmap.append(_bitmap(self.store.lookup_each(keys)))
        return reply

    def prefetch(self, session: Session, request: pb.Keys) -> pb.Count:
        """Starts promotion of cold blocks; there is no lower tier yet."""
        _keys(self.store.namespaces.get(request.handle, session.peer.tenant), request, request.context)
        return pb.Count(n=0, stop=NO_TIER)  # type: ignore[arg-type]

    def flush(self, session: Session, request: pb.Keys) -> pb.Count:
        """Waits until blocks are settled; there is no lower tier yet."""
        _keys(self.store.namespaces.get(request.handle, session.peer.tenant), request, request.context)
        return pb.Count(n=0, stop=NO_TIER)  # type: ignore[arg-type]

    def reserve(self, session: Session, request: pb.Keys) -> pb.Slots:
        namespace = self.store.namespaces.get(request.handle, session.peer.tenant)
        resolved = _range(request)
        expected = namespace.extents(resolved).block_bytes
        if request.nbytes != expected:
            raise Invalid(f"blocks of this namespace and range have {expected} bytes, not {request.nbytes}")
        keys = _keys(namespace, request, request.context)
        step = namespace.description.hashing.nbytes
        raw = request.hashes
        hashes = [raw[at : at + step] for at in range(0, len(raw), step)]
        return pb.Slots(offset=session.reserve(request.id, namespace, resolved, request.context or NO_CONTEXT, keys, hashes))

    def seal(self, session: Session, request: pb.Held) -> pb.Count:
        return pb.Count(n=session.seal(request.id, request.index))

    def abort(self, session: Session, request: pb.Held) -> pb.Count:
        return pb.Count(n=session.abort(request.id, request.index))

    def lease(self, session: Session, request: pb.Keys) -> pb.Slots:
        namespace = self.store.namespaces.get(request.handle, session.peer.tenant)
        offsets, stop = session.lease(request.id, _keys(namespace, request, request.context))
        return pb.Slots(offset=offsets, stop=stop)  # type: ignore[arg-type]

    def release(self, session: Session, request: pb.Held) -> pb.Count:
        return pb.Count(n=session.release(request.id, request.index))

    def delete(self, session: Session, request: pb.Keys) -> pb.Count:
        namespace = self.store.namespaces.get(request.handle, session.peer.tenant)
        return pb.Count(n=self.store.delete(_keys(namespace, request, request.context)))

    def explain(self, session: Session, request: pb.ExplainRequest) -> pb.ExplainReply:
        lines, nearest = self.store.namespaces.explain(request.description, session.peer.tenant)
        return pb.ExplainReply(line=lines, nearest=nearest)

    def status(self, session: Session, request: pb.StatusRequest) -> pb.StatusReply:
        if request.check_integrity:
            session.allow(ADMIN)
            self.sessions.check_integrity()
        return pb.StatusReply(json=json.dumps(self.report()))

    def report(self) -> dict[str, Any]:
        """Gauges and counters as one flat object."""
        counters = self.store.counters
        numbers = {f"{name}_total": getattr(counters, name) for name in counters.__slots__ if name != "stops"}
        return {
            "boot": f"{self.boot:016x}",
            "pid": os.getpid(),
            "namespaces": len(self.store.namespaces.all()),
            **self.store.gauges(),
            **self.sessions.gauges(),
            **numbers,
        }


@dataclass(frozen=True, slots=True)
class Handler:
    """One verb: how its request is read, the role it needs, and the method of `Service` that answers."""

    request: type[Message]
    role: int
    call: Callable[[Service, Session, Any], Message]
    undo: bool = False  # an answer that cannot be delivered is taken back


HANDLERS: dict[int, Handler] = {
    Verb.REGISTER: Handler(pb.RegisterRequest, READ, Service.register),
    Verb.LOOKUP: Handler(pb.LookupRequest, READ, Service.lookup),
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
}


def _range(request: pb.Keys | pb.Run) -> tuple[int, int, int, int, int]:
    return (request.group, request.layer_lo, request.layer_hi, request.head_lo, request.head_hi)


def _keys(namespace: Namespace, request: pb.Keys | pb.Run, context: bytes) -> list[bytes]:
    """Checks range, context and hashes of a request and derives its keys."""
    resolved = _range(request)
    namespace.extents(resolved)  # refuses a range outside the layout
    nbytes = namespace.description.hashing.nbytes
    check_hashes(request.hashes, nbytes, MAX_KEYS)
    return derive_keys(namespace.digest, resolved, context or NO_CONTEXT, request.hashes, nbytes)


def _bitmap(known: list[bool]) -> bytes:
    bits = sum(1 << i for i, here in enumerate(known) if here)
    return bits.to_bytes((len(known) + 7) // 8, "little")
