"""Store and sessions as a state machine: any verbs of several clients, in any order, in an arena so small that eviction
and moving slabs never stop.

The model knows one thing about a key: *absent, or equal to what was put under exactly that key*. Who is evicted, and
when, is the store's business. Beside it the model keeps what clients hold. After each step: leased bytes and what
writers wrote into their slots are unchanged, slots in use do not overlap, nothing unsealed is known, used bytes stay
within the arena, caps hold, and ledger, slabs, accounts and sessions agree.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.errors import Full, Invalid, Lost, NotFound, Stale
from kvtier.format.identity import request_context
from kvtier.format.layout import HEADER_BYTES
from kvtier.protocol.stops import PRESENT, Stop
from kvtier.server.sessions import MAX_SOCKETS, Session
from kvtier.store import allocator as slabs_module
from kvtier.store import ledger as ledger_module
from kvtier.store.arena import POISON
from tests.support.daemon import until
from tests.support.inside import Inside, KiB, Space

SLABS, SLAB = 8, 48 * KiB
SIZES = (1000, 5000, 9000, 18_000)  # slots of 4, 8, 12 and 20 KiB: 12, 6, 4 and 2 a slab
NUMBERS = 12  # of blocks in each space
CONTEXTS = (bytes(32), request_context(salt="another"))
TENANTS = ("a", "b")

pick = st.integers(0, 10**6)
Key = bytes


@dataclass(eq=False)
class Put:
    """A reservation as its client sees it. `written[i]` is the whole slot as entry i's writer left it; finished entries
    are gone from `open`."""

    client: Client
    id: int
    space: Space
    keys: list[Key]
    offsets: list[int]
    open: set[int]
    written: dict[int, bytes]
    stored: set[int]
    tampered: set[int] = field(default_factory=set)
    doomed: bool = False  # its namespace was dropped


@dataclass(eq=False)
class Get:
    """A lease as its client sees it. `seen[i]` is the whole block as it was when the lease was taken."""

    client: Client
    id: int
    space: Space
    offsets: list[int]
    seen: dict[int, bytes]

    @property
    def open(self) -> set[int]:
        return set(self.seen)


@dataclass(eq=False)
class Client:
    """A client's process and session. In limbo it has no socket, but its process may still read and write its slots."""

    tenant: str
    process: subprocess.Popen[bytes]
    session: Session
    sockets: int = 1
    drained: bool = False
    puts: list[Put] = field(default_factory=list)
    gets: list[Get] = field(default_factory=list)
    finished: list[Put | Get] = field(default_factory=list)

    @property
    def connected(self) -> bool:
        return self.sockets > 0


