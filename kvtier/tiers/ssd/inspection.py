"""Checks an SSD directory while no daemon has it: every index file, every record, the header and every byte of every
block, and what else lies there.

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

from kvtier.errors import Invalid, KvtierError, Lost
from kvtier.format.block import verify
from kvtier.format.identity import derive_keys, namespace_digest, parse_description
from kvtier.format.layout import SLOT_ALIGN
from kvtier.store.allocator import Slabs
from kvtier.tiers.ssd import directory, recovery
from kvtier.tiers.ssd.disk import APPEND, CREATE, READ, Disk
from kvtier.tiers.ssd.journal import IndexFiles, Journal, NamespaceEntry, Records, files_in, frames_of

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
        """Whether nothing is left to repair."""
        return self.found == self.repaired

    def add(self, where: str, what: str) -> None:
        """Notes a finding."""
        self.found += 1
        if len(self.findings) < MAX_LISTED:
            self.findings.append(Damage(where, what))


def check(path: Path, repair: bool = False, advance: Advance = lambda done, total: None) -> DirectoryReport:
    """Looks at everything, and repairs it if told to. `advance` hears how many bytes of slots are read, of how many.

    Raises Invalid (no SSD directory), Unavailable (a daemon has it), Full (the disk fails).
    """
    disk, report = Disk(), DirectoryReport()
    with ExitStack() as stack, directory.explained(path):
        if not path.is_dir() or not (path / directory.FORMAT_FILE).exists():
            raise Invalid(f"{path} is not an SSD tier's directory: it has no {directory.FORMAT_FILE}")
        stack.callback(disk.close, directory.claim(path, disk))
        slab_bytes = directory.read_format(path, disk)
        assert slab_bytes is not None
        files = files_in(path)
        misplaced, broken = _files(path, files, report, disk)
        records, described = recovery.read(_entries(files, disk))
        bad = _blocks(path, records, described, slab_bytes, report, advance, disk)
        if repair and report.found:
            _repair(path, misplaced, broken, bad, disk)
            report.repaired = report.found
    return report


# -- looking


def _files(path: Path, files: IndexFiles, report: DirectoryReport, disk: Disk) -> tuple[list[Path], dict[Path, int]]:
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
        with open(disk.open(file, READ), "rb") as stream:
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


def _entries(files: IndexFiles, disk: Disk) -> Iterator[NamespaceEntry | bytes]:
    for file in _used(files):
        with open(disk.open(file, READ), "rb") as stream:
            yield from frames_of(stream, os.fstat(stream.fileno()).st_size)


def _blocks(
    path: Path,
    records: Records,
    described: recovery.Described,
    slab_bytes: int,
    report: DirectoryReport,
    advance: Advance,
    disk: Disk,
) -> list[bytes]:
    """Looks at every block that the index knows. Returns the keys of those that fail."""
    digests = _namespaces(recovery.namespaces_of(records), described, report)
    try:
        fd = disk.open(path / directory.DATA, READ)
    except OSError as error:
        report.add(directory.DATA, f"cannot be opened: {error.strerror}")
        return recovery.keys_of(records)
    bad: list[bytes] = []
    with ExitStack() as stack:
        stack.callback(disk.close, fd)
        report.data_bytes = disk.size(fd)
        slabs = Slabs(report.data_bytes, slab_bytes)
        fits = slabs.restore(records["page"], records["slot"])
        report.blocks, done, total = len(records), 0, int(records["slot"].sum(dtype="u8"))
        for i in records["page"].argsort(kind="stable").tolist():
            record, key = records[i], records[i]["key"].tobytes()
            nbytes, slot, offset = int(record["nbytes"]), int(record["slot"]), int(record["page"]) * SLOT_ALIGN
            fault = "" if fits[i] and 0 < nbytes <= slot else "stands where no slot of its size is"
            fault = fault or _fault_of(
                fd, disk, key, nbytes, offset, int(record["checksum"]), digests.get(int(record["namespace"]))
            )
            if fault:
                report.add(f"{directory.DATA}+{offset}", fault)
                bad.append(key)
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


def _fault_of(fd: int, disk: Disk, key: bytes, nbytes: int, offset: int, checksum: int, namespace: bytes | None) -> str:
    """What is wrong with a block; "" if nothing."""
    if namespace is None:
        return "is of a namespace that is not understood"
    with mmap(-1, nbytes) as memory, memoryview(memory) as block:
        try:
            got = disk.read(fd, block, offset)
            if got < nbytes:
                return f"ends after {got} of {nbytes} bytes"
            header = verify(block, key, checksum)
            derived = derive_keys(
                header.namespace, header.resolved, header.context, header.content_hash, header.hash_bytes
            )
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        except Lost as error:
            return f"is not what was written: {error}"
        except Invalid as error:
            return f"has a header that no daemon writes: {error}"
    if header.namespace != namespace:
        return "is of another namespace than its record says"
    return "" if derived == [key] else "has a key that does not follow from its header"


# -- repairing


def _repair(path: Path, misplaced: list[Path], broken: dict[Path, int], bad: list[bytes], disk: Disk) -> None:
    for entry in misplaced:
        disk.rename(entry, _place(path, entry.name, disk))
    for file, good in broken.items():
        with disk.opened(file, READ) as fd:
            tail = os.pread(fd, _MAX_TAIL, good)
        with disk.opened(_place(path, f"{file.name}+{good}", disk), APPEND | CREATE) as fd:
            disk.append(fd, tail)
            disk.sync(fd)
    for file, good in broken.items():
        with disk.opened(file, APPEND) as fd:
            disk.truncate(fd, good)
    journal = Journal(path, 2**62, True, disk)
    try:
        for _ in journal.load():  # which removes what was replaced
            pass
        if bad:
            journal.append(recovery.forgets(bad))
    finally:
        journal.close()
    disk.sync_directory(path)


def _place(path: Path, name: str, disk: Disk) -> Path:
    """A free name in the quarantine, which is made if need be."""
    folder = path / directory.QUARANTINE
    folder.mkdir(mode=0o700, exist_ok=True)
    n = 0
    while os.path.lexists(place := folder / (f"{name}.{n}" if n else name)):
        n += 1
    disk.sync_directory(path)
    return place
