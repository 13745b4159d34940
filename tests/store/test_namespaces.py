"""Namespaces by handle: tenants apart, 4,096 places, what is forgotten when they are full, and how a miss is
explained."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvtier.errors import Full, Invalid, NotFound, Stale
from kvtier.format.identity import Description, f64_hex, namespace_digest, pack_scales
from kvtier.format.layout import attention
from kvtier.store import namespaces as module
from kvtier.store.namespaces import MAX_NAMESPACES, Namespace, Namespaces, check_hashes
from tests.support.daemon import description
from tests.support.inside import Inside


class Registry(Namespaces):
    """A registry whose store is played by two sets: handles in use, and namespaces to purge."""

    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.asked = 0
        self.purged: list[Namespace] = []
        super().__init__(self._answer, self._note)

    def _answer(self) -> set[int]:
        self.asked += 1
        return set(self.busy)

    def _note(self, namespace: Namespace) -> int:
        self.purged.append(namespace)
        return 0


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry()
    yield made
    made.check_integrity(set())


def revision(n: int) -> str:
    return f"{n:040x}"


def fill(registry: Registry, n: int = MAX_NAMESPACES) -> list[Namespace]:
    return [registry.register(description(revision=revision(i)).canonical, "t") for i in range(n)]


# --- handles


def test_registering_twice_gives_the_same_namespace(registry: Registry) -> None:
    wanted = description()
    first = registry.register(wanted.canonical, "t")
    assert registry.register(wanted.canonical, "t") is first
    assert first.description == wanted and first.description_digest == wanted.digest
    assert first.digest == namespace_digest(wanted, "t")
    assert registry.get(first.handle, "t") is first and registry.all() == [first]


def test_tenants_are_apart(registry: Registry) -> None:
    wanted = description().canonical
    mine, theirs = registry.register(wanted, "a"), registry.register(wanted, "b")
    assert mine.handle != theirs.handle and mine.digest != theirs.digest
    with pytest.raises(Stale, match=f"handle {theirs.handle} is not known"):
        registry.get(theirs.handle, "a")


@pytest.mark.parametrize("handle", [0, 2, 2**32 - 1, -1])
def test_an_unknown_handle_sounds_like_another_tenants(registry: Registry, handle: int) -> None:
    registry.register(description().canonical, "t")
    with pytest.raises(Stale, match=f"handle {handle} is not known to this daemon: register the description again"):
        registry.get(handle, "t")


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[]", b"\xff", b"{" * 100_000, description().canonical + b" ", b" " * (256 * 1024 + 1)]
)
def test_what_is_no_description_is_refused_and_takes_no_place(registry: Registry, raw: bytes) -> None:
    for verb in (registry.register, registry.explain):
        with pytest.raises(Invalid):
            verb(raw, "t")
    assert registry.all() == []


# --- 4,096 places


def test_when_all_places_are_taken_one_without_blocks_is_forgotten(registry: Registry) -> None:
    known = fill(registry)
    assert registry.asked == 0, "who is in use is asked only when it matters"
    registry.busy = {ns.handle for ns in known[:10]}
    made = registry.register(description(model="org/new").canonical, "t")
    assert registry.asked == 1 and len(registry.all()) == MAX_NAMESPACES
    assert registry.purged == [known[10]] and known[10].dropped
    with pytest.raises(Stale):
        registry.get(known[10].handle, "t")
    for ns in (*known[:10], *known[11:], made):
        assert registry.get(ns.handle, "t") is ns
    again = registry.register(known[10].description.canonical, "t")
    assert again.handle > made.handle, "a handle never names two namespaces"
    assert again.digest == known[10].digest, "its blocks would still be its own"


def test_when_all_hold_blocks_the_next_is_refused(registry: Registry) -> None:
    known = fill(registry)
    registry.busy = {ns.handle for ns in known}
    with pytest.raises(Full, match="4096 namespaces hold blocks"):
        registry.register(description(model="org/new").canonical, "t")
    assert registry.register(known[7].description.canonical, "t") is known[7], "what is known stays usable"
    assert registry.purged == []
    registry.drop(known[3])
    registry.register(description(model="org/new").canonical, "t")


def test_the_limit_in_a_store_counts_what_holds_blocks() -> None:
    """All places taken; only the namespace that holds a block, or a reservation, is safe."""
    with Inside() as inside:
        session = inside.session()
        holds, waits = inside.space(model="org/holds"), inside.space(model="org/waits")
        inside.put(session, 1, holds, [1])
        session.reserve(2, *waits.asked([1]))
        for n in range(MAX_NAMESPACES):
            inside.space(revision=revision(n))
        assert len(inside.store.namespaces.all()) == MAX_NAMESPACES
        for space in (holds, waits):
            assert inside.store.namespaces.get(space.namespace.handle, "t") is space.namespace
        assert session.seal(2, ()) == 1


def test_a_put_under_way_in_a_namespace_that_is_forgotten_leaves_nothing_behind() -> None:
    """Between the question who is in use and the answer: one block sealed, one reserved. Neither may stay under a
    handle nobody can name."""
    with Inside() as inside:
        session, late = inside.session(), inside.space(model="org/late")
        for n in range(MAX_NAMESPACES - 1):
            inside.space(revision=revision(n))
        ask = inside.store.namespaces._in_use

        def ask_and_put() -> set[int]:
            busy = ask()
            inside.put(session, 1, late, [1, 2])
            session.reserve(2, *late.asked([3]))
            return busy

        inside.store.namespaces._in_use = ask_and_put
        inside.space(model="org/new")
        assert late.namespace.dropped
        assert inside.store.lookup(late.keys([1, 2])) == 0
        assert session.seal(2, ()) == 0 and inside.store.lookup(late.keys([3])) == 0
        with pytest.raises(Stale):
            session.reserve(3, *late.asked([4]))
        assert inside.store.gauges()["used_bytes"] == 0


def test_two_threads_at_the_limit_never_overfill(registry: Registry) -> None:
    fill(registry, MAX_NAMESPACES - 20)
    start = threading.Barrier(4)

    def work(tag: str) -> None:
        start.wait(10)
        for n in range(40):
            wanted = description(model=f"org/{tag}", revision=revision(n))
            assert registry.register(wanted.canonical, "t").description == wanted

    threads = [threading.Thread(target=work, args=(tag,)) for tag in "abcc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(registry.all()) == MAX_NAMESPACES


# --- names


def test_a_namespace_is_named_by_the_beginning_of_either_digest(registry: Registry) -> None:
    a, b = registry.register(description().canonical, "a"), registry.register(description().canonical, "b")
    other = registry.register(description(model="org/other").canonical, "a")
    assert registry.named(other.description_digest.hex(), None) is other
    assert registry.named(other.digest.hex()[:12], None) is other
    assert registry.named(a.description_digest.hex()[:12], "a") is a
    assert registry.named(b.digest.hex(), None) is b
    with pytest.raises(Invalid, match="2 namespaces begin with"):
        registry.named(a.description_digest.hex(), None)
    with pytest.raises(NotFound):
        registry.named(b.digest.hex(), "a")


@pytest.mark.parametrize("name", ["", "abc", "ABCD", "xyzw", "../..", "a" * 65, "abcd\n", "0x12"])
def test_a_name_that_is_no_digest_is_refused(registry: Registry, name: str) -> None:
    with pytest.raises(Invalid, match="beginning of a digest"):
        registry.named(name, None)


def test_a_dropped_namespace_is_known_no_more_and_dropping_again_is_harmless(registry: Registry) -> None:
    made = registry.register(description().canonical, "t")
    registry.drop(made)
    registry.drop(made)
    assert made.dropped and registry.all() == []
    again = registry.register(description().canonical, "t")
    registry.drop(made)
    with pytest.raises(Stale):
        registry.get(made.handle, "t")
    assert registry.get(again.handle, "t") is again, "dropping the old one does not take the new one along"


# --- extents and hashes


def test_extents_are_cached_and_the_cache_has_a_limit(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> None:
    monkeypatch.setattr(module, "_MAX_GEOMETRIES", 4)
    made = registry.register(
        description(layout=attention(8, 8, 8, engine_tokens=16, granularity="block-head")).canonical, "t"
    )
    resolved = (0, 0, 8, 0, 8)
    assert made.extents(resolved) is made.extents(resolved)
    for layer in range(8):
        assert made.extents((0, layer, layer + 1, 0, 8)).body_bytes == made.extents(resolved).body_bytes // 8
        assert len(made._geometries) <= 4
    for wrong in ((1, 0, 8, 0, 8), (0, 0, 9, 0, 8), (0, 3, 3, 0, 8), (0, 0, 8, 7, 9), (65535, 0, 1, 0, 1)):
        with pytest.raises(Invalid):
            made.extents(wrong)


@pytest.mark.parametrize(("length", "nbytes", "count"), [(0, 8, 0), (64, 8, 8), (64, 64, 1), (32 * 16_384, 32, 16_384)])
def test_hashes_are_counted(length: int, nbytes: int, count: int) -> None:
    assert check_hashes(bytes(length), nbytes, 16_384) == count


def test_broken_and_too_long_runs_of_hashes_are_refused() -> None:
    with pytest.raises(Invalid, match="33 bytes of hashes are not a multiple of 32"):
        check_hashes(bytes(33), 32, 16_384)
    with pytest.raises(Invalid, match="16385 keys in one call; the limit is 16384"):
        check_hashes(bytes(32 * 16_385), 32, 16_384)


# --- explain


def hold(registry: Registry, described: Description, tenant: str = "t") -> None:
    """Registers a namespace that holds blocks."""
    registry.busy.add(registry.register(described.canonical, tenant).handle)


def static(scale: float = 1.0, rev: str = revision(1), theta: float = 1e4) -> Description:
    layout = attention(2, 2, 8, engine_tokens=16, granularity="head")
    scales = pack_scales(
        {(layer, part): [scale if (layer, part) == (1, "k") else 0.5] * 2 for layer in (0, 1) for part in ("k", "v")}
    )
    return description(
        layout=layout, revision=rev, scales=scales, rule="static", codec=1, rope={"theta": f64_hex(theta)}
    )


def test_what_is_known_needs_no_explanation(registry: Registry) -> None:
    hold(registry, static())
    assert registry.explain(static().canonical, "t") == ([], static().digest)


def test_a_namespace_without_blocks_explains_nothing_and_hides_nothing(registry: Registry) -> None:
    """A client registers what is live, looks up, misses, and only then asks why."""
    hold(registry, static(scale=2.0))
    registry.register(static(scale=1.0).canonical, "t")
    registry.register(static(scale=1.0, rev=revision(9)).canonical, "t")
    lines, nearest = registry.explain(static(scale=1.0).canonical, "t")
    assert nearest == static(scale=2.0).digest and len(lines) == 2


def test_the_field_that_differs_is_told_with_both_values(registry: Registry) -> None:
    hold(registry, static(scale=0.03125))
    lines, nearest = registry.explain(static(scale=1.0).canonical, "t")
    assert nearest == static(scale=0.03125).digest
    assert lines == [f"k_scale of layer 1, head {head}: 0.03125 stored, 1 live" for head in (0, 1)]


def test_the_nearest_one_is_compared(registry: Registry) -> None:
    hold(registry, static(rev=revision(2), theta=5e5, scale=2.0))
    hold(registry, static(rev=revision(3)))
    hold(registry, static(rev=revision(4), scale=2.0))
    lines, nearest = registry.explain(static().canonical, "t")
    assert nearest == static(rev=revision(3)).digest
    assert lines == [f"revision: {revision(3)} stored, {revision(1)} live"]


def test_another_model_or_tenant_explains_nothing(registry: Registry) -> None:
    hold(registry, description(model="org/other"))
    hold(registry, static(), "someone")
    assert registry.explain(static().canonical, "t") == ([], b"")


def test_a_known_description_is_known_however_many_came_after_it(registry: Registry) -> None:
    """`explain` compares with the 64 youngest of a model; what is known must not be mistaken for what differs."""
    hold(registry, static(rev=revision(500)))
    for n in range(70):
        hold(registry, static(rev=revision(n)))
    assert registry.explain(static(rev=revision(500)).canonical, "t") == ([], static(rev=revision(500)).digest)
    lines, nearest = registry.explain(static(rev=revision(501)).canonical, "t")
    assert len(lines) == 1 and nearest != b""


def test_explaining_registers_nothing(registry: Registry) -> None:
    registry.explain(static().canonical, "t")
    assert registry.all() == []
