"""Checks an SSD directory while no daemon has it: index files, records, every byte of blocks, what else lies there.

Holds the directory's lock meanwhile. Changes nothing unless told to repair; then blocks that fail are forgotten, ends
of index files that are not whole and files that do not belong are moved to `quarantine/`, and what a checkpoint has
replaced is removed. What is repaired is a directory as a daemon leaves it. Reads no symbolic link. Not for threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path

import numpy as np

from kvtier.errors import Invalid, KvtierError, Lost
from kvtier.format.block import verify
from kvtier.format.identity import derive_keys, namespace_digest, parse_description
from kvtier.format.layout import SLOT_ALIGN
from kvtier.store.allocator import Slabs
from kvtier.tiers.ssd import directory, recovery
from kvtier.tiers.ssd.disk import APPEND, CREATE, DISK, READ
from kvtier.tiers.ssd.journal import IndexFiles, Journal, NamespaceEntry, Records, frames_of

MAX_LISTED = 1000  # findings kept; more are counted
_MAX_TAIL = 64 * 2**20  # bytes of a broken end that are kept
_OURS = (directory.LOCK, directory.FORMAT_FILE, directory.DATA, directory.TTLS, f"{directory.TTLS}.tmp")
_FOLDERS = (directory.QUARANTINE, "lost+found")
Advance = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as a daemon leaves it. `where` is a file, or a slot by its offset in the data file."""

    where: str
    what: str


@dataclass(slots=True)
class DirectoryReport:
    """What was found. `blocks` are those that the index knows; `whole` passed, and `nbytes` are theirs."""

    blocks: int = 0
    whole: int = 0
    nbytes: int = 0
    namespaces: int = 0
    index_bytes: int = 0
    data_bytes: int = 0
    found: int = 0
    repaired: int = 0
    findings: list[Damage] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return self.found == self.repaired

    def add(self, where: str, what: str) -> None:
        self.found += 1
        if len(self.findings) < MAX_LISTED:
            self.findings.append(Damage(where, what))


def check(path: Path, repair: bool = False, advance: Advance = lambda done, total: None) -> DirectoryReport:
    """Looks at everything, and repairs it if told to. `advance` hears how many bytes of slots are read, of how many.
    Raises Invalid (no SSD directory), Unavailable (a daemon has it), Full (the disk fails)."""
    report = DirectoryReport()
    with ExitStack() as stack, directory.explained(path):
        if not path.is_dir() or not (path / directory.FORMAT_FILE).exists():
            raise Invalid(f"{path} is not an SSD tier's directory: it has no {directory.FORMAT_FILE}")
        stack.callback(DISK.close, directory.claim(path, DISK))
        slab_bytes = directory.read_format(path, DISK)
        assert slab_bytes is not None
        files = IndexFiles(path)
        misplaced, broken = _files(path, files, report)
        records, described = recovery.read(_entries(files))
        digests = _namespaces(recovery.namespaces_of(records), described, report)
        bad = _blocks(path, records, digests, slab_bytes, report, advance)
        if repair and report.found:
            _repair(path, misplaced, broken, bad)
            report.repaired = report.found
    return report


