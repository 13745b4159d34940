"""The arena: sealed against resizing before anyone sees it, backed in steps, and mapped by others."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.errors import Full
from kvtier.format.layout import SLOT_ALIGN
from kvtier.protocol.backing import POPULATE_STEP
from kvtier.store import arena as module
from kvtier.store.arena import POISON, Arena

MiB = 1 << 20
F_GET_SEALS = 1034


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(4 * MiB)
    yield made
    made.close()


def backed(arena: Arena) -> int:
    """Bytes of the memfd that are backed by memory."""
    return os.fstat(arena.fd).st_blocks * 512


@pytest.mark.parametrize(
    ("asked", "got"), [(1, SLOT_ALIGN), (SLOT_ALIGN, SLOT_ALIGN), (SLOT_ALIGN + 1, 2 * SLOT_ALIGN), (MiB, MiB)]
)
def test_its_size_is_rounded_up_to_pages(asked: int, got: int) -> None:
    arena = Arena(asked)
    assert arena.nbytes == len(arena.memory) == arena.array.size == os.fstat(arena.fd).st_size == got
    arena.close()


@pytest.mark.parametrize("asked", [0, -1, 2**62, 2**63 - 1, 2**70])
def test_an_impossible_size_is_refused_and_leaves_no_descriptor(asked: int) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(Full, match="cannot map an arena"):
        Arena(asked)
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.mark.parametrize("size", [0, SLOT_ALIGN, 8 * MiB])
def test_nobody_can_resize_it(arena: Arena, size: int) -> None:
    """A client that shrank it would kill the daemon with SIGBUS."""
    other = os.dup(arena.fd)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(other, size)
        with pytest.raises(OSError):
            os.posix_fallocate(other, 0, 8 * MiB)
    finally:
        os.close(other)
    assert fcntl.fcntl(arena.fd, F_GET_SEALS) & 0x7 == 0x7
    arena.array[-1] = 1


def test_nobody_can_seal_it_further_against_writing(arena: Arena) -> None:
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, 1033, 0x8)


def test_the_descriptor_is_not_inherited(arena: Arena) -> None:
    assert not os.get_inheritable(arena.fd)


def test_memory_and_array_are_the_same_bytes(arena: Arena) -> None:
    arena.memory[100:104] = b"abcd"
    assert arena.array[100:104].tobytes() == b"abcd"
    arena.poison(101, 2)
    assert bytes(arena.memory[100:104]) == b"a\x7f\x7fd" and POISON == 0x7F


# --- backing with memory


def test_populate_backs_all_of_it_once() -> None:
    arena = Arena(2 * POPULATE_STEP + MiB)
    try:
        assert arena.ready_bytes == 0 and backed(arena) == 0
        arena.populate(threading.Event(), limit=POPULATE_STEP)
        assert arena.ready_bytes == POPULATE_STEP <= backed(arena) < 2 * POPULATE_STEP
        arena.array[7] = 9
        arena.populate(threading.Event(), threads=3)
        assert arena.ready_bytes == arena.nbytes == backed(arena)
        assert arena.array[7] == 9, "what is there stays"
        arena.populate(threading.Event())
        assert arena.ready_bytes == arena.nbytes
    finally:
        arena.close()


@pytest.mark.parametrize("limit", [1 * MiB, 4 * MiB, 100 * MiB])
def test_a_limit_off_the_steps_is_kept(arena: Arena, limit: int) -> None:
    arena.populate(threading.Event(), limit=limit)
    assert arena.ready_bytes == min(limit, arena.nbytes)
    arena.populate(threading.Event())
    assert arena.ready_bytes == arena.nbytes


def test_populate_stops_when_told(arena: Arena) -> None:
    stop = threading.Event()
    stop.set()
    arena.populate(stop)
    assert arena.ready_bytes == 0 and backed(arena) == 0


def test_memory_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, arena: Arena) -> None:
    """The kernel's answer, from a call it refuses: advice about bytes that are not mapped."""
    real = module.advise

    def beyond(array: np.ndarray, start: int, size: int, advice: int) -> None:  # type: ignore[type-arg]
        real(array, start + (1 << 46), size, advice)

    monkeypatch.setattr(module, "advise", beyond)
    with pytest.raises(Full, match="no memory for bytes 0 to 4194304"):
        arena.populate(threading.Event())
    assert arena.ready_bytes == 0


def test_a_kernel_without_the_advice_allocates_instead(monkeypatch: pytest.MonkeyPatch, arena: Arena) -> None:
    monkeypatch.setattr(module, "POPULATE_WRITE", 9999)  # unknown to every kernel: EINVAL, as before Linux 5.14
    arena.populate(threading.Event())
    assert arena.ready_bytes == arena.nbytes == backed(arena)


def test_a_view_outlives_close() -> None:
    arena = Arena(MiB)
    arena.array[10] = 5
    view = arena.array[:20]
    arena.close()
    assert view[10] == 5
