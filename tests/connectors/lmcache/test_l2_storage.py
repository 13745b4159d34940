"""LMCache's own storage manager over our adapter and a real daemon: what goes down from L1 comes up again bit for bit,
or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmcache
import pytest
import torch
from google.protobuf import __version__ as protobuf
from lmcache.v1.distributed.api import MemoryLayoutDesc

from kvtier.client.answers import RegisteredNamespace
from kvtier.connectors.common.object_naming import Space, content_hash, context_of, form_of
from kvtier.format.identity import Description
from tests.connectors.lmcache.stack import (
    FP8_AND_SCALES,
    LAYERS,
    MODEL,
    NBYTES,
    TOKENS,
    Storage,
    content,
    describe,
    key,
    keys,
    restart,
    spec,
)
from tests.support.daemon import Daemon, MiB, until

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(240)]


def test_this_is_the_pinned_lmcache_beside_a_protobuf_it_can_live_with() -> None:
    assert lmcache.__version__ == "0.5.6"
    assert protobuf.startswith("6.")


def test_fp8_with_its_scales_comes_back_bit_for_bit(daemon: Daemon, model: Path) -> None:
    with Storage(spec(daemon, model)) as storage:
        storage.put(keys(range(8)))
        assert storage.fetch([*keys(range(8)), key(99)]) == 8
        assert storage.fetch([key(99)]) == 0
        usage = storage.adapter.get_usage()
        assert usage.total_bytes_used == 8 * NBYTES and dict(usage.bytes_by_cache_salt) == {"": 8 * NBYTES}
        until(lambda: storage.status("locked_objects") == 0, "LMCache unlocks what it has loaded")
    until(lambda: daemon.status()["held_bytes"] == 0, "nothing is held after the end")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.float8_e5m2], ids=str)
def test_objects_of_one_tensor(daemon: Daemon, model: Path, dtype: torch.dtype) -> None:
    layout = MemoryLayoutDesc([torch.Size([2, LAYERS, TOKENS, 128])], [dtype])
    with Storage(spec(daemon, model)) as storage:
        storage.put(keys(range(5)), layout)
        assert storage.fetch(keys(range(5)), layout) == 5


def test_another_lmcache_server_finds_it(daemon: Daemon, model: Path) -> None:
    with Storage(spec(daemon, model)) as storage:
        storage.put(keys(range(8)))
    with Storage(spec(daemon, model)) as again:
        assert again.fetch(keys(range(8))) == 8
        assert again.adapter.get_usage().total_bytes_used == 8 * NBYTES  # what it found counts against quotas too


def registered(model: Path, layout: MemoryLayoutDesc = FP8_AND_SCALES) -> RegisteredNamespace:
    """The namespace in which the adapter stores."""
    import json

    base = Description.from_json(json.loads(model.read_text()))
    return Space(base, form_of(layout.shapes, layout.dtypes)).registered


def cool(daemon: Daemon, model: Path, count: int) -> None:
    """Waits until these objects are on the SSD, and restarts the daemon."""
    with daemon.client() as client:
        answer = client.flush(registered(model), [content_hash(one) for one in keys(range(count))])
        assert answer == count, answer.reason
    assert daemon.terminate() == 0


def test_a_restarted_daemon_serves_from_its_ssd(tmp_path: Path, model: Path) -> None:
    with Daemon(64 * MiB, "--ssd", f"path={tmp_path}/ssd,size=128MiB,free=0") as daemon:
        with Storage(spec(daemon, model)) as storage:
            storage.put(keys(range(8)))
            cool(daemon, model, 8)
            restart(daemon, storage.adapter)
            assert storage.fetch(keys(range(8))) == 8
        assert daemon.status()["promoted_blocks_total"] == 8


def test_a_flipped_bit_ends_the_prefix_there(tmp_path: Path, model: Path) -> None:
    with Daemon(64 * MiB, "--ssd", f"path={tmp_path}/ssd,size=128MiB,free=0") as daemon:
        with Storage(spec(daemon, model)) as storage:
            storage.put(keys(range(8)))
        cool(daemon, model, 8)
        assert flip(tmp_path / "ssd", content(3).numpy().tobytes()) == 1
        daemon.start()
        with Storage(spec(daemon, model)) as storage:
            assert storage.fetch(keys(range(8))) == 3
            assert storage.fetch(keys(range(8))) == 3
            assert storage.fetch(keys(range(4, 8))) == 4


def flip(directory: Path, whole: bytes) -> int:
    """Flips a bit in the middle of every copy of these bytes in the files of a directory."""
    flipped = 0
    for path in directory.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(whole)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + len(whole) // 2)
                file.write(bytes([whole[len(whole) // 2] ^ 0x10]))
            flipped += 1
    return flipped


def test_another_description_finds_nothing(daemon: Daemon, model: Path, tmp_path: Path) -> None:
    """Object keys are equal: LMCache's own tiers would serve all of it."""
    with Storage(spec(daemon, model)) as storage:
        storage.put(keys(range(4)))
    changes: list[dict[str, Any]] = [
        {"revision": "2" * 40},
        {"scale": 0.0625},
        {"rope": {"rope_theta": 1}},
        {"backend": "K | V (other)"},
        {"artifact": "ab" * 32},
        {"codec": 2},
    ]
    found = []
    for changed in [*changes, {}]:
        with Storage(spec(daemon, describe(tmp_path / "other.json", **changed))) as other:
            found.append(other.fetch(keys(range(4))))
    assert found == [0] * len(changes) + [4]


