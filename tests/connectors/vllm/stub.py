"""vLLM's real scheduler over workers without a model: what a CPU engine cannot reach (groups, ranks, pipeline stages,
MLA, preemption at will).

The "model" writes into every cache cell a pattern that follows from the tokens before it, and its next token is a
checksum over all cells that attention would read. So one wrong byte in any cell, of any layer, head or rank, changes
the tokens; `oracle` computes them without a cache. Caches begin as poison, 0x55. `audit` compares everything that the
store holds with what must be there.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtier.client.api import Client
from kvtier.connectors.vllm.connector import KvtierConnector
from kvtier.format.views import part_view

POISON = 0x55
U8 = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass
class LayerOf:
    """One layer as the fake model has it. `scales` are (k, v)."""

    spec: KVCacheSpec
    backend: str = "FLASH_ATTN"
    cache_dtype: str = "auto"
    scales: tuple[float, float] = (1.0, 1.0)
    kernel_tokens: int | None = None


def full(
    heads: int = 2, size: int = 8, block: int = 16, *, fp8: tuple[float, float] | None = None, **options: Any
) -> LayerOf:
    """Full attention; with `fp8` scales an FP8 cache."""
    return _attention(FullAttentionSpec, heads, size, block, fp8, {}, options)


def sliding(window: int, heads: int = 2, size: int = 8, block: int = 16, **options: Any) -> LayerOf:
    """Attention with a sliding window that has blocks of its own."""
    return _attention(SlidingWindowSpec, heads, size, block, None, {"sliding_window": window}, options)


def _attention(
    kind: Any, heads: int, size: int, block: int, fp8: Any, extra: dict[str, Any], options: dict[str, Any]
) -> LayerOf:
    dtype, mode = (torch.uint8, KVQuantMode.FP8_PER_TENSOR) if fp8 else (torch.bfloat16, KVQuantMode.NONE)
    spec = kind(block_size=block, num_kv_heads=heads, head_size=size, dtype=dtype, kv_quant_mode=mode, **extra)
    return LayerOf(spec, cache_dtype="fp8" if fp8 else "auto", scales=fp8 or (1.0, 1.0), **options)


def latent(size: int = 36, block: int = 16, *, record: int | None = None, **options: Any) -> LayerOf:
    """MLA: one latent per token; `record`: packed bytes per token instead."""
    more: dict[str, Any] = {"state_content_bytes": record, "cache_dtype_str": "fp8_ds_mla"} if record else {}
    spec = MLAAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=size, dtype=torch.uint8 if record else torch.bfloat16, **more
    )
    return LayerOf(spec, backend="FLASHMLA", cache_dtype="fp8_ds_mla" if record else "auto", **options)


def base_config(model: Path) -> Any:
    """vLLM's configuration for the tiny model; slow to make, so made once and copied."""
    arguments = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=512,
    )
    return arguments.create_engine_config()


@dataclass
class Worker:
    """One rank: its connector and its caches, with the views in which the fake model reads and writes."""

    rank: tuple[int, int]
    connector: KvtierConnector
    cells: dict[str, U8] = field(default_factory=dict)  # layer -> [kernel blocks, heads, tokens, bytes]

    def heads_of(self, layer: LayerOf) -> range:
        """The model's heads that this rank holds of a layer."""
        heads = layer.spec.num_heads
        if isinstance(layer.spec, MLAAttentionSpec):
            return range(heads)
        return range(self.rank[1] * heads, (self.rank[1] + 1) * heads)


