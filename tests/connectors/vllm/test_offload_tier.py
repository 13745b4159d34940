"""Our tier below vLLM's own CPU offloading: its real tiering manager and pool, and a real engine on CPU whose blocks
come back out of the daemon.

What the manager asserts of each job (that it knows it, and that it is its tier's) proves here that none is answered
twice; `settle` that each is answered once. The engine's worker is the shim of `tiering`; all else is vLLM's.
"""

from __future__ import annotations

import inspect
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvtier.connectors.vllm.tier import offload_tier, transfers
from kvtier.connectors.vllm_tier import KvtierTier
from kvtier.format.fingerprint import resolve_revision
from kvtier.format.layout import opaque
from kvtier.models.checkpoint import Assumed
from kvtier.models.checkpoint import describe as describe_model
from tests.connectors.vllm.engine import Engine, prompt
from tests.connectors.vllm.tiering import NBYTES, Orders, Stack, describe, limit
from tests.support.daemon import PATIENCE, Daemon, MiB, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

STAGES = ["lookup", "store", "copy to store", "load", "copy to load"]


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    yield
    limit(patient=True)


@pytest.fixture
def own() -> Iterator[Daemon]:
    """A daemon of the test's own, to be killed and stopped."""
    with Daemon(256 * MiB) as made:
        yield made


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with Daemon(256 * MiB) as made:
        yield made


@pytest.fixture
def shared(running: Daemon) -> Daemon:
    """A daemon that holds nothing."""
    running.empty()
    return running


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return describe(tmp_path / "model.json")


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    return Orders(tmp_path / "orders")


# Settings


def test_it_overrides_what_vllm_calls_with_the_same_parameters() -> None:
    assert not getattr(KvtierTier, "__abstractmethods__", None)
    for name, member in vars(KvtierTier).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            assert list(inspect.signature(member).parameters) == list(
                inspect.signature(getattr(SecondaryTierManager, name)).parameters
            ), name
    assert {"lookup", "submit_store", "submit_load", "get_finished_jobs", "drain_jobs", "shutdown"} <= set(
        vars(KvtierTier)
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, "has no identity"),
        ({"namespace": ""}, "has no identity"),
        ({"namespace": 7}, "has no identity"),
        ({"namespace": "/nowhere/model.json"}, "cannot read"),
        ({"namespace": "{}"}, "is not a description"),
        ({"namespace": "fine", "sockets": "/x"}, "no setting sockets"),
        ({"namespace": "fine", "socket": ""}, "socket is a path"),
        ({"namespace": "fine", "check": "maybe"}, "check is one of"),
    ],
)
def test_settings_are_refused_by_name(said: dict[str, Any], why: str, file: Path, tmp_path: Path) -> None:
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from tests.connectors.vllm.tiering import config

    (tmp_path / "empty.json").write_text("{}")
    files = {"fine": str(file), "{}": str(tmp_path / "empty.json")}
    if said.get("namespace") in files:
        said = {**said, "namespace": files[said["namespace"]]}
    with pytest.raises(ValueError, match=why):
        TieringOffloadingSpec(
            config({"type": "KvtierTier", "module_path": "kvtier.connectors.vllm_tier", **said})
        ).get_manager()


@pytest.mark.parametrize(
    ("described", "engine", "why"),
    [
        (
            {},
            {"worker_bytes": 2 * NBYTES, "dtype": "bfloat16"},
            r"describes 512 bytes of KV a token, but vLLM keeps 1024 \(cache dtype bfloat16\)",
        ),
        ({"packing": None}, {}, "write it anew with --cpu"),
        ({}, {"check": "sampled", "model": "org/other"}, "that of org/m, but vLLM serves org/other"),
        ({}, {"check": "sampled"}, "is a name that may move"),
    ],
)
def test_an_engine_that_is_not_the_one_described_does_not_start(
    described: dict[str, Any],
    engine: dict[str, Any],
    why: str,
    shared: Daemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=why):
        Stack(shared, describe(tmp_path / "model.json", **described), **engine)


