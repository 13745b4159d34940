"""The client library: what an engine, a connector or a script holds.

    client = kvtier.Client("unix:/run/kvtier/kvtier.sock")
    ns = client.register(description)
    with client.fill(ns, hashes) as slots: ...      # reserve; sealed on a clean exit, aborted on an exception
    with client.lease(ns, hashes) as blocks: ...    # the warm leading part, pinned until exit

The same calls over the unix transport (bytes by reference) and over gRPC (bytes copied): the address chooses, and where
the daemon's memory cannot be mapped the unix transport gives way to gRPC. Reads and writes never raise for a fault of
the service: they answer less, with codes and a reason. Only a caller's mistake raises (Invalid). Every call has a
deadline. Thread-safe and fork-safe: a child process connects anew by itself.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from google.protobuf.message import Message

from kvtier.client import answers
from kvtier.client.answers import WHOLE, Answer, Asked, Ended, Fill, Hashes, Lease, NamespaceInfo, RegisteredNamespace
from kvtier.client.connection import Unmappable
from kvtier.client.unix import UnixTransport
from kvtier.errors import Invalid, KvtierError, Unavailable
from kvtier.format.identity import NO_CONTEXT, Description
from kvtier.format.layout import Range
from kvtier.protocol.addresses import grpc_beside
from kvtier.protocol.frames import Verb
from kvtier.protocol.limits import CONTROL_DEADLINE, KEYS_PER_CALL, LOOKUP_DEADLINE, TRANSFER_DEADLINE
from kvtier.protocol.stops import MISS, Ending
from kvtier.protocol.v1 import kvtier_pb2 as pb

if TYPE_CHECKING:
    from kvtier.client.grpc import GrpcTransport

__all__ = ["WHOLE", "Answer", "Client", "Ended", "Fill", "Hashes", "Lease", "NamespaceInfo", "RegisteredNamespace"]

AGAIN = 0.001  # seconds until a lookup asks again that was told "later", doubled each time that brings nothing new
# Seconds after which a client that fell back to gRPC tries the unix transport again: memory may only have been short.
UNIX_AGAIN = 60.0

M = TypeVar("M", bound=Message)
log = logging.getLogger(__name__)


class Client:
    """One session with the daemon at `address`: made on first use, again after a loss. An absent daemon raises nothing.

    address   "unix:/path/to/kvtier.sock" or a path   the unix transport, for processes on the daemon's host
              "grpc+unix:/path"                       gRPC on a Unix socket
              "grpc://host:port"                      gRPC in clear, for loopback or a tunnel
              "grpcs://host:port"                     gRPC over TLS
    token     what the daemon's token file knows this client by; needed on TCP
    ca        PEM file of the authorities that may have signed the daemon's certificate (grpcs); None: the system's
    cert, key PEM files of this client's own certificate, where the daemon asks for one
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
    ) -> None:
        scheme, rest = _parse(address)
        self._lock = threading.Lock()
        self._unix_again = 0.0
        self._unix: UnixTransport | None = None
        self._grpc: GrpcTransport | None = None
        if scheme == "unix":
            if token or ca or cert or key:
                raise Invalid("the unix transport takes no token and no certificate: the kernel says who connects")
            self._unix = UnixTransport(rest)
            self._connection = self._unix.connection
        else:
            self._grpc = _grpc_transport(scheme, rest, token=token, ca=ca, cert=cert, key=key)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session. Open leases stay valid to read until they exit; open fills are lost."""
        for transport in (self._unix, self._grpc):
            if transport is not None:
                transport.close()

    def register(self, description: Description) -> RegisteredNamespace:
        """A namespace to use in calls. Does no I/O: the daemon hears of it with the first call."""
        return RegisteredNamespace(description)

    @property
    def lost_blocks(self) -> int:
        """Blocks that came over gRPC and failed their check, so far. They were answered as misses."""
        return self._grpc.lost_blocks if self._grpc is not None else 0

    # -- reading

    def lookup(
        self,
        ns: RegisteredNamespace,
        hashes: Hashes,
        *,
        range_: Range = WHOLE,
        context: bytes = NO_CONTEXT,
        deadline: float = LOOKUP_DEADLINE,
    ) -> Answer:
        """The number of leading blocks the service knows, in any tier. No side effects."""
        return self.lookup_runs(ns, [(range_, hashes)], context=context, deadline=deadline)[0]

    def lookup_runs(
        self,
        ns: RegisteredNamespace,
        runs: Sequence[tuple[Range, Hashes]],
        *,
        context: bytes = NO_CONTEXT,
        deadline: float = LOOKUP_DEADLINE,
    ) -> list[Answer]:
        """`lookup` for several runs of hashes, each in its own range: leading known blocks per run."""
        known = [0] * len(runs)
        ending = MISS
        split = [(i, answers.split(ns, hashes)) for i, (_, hashes) in enumerate(runs)]
        parts = [(i, part, answers.count(ns, part)) for i, parts_of_run in split for part in parts_of_run]
        ended: set[int] = set()
        try:
            answers.in_time(answers.seconds(deadline))
            until = time.monotonic() + deadline
            for batch in answers.batches(parts, KEYS_PER_CALL):
                asked = [entry for entry in batch if entry[0] not in ended]
                request = pb.LookupRequest(context=answers.context_field(context))
                for i, part, _ in asked:
                    request.run.append(pb.Run(hashes=part, **answers.range_fields(ns, runs[i][0])))
                reply = self._ask(pb.LookupReply, ns, Verb.LOOKUP, request, deadline)
                pause = AGAIN
                while reply.later and time.monotonic() + pause < until:
                    time.sleep(pause)
                    before, left = sum(reply.known), max(0.001, until - time.monotonic())
                    reply = self._ask(pb.LookupReply, ns, Verb.LOOKUP, request, left)
                    pause = AGAIN if sum(reply.known) > before else 2 * pause
                if len(reply.known) != len(asked):
                    raise Unavailable(f"the daemon answers {len(reply.known)} runs of {len(asked)}")
                for (i, _, n), found in zip(asked, reply.known, strict=True):
                    known[i] += found
                    if found < n:
                        ended.add(i)
        except KvtierError as error:
            ending = answers.fault(error)
        totals = [answers.count(ns, hashes) for _, hashes in runs]
        return [Answer(n) if n == total else Answer(n, ending) for n, total in zip(known, totals, strict=True)]

    def lease(
        self,
        ns: RegisteredNamespace,
        hashes: Hashes,
        *,
        range_: Range = WHOLE,
        context: bytes = NO_CONTEXT,
        deadline: float | None = None,
    ) -> Lease:
        """A context manager over the warm leading part: read-only body views that stay valid and unchanged until exit.

        Over gRPC these are private copies, which arrive on entry. The deadline is 0.25 s on the unix transport and 5 s
        over gRPC if none is given.
        """
        transport = self._transport(CONTROL_DEADLINE if deadline is None else answers.seconds(deadline))
        return transport.lease(Asked.of(ns, hashes, range_, context), deadline)

    def get(
        self,
        ns: RegisteredNamespace,
        hashes: Hashes,
        *,
        range_: Range = WHOLE,
        context: bytes = NO_CONTEXT,
        deadline: float = TRANSFER_DEADLINE,
        into: Sequence[answers.Body] | None = None,
    ) -> answers.Bodies:
        """Private copies of the leading part; what is cold is brought up and waited for.

        What came over gRPC has been checked, key and every byte.

        into   where to copy to, a writable uint8 array of `extents.body_bytes` per hash, as of a staging buffer; the
               answer is the leading part of these. What stands in those behind it is not said. Without it each copy is
               fresh memory, which costs a page fault per 4 KiB.
        """
        asked = Asked.of(ns, hashes, range_, context)
        if into is not None:
            _check_buffers(into, asked)
        return self._transport(answers.seconds(deadline)).get(asked, deadline, into)

    # -- writing

    def fill(
        self,
        ns: RegisteredNamespace,
        hashes: Hashes,
        *,
        range_: Range = WHOLE,
        context: bytes = NO_CONTEXT,
        deadline: float | None = None,
    ) -> Fill:
        """A context manager over reserved slots: writable body views, None where the block is present or nothing could
        be reserved. Over gRPC these are private buffers, put on a clean exit. Deadlines as for `lease`.
        """
        transport = self._transport(CONTROL_DEADLINE if deadline is None else answers.seconds(deadline))
        return transport.fill(Asked.of(ns, hashes, range_, context), deadline)

    def put(
        self,
        ns: RegisteredNamespace,
        hashes: Hashes,
        bodies: Sequence[Any],
        *,
        range_: Range = WHOLE,
        context: bytes = NO_CONTEXT,
        deadline: float = TRANSFER_DEADLINE,
    ) -> Answer:
        """Copies these bodies (uint8, `extents.body_bytes` each) in. Returns how many are known now, from the front."""
        asked = Asked.of(ns, hashes, range_, context)
        if len(asked) != len(bodies):
            raise Invalid(f"{len(asked)} hashes for {len(bodies)} bodies")
        nbytes = asked.extents.body_bytes
        for body in bodies:
            view = memoryview(body)
            if view.nbytes != nbytes or not view.c_contiguous:
                found = f"{view.nbytes} bytes of shape {view.shape}"
                raise Invalid(f"a body of this range is one run of {nbytes} bytes, not {found}")
        return self._transport(answers.seconds(deadline)).put(asked, bodies, deadline)

    def delete(
        self,
        ns: RegisteredNamespace,
        hashes: Hashes,
        *,
        range_: Range = WHOLE,
        context: bytes = NO_CONTEXT,
        deadline: float = CONTROL_DEADLINE,
    ) -> Answer:
        """Makes the service forget these blocks. Returns how many it knew."""
        return self._count(Verb.DELETE, Asked.of(ns, hashes, range_, context), deadline)

    def prefetch(
        self,
        ns: RegisteredNamespace,
        hashes: Hashes,
        *,
        range_: Range = WHOLE,
        context: bytes = NO_CONTEXT,
        deadline: float = CONTROL_DEADLINE,
    ) -> Answer:
        """Starts bringing cold blocks up and returns at once: how many are on their way (0: there is no lower tier)."""
        return self._count(Verb.PREFETCH, Asked.of(ns, hashes, range_, context), deadline)

    def flush(
        self,
        ns: RegisteredNamespace,
        hashes: Hashes,
        *,
        range_: Range = WHOLE,
        context: bytes = NO_CONTEXT,
        deadline: float = TRANSFER_DEADLINE,
    ) -> Answer:
        """Waits until these blocks are settled in a lower tier. Returns how many leading ones are (0: no such tier)."""
        return self._count(Verb.FLUSH, Asked.of(ns, hashes, range_, context), deadline)

    # -- operators: these raise everything

    def explain(self, description: Description, *, deadline: float = TRANSFER_DEADLINE) -> list[str]:
        """How the nearest namespace of this model differs, a line per field. Empty: known, or no such model."""
        request = pb.ExplainRequest(description=description.canonical)
        return list(self._ask(pb.ExplainReply, None, Verb.EXPLAIN, request, deadline).line)

    def status(self, *, check_integrity: bool = False, deadline: float = TRANSFER_DEADLINE) -> dict[str, Any]:
        """Gauges and counters of the daemon."""
        request = pb.StatusRequest(check_integrity=check_integrity)
        status: dict[str, Any] = json.loads(self._ask(pb.StatusReply, None, Verb.STATUS, request, deadline).json)
        return status

    def list_namespaces(self, *, deadline: float = TRANSFER_DEADLINE) -> list[NamespaceInfo]:
        """The namespaces of the caller's tenant; of all tenants for an admin."""
        reply = self._ask(pb.ListReply, None, Verb.LIST, pb.ListRequest(), deadline)
        return [NamespaceInfo.of(one) for one in reply.namespace]

    def show(self, name: str, *, deadline: float = TRANSFER_DEADLINE) -> tuple[NamespaceInfo, dict[str, Any]]:
        """A namespace by the beginning of its digest (hex): as `list_namespaces` has it, and its description data."""
        reply = self._ask(pb.ShowReply, None, Verb.SHOW, pb.ShowRequest(name=name), deadline)
        return NamespaceInfo.of(reply.info), json.loads(reply.description)

    def diff(self, stored: str, live: str, *, deadline: float = TRANSFER_DEADLINE) -> list[str]:
        """The fields in which two namespaces differ, a line each."""
        reply = self._ask(pb.ExplainReply, None, Verb.DIFF, pb.DiffRequest(stored=stored, live=live), deadline)
        return list(reply.line)

    def drop(self, name: str, *, deadline: float = TRANSFER_DEADLINE) -> int:
        """Forgets a namespace and its blocks. Returns how many blocks those were. Needs role admin."""
        return self._ask(pb.Count, None, Verb.DROP, pb.DropRequest(name=name), deadline).n

    def set_ttl(self, name: str, seconds: int, *, deadline: float = TRANSFER_DEADLINE) -> NamespaceInfo:
        """Lets a namespace's blocks be forgotten that have been neither put nor used for so long; 0: never.

        Needs role admin.
        """
        if not 0 <= seconds < 2**32:
            raise Invalid(f"a time-to-live of {seconds} seconds: write a number of seconds, or 0 for none")
        request = pb.TtlRequest(name=name, seconds=seconds)
        return NamespaceInfo.of(self._ask(pb.NamespaceInfo, None, Verb.TTL, request, deadline))

    def pin(
        self,
        ns: RegisteredNamespace,
        hashes: Hashes,
        *,
        range_: Range = WHOLE,
        context: bytes = NO_CONTEXT,
        deadline: float = TRANSFER_DEADLINE,
    ) -> Answer:
        """Keeps the leading known blocks from eviction, a tenth of the arena at most. Needs role admin."""
        return self._count(Verb.PIN, Asked.of(ns, hashes, range_, context), deadline)

    def unpin(
        self,
        ns: RegisteredNamespace,
        hashes: Hashes,
        *,
        range_: Range = WHOLE,
        context: bytes = NO_CONTEXT,
        deadline: float = TRANSFER_DEADLINE,
    ) -> Answer:
        """Ends pins. Returns how many of these blocks were pinned. Needs role admin."""
        return self._count(Verb.UNPIN, Asked.of(ns, hashes, range_, context), deadline)

    # -- inside

    def _transport(self, deadline: float) -> answers.Transport:
        """The unix transport, or gRPC: by address, and where memory cannot be mapped. Connects; never raises."""
        unix, grpc = self._unix, self._grpc
        if grpc is not None and (unix is None or time.monotonic() < self._unix_again):
            return grpc
        assert unix is not None
        if not deadline:
            return unix
        try:
            unix.attach(deadline)
        except Unmappable as error:
            return self._fall_back(unix, error)
        except KvtierError:
            pass  # the call itself will say so
        else:
            if grpc is not None:
                self._grpc = None
                grpc.close()
        return unix

    def _fall_back(self, unix: UnixTransport, error: Unmappable) -> GrpcTransport:
        with self._lock:
            self._unix_again = time.monotonic() + UNIX_AGAIN
            if self._grpc is None:
                path = grpc_beside(unix.connection.path)
                log.warning("kvtier: %s; using gRPC on %s instead: bytes are copied", error, path)
                self._grpc = _grpc_transport("grpc+unix", path)
            return self._grpc

    def _ask(self, kind: type[M], ns: RegisteredNamespace | None, verb: int, request: Message, deadline: float) -> M:
        """One call and its answer. Raises KvtierError of any kind."""
        answers.in_time(answers.seconds(deadline))
        return answers.parse(kind, self._transport(deadline).call(ns, verb, request, deadline))

    def _count(self, verb: int, asked: Asked, deadline: float) -> Answer:
        """Sum of a verb's counts over the parts of a long list. Raises KvtierError of any kind for an operator's verb;
        else a fault of the service ends the sum with a reason.
        """
        total, ending, until = 0, Ending(), time.monotonic() + answers.seconds(deadline)
        try:
            answers.in_time(deadline)
            for part in asked.parts():
                request = part.keys()
                if verb == Verb.FLUSH:
                    deadline = max(0.001, until - time.monotonic())  # one for all parts
                    request.wait_ms = answers.waiting(deadline)
                reply = self._ask(pb.Count, asked.ns, verb, request, deadline)
                total += reply.n
                ending = Ending.at(reply.stop)
                if verb in (Verb.PIN, Verb.FLUSH) and reply.stop:
                    break  # these count a leading part
        except KvtierError as error:
            if verb in (Verb.PIN, Verb.UNPIN):
                raise
            ending = answers.fault(error)
        return Answer(total, ending)