class Stub:
    """A context manager. `groups`: the layers of each KV cache group, in the model's order. The model has `tp` times
    the heads of a rank."""

    def __init__(
        self,
        config: Any,
        socket: Path | str,
        groups: Sequence[Sequence[LayerOf]],
        *,
        tp: int = 1,
        pp: int = 1,
        num_blocks: int = 64,
        connect: Callable[[str], Any] = Client,
        events: bool = False,
        transfer: dict[str, Any] | None = None,
        max_tokens_a_step: int = 512,
        **settings: Any,
    ) -> None:
        self.config = copy.deepcopy(config)
        register_all_kvcache_specs(self.config)
        parallel, cache = self.config.parallel_config, self.config.cache_config
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.world_size = tp, pp, tp * pp
        self.config.scheduler_config.async_scheduling = False
        self.config.scheduler_config.max_num_batched_tokens = max_tokens_a_step
        self.config.scheduler_config.max_num_scheduled_tokens = max_tokens_a_step
        cache.num_gpu_blocks, cache.block_size = num_blocks, groups[0][0].spec.block_size
        total = tp * max((layer.spec.num_kv_heads for group in groups for layer in group), default=1)
        self.config.model_config.get_total_num_kv_heads = lambda: total
        self.config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None
        self.config.kv_transfer_config = KVTransferConfig(
            kv_connector="KvtierConnector",
            kv_connector_module_path="kvtier.connectors.vllm",
            **{"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **(transfer or {})},
            kv_connector_extra_config={"socket": str(socket), **settings},
        )
        self.groups, self.tp, self.pp, self.num_blocks = groups, tp, pp, num_blocks
        self.layers = {
            f"model.layers.{index}.attn": layer
            for index, layer in enumerate(layer for group in groups for layer in group)
        }
        self.names = _names(groups)
        whole = KVCacheConfig(
            num_blocks,
            [],
            [KVCacheGroupSpec(names, group[0].spec) for group, names in zip(groups, self.names, strict=True)],
        )
        block_size, self.hash_tokens = resolve_kv_cache_block_sizes(whole, self.config)
        whole.hash_block_size = cache.hash_block_size = self.hash_tokens
        hash_function = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(self.hash_tokens, hash_function)
        before, KvtierConnector.connect = KvtierConnector.connect, connect  # type: ignore[assignment]
        try:
            manager = StructuredOutputManager(self.config)
            self.scheduler = Scheduler(self.config, whole, manager, block_size, self.hash_tokens, log_stats=False)
            self.workers = [self._worker(pp_rank, tp_rank, whole) for pp_rank in range(pp) for tp_rank in range(tp)]
        finally:
            KvtierConnector.connect = before  # type: ignore[method-assign]
        self.connector = self.scheduler.connector
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {worker.rank: worker.connector.get_handshake_metadata() for worker in self.workers}
        )
        self.aggregator = KVOutputAggregator(tp * pp)
        take_stats, take_events = self.connector.get_kv_connector_stats, self.connector.take_events
        self.connector.get_kv_connector_stats = lambda: self._add(take_stats())  # the scheduler takes them; we look on
        self.connector.take_events = lambda: self._keep(take_events())
        self.requests: dict[str, Request] = {}
        self.flavours: dict[str, int] = {}
        self.stats: dict[str, float] = {}
        self.events: list[Any] = []
        self.slowest = 0.0
        self.steps = 0

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.connector.shutdown()
        self.connector.shutdown()

    def _worker(self, pp_rank: int, tp_rank: int, whole: KVCacheConfig) -> Worker:
        config = copy.copy(self.config)
        config.parallel_config = copy.copy(self.config.parallel_config)
        config.parallel_config.rank = pp_rank * self.tp + tp_rank
        config.compilation_config = SimpleNamespace(
            static_forward_context={name: _module(layer) for name, layer in self.layers.items()}
        )
        own = [[name for name in names if self._stage(name) == pp_rank] for names in self.names]
        kv_config = copy.copy(whole)
        kv_config.kv_cache_groups = [
            KVCacheGroupSpec(mine, _group_spec(group, names))
            for mine, group, names in zip(own, self.groups, self.names, strict=True)
        ]
        worker = Worker((pp_rank, tp_rank), KvtierConnector(config, KVConnectorRole.WORKER, kv_config))
        caches = {}
        for name in (name for names in own for name in names):
            layer = self.layers[name]
            spec, tokens = layer.spec, layer.kernel_tokens or layer.spec.block_size
            item = torch.empty(0, dtype=spec.dtype).element_size()
            shape = (
                self.num_blocks * spec.block_size // tokens,
                spec.num_heads,
                tokens,
                spec.state_content_size_bytes // item,
            )
            caches[name] = torch.full(shape, POISON, dtype=torch.uint8).repeat(1, 1, 1, item).view(spec.dtype)
            worker.cells[name] = caches[name].view(torch.uint8).numpy()
        worker.connector.register_kv_caches(caches)
        return worker

    def _stage(self, name: str) -> int:
        """Layers are dealt to pipeline stages in equal runs."""
        return list(self.layers).index(name) * self.pp // len(self.layers)

    # -- requests

    def add(self, rid: str, tokens: Sequence[int], max_tokens: int = 4, *, flavour: int = 0, **options: Any) -> Request:
        """A request; those of one flavour have one set of weights."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(rid, list(tokens), params, None, block_hasher=self.hasher, **options)
        self.requests[rid], self.flavours[rid] = request, flavour
        self.scheduler.add_request(request)
        return request

    def abort(self, rid: str) -> None:
        self.scheduler.finish_requests(rid, RequestStatus.FINISHED_ABORTED)

    def run(self, *rids: str, within: float = 30.0) -> None:
        """Steps until these requests (none: all) are finished."""
        end = time.monotonic() + within
        while any(not self.requests[rid].is_finished() for rid in rids or self.requests):
            assert time.monotonic() < end, "the engine does not come to an end"
            self.step()

    def step(self) -> Any:
        """One step of the engine; returns the scheduler's output."""
        began = time.perf_counter()
        output = self.scheduler.schedule()
        self.slowest = max(self.slowest, time.perf_counter() - began)
        plan, results = output.kv_connector_metadata, []
        for worker in self.workers:
            worker.connector.handle_preemptions(plan)
            worker.connector.bind_connector_metadata(plan)
            if output.has_sync_kv_loads:
                worker.connector.start_load_kv(None)
        sampled = self._forward(output)
        for worker in self.workers:
            results.append(self._after(worker.connector, output, sampled))
        merged = self.aggregator.aggregate(results)
        self._add(merged.kv_connector_output.kv_connector_stats)
        self.scheduler.update_from_output(output, merged)
        self.steps += 1
        if not output.total_num_scheduled_tokens:
            time.sleep(0.001)
        return output

    def _add(self, stats: Any) -> Any:
        for key, value in (stats.data if stats else {}).items():
            self.stats[key] = value if key.startswith("healthy") else self.stats.get(key, 0) + value
        return stats

    def _keep(self, events: Any) -> Any:
        self.events += events
        return events

    def _after(self, connector: KvtierConnector, output: Any, sampled: dict[str, int]) -> ModelRunnerOutput:
        if not output.has_sync_kv_loads:
            connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        said = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        rids = list(output.num_scheduled_tokens)
        tokens = [[sampled[rid]] if rid in sampled else [] for rid in rids]
        return ModelRunnerOutput(rids, {rid: at for at, rid in enumerate(rids)}, tokens, kv_connector_output=said)

    # -- the model

    def _forward(self, output: Any) -> dict[str, int]:
        """Writes the cells of the scheduled tokens, for all requests, then reads: {request: next token} for those that
        are up to date."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(
            zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_computed_tokens, strict=True)
        )
        sampled = {}
        chains = {
            rid: self.chain(list(self.requests[rid].all_token_ids), self.flavours[rid])
            for rid in output.num_scheduled_tokens
        }
        for rid, n in output.num_scheduled_tokens.items():
            at = np.arange(computed[rid], computed[rid] + n)
            for worker, name, table, layer in self._places(rid):
                block, kernel, offset = self._where(layer, at, table)
                worker.cells[name][block + kernel, :, offset] = self.pattern(
                    chains[rid][at], name, worker.heads_of(layer), layer
                )
        for rid, n in output.num_scheduled_tokens.items():
            end = computed[rid] + n
            if end == self.requests[rid].num_tokens:
                total = sum(
                    self._read(worker, name, table, layer, end) for worker, name, table, layer in self._places(rid)
                )
                sampled[rid] = int(total % 997) + 3
        return sampled

    def _places(self, rid: str) -> list[tuple[Worker, str, list[int], LayerOf]]:
        tables = self.scheduler.kv_cache_manager.get_block_ids(rid)
        return [
            (worker, name, tables[group], self.layers[name])
            for worker in self.workers
            for group, names in enumerate(self.names)
            for name in names
            if name in worker.cells
        ]

    def _where(self, layer: LayerOf, at: Any, table: list[int]) -> tuple[Any, Any, Any]:
        size, tokens = layer.spec.block_size, layer.kernel_tokens or layer.spec.block_size
        block = np.asarray(table)[at // size] * (size // tokens)
        return block, at % size // tokens, at % tokens

    def _read(self, worker: Worker, name: str, table: list[int], layer: LayerOf, end: int) -> int:
        window = getattr(layer.spec, "sliding_window", None) or end
        at = np.arange(max(0, end - window), end)
        block, kernel, offset = self._where(layer, at, table)
        return checksum(worker.cells[name][block + kernel, :, offset], at, name)

    def chain(self, tokens: Sequence[int], flavour: int = 0) -> Any:
        """A number per token that follows from all tokens up to it."""
        values, last = [], 17 + flavour
        for token in tokens:
            last = (last * 1103515245 + token * 12345 + 12345) & 0x7FFFFFFF
            values.append(last)
        return np.asarray(values, np.int64)

    def pattern(self, chain: Any, name: str, heads: range, layer: LayerOf) -> U8:
        """uint8 [tokens, heads, bytes]: never poison, and finite in every number format."""
        index = list(self.layers).index(name) + 1
        columns = np.arange(layer.spec.state_content_size_bytes)
        mixed = (
            chain[:, None, None] * 2654435761 + index * 40503 + np.asarray(heads)[None, :, None] * 9973 + columns * 131
        )
        made: U8 = ((mixed >> 7) & 0x3F).astype(np.uint8)
        return made

    def oracle(self, tokens: Sequence[int], n: int, flavour: int = 0) -> list[int]:
        """The n tokens that the model says after these, without any cache."""
        known = list(tokens)
        for _ in range(n):
            chain, total = self.chain(known, flavour), 0
            for worker in self.workers:
                for name in worker.cells:
                    layer = self.layers[name]
                    at = np.arange(
                        max(0, len(known) - (getattr(layer.spec, "sliding_window", None) or len(known))), len(known)
                    )
                    total += checksum(self.pattern(chain[at], name, worker.heads_of(layer), layer), at, name)
            known.append(int(total % 997) + 3)
        return known[len(tokens) :]

    # -- checks

    def check(self, *rids: str) -> None:
        """The requests are finished with the tokens that the oracle has."""
        for rid in rids or self.requests:
            request = self.requests[rid]
            assert request.is_finished()
            expected = self.oracle(
                list(request.prompt_token_ids or ()), len(request.output_token_ids), self.flavours[rid]
            )
            assert list(request.output_token_ids) == expected, rid

    def settle(self) -> None:
        """Waits until every saver has nothing to do, and lets the reports come back."""
        end = time.monotonic() + 30
        for worker in self.workers:
            mover = worker.connector.worker.mover
            while mover is not None and mover._saves:
                assert time.monotonic() < end, "saves do not end"
                time.sleep(0.002)
        self.step()

    def forget(self) -> None:
        """The engine's own prefix cache is dropped."""
        assert self.scheduler.reset_prefix_cache()

    def audit(self, client: Client, *rids: str) -> int:
        """Every block of these requests that the store holds is exactly what belongs there, on every rank. Returns how
        many there are."""
        found = 0
        per = self.config.kv_transfer_config.kv_connector_extra_config.get("engine_blocks", 1)
        for rid in rids or self.requests:
            request, chain = self.requests[rid], self.chain(list(self.requests[rid].all_token_ids), self.flavours[rid])
            context = self.connector.scheduler._context(request)
            for worker in self.workers:
                mover = worker.connector.worker.mover
                for group, part in enumerate(mover._ranges if mover else []):
                    tokens = self.groups[group][0].spec.block_size * per
                    for at in range(len(request.block_hashes) * self.hash_tokens // tokens if part is not None else 0):
                        hash_ = bytes(request.block_hashes[(at + 1) * tokens // self.hash_tokens - 1])
                        for body in client.get(mover._ns, [hash_], range_=part, context=context):
                            self._compare(
                                body, mover._ns.extents(part), worker, group, chain[at * tokens : (at + 1) * tokens]
                            )
                            found += 1
        return found

    def _compare(self, body: U8, extents: Any, worker: Worker, group: int, chain: Any) -> None:
        for index, name in enumerate(name for name in self.names[group] if name in worker.cells):
            layer = self.layers[name]
            expected = self.pattern(chain, name, worker.heads_of(layer), layer).transpose(
                1, 0, 2
            )  # [heads, tokens, bytes]
            parts = [part_view(body, extents, index, number) for number in range(len(extents.group.layers[0].parts))]
            if extents.group.kind == "opaque":  # pages of [kernel blocks][heads, tokens, bytes]
                size = layer.kernel_tokens or layer.spec.block_size
                pages = [expected[:, at : at + size].tobytes() for at in range(0, len(chain), size)]
                assert parts[0].tobytes() == b"".join(pages), name
                continue
            stored = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=2)
            assert np.array_equal(stored, expected), name


def checksum(cells: U8, at: Any, name: str) -> int:
    """Over [tokens, heads, bytes], by place."""
    weights = (at[:, None] * 131 + np.arange(cells.shape[1] * cells.shape[2])[None] * 7 + 1) % 251
    return int((cells.reshape(len(at), -1).astype(np.int64) * weights).sum()) * (len(name) + 1)


def _names(groups: Sequence[Sequence[LayerOf]]) -> list[list[str]]:
    numbers = iter(range(1 << 16))
    return [[f"model.layers.{next(numbers)}.attn" for _ in group] for group in groups]


def _group_spec(group: Sequence[LayerOf], names: list[str]) -> KVCacheSpec:
    if all(layer.spec == group[0].spec for layer in group):
        return group[0].spec
    return UniformTypeKVCacheSpecs(
        block_size=group[0].spec.block_size, kv_cache_specs={n: one.spec for n, one in zip(names, group, strict=True)}
    )


def _module(layer: LayerOf) -> Any:
    k, v = layer.scales
    return SimpleNamespace(
        attn_backend=SimpleNamespace(get_name=lambda: layer.backend),
        kv_cache_dtype=layer.cache_dtype,
        _k_scale=torch.tensor(k),
        _v_scale=torch.tensor(v),
        _k_scale_float=k,
        _v_scale_float=v,
        isa="vec",
    )
