"""Times-to-live: never too early, not much too late, nobody else's blocks, nothing that is in use; kept over restarts
with the SSD tier."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.client.api import WHOLE, Client
from kvtier.errors import Full, Invalid, Unavailable
from kvtier.server.sessions import Session
from kvtier.store import eviction as aging
from kvtier.store import expiry
from kvtier.store.expiry import MAX_TTL, MAX_TTLS, Expiry
from kvtier.tiers.ssd import directory, inspection
from kvtier.tiers.ssd.disk import Disk
from kvtier.tiers.ssd.ssd import MIN_CAPACITY, Ssd
from kvtier.tiers.tiering import Tiering
from tests.support.daemon import PATIENCE, Daemon, KiB, MiB, Patient, description, hashes, is_body, put, until
from tests.support.inside import Inside, Space

TTL = 100


class Clock:
    """Seconds that pass when told to, with a sweep in each."""

    def __init__(self, inside: Inside) -> None:
        self.now = 1000.0
        self.expiry = Expiry(inside.store, lambda: self.now)

    def to(self, moment: int) -> int:
        """Second by second to `moment`, counted from the start. How many blocks expired."""
        gone = self.expiry.sweep()
        while self.now < 1000 + moment:
            self.now += 1
            gone += self.expiry.sweep()
        return gone


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    monkeypatch.setattr(expiry, "PAUSE", 0.0)
    with Inside() as made:
        yield made


@pytest.fixture
def clock(inside: Inside) -> Clock:
    return Clock(inside)


def known(inside: Inside, space: Space, numbers: range) -> list[int]:
    return [n for n, here in zip(numbers, inside.store.lookup_each(space.keys(numbers)), strict=True) if here]


def use(session: Session, id_: int, space: Space, numbers: list[int]) -> None:
    assert len(session.lease(id_, space.keys(numbers))[0]) == len(numbers)
    session.release(id_, ())


# --- who goes, and when


def test_what_nobody_used_goes_and_nothing_else(inside: Inside, clock: Clock) -> None:
    session, space, other = inside.session(), inside.space(), inside.space(model="org/other")
    inside.put(session, 1, space, range(10))
    inside.put(session, 2, other, range(10))
    clock.expiry.set(space.namespace, TTL)
    assert (clock.expiry.of(space.namespace), clock.expiry.of(other.namespace)) == (TTL, 0)
    assert clock.to(50) == 0
    use(session, 3, space, [0, 1])
    inside.put(session, 4, space, [20])
    assert inside.store.lookup(space.keys([2, 3])) == 2, "a lookup is no use"
    assert clock.to(TTL - 1) == 0, "never too early"
    assert clock.to(TTL + TTL // 16 + 3) == 8
    assert known(inside, space, range(30)) == [0, 1, 20]
    assert clock.to(TTL + 49) == 0
    assert clock.to(TTL + 50 + TTL // 16 + 3) == 3
    assert known(inside, space, range(30)) == [] and known(inside, other, range(10)) == list(range(10))
    assert inside.store.counters.expired_blocks == 11 and inside.store.counters.deleted_blocks == 0
    inside.check()
    inside.put(session, 5, space, range(10))
    assert known(inside, space, range(10)) == list(range(10)), "an expired block may come again"


def test_what_is_in_use_is_spared_and_counts_from_its_release(inside: Inside, clock: Clock) -> None:
    session, space = inside.session(), inside.space()
    inside.put(session, 1, space, range(4))
    offsets, _ = session.lease(2, space.keys([0, 1]))
    reserved = session.reserve(3, *space.asked([7]))
    clock.expiry.set(space.namespace, TTL)
    assert clock.to(3 * TTL) == 2
    assert known(inside, space, range(8)) == [0, 1]
    assert all(inside.holds(offset, space, n) for n, offset in enumerate(offsets))
    inside.write(reserved, space, [7])
    assert session.seal(3, ()) == 1, "what is reserved is untouched"
    session.release(2, ())
    assert clock.to(4 * TTL - 1) == 0 and known(inside, space, range(8)) == [0, 1, 7]
    assert clock.to(4 * TTL + TTL // 16 + 3) == 3


def test_what_is_on_its_way_down_is_spared_until_it_is_let_go(inside: Inside, clock: Clock) -> None:
    session, space = inside.session(), inside.space()
    inside.put(session, 1, space, range(2))
    clock.expiry.set(space.namespace, TTL)
    movers = inside.store
    account = movers.account("t")
    held = movers.hold(account, space.keys([0]), MiB)
    assert clock.to(2 * TTL) == 1 and known(inside, space, range(2)) == [0]
    movers.let_go(account, list(held.values()))
    assert clock.to(2 * TTL + TTL // 16 + 3) == 1, "to be copied is no use"


def test_it_begins_when_it_is_set_and_when_it_is_changed(inside: Inside, clock: Clock) -> None:
    session, space = inside.session(), inside.space()
    inside.put(session, 1, space, range(2))
    assert clock.to(5 * TTL) == 0
    clock.expiry.set(space.namespace, TTL)
    assert clock.to(6 * TTL - 1) == 0, "how old they are is not known"
    clock.expiry.set(space.namespace, 2 * TTL)
    assert clock.to(8 * TTL - 2) == 0
    clock.expiry.set(space.namespace, 0)
    assert clock.to(20 * TTL) == 0 and known(inside, space, range(2)) == [0, 1]


def test_many_blocks_go_in_steps(inside: Inside, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aging, "STEP", 7)
    session, space, other = inside.session(), inside.space(), inside.space(model="org/other")
    inside.put(session, 1, space, range(40))
    inside.put(session, 2, other, range(10))
    clock.expiry.set(space.namespace, TTL)
    assert len(inside.store.aging.expired(space.namespace.handle, 10**6)) == 7
    assert clock.to(2 * TTL) == 40 and known(inside, other, range(10)) == list(range(10))


def test_a_block_that_is_used_between_look_and_step_stays(inside: Inside) -> None:
    session, space = inside.session(), inside.space()
    inside.put(session, 1, space, range(4))
    tick = inside.store.aging.tick()
    keys = inside.store.aging.expired(space.namespace.handle, tick)
    assert sorted(keys) == sorted(space.keys(range(4)))
    use(session, 2, space, [0])
    session.lease(3, space.keys([1]))
    inside.store.delete(space.keys([2]))
    assert inside.store.aging.forget(keys, tick) == 1
    assert known(inside, space, range(4)) == [0, 1]


def test_marks_are_few(inside: Inside, clock: Clock) -> None:
    space = inside.space()
    clock.expiry.set(space.namespace, TTL)
    clock.to(10 * TTL)
    (watch,) = clock.expiry._watches.values()
    assert [len(marks) for marks in watch.marks] == [expiry.MARKS + 2]
    clock.expiry.set(space.namespace, 0)
    clock.to(10 * TTL + 1)
    assert not clock.expiry._watches


# --- setting it


def test_limits(inside: Inside, clock: Clock) -> None:
    space = inside.space()
    for wrong in (-1, MAX_TTL + 1):
        with pytest.raises(Invalid, match="a time-to-live has 1 to"):
            clock.expiry.set(space.namespace, wrong)
    for n in range(MAX_TTLS):
        clock.expiry.set(inside.space(model=f"org/{n}").namespace, TTL)
    with pytest.raises(Full, match="take one away first"):
        clock.expiry.set(space.namespace, TTL)
    inside.store.drop(inside.space(model="org/7").namespace)
    clock.expiry.set(space.namespace, TTL)
    assert clock.expiry.of(space.namespace) == TTL, "those of namespaces that are gone make room"


def test_it_stays_with_a_namespace_that_is_dropped_and_comes_again(inside: Inside, clock: Clock) -> None:
    session, space = inside.session(), inside.space()
    clock.expiry.set(space.namespace, TTL)
    clock.to(TTL)
    inside.store.drop(space.namespace)
    clock.to(TTL + 1)
    again = inside.space()
    inside.put(session, 1, again, range(3))
    assert clock.expiry.of(again.namespace) == TTL
    assert clock.to(2 * TTL) == 0 and clock.to(3 * TTL) == 3


def test_what_cannot_be_written_down_changes_nothing(inside: Inside, clock: Clock, tmp_path: Path) -> None:
    space = inside.space()
    gone = tmp_path / "gone"
    clock.expiry.attach(inside.store.aging, {}, lambda ttls: directory.write_ttls(gone, ttls, Disk()))
    with pytest.raises(Unavailable, match="nothing was changed: No such file"):
        clock.expiry.set(space.namespace, TTL)
    assert clock.expiry.of(space.namespace) == 0
    gone.mkdir()
    clock.expiry.set(space.namespace, TTL)
    assert directory.read_ttls(gone, Disk()) == {space.namespace.digest.hex()[:32]: TTL}
    assert [path.name for path in gone.iterdir()] == ["ttl.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 0}', '{"a": "1"}', '{"a": true}', '{"a": 1', "[" * 9000])
def test_a_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "ttl.json").write_text(text)
    with pytest.raises(Invalid, match="is not readable: remove it"):
        directory.read_ttls(tmp_path, Disk())


def test_the_largest_file_can_be_read(tmp_path: Path) -> None:
    ttls = {f"{n:032x}": MAX_TTL for n in range(MAX_TTLS)}
    directory.write_ttls(tmp_path, ttls, Disk())
    assert directory.read_ttls(tmp_path, Disk()) == ttls


# --- the SSD tier


def test_on_the_ssd_what_is_cold_goes_and_what_is_warm_counts_as_used(
    inside: Inside, clock: Clock, tmp_path: Path
) -> None:
    session, space, other = inside.session(), inside.space(), inside.space(model="org/other")
    tier = Ssd(tmp_path / "ssd", MIN_CAPACITY, inside.store.namespaces.register)
    tiering = Tiering(inside.store, [tier])
    try:
        clock.expiry.attach(tier.aging, {}, lambda ttls: None)
        for id_, one in ((1, space), (2, other)):
            inside.put(session, id_, one, range(10))
            assert tiering.flush(one.keys(range(10)), one.namespace, time.monotonic() + PATIENCE) == 10
        inside.store.forget(space.keys(range(5)))
        clock.expiry.set(space.namespace, TTL)
        clock.to(50)
        use(session, 3, space, [5, 6])
        clock.to(TTL - 1)
        assert tier.find(space.keys(range(10))) == [True] * 10
        late = TTL // 16 + 3
        clock.to(TTL + late)
        assert known(inside, space, range(10)) == [5, 6]
        assert tier.find(space.keys(range(10))) == [n in (5, 6) for n in range(10)]
        clock.to(TTL + 50 + late)
        assert known(inside, space, range(10)) == []
        assert tier.find(space.keys([5, 6])) == [True, True], "its readers were served from the arena"
        clock.to(2 * TTL + 2 * late)
        assert tier.find(space.keys(range(10))) == [False] * 10
        assert tier.find(other.keys(range(10))) == [True] * 10
        assert tier.gauges()["expired_blocks_total"] == 10
        tier.check_integrity()
    finally:
        tiering.close(1.0)
    report = inspection.check(tmp_path / "ssd")
    assert not report.findings and report.blocks == 10, "what expired is forgotten on disk too"


# --- a real daemon


@pytest.fixture(params=["unix", "grpc"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def reach(daemon: Daemon, way: str) -> Client:
    return daemon.client() if way == "unix" else Patient(f"grpc+unix:{daemon.socket}.grpc")


def test_a_daemon_forgets_in_the_background(way: str) -> None:
    with Daemon(8 * MiB) as daemon, reach(daemon, way) as client, daemon.client() as reader:
        ns, other = (client.register(description(4 * KiB, model=model)) for model in ("org/m", "org/other"))
        put(client, ns, range(20))
        put(client, other, range(20))
        with reader.lease(ns, hashes([3, 4])) as blocks:
            assert len(blocks) == 2
            assert client.set_ttl(ns.digest.hex()[:16], 1).ttl == 1
            assert {info.model: info.ttl for info in client.list_namespaces()} == {"org/m": 1, "org/other": 0}
            assert client.show(ns.digest.hex())[0].ttl == 1
            until(
                lambda: client.lookup_runs(ns, [(WHOLE, hashes([n])) for n in range(20)]).count(1) == 2, "18 are gone"
            )
            assert client.lookup(ns, hashes([3, 4])) == 2
            assert all(is_body(block, n) for n, block in zip([3, 4], blocks, strict=True))
            daemon.status(check_integrity=True)
        until(
            lambda: client.lookup(ns, hashes([3])) == client.lookup(ns, hashes([4])) == 0,
            "they go after their last lease",
        )
        assert client.lookup(other, hashes(range(20))) == 20
        assert client.set_ttl(ns.digest.hex(), 0).ttl == 0
        with pytest.raises(Invalid, match="a time-to-live"):
            client.set_ttl(ns.digest.hex(), 2**32 - 1)
        assert daemon.status()["expired_blocks_total"] == 20


def test_it_holds_after_a_restart_with_an_ssd_tier(tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    with Daemon(8 * MiB, "--ssd", f"path={ssd},size=64MiB,free=0") as daemon, daemon.client() as client:
        ns, other = (client.register(description(60 * KiB, model=model)) for model in ("org/m", "org/other"))
        for one in (ns, other):
            put(client, one, range(10))
            assert client.flush(one, hashes(range(10))) == 10
        info = client.set_ttl(ns.digest.hex(), 7 * 86_400)
        assert json.loads((ssd / "ttl.json").read_text()) == {info.namespace.hex()[:32]: 7 * 86_400}
        for end in (daemon.kill, daemon.terminate):
            end()
            daemon.start()
            until(lambda: client.lookup(ns, hashes(range(10))) == 10, "the daemon is back")
            assert {info.model: info.ttl for info in client.list_namespaces()} == {"org/m": 7 * 86_400, "org/other": 0}
        client.set_ttl(ns.digest.hex(), 1)
        until(lambda: daemon.status()["ssd_blocks"] == 10, "the other namespace's are left")
        assert client.lookup(ns, hashes([0])) == 0 and client.lookup(other, hashes(range(10))) == 10
        assert daemon.status()["ssd_expired_blocks_total"] == 10
    report = inspection.check(ssd)
    assert not report.findings and report.blocks == 10
