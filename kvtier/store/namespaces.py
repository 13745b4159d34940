"""The namespaces the daemon knows: from a handle to a description, and back. Handles are void at a new boot id.

At most 4,096. When all places are taken, one that holds no blocks is forgotten; its clients hear Stale and register
again. Thread-safe: one small lock, never held around other calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvtier.errors import Full, Invalid, NotFound, Stale
from kvtier.format.identity import Description, diff, namespace_digest, parse_description
from kvtier.format.layout import Extents, Range

MAX_NAMESPACES = 4096
_MAX_GEOMETRIES = 256  # ranges in use, by namespace; a few bytes each
_MAX_EXPLAINED = 64  # youngest namespaces of a model that `explain` compares with; a diff costs about 1 ms


@dataclass(slots=True, eq=False)
class Namespace:
    """One registered description under one tenant. `digest` (32 bytes) goes into every key."""

    handle: int
    digest: bytes
    tenant: str
    description: Description
    description_digest: bytes
    dropped: bool = False
    crowded: bool = False  # dropped only because this registry was full: what others hold of it stays good
    _geometries: dict[tuple[int, int, int, int, int], Extents] = field(default_factory=dict)

    def check(self, resolved: tuple[int, int, int, int, int]) -> None:
        """Raises Invalid for a range outside the layout. Makes and keeps nothing, whatever a caller asks for."""
        group, layer_lo, layer_hi, head_lo, head_hi = resolved
        self.description.layout.resolve(Range(group, (layer_lo, layer_hi), (head_lo, head_hi)))

    def extents(self, resolved: tuple[int, int, int, int, int]) -> Extents:
        """Sizes of a range given with both ends; of its layers' offsets only the first layer's, so that any range costs
        the same few bytes. Raises Invalid outside the layout. Cached: hashing a layout costs more than a call."""
        found = self._geometries.get(resolved)
        if found is None:
            group, layer_lo, layer_hi, head_lo, head_hi = resolved
            whole = self.description.layout.extents(Range(group, (layer_lo, layer_hi), (head_lo, head_hi)))
            found = replace(whole, scales=whole.scales[:1], data=whole.data[:1])
            if len(self._geometries) >= _MAX_GEOMETRIES:
                self._geometries.clear()
            self._geometries[resolved] = found
        return found


class Namespaces:
    """Registry by handle. `in_use`: handles that hold blocks; `purge` removes what came under a forgotten namespace.
    Both are called without the registry's lock, and only when all places are taken."""

    def __init__(self, in_use: Callable[[], set[int]], purge: Callable[[Namespace], int]) -> None:
        self._in_use, self._purge = in_use, purge
        self._lock = threading.Lock()
        self._by_handle: dict[int, Namespace] = {}
        self._by_digest: dict[bytes, Namespace] = {}
        self._next = 1

    def register(self, raw: bytes, tenant: str) -> Namespace:
        """The namespace of these canonical bytes, made if need be. Raises Invalid, or Full when all hold blocks."""
        description = parse_description(raw)
        digest = namespace_digest(description, tenant)
        with self._lock:
            found = self._by_digest.get(digest)
            if found is not None:
                return found
        spare = None
        busy = self._in_use() if len(self._by_handle) >= MAX_NAMESPACES else set()
        with self._lock:
            found = self._by_digest.get(digest)
            if found is not None:
                return found
            if len(self._by_handle) >= MAX_NAMESPACES:
                spare = next((ns for handle, ns in self._by_handle.items() if handle not in busy), None)
                if spare is None:
                    raise Full(f"{MAX_NAMESPACES} namespaces hold blocks; drop some before registering another")
                spare.crowded = spare.dropped = (
                    True  # what is reserved under it from now on is refused, and never sealed
                )
                del self._by_handle[spare.handle], self._by_digest[spare.digest]
            made = Namespace(self._next, digest, tenant, description, description.digest)
            self._next += 1
            self._by_handle[made.handle] = self._by_digest[digest] = made
        if spare is not None:
            self._purge(spare)  # nothing, unless a put came between the question and the answer
        return made

    def get(self, handle: int, tenant: str) -> Namespace:
        """The namespace of a handle. Raises Stale for an unknown one, and just so for another tenant's."""
        found = self._by_handle.get(handle)
        if found is None or found.tenant != tenant:
            raise Stale(f"handle {handle} is not known to this daemon: register the description again")
        return found

    def drop(self, namespace: Namespace) -> None:
        """Makes its handle void; what is reserved under it cannot be sealed. Its blocks are the store's business."""
        with self._lock:
            namespace.dropped = True
            # else it is gone, and its digest may name a new one
            if self._by_handle.pop(namespace.handle, None) is not None:
                del self._by_digest[namespace.digest]

    def named(self, name: str, tenant: str | None) -> Namespace:
        """The namespace whose description or namespace digest begins with `name` (hex), of one tenant or of any (None).
        Raises Invalid, NotFound."""
        if not (4 <= len(name) <= 64 and set(name) <= set("0123456789abcdef")):
            digits = "4 to 64 lower-case hex digits (`kvtier namespaces` lists them)"
            raise Invalid(f"{name[:80]!r} is not the beginning of a digest: write {digits}")
        mine = [ns for ns in self.all() if tenant is None or ns.tenant == tenant]
        found = [ns for ns in mine if ns.description_digest.hex().startswith(name) or ns.digest.hex().startswith(name)]
        if not found:
            raise NotFound(f"no namespace begins with {name}: `kvtier namespaces` lists what is there")
        if len(found) > 1:
            more = "write more digits, or the namespace digest if they are of different tenants"
            raise Invalid(f"{len(found)} namespaces begin with {name}: {more}")
        return found[0]

    def all(self) -> list[Namespace]:
        with self._lock:
            return list(self._by_handle.values())

    def check_integrity(self, holding: set[int]) -> None:
        """Asserts that both indices agree and that the handles in `holding`, those of sealed blocks, can be named.
        Exact while no call runs."""
        with self._lock:
            assert {ns.handle: ns for ns in self._by_digest.values()} == self._by_handle
            assert all(digest == ns.digest and not ns.dropped for digest, ns in self._by_digest.items())
            assert len(self._by_handle) <= MAX_NAMESPACES
            void = holding - self._by_handle.keys()
            assert not void, f"blocks under void handles {sorted(void)[:10]}"

    def explain(self, raw: bytes, tenant: str) -> tuple[list[str], bytes]:
        """How the nearest namespace of the model that holds blocks differs: lines and its description digest. No lines
        and a digest: this one holds blocks itself. No lines and b"": none of this model and tenant does."""
        live = parse_description(raw)
        holding = self._in_use()
        mine = [ns for ns in self.all() if ns.tenant == tenant and ns.handle in holding]
        same_model = [ns for ns in mine if ns.description.model == live.model]
        if any(ns.description_digest == live.digest for ns in same_model):
            return [], live.digest
        differ = ((list(map(str, diff(ns.description, live))), ns) for ns in same_model[-_MAX_EXPLAINED:])
        lines, nearest = min(differ, key=lambda found: len(found[0]), default=([], None))
        return lines, b"" if nearest is None else nearest.description_digest


def check_hashes(raw: bytes, nbytes: int, most: int) -> int:
    """The number of content hashes in `raw`. Raises Invalid for a broken or too long run."""
    count, rest = divmod(len(raw), nbytes)
    if rest:
        raise Invalid(f"{len(raw)} bytes of hashes are not a multiple of {nbytes}")
    if count > most:
        raise Invalid(f"{count} keys in one call; the limit is {most}: split the call")
    return count