def test_equal_bytes_of_another_dtype_or_shape_are_another_object(daemon: Daemon, model: Path) -> None:
    """LMCache's fs tiers serve e4m3 as e5m2, and half a BF16 object as FP8."""
    shape = torch.Size([2, LAYERS, TOKENS, 128])
    stored = MemoryLayoutDesc([shape], [torch.float8_e4m3fn])
    others = [
        MemoryLayoutDesc([shape], [torch.float8_e5m2]),
        MemoryLayoutDesc([shape], [torch.bfloat16]),
        MemoryLayoutDesc([torch.Size([2, LAYERS, 128, TOKENS])], [torch.float8_e4m3fn]),
        MemoryLayoutDesc([torch.Size([2, LAYERS, TOKENS, 64])], [torch.bfloat16]),
    ]
    with Storage(spec(daemon, model)) as storage:
        storage.put(keys(range(3)), stored)
        assert [storage.fetch(keys(range(3)), other) for other in others] == [0] * 4
        assert storage.fetch(keys(range(3)), stored) == 3


def test_salts_ranks_and_object_groups_are_kept_apart(daemon: Daemon, model: Path) -> None:
    with Storage(spec(daemon, model)) as storage:
        storage.put(keys(range(3), "tenant-a"))
        storage.put(keys(range(3, 6), world=2, rank=1))
        assert storage.fetch(keys(range(3), "tenant-b")) == storage.fetch(keys(range(3))) == 0
        assert storage.fetch(keys(range(3), "tenant-a")) == 3
        assert (
            storage.fetch(keys(range(3, 6), world=2, rank=0)) == storage.fetch(keys(range(3, 6), world=4, rank=1)) == 0
        )
        assert storage.fetch(keys(range(3, 6), world=2, rank=1)) == 3
        assert dict(storage.adapter.get_usage().bytes_by_cache_salt) == {"tenant-a": 3 * NBYTES, "": 3 * NBYTES}
        assert "tenant-a" not in daemon.log.read_text()
        assert context_of("tenant-a") != context_of("tenant-b") != context_of("")


