"""The client library: what an engine, a connector or a script holds.

    client = kvtier.Client("unix:/run/kvtier/kvtier.sock")
    ns = client.register(description)
    with client.fill(ns, hashes) as slots: ...      # reserve; sealed on a clean exit, aborted on an exception
    with client.lease(ns, hashes) as blocks: ...    # the warm leading part, pinned until exit

Reads and writes never raise for a fault of the service: they answer less, with a reason (`.reason`). Only a caller's mistake raises (Invalid).
Every call has a deadline. Thread-safe and fork-safe: a child process connects anew by itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.connection import Attachment, Connection
from kvtier.errors import Invalid, KvtierError, Stale, Unavailable
from kvtier.frames import Verb
from kvtier.identity import NO_CONTEXT, Description
from kvtier.layout import HEADER_BYTES, Extents, Range
from kvtier.v1 import kvtier_pb2 as pb

Body = npt.NDArray[np.uint8]
Hashes = bytes | Sequence[bytes]

KEYS_PER_CALL = 1024  # longer lists are split: a longer call would hold the daemon's interpreter against other clients
PRESENT = 2**64 - 1
LOOKUP, CONTROL, BULK = 0.05, 0.25, 5.0  # default deadlines, seconds
WHOLE = Range()
_STOPS = {0: "", 1: "miss", 2: "cold: prefetch first", 3: "full, retry: the session or tenant holds all it may", 4: "there is no lower tier"}


class Answer(int):
    """A number with the reason why it is not larger ("" if it is all that was asked for)."""

    reason: str

    def __new__(cls, value: int, reason: str = "") -> Answer:
        made = super().__new__(cls, value)
        made.reason = reason
        return made


class Bodies(list[Body]):
    """Private copies of block bodies, a leading part, with the reason why it ends where it does."""

    reason: str = ""


class Registered:
    """A namespace as this client uses it. Made by `Client.register`; remembers the daemon's handle for it, which a restart voids."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.digest = description.digest
        self.canonical = description.canonical
        self.hash_bytes = description.hashing.nbytes
        self._handle: tuple[int, int] | None = None  # (boot id, handle)
        self._resolved: dict[Range, tuple[tuple[int, int, int, int, int], Extents]] = {}

    def extents(self, range_: Range = WHOLE) -> Extents:
        """Sizes and offsets of a block of this range. Raises Invalid outside the layout."""
        return self.resolve(range_)[1]

    def resolve(self, range_: Range) -> tuple[tuple[int, int, int, int, int], Extents]:
        """(group, layer_lo, layer_hi, head_lo, head_hi) and extents; cached."""
        found = self._resolved.get(range_)
        if found is None:
            layout = self.description.layout
            found = (layout.resolve(range_), layout.extents(range_))
            if len(self._resolved) < 4096:
                self._resolved[range_] = found
        return found


