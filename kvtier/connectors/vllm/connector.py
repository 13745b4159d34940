"""The class that vLLM loads, once as the scheduler's half and once in every worker. It says which call goes where.

Nothing in it raises for a fault of the daemon. It raises at the start, for settings that are wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.client.api import Client
from kvtier.connectors.vllm import compat, modes
from kvtier.connectors.vllm.messages import Handshake, StepPlan, StepReport
from kvtier.connectors.vllm.scheduler import SchedulerHalf
from kvtier.connectors.vllm.stats import KvtierPromMetrics, KvtierStats
from kvtier.connectors.vllm.vllm_settings import read
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.errors import Invalid

log = logging.getLogger(__name__)


class KvtierConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """Keeps vLLM's KV cache in a kvtier daemon. `connect` makes a client from an address; tests replace it."""

    _cache_hit_source = CacheHitSource.HOST
    requires_kv_delivery = False  # a dropped save is a later miss
    connect = Client
    scheduler: SchedulerHalf  # one of the two, by role
    worker: WorkerHalf

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        compat.prepare()
        transfer = vllm_config.kv_transfer_config
        try:
            settings = read(transfer.kv_connector_extra_config, transfer.kv_load_failure_policy)
            modes.check(settings.mode, vllm_config, kv_cache_config)
        except Invalid as error:
            raise ValueError(f"kvtier: {error}") from None
        self._half: SchedulerHalf | WorkerHalf
        if role == base.KVConnectorRole.SCHEDULER:
            self._half = self.scheduler = SchedulerHalf(vllm_config, kv_cache_config, settings, type(self).connect)
        else:
            self._half = self.worker = WorkerHalf(vllm_config, kv_cache_config, settings, type(self).connect)

    # -- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        self.worker.drain()

    def get_handshake_metadata(self) -> Handshake:
        return Handshake(self.worker.handshake)

    def handle_preemptions(self, kv_connector_metadata: StepPlan) -> None:
        self.worker.fence(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # what a step needs is loaded before it starts

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return  # whole blocks are saved, after the step

    def wait_for_save(self) -> None:
        self.worker.start_saves(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        done, failed = self.worker.results()
        return base.KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.bad_blocks()

    def build_connector_worker_meta(self) -> StepReport | None:
        return self.worker.take_report()

    # -- scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.manager = kv_cache_manager

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Handshake]) -> None:
        self.scheduler.hear({rank: handshake.json for rank, handshake in metadata.items()})

    def on_new_request(self, request: Any) -> None:
        self.scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        return self.scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.learn(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request)
        return False, None  # blocks may go at once: the fence stands before their next owner

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def take_events(self) -> Iterable[Any]:
        return self.scheduler.take_events()

    def reset_cache(self) -> bool:
        return self.scheduler.reset()

    # -- both

    def get_kv_connector_stats(self) -> KvtierStats | None:
        return self._half.take_stats()

    def shutdown(self) -> None:
        self._half.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvtierStats:
        return KvtierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvtierPromMetrics:
        return KvtierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
