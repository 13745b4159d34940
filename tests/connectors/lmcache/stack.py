"""A real LMCache storage manager, or our adapter alone, over a real daemon: how tests put objects in and get them back.

Every object's bytes follow from its number, so that every mix-up shows.
"""

from __future__ import annotations

import argparse
import json
import select
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lmcache.cli.commands.bench.l2_adapter_bench.data import make_aligned_tensor
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from kvtier.format.identity import f32_hex
from kvtier.format.layout import attention
from tests.support.daemon import PATIENCE, Daemon, MiB, description, until

torch.set_num_threads(1)

MODEL = "org/m"
LAYERS, TOKENS, HEADS, WIDTH = 2, 64, 4, 32
FP8_AND_SCALES = MemoryLayoutDesc(
    [torch.Size([2, LAYERS, TOKENS, HEADS * WIDTH]), torch.Size([2, LAYERS, HEADS])],
    [torch.float8_e4m3fn, torch.float32],
)
NBYTES = 2 * LAYERS * TOKENS * HEADS * WIDTH + 2 * LAYERS * HEADS * 4


def describe(path: Path, scale: float = 0.05, **fields: Any) -> Path:
    """A description of an FP8 model as `kvtier namespace` writes it."""
    layout = attention(LAYERS, HEADS, WIDTH, engine_tokens=16)
    scales = {f"{layer}.{part}": f32_hex(scale) * HEADS for layer in range(LAYERS) for part in "kv"}
    path.write_text(
        json.dumps(description(layout=layout, rule="checkpoint", scales=scales, **{"model": MODEL, **fields}).to_json())
    )
    return path


def params(daemon: Daemon, model: Path, **more: Any) -> dict[str, Any]:
    return {"namespaces": {MODEL: str(model)}, "socket": str(daemon.socket), **more}


def spec(daemon: Daemon, model: Path, *, eviction: dict[str, Any] | None = None, **more: Any) -> str:
    """What follows --l2-adapter."""
    said = {
        "type": "plugin",
        "module_path": "kvtier.connectors.lmcache",
        "class_name": "KvtierL2Adapter",
        "adapter_params": params(daemon, model, **more),
    }
    return json.dumps(said | ({"eviction": eviction} if eviction else {}))


def key(n: int, salt: str = "", *, rank: int = 0, world: int = 1, group: int = 0, model: str = MODEL) -> ObjectKey:
    return ObjectKey(n.to_bytes(32, "big"), model, ObjectKey.ComputeKVRank(world, rank, world, rank), group, salt)


def keys(numbers: Sequence[int], salt: str = "", **fields: Any) -> list[ObjectKey]:
    return [key(n, salt, **fields) for n in numbers]


def content(n: int, nbytes: int = NBYTES) -> torch.Tensor:
    """Byte i of object n."""
    made = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    made[:8] = torch.tensor(list(n.to_bytes(8, "little")), dtype=torch.uint8)[:nbytes]
    return made


def raw(found: Any) -> torch.Tensor:
    """The bytes of a memory object."""
    return torch.frombuffer(found.byte_array, dtype=torch.uint8)


def connect(made: Any) -> None:
    """Waits until our adapter has found the daemon: on a busy machine a first try may take longer than it lasts."""
    until(lambda: made.report_status()["daemon"] == "answers", "the adapter finds the daemon")


def restart(daemon: Daemon, made: Any) -> None:
    """Starts a daemon that has ended, once our adapter knows that it had, and waits until it has found the new one."""
    until(lambda: made.report_status()["daemon"] == "away", "the adapter misses the daemon")
    daemon.start()
    connect(made)