class Client:
    """One session with the daemon at `address` ("unix:/path", or a path).

    Connects on first use and again after a loss; an absent daemon raises nothing.
    """

    def __init__(self, address: str) -> None:
        scheme, _, path = address.rpartition(":")
        if scheme not in ("", "unix") or not path:
            raise Invalid(f"{address!r} is not an address this client knows: write unix:/path/to/kvtier.sock")
        self._connection = Connection(path)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session. Open leases stay valid to read until they exit; open fills are lost."""
        self._connection.close()

    def register(self, description: Description) -> Registered:
        """A namespace to use in calls. Does no I/O: the daemon hears of it with the first call."""
        return Registered(description)

    # -- reading

    def lookup(self, ns: Registered, hashes: Hashes, *, range_: Range = WHOLE, context: bytes = NO_CONTEXT, deadline: float = LOOKUP) -> Answer:
        """The number of leading blocks the service knows, in any tier. No side effects."""
        answer = self.lookup_runs(ns, [(range_, hashes)], context=context, deadline=deadline)
        return answer[0]

    def lookup_runs(
        self, ns: Registered, runs: Sequence[tuple[Range, Hashes]], *, context: bytes = NO_CONTEXT, deadline: float = LOOKUP
    ) -> list[Answer]:
        """`lookup` for several runs of hashes, each in its own range: leading known blocks per run."""
        known = [0] * len(runs)
        reason = ["miss"] * len(runs)
        parts = [(i, part, _count(ns, part)) for i, (_, hashes) in enumerate(runs) for part in _split(ns, hashes)]
        ended: set[int] = set()
        try:
            for batch in _batches(parts, KEYS_PER_CALL):
                asked = [entry for entry in batch if entry[0] not in ended]
                request = pb.LookupRequest(context=_context(context))
                for i, part, _ in asked:
                    request.run.append(pb.Run(hashes=part, **_range_fields(ns, runs[i][0])))
                reply = pb.LookupReply.FromString(self._call(ns, Verb.LOOKUP, request, deadline))
                for (i, _, n), found in zip(asked, reply.known, strict=True):
                    known[i] += found
                    if found < n:
                        ended.add(i)
        except Invalid:
            raise
        except KvtierError as error:
            reason = [str(error)] * len(runs)
            ended |= set(range(len(runs)))
        totals = [_count(ns, hashes) for _, hashes in runs]
        return [Answer(n, "" if n == total else why) for n, total, why in zip(known, totals, reason, strict=True)]

    def lease(self, ns: Registered, hashes: Hashes, *, range_: Range = WHOLE, context: bytes = NO_CONTEXT, deadline: float = CONTROL) -> Lease:
        """A context manager over the warm leading part: read-only body views that stay valid and unchanged until exit."""
        return Lease(self, ns, hashes, range_, context, deadline)

    def get(self, ns: Registered, hashes: Hashes, *, range_: Range = WHOLE, context: bytes = NO_CONTEXT, deadline: float = BULK) -> Bodies:
        """Private copies of the leading part, taken in pieces so that the session's cap is never in the way."""
        bodies = Bodies()
        for part in _split(ns, hashes, KEYS_PER_CALL):
            raw = part
            while raw:
                with self.lease(ns, raw, range_=range_, context=context, deadline=deadline) as blocks:
                    for view in blocks:
                        body = np.empty(view.size, np.uint8)
                        np.copyto(body, view)
                        bodies.append(body)
                    bodies.reason = blocks.reason
                raw = raw[len(blocks) * ns.hash_bytes :]
                if not raw or not blocks or blocks.stop != pb.CAP:
                    break
            if raw:
                return bodies
        return bodies

    # -- writing

    def fill(self, ns: Registered, hashes: Hashes, *, range_: Range = WHOLE, context: bytes = NO_CONTEXT, deadline: float = CONTROL) -> Fill:
        """A context manager over reserved slots: writable body views, None where the block is present or nothing could be reserved."""
        return Fill(self, ns, hashes, range_, context, deadline)

    def put(
        self,
        ns: Registered,
        hashes: Hashes,
        bodies: Sequence[Any],
        *,
        range_: Range = WHOLE,
        context: bytes = NO_CONTEXT,
        deadline: float = BULK,
    ) -> Answer:
        """Copies these bodies (uint8 buffers of `extents.body_bytes`) in. Returns how many are known now, counted from the front."""
        total, step = _count(ns, hashes), ns.hash_bytes
        if total != len(bodies):
            raise Invalid(f"{total} hashes for {len(bodies)} bodies")
        raw = _join(ns, hashes)
        extents = ns.extents(range_)
        for body in bodies:
            if memoryview(body).nbytes != extents.body_bytes:
                raise Invalid(f"a body of this range has {extents.body_bytes} bytes, not {memoryview(body).nbytes}")
        try:
            arena = self._connection.attach(deadline).mapping.nbytes
        except KvtierError as error:
            return Answer(0, str(error))
        # a quarter of what a session may hold, so that other threads of it find room
        per_call = max(1, min(KEYS_PER_CALL, arena // 16 // extents.slot_bytes))
        done = 0
        while done < total:
            n = min(per_call, total - done)
            with self.fill(ns, raw[done * step : (done + n) * step], range_=range_, context=context, deadline=deadline) as slots:
                for slot, body in zip(slots, bodies[done : done + n], strict=True):
                    if slot is not None:
                        np.copyto(slot, np.frombuffer(body, np.uint8))
            if slots.sealed < n:
                return Answer(done + slots.sealed, slots.reason)
            done += n
        return Answer(done)

    def delete(self, ns: Registered, hashes: Hashes, *, range_: Range = WHOLE, context: bytes = NO_CONTEXT, deadline: float = CONTROL) -> Answer:
        """Makes the service forget these blocks. Returns how many it knew."""
        return self._count_call(Verb.DELETE, ns, hashes, range_, context, deadline)

    def prefetch(self, ns: Registered, hashes: Hashes, *, range_: Range = WHOLE, context: bytes = NO_CONTEXT, deadline: float = CONTROL) -> Answer:
        """Starts bringing cold blocks into memory and returns at once: how many were started."""
        return self._count_call(Verb.PREFETCH, ns, hashes, range_, context, deadline)

    def flush(self, ns: Registered, hashes: Hashes, *, range_: Range = WHOLE, context: bytes = NO_CONTEXT, deadline: float = BULK) -> Answer:
        """Waits until these blocks are settled in a lower tier. Returns how many are (0 where there is no lower tier)."""
        return self._count_call(Verb.FLUSH, ns, hashes, range_, context, deadline)

    # -- operators: these raise everything

    def explain(self, description: Description, *, deadline: float = BULK) -> list[str]:
        """How the nearest namespace of this model that the daemon knows differs: a line per field. Empty: known, or no such model."""
        attachment = self._connection.attach(deadline)
        request = pb.ExplainRequest(description=description.canonical)
        reply = self._connection.call(attachment, Verb.EXPLAIN, request.SerializeToString(), deadline)
        return list(pb.ExplainReply.FromString(reply).line)

    def status(self, *, check_integrity: bool = False, deadline: float = BULK) -> dict[str, Any]:
        """Gauges and counters of the daemon."""
        attachment = self._connection.attach(deadline)
        request = pb.StatusRequest(check_integrity=check_integrity)
        reply = self._connection.call(attachment, Verb.STATUS, request.SerializeToString(), deadline)
        status: dict[str, Any] = json.loads(pb.StatusReply.FromString(reply).json)
        return status

    # -- inside

    def _handle(self, ns: Registered, attachment: Attachment, deadline: float) -> int:
        known = ns._handle
        if known is not None and known[0] == attachment.boot:
            return known[1]
        request = pb.RegisterRequest(description=ns.canonical)
        reply = pb.RegisterReply.FromString(self._connection.call(attachment, Verb.REGISTER, request.SerializeToString(), deadline))
        if reply.description != ns.digest:
            raise Unavailable("the daemon computes another digest for this description: client and daemon differ in version")
        ns._handle = (attachment.boot, reply.handle)
        return reply.handle

    def _call(self, ns: Registered, verb: int, request: pb.LookupRequest | pb.Keys, deadline: float, attachment: Attachment | None = None) -> bytes:
        """One call in a namespace; registers it where need be, once more if the daemon has forgotten the handle."""
        until = time.monotonic() + deadline
        attachment = attachment or self._connection.attach(deadline)
        request.handle = self._handle(ns, attachment, deadline)
        left = until - time.monotonic()
        if left < 0.99 * deadline:  # a deadline that stays the same spares the socket two system calls
            deadline = max(0.001, left)
        try:
            return self._connection.call(attachment, verb, request.SerializeToString(), deadline)
        except Stale:
            ns._handle = None
            request.handle = self._handle(ns, attachment, deadline)
            return self._connection.call(attachment, verb, request.SerializeToString(), deadline)

    def _count_call(self, verb: int, ns: Registered, hashes: Hashes, range_: Range, context: bytes, deadline: float) -> Answer:
        total, reason = 0, ""
        try:
            for part in _split(ns, hashes):
                request = pb.Keys(context=_context(context), hashes=part, **_range_fields(ns, range_))
                reply = pb.Count.FromString(self._call(ns, verb, request, deadline))
                total += reply.n
                reason = _STOPS.get(reply.stop, "")
        except Invalid:
            raise
        except KvtierError as error:
            reason = str(error)
        return Answer(total, reason)


class Lease(Sequence[Body]):
    """The warm leading part of a list of blocks: read-only uint8 views of their bodies. Use as a context manager; views are void after exit.

    reason    why it is shorter than asked; stop: the same as the daemon's number
    """

    def __init__(self, client: Client, ns: Registered, hashes: Hashes, range_: Range, context: bytes, deadline: float) -> None:
        self._client, self._ns = client, ns
        self._parts = _split(ns, hashes)
        self._range, self._context, self._deadline = range_, _context(context), deadline
        self._ids: list[int] = []
        self._attachment: Attachment | None = None
        self._offsets: list[int] = []
        self.reason = ""
        self.stop = 0

    def __enter__(self) -> Lease:
        ns, connection = self._ns, self._client._connection
        fields = _range_fields(ns, self._range)
        self._body_bytes = ns.extents(self._range).body_bytes
        try:
            attachment = connection.attach(self._deadline)
            connection.use(attachment)
            self._attachment = attachment
            memory = attachment.memory.view()
            memory.flags.writeable = False
            self._memory = memory
            for part in self._parts:
                id_ = next(attachment.ids)
                self._ids.append(id_)
                request = pb.Keys(id=id_, context=self._context, hashes=part, **fields)
                reply = pb.Slots.FromString(self._client._call(ns, Verb.LEASE, request, self._deadline, attachment))
                self._offsets += reply.offset
                self.stop = reply.stop
                if self.stop:
                    self.reason = _STOPS.get(self.stop, f"stopped ({self.stop})")
                    break
        except Invalid:
            self.__exit__(None, None, None)
            raise
        except KvtierError as error:
            self.reason = str(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        del self._memory
        connection = self._client._connection
        # the tail first, so that it is older than its head and goes first
        connection.finish(attachment, Verb.RELEASE, self._ids[::-1], min(CONTROL, self._deadline))
        connection.unuse(attachment)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self._offsets)))]
        start = self._offsets[index] + HEADER_BYTES
        return self._memory[start : start + self._body_bytes]

    def __iter__(self) -> Iterator[Body]:
        if not self._offsets:  # perhaps nobody answered: there is no mapping then
            return iter(())
        memory, nbytes = self._memory, self._body_bytes
        return iter([memory[at : at + nbytes] for at in [offset + HEADER_BYTES for offset in self._offsets]])


