"""Answers carry codes: what a program decides, it decides by `stop` and `error`, whatever the words say.

And deadlines that are over.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier.client.answers import RegisteredNamespace, Registration, Registrations, batches, seconds, split
from kvtier.client.api import Answer, Client, Ended
from kvtier.errors import Deadline, Full, Invalid, Stale, Unavailable
from kvtier.protocol.limits import KEYS_PER_CALL, MAX_RUNS
from kvtier.protocol.stops import MISS, Ending, Stop
from kvtier.protocol.v1 import kvtier_pb2 as pb
from tests.support.daemon import Daemon, KiB, MiB, body, description, hashes
from tests.support.paths import ROOT

WAYS = ["unix", "grpc"]


def reach(daemon: Daemon, way: str) -> Client:
    return Client(daemon.address if way == "unix" else f"grpc+unix:{daemon.socket}.grpc")


# --- codes


def test_an_ending_is_a_stop_or_an_error_never_both() -> None:
    assert Ending().whole and Ended().ending == Ending()
    assert Ending.at(Stop.COLD) == (Stop.COLD, 0, "cold: prefetch first") and not Ending.at(Stop.COLD).whole
    assert Ending.by(Full("no room")) == (Stop.END, Full.code, "no room") and not Ending.by(Full("")).whole
    assert Ending.at(99).reason == "stopped (99)", "of a newer daemon"
    answer = Answer(3, MISS)
    assert (answer, answer.stop, answer.error, answer.reason) == (3, Stop.MISS, 0, "miss")


@pytest.mark.parametrize("way", WAYS)
def test_answers_of_a_daemon_carry_stops(daemon: Daemon, way: str) -> None:
    with reach(daemon, way) as client:
        ns, nbytes = client.register(description(64 * KiB)), 64 * KiB
        done = client.put(ns, hashes(range(3)), [body(n, nbytes) for n in range(3)], deadline=5)
        assert (done, done.ending) == (3, Ending())
        assert client.lookup(ns, hashes(range(5)), deadline=5).ending == MISS
        assert client.get(ns, hashes(range(5)), deadline=5).ending == MISS
        with client.lease(ns, hashes(range(5)), deadline=5) as blocks:
            assert len(blocks) == 3 and blocks.ending == MISS
        assert client.flush(ns, hashes([0]), deadline=5).stop == Stop.NO_TIER


def test_what_does_not_fit_is_full_by_code(daemon: Daemon) -> None:
    """No session may hold more than a quarter of the arena (64 MiB) at once."""
    ns = RegisteredNamespace(description(MiB))
    with reach(daemon, "unix") as client, client.fill(ns, hashes(range(9)), deadline=5) as held:
        assert not held.error
        with client.fill(ns, hashes(range(100, 109)), deadline=5) as more:
            assert more.error == Full.code and not more.stop and list(more) == [None] * 9


@pytest.mark.parametrize("where", ["miss", "cold", "full", "lost"])
def test_words_in_a_path_are_no_codes(tmp_path: Path, where: str) -> None:
    """D5: a daemon that is absent is absent, whatever its socket's name says."""
    folder = tmp_path / where
    folder.mkdir()
    with Client(f"unix:{folder}/{where}ing.sock") as client:
        ns = client.register(description(64 * KiB))
        answers: list[Ended] = [client.lookup(ns, hashes([1])), client.get(ns, hashes([1]), deadline=0.05)]
        answers.append(client.put(ns, hashes([1]), [body(1, 64 * KiB)], deadline=0.05))
        with client.lease(ns, hashes([1])) as blocks, client.fill(ns, hashes([1])) as slots:
            answers += [blocks, slots]
    assert [(one.stop, one.error) for one in answers] == [(Stop.END, Unavailable.code)] * 5
    assert all(where in one.reason for one in answers), "people are told where"


# --- deadlines


@pytest.mark.parametrize("way", WAYS)
def test_a_deadline_of_0_is_over(daemon: Daemon, way: str) -> None:
    """D4: it asks nobody and answers at once; it is not the default."""
    with reach(daemon, way) as client:
        ns = client.register(description(64 * KiB))
        assert client.put(ns, hashes([1]), [body(1, 64 * KiB)], deadline=5) == 1
        began = time.monotonic()
        late: list[Ended] = [
            client.lookup(ns, hashes([1]), deadline=0),
            client.get(ns, hashes([1]), deadline=0),
            client.put(ns, hashes([2]), [body(2, 64 * KiB)], deadline=0),
            client.delete(ns, hashes([1]), deadline=0),
            client.prefetch(ns, hashes([1]), deadline=0),
            client.flush(ns, hashes([1]), deadline=0),
        ]
        with client.lease(ns, hashes([1]), deadline=0) as blocks:
            assert len(blocks) == 0
        with client.fill(ns, hashes([2]), deadline=0) as slots:
            assert list(slots) == [None]
        assert slots.sealed == 0
        for one in [*late, blocks, slots]:
            assert one.error == Deadline.code and not one.stop, one.ending
        for operator in (client.status, client.list_namespaces):
            with pytest.raises(Deadline):
                operator(deadline=0)
        assert time.monotonic() - began < 5
        assert client.lookup(ns, hashes([1]), deadline=5) == 1, "nothing was deleted"
        assert client.lookup(ns, hashes([2]), deadline=5) == 0, "nothing was put"