def test_weights_that_changed_beneath_their_description_are_noticed(shared: Daemon, tmp_path: Path) -> None:
    """What makes a file tier serve wrong answers: the same path, other scales."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"scale": 1}')
    before = resolve_revision(str(model))[1]
    file = describe(tmp_path / "model.json", model="model", revision=before)
    with Stack(shared, file, check="sampled", model=str(model)) as stack:
        stack.store([1])
    (model / "config.json").write_text('{"scale": 2}')
    after = resolve_revision(str(model))[1]
    with pytest.raises(ValueError, match=f"revision {before}, but .* is {after}: write it anew"):
        Stack(shared, file, check="sampled", model=str(model))
    with Stack(shared, describe(file, model="model", revision=after), check="sampled", model=str(model)) as stack:
        assert stack.found([1]) == []


def test_the_revision_of_a_hub_id_is_that_of_the_cache(
    shared: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models--org--m"
    for commit in ("1" * 40, "2" * 40):
        (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    file = describe(tmp_path / "model.json", revision="1" * 40)
    (folder / "refs" / "main").write_text("1" * 40)
    with Stack(shared, file, check="sampled"):
        pass
    (folder / "refs" / "main").write_text("2" * 40)
    with pytest.raises(ValueError, match="give it the directory of that revision"):
        Stack(shared, file, check="sampled")


# Chunks


def test_chunks_come_back_after_a_restart_byte_for_byte(shared: Daemon, file: Path) -> None:
    with Stack(shared, file) as first:
        first.store(range(20))
        assert shared.status()["known_blocks"] == 20
        assert [answer.transfer_bytes for answer in first.answers] == [20 * NBYTES]
    with Stack(shared, file) as second:
        assert second.found(range(25)) == list(range(20))
        assert [(answer.success, answer.transfer_bytes) for answer in second.answers] == [(True, 20 * NBYTES)]
        assert second.found(range(20)) == list(range(20)), "out of vLLM's pool"
        assert len(second.answers) == 1
        second.forget()
        assert second.found([30, 3, 31, 5]) == [1, 3], "holes do not hide what is behind them"
        second.store(range(20))
    assert shared.status()["known_blocks"] == 20, "a chunk is stored once"


@pytest.mark.parametrize(
    ("described", "engine"),
    [
        ({"scale": 0.06}, {}),
        ({"revision": "2" * 40}, {}),
        ({"packing": "CPU_ATTN amx"}, {}),
        ({"rope": {"rope_theta": "40c3880000000000"}}, {}),
        ({}, {"dtype": "fp8_e5m2"}),
        ({}, {"layout": "BLHNC"}),
        ({}, {"canonical": True}),
        ({}, {"tensor": 2, "worker_bytes": NBYTES // 2}),
        ({}, {"groups": ((0, 32, ("model.layers.1.attn", "model.layers.0.attn")),)}),
        ({}, {"chunk_blocks": 2}),
        ({}, {"version": "0.32.1"}),
        ({}, {"seed": "7"}),
    ],
    ids=lambda value: ",".join(map(str, value)),
)
def test_another_namespace_has_no_hit(
    described: dict[str, Any],
    engine: dict[str, Any],
    shared: Daemon,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Stack(shared, file) as stack:
        stack.store(range(4))
    if version := engine.get("version"):
        monkeypatch.setattr(offload_tier.vllm, "__version__", version)
    if seed := engine.get("seed"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", seed)
    with Stack(shared, describe(tmp_path / "other.json", **described), **engine) as other:
        assert other.found(range(4)) == []
        other.store(range(4))  # its own bytes beside them
    monkeypatch.undo()
    with Stack(shared, file) as stack:
        assert stack.found(range(4)) == [0, 1, 2, 3]


def test_groups_of_one_hash_are_kept_apart(shared: Daemon, file: Path) -> None:
    groups = ((0, 32, ("full",)), (1, 32, ("window",)))
    with Stack(shared, file, groups=groups) as stack:
        stack.store(range(4), group=0)
        stack.store(range(2, 6), group=1)
        stack.forget()
        assert stack.found(range(8), group=0) == [0, 1, 2, 3]
        assert stack.found(range(8), group=1) == [2, 3, 4, 5]


def test_a_chunk_larger_than_a_block_is_whole_or_absent(shared: Daemon, tmp_path: Path) -> None:
    nbytes = 20 * MiB + 4096
    file = describe(tmp_path / "model.json", layout=opaque(1024, "ab" * 32, engine_tokens=16), scales={}, rule="none")
    with Stack(shared, file, worker_bytes=nbytes, chunks=3) as stack:
        stack.store(range(3))
        assert shared.status()["known_blocks"] == 6
        stack.forget()
        assert stack.found(range(3)) == [0, 1, 2]
        stack.forget()
        stack.delete([1])
        assert stack.found(range(3)) == [0, 2]


def test_hashes_from_a_random_seed_are_not_stored(shared: Daemon, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", "5eed")
    with Stack(shared, file) as stack:
        stack.store(range(4))
        stack.forget()
        assert stack.found(range(4)) == []
        assert [answer.success for answer in stack.answers] == [False]
    assert shared.status()["known_blocks"] == 0


# Jobs


def test_a_promotion_that_fails_in_part_keeps_the_rest(shared: Daemon, file: Path) -> None:
    with Stack(shared, file) as stack:
        stack.store(range(8))
        stack.forget()
        stack.answers.clear()
        assert stack.find(stack.keys(range(8)), between=lambda: stack.delete([2, 5])) == [0, 1, 3, 4, 6, 7]
        (answer,) = stack.answers
        assert not answer.success and len(answer.successful_keys or ()) == 6
        assert stack.found(range(8)) == [0, 1, 3, 4, 6, 7], "and nothing was poisoned"
        stack.store([2, 5])
        stack.forget()
        assert stack.found(range(8)) == list(range(8))


@pytest.mark.parametrize("at", STAGES)
def test_an_exception_costs_hits_only(at: str, shared: Daemon, file: Path, orders: Orders) -> None:
    with Stack(shared, file, orders.path) as stack:
        stack.store(range(8))
        stack.forget()
        orders.give(at, "raise")
        if "store" in at:
            stack.store(range(10, 14))
        else:
            assert stack.found(range(8)) == []
        assert not orders.open
        stack.forget()
        assert stack.found(range(14)) == list(range(8))


@pytest.mark.parametrize("at", STAGES)
def test_a_killed_daemon_costs_hits_only(at: str, own: Daemon, file: Path, orders: Orders) -> None:
    with Stack(own, file, orders.path) as stack:
        stack.store(range(8))
        stack.forget()
        orders.give(at, "kill", own)
        if "store" in at:
            stack.store(range(10, 14))
        else:  # what is leased stays readable, and is right
            assert stack.found(range(8)) in ([], list(range(8)))
        assert not orders.open
        own.kill()
        stack.store(range(20, 24))  # with nobody there at all
        stack.forget()
        assert stack.found(range(24)) == []
        own.start()
        until(stack.tier._traffic.look, "the tier finds the new daemon")
        stack.store(range(4))
        stack.forget()
        assert stack.found(range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("at", ["lookup", "store", "load"])
def test_a_stopped_daemon_is_a_miss_in_time(at: str, own: Daemon, file: Path, orders: Orders) -> None:
    with Stack(own, file, orders.path) as stack:
        stack.store(range(8))
        stack.forget()
        orders.give(at, "stop", own)
        if "store" in at:
            stack.store(range(10, 14))
        else:
            assert stack.found(range(8)) == []
        assert not orders.open
        stack.store(range(20, 24))
        stack.forget()
        assert stack.found(range(24)) == [], "it is still stopped"
        with own.stopped():  # which it is; from here on it goes on
            limit(patient=True)
        until(stack.tier._traffic.look, "the tier finds the daemon again")
        assert stack.found(range(8)) == list(range(8))


def test_the_scheduler_does_not_wait(own: Daemon, file: Path) -> None:
    """The limits are 30 s here, and the daemon does not answer: were one of these calls to wait for it, this would
    show."""
    with Stack(own, file) as stack:
        stack.store(range(4))
        with own.stopped():
            began = time.monotonic()
            context = stack.begin()
            for n in range(10, 14):
                stack.manager.lookup(stack.keys([n])[0], context)
            stack.step()
            stack.offload(stack.keys(range(20, 24)))
            stack.step()
            stack.manager.on_request_finished(context)
            assert time.monotonic() - began < PATIENCE / 3
            assert stack.manager._jobs, "the job is under way"
        stack.settle()
        assert [answer.success for answer in stack.answers] == [True, True]


def test_a_job_that_waited_too_long_touches_nothing(
    shared: Daemon, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Stack(shared, file) as stack:
        stack.store(range(4))
        stack.forget()
        pool = bytes(stack.manager.primary_tier.get_kv_memoryview())
        monkeypatch.setattr(offload_tier, "LOAD_SECONDS", -1.0)
        assert stack.found(range(4)) == [] and bytes(stack.manager.primary_tier.get_kv_memoryview()) == pool
        monkeypatch.setattr(offload_tier, "LOAD_SECONDS", PATIENCE)
        monkeypatch.setattr(transfers, "LOOKUP_SECONDS", -1.0)
        assert stack.found(range(4)) == []
        monkeypatch.setattr(transfers, "LOOKUP_SECONDS", PATIENCE)
        assert stack.found(range(4)) == [0, 1, 2, 3]


def test_jobs_that_find_no_place_fail_at_once_and_a_reset_waits_for_what_runs(
    shared: Daemon, file: Path, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "MAX_JOBS", 2)
    with Stack(shared, file, orders.path) as stack:
        orders.give("copy to store", "wait")
        stack.offload(stack.keys([0]))
        until(lambda: stack.tier._transfers.storing.running == 1, "the first job runs")
        for n in range(1, 5):
            stack.offload(stack.keys([n]))
        until(lambda: stack.step() or stack.answers, "two are answered")  # type: ignore[func-returns-value]
        assert [answer.success for answer in stack.answers] == [False, False]
        pool = stack.tier._transfers.storing

        def take_back() -> None:
            until(lambda: not pool.waiting, "the reset fails what waits")
            orders.take_back()

        helper = threading.Thread(target=take_back)
        helper.start()
        stack.forget()
        assert not orders.open
        helper.join(PATIENCE)
        assert sorted(answer.success for answer in stack.answers) == [False] * 4 + [True]
        assert stack.found(range(5)) == [0]


def test_what_requests_asked_for_is_forgotten_with_them(shared: Daemon, file: Path) -> None:
    with Stack(shared, file) as stack:
        stack.store(range(4))
        assert stack.found(range(50)) == [0, 1, 2, 3]
        assert len(stack.tier._lookups) == 0 and not stack.tier._lookups._by_asker


def test_the_end_stores_what_waits_and_gives_vllms_pool_back(
    shared: Daemon, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Stack(shared, file) as stack:
        stack.store([0])
        for n in range(1, 30):
            stack.offload(stack.keys([n]))
        view = stack.manager.primary_tier.get_kv_memoryview()
    with pytest.raises(ValueError, match="released"):
        view.tobytes()
    assert "Failed to close" not in caplog.text, "something still points into the pool"
    assert shared.status()["known_blocks"] == 30
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier-tier-")]
    shared.quiet()


# A real engine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """The description of the tiny model as an engine on this machine serves it: checked at its start against the real
    weights."""
    import torch

    cpu = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    file = tmp_path_factory.mktemp("served") / "model.json"
    file.write_text(
        json.dumps(describe_model(str(tiny), Assumed(block_tokens=32, cpu=cpu, dtype="float32"))[0].to_json())
    )
    return file


def offloading(daemon: Daemon, namespace: Path, orders: Orders) -> dict[str, Any]:
    """The configuration of an engine with vLLM's own connector and our tier."""
    own = {
        "type": "OrderedTier",
        "module_path": "tests.connectors.vllm.tiering",
        "namespace": str(namespace),
        "socket": str(daemon.socket),
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.connectors.vllm.tiering",
            "cpu_bytes_to_use": 64 * MiB,
            "secondary_tiers": [{**own, "orders": str(orders.path)}],
        },
    }