class Storage:
    """A storage manager with our adapter below. A context manager."""

    def __init__(self, *specs: str, l1_bytes: int = 64 * MiB) -> None:
        adapters = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=list(specs)))
        l1 = L1ManagerConfig(L1MemoryManagerConfig(l1_bytes, False, shm_name=""))
        self.manager = StorageManager(StorageManagerConfig(l1, EvictionConfig("LRU"), adapters))
        self.adapter: Any = self.manager.l2_adapters()[0][1]
        connect(self.adapter)

    def __enter__(self) -> Storage:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def status(self, name: str) -> int:
        return int(self.adapter.report_status().get(name, 0))

    def put(
        self, wanted: Sequence[ObjectKey], layout: MemoryLayoutDesc = FP8_AND_SCALES, *, stored: bool = True
    ) -> None:
        """Writes these objects into L1 and waits until the adapter has taken them (or failed to), and L1 lets go of
        them."""
        before = self.status("stored_objects") + self.status("store_failed_objects")
        taken = self.status("stored_objects")
        objects = self.manager.reserve_write(list(wanted), layout)
        assert len(objects) == len(wanted)
        for one in wanted:
            raw(objects[one]).copy_(content(int.from_bytes(one.chunk_hash, "big"), len(objects[one].byte_array)))
        self.manager.finish_write(list(wanted))
        until(
            lambda: self.status("stored_objects") + self.status("store_failed_objects") >= before + len(wanted),
            "objects are stored",
        )
        if stored:
            assert self.status("stored_objects") == taken + len(wanted)
        self.forget(wanted)

    def forget(self, wanted: Sequence[ObjectKey]) -> None:
        """Out of L1, which keeps what is still being stored."""
        until(lambda: self.manager.delete_l1_keys(list(wanted))[1] == 0, "L1 lets go")
        found = [manager.reserve_read(list(wanted)) for manager in self.manager._l1_managers_by_id.values()]
        assert all(one is None for by_key in found for _, one in by_key.values()), "L1 still has some of it"

    def fetch(self, wanted: Sequence[ObjectKey], layout: MemoryLayoutDesc = FP8_AND_SCALES) -> int:
        """How many leading objects come up; each is compared, and forgotten by L1 again."""
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(list(wanted), 0, layout)]))
        assert self.manager.wait_prefetch_status(handle, PATIENCE), "the prefetch does not end"
        hits = int(self.manager.query_prefetch_status(handle).hit_cells[0].popcount())
        found = list(wanted[:hits])
        if found:
            with self.manager.read_prefetched_results(found) as objects:
                assert objects is not None and len(objects) == hits
                for one, got in zip(found, objects, strict=True):
                    n = int.from_bytes(one.chunk_hash, "big")
                    assert torch.equal(raw(got), content(n, len(got.byte_array))), f"object {n} came back changed"
            self.manager.finish_read_prefetched(found)
            self.forget(found)
        return hits


# The adapter alone


def buffers(count: int, layout: MemoryLayoutDesc = FP8_AND_SCALES, numbers: Sequence[int] | None = None) -> list[Any]:
    """Memory objects, filled with the contents of these numbers."""
    nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True))
    memory = make_aligned_tensor(count * nbytes, 4096)
    made = []
    for at in range(count):
        part = memory[at * nbytes : (at + 1) * nbytes]
        part.copy_(
            content(numbers[at], nbytes) if numbers is not None else torch.full((nbytes,), 0xEE, dtype=torch.uint8)
        )
        metadata = MemoryObjMetadata(
            layout.shapes[0],
            layout.dtypes[0],
            at * nbytes,
            nbytes,
            1,
            fmt=MemoryFormat.KV_2LTD,
            shapes=layout.shapes,
            dtypes=layout.dtypes,
        )
        made.append(TensorMemoryObj(part, metadata, None))
    return made


@contextmanager
def adapter(daemon: Daemon, model: Path, *, wait: bool = True, **more: Any) -> Iterator[Any]:
    """Our adapter, made as LMCache makes it, and connected."""
    config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[spec(daemon, model, **more)])).adapters[0]
    made = create_l2_adapter(config, l1_memory_desc=None)
    try:
        if wait:
            connect(made)
        yield made
    finally:
        made.close()


def answer(descriptor: int, ask: Callable[[], Any], within: float = PATIENCE) -> Any:
    """What `ask` says once it says something; waits on the descriptor as LMCache's controllers do."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    said = ask()
    while said is None:
        assert poller.poll(within * 1000), "no answer"
        consume_fd(descriptor)
        said = ask()
    return said


def store(made: Any, wanted: Sequence[ObjectKey], objects: Sequence[Any]) -> int:
    """Stores and waits: bytes taken, -1 for a failure."""
    task = made.submit_store_task(list(wanted), list(objects))
    return int(answer(made.get_store_event_fd(), lambda: made.pop_completed_store_tasks() or None)[task])


def lookup(made: Any, wanted: Sequence[ObjectKey], layout: MemoryLayoutDesc | None = FP8_AND_SCALES) -> list[int]:
    """Looks up and locks; the places of those found."""
    groups = {one.object_group_id for one in wanted}
    empty = MemoryLayoutDesc([], [])
    task = made.submit_lookup_and_lock_task(list(wanted), dict.fromkeys(groups, layout or empty))
    found = answer(made.get_lookup_and_lock_event_fd(), lambda: made.query_lookup_and_lock_result(task))
    assert made.query_lookup_and_lock_result(task) is None, "answered twice"
    return [at for at in range(len(wanted)) if found.test(at)]


def load(made: Any, wanted: Sequence[ObjectKey], objects: Sequence[Any]) -> list[int]:
    """Loads; the places of those that came, each compared with what it must be."""
    task = made.submit_load_task(list(wanted), list(objects))
    found = answer(made.get_load_event_fd(), lambda: made.query_load_result(task))
    assert made.query_load_result(task) is None, "answered twice"
    places = [at for at in range(len(wanted)) if found.test(at)]
    for at in places:
        n = int.from_bytes(wanted[at].chunk_hash, "big")
        assert torch.equal(raw(objects[at]), content(n, len(objects[at].byte_array))), f"object {n} came back changed"
    return places
