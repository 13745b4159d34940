"""vLLM's own CPU offloading on a machine without a GPU, with our tier below it.

`CpuTieringSpec` replaces one thing, the worker that copies between GPU and pool, which asserts CUDA: everything of the
scheduler's side is vLLM's. `OrderedTier` is our tier, which does what a file orders at a stage of its work. `Stack` is
vLLM's real tiering manager without an engine, driven as the scheduler drives it. The limits in seconds are those that
no busy machine misses, until `limit` says otherwise.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingWorker,
    ReqContext,
    ScheduleEndContext,
    TransferResult,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.client import connection
from kvtier.connectors.common import objects
from kvtier.connectors.vllm.tier import offload_tier, transfers
from kvtier.connectors.vllm.tier.offload_tier import KvtierTier
from kvtier.format.identity import NO_CONTEXT, f32_hex
from kvtier.format.layout import attention
from tests.support.daemon import PATIENCE, Daemon, description, until

LAYERS, HEADS, WIDTH, TOKENS = 2, 2, 64, 32
NBYTES = LAYERS * HEADS * 2 * WIDTH * TOKENS  # of a block in FP8
_LIMITS: dict[str, Any] = {
    "CALL_SECONDS": objects,
    "PLACE_SECONDS": objects,
    "LOOKUP_SECONDS": transfers,
    "LOAD_SECONDS": offload_tier,
    "STORE_SECONDS": offload_tier,
    "CLOSE_SECONDS": offload_tier,
    "HELLO_DEADLINE": connection,
}
_PRODUCTION = {name: getattr(module, name) for name, module in _LIMITS.items()}


def limit(patient: bool) -> None:
    """Sets the tier's limits in this process: to `PATIENCE`, or as users have them."""
    for name, module in _LIMITS.items():
        setattr(module, name, PATIENCE if patient else _PRODUCTION[name])


limit(patient=True)


# An engine's half


class _CpuWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between the engine's cache and the pool at once."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region, self._done = region, list[TransferResult]()
        self._pairs = [(one.tensor, region.create_next_worker_view(one.page_size_bytes)) for one in kv_caches.tensors]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec.block_ids, dst_spec.block_ids, True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        return self._copy(job_id, dst_spec.block_ids, src_spec.block_ids, False)

    def _copy(self, job_id: int, blocks: Sequence[int], chunks: Sequence[int], store: bool) -> bool:
        for block, chunk in zip(blocks, chunks, strict=True):
            for cache, pool in self._pairs:
                if store:
                    pool[chunk].copy_(cache[block])
                else:
                    cache[block].copy_(pool[chunk])
        self._done.append(TransferResult(job_id, True, None, None))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering, for an engine that computes on a CPU: one KV cache group, a block a chunk."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1 and len(kv_caches.group_data_refs) == 1
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _CpuWorker(kv_caches, region)
        return self._worker


_moving, _copy = threading.local(), objects.copy


def _ordered_copy(pairs: Any) -> None:
    """Asks the tier whose thread this is, if it is one, before it copies."""
    getattr(_moving, "obey", lambda: None)()
    _copy(pairs)


objects.copy = _ordered_copy


class OrderedTier(KvtierTier):  # type: ignore[misc]
    """Our tier, which looks into the file `orders` at each stage: {"at": stage, "do": ..., "pid": of the daemon}.

    at   "lookup", "store", "load", or "copy to store", "copy to load" (with slots reserved or leased)
    do   "raise" an exception; "kill" the daemon; "stop" it, with the limits that users have, until "forgive"; "wait"
         until the order is taken back
    """

    def __init__(self, *, orders: str, **known: Any) -> None:
        super().__init__(**known)
        self._orders = Path(orders)

    def _find(self, keys: Sequence[bytes]) -> list[bool] | None:
        self._obey("lookup")
        return super()._find(keys)

    def _move(self, job: transfers.Job) -> list[bytes]:
        stage = "load" if job.load else "store"
        self._obey(stage)
        _moving.obey = lambda: self._obey(f"copy to {stage}")
        return super()._move(job)

    def _obey(self, stage: str) -> None:
        try:
            order = json.loads(self._orders.read_text())
        except FileNotFoundError:
            return
        if order["at"] != stage:
            return
        if order["do"] == "wait":
            until(lambda: not self._orders.exists(), "the order is taken back")
            return
        self._orders.unlink()
        if order["do"] == "raise":
            raise RuntimeError("ordered by the test")
        limit(patient=order["do"] != "stop")
        if order["do"] == "forgive":
            return
        os.kill(order["pid"], signal.SIGKILL if order["do"] == "kill" else signal.SIGSTOP)
        until(lambda: _state(order["pid"]) in "TZX", "the daemon is stopped, or dead")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "X"


class Orders:
    """The file, from the test's side."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def give(self, at: str, do: str, daemon: Daemon | None = None) -> None:
        aside = self.path.with_suffix(".new")
        aside.write_text(json.dumps({"at": at, "do": do, "pid": daemon.pid if daemon else 0}))
        os.replace(aside, self.path)

    @property
    def open(self) -> bool:
        """Whether it has not been obeyed."""
        return self.path.exists()

    def take_back(self) -> None:
        self.path.unlink(missing_ok=True)


# The scheduler's half, without an engine


def describe(path: Path, scale: float = 0.05, **fields: Any) -> Path:
    """A file with the description of a small FP8 model on a CPU, as `kvtier namespace --cpu` writes it."""
    scales = {f"{layer}.{part}": f32_hex(scale) for layer in range(LAYERS) for part in "kv"}
    said = {
        "layout": attention(LAYERS, HEADS, WIDTH, engine_tokens=TOKENS, granularity="tensor"),
        "rule": "checkpoint",
        "scales": scales,
    }
    path.write_text(json.dumps(description(**{**said, "packing": "CPU_ATTN vec", **fields}).to_json()))
    return path


def key(n: int, group: int = 0) -> bytes:
    return bytes(make_offload_key(n.to_bytes(32, "big"), group))


def content(wanted: bytes, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What the chunk of a key holds: every byte value occurs, so that a sign would show."""
    return np.random.default_rng(list(wanted)).integers(0, 256, nbytes, np.uint8)


