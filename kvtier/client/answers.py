"""What calls take and give back, whatever carries them: registered namespaces, answers with reasons, leases and fills,
and how long lists are split.

Reads and writes never raise for a fault of the service: they answer less, with a reason. Only a caller's mistake raises
(Invalid). No I/O here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from kvtier.errors import Deadline, Invalid, KvtierError, Lost, Stale, Unavailable
from kvtier.format.identity import NO_CONTEXT, Description
from kvtier.format.layout import Extents, Range
from kvtier.protocol import stops as protocol
from kvtier.protocol.limits import KEYS_PER_CALL, MAX_RUNS
from kvtier.protocol.stops import Ending
from kvtier.protocol.v1 import kvtier_pb2 as pb

Body = npt.NDArray[np.uint8]
Hashes = bytes | Sequence[bytes]
M = TypeVar("M", bound=Message)
T = TypeVar("T")
_MAX_HANDLES = 4096  # namespaces of which one transport remembers the handle

WHOLE = Range()
DROPPED = Ending(error=Lost.code, reason="some blocks were dropped before they were sealed")


class Ended:
    """What all answers have: why they are not larger. Programs decide by `stop` and `error`; `reason` is for people."""

    ending: Ending = protocol.WHOLE

    @property
    def stop(self) -> int:
        """Where a daemon that answered stopped (`protocol.stops.Stop`); 0 if that was all, or if an error came."""
        return self.ending.stop

    @property
    def error(self) -> int:
        """The code of the error that cut the answer short (`kvtier.errors.BY_CODE`); 0 if none did."""
        return self.ending.error

    @property
    def reason(self) -> str:
        """The same in words; "" if the answer is all that was asked for."""
        return self.ending.reason


class Answer(int, Ended):
    """A number, and why it is not larger."""

    def __new__(cls, value: int, ending: Ending = protocol.WHOLE) -> Answer:
        made = super().__new__(cls, value)
        made.ending = ending
        return made


class Bodies(list[Body], Ended):
    """Private copies of block bodies, a leading part."""


class RegisteredNamespace:
    """A namespace as this client uses it. Made by `Client.register`."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.digest = description.digest
        self.canonical = description.canonical
        self.hash_bytes = description.hashing.nbytes
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


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """A namespace as the daemon lists it.

    Digests have 32 bytes, `description` is the same for every tenant; `nbytes` are of sealed blocks.
    `ttl`: seconds after which a block that is neither put nor used is forgotten; 0: never.
    """

    namespace: bytes
    description: bytes
    tenant: str
    model: str
    revision: str
    blocks: int
    nbytes: int
    ttl: int

    @classmethod
    def of(cls, message: pb.NamespaceInfo) -> NamespaceInfo:
        """Out of its message."""
        digests = message.namespace, message.description
        return cls(
            *digests, message.tenant, message.model, message.revision, message.blocks, message.bytes, message.ttl
        )


@dataclass(slots=True, eq=False)  # not frozen: making one would take 0.6 us more, of 30 us that a call takes
class Asked:
    """The blocks that a call is about: their hashes one after another, and the range and request context of all.

    Never changed. `context` as it travels: b"" where there is none.
    """

    ns: RegisteredNamespace
    hashes: bytes
    range_: Range
    context: bytes

    @classmethod
    def of(cls, ns: RegisteredNamespace, hashes: Hashes, range_: Range, context: bytes) -> Asked:
        """What a caller asked for. Raises Invalid for a hash or a context of the wrong length."""
        return cls(ns, join(ns, hashes), range_, context_field(context))

    def __len__(self) -> int:
        return len(self.hashes) // self.ns.hash_bytes

    @property
    def extents(self) -> Extents:
        """Sizes and offsets of one of these blocks. Raises Invalid for a range outside the layout."""
        return self.ns.extents(self.range_)

    def cut(self, first: int, end: int) -> Asked:
        """The blocks from `first` up to `end`."""
        step = self.ns.hash_bytes
        return Asked(self.ns, self.hashes[first * step : end * step], self.range_, self.context)

    def parts(self, keys: int = KEYS_PER_CALL) -> list[Asked]:
        """The same in parts of at most `keys`."""
        n = len(self)
        return [self] if 0 < n <= keys else [self.cut(at, at + keys) for at in range(0, n, keys)]

    def keys(self, **more: int) -> pb.Keys:
        """The request that names these blocks, with further fields of it. Raises Invalid outside the layout."""
        fields = range_fields(self.ns, self.range_)
        return pb.Keys(context=self.context, hashes=self.hashes, **fields, **more)


class ContextAnswer(Ended):
    """An answer that is used as a context manager."""

    def __enter__(self) -> Self:
        raise NotImplementedError

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        raise NotImplementedError


class Lease(Sequence[Body], ContextAnswer):
    """The warm leading part of a list of blocks: read-only uint8 views of their bodies.

    Use as a context manager; views are void after exit.
    """