Answer = dict[str, Any]
SHAPE: dict[str, Any] = {
    "block_size": 32,
    "dtype": "float32",
}  # in BF16 what a token is computed together with may change the next one
PROMPT, SALTED = prompt(200), prompt(201)


@pytest.fixture(scope="module")
def life(
    tiny: Path, served: Path, daemon: Daemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Daemon, Orders, Answer]]:
    """An engine that was started after another one had computed, and offloaded, `PROMPT` and `SALTED`: (it, daemon,
    orders, the first answer)."""
    orders = Orders(tmp_path_factory.mktemp("orders") / "orders")
    with Engine(tiny, daemon.socket, **SHAPE, transfer=offloading(daemon, served, orders)) as first:
        truth = first.run(PROMPT)
        first.run(SALTED, salt="tenant one")
        assert truth["external"] == 0
        until(lambda: daemon.status()["known_blocks"] == 2 * 18, "all full blocks of both prompts are stored")
        assert "kvtier tier is on: namespace" in first.said()
    with Engine(tiny, daemon.socket, **SHAPE, transfer=offloading(daemon, served, orders)) as second:
        yield second, daemon, orders, truth


def test_an_engine_started_anew_is_served(life: tuple[Engine, Daemon, Orders, Answer]) -> None:
    engine, _, _, truth = life
    found = engine.run(PROMPT)
    assert (found["external"], found["tokens"]) == (576, truth["tokens"])


