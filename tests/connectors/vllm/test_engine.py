"""A real vLLM engine on CPU: greedy tokens with external hits equal those with local hits of the same length, and no
failure changes a token.

The reference of every case is the same engine: the prompt computed (`truth`), then computed again on its own prefix
cache (`local`, as many cached tokens as the external hit has). Where the cache is dropped in between, the next hit can
only come from kvtier.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import Lost
from kvtier.models.checkpoint import Assumed, describe
from tests.connectors.vllm.engine import Engine, prompt
from tests.connectors.vllm.models import adapter, make, scale
from tests.connectors.vllm.patience import PRODUCTION
from tests.support.daemon import Daemon, MiB, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Answer = dict[str, Any]


def learn(engine: Engine, tokens: list[int], **options: Any) -> tuple[Answer, Answer]:
    """Computes a prompt, then again on the local prefix cache; what was full is stored afterwards."""
    truth = engine.run(tokens, **options)
    local = engine.run(tokens, **options)
    assert truth["external"] == local["external"] == 0 and local["cached"] > 0
    return truth, local


def restored(engine: Engine, tokens: list[int], local: Answer, **options: Any) -> Answer:
    """The same prompt after the engine has forgotten its own: as many tokens from outside, and the same answer."""
    assert engine.ask("forget")
    found = engine.run(tokens, **options)
    assert found["external"] == found["served"] == found["cached"] == local["cached"] > 0
    assert found["tokens"] == local["tokens"]
    return found


@pytest.fixture(scope="module")
def engine(tiny: Path, daemon: Daemon) -> Iterator[Engine]:
    """BF16, blocks of 32, async loads, everything in one process: the engine of most cases. Each case has a prompt of
    its own."""
    with Engine(tiny, daemon.socket, block_size=32) as made:
        yield made


def settle(engine: Engine) -> None:
    assert engine.ask("settle")


# Equality


def test_an_async_load_answers_as_a_local_hit_does(engine: Engine) -> None:
    tokens = prompt(1)
    truth, local = learn(engine, tokens)
    settle(engine)
    found = restored(engine, tokens, local)
    assert found["cached"] == 576 and found["tokens"] == truth["tokens"]
    assert "kvtier is on: mode native" in engine.said()


def test_what_one_engine_saved_another_loads(engine: Engine, tiny: Path, daemon: Daemon) -> None:
    tokens = prompt(2)
    _, local = learn(engine, tokens)
    settle(engine)
    with Engine(tiny, daemon.socket, block_size=32) as fresh:
        found = fresh.run(tokens)
        assert found["external"] == found["served"] == local["cached"] == 576
        assert found["tokens"] == local["tokens"]
        assert fresh.ask("metrics")["kvtier_load_bytes"] > 0


def test_a_shared_prefix_serves_other_requests(engine: Engine) -> None:
    tokens = prompt(3)
    others = [tokens[:400] + prompt(30 + n, 120) for n in range(3)]
    truths = [engine.run(other)["tokens"] for other in others]
    settle(engine)
    assert engine.ask("forget")
    found = engine.run_all(others)
    assert [answer["tokens"] for answer in found] == truths
    assert all(answer["cached"] >= 384 for answer in found) and found[0]["external"] > 0


def test_blocks_of_128_a_sync_load_and_an_engine_core_of_its_own(tiny: Path, daemon: Daemon) -> None:
    tokens = prompt(4)
    with Engine(tiny, daemon.socket, settings={"load": "sync"}, multiprocess=True) as first:
        sealed = daemon.status()["sealed_blocks_total"]
        _, local = learn(first, tokens)
        assert local["cached"] == 512
        until(lambda: daemon.status()["sealed_blocks_total"] >= sealed + 4, "all its blocks are saved")
        restored(first, tokens, local)
        assert first.run(prompt(5))["external"] == 0
    with Engine(tiny, daemon.socket, multiprocess=True) as second:
        found = second.run(tokens)
        assert (found["external"], found["tokens"]) == (512, local["tokens"])


def test_a_preempted_request_ends_with_the_right_tokens(tiny: Path, daemon: Daemon) -> None:
    """In float32: what a token was computed together with, which depends on time, changes its last bits, and in BF16
    now and then the next token."""
    prompts = [prompt(40 + n, 200) for n in range(4)]
    with Engine(tiny, None, block_size=32, dtype="float32") as roomy:
        truths = [roomy.run(tokens, max_tokens=200)["tokens"] for tokens in prompts]
    with Engine(
        tiny, daemon.socket, block_size=32, dtype="float32", num_gpu_blocks_override=30, max_model_len=512
    ) as tight:
        # 4 requests of 13 blocks each want 52; from the second time on all that was saved before its block went comes
        # from outside
        external = 0

        def again() -> bool:
            nonlocal external
            found = tight.run_all(prompts, max_tokens=200)
            assert [answer["tokens"] for answer in found] == truths
            external += found[0]["external"]
            metrics = tight.ask("metrics")
            return external > 0 and metrics["num_preemptions"] > 0 and metrics["kvtier_hit_tokens"] > 0

        again()
        until(again, "requests are preempted, and served from outside", within=100)
        settle(tight)
        until(lambda: daemon.status()["reserved_blocks"] == 0, "nothing is reserved")


# Identity: same name, another meaning


def test_changed_scales_at_the_same_path_are_a_miss_with_the_right_tokens(
    tiny: Path, tmp_path: Path, daemon: Daemon
) -> None:
    """The reason why kvtier exists. vLLM's own file tier answers with wrong tokens here (bench/vllm_scales.py)."""
    model, tokens = tmp_path / "scaled", prompt(6)
    scale(tiny, model, 0.05, 0.02)
    with Engine(model, daemon.socket, block_size=32) as first:
        _, local = learn(first, tokens)
        settle(first)
        restored(first, tokens, local)
        assert "mode passthrough" in first.said()
    scale(tiny, model, 0.4, 0.1)
    with Engine(model, daemon.socket, block_size=32) as second:
        found = second.run(tokens)
        assert found["external"] == found["cached"] == 0
        assert found["tokens"] == second.run(tokens, skip=True)["tokens"] != local["tokens"]
        settle(second)
        with daemon.client() as client:
            lines = {info.description for info in client.list_namespaces() if info.model == "scaled"}
            assert len(lines) == 2
            differences = client.diff(*(digest.hex() for digest in sorted(lines)))
        assert any("k_scale of layer 0" in line for line in differences) and any(
            "v_scale of layer 1" in line for line in differences
        ), differences
    scale(tiny, model, 0.05, 0.02)
    with Engine(model, daemon.socket, block_size=32) as third:  # the old set is still there, beside the new one
        found = third.run(tokens)
        assert (found["external"], found["tokens"]) == (576, local["tokens"])