class Fill(Sequence[Body | None], ContextAnswer):
    """Reserved slots as writable uint8 views of bodies; None where a block is present already, or where nothing could
    be reserved.

    The writer writes the whole body, padding included (`docs/format.md`). After a clean exit `sealed` says how many
    leading blocks are known.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self.sealed = 0

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._total))]
        if not -self._total <= index < self._total:
            raise IndexError(index)
        return self._body(index % self._total)

    def _body(self, index: int) -> Body | None:
        raise NotImplementedError


class Transport(Protocol):
    """What carries a client's calls: `unix` (mapped arena) or `grpc`. Deadline None: the transport's default."""

    def call(self, ns: RegisteredNamespace | None, verb: int, request: Message, deadline: float) -> bytes:
        """One call; within a namespace its handle is filled in, registered where need be. Raises any KvtierError."""

    def lease(self, asked: Asked, deadline: float | None) -> Lease:
        """See Client.lease."""

    def fill(self, asked: Asked, deadline: float | None) -> Fill:
        """See Client.fill."""

    def get(self, asked: Asked, deadline: float, into: Sequence[Body] | None = None) -> Bodies:
        """See Client.get."""

    def put(self, asked: Asked, bodies: Sequence[Any], deadline: float) -> Answer:
        """See Client.put. Sizes are checked already."""

    def close(self) -> None:
        """Ends the session."""


def join(ns: RegisteredNamespace, hashes: Hashes) -> bytes:
    """Concatenated hashes. Raises Invalid if one has the wrong length."""
    if isinstance(hashes, bytes | bytearray | memoryview):
        raw = bytes(hashes)
        if len(raw) % ns.hash_bytes:
            raise Invalid(f"{len(raw)} bytes of hashes are not a multiple of {ns.hash_bytes}")
        return raw
    if any(len(one) != ns.hash_bytes for one in hashes):
        raise Invalid(f"a content hash of this namespace has {ns.hash_bytes} bytes")
    return b"".join(hashes)


def split(ns: RegisteredNamespace, hashes: Hashes) -> list[bytes]:
    """Concatenated hashes in parts of at most KEYS_PER_CALL."""
    raw, step = join(ns, hashes), KEYS_PER_CALL * ns.hash_bytes
    return [raw[at : at + step] for at in range(0, len(raw), step)]


def count(ns: RegisteredNamespace, hashes: Hashes) -> int:
    """The number of hashes."""
    return len(hashes) // ns.hash_bytes if isinstance(hashes, bytes | bytearray | memoryview) else len(hashes)


def batches(parts: Iterable[tuple[int, bytes, int]], most: int) -> Iterator[list[tuple[int, bytes, int]]]:
    """Groups entries so that no group has more than `most` keys or 256 runs."""
    batch: list[tuple[int, bytes, int]] = []
    total = 0
    for entry in parts:
        if batch and (total + entry[2] > most or len(batch) == MAX_RUNS):
            yield batch
            batch, total = [], 0
        batch.append(entry)
        total += entry[2]
    if batch:
        yield batch


def parse(kind: type[M], raw: bytes) -> M:
    """A daemon's answer. Raises Unavailable for bytes that are none."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        why = "it was garbled on its way, or is of another version"
        raise Unavailable(f"the daemon's answer cannot be read: {why}") from None


class Registration(NamedTuple):
    """What the daemon of this boot id answered to a registration."""

    boot: int
    handle: int
    namespace: bytes


class Registrations:
    """Handles that a daemon gave for descriptions. Asked for once a life of the daemon; thread-safe.

    `ask` registers: bytes of a RegisterRequest in, of its reply out. `boot` is the daemon's boot id where it is known.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Registration] = {}  # by description digest

    def within(
        self,
        ns: RegisteredNamespace,
        ask: Callable[[bytes], bytes],
        once: Callable[[Registration], T],
        boot: int | None = None,
    ) -> T:
        """Runs `once` under this namespace's registration, and once more if the daemon has forgotten that."""
        known = self._known.get(ns.digest)
        try:
            return once(known if known and boot in (None, known.boot) else self._register(ns, ask, boot))
        except Stale:
            self._known.pop(ns.digest, None)
            return once(self._register(ns, ask, boot))

    def _register(self, ns: RegisteredNamespace, ask: Callable[[bytes], bytes], boot: int | None) -> Registration:
        reply = parse(pb.RegisterReply, ask(pb.RegisterRequest(description=ns.canonical).SerializeToString()))
        if reply.description != ns.digest:
            what = "the daemon computes another digest for this description"
            raise Unavailable(f"{what}: client and daemon differ in version")
        known = Registration(reply.boot if boot is None else boot, reply.handle, reply.namespace)
        if len(self._known) >= _MAX_HANDLES:
            self._known.clear()
        self._known[ns.digest] = known
        return known


def context_field(context: bytes) -> bytes:
    """A request context as it travels: nothing where there is none."""
    if len(context) != 32:
        raise Invalid(f"a request context has 32 bytes (identity.request_context makes one), not {len(context)}")
    return b"" if context == NO_CONTEXT else context


def seconds(deadline: float) -> float:
    """A deadline that a caller gave, in seconds; 0 is over already (`in_time`). Raises Invalid for what is none."""
    number = isinstance(deadline, int | float) and not isinstance(deadline, bool)
    if not number or not math.isfinite(deadline) or deadline < 0:
        raise Invalid(f"a deadline is a number of seconds from 0 up, not {deadline!r:.80}")
    return float(deadline)


def in_time(deadline: float) -> None:
    """Raises Deadline for one that is over: such a call is not sent and answers at once."""
    if deadline <= 0:
        raise Deadline("no answer within 0 s: the deadline was over when the call was made")


def fault(error: KvtierError) -> Ending:
    """Why an answer is less: a fault of the service, which callers do not see as an exception. Raises Invalid."""
    if isinstance(error, Invalid):
        raise error
    return Ending.by(error)


def waiting(deadline: float) -> int:
    """Milliseconds that the daemon may wait for a lower tier, so that its answer still comes within the deadline."""
    return max(1, int(deadline * 800))


def range_fields(ns: RegisteredNamespace, range_: Range) -> dict[str, Any]:
    """A range as the fields of Keys and Run."""
    group, layer_lo, layer_hi, head_lo, head_hi = ns.resolve(range_)[0]
    return {"group": group, "layer_lo": layer_lo, "layer_hi": layer_hi, "head_lo": head_lo, "head_hi": head_hi}