def _files(path: Path, files: IndexFiles, report: DirectoryReport) -> tuple[list[Path], dict[Path, int]]:
    """Looks at the directory: (what should not be there, index files with the bytes up to which they are whole)."""
    misplaced, broken = [], {}
    base, index = files.base, {file.name for file in files.all}
    for entry in sorted(path.iterdir()):
        if entry.name in _FOLDERS and entry.is_dir() and not entry.is_symlink():
            continue
        if entry.name not in index and entry.name not in _OURS:
            report.add(entry.name, "is not a file of the SSD tier")
            misplaced.append(entry)
        elif entry.is_symlink() or not entry.is_file():
            report.add(entry.name, "is not a regular file")
            misplaced.append(entry)
    for old in files.older_than(base):
        report.add(old.name, "was replaced by a checkpoint, or was never finished")
    for number in files.checkpoints:
        if number > base and (file := files.path("checkpoint", number)) not in misplaced:
            report.add(file.name, "is not whole: what it says is not used")
            misplaced.append(file)
    for file in files.all:
        report.index_bytes += file.lstat().st_size
    for file in _used(files):
        with open(DISK.open(file, READ), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            good = _end_of(frames_of(stream, size))
        if good < size:
            report.add(file.name, f"is not whole from byte {good} on: {size - good} bytes say nothing")
            broken[file] = good
    return misplaced, broken


def _used(files: IndexFiles) -> list[Path]:
    """The index files that count, in their order."""
    base = files.base
    found = [files.path("checkpoint", base)] if base else []
    found += [files.path("journal", number) for number in sorted(files.journals) if number >= base]
    return [file for file in found if file.is_file() and not file.is_symlink()]


def _end_of(frames: Iterator[NamespaceEntry | bytes]) -> int:
    while True:
        try:
            next(frames)
        except StopIteration as end:
            return int(end.value)


def _entries(files: IndexFiles) -> Iterator[NamespaceEntry | bytes]:
    for file in _used(files):
        with open(DISK.open(file, READ), "rb") as stream:
            yield from frames_of(stream, os.fstat(stream.fileno()).st_size)


def _blocks(
    path: Path, records: Records, digests: dict[int, bytes], slab_bytes: int, report: DirectoryReport, advance: Advance
) -> list[bytes]:
    """Looks at every block that the index knows. Returns the keys of those that fail."""
    try:
        fd = DISK.open(path / directory.DATA, READ)
    except OSError as error:
        report.add(directory.DATA, f"cannot be opened: {error.strerror}")
        return recovery.keys_of(records)
    bad: list[bytes] = []
    with ExitStack() as stack:
        stack.callback(DISK.close, fd)
        report.data_bytes = DISK.size(fd)
        slabs = Slabs(report.data_bytes, slab_bytes)
        fits = slabs.restore(records["page"], records["slot"])
        report.blocks, done, total = len(records), 0, int(records["slot"].sum(dtype="u8"))
        for i in records["page"].argsort(kind="stable").tolist():
            record = records[i]
            nbytes, slot, offset = int(record["nbytes"]), int(record["slot"]), int(record["page"]) * SLOT_ALIGN
            fault = "" if fits[i] and 0 < nbytes <= slot else "stands where no slot of its size is"
            if fault := fault or _fault_of(fd, record, nbytes, offset, digests.get(int(record["namespace"]))):
                report.add(f"{directory.DATA}+{offset}", fault)
                bad.append(record["key"].tobytes())
            else:
                report.whole += 1
                report.nbytes += nbytes
            done += slot
            advance(done, total)
    return bad


def _namespaces(numbers: set[int], described: recovery.Described, report: DirectoryReport) -> dict[int, bytes]:
    """The digests of these namespaces, by number; those that are not understood are found."""
    digests = {}
    for number in sorted(numbers):
        try:
            tenant, description = described[number]
            digests[number] = namespace_digest(parse_description(description), tenant)
        except KeyError:
            report.add("index", f"namespace {number} has blocks and no description")
        except KvtierError as error:
            report.add("index", f"namespace {number} is not understood: {error}")
    report.namespaces = len(digests)
    return digests


def _fault_of(fd: int, record: np.void, nbytes: int, offset: int, namespace: bytes | None) -> str:
    if namespace is None:
        return "is of a namespace that is not understood"
    key = record["key"].tobytes()
    with mmap(-1, nbytes) as memory, memoryview(memory) as block:
        try:
            got = DISK.read(fd, block, offset)
            if got < nbytes:
                return f"ends after {got} of {nbytes} bytes"
            header = verify(block, key, int(record["checksum"]))
            what = (header.namespace, header.resolved, header.context, header.content_hash, header.hash_bytes)
            derived = derive_keys(*what)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        except Lost as error:
            return f"is not what was written: {error}"
        except Invalid as error:
            return f"has a header that no daemon writes: {error}"
    if header.namespace != namespace:
        return "is of another namespace than its record says"
    return "" if derived == [key] else "has a key that does not follow from its header"


def _repair(path: Path, misplaced: list[Path], broken: dict[Path, int], bad: list[bytes]) -> None:
    for entry in misplaced:
        DISK.rename(entry, _place(path, entry.name))
    for file, good in broken.items():
        with DISK.opened(file, READ) as fd:
            tail = os.pread(fd, _MAX_TAIL, good)
        with DISK.opened(_place(path, f"{file.name}+{good}"), APPEND | CREATE) as fd:
            DISK.append(fd, tail)
            DISK.sync(fd)
    for file, good in broken.items():
        with DISK.opened(file, APPEND) as fd:
            DISK.truncate(fd, good)
    journal = Journal(path, 2**62, True, DISK)
    try:
        for _ in journal.load():  # which removes what was replaced
            pass
        if bad:
            journal.append(recovery.forgets(bad))
    finally:
        journal.close()
    DISK.sync_directory(path)


def _place(path: Path, name: str) -> Path:
    """A free name in the quarantine, which is made if need be."""
    folder = path / directory.QUARANTINE
    folder.mkdir(mode=0o700, exist_ok=True)
    n = 0
    while os.path.lexists(place := folder / (f"{name}.{n}" if n else name)):
        n += 1
    DISK.sync_directory(path)
    return place
