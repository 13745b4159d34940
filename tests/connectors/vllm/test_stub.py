"""The connector under vLLM's real scheduler with fake workers: layouts, ranks and moments that a CPU engine cannot be
brought to.

Every case ends with the same questions: are the tokens those of the oracle, and is everything that the store holds
exactly what belongs there?
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.client.api import Client, Ended
from kvtier.connectors.vllm import worker
from kvtier.errors import Lost, Unavailable
from kvtier.format.views import scale_view
from kvtier.protocol.stops import MISS, Ending, Stop
from tests.connectors.vllm.patience import PRODUCTION, be_patient
from tests.connectors.vllm.stub import LayerOf, Stub, base_config, full, latent, sliding
from tests.support.daemon import PATIENCE, Daemon, MiB, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def config(tiny: Path) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return base_config(tiny)


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    be_patient()
    yield
    be_patient(**PRODUCTION)


@pytest.fixture
def store() -> Iterator[Daemon]:
    with Daemon(64 * MiB) as daemon:
        yield daemon
        daemon.quiet()


def tokens_of(seed: int, length: int = 100) -> list[int]:
    return [(7 * i + 131 * seed + i * i % 31) % 900 + 3 for i in range(length)]


class Shim:
    """Makes clients whose loads and saves can be held or broken. `clients` in the order they connect: the scheduler's,
    then the ranks'."""

    def __init__(self) -> None:
        self.clients: list[_Client] = []
        self.leases = 0

    def __call__(self, address: str) -> Any:
        self.clients.append(_Client(self, Client(address)))
        return self.clients[-1]


class _Client:
    def __init__(self, shim: Shim, client: Client) -> None:
        self._shim, self._client = shim, client
        self.break_load: Callable[[int], Ending | None] | None = (
            None  # entry -> why the lease ends before it, or raises
        )
        self.gate: threading.Event | None = None  # a save waits here before the entry `held`
        self.held = 0
        self.waiting = threading.Event()
        self.cold = 0  # so many leases say that all is cold
        self.prefetched: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def lease(self, ns: Any, hashes: Any, **options: Any) -> Any:
        self._shim.leases += threading.current_thread().name == "kvtier-load"
        made = self._client.lease(ns, hashes, **options)
        if self.cold:
            self.cold -= 1
            return _Lease(made, lambda _: Ending.at(Stop.COLD))
        return _Lease(made, self.break_load) if self.break_load is not None else made

    def prefetch(self, ns: Any, hashes: Any, **options: Any) -> Any:
        self.prefetched.append(len(hashes))
        return self._client.prefetch(ns, hashes, **options)

    def fill(self, *arguments: Any, **options: Any) -> Any:
        made = self._client.fill(*arguments, **options)
        return _Fill(made, self) if self.gate is not None else made


class _Lease(Ended):
    def __init__(self, inner: Any, fault: Callable[[int], Ending | None] | None) -> None:
        self._inner, self._fault = inner, fault

    def __enter__(self) -> Any:
        self._inner.__enter__()
        self.ending, self._n = self._inner.ending, len(self._inner)
        for entry in range(self._n):
            try:
                ending = self._fault(entry) if self._fault else None
            except RuntimeError:
                self._inner.__exit__(None, None, None)
                raise
            if ending is not None:
                self.ending, self._n = ending, entry
                break
        return self

    def __exit__(self, *failure: Any) -> None:
        self._inner.__exit__(*failure)

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Any:
        return iter(self._inner[: self._n])


class _Fill:
    def __init__(self, inner: Any, owner: _Client) -> None:
        self._inner, self._owner = inner, owner

    def __enter__(self) -> Any:
        self._inner.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._inner.__exit__(*failure)

    def __iter__(self) -> Any:
        for entry, slot in enumerate(self._inner):
            if entry == self._owner.held and self._owner.gate is not None:
                self._owner.waiting.set()
                assert self._owner.gate.wait(4 * PATIENCE)
            yield slot

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def twice(stub: Stub, tokens: list[int], n: int = 4) -> None:
    """Computes a prompt, forgets it, and has it answered from the store."""
    stub.add("first", tokens, n)
    stub.run("first")
    stub.settle()
    stub.forget()
    stub.add("second", tokens, n)
    stub.run("second")
    stub.check()


