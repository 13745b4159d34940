"""Calls to the file system: regular files only, whole transfers, and what is removed or replaced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.tiers.ssd.disk import APPEND, CREATE, FRESH, READ, WRITE, Disk

DISK = Disk()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    made = DISK.open(tmp_path / "file", WRITE | CREATE)
    yield made
    DISK.close(made)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    (tmp_path / "target").write_text("secret")
    if kind == "link":
        path.symlink_to(tmp_path / "target")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        DISK.open(path, READ)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_fresh_file_is_not_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("planted")
    with pytest.raises(FileExistsError):
        DISK.open(tmp_path / "file", APPEND | FRESH)
    assert (tmp_path / "file").read_text() == "planted"


def test_files_are_for_their_owner_only(tmp_path: Path, fd: int) -> None:
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_read_ends_where_the_file_ends(fd: int) -> None:
    DISK.write(fd, memoryview(b"x" * 5000), 0)
    block = memoryview(bytearray(8192))
    assert DISK.read(fd, block, 0) == DISK.size(fd) == 5000
    assert DISK.read(fd, block, 4096) == 904 and DISK.read(fd, block, 8192) == 0


def test_allocated_bytes_are_zeros_and_a_cut_takes_them_away(fd: int) -> None:
    DISK.allocate(fd, 4096, 4096)
    assert DISK.size(fd) == 8192 and os.pread(fd, 8192, 0) == bytes(8192)
    DISK.truncate(fd, 100)
    assert DISK.size(fd) == 100


def test_a_rename_replaces_and_a_missing_name_is_removed_without_error(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "new").write_text("new")
    DISK.rename(tmp_path / "new", tmp_path / "old")
    DISK.unlink(tmp_path / "new")
    assert (tmp_path / "old").read_text() == "new" and os.listdir(tmp_path) == ["old"]