def test_the_namespace_of_a_checkpoint_is_that_of_the_engine(tiny: Path, tmp_path: Path, daemon: Daemon) -> None:
    import torch

    model = scale(tiny, tmp_path / "beforehand", 0.05, 0.02)
    cpu = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    description, notes = describe(str(model), Assumed(block_tokens=32, cpu=cpu))
    assert len(notes) == 4
    with Engine(model, daemon.socket, block_size=32) as engine:
        engine.run(prompt(13, 40), max_tokens=1)
        assert f"namespace {description.digest.hex()[:16]} of beforehand" in engine.said()


def test_other_weights_at_the_same_path_are_a_miss(tmp_path: Path, daemon: Daemon) -> None:
    model, tokens = tmp_path / "moving", prompt(7)
    make(model, seed=1)
    with Engine(model, daemon.socket, block_size=32) as first:
        _, local = learn(first, tokens)
        settle(first)
    make(model, seed=2)
    with Engine(model, daemon.socket, block_size=32) as second:
        found = second.run(tokens)
        assert found["external"] == 0 and found["tokens"] == second.run(tokens, skip=True)["tokens"] != local["tokens"]


def test_another_rotary_scaling_is_a_miss(engine: Engine, tiny: Path, daemon: Daemon) -> None:
    tokens = prompt(8)
    _, local = learn(engine, tokens)
    settle(engine)
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
    with Engine(tiny, daemon.socket, block_size=32, hf_overrides=rope) as other:
        found = other.run(tokens)
        assert found["external"] == 0 and found["tokens"] == other.run(tokens, skip=True)["tokens"] != local["tokens"]


def test_a_cache_salt_keeps_requests_apart(engine: Engine) -> None:
    tokens = prompt(9)
    _, local = learn(engine, tokens, salt="tenant one")
    settle(engine)
    assert engine.ask("forget")
    assert engine.run(tokens, salt="tenant two")["external"] == 0
    assert engine.run(tokens)["external"] == 0
    restored(engine, tokens, local, salt="tenant one")
    assert "tenant one" not in engine.said().replace("cache_salt='tenant one'", "")