# Layouts (KVB-07)

LAYOUTS: dict[str, tuple[list[list[LayerOf]], dict[str, Any], int]] = {
    # groups, settings, tokens that 100 tokens of prompt are served of
    "one group": ([[full(), full()]], {}, 96),
    "two engine blocks in one": ([[full(), full()]], {"engine_blocks": 2}, 96),
    "four engine blocks in one": ([[full()]], {"engine_blocks": 4}, 64),
    "pages of the kernel": ([[full(block=32, kernel_tokens=8), full(block=32, kernel_tokens=8)]], {}, 96),
    "full and sliding": ([[full()], [sliding(24)]], {}, 96),
    "two windows, blocks of two sizes": ([[full(block=32)], [sliding(24)], [sliding(50)]], {}, 96),
    "sliding only": ([[sliding(40), sliding(40)]], {}, 96),
    "windows over several engine blocks": ([[full()], [sliding(40)]], {"engine_blocks": 2}, 96),
    "latent": ([[latent(), latent()]], {}, 96),
    "packed records": ([[latent(record=656)]], {}, 96),
    "latents of two widths": ([[latent(size=66), latent(size=288)]], {}, 96),
    "FP8 with scales": ([[full(fp8=(0.5, 0.25)), full(fp8=(0.125, 2.0))]], {}, 96),
    "an unknown backend": ([[full(backend="NEW_ATTN")]], {}, 96),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_comes_back_as_it_was(config: Any, store: Daemon, name: str) -> None:
    groups, settings, served = LAYOUTS[name]
    with Stub(config, store.socket, groups, **settings) as stub, store.client() as client:
        twice(stub, tokens_of(1), 30)
        assert stub.stats["hit_tokens"] == served
        assert stub.audit(client) > 0
        assert stub.stats["mode:passthrough" if name.startswith("FP8") else "mode:native"] == 1
    assert store.quiet()["reserved_blocks"] == 0


def test_each_group_has_keys_of_its_own_block_size(config: Any, store: Daemon) -> None:
    """1,088 tokens are 2 blocks of 544 and 68 of 16; of 1,089 the last and of 543 everything is an incomplete tail,
    which is not stored."""
    groups = [[full(block=544, kernel_tokens=16)], [sliding(2000, block=16)]]
    for length, big, small in ((1088, 2, 68), (1089, 2, 68), (543, 0, 33)):
        with (
            Daemon(64 * MiB) as daemon,
            Stub(config, daemon.socket, groups, num_blocks=200, max_tokens_a_step=2000) as stub,
            daemon.client() as client,
        ):
            stub.add("a", tokens_of(2, length), 1)
            stub.run("a")
            stub.settle()
            assert daemon.status()["known_blocks"] == big + small
            assert stub.audit(client) == big + small
            stub.forget()
            stub.add("b", [*tokens_of(2, length), 5], 1)
            stub.run("b")
            stub.check()
            assert stub.stats.get("hit_tokens", 0) == big * 544


def test_a_record_and_a_latent_never_share_a_namespace(config: Any, store: Daemon) -> None:
    digests = set()
    for layer in (latent(size=288), latent(size=288, record=656), latent(size=288, record=576)):
        with Stub(config, store.socket, [[layer]]) as stub:
            twice(stub, tokens_of(3))
            digests.add(stub.connector.scheduler._namespace.description.digest)
    assert len(digests) == 3


def test_what_does_not_fit_is_refused_when_caches_are_registered(config: Any, store: Daemon) -> None:
    wrong = full()
    wrong.kernel_tokens = 8
    with Stub(config, store.socket, [[full(), wrong]]) as stub:
        stub.add("a", tokens_of(4))
        stub.run("a")
        stub.check()
        assert "differs from its KV cache group" in stub.connector.scheduler._off and stub.stats["mode:off"] == 1
    assert store.status()["known_blocks"] == 0


def test_scales_stand_in_the_block_and_in_the_namespace(config: Any, store: Daemon) -> None:
    layers = [[full(fp8=(0.5, 0.25)), full(fp8=(0.125, 2.0))]]
    with Stub(config, store.socket, layers) as stub, store.client() as client:
        twice(stub, tokens_of(5))
        description = stub.connector.scheduler._namespace.description
        assert dict(description.scales) == {"0.k": "3f000000", "0.v": "3e800000", "1.k": "3e000000", "1.v": "40000000"}
        mover = stub.workers[0].connector.worker.mover
        (body,) = client.get(mover._ns, [bytes(stub.requests["first"].block_hashes[0])])
        assert scale_view(body, mover._ns.extents(), 1, 0).tolist() == [[0.125], [0.125]]
    other = [[full(fp8=(0.5, 0.25)), full(fp8=(0.25, 2.0))]]
    with Stub(config, store.socket, other) as stub, store.client() as client:
        stub.add("a", tokens_of(5))
        stub.run("a")
        assert not stub.stats.get("hit_tokens")
        stub.settle()
        digests = sorted(info.description.hex() for info in client.list_namespaces())
        (line,) = client.diff(*digests)
        assert line in ("k_scale of layer 1: 0.125 stored, 0.25 live", "k_scale of layer 1: 0.25 stored, 0.125 live")


# Ranks


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_ranks_and_stages_keep_their_own_parts(config: Any, store: Daemon, tp: int, pp: int) -> None:
    with Stub(config, store.socket, [[full(), full(), full(), full()]], tp=tp, pp=pp) as stub, store.client() as client:
        twice(stub, tokens_of(6))
        assert stub.stats["hit_tokens"] == 96
        assert stub.audit(client, "first") == 6 * tp * pp
        assert store.status()["known_blocks"] == 6 * tp * pp
        keys = {bytes(hash_) for hash_ in stub.requests["first"].block_hashes}
        assert len(keys) == 6  # the same hashes on every rank


def test_another_parallel_size_has_the_same_namespace(config: Any, store: Daemon) -> None:
    digests = set()
    for tp, heads in ((1, 4), (2, 2), (4, 1)):
        with Stub(config, store.socket, [[full(heads=heads), full(heads=heads)]], tp=tp) as stub:
            stub.add("a", tokens_of(7))
            stub.run("a")
            digests.add(stub.connector.scheduler._namespace.description.digest)
    assert len(digests) == 1


def test_ranks_that_hold_the_same_latent_save_it_once(config: Any, store: Daemon) -> None:
    with Stub(config, store.socket, [[latent(), latent()]], tp=4) as stub:
        twice(stub, tokens_of(8))
        assert stub.stats["hit_tokens"] == 96
        assert stub.stats["save_blocks"] == store.status()["known_blocks"] == 6


def test_a_block_that_one_rank_lacks_is_not_offered(config: Any, store: Daemon) -> None:
    with Stub(config, store.socket, [[full()]], tp=2) as stub, store.client() as client:
        stub.add("first", tokens_of(9))
        stub.run("first")
        stub.settle()
        mover = stub.workers[1].connector.worker.mover
        assert client.delete(mover._ns, [bytes(stub.requests["first"].block_hashes[3])], range_=mover._ranges[0]) == 1
        stub.forget()
        stub.add("second", tokens_of(9))
        stub.run("second")
        stub.check()
        assert stub.stats["hit_tokens"] == 48


def test_ranks_that_disagree_turn_the_connector_off(
    config: Any, store: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    layers = [full(fp8=(0.5, 0.25))]
    with Stub(config, store.socket, [layers], tp=2) as stub:
        handshakes = {worker.rank: worker.connector.get_handshake_metadata() for worker in stub.workers}
        handshakes[0, 1].json = handshakes[0, 1].json.replace("3f000000", "3f100000")
        stub.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        stub.add("a", tokens_of(10))
        stub.run("a")
        stub.check()
        assert "ranks disagree on k_scale of layer 0" in stub.connector.scheduler._off
    assert store.status()["known_blocks"] == 0


# Failed loads (KVB-20, KVB-14)


def fail_at(entry: int, how: str) -> Callable[[int], Ending | None]:
    def fault(at: int) -> Ending | None:
        if at != entry:
            return None
        if how == "raise":
            raise RuntimeError("a copy that failed")
        return {
            "miss": MISS,
            "lost": Ending(error=Lost.code, reason="the bytes failed their check"),
            "away": Ending(error=Unavailable.code, reason="no daemon at /nowhere"),
        }[how]

    return fault


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("how", ["miss", "lost", "away", "raise"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_failed_load_is_never_reported_as_loaded(config: Any, store: Daemon, load: str, how: str, tp: int) -> None:
    """Block 5 of 8 fails on the last rank; two requests want it; caches are poisoned, so a block taken for loaded would
    show."""
    shim, tokens = Shim(), tokens_of(11, 130)
    with Stub(config, store.socket, [[full()]], tp=tp, connect=shim, load=load) as stub, store.client() as client:
        stub.add("first", tokens)
        stub.run("first")
        stub.settle()
        stub.forget()
        for worker in stub.workers:
            for cells in worker.cells.values():
                cells[:] = 0x55
        shim.clients[-1].break_load = fail_at(4, how)
        stub.add("second", tokens, 8)
        stub.add("third", [*tokens, 3, 4], 8)
        stub.run("second", "third")
        stub.check("second", "third")
        assert stub.stats["load_failed_blocks"] >= 4
        assert 0 < stub.stats["hit_tokens"] <= 2 * 64 or how == "raise"
        assert sum(value for key, value in stub.stats.items() if key.startswith("load_failures:")) >= 1
        shim.clients[-1].break_load = None
        stub.settle()
        stub.forget()
        stub.add("fourth", tokens, 8)
        until(lambda: stub.step() and stub.requests["fourth"].is_finished(), "the fourth ends")
        stub.check("fourth")
        stub.settle()
        assert stub.audit(client) > 0


def test_a_failed_load_with_several_groups_starts_over(config: Any, store: Daemon) -> None:
    shim, tokens = Shim(), tokens_of(12)
    with (
        Stub(config, store.socket, [[full()], [sliding(40)]], connect=shim, load="sync") as stub,
        store.client() as client,
    ):
        stub.add("first", tokens)
        stub.run("first")
        stub.settle()
        stub.forget()
        shim.clients[-1].break_load = fail_at(2, "miss")
        stub.add("second", tokens)
        stub.run("second")
        stub.check()
        assert stub.stats["hit_tokens"] == 0 and stub.stats["load_failed_blocks"] == 6
        stub.settle()
        assert stub.audit(client) > 0


def test_a_request_tries_a_doomed_load_once(config: Any, store: Daemon) -> None:
    shim, tokens = Shim(), tokens_of(13, 130)
    with Stub(config, store.socket, [[full()]], connect=shim, num_blocks=64) as stub:
        stub.add("first", tokens)
        stub.run("first")
        stub.settle()
        for entry, served in ((4, 64), (0, 0)):
            stub.forget()
            shim.clients[-1].break_load, shim.leases = fail_at(entry, "miss"), 0
            before = dict(stub.stats)
            rid = f"doomed {entry}"
            stub.add(rid, tokens, 10)
            for _ in range(10):
                stub.step()
            stub.run(rid)
            stub.check(rid)
            assert shim.leases == 1
            assert stub.stats["hit_tokens"] - before.get("hit_tokens", 0) == served
            assert stub.stats["load_asked_blocks"] - before.get("load_asked_blocks", 0) == 8
        shim.clients[-1].break_load = None  # the fault was transient: the entry is still there for others
        stub.forget()
        stub.add("later", tokens)
        stub.run("later")
        stub.check("later")
        assert stub.stats["hit_tokens"] == 64 + 128


def test_a_step_that_computes_nothing_waits_for_its_loads(
    config: Any, store: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the engine asks again without a pause, and takes the interpreter's lock from the threads that load."""
    monkeypatch.setattr(worker, "IDLE_SECONDS", PATIENCE)
    shim, tokens = Shim(), tokens_of(13)
    with Stub(config, store.socket, [[full()]], connect=shim, load="async") as stub:
        stub.add("first", tokens)
        stub.run("first")
        stub.settle()
        stub.forget()
        shim.clients[1].break_load = lambda entry: time.sleep(0.05)
        mover, steps = stub.workers[0].connector.worker.mover, 0
        stub.add("second", tokens)
        while not stub.requests["second"].is_finished():
            steps += bool(mover._jobs)
            stub.step()
        stub.check()
        assert stub.stats["hit_tokens"] == 96
        assert steps <= 3, "0.3 s of a load took so many steps"


# Saves (KVB-21)


@pytest.mark.parametrize("held", [0, 3])
@pytest.mark.parametrize("how", ["preempted", "finished", "aborted", "reset", "load"])
def test_a_save_never_reads_a_block_that_has_a_new_owner(config: Any, store: Daemon, how: str, held: int) -> None:
    """The saver is held before entry `held`; then the blocks it still wants get new owners. What is stored is right, or
    absent."""
    shim, tokens = Shim(), tokens_of(14, 130)
    with Stub(config, store.socket, [[full()]], connect=shim, num_blocks=20) as stub, store.client() as client:
        other = tokens_of(15, 200)
        if how == "load":
            stub.add("other", other, 1)
            stub.run("other")
            stub.settle()
            stub.forget()
        stub.add("warm", tokens_of(16, 20), 1)
        stub.run("warm")
        stub.settle()
        saver = shim.clients[1]
        saver.gate, saver.held = threading.Event(), held
        stub.add("held", tokens, 40 if how in ("preempted", "aborted") else 1)
        until(lambda: stub.step() and saver.waiting.is_set(), "the saver waits")
        if how == "aborted":
            stub.abort("held")
        elif how == "reset":
            stub.abort("held")
            stub.scheduler.reset_prefix_cache()
        elif how != "preempted":
            stub.run("held")
        stub.add("new owner", other, 8)
        began = time.monotonic()
        if how == "preempted":
            stub.scheduler._preempt_request(stub.scheduler.running.pop(), time.monotonic())
        until(lambda: "new owner" in stub.step().num_scheduled_tokens, "the new owner runs")
        for _ in range(12):
            stub.step()
        assert time.monotonic() - began < PATIENCE  # no step waits for the saver
        saver.gate.set()
        saver.gate = None
        stub.run()
        stub.check()
        stub.settle()
        dropped = sum(value for key, value in stub.stats.items() if key.startswith("save_dropped_blocks"))
        assert stub.audit(client) > 0 and (dropped > 0 or how in ("preempted", "aborted"))
        stub.forget()
        stub.add("again", tokens, 1)  # re-admitted, its save works again
        stub.run("again")
        stub.settle()
        known = [bytes(hash_) for hash_ in stub.requests["again"].block_hashes]
        assert client.lookup(stub.workers[0].connector.worker.mover._ns, known, deadline=5) == 8


def test_an_engine_that_shuts_down_drops_what_it_cannot_save(config: Any, store: Daemon) -> None:
    shim, tokens = Shim(), tokens_of(17, 130)
    with Stub(config, store.socket, [[full()]], connect=shim) as stub, store.client() as client:
        stub.add("warm", tokens_of(16, 20), 1)
        stub.run("warm")
        stub.settle()
        saver = shim.clients[1]
        saver.gate, saver.held = threading.Event(), 2
        stub.add("held", tokens, 1)
        stub.run("held")
        assert saver.waiting.wait(PATIENCE)
        ns, gate = stub.workers[0].connector.worker.mover._ns, saver.gate
        stub.workers[0].connector.shutdown()  # waits two seconds for it, then goes
        for cells in stub.workers[0].cells.values():
            cells[:] = 0x55
        gate.set()
        until(lambda: store.status()["held_bytes"] == 0, "the held save gives its slots back")
        assert client.lookup(ns, [bytes(hash_) for hash_ in stub.requests["held"].block_hashes], deadline=5) == 0


def test_a_value_that_is_not_finite_is_not_stored(config: Any, store: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    with Stub(config, store.socket, [[full()]]) as stub, store.client() as client:
        forward = stub._forward

        def spoil(output: Any) -> Any:
            sampled = forward(output)
            table = stub.scheduler.kv_cache_manager.get_block_ids("a")[0]
            if table:
                stub.workers[0].cells["model.layers.0.attn"][table[3], 0, 5, :2] = (0x80, 0x7F)  # bf16 infinity
            return sampled

        stub._forward = spoil  # type: ignore[method-assign]
        stub.add("a", tokens_of(18), 1)
        stub.run("a")
        stub.settle()
        ns = stub.workers[0].connector.worker.mover._ns
        assert client.lookup(ns, [bytes(hash_) for hash_ in stub.requests["a"].block_hashes], deadline=5) == 3
        assert stub.stats["save_dropped_blocks:not finite"] == 3


def test_codes_at_the_top_are_counted_as_clipped(config: Any, store: Daemon) -> None:
    with Stub(config, store.socket, [[full(fp8=(0.5, 0.5))]]) as stub:
        forward = stub._forward

        def clip(output: Any) -> Any:
            sampled = forward(output)
            table = stub.scheduler.kv_cache_manager.get_block_ids("a")[0]
            if table:
                stub.workers[0].cells["model.layers.0.attn"][table[1], 1, 5, :3] = (0x7E, 0xFE, 0x7D)
            return sampled

        stub._forward = clip  # type: ignore[method-assign]
        stub.add("a", tokens_of(19), 1)
        stub.run("a")
        stub.settle()
        assert stub.stats["clipped_codes"] == 2 and stub.stats["save_blocks"] == 6


def test_second_hit_saves_what_is_asked_for_again(config: Any, store: Daemon) -> None:
    with Stub(config, store.socket, [[full()]], save_when="second_hit") as stub, store.client() as client:
        stub.add("first", tokens_of(20), 1)
        stub.run("first")
        stub.settle()
        assert store.status()["known_blocks"] == 0
        stub.add("second", tokens_of(20), 1)
        stub.run("second")
        stub.settle()
        assert store.status()["known_blocks"] == 6 == stub.audit(client, "second")


def test_saving_has_a_limit_of_bytes_per_second(config: Any, store: Daemon) -> None:
    with Stub(config, store.socket, [[full()]], save_bytes_per_second=1) as stub:
        for n in range(4):
            stub.add(f"r{n}", tokens_of(21 + n), 1)
            stub.run(f"r{n}")
            stub.settle()
        assert stub.stats["save_dropped_blocks:rate"] > 0
        assert store.status()["known_blocks"] < 24


def test_events_say_what_every_rank_has_stored(config: Any, store: Daemon) -> None:
    with Stub(config, store.socket, [[full()]], tp=2, events=True) as stub:
        request = stub.add("a", tokens_of(25), 1)
        stub.run("a")
        stub.settle()
        stored = [hash_ for event in stub.events for hash_ in event.block_hashes]
        assert stored == [maybe_convert_block_hash(hash_) for hash_ in request.block_hashes[:6]]
        first = stub.events[0]
        assert (first.medium, first.block_size, first.parent_block_hash) == ("CPU", 16, None)
        assert list(first.token_ids) == tokens_of(25)[: len(first.block_hashes) * 16]


# Asking (KVB-22, KVB-25, KVB-18)


def test_numbers_count_each_question_once(config: Any, store: Daemon) -> None:
    """10 requests of 10 blocks, 4 of each stored; one opts out; one load fails; three are asked about again and
    again."""
    shim = Shim()
    prompts = [tokens_of(30 + n, 161) for n in range(10)]
    with Stub(config, store.socket, [[full()]], connect=shim, num_blocks=400) as stub:
        for n, tokens in enumerate(prompts):
            stub.add(f"first {n}", tokens[:65], 1)
            stub.run(f"first {n}")
        stub.settle()
        stub.forget()
        before = dict(stub.stats)

        def gained(name: str) -> float:
            return stub.stats.get(name, 0) - before.get(name, 0)

        for n, tokens in enumerate(prompts):
            request = stub.add(f"second {n}", tokens, 1)
            request.skip_reading_prefix_cache = n == 0
            if n in (1, 2, 3):
                for _ in range(5):
                    until(
                        lambda request=request: stub.connector.get_num_new_matched_tokens(request, 0)[0] is not None,
                        "an answer",
                    )  # type: ignore[misc]
            shim.clients[-1].break_load = fail_at(0, "miss") if n == 9 else None
            stub.run(f"second {n}")
        stub.check(*(f"second {n}" for n in range(10)))
        assert gained("lookup_queried_blocks") == 90 and gained("lookup_hit_blocks") == 36
        assert (
            gained("load_asked_blocks") == 36
            and gained("load_served_blocks") == 32
            and gained("load_failed_blocks") == 4
        )
        assert gained("hit_tokens") == 32 * 16
        assert all(value >= 0 for value in stub.stats.values())


@pytest.mark.parametrize("silence", ["stopped", "absent", "deaf"])
def test_a_silent_daemon_holds_nobody_up(config: Any, store: Daemon, tmp_path: Path, silence: str) -> None:
    """50 steps with a daemon that does not answer; afterwards hits come back by themselves."""
    import socket

    if silence == "deaf":  # accepts and never answers
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "deaf.sock"))
        listener.listen(64)
    address = {"stopped": store.socket, "absent": tmp_path / "nobody.sock", "deaf": tmp_path / "deaf.sock"}[silence]
    with Stub(config, address, [[full()]], num_blocks=200) as stub:
        if silence == "stopped":
            stub.add("first", tokens_of(50), 1)
            stub.run("first")
            stub.settle()
            stub.forget()
            os.kill(store.pid, 19)
        slowest = 0.0
        be_patient(**{**PRODUCTION, "MISS_AFTER": PATIENCE})
        try:
            for n in range(4):
                stub.add(f"r{n}", tokens_of(50 if n % 2 else 60 + n), 20)
            asked = stub.connector.get_num_new_matched_tokens

            def timed(request: Any, local: int) -> Any:
                nonlocal slowest
                began = time.perf_counter()
                answer = asked(request, local)
                slowest = max(slowest, time.perf_counter() - began)
                return answer

            stub.connector.get_num_new_matched_tokens = timed
            stub.step()
            assert (
                slowest < PATIENCE / 2
            )  # the bound is some milliseconds; whoever waits for the daemon waits for all of MISS_AFTER
            be_patient(**PRODUCTION)
            began = time.monotonic()
            for _ in range(50):
                stub.step()
            stub.run(*(f"r{n}" for n in range(4)))
            waited = time.monotonic() - began
        finally:
            os.kill(store.pid, 18)
        stub.check("r0", "r1", "r2", "r3")
        assert waited < PATIENCE  # a second for the question, not one for each step
        until(
            lambda: not stub.connector.scheduler._lookups.heartbeat.healthy or silence == "stopped",
            "the scheduler's half notices",
        )
        be_patient()
        if silence == "stopped":
            until(lambda: stub.connector.scheduler._lookups.heartbeat.healthy, "the heartbeat beats again")
            until(lambda: stub.workers[0].connector.worker.mover.heartbeat.healthy, "the worker's too")
            stub.forget()
            stub.add("back", tokens_of(50), 1)
            stub.run("back")
            stub.check("back")
            assert stub.stats["hit_tokens"] == 96
    if silence == "deaf":
        listener.close()


def test_cold_blocks_are_fetched_first(config: Any, store: Daemon) -> None:
    shim = Shim()
    with Stub(config, store.socket, [[full()]], connect=shim) as stub:
        stub.add("first", tokens_of(70), 1)
        stub.run("first")
        stub.settle()
        stub.forget()
        shim.clients[0].cold = 3
        stub.add("second", tokens_of(70), 1)
        stub.run("second")
        stub.check("second")
        assert shim.clients[0].prefetched == [6, 6, 6] and stub.stats["hit_tokens"] == 96
        stub.forget()
        shim.clients[0].cold = 10**6  # they never come: a miss after a second
        be_patient(MISS_AFTER=PRODUCTION["MISS_AFTER"])
        began = time.monotonic()
        stub.add("third", tokens_of(70), 1)
        stub.run("third")
        stub.check("third")
        assert stub.stats["hit_tokens"] == 96 and 0.5 < time.monotonic() - began < PATIENCE


def test_what_was_promised_is_held_until_it_is_loaded(config: Any) -> None:
    """Between promise and load another client fills the store to the brim: nothing of the promise is evicted."""
    with (
        Daemon(64 * MiB) as daemon,
        Stub(config, daemon.socket, [[full(heads=8, size=64)]]) as stub,
        daemon.client() as client,
    ):
        stub.add("first", tokens_of(71), 1)
        stub.run("first")
        stub.settle()
        stub.forget()
        request = stub.add("second", tokens_of(71), 1)
        until(lambda: stub.connector.get_num_new_matched_tokens(request, 0)[0] == 96, "the promise")
        ns = stub.workers[0].connector.worker.mover._ns
        nbytes = ns.extents().body_bytes
        for n in range(3000):
            client.put(ns, [n.to_bytes(32, "little")], [bytes(nbytes)])
        assert daemon.status()["evicted_blocks_total"] > 0
        stub.run("second")
        stub.check("second")
        assert stub.stats["hit_tokens"] == 96
        until(lambda: daemon.status()["leased_blocks"] == 0, "the lease ends with the load")


def test_a_thousand_aborts_leave_nothing_held(config: Any, store: Daemon) -> None:
    shim = Shim()
    with Stub(config, store.socket, [[full()]], connect=shim, num_blocks=200) as stub, store.client() as client:
        stub.add("first", tokens_of(80, 130), 1)
        stub.run("first")
        stub.settle()
        for n in range(1000):
            rid = f"r{n}"
            stub.add(rid, [*tokens_of(80, 130), n % 800 + 5], 3)
            if n % 40 == 0:
                stub.scheduler.reset_prefix_cache()
            for _ in range(n % 7):  # before the first step, asked, allocated, loading, loaded, decoding
                stub.step()
            stub.abort(rid)
            if n % 97 == 0:
                stub.step()
        for _ in range(20):
            stub.step()
        half = stub.connector.scheduler
        assert not half._requests and not half._loads and not half._planned and not half._unsure
        until(lambda: not stub.workers[0].connector.worker.mover._jobs or stub.step() is None, "loads end")
        stub.settle()
        until(lambda: store.status()["held_bytes"] == 0, "nothing is held")
        assert stub.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 199
        assert stub.audit(client) > 0
        store.status(check_integrity=True)


# Who may share with whom (KVB-09)


def test_adapters_and_salts_keep_requests_apart(config: Any, store: Daemon, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    from tests.connectors.vllm.models import adapter

    one, two = adapter(tmp_path / "one", 1), adapter(tmp_path / "two", 2)
    identities: dict[str, dict[str, Any]] = {
        "base": {},
        "empty salt": {"cache_salt": ""},
        "salt one": {"cache_salt": "one"},
        "salt two": {"cache_salt": "two"},
        "adapter one": {"lora_request": LoRARequest("a", 1, str(one))},
        "adapter two": {"lora_request": LoRARequest("b", 2, str(two))},
        "adapter one, salt one": {"lora_request": LoRARequest("a", 1, str(one)), "cache_salt": "one"},
    }
    with Stub(config, store.socket, [[full()]]) as stub, store.client() as client:
        half, contexts = stub.connector.scheduler, {}
        for name, options in identities.items():
            request = stub.add(name, tokens_of(90), 1, flavour=len(name) if "adapter" in name else 0, **options)
            contexts[name] = half._context(request)
            stub.run(name)
            stub.check(name)
            expected = 96 if name == "empty salt" else 0  # absent and empty are one identity
            assert stub.stats.get("hit_tokens", 0) == expected or name != "empty salt"
            stub.settle()
            stub.forget()
        assert contexts.pop("empty salt") == contexts["base"]
        assert len(set(contexts.values())) == len(contexts)
        assert stub.audit(client) > 0
        hashes, ns = (
            [bytes(hash_) for hash_ in stub.requests["salt one"].block_hashes],
            stub.workers[0].connector.worker.mover._ns,
        )
        assert client.delete(ns, hashes, context=contexts["salt two"]) == 0
        assert client.lookup(ns, hashes, context=contexts["salt one"], deadline=5) == 6
        same_name = LoRARequest("a", 3, str(adapter(tmp_path / "three", 3)))
        assert half._adapters.digest(3, same_name.lora_path, False) not in (
            half._adapters.digest(1, str(one), False),
            None,
        )
        adapter(one, 7)
        assert half._adapters.digest(1, str(one), False) is None  # changed beneath the engine


def test_a_consumer_saves_nothing_and_a_producer_loads_nothing(config: Any, store: Daemon) -> None:
    with Stub(config, store.socket, [[full()]], transfer={"kv_role": "kv_consumer"}) as stub:
        twice(stub, tokens_of(95))
        assert store.status()["known_blocks"] == 0
    with Stub(config, store.socket, [[full()]], transfer={"kv_role": "kv_producer"}) as stub:
        twice(stub, tokens_of(95))
        assert store.status()["known_blocks"] == 6 and not stub.stats.get("hit_tokens")
