"""Copies shared with a helper: every byte, whoever asks, after a fork, without a helper, and nothing goes on after a
failure.
"""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from kvtier.client import copier
from kvtier.client.copier import STRIDE, copy
from tests.support.daemon import PATIENCE

SIZES = [0, 1, STRIDE - 1, STRIDE, STRIDE + 1, 5 * STRIDE + 7]


def pairs(seed: int = 0, sizes: list[int] | None = None) -> list[tuple[np.ndarray, np.ndarray]]:
    order = np.random.default_rng(seed)
    return [
        (np.zeros(size, np.uint8), order.integers(0, 256, size, np.uint8))
        for size in (SIZES if sizes is None else sizes)
    ]


def right(made: list[tuple[np.ndarray, np.ndarray]]) -> bool:
    return all(np.array_equal(to, source) for to, source in made)


@pytest.mark.parametrize("cores", [{0}, {0, 1}])
def test_every_byte_is_copied(monkeypatch: pytest.MonkeyPatch, cores: set[int]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    for sizes in ([], [0], [7, 8], [STRIDE], SIZES, [STRIDE] * 20):
        made = pairs(len(sizes), sizes)
        copy(iter(made))
        assert right(made)


def test_many_threads_share_one_helper() -> None:
    made = [pairs(seed) for seed in range(8)]
    threads = [threading.Thread(target=lambda mine=mine: [copy(mine) for _ in range(10)]) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads) and all(map(right, made))
    assert sum(thread.name.startswith("kvtier-copy") for thread in threading.enumerate()) <= 1


def test_a_forked_child_has_a_helper_of_its_own() -> None:
    copy(pairs())
    child = os.fork()
    if child == 0:
        made = pairs(1, [STRIDE] * 8)
        try:
            copy(made)
        finally:
            os._exit(0 if right(made) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_without_a_thread_to_be_had_the_caller_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spent:
        def submit(self, *_: object) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copier, "_helper", Spent())
    made = pairs()
    copy(made)
    assert right(made)


def test_after_a_failure_nothing_is_copied_any_more() -> None:
    made = [
        (np.zeros(4, np.uint8), np.ones(4, np.uint8)),
        (np.zeros(3, np.uint8), np.ones(5, np.uint8)),
        *pairs(2, [STRIDE] * 64),
    ]
    with pytest.raises(ValueError):
        copy(made)
    before = [to.copy() for to, _ in made]
    copy(pairs(3))  # the helper has been through all that was given to it
    assert all(np.array_equal(to, was) for (to, _), was in zip(made, before, strict=True))
