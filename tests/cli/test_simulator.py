"""The cache simulator behind `kvtier replay`: policies against naive ones, Belady above all, published figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli.simulator import POLICIES, Kvtier, Lru, belady, blocks_held, distinct, hit_ratio, load, save
from kvtier.errors import Invalid
from kvtier.format.layout import attention
from tests.support.traces import DATA, agents, one_shot

traces = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True), min_size=1, max_size=40)


def naive_lru(requests: list[list[int]], capacity: int) -> float:
    """By ages in a plain dict, from the definition."""
    ages: dict[int, int] = {}
    clock = hits = 0
    for blocks in requests:
        leading = 0
        while leading < len(blocks) and blocks[leading] in ages:
            leading += 1
        hits += leading
        for block in blocks[::-1]:
            clock += 1
            if block not in ages and len(ages) == capacity:
                del ages[min(ages, key=ages.__getitem__)]
            ages[block] = clock
    return hits / sum(map(len, requests))


def test_a_case_by_hand() -> None:
    """Room for three: [1 2 3] is put, [1 2] hits two, [4 5] evicts 3 and 2, the tails; [1 2] hits one."""
    requests = [[1, 2, 3], [1, 2], [4, 5], [1, 2]]
    assert hit_ratio(requests, Lru(3)) == 3 / 9
    assert belady(requests, 3) == 4 / 9, "it would not keep 4 and 5"


def test_only_an_unbroken_prefix_counts() -> None:
    assert hit_ratio([[2, 3], [1, 2, 3]], Lru(9)) == 0.0
    assert hit_ratio([[1, 2], [1, 9, 2]], Lru(9)) == 1 / 5


@given(traces, st.integers(1, 14))
def test_lru_agrees_with_a_naive_simulator(requests: list[list[int]], capacity: int) -> None:
    assert hit_ratio(requests, Lru(capacity)) == pytest.approx(naive_lru(requests, capacity))


@pytest.mark.parametrize("name", POLICIES)
@given(requests=traces, capacity=st.integers(1, 14))
def test_no_policy_holds_more_than_its_capacity(name: str, requests: list[list[int]], capacity: int) -> None:
    cache = POLICIES[name](capacity)
    for blocks in requests:
        cache.use(blocks)
        assert sum(cache.has(block) for block in range(13)) <= capacity


@given(traces, st.integers(1, 14))
def test_with_room_for_all_every_policy_hits_what_was_seen(requests: list[list[int]], spare: int) -> None:
    capacity = 20 + spare
    assert (
        len(
            {round(hit_ratio(requests, make(capacity)), 9) for make in POLICIES.values()}
            | {round(belady(requests, capacity), 9)}
        )
        == 1
    )


@given(traces, st.integers(1, 14))
def test_until_it_has_learned_kvtier_is_lru(requests: list[list[int]], capacity: int) -> None:
    """Fewer ticks than the first lesson. Ages within one bucket are told apart by their ticks."""
    assert sum(map(len, requests)) < 1024
    ours, lru = Kvtier(capacity), Lru(capacity)
    for blocks in requests:
        ours.use(blocks)
        lru.use(blocks)
    held = {block for block in range(13) if lru.has(block)}
    assert len({block for block in range(13) if ours.has(block)}) == len(held)


@pytest.mark.long
@pytest.mark.parametrize("name", ["conversation", "agents", "one_shot"])
def test_no_policy_is_above_belady_and_ours_is_near_the_best(name: str) -> None:
    requests = load(DATA / f"{name}.npz")
    capacity = distinct(requests) * 5 // 100
    found = {policy: hit_ratio(requests, make(capacity)) for policy, make in POLICIES.items()}
    assert max(found.values()) <= belady(requests, capacity)
    assert found["kvtier"] >= max(found["lru"], found["s3-fifo"], found["arc"]) - 0.01, found


@pytest.mark.parametrize(
    ("share", "lru", "best"), [(1, 0.053, 0.243), (5, 0.196, 0.366), (10, 0.279, 0.366), (40, 0.360, 0.366)]
)
def test_published_figures_of_the_conversation_trace(share: int, lru: float, best: float) -> None:
    requests = load(DATA / "conversation.npz")
    assert (len(requests), distinct(requests), sum(map(len, requests))) == (12_031, 182_790, 288_500)
    capacity = 182_790 * share // 100
    assert hit_ratio(requests, Lru(capacity)) == pytest.approx(lru, abs=0.005)
    assert belady(requests, capacity) == pytest.approx(best, abs=0.005)


def test_the_synthetic_traces_are_what_their_generator_makes() -> None:
    assert load(DATA / "agents.npz") == agents()
    assert load(DATA / "one_shot.npz") == one_shot()


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    requests = [[5, 6, 7], [5, 6, 9], [1]]
    save(tmp_path / "a.npz", requests)
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"timestamp": 0, "hash_ids": blocks}) + "\n" for blocks in requests)
    )
    assert load(tmp_path / "a.npz") == load(tmp_path / "a.jsonl") == requests


@pytest.mark.parametrize("text", ["{}\n", "nonsense\n", '{"hash_ids": 7}\n', '{"hash_ids": ["x"]}\n'])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(Invalid, match="is not a trace"):
        load(path)
    with pytest.raises(Invalid, match="cannot read"):
        load(tmp_path / "absent.jsonl")


def test_fp8_holds_not_quite_twice_the_blocks() -> None:
    nbytes = 8 * 2**30
    bf16, fp8 = (
        blocks_held(nbytes, attention(32, 8, 128, engine_tokens=16, dtype=dtype).extents())
        for dtype in ("bf16", "e4m3fn")
    )
    assert 1.9 * bf16 < fp8 < 2.1 * bf16 and fp8 != 2 * bf16