def test_a_salt_keeps_requests_apart(life: tuple[Engine, Daemon, Orders, Answer]) -> None:
    engine, _, _, _ = life
    assert engine.run(SALTED)["external"] == 0
    assert engine.run(SALTED, salt="tenant two")["external"] == 0
    assert engine.run(SALTED, salt="tenant one")["external"] == 576


def again(engine: Engine, truth: Answer) -> bool:
    """Whether the prompt is served whole by the tier, after the engine and vLLM's pool have forgotten it."""
    assert engine.ask("forget", connector=True)
    found = engine.run(PROMPT)
    assert found["tokens"] == truth["tokens"]
    return bool(found["external"] == 576)


@pytest.mark.parametrize(
    ("at", "do"),
    [
        ("load", "raise"),
        ("lookup", "kill"),
        ("load", "kill"),
        ("copy to load", "kill"),
        ("copy to store", "kill"),
        ("lookup", "stop"),
        ("load", "stop"),
    ],
)
def test_no_failure_ends_a_request_or_changes_a_token(
    life: tuple[Engine, Daemon, Orders, Answer], at: str, do: str
) -> None:
    engine, daemon, orders, truth = life
    until(lambda: again(engine, truth), "the prompt is stored and comes back")
    assert engine.ask("forget", connector=True)
    orders.give(at, do, daemon)
    other = prompt(300 + 10 * STAGES.index(at) + len(do))
    new = engine.run(other)  # which is stored; the others are looked up and loaded
    found = engine.run(PROMPT)
    assert (found["tokens"], found["reason"], new["reason"]) == (truth["tokens"], "length", "length")
    until(lambda: not orders.open, "the order was obeyed")
    if do == "kill":
        daemon.kill()
        assert engine.run(prompt(400 + STAGES.index(at)))["reason"] == "length"
        daemon.start()
    elif do == "stop":
        assert engine.run(prompt(500 + STAGES.index(at)))["external"] == 0
        with daemon.stopped():
            pass
        orders.give("lookup", "forgive")
        until(
            lambda: engine.ask("forget", connector=True) and engine.run(prompt(600)) and not orders.open,
            "the engine is patient again",
        )
    assert engine.run(other, skip=True)["tokens"] == new["tokens"]
    until(lambda: again(engine, truth), "hits come back without a restart of the engine")


def test_an_engine_of_another_description_has_no_hit(
    life: tuple[Engine, Daemon, Orders, Answer], tiny: Path, served: Path, tmp_path: Path, orders: Orders
) -> None:
    _, daemon, _, truth = life
    data = json.loads(served.read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**data, "rope": {**data["rope"], "model.quantization": "another"}}))
    with Engine(tiny, daemon.socket, **SHAPE, transfer=offloading(daemon, other, orders)) as engine:
        found = engine.run(PROMPT)
        assert (found["external"], found["tokens"]) == (0, truth["tokens"])
        assert "is new here: " in engine.said()