def config(
    tier: dict[str, Any], *, chunks: int = 64, chunk_blocks: int = 1, worker_bytes: int = NBYTES, **changed: Any
) -> OffloadingConfig:
    """What an engine tells vLLM's offloading. `changed`: model, dtype, layout, groups, tensor (parallel size),
    canonical."""
    tensor = changed.get("tensor", 1)
    groups = changed.get("groups", ((0, TOKENS, ("model.layers.0.attn", "model.layers.1.attn")),))
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(tokens_per_block=tokens, layer_names=names, group_id=number)
            for number, tokens, names in groups
        ),
        worker_kv_bytes_per_block=worker_bytes,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": chunks * -(-worker_bytes * tensor * chunk_blocks // 4096) * 4096,
            "secondary_tiers": [tier],
        },
        engine_id=f"kvtier-test-{uuid.uuid4().hex}",
        model=OffloadingModelConfig(changed.get("model", "org/m"), changed.get("dtype", "fp8")),
        cache=OffloadingCacheConfig(TOKENS, chunk_blocks),
        parallel=OffloadingParallelConfig(0, tensor, tensor, 1, 1, 1, 0, 1, None, False),
        canonical_layout=changed.get("canonical", False),
        kv_cache_layout=changed.get("layout", "LBHNC"),
    )


class Stack:
    """vLLM's tiering manager with one tier below it. A context manager. Every job that the tier answers twice fails an
    assertion of vLLM's."""

    def __init__(
        self, daemon: Daemon, file: Path, orders: Path | None = None, *, check: str = "off", **changed: Any
    ) -> None:
        own = {"type": "KvtierTier", "module_path": "kvtier.connectors.vllm_tier"}
        if orders is not None:
            own = {"type": "OrderedTier", "module_path": "tests.connectors.vllm.tiering", "orders": str(orders)}
        self.spec = TieringOffloadingSpec(
            config({**own, "namespace": str(file), "socket": str(daemon.socket), "check": check}, **changed)
        )
        self.manager = self.spec.get_manager()
        self.tier: KvtierTier = self.manager.secondary_tiers[0]
        self.nbytes: int = self.spec.kv_bytes_per_chunk
        self.answers: list[Any] = []  # of the tier, as vLLM takes them
        self._requests = 0
        take = self.tier.get_finished_jobs

        def taken() -> list[Any]:
            found = list(take())
            self.answers += found
            return found

        self.tier.get_finished_jobs = taken  # type: ignore[method-assign]

    def __enter__(self) -> Stack:
        try:
            until(self.tier._traffic.look, "the tier finds the daemon")
        except BaseException:
            self.manager.shutdown()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.shutdown()

    def begin(self) -> ReqContext:
        self._requests += 1
        context = ReqContext(f"request-{self._requests}")
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        """Steps until every job is answered."""

        def idle() -> bool:
            self.step()
            return not self.manager._jobs

        until(idle, "every job is answered")
        transfers = self.tier._transfers
        until(
            lambda: not transfers.loading.running + transfers.storing.running, "no thread is at one"
        )  # a little after its answer
        assert not transfers.answers, "nothing is answered that was not asked"

    def offload(self, keys: Sequence[bytes]) -> None:
        """As a worker and the scheduler put chunks into the pool; the tier is told of them."""
        context = self.begin()
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        pool = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        for one, row in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            pool[row] = content(one, self.nbytes)
        self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)

    def keys(self, numbers: Sequence[int], group: int = 0) -> list[bytes]:
        return [key(n, group) for n in numbers]

    def store(self, numbers: Sequence[int], group: int = 0) -> None:
        """Offloads these and waits until the tier has answered."""
        self.offload(self.keys(numbers, group))
        self.settle()

    def find(self, keys: Sequence[bytes], between: Callable[[], None] = lambda: None) -> list[int]:
        """As a request that looks for all of them: places of those that the pool has in the end, each byte compared.
        `between` is called once, when the tier knows what is stored and has not been asked to load it."""
        context = self.begin()
        asked: list[LookupResult] = []

        def answered() -> bool:
            asked[:] = [self.manager.lookup(one, context) for one in keys]
            self.step()
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(asked)

        if not answered():
            known = self.tier._lookups._known
            until(lambda: all(question.found is not None for question in known.values()), "every question is answered")
            between()
        until(answered, "every lookup is answered", 4 * PATIENCE)
        places = [place for place, result in enumerate(asked) if result is LookupResult.HIT]
        hits = [keys[place] for place in places]
        rows = self.manager.prepare_load(hits, context).chunk_ids
        pool = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        for one, row in zip(hits, rows, strict=True):
            assert np.array_equal(pool[row], content(one, self.nbytes)), f"chunk {one.hex()} came back changed"
        self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        return places

    def found(self, numbers: Sequence[int], group: int = 0) -> list[int]:
        return self.find(self.keys(numbers, group))

    def forget(self) -> None:
        """Empties the pool, as a reset of the prefix cache does."""
        self.manager.reset_cache()

    def delete(self, numbers: Sequence[int]) -> None:
        """Makes the daemon forget these chunks."""
        space = self.tier._space
        assert space is not None
        assert self.tier._traffic.delete((space, NO_CONTEXT, [offload_tier.Chunk(0, key(n)) for n in numbers]))
