"""The SSD tier: blocks in one preallocated file, slot by slot as they stand in the arena, and a journal that says which is where.

Bytes go straight between file and slot (O_DIRECT; through the page cache where the file system refuses, said once). Order of a put: what is
evicted for it is journalled as forgotten, then the data is written, then the journal says "here". So after a crash at any point each block is
whole or absent; a power cut without `sync` can leave a record without its data, which the checksum turns into a miss. A start reads the index only.
The capacity is a hard cap on everything in the directory, checked before writing, beside a floor of free space on the file system.
A fault of the disk degrades the tier (gauge, one log line a change; tried again after a pause), never the daemon. Thread-safe; its lock is held
for bookkeeping and journal appends, not while block bytes move.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier import block
from kvtier.errors import Full, Invalid, KvtierError, Lost, NotFound, Unavailable
from kvtier.layout import SLOT_ALIGN
from kvtier.ledger import Ledger, by_namespace
from kvtier.namespaces import Namespace
from kvtier.room import Counters, Room
from kvtier.slabs import Slabs, default_slab
from kvtier.tiers import Outgoing
from kvtier.tiers.journal import FORGET, PUT, RECORD, Journal, Records, sync_directory

FORMAT = 1
MIN_CAPACITY = 2**20
INDEX_SHARE = 16  # one part in 16 of the capacity is kept for journal and checkpoints
MAX_QUARANTINED = 256  # slots that failed a check are not used again before a restart; beyond, the oldest are
_PAUSE = (1.0, 30.0)  # seconds after a fault of the disk: first and longest
Register = Callable[[bytes, str], Namespace]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Totals:
    """Totals since the start."""

    written_blocks: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    refused_blocks: int = 0  # not written: no room, or the tier was degraded
    evicted_blocks: int = 0
    lost_blocks: int = 0  # failed their check when they came back
    read_faults: int = 0
    write_faults: int = 0
    checkpoints: int = 0


class _SsdRoom(Room):
    """Room whose evictions leave a tombstone for the journal."""

    def __init__(self, slabs: Slabs, ledger: Ledger, counters: Counters, tombstones: list[bytes]) -> None:
        super().__init__(None, slabs, ledger, counters, poison=False)
        self._tombstones = tombstones

    def free(self, rows: Sequence[int]) -> None:
        """Forgets rows; those that the journal knows get a tombstone."""
        self._tombstones += [self._ledger.key(row) for row in rows if self._ledger.checksum[row]]
        super().free(rows)


class Ssd:
    """Blocks in a directory that belongs to this process.

    capacity    bytes of everything in the directory, never exceeded
    register    makes a namespace known from its description and tenant (Namespaces.register), called for what the directory holds
    sync        a written block also survives a power cut
    min_free    bytes that stay free on the file system for others; the file does not grow below that

    Raises Invalid (unusable directory or size), Unavailable (another process owns it).
    """

    name = "ssd"

    def __init__(self, directory: Path, capacity: int, register: Register, *, sync: bool = False, min_free: int = 0) -> None:
        if capacity < MIN_CAPACITY:
            raise Invalid(f"an SSD tier has at least {MIN_CAPACITY} bytes, not {capacity}")
        self._directory = directory
        self._sync = sync
        self._min_free = min_free
        self._lock = threading.Lock()
        self.totals = Totals()
        self.capacity = capacity
        self._fault = ""
        self._failures = 0
        self._not_before = 0.0
        self._fd = -1
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._guard = _claim(directory)
        except OSError as error:
            raise Invalid(f"cannot use {directory} as SSD tier: {error.strerror}") from None
        try:
            self._open(register)
        except BaseException:
            self.close()
            raise

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether the block is indexed here. No I/O and no lock, which a slow disk may hold: single dict reads are atomic."""
        return [row is not None for row in self._ledger.find_each(keys)]

    def write(self, blocks: Sequence[Outgoing]) -> list[bool]:
        """Keeps blocks, evicting what was used longest ago. For each whether it is here now; False after a fault or without room."""
        here = [False] * len(blocks)
        placed: list[tuple[int, int]] = []
        try:
            with self._lock:
                if time.monotonic() < self._not_before:
                    self.totals.refused_blocks += len(blocks)
                    return self._known(blocks)
                placed = self._place(blocks, here)
                self._bury()
        except OSError as error:
            self._failed("journal", error, placed_rows(placed))
            return here
        try:
            for i, row in placed:
                _write_slot(self._fd, blocks[i].slot, self._ledger.page[row] * SLOT_ALIGN)
            if self._sync and placed:
                os.fdatasync(self._fd)
            with self._lock:
                self._seal(blocks, placed, here)
        except OSError as error:
            self._failed("data", error, placed_rows(placed))
            return self._known(blocks)
        if placed:
            self._recovered()
        self._maybe_checkpoint()
        return here

    def read(self, key: bytes, slot: memoryview, nbytes: int) -> int:
        """Reads a block into `slot` (its whole slot is read) and returns its checksum, verified. Raises NotFound, Lost or Unavailable."""
        with self._lock:
            rows = self._ledger.find([key])
            if not rows:
                raise NotFound("not on the SSD")
            row = rows[0]
            size, checksum, known = self._ledger.slot[row], self._ledger.checksum[row], self._ledger.nbytes[row]
            offset = self._ledger.page[row] * SLOT_ALIGN
            self._ledger.lease(rows)
        bad = ""
        try:
            if known != nbytes or size != len(slot):
                raise Lost(f"a block of {known} bytes in a slot of {size}, asked for as {nbytes} in {len(slot)}")
            got = os.preadv(self._fd, [slot], offset)
            if got != size:
                raise Lost(f"the data file ends inside the block: {got} of {size} bytes")
            block.verify(slot[:nbytes], key, checksum)
        except Lost as error:
            bad = str(error)
            raise
        except OSError as error:
            self.totals.read_faults += 1
            raise Unavailable(f"reading the SSD failed: {error.strerror}") from None
        finally:
            with self._lock:
                self._done_reading(row, bad)
        self.totals.read_blocks += 1
        self.totals.read_bytes += nbytes
        return checksum

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forgets these blocks, with tombstones in the journal."""
        with self._lock:
            rows = list(dict.fromkeys(row for row in self._ledger.find_each(keys) if row is not None))
            return self._forget(rows)

    def drop(self, namespace: Namespace) -> int:
        """Forgets all blocks of a namespace."""
        dropped = 0
        while True:
            with self._lock:
                rows = self._ledger.rows_of_namespace(namespace.handle, 2048)
                if not rows:
                    return dropped
                dropped += self._forget(rows)

    def handles(self) -> set[int]:
        """Handles of the namespaces whose blocks are here."""
        with self._lock:
            return self._ledger.handles()

    def gauges(self) -> dict[str, int]:
        """Numbers for operators; `degraded` is 1 while faults or lack of space keep blocks out."""
        with self._lock:
            books = {
                "capacity_bytes": self.capacity,
                "file_bytes": self._backed * self._slabs.slab_bytes,
                "used_bytes": self._slabs.taken_bytes(),
                "blocks": self._ledger.known,
                "quarantined_slots": len(self._quarantine),
                "degraded": int(bool(self._fault)),
                "direct": int(self._direct),
            }
        return books | {f"{name}_total": getattr(self.totals, name) for name in self.totals.__slots__}

    def blocks_by_namespace(self) -> dict[int, tuple[int, int]]:
        """{handle: (blocks, their bytes)}."""
        with self._lock:
            snapshot = self._ledger.snapshot()
        return by_namespace(*snapshot)

    def check_integrity(self) -> None:
        """Asserts that index and slots agree."""
        with self._lock:
            pages = self._ledger.check_integrity()
            self._slabs.check_integrity({page: self._ledger.slot[row] for page, row in pages.items()})

    def close(self) -> None:
        """Closes files and gives the directory up."""
        for fd in (self._fd, self._guard):
            if fd >= 0:
                os.close(fd)
        self._fd = self._guard = -1
        if hasattr(self, "_journal"):
            self._journal.close()

    # -- start

    def _open(self, register: Register) -> None:
        """Reads the index, opens the data file. Raises Invalid for a directory of another format."""
        data = self.capacity - self.capacity // INDEX_SHARE
        disk = os.statvfs(self._directory)
        data = min(data, max(MIN_CAPACITY, disk.f_blocks * disk.f_frsize - self._min_free - self.capacity // INDEX_SHARE))
        slab_bytes = _format(self._directory, default_slab(data))
        self._fd, self._direct = _open_data(self._directory / "blocks")
        size = os.fstat(self._fd).st_size
        if size > data // slab_bytes * slab_bytes:  # the capacity was made smaller
            size = data // slab_bytes * slab_bytes
            os.ftruncate(self._fd, size)
        self._backed = size // slab_bytes
        self._slabs = Slabs(data, slab_bytes, self._backed)
        self._ledger = Ledger()
        self._counters = Counters()
        self._tombstones: list[bytes] = []
        self._room = _SsdRoom(self._slabs, self._ledger, self._counters, self._tombstones)
        self._quarantine: list[int] = []
        self._numbers: dict[int, int] = {}  # handle -> number in the journal
        self._described: dict[int, tuple[str, bytes]] = {}  # number -> (tenant, description)
        self._journal = Journal(self._directory, self._sync)
        self._checkpointing = False
        began = time.monotonic()
        records = self._replay(register)
        self._restore(records)
        log.info("ssd: %d blocks in %s, index read in %.3f s", self._ledger.known, self._directory, time.monotonic() - began)

    def _replay(self, register: Register) -> Records:
        """The live records in the order they were put; namespaces become known on the way."""
        handles: dict[int, int] = {}
        parts: list[bytes] = []
        for entry in self._journal.load():
            if isinstance(entry, bytes):
                parts.append(entry)
                continue
            number, tenant, description = entry
            try:
                namespace = register(description, tenant)
            except KvtierError as error:  # a description of a newer version: its blocks are unreadable, not dangerous
                log.warning("ssd: a namespace in %s is not understood: %s", self._directory, error)
                continue
            handles[number] = namespace.handle
            self._numbers[namespace.handle] = number
            self._described[number] = (tenant, description)
        records = _latest(np.frombuffer(b"".join(parts), RECORD))
        known = np.isin(records["namespace"], np.fromiter(handles, np.uint32, len(handles)))
        records = records[known].copy()
        if len(records):
            table = np.zeros(max(handles) + 1, np.uint32)
            table[list(handles)] = list(handles.values())
            records["namespace"] = table[records["namespace"]]
        return records

    def _restore(self, records: Records) -> None:
        ok = self._slabs.restore(records["page"].astype(np.uint32), records["slot"].astype(np.uint32))
        records = records[ok & (records["nbytes"] <= records["slot"])]
        sizes = np.zeros(len(records), np.uint8)
        for slot, size in self._slabs.classes.items():
            sizes[records["slot"] == slot] = size.index
        columns = {name: records[name] for name in ("page", "nbytes", "slot", "namespace", "checksum")} | {"size": sizes}
        self._ledger.restore(columns, _keys(records))

    # -- under the lock

    def _known(self, blocks: Sequence[Outgoing]) -> list[bool]:
        return [row is not None for row in self._ledger.find_each([b.key for b in blocks])]

    def _place(self, blocks: Sequence[Outgoing], here: list[bool]) -> list[tuple[int, int]]:
        """Takes slots for blocks that are not here yet: [(index, row)]. Marks those that are."""
        placed = []
        for i, (out, known) in enumerate(zip(blocks, self._known(blocks), strict=True)):
            if known or out.namespace.dropped:
                here[i] = known
                continue
            try:
                size = self._room.size_class(len(out.slot))
                if not size.free and not self._slabs.unowned:
                    self._grow()
                pages = self._room.take(size, 1)
            except (Full, Invalid):
                self.totals.refused_blocks += 1
                continue
            rows = self._ledger.reserve(pages, [out.key], out.nbytes, len(out.slot), size.index, out.namespace.handle)
            placed.append((i, rows[0]))
        return placed

    def _grow(self) -> None:
        """Puts disk behind one more slab, if capacity and file system allow; else what is there must do."""
        slab = self._slabs.unbacked
        if slab is None:
            return
        size = self._slabs.slab_bytes
        disk = os.statvfs(self._directory)
        if disk.f_bavail * disk.f_frsize - size < self._min_free:
            self._note(f"the file system is down to {disk.f_bavail * disk.f_frsize} free bytes")
            return
        try:
            os.posix_fallocate(self._fd, slab * size, size)
        except OSError as error:
            os.ftruncate(self._fd, slab * size)
            self._note(f"the file cannot grow: {error.strerror}")
            return
        self._slabs.back()
        self._backed = slab + 1

    def _bury(self) -> None:
        """Journals what was forgotten. Raises OSError; the tombstones wait for the next try, and no data is written before."""
        if self._tombstones:
            self.totals.evicted_blocks += len(self._tombstones)
            records = np.zeros(len(self._tombstones), RECORD)
            records["kind"] = FORGET
            records["key"] = np.frombuffer(b"".join(self._tombstones), "V32")
            self._journal.append(records)
            self._tombstones.clear()

    def _seal(self, blocks: Sequence[Outgoing], placed: list[tuple[int, int]], here: list[bool]) -> None:
        """The data is written: journals it, then makes it known. Raises OSError with nothing known."""
        ledger = self._ledger
        wanted = [(i, row) for i, row in placed if not blocks[i].namespace.dropped and not self._known([blocks[i]])[0]]
        if wanted:
            records = np.zeros(len(wanted), RECORD)
            records["kind"] = PUT
            records["key"] = np.frombuffer(b"".join(blocks[i].key for i, _ in wanted), "V32")
            for name, column in (("nbytes", ledger.nbytes), ("page", ledger.page), ("slot", ledger.slot)):
                records[name] = [column[row] for _, row in wanted]
            records["namespace"] = [self._number(blocks[i].namespace) for i, _ in wanted]
            records["checksum"] = [blocks[i].checksum for i, _ in wanted]
            self._journal.append(records)
        for i, row in placed:
            if (i, row) in wanted and ledger.seal([row])[0]:
                ledger.checksum[row] = blocks[i].checksum
                here[i] = True
                self.totals.written_blocks += 1
                self.totals.written_bytes += blocks[i].nbytes
            else:
                self._room.free([row])  # its checksum is 0: no tombstone
                here[i] = self._known([blocks[i]])[0]

    def _number(self, namespace: Namespace) -> int:
        """The journal's number of a namespace, told to the journal on first use. Raises OSError."""
        number = self._numbers.get(namespace.handle)
        if number is None:
            number = max(self._described, default=0) + 1
            canonical = namespace.description.canonical
            self._journal.append_namespace(number, namespace.tenant, canonical)
            self._numbers[namespace.handle] = number
            self._described[number] = (namespace.tenant, canonical)
        return number

    def _done_reading(self, row: int, bad: str) -> None:
        """Ends a read's lease. A block that failed its check leaves the index; its slot is not used again for now."""
        ledger = self._ledger
        if bad and ledger.is_sealed(row):
            log.warning("ssd: a block was dropped: %s", bad)
            self.totals.lost_blocks += 1
            self._tombstones.append(ledger.key(row))
            ledger.doom(row)
            ledger.lease([row])  # the quarantine's own hold
            self._quarantine.append(row)
            if len(self._quarantine) > MAX_QUARANTINED:
                self._release(self._quarantine.pop(0))
        self._release(row)

    def _release(self, row: int) -> None:
        _, doomed = self._ledger.release([row])
        if doomed:
            for gone in doomed:
                self._ledger.checksum[gone] = 0  # its tombstone was written when it was doomed
            self._room.free(doomed)

    def _forget(self, rows: Sequence[int]) -> int:
        leases = self._ledger.leases
        for row in rows:
            if leases[row]:
                self._tombstones.append(self._ledger.key(row))
                self._ledger.doom(row)
        self._room.free([row for row in rows if not leases[row]])
        try:
            self._bury()
        except OSError as error:
            self._note(f"the journal cannot be written: {error.strerror}")
        return len(rows)

    def _note(self, fault: str) -> None:
        if not self._fault:
            log.warning("ssd: degraded: %s", fault)
        self._fault = self._fault or fault

    # -- faults and upkeep

    def _failed(self, what: str, error: OSError, rows: list[int]) -> None:
        """Takes back what a failed write had reserved and pauses writing."""
        with self._lock:
            self._room.free([row for row in rows if self._ledger.is_reserved(row)])
            self.totals.write_faults += 1
            first, longest = _PAUSE
            self._failures += 1
            self._not_before = time.monotonic() + min(longest, first * 2 ** (self._failures - 1))
            self._note(f"writing {what} failed: {error.strerror}")

    def _recovered(self) -> None:
        with self._lock:
            self._failures = 0
            if self._fault:
                disk = os.statvfs(self._directory)
                if self._slabs.unbacked is not None and disk.f_bavail * disk.f_frsize - self._slabs.slab_bytes < self._min_free:
                    return  # it works, but cannot grow
                log.warning("ssd: recovered from: %s", self._fault)
                self._fault = ""

    def _maybe_checkpoint(self) -> None:
        with self._lock:
            if self._checkpointing or self._journal.bytes < max(2**18, self.capacity // 64):
                return
            self._checkpointing = True
            try:
                number = self._journal.rotate()
                records = self._snapshot()
                described = {self._numbers[h]: self._described[self._numbers[h]] for h in self._ledger.handles() if h in self._numbers}
            except OSError as error:
                self._checkpointing = False
                self._note(f"the journal cannot be rotated: {error.strerror}")
                return
        threading.Thread(target=self._checkpoint, args=(number, described, records), name="ssd-checkpoint", daemon=True).start()

    def _checkpoint(self, number: int, described: dict[int, tuple[str, bytes]], records: Records) -> None:
        try:
            self._journal.checkpoint(number, described, records)
            self.totals.checkpoints += 1
        except OSError as error:
            with self._lock:
                self._note(f"a checkpoint cannot be written: {error.strerror}")
        finally:
            self._checkpointing = False

    def _snapshot(self) -> Records:
        """Records of all sealed blocks, oldest first."""
        rows = self._ledger.sealed_rows_by_age()
        records = np.zeros(len(rows), RECORD)
        records["kind"] = PUT
        for name in ("nbytes", "page", "slot", "checksum"):
            records[name] = np.frombuffer(getattr(self._ledger, name), {"checksum": np.uint64}.get(name, np.uint32))[rows]
        handles = np.frombuffer(self._ledger.namespace, np.uint32)[rows]
        table = np.zeros(int(handles.max(initial=0)) + 1, np.uint32)
        for handle, number in self._numbers.items():
            if handle < len(table):
                table[handle] = number
        records["namespace"] = table[handles]
        records["key"] = np.frombuffer(b"".join(map(self._ledger.key, rows.tolist())), "V32")
        return records


def placed_rows(placed: list[tuple[int, int]]) -> list[int]:
    """Rows of what `_place` took."""
    return [row for _, row in placed]


def _latest(records: Records) -> Records:
    """What is left of puts and forgets: the last put of each key that was not forgotten after, and of each slot, in the order they were put."""
    keys = _keys(records)
    if (records["kind"] != PUT).any() or len(set(keys)) != len(keys):
        last: dict[bytes, int] = {}
        for i, (key, kind) in enumerate(zip(keys, records["kind"].tolist(), strict=True)):
            last.pop(key, None)
            if kind == PUT:
                last[key] = i
        records = records[np.fromiter(last.values(), np.int64, len(last))]
    order = np.argsort(records["page"], kind="stable")
    pages = records["page"][order]
    final = np.append(pages[1:] != pages[:-1], True)[: len(pages)]  # of two on one slot the later has written over the earlier
    return records if final.all() else records[np.sort(order[final])]


def _keys(records: Records) -> list[bytes]:
    raw = np.ascontiguousarray(records["key"]).tobytes()
    return [raw[at : at + 32] for at in range(0, len(raw), 32)]


def _claim(directory: Path) -> int:
    """The directory's lock, held while this process lives. Raises Unavailable if another holds it."""
    guard = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(guard, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(guard)
        raise Unavailable(f"{directory} belongs to another daemon (process {owner}): stop it, or give this one its own directory") from None
    os.ftruncate(guard, 0)
    os.pwrite(guard, str(os.getpid()).encode(), 0)
    return guard


def _format(directory: Path, slab_bytes: int) -> int:
    """Bytes of a slab in this directory: read from its format file, which a new directory gets. Raises Invalid for another format."""
    path = directory / "format.json"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        if leftovers := sorted(entry.name for entry in directory.iterdir() if entry.name not in ("lock", "lost+found")):
            raise Invalid(f"{directory} holds other files ({', '.join(leftovers)[:100]}): give the SSD tier a directory of its own") from None
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"kvtier_ssd": FORMAT, "slab_bytes": slab_bytes}))
        temporary.rename(path)
        sync_directory(directory)
        return slab_bytes
    with open(fd) as file:
        try:
            told = json.load(file)
            if told["kvtier_ssd"] != FORMAT:
                raise Invalid(f"{directory} has SSD format {told['kvtier_ssd']}; this version reads {FORMAT}: move it away, or run that version")
            slab = int(told["slab_bytes"])
        except (ValueError, KeyError, TypeError):
            raise Invalid(f"{path} is not readable: move the directory away to start empty, or run `kvtier fsck`") from None
    if slab <= 0 or slab % SLOT_ALIGN:
        raise Invalid(f"{path} names slabs of {slab} bytes, not a multiple of {SLOT_ALIGN}")
    return slab


def _open_data(path: Path) -> tuple[int, bool]:
    """The data file and whether it bypasses the page cache."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError:
        fd = os.open(path, flags, 0o600)
        log.warning("ssd: the file system of %s refuses O_DIRECT; the page cache is used instead", path.parent)
        return fd, False


def _write_slot(fd: int, slot: memoryview, offset: int) -> None:
    """The whole slot at this offset. Raises OSError."""
    written = os.pwritev(fd, [slot], offset)
    while written < len(slot):  # only a file system that is nearly full or a signal does this
        step = os.pwritev(fd, [slot[written:]], offset + written)
        if step <= 0:
            raise OSError(5, "a short write")
        written += step
