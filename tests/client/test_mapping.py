"""A client's mapping of the arena: the same bytes, given up at once, and never read by a forked child."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.client.mapping import Mapping
from kvtier.format.layout import SLOT_ALIGN
from kvtier.store.arena import Arena
from tests.support.paths import ROOT

MiB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(4 * MiB)
    yield made
    made.close()


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


@pytest.mark.parametrize(("what", "said"), [("guard", "11 7"), ("plain", "11 7"), ("occupied", "0 7")])
def test_a_forked_child_dies_rather_than_read_the_parents_mapping(what: str, said: str) -> None:
    """And a child that guards the address keeps other mappings from landing there."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.programs.forked_mapping", what],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
    )
    assert found.stdout.strip() == said, found.stderr


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
