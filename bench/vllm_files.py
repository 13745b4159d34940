"""vLLM's file tier as a contestant of `bench.versus`: its `FileSystemTierManager`, driven as its tiering manager drives
it. Runs in .venv-vllm.

A batch of blocks goes down from the primary tier's memory as one store job and comes up as one load job, as those of
one request do; beside it the same batch as four jobs, which its threads work on side by side. The tier writes with
O_DIRECT, syncs nothing, checks lengths only, never evicts."""

from __future__ import annotations

import os
import time
from itertools import count
from types import SimpleNamespace

import numpy as np
import vllm
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from bench.contest import Bytes, Contestant, Field

PATIENCE = 60.0
JOBS = 4


def config(nbytes: int) -> OffloadingConfig:
    """An engine on one device with blocks of this size."""
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
    groups = (OffloadingGroupConfig(16, ("layer",), 0),)
    model, cache = OffloadingModelConfig("benchmark", "float8_e4m3fn"), OffloadingCacheConfig(16, 1)
    return OffloadingConfig(groups, nbytes, False, {}, "benchmark", model, cache, parallel)


class Files(Contestant):
    """The tier over one piece of memory that stands for the primary tier: first what is put, then where it is got
    to."""

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        spec = SimpleNamespace(config=config(field.size), blocks_per_chunk=1, kv_events_config=None)
        self.tier = FileSystemTierManager(spec, memoryview(self.whole), "fs", root_dir=field.directory)
        field.stack.callback(self.tier.shutdown)
        self.versions = {"vllm": vllm.__version__}
        self.keys: list[list[OffloadKey]] = [[] for _ in range(field.batches)]
        self.numbers = count(1)
        self.context = ReqContext("benchmark")
        self.most = 8  # its files pile up until the end: deleting them between windows made the disk slow for everybody
        self.verbs = {"put": lambda i: self.put(i, 1), "get": lambda i: self.get(i, 1)}
        self.verbs |= {
            f"put by {JOBS} jobs": lambda i: self.put(i, JOBS),
            f"get by {JOBS} jobs": lambda i: self.get(i, JOBS),
        }

    def make_memory(self) -> tuple[Bytes, Bytes]:
        made = Field(2 * self.field.batches, self.field.batch, self.field.size, "", self.field.stack).memory(True)
        self.whole = made.reshape(-1, self.field.size).view(np.int8)
        return made[: self.field.batches], made[self.field.batches :]

    def put(self, i: int, jobs: int) -> None:
        keys = [make_offload_key(os.urandom(32), 0) for _ in range(self.field.batch)]
        self._move(False, keys, i * self.field.batch, jobs)
        self.keys[i] = keys

    def get(self, i: int, jobs: int) -> None:
        self._move(True, self.keys[i], (self.field.batches + i) * self.field.batch, jobs)

    def _move(self, up: bool, keys: list[OffloadKey], first: int, jobs: int) -> None:
        submit = self.tier.submit_load if up else self.tier.submit_store
        step, waiting = -(-len(keys) // jobs), set()
        for at in range(0, len(keys), step):
            number = next(self.numbers)
            waiting.add(number)
            chunks = np.arange(first + at, first + min(at + step, len(keys)))
            submit(TransferJob(number, keys[at : at + step], chunks, up, self.context))
        end = time.monotonic() + PATIENCE
        while waiting:
            for result in self.tier.get_finished_jobs():
                assert result.success, "a job of vLLM's file tier failed"
                waiting.discard(result.job_id)
            assert time.monotonic() < end, f"jobs of vLLM's file tier took more than {PATIENCE:.0f} s"
            time.sleep(0.0001)
