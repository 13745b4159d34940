"""KV events in vLLM's form: a block is announced once all its ranks have stored it. Evictions are not announced."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.connectors.common.jobs import Save

MAX_WAITING = 4096  # saves that wait for the ranks' reports


class Expected:
    """Events that wait. `savers`: per group how many ranks report a save."""

    def __init__(self, savers: list[int]) -> None:
        self._savers = savers
        self._waiting: OrderedDict[int, tuple[BlockStored, int]] = OrderedDict()
        self._ready: list[BlockStored] = []

    def add(self, save: Save, request: Any, start: int, tokens: int, parent: bytes | None) -> None:
        """A save is on its way: blocks of `tokens` tokens from token `start` on, after the block with hash `parent`."""
        lora, hashes = request.lora_request, save.run.hashes
        event = BlockStored(
            block_hashes=[maybe_convert_block_hash(hash_) for hash_ in hashes],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=list(request.all_token_ids[start : start + len(hashes) * tokens]),
            block_size=tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            group_idx=save.run.group,
        )
        self._waiting[save.id] = (event, self._savers[save.run.group])
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)

    def stored(self, id_: int, ranks: int, blocks: int) -> None:
        """So many more ranks have stored at least that many leading blocks of a save."""
        event, waiting = self._waiting.pop(id_, (None, 0))
        if event is None or not blocks:
            return
        event.block_hashes, event.token_ids = event.block_hashes[:blocks], event.token_ids[: blocks * event.block_size]
        if waiting > ranks:
            self._waiting[id_] = (event, waiting - ranks)
        else:
            self._ready.append(event)

    def take(self) -> list[BlockStored]:
        """What is stored everywhere since the last call."""
        ready, self._ready = self._ready, []
        return ready