class Fill(Sequence[Body | None]):
    """Reserved slots as writable uint8 views of bodies; None where a block is present already, or where nothing could be reserved.

    The writer writes the whole body, padding included (`docs/format.md`). After a clean exit `sealed` says how many leading blocks are known;
    `reason` says why not all.
    """

    def __init__(self, client: Client, ns: Registered, hashes: Hashes, range_: Range, context: bytes, deadline: float) -> None:
        self._client, self._ns = client, ns
        self._parts = _split(ns, hashes)
        self._range, self._context, self._deadline = range_, _context(context), deadline
        self._ids: list[tuple[int, int]] = []
        self._attachment: Attachment | None = None
        self._offsets: list[int] | None = None
        self._total = _count(ns, hashes)
        self.reason = ""
        self.sealed = 0

    def __enter__(self) -> Fill:
        ns, connection = self._ns, self._client._connection
        fields = _range_fields(ns, self._range)
        extents = ns.extents(self._range)
        self._body_bytes = extents.body_bytes
        offsets: list[int] = []
        try:
            attachment = connection.attach(self._deadline)
            connection.use(attachment)
            self._attachment = attachment
            for part in self._parts:
                id_ = next(attachment.ids)
                self._ids.append((id_, len(part) // ns.hash_bytes))
                request = pb.Keys(id=id_, context=self._context, hashes=part, nbytes=extents.block_bytes, **fields)
                offsets += pb.Slots.FromString(self._client._call(ns, Verb.RESERVE, request, self._deadline, attachment)).offset
            self._offsets = offsets
        except Invalid:
            self._abort()
            raise
        except KvtierError as error:
            self.reason = str(error)
            self._abort()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        attachment = self._attachment
        if attachment is None:
            return
        if kind is not None or self._offsets is None:
            self._abort()
            return
        connection = self._client._connection
        try:
            for id_, n in self._ids:
                request = pb.Held(id=id_)
                reply = connection.call(attachment, Verb.SEAL, request.SerializeToString(), self._deadline)
                known = pb.Count.FromString(reply).n
                self.sealed += known
                if known < n:
                    self.reason = "some blocks were dropped before they were sealed"
                    self._abort()  # what follows is of no use without them
                    return
        except KvtierError as failure:
            self.reason = str(failure)
            self._abort()
            return
        self._attachment = None
        connection.unuse(attachment)

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._total))]
        if not -self._total <= index < self._total:
            raise IndexError(index)
        offsets, attachment = self._offsets, self._attachment
        if offsets is None or attachment is None or offsets[index] == PRESENT:
            return None
        start = offsets[index] + HEADER_BYTES
        return attachment.memory[start : start + self._body_bytes]

    def _abort(self) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        connection = self._client._connection
        connection.finish(attachment, Verb.ABORT, [id_ for id_, _ in self._ids], min(CONTROL, self._deadline))
        connection.unuse(attachment)


