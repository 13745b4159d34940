"""Cases KVB-06, 07 and 19 at the store: bytes of one layout never reach a reader of another, every page comes back in
its place, racing writers."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from kvtier.errors import Full, Invalid
from kvtier.format.identity import NO_CONTEXT, Description, chain_hashes, derive_keys, f64_hex
from kvtier.format.layout import Group, Layer, Layout, Part, Range, attention
from kvtier.format.views import part_view
from kvtier.protocol.stops import PRESENT, Stop
from kvtier.protocol.v1 import kvtier_pb2 as pb
from kvtier.server.sessions import Session
from kvtier.server.verbs import Service
from tests.support.daemon import content_hash, description
from tests.support.inside import Inside, KiB, MiB, Space


@pytest.fixture
def inside() -> Iterator[Inside]:
    with Inside(8 * MiB) as made:
        yield made


# --- KVB-06: same byte count, other layout

NHD = description(layout=attention(2, 16, 8, engine_tokens=16, dtype="u8"), physical="NHD")
_group = NHD.layout.groups[0]
INTERLEAVED = Layout(
    (replace(_group, layers=tuple(Layer(layer.index, (Part("kv", 16, "u8"),)) for layer in _group.layers)),)
)
SWAPPED = Layout((replace(_group, layers=tuple(Layer(layer.index, layer.parts[::-1]) for layer in _group.layers)),))


@pytest.mark.parametrize(
    "other",
    [
        replace(NHD, physical="HND"),
        replace(NHD, physical="cross-layer"),
        replace(NHD, layout=INTERLEAVED),
        replace(NHD, layout=SWAPPED),
        replace(NHD, layout=Layout((replace(_group, layers=_group.layers[::-1]),))),
        replace(NHD, backend="paged-2"),
        replace(NHD, packing="amx-vnni"),
        replace(NHD, rope={"theta": f64_hex(1e6)}),
    ],
    ids=["HND", "cross-layer", "interleaved", "V then K", "layers reversed", "backend", "packing", "rope"],
)
def test_kvb_06_another_layout_of_equal_size_gets_nothing(inside: Inside, other: Description) -> None:
    writer, reader = inside.session(), inside.session()
    a, b = Space(inside.store, "t", NHD), Space(inside.store, "t", other)
    assert a.block_bytes == b.block_bytes, "sizes cannot tell"
    assert inside.put(writer, 1, a, range(20)) == 20
    assert inside.store.lookup(b.keys(range(20))) == 0
    assert reader.lease(1, b.keys(range(20)))[0] == []
    listed = Service(inside.store, inside.sessions).list_namespaces(reader, pb.ListRequest()).namespace
    assert sorted((info.description, info.blocks) for info in listed) == sorted([(NHD.digest, 20), (other.digest, 0)])
    offsets, stop = reader.lease(2, a.keys(range(20)))
    assert stop == Stop.END and all(inside.holds(offset, a, n) for n, offset in enumerate(offsets)), (
        "A reads all of its own again"
    )
    assert inside.put(writer, 2, b, range(20)) == 20
    assert all(inside.holds(offset, a, n) for n, offset in enumerate(offsets)), (
        "B's puts of the same hashes are other blocks"
    )


def test_kvb_06_ranks_of_another_parallel_size_get_nothing(inside: Inside) -> None:
    """TP=1 against the two half-size ranks of TP=2: one namespace, three ranges, three keys."""
    session = inside.session()
    whole = Space(inside.store, "t", NHD)
    halves = [Space(inside.store, "t", NHD, Range(heads=heads)) for heads in ((0, 8), (8, 16))]
    assert {space.namespace.handle for space in (whole, *halves)} == {whole.namespace.handle}
    assert [2 * half.body_bytes for half in halves] == [whole.body_bytes] * 2
    inside.put(session, 1, whole, range(8))
    assert [inside.store.lookup(half.keys(range(8))) for half in halves] == [0, 0]
    for id_, half in enumerate(halves, 2):
        inside.put(session, id_, half, range(8))
    for id_, space in enumerate((whole, *halves), 4):
        offsets, _ = session.lease(id_, space.keys(range(8)))
        assert all(inside.holds(offset, space, n) for n, offset in enumerate(offsets))


# --- KVB-07: block granularity, and MLA records


def pages_put(
    inside: Inside,
    session: Session,
    id_: int,
    space: Space,
    hashes: list[bytes],
    fill: Callable[[int, np.ndarray], None],
) -> list[bytes]:  # type: ignore[type-arg]
    """Stores one block per content hash; `fill(index, body)` writes it. Returns the keys."""
    keys = derive_keys(space.namespace.digest, space.resolved, NO_CONTEXT, b"".join(hashes), 32)
    offsets = session.reserve(id_, space.namespace, space.resolved, NO_CONTEXT, keys, hashes)
    for index, offset in enumerate(offsets):
        body = inside.body_at(offset, space)
        body[:] = 0
        fill(index, body)
    assert session.seal(id_, ()) == len(keys)
    return keys


@pytest.mark.parametrize(("tokens", "large", "small"), [(1088, 2, 68), (1089, 2, 68), (543, 0, 33)])
def test_kvb_07_groups_of_544_and_16_tokens(inside: Inside, tokens: int, large: int, small: int) -> None:
    """Each page of 16 tokens is filled with its own index, and comes back in its own place whatever the order of the
    blocks. A tail has no block."""
    bf16 = (Part("k", 8, "bf16"), Part("v", 8, "bf16"))
    layout = Layout((Group("attention", 2, 544, (Layer(0, bf16),)), Group("attention", 2, 16, (Layer(1, bf16),))))
    session, ids, rng = inside.session(), list(range(tokens)), random.Random(tokens)
    for group, expected in ((0, large), (1, small)):
        space = Space(inside.store, "t", description(layout=layout), Range(group))
        block_tokens, pages = layout.groups[group].tokens, layout.groups[group].tokens // 16
        hashes = chain_hashes(ids, block_tokens)
        assert len(hashes) == expected

        def fill(index: int, body: np.ndarray, space: Space = space, pages: int = pages) -> None:  # type: ignore[type-arg]
            for part in (0, 1):
                view = part_view(body, space.extents, 0, part)
                view[:] = (1000 * part + pages * index + np.arange(16 * pages) // 16)[None, :, None]

        if not hashes:
            continue
        keys = pages_put(inside, session, 1 + group, space, hashes, fill)
        order = rng.sample(range(expected), expected)
        offsets, stop = session.lease(10 + group, [keys[i] for i in order])
        assert stop == Stop.END
        for i, offset in zip(order, offsets, strict=True):
            for part in (0, 1):
                view = part_view(inside.body_at(offset, space), space.extents, 0, part)
                for page in range(pages):
                    assert (view[:, 16 * page : 16 * page + 16] == 1000 * part + pages * i + page).all()
    assert inside.store.gauges()["known_blocks"] == large + small


def test_kvb_07_latents_and_packed_records(inside: Inside) -> None:
    def latent(*parts: Part) -> Layout:
        return Layout((Group("latent", 1, 16, (Layer(0, parts),)),))

    layouts = [
        latent(Part("latent", 576, "bf16")),
        latent(Part("record", 656, "u8")),
        latent(Part("latent", 656, "u8")),
    ]
    layouts.append(latent(Part("index", 132, "u8"), Part("latent", 576, "u8")))
    spaces = [Space(inside.store, "t", description(layout=layout)) for layout in layouts]
    assert len({space.namespace.digest for space in spaces}) == 4, (
        "a 576-wide and a 656-byte reader never share a namespace"
    )
    session = inside.session()
    for n, space in enumerate(spaces):
        assert all(inside.store.lookup(one.keys([1])) == 0 for one in spaces[n:])
        inside.put(session, 1 + n, space, [1, 2])
    for n, space in enumerate(spaces):
        offsets, _ = session.lease(10 + n, space.keys([1, 2]))
        assert all(inside.holds(offset, space, number) for number, offset in zip((1, 2), offsets, strict=True)), (
            "bit-exact"
        )


def test_kvb_07_each_group_uses_its_own_size_and_a_mismatch_is_refused_at_once(inside: Inside) -> None:
    layout = Layout(
        tuple(
            Group("attention", 1, tokens, (Layer(i, (Part("k", 4, "u8"),)),)) for i, tokens in enumerate((256, 64, 4))
        )
    )
    service, session = Service(inside.store, inside.sessions), inside.session()
    spaces = [Space(inside.store, "t", description(layout=layout), Range(group)) for group in range(3)]
    assert [space.body_bytes for space in spaces] == [1024, 256, 16]
    for group, space in enumerate(spaces):
        asked = pb.Keys(
            handle=space.namespace.handle, group=group, layer_hi=1, head_hi=1, hashes=content_hash(1), id=1 + group
        )
        for wrong in {one.block_bytes for one in spaces} - {space.block_bytes}:
            asked.nbytes = wrong
            with pytest.raises(Invalid, match=f"have {space.block_bytes} bytes, not {wrong}"):
                service.reserve(session, asked)
        asked.nbytes = space.block_bytes
        assert len(service.reserve(session, asked).offset) == 1
        session.abort(1 + group, ())


# --- KVB-19 (a): the same key put twice at once

VALUES = tuple(((31 * n + np.arange(512)) % 113).astype(np.uint8) for n in (1, 2))  # P(1), P(2) of the fixture
FIXTURE = attention(1, 2, 8, engine_tokens=16, dtype="u8")


class Race:
    """Two writers, four readers and a deleter on one key, and a writer of double length. Each thread is a client with
    its own session.

    Double length under one key cannot occur: a block's length follows from namespace and range, which are in the key,
    and a reserve that states another is refused (see KVB-07 above). So that writer has a namespace of its own, and must
    not disturb or be disturbed.
    """

    def __init__(self, inside: Inside, rounds: int) -> None:
        self.inside, self.rounds = inside, rounds
        self.space = Space(inside.store, "t", description(layout=FIXTURE))
        self.double = Space(inside.store, "t", description(layout=attention(1, 2, 8, engine_tokens=32, dtype="u8")))
        assert self.space.body_bytes == 512 and self.double.body_bytes == 1024
        self.key = self.space.keys([7])
        self.seen: Counter[str] = Counter()
        self.faults: list[BaseException] = []
        self.stop = threading.Event()

    def write(self, session: Session, value: int) -> None:
        for id_ in range(1, self.rounds + 1):
            (offset,) = session.reserve(id_, *self.space.asked([7]))
            if offset == PRESENT:
                self.seen["present"] += 1
                continue
            np.copyto(self.inside.body_at(offset, self.space), VALUES[value])
            assert session.seal(id_, ()) == 1, "the losing put hears that the key is there, not an error"

    def write_double(self, session: Session) -> None:
        body = np.arange(1024, dtype=np.uint8)
        for id_ in range(1, self.rounds, 10):
            (offset,) = session.reserve(id_, *self.double.asked([7]))
            if offset != PRESENT:
                np.copyto(self.inside.body_at(offset, self.double), body)
                assert session.seal(id_, ()) == 1
        offsets, _ = session.lease(self.rounds + 1, self.double.keys([7]))
        assert np.array_equal(self.inside.body_at(offsets[0], self.double), body)
        session.release(self.rounds + 1, ())

    def read(self, session: Session) -> None:
        for id_ in count(1):
            if self.stop.is_set():
                return
            offsets, _ = session.lease(id_, self.key)
            if not offsets:
                self.seen["miss"] += 1
                continue
            first = self.inside.body_at(offsets[0], self.space).copy()
            again = self.inside.body_at(offsets[0], self.space).copy()
            session.release(id_, ())
            assert np.array_equal(first, again), "a leased block changed"
            found = [n for n, value in enumerate(VALUES, 1) if np.array_equal(first, value)]
            assert found, f"neither of the written values: {first[:16]}"
            self.seen[f"P({found[0]})"] += 1

    def delete(self) -> None:
        while not self.stop.is_set():
            self.seen["deleted"] += self.inside.store.delete(self.key)
            self.stop.wait(0.0005)

    def run(self) -> None:
        def guard(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:
                self.faults.append(error)
                self.stop.set()

        sessions = [self.inside.session() for _ in range(7)]
        writers = [
            lambda: self.write(sessions[0], 0),
            lambda: self.write(sessions[1], 1),
            lambda: self.write_double(sessions[2]),
        ]
        others = [*(lambda s=s: self.read(s) for s in sessions[3:]), self.delete]  # type: ignore[misc]
        threads = [threading.Thread(target=guard, args=(work,)) for work in (*writers, *others)]
        for thread in threads:
            thread.start()
        for thread in threads[:3]:
            thread.join(300)
        self.stop.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        if self.faults:
            raise self.faults[0]


def race(inside: Inside, rounds: int) -> None:
    run = Race(inside, rounds)
    run.run()
    assert run.seen["miss"] and run.seen["P(1)"] and run.seen["P(2)"] and run.seen["present"] and run.seen["deleted"], (
        dict(run.seen)
    )
    session = inside.session()
    (offset,) = session.reserve(1, *run.space.asked([7]))
    if offset != PRESENT:
        np.copyto(inside.body_at(offset, run.space), VALUES[0])
    session.seal(1, ())
    assert inside.store.lookup(run.key) == 1
    assert session.lease(2, run.key)[1] == Stop.END, (
        "if it is said to be there, and nobody deletes or evicts, it can be had"
    )
    session.release(2, ())
    inside.store.delete(run.double.keys([7]))
    assert inside.store.gauges()["used_bytes"] == 4 * KiB, "one entry"
    inside.check()


@pytest.mark.parametrize("rounds", [10_000, pytest.param(200_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_kvb_19_a_one_key_written_read_and_deleted_at_once(inside: Inside, rounds: int) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)  # threads change often
    try:
        race(inside, rounds)
    finally:
        sys.setswitchinterval(before)


def test_many_keys_under_pressure_from_many_threads() -> None:
    """Six clients put and get runs of 40 keys where 24 fit, with a deleter: what is read is whole and right, and
    afterwards nothing is held."""
    with Inside(24 * 4 * KiB) as inside:
        space, stop, faults = inside.space(3000), threading.Event(), list[BaseException]()
        seen: Counter[str] = Counter()

        def work(seed: int) -> None:
            rng, session = random.Random(seed), inside.session()
            for id_ in range(1, 600, 2):
                first, length = rng.randrange(40), rng.randrange(1, 6)
                numbers = [(first + i) % 40 for i in range(length)]
                try:
                    inside.put(session, id_, space, numbers)
                except Full:
                    seen["full"] += 1
                offsets, _ = session.lease(id_ + 1, space.keys(numbers))
                for n, offset in zip(numbers, offsets, strict=False):
                    assert inside.holds(offset, space, n)
                    seen["read"] += 1
                session.release(id_ + 1, ())

        def guard(seed: int) -> None:
            try:
                work(seed)
            except BaseException as error:
                faults.append(error)

        def delete() -> None:
            while not stop.wait(0.001):
                inside.store.delete(space.keys(range(0, 40, 3)))

        threads = [threading.Thread(target=guard, args=(seed,)) for seed in range(6)]
        deleter = threading.Thread(target=delete)
        for thread in (*threads, deleter):
            thread.start()
        for thread in threads:
            thread.join(60)
        stop.set()
        deleter.join(10)
        assert not faults, faults
        assert seen["read"] and inside.store.counters.evicted_blocks
        assert inside.sessions.gauges()["held_bytes"] == 0
