"""The index of an SSD directory on disk: an append-only journal of what was put and what was forgotten, and checkpoints that shorten it.

    frame     magic u32 | kind u32 | body bytes u64 | xxh3-64 of kind, length and body u64 | body
    kind 1    records of 64 bytes: put or forget a block
    kind 2    a namespace: number u32 | bytes of tenant u32 | tenant | canonical description
    kind 3    end of a checkpoint (empty body)

checkpoint.N is the state before journal.N; reading is checkpoint.N, journal.N, journal.N+1 ... A torn frame ends the journal it stands in: what
follows never happened. Appends are whole frames or nothing (a failed write is cut off again). Little-endian. Not thread-safe: the tier locks.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

PUT, FORGET = 1, 2
RECORD = np.dtype(
    [
        ("kind", "<u4"),
        ("nbytes", "<u4"),  # of the block
        ("page", "<u4"),  # where its slot begins, in pages of 4 KiB
        ("slot", "<u4"),  # bytes of the slot
        ("namespace", "<u4"),  # number of a namespace frame before this
        ("zero", "<u4"),
        ("checksum", "<u8"),  # xxh3-64 of the block
        ("key", "V32"),
    ]
)
Records = npt.NDArray[np.void]

_MAGIC = 0x4A54564B  # "KVTJ"
_RECORDS, _NAMESPACE, _END = 1, 2, 3
_FRAME = struct.Struct("<IIQQ")
_NS = struct.Struct("<II")
_MAX_BODY = 1 << 34
MAX_NAMESPACES = 1 << 20  # frames of one directory's life between two checkpoints


class Journal:
    """The journal files of one directory. `sync`: every append is durable before it returns."""

    def __init__(self, directory: Path, sync: bool) -> None:
        self._directory = directory
        self._sync = sync
        self._fd = -1
        self.number = 0
        self.bytes = 0  # of the journal file that is written
        self.torn = 0  # frames that did not pass their check at `load`

    def load(self) -> Iterator[tuple[int, str, bytes] | bytes]:
        """Everything in order: (number, tenant, description) of namespaces, and records as bytes. Then opens a journal for appends.

        Reads index files only, never data.
        """
        numbers = sorted(self._numbers("checkpoint"), reverse=True)
        base = next((n for n in numbers if self._complete(n)), 0)
        if base:
            yield from self._frames(self._path("checkpoint", base))
        journals = sorted(n for n in self._numbers("journal") if n >= base)
        for number in journals:
            yield from self._frames(self._path("journal", number), cut=True)
        self._clean(base)
        self._open(journals[-1] if journals else max(base, 1))

    def append(self, records: Records) -> None:
        """One frame of records. Raises OSError with nothing appended."""
        self._write(_RECORDS, records.tobytes())

    def append_namespace(self, number: int, tenant: str, description: bytes) -> None:
        """Tells what a namespace number stands for. Raises OSError with nothing appended."""
        self._write(_NAMESPACE, _NS.pack(number, len(tenant.encode())) + tenant.encode() + description)

    def rotate(self) -> int:
        """Appends go to a new file from here on; returns its number, which `checkpoint` takes. Raises OSError."""
        old, self._fd = self._fd, -1
        try:
            self._open(self.number + 1)
        except OSError:
            self._fd = old
            raise
        os.close(old)
        return self.number

    def checkpoint(self, number: int, namespaces: dict[int, tuple[str, bytes]], records: Records) -> None:
        """Writes the state as it was at `rotate` and removes what it replaces. May run beside appends. Raises OSError; the old files stay then."""
        target = self._path("checkpoint", number)
        temporary = target.with_suffix(".tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            for known, (tenant, description) in namespaces.items():
                _write_all(fd, _frame(_NAMESPACE, _NS.pack(known, len(tenant.encode())) + tenant.encode() + description))
            _write_all(fd, _frame(_RECORDS, records.tobytes()))
            _write_all(fd, _frame(_END, b""))
            os.fsync(fd)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        temporary.rename(target)
        sync_directory(self._directory)
        self._clean(number)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, kind: int, body: bytes) -> None:
        try:
            _write_all(self._fd, _frame(kind, body))
            if self._sync:
                os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self.bytes)  # a frame is whole or it is not there
            raise
        self.bytes += _FRAME.size + len(body)

    def _open(self, number: int) -> None:
        path = self._path("journal", number)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self.number = number
        self.bytes = os.fstat(self._fd).st_size
        sync_directory(self._directory)

    def _frames(self, path: Path, cut: bool = False) -> Iterator[tuple[int, str, bytes] | bytes]:
        """The frames of a file up to its end or the first that is not whole; `cut` shortens the file to there."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        with open(fd, "r+b") as file:
            good = 0
            size = os.fstat(fd).st_size
            while good < size:
                frame = _read_frame(file.read(_FRAME.size), file, size - good)
                if frame is None:
                    self.torn += 1
                    if cut:
                        file.truncate(good)
                    return
                kind, body = frame
                good += _FRAME.size + len(body)
                if kind == _RECORDS:
                    yield body
                elif kind == _NAMESPACE:
                    number, tenant_bytes = _NS.unpack_from(body)
                    at = _NS.size + tenant_bytes
                    yield number, body[_NS.size : at].decode(errors="replace"), body[at:]

    def _complete(self, number: int) -> bool:
        """Whether a checkpoint ends as one: its last frame says so."""
        path = self._path("checkpoint", number)
        end = _frame(_END, b"")
        try:
            with path.open("rb") as file:
                file.seek(-len(end), os.SEEK_END)
                return file.read() == end
        except OSError:
            return False

    def _clean(self, base: int) -> None:
        """Removes what a checkpoint has replaced, and halves of checkpoints."""
        for path in self._directory.glob("checkpoint.*.tmp"):
            path.unlink(missing_ok=True)
        for kind in ("checkpoint", "journal"):
            for number in self._numbers(kind):
                if number < base:
                    self._path(kind, number).unlink(missing_ok=True)

    def _numbers(self, kind: str) -> list[int]:
        return [int(text) for path in self._directory.glob(f"{kind}.*") if (text := path.name.split(".", 1)[1]).isdigit()]

    def _path(self, kind: str, number: int) -> Path:
        return self._directory / f"{kind}.{number:08d}"


def sync_directory(directory: Path) -> None:
    """Makes names of new and renamed files durable. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _frame(kind: int, body: bytes) -> bytes:
    return _FRAME.pack(_MAGIC, kind, len(body), _check(kind, body)) + body


def _check(kind: int, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=kind << 40 ^ len(body))


def _read_frame(head: bytes, file: BinaryIO, left: int) -> tuple[int, bytes] | None:
    if len(head) < _FRAME.size:
        return None
    magic, kind, length, check = _FRAME.unpack(head)
    if magic != _MAGIC or kind not in (_RECORDS, _NAMESPACE, _END) or length > min(left - _FRAME.size, _MAX_BODY):
        return None
    body = file.read(length)
    if len(body) != length or _check(kind, body) != check:
        return None
    if (kind == _RECORDS and length % RECORD.itemsize) or (kind == _NAMESPACE and length < _NS.size) or (kind == _END and length):
        return None
    return kind, body


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