def _join(ns: Registered, hashes: Hashes) -> bytes:
    """Concatenated hashes. Raises Invalid if one has the wrong length."""
    if isinstance(hashes, bytes | bytearray | memoryview):
        raw = bytes(hashes)
        if len(raw) % ns.hash_bytes:
            raise Invalid(f"{len(raw)} bytes of hashes are not a multiple of {ns.hash_bytes}")
        return raw
    if any(len(one) != ns.hash_bytes for one in hashes):
        raise Invalid(f"a content hash of this namespace has {ns.hash_bytes} bytes")
    return b"".join(hashes)


def _split(ns: Registered, hashes: Hashes, keys: int = KEYS_PER_CALL) -> list[bytes]:
    raw, step = _join(ns, hashes), keys * ns.hash_bytes
    if len(raw) <= step:
        return [raw] if raw else []
    return [raw[at : at + step] for at in range(0, len(raw), step)]


def _count(ns: Registered, hashes: Hashes) -> int:
    return len(hashes) // ns.hash_bytes if isinstance(hashes, bytes | bytearray | memoryview) else len(hashes)


def _batches(parts: Iterable[tuple[int, bytes, int]], most: int) -> Iterator[list[tuple[int, bytes, int]]]:
    """Groups entries so that no group has more than `most` keys or 256 runs."""
    batch: list[tuple[int, bytes, int]] = []
    total = 0
    for entry in parts:
        if batch and (total + entry[2] > most or len(batch) == 256):
            yield batch
            batch, total = [], 0
        batch.append(entry)
        total += entry[2]
    if batch:
        yield batch


def _context(context: bytes) -> bytes:
    if len(context) != 32:
        raise Invalid(f"a request context has 32 bytes (identity.request_context makes one), not {len(context)}")
    return b"" if context == NO_CONTEXT else context


def _range_fields(ns: Registered, range_: Range) -> dict[str, Any]:
    group, layer_lo, layer_hi, head_lo, head_hi = ns.resolve(range_)[0]
    return {"group": group, "layer_lo": layer_lo, "layer_hi": layer_hi, "head_lo": head_lo, "head_hi": head_hi}