@pytest.mark.parametrize("deadline", [-1, float("nan"), float("inf"), "5", True, -0.001])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_deadline_is_invalid(daemon: Daemon, way: str, deadline: Any) -> None:
    with reach(daemon, way) as client:
        ns = client.register(description(64 * KiB))
        calls = [client.lookup, client.get, client.lease, client.fill, client.delete, client.prefetch, client.flush]
        for call in calls:
            with pytest.raises(Invalid, match="deadline"):
                call(ns, hashes([1]), deadline=deadline)
        with pytest.raises(Invalid, match="deadline"):
            client.put(ns, hashes([1]), [body(1, 64 * KiB)], deadline=deadline)
        with pytest.raises(Invalid, match="deadline"):
            client.status(deadline=deadline)
    with pytest.raises(Invalid):
        seconds(deadline)


# --- lists


def test_long_lists_are_split_and_runs_grouped() -> None:
    ns = RegisteredNamespace(description(64 * KiB))
    raw = hashes(range(KEYS_PER_CALL + 1))
    assert [len(part) // ns.hash_bytes for part in split(ns, raw)] == [KEYS_PER_CALL, 1] and split(ns, b"") == []
    entries = [(i, b"", 1) for i in range(MAX_RUNS + 3)]
    assert [len(batch) for batch in batches(entries, KEYS_PER_CALL)] == [MAX_RUNS, 3]


# --- types


def test_the_client_is_typed_for_users(tmp_path: Path) -> None:
    """F5: `kvtier.Client` is a class to a type checker, not Any; so is what the kernels export."""
    program = tmp_path / "user.py"
    program.write_text(
        "import kvtier\nimport kvtier_kernels.tuning\n"
        "reveal_type(kvtier.Client)\nreveal_type(kvtier.Client('x').lookup)\nkvtier.Client(3)\n"
    )
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file", "/dev/null", str(program)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "MYPYPATH": f"{ROOT}:{ROOT / 'kernels'}", "MYPY_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    said = found.stdout
    assert "kvtier.client.api.Client" in said and "-> kvtier.client.answers.Answer" in said, said + found.stderr
    assert 'Argument 1 to "Client" has incompatible type "int"' in said, said
    assert "kvtier_kernels" not in said or "missing library stubs or py.typed" not in said, said
    assert (ROOT / "kernels" / "kvtier_kernels" / "py.typed").exists()


def test_a_namespace_is_registered_once_a_life_of_the_daemon_and_again_when_it_is_forgotten() -> None:
    asked: list[bytes] = []
    ns, registrations = RegisteredNamespace(description(1024)), Registrations()

    def ask(raw: bytes) -> bytes:
        asked.append(pb.RegisterRequest.FromString(raw).description)
        return pb.RegisterReply(handle=len(asked), boot=7, description=ns.digest).SerializeToString()

    def forgets(known: Registration) -> int:
        if known.handle < 3:
            raise Stale("forgotten")
        return known.handle

    assert registrations.within(ns, ask, lambda known: (known.boot, known.handle)) == (7, 1)
    assert registrations.within(ns, ask, lambda known: known.handle, boot=7) == 1, "remembered"
    assert registrations.within(ns, ask, lambda known: (known.boot, known.handle), boot=8) == (8, 2), "another life"
    assert registrations.within(ns, ask, forgets) == 3, "Stale: once more"
    assert asked == [ns.canonical] * 3
    with pytest.raises(Stale):
        registrations.within(ns, ask, lambda known: forgets(known._replace(handle=0)))
    with pytest.raises(Unavailable, match="differ in version"):
        wrong = pb.RegisterReply(handle=1, description=bytes(32)).SerializeToString()
        Registrations().within(ns, lambda raw: wrong, forgets)
    with pytest.raises(Unavailable, match="cannot be read"):
        Registrations().within(ns, lambda raw: b"\xff", forgets)
