"""The tier that vLLM's TieringOffloadingManager drives in the scheduler's process. Its threads move the bytes.

Its one rule: nothing here waits for the daemon on the scheduler's thread, and nothing raises for a fault of the daemon;
only `drain_jobs` and `shutdown` wait, as vLLM wants it. Each job is answered exactly once. It raises at the start, for
settings that are wrong and for an engine that is not the one described. Rows of the pool are handled as unsigned bytes
and touched only between a job's submission and its answer.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import vllm
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED, get_none_hash_seed
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvtier.client.answers import Body
from kvtier.connectors.common.object_naming import Spaces
from kvtier.connectors.common.objects import Item, ObjectTransfer
from kvtier.connectors.vllm import compat
from kvtier.connectors.vllm.tier import chunks
from kvtier.connectors.vllm.tier.transfers import ChunkLookups, Job, Transfers
from kvtier.errors import Invalid
from kvtier.format.identity import NO_CONTEXT

STORE_SECONDS = 20.0  # from a job's submission; its chunks stay pinned in vLLM's pool for so long
LOAD_SECONDS = 5.0  # the same; its request waits for it
LOADERS = 2
CLOSE_SECONDS = 5.0  # stores that wait go on for so long at the end
log = logging.getLogger(__name__)


class Chunk(Item):
    """A chunk of a job, by vLLM's key."""

    @cached_property
    def hash(self) -> bytes:
        """Its content hash."""
        return chunks.content_hash(self.key)


class KvtierTier(SecondaryTierManager):
    """See `docs/vllm.md`. Made by vLLM's factory; `said` is the rest of the tier's configuration."""

    medium: ClassVar[Medium] = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **said: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        compat.prepare()
        engine = engine_of(offloading_spec, self.block_size_bytes)
        try:
            settings = chunks.read(said)
            chunks.compare(settings.description, engine, settings.check)
            chunks.ChunkSpace(settings.description, engine)  # raises what a first request should not meet
        except Invalid as error:
            raise ValueError(f"kvtier: {error}") from None
        if settings.check == "off":
            log.warning("kvtier: whether %s is what the namespace describes is not checked", engine.model)
        self._base, self._engine = settings.description, engine
        self._space: chunks.ChunkSpace | None = None
        self._off = False
        self._rows: Body | None = np.asarray(primary_kv_view).view(np.uint8)  # vLLM's view is of signed bytes
        spaces = Spaces({self._base.model: self._base})
        self._traffic = ObjectTransfer(settings.socket, spaces, lambda *_: None, "tier")
        self._lookups = ChunkLookups(self._find)
        self._transfers = Transfers(self._move, self._traffic.release_spent, LOADERS)

    # -- lookup

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """A miss at once where the daemon is away; RETRY until the thread has asked, at most 2 s."""
        if self._ready() is None or not self._traffic.heartbeat.healthy:
            return LookupResult.MISS
        found = self._lookups.ask(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.forget(req_context.req_id)

    def _find(self, keys: Sequence[bytes]) -> list[bool] | None:
        """For each key whether the daemon has it in any tier; None where it does not answer."""
        if self._space is None:
            return None
        self._traffic.introduce(self._space)
        known = self._traffic.known(self._space, NO_CONTEXT, [chunks.content_hash(key) for key in keys])
        if known is None:
            return None
        there = set(known)
        return [at in there for at in range(len(keys))]

    # -- jobs

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, load=False)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, load=True)

    def _submit(self, metadata: Any, load: bool) -> None:
        until = time.monotonic() + (LOAD_SECONDS if load else STORE_SECONDS)
        job = Job(metadata.job_id, load, list(metadata.keys), [int(row) for row in metadata.chunk_ids], until)
        if self._ready() is None or not self._traffic.heartbeat.healthy:
            self._transfers.fail(job)
        else:
            self._transfers.submit(job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Keys that could not be loaded count as missing for the requests that asked for them."""
        results = []
        for done in self._transfers.take():
            whole = len(done.good) == len(done.job.keys)
            partly = None
            if done.job.load and not whole:
                partly = tuple(done.good) or None
                self._lookups.miss(set(done.job.keys) - set(done.good))
            results.append(JobResult(done.job.id, whole, partly, done.seconds, len(done.good) * self.block_size_bytes))
        return results

    def drain_jobs(self) -> None:
        self._transfers.drain()

    def _move(self, job: Job) -> list[bytes]:
        """Stores or loads a job's chunks: the keys of those that are whole in the daemon, or in their rows."""
        space, rows = self._space, self._rows
        if space is None or rows is None:
            return []
        pairs = enumerate(zip(job.keys, job.rows, strict=True))
        items: list[Item] = [Chunk(at, key, rows[row]) for at, (key, row) in pairs]
        if job.load:
            good, _ = self._traffic.load((space, NO_CONTEXT, items), job.until)
            return [item.key for item in good]
        self._traffic.introduce(space)
        return job.keys[: self._traffic.store((space, NO_CONTEXT, items), job.until, lambda *_: None)]

    # -- life

    def _ready(self) -> chunks.ChunkSpace | None:
        """The namespace, once there are requests: only then is vLLM's hash seed final. None: the tier is off."""
        if self._space is None and not self._off:
            seed = get_none_hash_seed()
            if seed != DEFAULT_NONE_HASH_SEED and os.environ.get("PYTHONHASHSEED") is None:
                self._off = True
                how = "set PYTHONHASHSEED, or choose prefix_caching_hash_algo sha256"
                log.warning("kvtier tier is OFF: vLLM's hashes start from a random seed in each process: %s", how)
                return None
            self._space = chunks.ChunkSpace(self._base, replace(self._engine, seed=seed))
            digest, model = self._space.registered.digest.hex()[:16], self._base.model
            log.info("kvtier tier is on: namespace %s of %s, chunks of %d bytes", digest, model, self._space.nbytes)
        return self._space

    def shutdown(self) -> None:
        """Stores what waits, for a while, then ends threads and session and lets go of vLLM's pool."""
        self._lookups.close(CLOSE_SECONDS)
        if not self._transfers.close(CLOSE_SECONDS, self._traffic.closing.set):
            log.error("kvtier: a transfer has not ended in time")
        self._traffic.close()
        self._rows = None


def engine_of(spec: Any, chunk_bytes: int) -> chunks.Engine:
    """What vLLM tells a tier of its engine."""
    config, parallel = spec.config, spec.config.parallel
    fp8 = "fnuz" if current_platform.is_fp8_fnuz() else "fn"
    layout = f"{config.kv_cache_layout or 'unknown'}, {'canonical' if config.canonical_layout else 'as on its ranks'}"
    return chunks.Engine(
        model=str(config.model.name),
        version=str(vllm.__version__),
        platform=f"{current_platform.device_name}, {fp8}",
        dtype=str(config.model.dtype),
        layout=layout,
        groups=tuple((group.group_id, group.tokens_per_block, tuple(group.layer_names)) for group in config.groups),
        ranks=(parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size),
        worker_bytes=config.worker_kv_bytes_per_block,
        copies=1 if spec.replicated_layout else parallel.world_size,
        chunk_blocks=config.cache.blocks_per_chunk,
        chunk_bytes=chunk_bytes,
        hash_tokens=config.cache.tokens_per_hash,
        cpu=current_platform.is_cpu(),
    )