def test_256_chunks_at_once_each_with_its_own_content(daemon: Daemon, model: Path) -> None:
    with Storage(spec(daemon, model)) as storage:
        storage.put(keys(range(256)))
        assert storage.fetch(keys(range(256))) == 256
        storage.put(keys(range(1000, 1256)))
        mixed = [key(n) for pair in zip(range(256), range(1000, 1256), strict=True) for n in pair]
        assert storage.fetch(mixed[:256]) == 256 and storage.fetch(mixed[256:]) == 256


def test_a_missing_chunk_ends_the_prefix_and_spares_the_others(daemon: Daemon, model: Path) -> None:
    with Storage(spec(daemon, model)) as storage:
        storage.put(keys(range(8)))
        storage.adapter.delete([key(5)])
        assert storage.fetch(keys(range(8))) == 5
        assert storage.fetch(keys(range(6, 8))) == 2


def test_lmcache_goes_on_while_the_daemon_is_away(daemon: Daemon, model: Path) -> None:
    with Storage(spec(daemon, model)) as storage:
        storage.put(keys(range(4)))
        daemon.kill()
        assert storage.fetch(keys(range(4))) == 0
        storage.put(keys(range(10, 14)), stored=False)
        assert storage.adapter.report_status()["is_healthy"], "an absent daemon is no reason to restart LMCache"
        restart(daemon, storage.adapter)
        assert storage.fetch(keys(range(4))) == 0  # nothing below the arena: it died with it
        storage.put(keys(range(4)))
        assert storage.fetch(keys(range(4))) == 4


def test_lmcaches_quotas_see_and_evict_what_a_salt_has_here(daemon: Daemon, model: Path) -> None:
    """IsolatedLRU: a salt without a quota keeps nothing, one over its quota keeps what fits."""
    with Storage(
        spec(
            daemon, model, eviction={"eviction_policy": "IsolatedLRU", "trigger_watermark": 1.0, "eviction_ratio": 0.5}
        )
    ) as storage:
        storage.manager.quota_manager.set_quota("paid", 100 * NBYTES)
        storage.put(keys(range(6), "paid"))
        storage.put(keys(range(6), "stranger"))
        until(
            lambda: dict(storage.adapter.get_usage().bytes_by_cache_salt) == {"paid": 6 * NBYTES},
            "the stranger's objects are evicted",
        )
        until(lambda: daemon.status()["known_blocks"] == 6, "and forgotten by the daemon")
        assert storage.fetch(keys(range(6), "paid")) == 6
        storage.manager.quota_manager.set_quota("paid", 4 * NBYTES)
        until(lambda: storage.adapter.get_usage().total_bytes_used < 4 * NBYTES, "eviction follows a smaller quota")
        until(
            lambda: daemon.status()["known_blocks"] * NBYTES == storage.adapter.get_usage().total_bytes_used,
            "in the daemon too",
        )


def test_lmcaches_own_eviction_keeps_to_a_capacity(daemon: Daemon, model: Path) -> None:
    capacity = 8 * NBYTES
    rule = {"eviction_policy": "LRU", "trigger_watermark": 0.9, "eviction_ratio": 0.5}
    with Storage(spec(daemon, model, eviction=rule, max_capacity_gb=capacity / 2**30)) as storage:
        storage.put(keys(range(12)))
        until(lambda: storage.adapter.get_usage().usage_fraction < 0.9, "LMCache evicts")
        until(
            lambda: daemon.status()["known_blocks"] * NBYTES == storage.adapter.get_usage().total_bytes_used,
            "in the daemon too",
        )


def test_a_model_without_a_description_is_not_stored(daemon: Daemon, model: Path) -> None:
    with Storage(spec(daemon, model)) as storage:
        storage.put(keys(range(3), model="org/other"), stored=False)
        assert storage.fetch(keys(range(3), model="org/other")) == 0
        assert daemon.status()["known_blocks"] == 0
        storage.put(keys(range(3)))
        assert storage.fetch(keys(range(3))) == 3
    assert MODEL != "org/other"