class Machine(RuleBasedStateMachine):
    """See the module. Rules draw numbers and use them modulo what there is."""

    def __init__(self) -> None:
        super().__init__()
        self._patches = pytest.MonkeyPatch()
        self._patches.setattr(ledger_module, "_GROW", 32)  # the ledger grows again and again
        self._patches.setattr(slabs_module, "MAX_CLASSES", 3)  # one size more than classes
        self.inside = Inside(SLABS * SLAB)
        self.store, self.sessions = self.inside.store, self.inside.sessions
        self.clients: list[Client] = []
        self.spaces: list[Space] = []
        self.values: dict[Key, bytes] = {}  # block bytes of every key that may be known
        self.universe: list[Key] = []
        self.ids = itertools.count(1)
        self.stamp = itertools.count(1)

    @initialize()
    def begin(self) -> None:
        assert self.store.capacity == SLABS * SLAB
        for tenant in TENANTS:
            for nbytes in SIZES:
                self.spaces.append(self.inside.space(nbytes, tenant))
        self.universe = self.every_key(self.spaces)
        self.connect(0)
        for tenant in TENANTS:
            self.connect(TENANTS.index(tenant))
            for s in range(2):
                self.put(TENANTS.index(tenant), [(s, c, 0, NUMBERS) for c in CONTEXTS])

    # -- what there is

    def one(self, found: Sequence[Any], n: int) -> Any:
        return found[n % len(found)]

    @property
    def connected(self) -> list[Client]:
        return [client for client in self.clients if client.connected]

    @property
    def puts(self) -> list[Put]:
        return [put for client in self.connected for put in client.puts]

    @property
    def gets(self) -> list[Get]:
        return [get for client in self.connected for get in client.gets]

    def spaces_of(self, client: Client) -> list[Space]:
        return [space for space in self.spaces if space.namespace.tenant == client.tenant]

    def every_key(self, spaces: Sequence[Space]) -> list[Key]:
        return [key for space in spaces for c in CONTEXTS for key in space.keys(range(NUMBERS), c)]

    def known(self, keys: Sequence[Key]) -> list[bool]:
        return self.store.lookup_each(list(keys))

    def slot(self, offset: int, space: Space) -> bytes:
        return bytes(self.inside.arena.memory[offset : offset + space.slot])

    def held(self, client: Client) -> int:
        """Bytes that the model thinks this client's session holds."""
        reserved = sum(put.space.slot * len(put.open) for put in client.puts)
        return reserved + sum(get.space.slot * len({get.offsets[i] for i in get.open}) for get in client.gets)

    def held_by(self, tenant: str) -> int:
        """The same for a tenant, each slot once."""
        slots = {}
        for client in self.clients:
            if client.tenant == tenant:
                slots.update({put.offsets[i]: put.space.slot for put in client.puts for i in put.open})
                slots.update({get.offsets[i]: get.space.slot for get in client.gets for i in get.open})
        return sum(slots.values())

    # -- clients

    @precondition(lambda self: len(self.clients) < 5)
    @rule(n=pick)
    def connect(self, n: int) -> None:
        tenant, process = self.one(TENANTS, n), self.inside.process()
        self.clients.append(Client(tenant, process, self.inside.session_of(process, tenant)))

    @precondition(lambda self: self.clients)
    @rule(n=pick)
    def join(self, n: int) -> None:
        """One more socket, of a session in limbo if there is one."""
        client = self.one([client for client in self.clients if not client.connected] or self.clients, n)
        peer = self.inside.peer_of(client.process, client.tenant)
        if client.sockets == MAX_SOCKETS:
            with pytest.raises(Full):
                self.sessions.join(client.session.id, peer)
            return
        assert self.sessions.join(client.session.id, peer) is client.session
        assert not client.session.limbo
        client.sockets, client.drained = client.sockets + 1, False

    @precondition(lambda self: len(self.connected) > 1)
    @rule(n=pick, sockets=st.integers(1, 3))
    def leave(self, n: int, sockets: int) -> None:
        """Sockets close. With the last one a session that holds nothing, or is drained, ends; another goes to limbo."""
        client = self.one(self.connected, n)
        for _ in range(min(sockets, client.sockets)):
            client.sockets -= 1
            self.sessions.leave(client.session)
        if not client.sockets and (client.drained or not self.held(client)):
            self.gone(client)
        assert client.session.limbo == (client in self.clients and not client.sockets)

    @precondition(lambda self: any(not client.connected for client in self.clients))
    @rule(n=pick)
    def drained(self, n: int) -> None:
        """A client says that its copies are done: at once the end of a session in limbo, and later that of one that
        still has a socket."""
        client = self.one(self.clients, n)
        self.sessions.drained(client.session.id, self.inside.peer_of(client.process, client.tenant))
        client.drained = True
        if not client.sockets:
            self.gone(client)

    @precondition(lambda self: len(self.clients) > 2)
    @rule(n=pick)
    def kill(self, n: int) -> None:
        client = self.one(self.clients, n)
        client.process.kill()
        client.process.wait()
        until(
            lambda: not self.sessions.watched(client.session) and not client.session.held_bytes,
            "a dead process holds nothing",
        )
        for _ in range(client.sockets):
            self.sessions.leave(client.session)
        self.gone(client)

    @precondition(lambda self: len(self.clients) > 2)
    @rule(n=pick)
    def end(self, n: int) -> None:
        """All sockets close and the client is done with its copies."""
        client = self.one(self.clients, n)
        for _ in range(client.sockets):
            self.sessions.leave(client.session)
        self.sessions.drained(client.session.id, self.inside.peer_of(client.process, client.tenant))
        self.gone(client)

    def gone(self, client: Client) -> None:
        self.clients.remove(client)
        assert client.session.held_bytes == 0
        for verb in (client.session.seal, client.session.abort, client.session.release):
            for one in (*client.puts, *client.gets):
                with pytest.raises(NotFound):
                    verb(one.id, ())

    # -- writers

    @precondition(lambda self: self.connected)
    @rule(
        n=pick,
        s=pick,
        c=st.sampled_from(CONTEXTS),
        numbers=st.lists(st.integers(0, NUMBERS - 1), min_size=1, max_size=12),
        run=st.booleans(),
    )
    def reserve(self, n: int, s: int, c: bytes, numbers: list[int], run: bool) -> None:
        client = self.one(self.connected, n)
        if run:
            numbers = [(numbers[0] + i) % NUMBERS for i in range(len(numbers))]
        self.reserve_by(client, self.one(self.spaces_of(client), s), c, numbers)

    def reserve_by(self, client: Client, space: Space, c: bytes, numbers: list[int]) -> None:
        keys, id_ = space.keys(numbers, c), next(self.ids)
        here, everything = self.known(keys), self.known(self.values)
        need = space.slot * here.count(False)
        room = min(self.store.session_cap - self.held(client), self.store.tenant_cap - self.held_by(client.tenant))
        idle = not any(self.held(other) for other in self.clients)
        try:
            offsets = client.session.reserve(id_, *space.asked(numbers, c))
        except Invalid:
            assert need > self.store.session_cap
        except Full:
            assert need > room or not idle, "an arena of which nothing is held has room for a session's share"
        else:
            assert need <= room
            assert [offset == PRESENT for offset in offsets] == here
            fresh = {i for i, offset in enumerate(offsets) if offset != PRESENT}
            written = {i: self.slot(offsets[i], space) for i in fresh}
            for block in written.values():
                assert set(block[HEADER_BYTES : space.block_bytes]) == {POISON}, (
                    "a slot that was not free, or not poisoned"
                )
                assert not any(block[space.block_bytes :])
            put = Put(client, id_, space, keys, offsets, fresh, written, set(range(len(keys))) - fresh)
            (client.puts if fresh else client.finished).append(put)
            return
        assert self.known(self.values) == everything, "a reserve that failed evicted something"

    @precondition(lambda self: self.connected)
    @rule(
        n=pick,
        puts=st.lists(
            st.tuples(pick, st.sampled_from(CONTEXTS), st.integers(0, NUMBERS - 1), st.integers(1, NUMBERS)),
            min_size=2,
            max_size=8,
        ),
    )
    def put(self, n: int, puts: list[tuple[int, bytes, int, int]]) -> None:
        """Runs of blocks, each reserved, filled and sealed: what clients do most."""
        client = self.one(self.connected, n)
        for s, c, first, length in puts:
            before = set(map(id, client.puts))
            self.reserve_by(
                client, self.one(self.spaces_of(client), s), c, [(first + i) % NUMBERS for i in range(length)]
            )
            for put in [put for put in client.puts if id(put) not in before]:
                for i in put.open:
                    self.write(put, i)
                self.seal_by(put, [])

    @precondition(lambda self: any(client.puts for client in self.clients))
    @rule(n=pick, only=pick)
    def fill(self, n: int, only: int) -> None:
        """Writes one open slot of any client, whole: connected or in limbo, for its process lives."""
        put = self.one([put for client in self.clients for put in client.puts], n)
        self.write(put, self.one(sorted(put.open), only))

    @precondition(lambda self: self.puts)
    @rule(n=pick)
    def fill_all(self, n: int) -> None:
        put = self.one(self.puts, n)
        for i in put.open:
            self.write(put, i)

    def write(self, put: Put, i: int) -> None:
        body = self.inside.body_at(put.offsets[i], put.space)
        body[:] = (np.arange(len(body)) + 7 * i) % 113
        body[:8] = np.frombuffer(next(self.stamp).to_bytes(8, "little"), np.uint8)  # no two writes are alike
        put.written[i] = self.slot(put.offsets[i], put.space)

    @precondition(lambda self: self.puts)
    @rule(n=pick, only=pick, at=st.integers(0, HEADER_BYTES - 1))
    def tamper(self, n: int, only: int, at: int) -> None:
        put = self.one(self.puts, n)
        i = self.one(sorted(put.open), only)
        if i not in put.tampered:
            self.inside.arena.array[put.offsets[i] + at] ^= 0x55
            put.written[i] = self.slot(put.offsets[i], put.space)
            put.tampered.add(i)

    @precondition(lambda self: self.puts)
    @rule(n=pick, subset=st.lists(pick, max_size=4))
    def seal(self, n: int, subset: list[int]) -> None:
        put = self.one(self.puts, n)
        self.seal_by(put, self.subset(len(put.keys), subset))

    def seal_by(self, put: Put, indices: list[int]) -> None:
        asked = indices or range(len(put.keys))
        going = [i for i in dict.fromkeys(asked) if i in put.open]
        lost = set(going) & put.tampered
        here = dict(zip(put.keys, self.known(put.keys), strict=True))
        try:
            answer = put.client.session.seal(put.id, indices)
        except Lost:
            assert lost and not put.doomed
        else:
            put.stored |= set(going) if not put.doomed else set()
            assert not lost or put.doomed
            assert answer == (0 if put.doomed else len(set(asked) & put.stored))
        if not put.doomed:
            put.stored |= set(going) - lost
            winners: dict[Key, set[int]] = {}
            for i in going:
                if i not in lost and not here[put.keys[i]]:
                    winners.setdefault(put.keys[i], set()).add(i)
            for key, entries in winners.items():
                assert self.known([key]) == [True], "sealed, and nothing was evicted since"
                self.values[key] = self.sealed_value(put, key, entries)
        self.finish(put, going)

    def sealed_value(self, put: Put, key: Key, entries: set[int]) -> bytes:
        """Of several entries with one key in one seal, one is stored; which one is the store's business."""
        ledger = self.store._ledger
        (row,) = ledger.find([key])
        winner = {i for i in entries if put.offsets[i] == ledger.place(row)[0] * 4096}
        assert len(winner) == 1
        return put.written[winner.pop()][: put.space.block_bytes]

    @precondition(lambda self: self.puts)
    @rule(n=pick, subset=st.lists(pick, max_size=4))
    def abort(self, n: int, subset: list[int]) -> None:
        put = self.one(self.puts, n)
        indices = self.subset(len(put.keys), subset)
        going = [i for i in dict.fromkeys(indices or range(len(put.keys))) if i in put.open]
        assert put.client.session.abort(put.id, indices) == len(going)
        self.finish(put, going)

    def finish(self, put: Put, entries: Sequence[int]) -> None:
        put.open -= set(entries)
        put.tampered -= set(entries)
        for i in entries:
            put.written.pop(i, None)
        if not put.open and put in put.client.puts:
            put.client.puts.remove(put)
            put.client.finished.append(put)

    # -- readers

    @precondition(lambda self: self.connected)
    @rule(
        n=pick,
        asks=st.lists(
            st.tuples(pick, st.sampled_from(CONTEXTS), st.integers(0, NUMBERS - 1), st.integers(0, NUMBERS)),
            min_size=1,
            max_size=5,
        ),
    )
    def lease(self, n: int, asks: list[tuple[int, bytes, int, int]]) -> None:
        """Runs of blocks, by one client."""
        client = self.one(self.connected, n)
        for s, c, first, length in asks:
            self.lease_by(
                client, self.one(self.spaces_of(client), s), c, [(first + i) % NUMBERS for i in range(length)]
            )

    @precondition(lambda self: self.connected)
    @rule(n=pick, s=pick, twice=st.booleans())
    def lease_all_there_is(self, n: int, s: int, twice: bool) -> None:
        """Whatever of a namespace is there, which is where the caps are met; or each of it twice."""
        client = self.one(self.connected, n)
        space = self.one(self.spaces_of(client), s)
        for c in CONTEXTS:
            numbers = [number for number, here in enumerate(self.known(space.keys(range(NUMBERS), c))) if here]
            self.lease_by(client, space, c, [*numbers, *numbers] if twice else numbers)

    def lease_by(self, client: Client, space: Space, c: bytes, numbers: list[int]) -> None:
        keys, id_ = space.keys(numbers, c), next(self.ids)
        here = self.known(keys)
        before = {
            get.offsets[i]
            for other in self.clients
            if other.tenant == client.tenant
            for get in other.gets
            for i in get.open
        }
        leading = next((i for i, known_ in enumerate(here) if not known_), len(here))
        session_room = self.store.session_cap - self.held(client)
        offsets, stop = client.session.lease(id_, keys)
        assert len(offsets) <= leading
        assert self.store.lookup(keys) == leading, "a lease changes nothing that is known"
        if stop == Stop.CAP:
            assert len(offsets) < leading
            next_fresh = space.slot * (len(set(offsets)) + 1)
            assert (
                next_fresh > session_room
                or self.held_by(client.tenant) + space.slot * len(set(offsets) - before) + space.slot
                > self.store.tenant_cap
            )
        else:
            assert len(offsets) == leading and stop == (Stop.END if leading == len(keys) else Stop.MISS)
        get = Get(client, id_, space, offsets, {})
        for i, offset in enumerate(offsets):
            block = self.inside.block_at(offset, space)
            assert block == self.values[keys[i]], "not what was put under this key"
            get.seen[i] = block
        (client.gets if offsets else client.finished).append(get)

    @precondition(lambda self: self.gets)
    @rule(n=pick, subset=st.lists(pick, max_size=6))
    def release(self, n: int, subset: list[int]) -> None:
        get = self.one(self.gets, n)
        indices = self.subset(len(get.offsets), subset)
        going = [i for i in dict.fromkeys(indices or range(len(get.offsets))) if i in get.seen]
        assert get.client.session.release(get.id, indices) == len(going)
        for i in going:
            del get.seen[i]
        if not get.seen:
            get.client.gets.remove(get)
            get.client.finished.append(get)

    def subset(self, size: int, drawn: list[int]) -> list[int]:
        return [n % size for n in drawn]

    @precondition(lambda self: any(client.finished for client in self.connected))
    @rule(n=pick, m=pick)
    def repeat(self, n: int, m: int) -> None:
        """What was finished is asked for again, by any verb: nothing happens."""
        client = self.one([client for client in self.connected if client.finished], n)
        one = self.one(client.finished, m)
        session = client.session
        assert session.abort(one.id, ()) == 0 and session.release(one.id, ()) == 0
        if isinstance(one, Put) and not one.doomed:
            assert session.seal(one.id, ()) == len(one.stored)
        session.undo(one.id)
        with pytest.raises(Invalid):
            session.lease(one.id, [])

    # -- all

    @rule(s=pick, c=st.sampled_from(CONTEXTS), numbers=st.lists(st.integers(0, NUMBERS - 1), max_size=8))
    def delete(self, s: int, c: bytes, numbers: list[int]) -> None:
        keys = self.one(self.spaces, s).keys(numbers, c)
        gone = {key for key, here in zip(keys, self.known(keys), strict=True) if here}
        assert self.store.delete(keys) == len(gone)
        assert not any(self.known(keys))
        for key in keys:
            self.values.pop(key, None)

    @precondition(lambda self: self.puts)
    @rule(n=pick)
    def drop(self, n: int) -> None:
        """An operator drops a namespace in which something is reserved; its description is registered anew at once, as
        a client would on Stale."""
        old = self.one(self.puts, n).space
        if old not in self.spaces:
            return  # dropped already
        namespace = old.namespace
        mine = self.every_key([old])
        there = sum(self.known(mine))
        assert self.store.drop(namespace) == there
        assert not any(self.known(mine))
        for key in mine:
            self.values.pop(key, None)
        for client in self.clients:
            for put in client.puts:
                put.doomed |= put.space.namespace is namespace
            if client.connected and client.tenant == namespace.tenant:
                with pytest.raises(Stale):
                    client.session.reserve(next(self.ids), *old.asked([0]))
        self.spaces[self.spaces.index(old)] = Space(self.store, namespace.tenant, namespace.description)

    # -- after every step

    @invariant()
    def nothing_that_is_held_changes(self) -> None:
        spans = set()
        for client in self.clients:
            for get in client.gets:
                for i, block in get.seen.items():
                    assert self.inside.block_at(get.offsets[i], get.space) == block, "a leased block changed"
                    spans.add((get.offsets[i], get.offsets[i] + get.space.slot))
            for put in client.puts:
                for i in put.open:
                    assert self.slot(put.offsets[i], put.space) == put.written[i], (
                        "somebody else wrote into a reserved slot"
                    )
                    span = (put.offsets[i], put.offsets[i] + put.space.slot)
                    assert span not in spans, "a reserved slot is in use elsewhere"
                    spans.add(span)
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(sorted(spans))), "slots overlap"

    @invariant()
    def only_what_was_sealed_is_known(self) -> None:
        known = {key for key, here in zip(self.universe, self.known(self.universe), strict=True) if here}
        assert known <= set(self.values)
        assert self.store.gauges()["known_blocks"] == len(known)

    @invariant()
    def what_is_held_is_within_caps_and_adds_up(self) -> None:
        gauges = self.store.gauges()
        assert gauges["used_bytes"] <= gauges["arena_bytes"]
        for client in self.clients:
            assert client.session.held_bytes == self.held(client) <= self.store.session_cap
        for tenant in TENANTS:
            assert self.held_by(tenant) <= self.store.tenant_cap
        assert gauges["reserved_bytes"] == sum(
            put.space.slot * len(put.open) for client in self.clients for put in client.puts
        )
        assert gauges["leased_bytes"] + gauges["reserved_bytes"] == sum(map(self.held_by, TENANTS))
        limbo = sum(self.held(client) for client in self.clients if not client.connected)
        assert self.sessions.gauges()["limbo_bytes"] == limbo

    @invariant()
    def all_parts_agree(self) -> None:
        self.inside.check()

    def teardown(self) -> None:
        """Everybody goes, and nothing is held any more."""
        before = set(os.listdir("/proc/self/fd"))
        try:
            for client in list(self.clients):
                for _ in range(client.sockets):
                    self.sessions.leave(client.session)
                self.sessions.drained(client.session.id, self.inside.peer_of(client.process, client.tenant))
            assert self.sessions.gauges()["held_bytes"] == 0
            self.inside.check()
            gauges = self.store.gauges()
            assert gauges["leased_blocks"] == gauges["reserved_blocks"] == 0
        finally:
            self.inside.__exit__(RuntimeError, None, None)
            self._patches.undo()
        assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.mark.timeout(900)  # a failure is made smaller for up to five minutes
class TestMachine(Machine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=250, stateful_step_count=60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestMachineLong(Machine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=800, stateful_step_count=120)
