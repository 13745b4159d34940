"""The arena: sealed against resizing before anyone sees it, backed in steps, and mapped by others."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.client.mapping import Mapping
from kvtier.errors import Full
from kvtier.format.layout import SLOT_ALIGN
from kvtier.protocol.backing import POPULATE_STEP
from kvtier.store import arena as module
from kvtier.store.arena import POISON, Arena
from tests.support.paths import ROOT

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


# --- a client's mapping


def test_a_mapping_shows_the_same_bytes_and_a_view_of_a_closed_one_is_void(arena: Arena) -> None:
    mapping = Mapping(os.dup(arena.fd), arena.nbytes)
    mapping.populate(0, MiB)
    mapping.populate(3 * MiB, 64 * MiB)
    arena.array[5000] = 42
    view = mapping.array[5000:5001]
    assert view[0] == 42
    view[0] = 43
    assert arena.array[5000] == 43
    mapping.close()
    mapping.close()
    assert view[0] == 0, "not another arena's bytes, and no crash"
    view[0] = 9
    assert arena.array[5000] == 43


def test_a_mapping_takes_its_descriptor_over_even_where_it_fails() -> None:
    read, write = os.pipe()
    os.close(write)
    with pytest.raises((OSError, ValueError)):
        Mapping(read, MiB)
    with pytest.raises(OSError):
        os.fstat(read)


def test_a_mapping_larger_than_the_arena_is_refused(arena: Arena) -> None:
    with pytest.raises(ValueError):
        Mapping(os.dup(arena.fd), arena.nbytes + SLOT_ALIGN)


CHILD = """
import os, sys
from kvtier.store.arena import Arena
from kvtier.client.mapping import Mapping
arena = Arena(1 << 20)
mapping = Mapping(os.dup(arena.fd), arena.nbytes)
mapping.array[:] = 7
child = os.fork()
if not child:
    if sys.argv[1] == "guard":
        mapping.guard_after_fork()
    mapping.array[0]
    os._exit(0)
_, status = os.waitpid(child, 0)
print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else "read", int(mapping.array[0]))
"""


@pytest.mark.parametrize("what", ["guard", "plain"])
def test_a_forked_child_dies_rather_than_read_the_parents_mapping(what: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", CHILD, what],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
    )
    assert found.stdout.split() == ["11", "7"], found.stdout + found.stderr


def test_the_guard_keeps_the_address_occupied() -> None:
    program = """
import mmap, os
from kvtier.store.arena import Arena
from kvtier.client.mapping import Mapping
arena = Arena(1 << 20)
mapping = Mapping(os.dup(arena.fd), arena.nbytes)
child = os.fork()
if not child:
    mapping.guard_after_fork()
    others = [mmap.mmap(-1, 1 << 20) for _ in range(8)]
    lines = [line for line in open("/proc/self/maps") if int(line.split("-")[0], 16) == mapping.address]
    os._exit(0 if lines and lines[0].split()[1] == "---p" else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
    )
    assert found.stdout.strip() == "0", found.stderr


def test_closing_gives_descriptor_and_memory_back() -> None:
    arena = Arena(MiB)
    mapping = Mapping(os.dup(arena.fd), arena.nbytes)
    fd, inode = arena.fd, os.fstat(arena.fd).st_ino
    assert maps(inode) == 2
    mapping.close()
    arena.close()
    assert maps(inode) == 0
    with pytest.raises(OSError):
        os.fstat(fd)


def maps(inode: int) -> int:
    """Mappings of this arena in this process (another's may be given back at any moment, by the garbage collector)."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return sum(len(line) > 5 and line[4] == str(inode) and line[5].startswith("/memfd:kvtier-arena") for line in lines)


def test_a_view_outlives_close() -> None:
    arena = Arena(MiB)
    arena.array[10] = 5
    view = arena.array[:20]
    arena.close()
    assert view[10] == 5
