"""The worker's half: this rank's caches, and a mover for them once the scheduler has sent the namespace. Before that
nothing is saved and every load fails. Called by the model runner, from one thread."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from kvtier.client.api import Client
from kvtier.connectors.common.jobs import Load
from kvtier.connectors.common.mover import Mover
from kvtier.connectors.common.quantizing import QuantizedCaches
from kvtier.connectors.common.ranks import refusal
from kvtier.connectors.vllm.engine_caches import RankCaches, inspect
from kvtier.connectors.vllm.messages import StepPlan, StepReport
from kvtier.connectors.vllm.stats import KvtierStats
from kvtier.connectors.vllm.vllm_settings import VllmSettings
from kvtier.errors import KvtierError
from kvtier.format.identity import parse_description

# A step that computes nothing may wait so long for a load. The engine has nothing else to do but to ask again at once,
# without a pause, and what it asks takes the interpreter's lock from the threads that load: each of their copies then
# waited up to 5 ms to get it back.
IDLE_SECONDS = 0.002
log = logging.getLogger(__name__)


class WorkerHalf:
    """Everything that `KvtierConnector` does in role WORKER."""

    def __init__(self, config: Any, kv_config: Any, settings: VllmSettings, connect: Callable[[str], Client]) -> None:
        self._config, self._kv_config, self._settings, self._connect = config, kv_config, settings, connect
        tp, pp = config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size
        self._rank = (config.parallel_config.rank // tp % pp, config.parallel_config.rank % tp)
        self._caches: RankCaches | None = None
        self.handshake = refusal("no KV caches are registered")
        self.mover: Mover | None = None
        self._refused: list[Load] = []
        self._bad: set[int] = set()
        self._idle = False  # the step under way computes nothing
        self._lock = threading.Lock()  # around what threads count and report
        self._report = StepReport()
        self._stats = KvtierStats()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's caches, with weights and scales loaded. What cannot be kept becomes the handshake's reason."""
        try:
            self._caches = inspect(self._config, self._kv_config, kv_caches, self._rank[1], self._settings.mode)
            for group in self._caches.groups:
                if isinstance(group, QuantizedCaches):
                    group.count = self._count
            self.handshake = self._caches.report()
        except KvtierError as error:
            self.handshake = refusal(str(error))

    def _open(self, plan: StepPlan) -> None:
        """The namespace has come. Where it does not fit the caches, this rank stays out."""
        assert self._caches is not None
        client = self._connect(self._settings.socket)
        ns, ranges = client.register(parse_description(plan.description)), plan.ranges[self._rank]
        try:
            for group, part in zip(self._caches.groups, ranges, strict=True):
                if group is not None and part is not None:
                    group.bind(ns.extents(part))
        except KvtierError as error:
            log.error("kvtier is OFF on rank %s: %s", self._rank, error)
            return
        held, rate = (self._caches.groups, ranges), self._settings.save_bytes_per_second
        self.mover = Mover(client, ns, held, rate, self._count, self._stored)
        atexit.register(self.mover.close)  # an engine inside this process may end without a word

    def fence(self, plan: StepPlan) -> None:
        """Before the step."""
        if plan.description and self.mover is None:
            self._open(plan)
        if plan.fence and self.mover is not None:
            self.mover.fence(plan.fence)

    def start_loads(self, plan: StepPlan) -> None:
        """Starts the step's loads, and waits for those that it needs."""
        if self.mover is None:
            self._refused += plan.loads
            return
        self._idle = plan.idle
        self.mover.load(plan.loads, self._event() if plan.loads else None)
        for id_ in plan.cancelled:
            self.mover.cancel(id_)

    def start_saves(self, plan: StepPlan) -> None:
        """After the step: queues what it has filled."""
        if self.mover is None or self._caches is None or not plan.saves:
            return
        self.mover.save(plan.saves, self._event())

    def _event(self) -> Any:
        """After what the engine has given its stream so far; None on a CPU."""
        if self._caches is None or self._caches.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose loads between steps are over, and those to be recomputed as a whole. Each once."""
        over = [(load, 0, True) for load in self._refused]
        self._refused = []
        if self.mover is not None:
            if self._idle:
                self.mover.wait(IDLE_SECONDS)
            over += [(job.load, job.good, bool(job.reason)) for job in self.mover.finished()]
        done, failed = set(), set()
        for load, good, bad in over:
            with self._lock:
                self._report.loads[load.id] = (1, good)
            if not load.sync:
                done.add(load.request)
            if bad and load.whole:
                failed.add(load.request)
            elif bad:
                self._bad |= load.runs[0].block_ids(good)
        return done, failed

    def bad_blocks(self) -> set[int]:
        """Engine blocks that were to be loaded and are not, since the last call."""
        bad, self._bad = self._bad, set()
        return bad

    def take_report(self) -> StepReport | None:
        """What became of loads and saves since the last call."""
        with self._lock:
            report, self._report = self._report, StepReport()
        return report if report.loads or report.saves else None

    def take_stats(self) -> KvtierStats | None:
        """What was counted since the last call."""
        with self._lock:
            stats, self._stats = self._stats, KvtierStats()
        if self.mover is not None and self.mover.heartbeat.changed():
            stats.data["healthy:worker"] = int(self.mover.heartbeat.healthy)
        return None if stats.is_empty() else stats

    def drain(self) -> None:
        """The engine is about to take its memory away."""
        if self.mover is not None:
            self.mover.drain(0.0)

    def close(self) -> None:
        """Saves what can be saved within two seconds and ends threads and session."""
        if self.mover is not None:
            self.mover.close()
            atexit.unregister(self.mover.close)

    def _count(self, name: str, value: float, label: str) -> None:
        with self._lock:
            self._stats.add(name, value, label)

    def _stored(self, id_: int, blocks: int) -> None:
        with self._lock:
            self._report.saves[id_] = (1, blocks)
