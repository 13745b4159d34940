"""The scheduler's half: what to promise, load and save. Only `LookupQueue.ask` waits for the daemon, for 1 ms.

Per request it keeps a lookup (and what is held for it), one load at a time, and how far saving has been planned. A
promise is made for blocks that are held; a load that fails is remembered for the request's life and not tried again.
Saves are planned when the step that fills a block is planned; where that step depends on a load that may still fail
they are kept back until every rank has reported. Called by vLLM's scheduler, from one thread.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from vllm.distributed.kv_events import BlockStored

from kvtier.client.api import Client
from kvtier.connectors.common.jobs import Load, Run, Save, SeenBefore
from kvtier.connectors.common.lookups import GroupShape, LookupQueue, RequestLookup
from kvtier.connectors.common.lora import Adapters
from kvtier.connectors.common.ranks import EngineNamespace, RankId
from kvtier.connectors.vllm.engine_namespace import Naming, window_of
from kvtier.connectors.vllm.events import Expected
from kvtier.connectors.vllm.messages import StepPlan, StepReport
from kvtier.connectors.vllm.stats import KvtierStats
from kvtier.connectors.vllm.vllm_settings import VllmSettings
from kvtier.errors import Invalid, KvtierError
from kvtier.format.identity import request_context
from kvtier.format.layout import Range

log = logging.getLogger(__name__)


@dataclass(eq=False)
class RequestState:
    """One request. `context` None: not cached. `limit`: no token from here on is ever promised. `saved`: blocks
    planned, per group. `tainted`: what it computes may rest on blocks that were not loaded, so it is not saved."""

    request: Any
    context: bytes | None
    saved: list[int]
    limit: int | None = None
    lookup: RequestLookup | None = None
    offer: int = 0  # the token from which on blocks were promised
    load: tuple[Load, int, int, int] | None = None  # the load, its first and last token, ranks that have not reported
    tainted: bool = False


class SchedulerHalf:
    """Everything that `KvtierConnector` does in role SCHEDULER."""

    def __init__(self, config: Any, kv_config: Any, settings: VllmSettings, connect: Callable[[str], Client]) -> None:
        self._config, self._settings, self._connect = config, settings, connect
        transfer = config.kv_transfer_config
        self._loads_allowed, self._saves_allowed = transfer.is_kv_consumer, transfer.is_kv_producer
        self._block_tokens = [group.kv_cache_spec.block_size for group in kv_config.kv_cache_groups]
        self._tokens = [size * settings.engine_blocks for size in self._block_tokens]
        self._hash_tokens = kv_config.hash_block_size or config.cache_config.hash_block_size or self._block_tokens[0]
        self._align = math.lcm(*self._tokens)
        self._windows = [window_of(group.kv_cache_spec) for group in kv_config.kv_cache_groups]
        # A load of several groups, or a window that needs all its blocks, is whole or failed: only async loads say so.
        self._all_or_nothing = len(self._tokens) > 1 or any(self._windows)
        self._sync = settings.load == "sync" and not self._all_or_nothing
        self.manager: Any = None  # the engine's cache manager, once there is one
        self._naming: Naming | None = None
        self._namespace: EngineNamespace | None = None
        self._off = ""
        self._lookups: LookupQueue | None = None
        self._opening: tuple[bytes, dict[RankId, list[Range | None]]] = (b"", {})  # not sent to the workers yet
        self._requests: dict[str, RequestState] = {}
        self._loads: dict[int, RequestState] = {}
        self._planned: list[Load] = []
        self._cancelled: list[int] = []
        self._unsure: set[int] = set()  # sync loads that not every rank has reported
        self._kept_back: list[tuple[RequestState, Save]] = []
        self._seen = SeenBefore() if settings.save_when == "second_hit" else None
        self._adapters = Adapters()
        self._generation = b""
        self._next_id = 0
        self._stats = KvtierStats()
        self._said_mode = ""
        events = config.kv_events_config
        self._wants_events = bool(events and events.enable_kv_cache_events)

    # -- the namespace

    def hear(self, reports: dict[RankId, str]) -> None:
        """The ranks' handshakes, once their weights are loaded. Blocks while local weights are fingerprinted."""
        try:
            self._naming = Naming(self._config, self._settings, reports)
        except (KvtierError, OSError) as error:
            self._turn_off(error)

    def _turn_off(self, error: Exception) -> None:
        self._off = str(error) or type(error).__name__
        log.error("kvtier is OFF, every lookup is a miss and nothing is saved: %s", self._off)

    @property
    def _ready(self) -> bool:
        """Whether there is a namespace. Made at the first request: only then is the engine's hash seed final."""
        if self._lookups is None and not self._off:
            try:
                self._open()
            except KvtierError as error:
                self._turn_off(error)
        return self._lookups is not None

    def _open(self) -> None:
        if self._naming is None:
            raise Invalid("no rank has reported what it loaded")
        self._namespace = named = self._naming.namespace(self._tokens, self._hash_tokens)
        client = self._connect(self._settings.socket)
        ns = client.register(named.description)
        by_group = zip(*named.ranges.values(), strict=True)
        parts = tuple(tuple(dict.fromkeys(part for part in ranks if part is not None)) for ranks in by_group)
        shape = GroupShape(ns, tuple(self._tokens), tuple(self._windows), parts, self._align)
        self._lookups = LookupQueue(client, shape)
        self._opening = (named.description.canonical, named.ranges)
        self._expected = Expected([len(group) for group in parts])
        log.info("kvtier is on: mode %s, namespace %s of %s", named.mode, ns.digest.hex()[:16], named.description.model)

    # -- requests

    def add(self, request: Any) -> None:
        """A new request."""
        self._requests[request.request_id] = RequestState(request, self._context(request), [0] * len(self._tokens))

    def _context(self, request: Any) -> bytes | None:
        """The request context. None: not cached, as its adapter's weights are not known for certain."""
        if request.resumable:
            return None
        adapter = b""
        if (lora := request.lora_request) is not None:
            digest = self._adapters.digest(lora.lora_int_id, lora.lora_path, lora.load_inplace)
            if digest is None:
                return None
            adapter = digest
        if self._generation:
            adapter = blake2b(adapter + self._generation, digest_size=32).digest()
        return request_context(adapter, request.cache_salt)

    def match(self, request: Any, local: int) -> tuple[int | None, bool]:
        """(tokens to load beyond the first `local`, whether between steps); (None, False): ask later."""
        asked = self._requests.get(request.request_id)
        if asked is None or asked.context is None or request.skip_reading_prefix_cache:
            return 0, False
        if not self._loads_allowed or not self._ready:
            return 0, False
        known = min(request.num_tokens - 1, len(request.block_hashes) * self._hash_tokens)
        if asked.limit is not None:
            known = min(known, asked.limit)
        top = known - known % self._align
        if top <= local:
            return 0, False
        assert self._lookups is not None
        lookup = asked.lookup
        if lookup is not None and lookup.start > local:  # the engine has evicted part of what it had
            self._drop(asked)
            lookup = None
        if lookup is None:
            sizes = enumerate(self._tokens)
            hashes = [self._hashes(request, group, local // tokens, top // tokens) for group, tokens in sizes]
            lookup = asked.lookup = RequestLookup(local, top, hashes, asked.context)
            self._lookups.ask(lookup)
        end = lookup.answer()
        if end is None:
            return None, False
        asked.offer, found = local, min(end, top) - local
        return (found, not self._sync) if found > 0 else (0, False)

    def _hashes(self, request: Any, group: int, low: int, high: int) -> list[bytes]:
        """Content hashes of kvtier blocks: each that of its last engine block."""
        step = self._tokens[group] // self._hash_tokens
        return [bytes(hash_) for hash_ in request.block_hashes[(low + 1) * step - 1 : high * step : step]]

    def allocated(self, request: Any, table: tuple[list[int], ...], external: int) -> None:
        """The engine has blocks for the request; `external` of its tokens are to be loaded into them."""
        asked = self._requests.get(request.request_id)
        if asked is None or asked.load is not None or asked.lookup is None:
            return
        lookup, low = asked.lookup, asked.offer
        if failure := lookup.failure:
            self._stats.add("lookup_failures", 1, failure)
        else:
            self._stats.add("lookup_queried_blocks", (lookup.top - low) // self._align)
        if not external:
            self._drop(asked)
            return
        assert asked.context is not None
        self._stats.add("lookup_hit_blocks", external // self._align)
        self._stats.add("load_asked_blocks", external // self._align)
        runs, per, high = [], self._settings.engine_blocks, low + external
        for group, tokens in enumerate(self._tokens):
            size = self._block_tokens[group]
            wanted = [block if at >= low // size else 0 for at, block in enumerate(table[group][: high // size])]
            first = low // tokens
            entries = [wanted[at * per : (at + 1) * per] for at in range(first, high // tokens)]
            while entries and not any(entries[0]):  # out of a sliding window
                entries.pop(0)
                first += 1
            if entries:
                runs.append(Run(group, self._hashes(request, group, first, first + len(entries)), entries))
        self._next_id += 1
        load = Load(self._next_id, request.request_id, asked.context, self._sync, self._all_or_nothing, runs)
        parallel = self._config.parallel_config
        asked.load = (load, low, high, parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
        asked.saved = [high // tokens for tokens in self._tokens]
        self._loads[load.id] = asked
        self._planned.append(load)
        if self._sync:
            self._unsure.add(load.id)

    def finished(self, request: Any) -> None:
        """The request is over, at whatever point it was."""
        asked = self._requests.pop(request.request_id, None)
        if asked is None:
            return
        if asked.load is not None:
            load = asked.load[0]
            self._loads.pop(load.id, None)
            self._unsure.discard(load.id)
            if load in self._planned and load.sync:
                self._planned.remove(load)
            else:  # an async load is reported as received all the same: the engine waits for that
                self._cancelled.append(load.id)
        self._drop(asked)

    def _drop(self, asked: RequestState) -> None:
        if asked.lookup is not None and self._lookups is not None:
            self._lookups.drop(asked.lookup)
        asked.lookup = None

    # -- steps

    def plan(self, output: Any) -> StepPlan:
        """What the workers do in this step."""
        plan = StepPlan()
        if not self._ready:
            return plan
        (plan.description, plan.ranges), self._opening = self._opening, (b"", {})
        plan.loads, self._planned = self._planned, []
        plan.cancelled, self._cancelled = self._cancelled, []
        plan.idle = not output.total_num_scheduled_tokens
        plan.fence = self._handed_out(output)
        for load in plan.loads:
            for run in load.runs:
                plan.fence |= run.block_ids()
        self._kept_back = [(asked, save) for asked, save in self._kept_back if not save.run.block_ids() & plan.fence]
        if self._saves_allowed:
            saves = self._saves(output)
            if self._unsure:
                self._kept_back += saves
            else:
                plan.saves = [save for _, save in self._kept_back + saves]
                self._kept_back = []
        return plan

    def _handed_out(self, output: Any) -> set[int]:
        """Engine blocks that get a new owner in this step: whatever they held is overwritten once it runs."""
        fence: set[int] = set()
        for new in output.scheduled_new_reqs:
            for group, ids in enumerate(new.block_ids):
                fence.update(ids[new.num_computed_tokens // self._block_tokens[group] :])
        cached = output.scheduled_cached_reqs
        columns = (cached.req_ids, cached.num_computed_tokens, cached.new_block_ids)
        for rid, computed, new_ids in zip(*columns, strict=True):
            for group, ids in enumerate(new_ids or ()):
                fence.update(ids[computed // self._block_tokens[group] :] if rid in cached.resumed_req_ids else ids)
        fence.discard(0)
        return fence

    def _saves(self, output: Any) -> list[tuple[RequestState, Save]]:
        """Blocks that are full after this step and not planned yet, local hits too: what is stored costs a question."""
        saves = []
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for rid, new_tokens in output.num_scheduled_tokens.items():
            asked = self._requests.get(rid)
            if asked is None or asked.context is None or asked.tainted:
                continue
            if rid in cached.resumed_req_ids and asked.load is None:
                asked.saved = [0] * len(self._tokens)
            hashed = len(asked.request.block_hashes) * self._hash_tokens
            full, table = min(computed[rid] + new_tokens, asked.request.num_tokens, hashed), None
            for group, tokens in enumerate(self._tokens):
                low, high = asked.saved[group], full // tokens
                if high <= low:
                    continue
                table = table or output.kv_connector_block_state.get_block_ids(rid)
                save = self._save(asked, group, low, high, table[group])
                asked.saved[group] = high
                if save is not None:
                    saves.append((asked, save))
        return saves

    def _save(self, asked: RequestState, group: int, low: int, high: int, table: list[int]) -> Save | None:
        per = self._settings.engine_blocks
        run = Run(group)
        for at, hash_ in enumerate(self._hashes(asked.request, group, low, high), low):
            blocks = table[at * per : (at + 1) * per]
            if all(blocks) and len(blocks) == per and (self._seen is None or self._seen.before(group, hash_)):
                run.hashes.append(hash_)
                run.blocks.append(blocks)
        if not run.hashes:
            return None
        self._next_id += 1
        save = Save(self._next_id, asked.context or b"", run)
        if self._wants_events and len(run.hashes) == high - low:
            parent = self._hashes(asked.request, group, low - 1, low)[0] if low else None
            self._expected.add(save, asked.request, low * self._tokens[group], self._tokens[group], parent)
        return save

    # -- what came back

    def learn(self, report: StepReport | None) -> None:
        """The ranks' reports of one step."""
        if report is None:
            return
        for id_, (ranks, blocks) in report.loads.items():
            self._loaded(id_, ranks, blocks)
        for id_, (ranks, blocks) in report.saves.items():
            self._expected.stored(id_, ranks, blocks)

    def _loaded(self, id_: int, ranks: int, good: int) -> None:
        asked = self._loads.get(id_)
        if asked is None or asked.load is None:
            return
        load, low, high, waiting = asked.load
        total = sum(len(run.hashes) for run in load.runs)
        if good < total:  # whatever the other ranks say, this request never asks for these again
            bad = low if self._all_or_nothing else max(low, (high // self._align - total + good) * self._align)
            asked.limit = bad if asked.limit is None else min(asked.limit, bad)
        if waiting > ranks:
            asked.load = (load, low, high, waiting - ranks)
            return
        served = (min(high, asked.limit) if asked.limit is not None else high) - low
        served -= served % self._align
        self._stats.add("load_served_blocks", served // self._align)
        self._stats.add("load_failed_blocks", (high - low - served) // self._align)
        self._stats.add("hit_tokens", served)
        del self._loads[id_]
        asked.load = None
        self._drop(asked)
        self._unsure.discard(id_)
        if served < high - low:
            asked.saved = [(low + served) // tokens for tokens in self._tokens]
            if load.sync:
                self._distrust(load.runs[0].block_ids(good))

    def _distrust(self, bad: set[int]) -> None:
        """A step has run on blocks that were not loaded. What it and later ones computed is not saved, and the engine
        must not share it: its own cache has had the hashes of these blocks since they were allocated, and would keep
        them if the request were aborted now."""
        self._kept_back = []
        for rid, asked in self._requests.items():
            asked.tainted = True
            table = self.manager.get_block_ids(rid)[0] if self.manager is not None else []
            first = next((at for at, block in enumerate(table) if block in bad), None)
            if first is not None:
                self.manager.evict_blocks(set(table[first:]))

    # -- events, numbers, the end

    def take_events(self) -> list[BlockStored]:
        """Blocks that are stored on every rank since the last call."""
        return self._expected.take() if self._wants_events and self._lookups is not None else []

    def take_stats(self) -> KvtierStats | None:
        """What was counted since the last call."""
        stats, self._stats = self._stats, KvtierStats()
        if self._lookups is not None and self._lookups.heartbeat.changed():
            stats.data["healthy:scheduler"] = int(self._lookups.heartbeat.healthy)
        mode = self._namespace.mode if self._namespace else "off" if self._off else ""
        if mode != self._said_mode:
            self._said_mode = mode
            stats.data[f"mode:{mode}"] = 1
        return None if stats.is_empty() else stats

    def reset(self) -> bool:
        """Nothing from before is served or added to any more: what follows is under a context of this engine's own."""
        self._generation = os.urandom(32)
        for asked in self._requests.values():
            self._drop(asked)
            asked.context = None
        self._kept_back, self._adapters = [], Adapters()
        return True

    def close(self) -> None:
        """Ends the thread and the session."""
        for asked in self._requests.values():
            self._drop(asked)
        if self._lookups is not None:
            self._lookups.close()
