"""Our adapter as LMCache's controllers see it: every task answered exactly once, whatever happens to the daemon; what
it tells of what it has."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener

from kvtier.connectors.lmcache import adapter as adapters
from kvtier.connectors.lmcache import inventory
from kvtier.connectors.lmcache.lmcache_settings import KvtierL2AdapterConfig
from kvtier.errors import Invalid
from tests.connectors.lmcache.stack import (
    FP8_AND_SCALES,
    MODEL,
    NBYTES,
    adapter,
    answer,
    buffers,
    connect,
    describe,
    key,
    keys,
    load,
    lookup,
    params,
    restart,
    store,
)
from tests.support.daemon import PATIENCE, Daemon, MiB, until

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(240)]


class Listener(L2AdapterListener):  # type: ignore[misc]
    """Writes down what LMCache's eviction is told."""

    def __init__(self) -> None:
        self.stored: list[tuple[ObjectKey, int]] = []
        self.accessed: list[ObjectKey] = []
        self.deleted: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.deleted += keys


def put(made: Any, numbers: Sequence[int], salt: str = "", **fields: Any) -> None:
    assert store(made, keys(numbers, salt, **fields), buffers(len(numbers), numbers=numbers)) == len(numbers) * NBYTES


def eventually_put(made: Any, n: int) -> None:
    """For tests with the deadlines that users have: on a busy machine a store may miss one."""
    until(lambda: store(made, keys([n]), buffers(1, numbers=[n])) == NBYTES, "it is stored")


def found(made: Any, wanted: Sequence[ObjectKey]) -> list[int]:
    """Looks up, loads what is there and unlocks it: the places of what came."""
    places = lookup(made, wanted)
    there = [wanted[at] for at in places]
    got = load(made, there, buffers(len(there)))
    made.submit_unlock(there)
    return [places[at] for at in got]