def _check_buffers(buffers: Sequence[answers.Body], asked: Asked) -> None:
    if len(buffers) != len(asked):
        raise Invalid(f"{len(asked)} hashes and {len(buffers)} buffers to copy into")
    nbytes = asked.extents.body_bytes
    for one in buffers:
        if one.dtype != np.uint8 or one.shape != (nbytes,) or not one.flags.writeable:
            found = f"{one.dtype} of shape {one.shape}"
            raise Invalid(f"a buffer of this range is a writable array of {nbytes} uint8, not {found}")


def _grpc_transport(scheme: str, rest: str, **locks: Any) -> GrpcTransport:
    # A client of the unix transport does without grpc: 0.1 s of importing, and its threads.
    from kvtier.client.grpc import GrpcTransport
    from kvtier.client.grpc_channel import GrpcChannel

    return GrpcTransport(GrpcChannel(scheme, rest, **locks))


def _parse(address: str) -> tuple[str, str]:
    """(scheme, path or host:port). Raises Invalid."""
    for scheme in ("unix", "grpc+unix", "grpc", "grpcs"):
        if address.startswith(f"{scheme}:"):
            rest = address[len(scheme) + 1 :]
            if scheme in ("grpc", "grpcs"):
                rest = rest[2:] if rest.startswith("//") else ""
            break
    else:
        scheme, rest = "unix", address if address.startswith(("/", ".")) or ":" not in address else ""
    if not rest:
        forms = "unix:/path/to/kvtier.sock or grpcs://host:port"
        raise Invalid(f"{address!r:.200} is not an address of kvtier: write {forms}")
    return scheme, rest