def test_new_weights_under_an_adapters_old_name_are_a_miss(tiny: Path, tmp_path: Path, daemon: Daemon) -> None:
    path, tokens = tmp_path / "adapter", prompt(10)
    options: dict[str, Any] = {"block_size": 32, "enable_lora": True, "max_lora_rank": 8}
    adapter(path, 1)
    with Engine(tiny, daemon.socket, **options) as first:
        lora = ["a", 1, str(path)]
        base = first.run(tokens)
        _, local = learn(first, tokens, lora=lora)
        assert local["tokens"] != base["tokens"]
        settle(first)
        restored(first, tokens, local, lora=lora)
    adapter(path, 2)
    with Engine(tiny, daemon.socket, **options) as second:
        found = second.run(tokens, lora=lora)
        assert (
            found["external"] == 0
            and found["tokens"] == second.run(tokens, lora=lora, skip=True)["tokens"] != local["tokens"]
        )
        settle(second)
        # Beneath the running engine, which goes on with what it has loaded: what it computes has no known identity.
        adapter(path, 3)
        known = daemon.status()["known_blocks"]
        second.run(prompt(11), lora=lora)
        settle(second)
        assert daemon.status()["known_blocks"] == known
        assert "was changed while the engine runs" in second.said()


def test_a_reset_of_the_connector_serves_nothing_from_before(engine: Engine) -> None:
    tokens = prompt(12)
    _, local = learn(engine, tokens)
    settle(engine)
    assert engine.ask("forget", connector=True)
    assert engine.run(tokens)["external"] == 0
    settle(engine)
    restored(engine, tokens, local)  # what this engine has stored since is its own


# Failures: the daemon may do what it likes


@pytest.fixture(scope="module")
def frail(tiny: Path) -> Iterator[tuple[Engine, Daemon]]:
    """An engine and a daemon that is killed, stopped and disobeyed."""
    with Daemon(128 * MiB) as daemon, Engine(tiny, daemon.socket, block_size=32) as engine:
        yield engine, daemon
        until(lambda: daemon.status()["held_bytes"] == 0, "nothing is held")


def failures(engine: Engine) -> dict[str, float]:
    """The counters that tell of failed loads, by reason."""
    return {
        name: value
        for name, value in engine.ask("metrics").items()
        if name.startswith(("kvtier_load_fail", "kvtier_lookup_fail")) and value
    }


FAULTS: list[dict[str, Any]] = [
    {"kind": "cut", "at": 4},
    {"kind": "cut", "at": 0},
    {"kind": "cut", "at": 4, "ending": {"error": Lost.code, "reason": "lost: checksum 0 instead of 1"}},
    {"kind": "raise", "at": 4},
    {"kind": "sleep", "at": 4, "seconds": 7.0},
]


@pytest.mark.parametrize(
    ("fault", "good", "reason"),
    list(zip(FAULTS, [4, 0, 4, 4, 4], ["miss", "miss", "lost", "error", "deadline"], strict=True)),
    ids=["missing", "missing from the start", "corrupt", "exception", "slow"],
)
def test_a_block_that_cannot_be_loaded_is_recomputed(
    frail: tuple[Engine, Daemon], fault: dict[str, Any], good: int, reason: str
) -> None:
    engine, _ = frail
    tokens = prompt(50 + FAULTS.index(fault))
    truth, local = learn(engine, tokens)
    settle(engine)
    before = engine.ask("metrics")
    assert engine.ask("forget")
    engine.ask("fault", on="load", **fault)
    if fault["kind"] == "sleep":
        engine.ask("limits", LOAD_SECONDS=PRODUCTION["LOAD_SECONDS"])
    found = engine.run(tokens)
    engine.ask("limits")
    assert engine.ask("faults") == 1
    assert found["tokens"] == truth["tokens"] and found["reason"] == "length"
    assert found["served"] == good * 32
    after = engine.ask("metrics")
    name = f"kvtier_load_failures{{{reason}}}"
    assert after[name] == before.get(name, 0) + 1
    assert after["kvtier_load_failed_blocks"] - before.get("kvtier_load_failed_blocks", 0) == 18 - good
    if fault["kind"] == "sleep":  # the thread comes back some time; what it brings then must not be written any more
        until(lambda: engine.ask("state")["jobs"] == 0, "the slow load is forgotten")
    restored(engine, tokens, local)  # nothing was poisoned: the store still has it


