"""The index of an SSD directory on disk: an append-only journal of puts and forgets, and checkpoints that shorten it.

    frame     magic u32 | kind u32 | body bytes u64 | xxh3-64 of the body, seeded with kind and length, u64 | body
    kind 1    records of 64 bytes: put or forget a block
    kind 2    a namespace: number u32 | bytes of tenant u32 | tenant | canonical description
    kind 3    end of a checkpoint (empty body)

checkpoint.N is the state before journal.N; reading is checkpoint.N, journal.N, journal.N+1 ... A torn frame ends the
file it stands in: what follows there never happened. Appends are whole or nothing: what a failed one left is cut off
before the next. All index files together never have more than `limit` bytes. Little-endian. Not thread-safe: the tier
locks; only `checkpoint` may run beside appends.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import Full
from kvtier.tiers.ssd.disk import APPEND, CREATE, DISK, FRESH, READ, WRITE, Disk

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
NamespaceEntry = tuple[int, str, bytes]  # number, tenant, canonical description of a namespace

_MAGIC = 0x4A54564B  # "KVTJ"
_RECORDS, _NAMESPACE, _END = 1, 2, 3
_FRAME = struct.Struct("<IIQQ")
_NS = struct.Struct("<II")
_MAX_BODY = 1 << 34
_NAME = re.compile(r"(checkpoint|journal)\.(\d{8}|[1-9]\d{8,17})(\.tmp)?", re.ASCII)
_NEVER = 10**18  # above every number that `_NAME` takes
_CHUNK = 1 << 16  # records in a frame of a checkpoint: 4 MiB


class Journal:
    """The journal files of one directory. `limit`: bytes of all; `sync`: every append is durable before it returns."""

    def __init__(self, directory: Path, limit: int, sync: bool, disk: Disk) -> None:
        self._directory, self.limit, self._sync, self._disk = directory, limit, sync, disk
        self._fd = -1
        self._torn = False  # what a failed append left could not be cut off yet
        self._others = 0  # bytes of index files beside the one that is written
        self.coming = 0  # bytes of a checkpoint that is being written: counted from before `rotate` until `replace`
        self.number = 0
        self.end = 0  # bytes of the journal file that is written
        self.since = 0  # bytes of journals since the last checkpoint
        self.spare = 0  # bytes that appends leave free, so that the next checkpoint fits
        self.damaged: list[str] = []  # files with a frame that did not pass its check at `load`

    def load(self) -> Iterator[NamespaceEntry | bytes]:
        """All namespaces and records (as bytes), in order; then opens a journal for appends. Reads index files only."""
        files = IndexFiles(self._directory)
        base = files.base
        if base:
            yield from self._read(files.path("checkpoint", base), cut=False)
        journals = [number for number in files.journals if number >= base]
        for number in journals:
            yield from self._read(files.path("journal", number), cut=True)
        self._clean(base)
        self._fd, self.number, self.end = self._start(journals[-1] if journals else max(base, 1))
        self._measure()

    @property
    def total(self) -> int:
        """Bytes of all index files, those of a checkpoint that is being written included."""
        return self._others + self.end + self.coming

    @property
    def free(self) -> int:
        """Bytes that may be appended now."""
        return self.limit - self.total - (0 if self.coming else self.spare)

    def append(self, records: Records, told: Iterable[NamespaceEntry] = ()) -> None:
        """Records in one frame, after namespaces they name. Raises OSError, Full (the limit) with nothing appended."""
        data = b"".join(_frame(_NAMESPACE, _namespace_body(*one)) for one in told)
        data += _frame(_RECORDS, records.tobytes())
        if len(data) > self.free:
            raise Full("the index has taken its part of the capacity")
        if self._torn:
            self._cut()
        try:
            self._disk.append(self._fd, data)
            if self._sync:
                self._disk.sync(self._fd)
        except OSError:
            self._torn = True
            try:
                self._cut()
            except OSError:
                pass  # before the next append, then
            raise
        self.end += len(data)
        self.since += len(data)

    def rotate(self) -> int:
        """Appends go to a new file from now on: its number, for `checkpoint`. Raises OSError with nothing changed."""
        if self._torn:
            self._cut()
        fd, number, end = self._start(self.number + 1)
        self._disk.close(self._fd)
        self._others += self.end
        self._fd, self.number, self.end = fd, number, end
        return number

    def checkpoint(self, number: int, namespaces: Mapping[int, tuple[str, bytes]], records: Records) -> None:
        """Writes the state as it was at `rotate`, under a name that is no index file's yet. Raises OSError with nothing
        left of it. May run beside appends, once `coming` is set, before `replace`."""
        temporary = self._temporary(number)
        self._disk.unlink(temporary)
        fd = self._disk.open(temporary, APPEND | FRESH)
        try:
            for known, (tenant, description) in namespaces.items():
                self._disk.append(fd, _frame(_NAMESPACE, _namespace_body(known, tenant, description)))
            for at in range(0, len(records), _CHUNK):
                self._disk.append(fd, _frame(_RECORDS, records[at : at + _CHUNK].tobytes()))
            self._disk.append(fd, _frame(_END, b""))
            self._disk.sync(fd)
        except OSError:
            self._disk.unlink(temporary)
            raise
        finally:
            self._disk.close(fd)

    def replace(self, number: int, written: bool) -> None:
        """Ends a checkpoint; if written, it replaces what was before. Raises OSError: then both stand, or the old."""
        self.coming = 0
        try:
            if written:
                self._disk.rename(self._temporary(number), self._directory / f"checkpoint.{number:08d}")
                self._disk.sync_directory(self._directory)
                self._clean(number)
        finally:
            self._measure()

    def close(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def _cut(self) -> None:
        self._disk.truncate(self._fd, self.end)
        self._torn = False

    def _start(self, number: int) -> tuple[int, int, int]:
        """Opens a journal, made if need be: (descriptor, number, bytes)."""
        fd = self._disk.open(self._directory / f"journal.{number:08d}", APPEND | CREATE)
        try:
            self._disk.sync_directory(self._directory)
            return fd, number, self._disk.size(fd)
        except OSError:
            self._disk.close(fd)
            raise

    def _read(self, path: Path, cut: bool) -> Iterator[NamespaceEntry | bytes]:
        """The frames of a file up to its end or the first that is not whole; `cut` shortens the file to there."""
        fd = self._disk.open(path, WRITE if cut else READ)
        with open(fd, "r+b" if cut else "rb", buffering=1 << 20) as file:
            size = self._disk.size(fd)
            good = yield from frames_of(file, size)
            if good < size:
                self.damaged.append(path.name)
                if cut:
                    self._disk.truncate(fd, good)

    def _clean(self, base: int) -> None:
        for path in IndexFiles(self._directory).older_than(base):
            self._disk.unlink(path)

    def _measure(self) -> None:
        """Counts what stands beside the file that is written."""
        mine = f"journal.{self.number:08d}"
        others = {path.name: path.lstat().st_size for path in IndexFiles(self._directory).all if path.name != mine}
        self._others = sum(others.values())
        self.since = self.end + sum(size for name, size in others.items() if name.startswith("journal."))

    def _temporary(self, number: int) -> Path:
        return self._directory / f"checkpoint.{number:08d}.tmp"


class IndexFiles:
    """Names of the index files of a directory at one moment. Raises OSError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        found = [match for name in sorted(os.listdir(directory)) if (match := _NAME.fullmatch(name))]
        self.checkpoints = [int(match[2]) for match in found if match[1] == "checkpoint" and not match[3]]
        self.journals = [int(match[2]) for match in found if match[1] == "journal" and not match[3]]
        self.temporary = [directory / match[0] for match in found if match[1] == "checkpoint" and match[3]]

    @property
    def base(self) -> int:
        """The number of the youngest whole checkpoint; 0 for none."""
        whole = (n for n in sorted(self.checkpoints, reverse=True) if _complete(self.path("checkpoint", n)))
        return next(whole, 0)

    @property
    def all(self) -> list[Path]:
        return self.older_than(_NEVER)

    def older_than(self, base: int) -> list[Path]:
        """What a checkpoint of this number has replaced, and halves of checkpoints."""
        kinds = (("checkpoint", self.checkpoints), ("journal", self.journals))
        return self.temporary + [self.path(kind, n) for kind, numbers in kinds for n in numbers if n < base]

    def path(self, kind: str, number: int) -> Path:
        return self._directory / f"{kind}.{number:08d}"