# Settings


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, "has no identity"),
        ({"namespaces": {}}, "has no identity"),
        ({"namespaces": "model.json"}, "has no identity"),
        ({"namespaces": {MODEL: ""}}, "has no identity"),
        ({"namespaces": {MODEL: "/nowhere/model.json"}}, "cannot read"),
        ({"namespaces": {MODEL: "{}"}}, "is not a description"),
        ({"namespaces": {MODEL: "fine"}, "sockets": "/x"}, "no setting sockets"),
        ({"namespaces": {MODEL: "fine"}, "socket": ""}, "socket is a path"),
        ({"namespaces": {MODEL: "fine"}, "max_capacity_gb": -1}, "max_capacity_gb"),
        ({"namespaces": {MODEL: "fine"}, "max_capacity_gb": True}, "max_capacity_gb"),
    ],
)
def test_settings_are_refused_by_name(said: dict[str, Any], why: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("{}")
    files = {"fine": str(model), "{}": str(tmp_path / "empty.json")}
    if isinstance(said.get("namespaces"), dict):
        said = {**said, "namespaces": {name: files.get(file, file) for name, file in said["namespaces"].items()}}
    with pytest.raises(Invalid, match=why):
        KvtierL2AdapterConfig.from_dict(said)


def test_settings_have_defaults_and_help(model: Path) -> None:
    made = KvtierL2AdapterConfig.from_dict({"namespaces": {MODEL: str(model)}})
    assert made.socket.endswith("kvtier.sock") and made.max_capacity_bytes == 0
    assert all(name in KvtierL2AdapterConfig.help() for name in ("namespaces", "socket", "max_capacity_gb"))


def test_lmcache_makes_it_from_plain_parameters_too(daemon: Daemon, model: Path) -> None:
    from kvtier.connectors.lmcache import KvtierL2Adapter

    made = KvtierL2Adapter(params(daemon, model), l1_memory_desc=None)
    try:
        connect(made)
        put(made, [1])
    finally:
        made.close()
        made.close()


# Tasks


def test_descriptors_are_three_and_closed_at_the_end(daemon: Daemon, model: Path) -> None:
    with adapter(daemon, model) as made:
        fds = {made.get_store_event_fd(), made.get_lookup_and_lock_event_fd(), made.get_load_event_fd()}
        assert len(fds) == 3 and all(os.fstat(fd) for fd in fds)


def test_each_of_many_tasks_of_many_threads_is_answered_once(daemon: Daemon, model: Path) -> None:
    with adapter(daemon, model) as made:
        put(made, range(64))
        asked: dict[int, int] = {}
        lock = threading.Lock()

        def ask(start: int) -> None:
            for n in range(start, start + 50):
                wanted = keys([n % 80])
                task = made.submit_lookup_and_lock_task(wanted, {0: FP8_AND_SCALES})
                with lock:
                    assert task not in asked
                    asked[task] = n % 80
                made.submit_unlock(wanted)

        threads = [threading.Thread(target=ask, args=(start,)) for start in range(0, 200, 50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        answers: dict[int, bool] = {}

        def all_answered() -> bool:
            for task in set(asked) - set(answers):
                said = made.query_lookup_and_lock_result(task)
                if said is not None:
                    answers[task] = said.test(0)
            return len(answers) == 200

        until(all_answered, "200 answers")
        assert {task: n < 64 for task, n in asked.items()} == answers
        assert all(made.query_lookup_and_lock_result(task) is None for task in asked)


def test_a_task_that_cannot_be_done_fails_and_the_next_one_works(daemon: Daemon, model: Path) -> None:
    class Broken:
        @property
        def byte_array(self) -> Any:
            raise RuntimeError("this memory is elsewhere")

        metadata = buffers(1)[0].metadata

    with adapter(daemon, model) as made:
        assert store(made, keys([1]), [Broken()]) == -1
        assert load(made, keys([1]), [Broken()]) == []
        short = buffers(1)
        short[0].set_used_size(NBYTES - 1)  # as a serde does
        assert store(made, keys([1]), short) == -1
        assert store(made, keys([1], model="org/other"), buffers(1)) == -1
        assert lookup(made, keys([1])) == []
        assert store(made, [], []) == 0 and lookup(made, []) == [] and load(made, [], []) == []
        put(made, [1, 2])
        assert found(made, keys([1, 2])) == [0, 1]
        assert made.report_status()["is_healthy"]


def test_chunks_under_pythons_own_hash_are_not_stored(daemon: Daemon, model: Path) -> None:
    """LMCache falls back to it where its algorithm cannot be loaded; it has 8 bytes, and differs between processes."""
    wanted = [ObjectKey(n.to_bytes(8, "big"), MODEL, 0) for n in range(3)]
    with adapter(daemon, model) as made:
        assert store(made, wanted, buffers(3)) == -1
        assert lookup(made, wanted) == [] and load(made, wanted, buffers(3)) == []
        put(made, [1])
        assert daemon.status()["known_blocks"] == 1


def test_some_of_a_task_may_be_refused_and_the_rest_is_stored(daemon: Daemon, model: Path) -> None:
    """LMCache hears of a failed task; what is whole is there all the same, and counted."""
    with adapter(daemon, model) as made:
        objects = buffers(3, numbers=[1, 2, 3])
        objects[1].set_used_size(10)
        assert store(made, keys([1, 2, 3]), objects) == -1
        assert found(made, keys([1, 2, 3])) == [0, 2]
        assert made.get_usage().total_bytes_used == 2 * NBYTES


@pytest.mark.usefixtures("impatient")
def test_more_tasks_than_the_queue_has_room_for_fail_at_once(
    daemon: Daemon, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "MAX_WAITING", 2)
    with adapter(daemon, model) as made:
        eventually_put(made, 1)
        with daemon.stopped():
            asked = [made.submit_lookup_and_lock_task(keys([1]), {0: FP8_AND_SCALES}) for _ in range(20)]
        answered = [
            answer(made.get_lookup_and_lock_event_fd(), lambda task=task: made.query_lookup_and_lock_result(task))
            for task in asked
        ]
        assert len(answered) == 20 and sum(not one.test(0) for one in answered) >= 16


def test_a_task_that_has_waited_for_long_leaves_its_buffers_alone(
    daemon: Daemon, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache's locks on them end after 300 s: they may be another's by then."""
    monkeypatch.setattr(adapters, "WAIT_SECONDS", 0.5)
    with adapter(daemon, model) as made:
        with daemon.stopped():
            asked = [made.submit_store_task(keys([n]), buffers(1, numbers=[n])) for n in range(3)]
            time.sleep(1)
        done: dict[int, Any] = {}
        until(lambda: done.update(made.pop_completed_store_tasks()) or len(done) == 3, "all are answered")
        assert [int(done[task]) for task in asked[1:]] == [-1, -1]
        assert set(lookup(made, keys(range(3)))) <= {0}


@pytest.mark.usefixtures("impatient")
def test_submitting_does_not_wait_for_a_daemon_that_is_deaf(daemon: Daemon, model: Path) -> None:
    """Wide of any deadline: 60 submissions take what one call to the daemon may."""
    with adapter(daemon, model) as made:
        eventually_put(made, 1)
        with daemon.stopped():
            objects = buffers(1, numbers=[1])
            began = time.monotonic()
            stores = [made.submit_store_task(keys([n]), objects) for n in range(20)]
            lookups = [made.submit_lookup_and_lock_task(keys([1]), {0: FP8_AND_SCALES}) for _ in range(20)]
            loads = [made.submit_load_task(keys([1]), buffers(1)) for _ in range(20)]
            made.submit_unlock(keys([1]))
            assert time.monotonic() - began < 10
            done: dict[int, Any] = {}
            until(lambda: done.update(made.pop_completed_store_tasks()) or len(done) == 20, "stores are answered")
            assert sorted(done) == sorted(stores)
            for task in lookups:
                assert not answer(
                    made.get_lookup_and_lock_event_fd(), lambda task=task: made.query_lookup_and_lock_result(task)
                ).test(0)
            for task in loads:
                assert not answer(made.get_load_event_fd(), lambda task=task: made.query_load_result(task)).test(0)
        connect(made)
        until(lambda: found(made, keys([1])) == [0], "it is found")


@pytest.mark.usefixtures("impatient")
def test_closing_answers_what_waits(daemon: Daemon, model: Path) -> None:
    with adapter(daemon, model) as made:
        eventually_put(made, 1)
        with daemon.stopped():
            asked = [made.submit_load_task(keys([1]), buffers(1)) for _ in range(30)]
            made.close()
        assert all(made.query_load_result(task) is not None for task in asked)
        late = made.submit_load_task(keys([1]), buffers(1))
        assert not made.query_load_result(late).test(0)
        assert made.report_status()["is_healthy"]
    until(lambda: daemon.status()["sessions"] == 1, "its session ends")


# The daemon dies

Step = Callable[[Any], Any]
STAGES = [
    "before store",
    "in store",
    "before lookup",
    "in lookup",
    "before load",
    "in load",
    "before unlock",
    "before delete",
]


@pytest.mark.parametrize("stage", STAGES)
def test_the_daemon_dies_at_each_stage(daemon: Daemon, model: Path, stage: str) -> None:
    """Whatever stage: each task is answered once, nothing that came is wrong, and with a daemon again everything works
    again."""
    numbers = range(8)
    with adapter(daemon, model) as made:
        put(made, range(100, 104))
        steps: dict[str, Step] = {
            "store": lambda _: store(made, keys(numbers), buffers(8, numbers=numbers)),
            "lookup": lambda _: lookup(made, keys(numbers)),
            "load": lambda _: load(made, keys(numbers), buffers(8)),
            "unlock": lambda _: made.submit_unlock(keys(numbers)),
            "delete": lambda _: made.delete(keys(numbers)),
        }
        answers = {}
        for name, step in steps.items():
            if stage == f"before {name}":
                daemon.kill()
            if stage == f"in {name}":
                with daemon.stopped():
                    killer = threading.Timer(0.3, lambda: os.kill(daemon.pid, 9))
                    killer.start()
                    answers[name] = step(None)
                    killer.join()
                daemon.kill()
            else:
                answers[name] = step(None)
        dead_from = STAGES.index(stage)
        assert answers["store"] == (8 * NBYTES if dead_from > 1 else -1)
        assert answers["lookup"] == (list(numbers) if dead_from > 3 else [])
        assert answers["load"] == (
            list(numbers) if dead_from > 3 else []
        )  # what is held can be read without the daemon
        restart(daemon, made)
        until(lambda: made.report_status()["locked_objects"] == 0, "nothing stays locked")
        assert found(made, keys(numbers)) == []
        put(made, numbers)
        assert found(made, keys(numbers)) == list(numbers)


def test_a_daemon_that_comes_late_is_used(daemon: Daemon, model: Path) -> None:
    daemon.kill()
    with adapter(daemon, model, wait=False) as made:
        assert store(made, keys([1]), buffers(1, numbers=[1])) == -1
        daemon.start()
        until(lambda: store(made, keys([1]), buffers(1, numbers=[1])) > 0, "the daemon is used once it is there")
        assert found(made, keys([1])) == [0]


# Locks


def test_what_is_looked_up_is_held_until_it_is_unlocked(daemon: Daemon, model: Path) -> None:
    with adapter(daemon, model) as made:
        put(made, range(8))
        wanted = keys(range(8))
        assert lookup(made, wanted) == list(range(8))
        assert daemon.status()["held_bytes"] > 0
        assert lookup(made, wanted[:4]) == list(range(4))
        made.submit_unlock(keys(range(8), "another salt"))
        made.submit_unlock(wanted)
        until(lambda: made.report_status()["locked_objects"] == 4, "the second lookup's lock is left")
        made.submit_unlock(wanted)  # four of them once too often
        until(lambda: daemon.status()["held_bytes"] == 0, "nothing is held")
        made.submit_unlock(wanted)
        assert lookup(made, wanted) == list(range(8))


def test_what_is_never_unlocked_is_let_go_of_in_time(
    daemon: Daemon, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "HOLD_SECONDS", 0.2)
    with adapter(daemon, model) as made:
        put(made, range(8))
        for _ in range(50):
            assert lookup(made, keys(range(8))) == list(range(8))
        until(lambda: daemon.status()["held_bytes"] == 0, "nothing is held")
        assert made.report_status()["locked_objects"] == 0
        assert load(made, keys(range(8)), buffers(8)) == list(range(8))  # a lock is not needed to load


def test_locks_leave_room_to_store(model: Path) -> None:
    """Lookups hold an eighth of the arena at most; beyond it they promise without holding."""
    with Daemon(16 * MiB) as daemon, adapter(daemon, model) as made:
        held = range(120)
        for start in range(0, 120, 20):
            put(made, range(start, start + 20))
        assert lookup(made, keys(held)) == list(held)
        assert 0 < daemon.status()["held_bytes"] <= 2 * MiB
        put(made, range(1000, 1100))
        assert load(made, keys(range(1000, 1100)), buffers(100)) == list(range(100))


# Inventory


def test_listeners_hear_of_what_is_stored_accessed_and_deleted(daemon: Daemon, model: Path) -> None:
    heard = Listener()
    with adapter(daemon, model) as made:
        made.register_listener(heard)
        put(made, range(4), "a")
        put(made, range(4), "a")  # known already: not counted twice
        assert heard.stored == [(one, NBYTES) for one in keys(range(4), "a")]
        assert lookup(made, keys(range(6), "a")) == [0, 1, 2, 3]
        assert heard.accessed == keys(range(4), "a")
        made.delete(keys([1, 2, 9], "a"))
        until(lambda: sorted(map(repr, heard.deleted)) == sorted(map(repr, keys([1, 2], "a"))), "the deletion is told")
        usage = made.get_usage()
        assert (usage.total_bytes_used, dict(usage.bytes_by_cache_salt)) == (2 * NBYTES, {"a": 2 * NBYTES})
    assert len(heard.stored) == 4


def test_what_another_server_stored_or_deleted_is_learnt_by_looking(daemon: Daemon, model: Path) -> None:
    heard = Listener()
    with adapter(daemon, model) as first, adapter(daemon, model) as second:
        second.register_listener(heard)
        put(first, range(4))
        assert lookup(second, keys(range(4))) == [0, 1, 2, 3]
        assert second.get_usage().total_bytes_used == 4 * NBYTES and len(heard.stored) == 4
        first.delete(keys([2, 3]))
        until(lambda: daemon.status()["known_blocks"] == 2, "two are gone")
        assert lookup(second, keys(range(4))) == [0, 1]
        assert second.get_usage().total_bytes_used == 2 * NBYTES and sorted(map(repr, heard.deleted)) == sorted(
            map(repr, keys([2, 3]))
        )


def test_deletion_keeps_to_its_salt_and_rank(daemon: Daemon, model: Path) -> None:
    with adapter(daemon, model) as made:
        for salt in ("", "a", "b"):
            put(made, range(3), salt)
        put(made, range(3), world=2, rank=1)
        made.delete(keys(range(3), "a"))
        until(lambda: daemon.status()["known_blocks"] == 9, "three are gone")
        assert [lookup(made, keys(range(3), salt)) for salt in ("", "a", "b")] == [[0, 1, 2], [], [0, 1, 2]]
        assert lookup(made, keys(range(3), world=2, rank=1)) == [0, 1, 2]


def test_a_server_deletes_what_it_has_not_met_in_the_forms_it_has(daemon: Daemon, model: Path) -> None:
    with adapter(daemon, model) as first, adapter(daemon, model) as second:
        put(first, range(4))
        put(second, [100])
        second.delete(keys(range(4)))
        until(lambda: daemon.status()["known_blocks"] == 1, "four are gone")


def test_evicted_objects_leave_the_inventory_when_they_are_missed(model: Path) -> None:
    with Daemon(8 * MiB) as daemon, adapter(daemon, model) as made:
        for start in range(0, 400, 20):
            put(made, range(start, start + 20))
        known = daemon.status()["known_blocks"]
        assert known < 400 and made.get_usage().total_bytes_used == 400 * NBYTES
        for start in range(0, 400, 20):
            wanted = keys(range(start, start + 20))
            assert len(found(made, wanted)) <= 20
        assert made.get_usage().total_bytes_used == known * NBYTES


def test_keys_are_listed_in_pages(daemon: Daemon, model: Path) -> None:
    with adapter(daemon, model) as made:
        put(made, range(25))
        made.delete(keys([3, 24]))
        until(lambda: made.get_usage().total_bytes_used == 23 * NBYTES, "two are gone")
        entries, cursor = [], None
        while True:
            page = made.list_l2_keys(page_size=5, cursor=cursor)
            assert 0 < len(page.entries) <= 5
            entries += page.entries
            cursor = page.next_page_token
            if cursor is None:
                break
        assert [entry.key.to_object_key() for entry in entries] == keys([n for n in range(24) if n != 3])
        assert {entry.size_bytes for entry in entries} == {NBYTES}
        assert made.list_l2_keys(model_name="org/other").entries == ()
        assert len(made.list_l2_keys(model_name=MODEL).entries) == 23
        for wrong in ({"page_size": 0}, {"cursor": "x"}, {"cursor": "-1"}):
            with pytest.raises(ValueError):
                made.list_l2_keys(**wrong)


# Forms


def test_a_lookup_without_a_layout_finds_what_this_process_stored(daemon: Daemon, model: Path) -> None:
    with adapter(daemon, model) as made, adapter(daemon, model) as other:
        put(made, range(4))
        assert lookup(made, keys(range(6)), None) == [0, 1, 2, 3]
        assert lookup(other, keys(range(6)), None) == []


def test_one_task_may_have_objects_of_several_groups_and_layouts(daemon: Daemon, model: Path) -> None:
    plain = MemoryLayoutDesc([torch.Size([2, 2, 64, 64])], [torch.bfloat16])
    wanted = [key(n, group=n % 2) for n in range(6)]
    layouts = {0: FP8_AND_SCALES, 1: plain}
    objects = [buffers(1, layouts[n % 2], numbers=[n])[0] for n in range(6)]
    with adapter(daemon, model) as made:
        assert store(made, wanted, objects) == sum(len(one.byte_array) for one in objects)
        task = made.submit_lookup_and_lock_task(wanted, layouts)
        assert (
            answer(made.get_lookup_and_lock_event_fd(), lambda: made.query_lookup_and_lock_result(task)).popcount() == 6
        )
        assert load(made, wanted, [buffers(1, layouts[n % 2])[0] for n in range(6)]) == list(range(6))


def test_an_object_larger_than_a_block_is_kept_in_pieces(daemon: Daemon, model: Path) -> None:
    """A chunk of 256 tokens of an 8B model in BF16 has 32 MiB; a block at most 16."""
    large = MemoryLayoutDesc([torch.Size([40 * MiB + 24]), torch.Size([6])], [torch.float8_e4m3fn, torch.float32])
    with adapter(daemon, model) as made:
        assert store(made, keys([1]), buffers(1, large, numbers=[1])) == 40 * MiB + 48
        assert daemon.status()["known_blocks"] == 3
        assert lookup(made, keys([1]), large) == [0]
        assert load(made, keys([1]), buffers(1, large)) == [0]
        made.submit_unlock(keys([1]))
        until(lambda: made.report_status()["locked_objects"] == 0, "it is unlocked")
        assert load(made, keys([1]), buffers(1, large)) == [0]  # the same without what a lookup holds
        with daemon.client() as client:
            (info,) = [info for info in client.list_namespaces() if info.blocks]
            data = client.show(info.namespace.hex())[1]
            assert [layer["parts"][0][1] for layer in data["layout"]["groups"][0]["layers"]] == [
                13981040,
                13981040,
                13981008,
            ]
            from kvtier.connectors.common.object_naming import content_hash
            from kvtier.format.identity import Description
            from kvtier.format.layout import Range

            ns = client.register(Description.from_json(data))
            assert client.delete(ns, content_hash(key(1)), range_=Range(0, (1, 2))) == 1
        assert lookup(made, keys([1]), large) == [] and load(made, keys([1]), buffers(1, large)) == []


def test_a_full_arena_fails_the_store_and_nothing_else(model: Path) -> None:
    with Daemon(16 * MiB) as daemon, adapter(daemon, model) as made:
        put(made, range(4))
        huge = MemoryLayoutDesc([torch.Size([12 * MiB])], [torch.uint8])  # more than a session may hold of it
        assert store(made, keys([50]), buffers(1, huge)) == -1
        assert made.report_status()["store_dropped_too_large"] == 1
        assert found(made, keys(range(4))) == [0, 1, 2, 3]


def test_a_small_arena_takes_large_tasks_in_parts(model: Path) -> None:
    with Daemon(16 * MiB) as daemon, adapter(daemon, model) as made:
        put(made, range(150))  # 10 MiB
        assert load(made, keys(range(150)), buffers(150)) == list(range(150))


def test_a_new_namespace_is_explained_field_by_field(
    daemon: Daemon, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("kvtier").addHandler(caplog.handler)
    logging.getLogger("kvtier").setLevel("INFO")
    try:
        with adapter(daemon, model) as made, adapter(daemon, describe(tmp_path / "other.json", scale=0.0625)) as other:
            put(made, [1])
            assert lookup(other, keys([1])) == []
    finally:
        logging.getLogger("kvtier").removeHandler(caplog.handler)
    assert (
        "k_scale of layer 0: 0.0500000007, 0.0500000007, 0.0500000007, 0.0500000007 stored, 0.0625, 0.0625, 0.0625, "
        "0.0625 live" in caplog.text
    )