@pytest.mark.parametrize("when", ["before the lookup", "between lookup and load", "during the load", "during the save"])
def test_a_killed_daemon_costs_hits_only(frail: tuple[Engine, Daemon], when: str) -> None:
    engine, daemon = frail
    tokens = prompt(70 + len(when))
    if when == "during the save":
        engine.ask("fault", on="save", kind="kill", at=3, pid=daemon.pid)
        truth = engine.run(tokens)
        until(lambda: daemon.process is not None and daemon.process.poll() is not None, "the daemon dies")
    else:
        truth, local = learn(engine, tokens)
        settle(engine)
        assert engine.ask("forget")
        if when == "before the lookup":
            os.kill(daemon.pid, 9)
        else:
            engine.ask(
                "fault", on="load", kind="kill", at=-1 if when == "between lookup and load" else 3, pid=daemon.pid
            )
        found = engine.run(tokens)
        assert found["tokens"] == truth["tokens"] and found["reason"] == "length"
        if (
            when == "during the load"
        ):  # the mapping outlives the daemon: what was leased may still be read, and is right
            assert found["served"] <= local["cached"]
        else:
            assert found["served"] == 0 and failures(engine)
    daemon.kill()
    other = prompt(90 + len(when))
    absent = engine.run(other)  # with nobody there at all
    assert absent["external"] == 0 and absent["reason"] == "length"
    daemon.start()

    def again() -> bool:
        assert engine.ask("forget")
        answer = engine.run(tokens)
        assert answer["tokens"] == truth["tokens"]
        settle(engine)
        return bool(answer["external"])

    assert until(again, "hits come back without a restart of the engine")


def test_a_stopped_daemon_delays_nobody_for_long(frail: tuple[Engine, Daemon]) -> None:
    engine, daemon = frail
    tokens = prompt(99)
    truth, _ = learn(engine, tokens)
    settle(engine)
    with daemon.stopped():
        engine.ask("limits", **PRODUCTION)
        for _ in range(3):
            assert engine.ask("forget")
            found = engine.run(tokens)
            assert found["tokens"] == truth["tokens"] and found["external"] == 0
            assert found["seconds"] < 20  # a lookup waits for at most a second
    engine.ask("limits")
    until(lambda: engine.ask("forget") and engine.run(tokens)["external"] == 576, "hits come back")


def test_aborted_requests_leave_nothing_behind(frail: tuple[Engine, Daemon]) -> None:
    engine, daemon = frail
    tokens = prompt(101)
    truth, local = learn(engine, tokens)
    settle(engine)
    for steps in range(6):  # waiting for the answer, loading, loaded, decoding
        assert engine.ask("forget")
        assert engine.ask("abort_midway", tokens=tokens, steps=steps) == 0
    until(lambda: engine.ask("state")["jobs"] == 0, "loads end")
    settle(engine)
    until(lambda: daemon.status()["held_bytes"] == 0, "nothing is leased")
    restored(engine, tokens, local)
    assert truth["tokens"] == local["tokens"]


def test_a_sync_load_that_fails_changes_no_token(tiny: Path, daemon: Daemon) -> None:
    tokens, longer = prompt(110), prompt(110) + prompt(111, 100)
    with Engine(tiny, daemon.socket, block_size=32, settings={"load": "sync"}) as engine:
        truth, _ = learn(engine, tokens)
        expected = engine.run(longer, max_tokens=40)["tokens"]
        settle(engine)
        for kind in ("cut", "raise"):
            assert engine.ask("forget")
            engine.ask("fault", on="load", kind=kind, at=2)
            found = engine.run(longer, max_tokens=40)
            assert engine.ask("faults") == 1
            assert found["tokens"] == expected and found["served"] == 64
        settle(engine)
        assert engine.ask("forget")
        found = engine.run(longer, max_tokens=40)
        assert found["tokens"] == expected and found["external"] > 576
        assert engine.run(tokens)["tokens"] == truth["tokens"]


def test_the_default_failure_policy_is_refused(tiny: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="kv_load_failure_policy"),
        Engine(tiny, tmp_path / "nobody", transfer={"kv_load_failure_policy": "fail"}),
    ):
        pass