def frames_of(file: BinaryIO, size: int) -> Generator[NamespaceEntry | bytes, None, int]:
    """Namespaces, and records as bytes, of an index file of `size` bytes. Returns the bytes of whole frames."""
    good = 0
    while good < size and (frame := _read_frame(file, size - good)) is not None:
        kind, body = frame
        if kind == _RECORDS:
            yield body
        elif kind == _NAMESPACE:
            if (entry := _entry_of(body)) is None:
                break
            yield entry
        good += _FRAME.size + len(body)
    return good


def checkpoint_bytes(records: int, namespaces: Mapping[int, tuple[str, bytes]]) -> int:
    """Bytes of a checkpoint of so many records."""
    frames = len(namespaces) + -(-records // _CHUNK) + 1
    told = sum(_NS.size + len(tenant.encode()) + len(description) for tenant, description in namespaces.values())
    return frames * _FRAME.size + records * RECORD.itemsize + told


def _complete(path: Path) -> bool:
    """Whether a checkpoint ends as one: its last frame says so."""
    end = _frame(_END, b"")
    try:
        fd = DISK.open(path, READ)
    except OSError:
        return False
    with open(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if size < len(end):
            return False
        file.seek(size - len(end))
        return file.read() == end


def _namespace_body(number: int, tenant: str, description: bytes) -> bytes:
    return _NS.pack(number, len(tenant.encode())) + tenant.encode() + description


def _frame(kind: int, body: bytes) -> bytes:
    return _FRAME.pack(_MAGIC, kind, len(body), _check(kind, body)) + body


def _check(kind: int, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=kind << 40 ^ len(body))


def _read_frame(file: BinaryIO, left: int) -> tuple[int, bytes] | None:
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    magic, kind, length, check = _FRAME.unpack(head)
    if magic != _MAGIC or kind not in (_RECORDS, _NAMESPACE, _END) or length > min(left - _FRAME.size, _MAX_BODY):
        return None
    body = file.read(length)
    if len(body) != length or _check(kind, body) != check:
        return None
    if (kind == _RECORDS and length % RECORD.itemsize) or (kind == _END and length):
        return None
    return kind, body


def _entry_of(body: bytes) -> NamespaceEntry | None:
    """What `_namespace_body` made; None for anything else."""
    if len(body) < _NS.size:
        return None
    number, tenant_bytes = _NS.unpack_from(body)
    at = _NS.size + tenant_bytes
    try:
        return (number, body[_NS.size : at].decode(), body[at:]) if at <= len(body) else None
    except UnicodeDecodeError:
        return None
