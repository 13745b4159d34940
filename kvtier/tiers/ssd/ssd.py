"""The SSD tier: blocks in one preallocated file, slot by slot as in the arena, and a journal that says which is where.

Order of a put: what is evicted for it is journalled as forgotten, then the data is written, then the journal says
"here". So after a crash at any point each block is whole or absent; a power cut without `sync` can leave a record
without its data, which the checksum turns into a miss. A start reads the index only. The capacity is a hard cap on
everything in the directory, checked before writing, beside a floor of free space on the file system. A fault of the
disk degrades the tier (gauge, one log line a change; tried again after a pause), never the daemon.

Thread-safe. The index's lock keeps the journal in order and may be held for as long as the disk takes; `_lock` guards
everything in memory and is held for microseconds, never over I/O. Taken in this order. The format is docs/ssd.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import Full, Invalid, Lost, NotFound, Unavailable
from kvtier.format import block
from kvtier.format.layout import SLOT_ALIGN
from kvtier.format.slots import default_slab
from kvtier.store.allocator import Allocator, Slabs
from kvtier.store.eviction import Aging, Eviction
from kvtier.store.ledger import Ledger, by_namespace
from kvtier.store.namespaces import Namespace
from kvtier.store.store_counters import Counters
from kvtier.tiers.health import READ, SPACE, WRITE, Health
from kvtier.tiers.ssd import directory, recovery
from kvtier.tiers.ssd.data_file import DataFile
from kvtier.tiers.ssd.disk import DISK, Disk
from kvtier.tiers.ssd.index import Index, Register, Tombstones
from kvtier.tiers.ssd.journal import Journal
from kvtier.tiers.tier import Outgoing

MIN_CAPACITY, MAX_CAPACITY = 4 * 2**20, 2**44  # a slot's place is 32 bits of pages
# One part in 16 of the capacity is for journal and checkpoints: four records of 64 bytes for each slot of 4 KiB.
INDEX_SHARE = 16
MIN_INDEX = 2**18  # bytes
SMALL = 2**16  # of that for the small files, and for what files take beyond their sizes
# Slots that failed a check rest: so many, or one part in 64 of the file; then the oldest are used again.
MAX_QUARANTINED, QUARANTINE_SHARE = 256, 64
MAX_FAILED_READS = 4096  # blocks whose last read failed that are remembered
MAX_FAULTS = 3  # reads of one block that fail one after another before it is given up
_AGAIN = 2.0  # seconds after the first failed read in which a block counts as absent; twice as long after each more
PATIENCE = 5.0  # seconds that `close` waits for calls under way
Placed = list[tuple[Outgoing, int]]  # blocks and the rows reserved for them
log = logging.getLogger(__name__)


@dataclass(slots=True)
class SsdTotals:
    """Totals since the start."""

    written_blocks: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    refused_blocks: int = 0  # not written: no space, or writing pauses
    lost_blocks: int = 0  # failed their check when they came back, or could not be read again and again
    read_faults: int = 0
    write_faults: int = 0


class FailedReads:
    """Blocks whose last read failed: absent for a while, given up after `MAX_FAULTS`. Under the tier's lock, but for
    `wait` and the truth of the whole, which are single reads of a dict."""

    def __init__(self) -> None:
        self._until: dict[bytes, tuple[float, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._until)

    def wait(self, key: bytes, now: float) -> bool:
        found = self._until.get(key)
        return found is not None and now < found[0]

    def add(self, key: bytes, now: float) -> bool:
        """A read failed. Whether the block is to be given up."""
        failures = self._until.get(key, (0.0, 0))[1] + 1
        self._until[key] = (now + _AGAIN * 2.0 ** (failures - 1), failures)
        if len(self._until) > MAX_FAILED_READS:
            del self._until[next(iter(self._until))]
        return failures >= MAX_FAULTS

    def clear(self, key: bytes) -> None:
        self._until.pop(key, None)


class SsdAllocator(Allocator):
    """Allocator whose evictions leave a tombstone for the journal."""

    def __init__(self, slabs: Slabs, ledger: Ledger, counters: Counters, tombstones: Tombstones) -> None:
        super().__init__(None, slabs, ledger, Eviction(ledger, learns=False), counters, poison=False)
        self._tombstones = tombstones

    def free(self, rows: Sequence[int]) -> None:
        """Forgets rows; those that the journal has, whose checksum is set, get a tombstone."""
        for key, checksum in zip(self._ledger.keys(rows), self._ledger.checksums(rows), strict=True):
            if checksum:
                self._tombstones.add(key)
        super().free(rows)


class Ssd:
    """Blocks in a directory that belongs to this process.

    capacity    bytes of everything in the directory, never exceeded
    register    makes a namespace known from description and tenant (Namespaces.register): for what the directory holds
    sync        a written block also survives a power cut
    min_free    bytes that stay free on the file system for others; the file does not grow below that

    Raises Invalid (unusable directory or size), Unavailable (another process owns it), Full (a disk that fails, or no
    descriptors).
    """

    name = "ssd"

    def __init__(
        self, path: Path, capacity: int, register: Register, *, sync: bool = False, min_free: int = 0, disk: Disk = DISK
    ) -> None:
        if not MIN_CAPACITY <= capacity <= MAX_CAPACITY:
            raise Invalid(f"an SSD tier has {MIN_CAPACITY} to {MAX_CAPACITY} bytes, not {capacity}")
        self.capacity, self.totals = capacity, SsdTotals()
        self._path, self._sync, self._min_free, self._disk = path, sync, min_free, disk
        self._lock = threading.Condition(threading.Lock())
        self._health = Health(self.name)
        self._failed_reads, self._tombstones = FailedReads(), Tombstones()
        self._quarantine: list[int] = []
        self._users, self._closing = 0, False
        with ExitStack() as stack, directory.explained(path):
            directory.make(path, self._disk)
            stack.callback(self._disk.close, directory.claim(path, self._disk))
            self._open(register, stack)
            self._files = stack.pop_all()

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """False too for a block that could not be read a moment ago. No I/O and no lock: dict reads are atomic."""
        rows, now = self._ledger.find_each(keys), time.monotonic() if self._failed_reads else 0.0
        waits = self._failed_reads.wait
        return [row is not None and not (now and waits(key, now)) for key, row in zip(keys, rows, strict=True)]

    def unsure(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def write(self, blocks: Sequence[Outgoing]) -> list[bool]:
        """Keeps blocks, evicting what was used longest ago. False for each that is not here now: a fault, no space."""
        with self._used():
            placed: Placed = []
            try:
                self._await_index(len(blocks))
                with self._index.lock:
                    self._index.put_tombstones()  # what an earlier write could not: else nothing more is evicted
                    self._grow(blocks)
                    with self._lock:
                        self._place(blocks, placed)
                self._await_index(len(placed))  # a slab emptied for one block leaves a tombstone for each of many
                with self._index.lock:
                    self._index.put_tombstones()
                if placed:
                    self._data.write([(out.slot, self._ledger.place(row)[0] * SLOT_ALIGN) for out, row in placed])
                    with self._index.lock:
                        self._seal(placed)
            except Full:
                with self._lock:
                    self.totals.refused_blocks += self._known(blocks).count(False)
            except OSError as error:
                self._failed(error)
            finally:
                if placed:
                    with self._lock:
                        self._allocator.free([row for _, row in placed])
            with self._lock:
                if self._index.due():
                    self._lock.notify_all()
                return self._known(blocks)

    def read(self, key: bytes, slot: memoryview, nbytes: int) -> int:
        """Reads a block's whole slot into `slot`; its checksum, verified. Raises NotFound, Lost or Unavailable."""
        ledger = self._ledger
        with self._used():
            with self._lock:
                row = ledger.find_each([key])[0]
                if row is None:
                    raise NotFound("not on the SSD")
                (page, size, known), (checksum,) = ledger.place(row), ledger.checksums([row])
                offset = page * SLOT_ALIGN
                ledger.lease([row])
            fault: Exception | None = None
            try:
                if known != nbytes or size != len(slot):
                    raise Lost(f"a block of {known} bytes in a slot of {size}, asked for as {nbytes} in {len(slot)}")
                if (got := self._data.read(slot, offset)) != size:
                    raise Lost(f"the data file ends inside the block: {got} of {size} bytes")
                block.verify(slot[:nbytes], key, checksum)
            except Lost as error:
                fault = error
                raise
            except OSError as error:
                fault = error
                raise Unavailable(f"reading the SSD failed: {error.strerror}") from None
            finally:
                with self._lock:
                    self._done_reading(row, key, nbytes, fault)
            return checksum

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forgets blocks. Their tombstones are on disk on return, unless the disk takes longer than 50 ms."""
        with self._lock:
            rows = list(dict.fromkeys(row for row in self._ledger.find_each(keys) if row is not None))
            self._forget(rows)
            self._index.await_tombstones()
        return len(rows)

    def drop(self, namespace: Namespace) -> int:
        dropped = 0
        while True:
            with self._lock:
                rows = self._ledger.rows_of_namespace(namespace.handle, 2048)
                self._forget(rows)
                if not rows:
                    self._index.await_tombstones()
                    return dropped
            dropped += len(rows)

    def handles(self) -> set[int]:
        with self._lock:
            return self._ledger.handles()

    def gauges(self) -> dict[str, int]:
        """Numbers for operators; `degraded` is 1 while faults or lack of space keep blocks out."""
        with self._lock:
            return {
                "capacity_bytes": self.capacity,
                "file_bytes": self._data.nbytes,
                "index_bytes": self._index.nbytes,
                "used_bytes": self._slabs.taken_bytes(),
                "blocks": self._ledger.known,
                "quarantined_slots": len(self._quarantine),
                "degraded": int(self._health.degraded),
                "direct": int(self._data.direct),
                "evicted_blocks_total": self._counters.evicted_blocks,
                "expired_blocks_total": self._counters.expired_blocks,
                "checkpoints_total": self._index.checkpoints,
                **{f"{name}_total": getattr(self.totals, name) for name in self.totals.__slots__},
            }

    def blocks_by_namespace(self) -> dict[int, tuple[int, int]]:
        with self._lock:
            snapshot = self._ledger.snapshot()
        return by_namespace(*snapshot)

    def fault(self) -> str:
        return self._health.fault

    def check_integrity(self) -> None:
        with self._lock:
            pages = self._ledger.check_integrity()
            self._slabs.check_integrity({page: self._ledger.place(row)[1] for page, row in pages.items()})
            assert self._data.nbytes + self._index.nbytes + SMALL <= self.capacity, "more bytes than the capacity"
            held = self._ledger.held_rows()
            assert self._users or held == dict.fromkeys(self._quarantine, 1), "a row is leased and not read"

    def close(self) -> None:
        """Ends the thread and frees the directory. Keeps both if the disk holds a call for longer than `PATIENCE`."""
        with self._lock:
            self._closing = True
            idle = self._lock.wait_for(lambda: not self._users, PATIENCE)
        if self._index.stop(PATIENCE if idle else 0.1) and idle:
            self._files.close()
        else:
            log.warning("ssd still busy")

    def _open(self, register: Register, stack: ExitStack) -> None:
        """Reads the index, opens the data file; `stack` closes them. Raises Invalid (another format), OSError."""
        usable = min(self.capacity, max(MIN_CAPACITY, self._disk.free(self._path)[0] - self._min_free))
        index = max(MIN_INDEX, usable // INDEX_SHARE)
        data = usable - index
        slab_bytes = directory.read_format(self._path, self._disk)
        if slab_bytes is None:
            slab_bytes = default_slab(data)
            directory.write_format(self._path, slab_bytes, self._disk)
        if slab_bytes > data:
            advice = "make the size larger, or begin with an empty directory"
            raise Invalid(f"{self._path} has slabs of {slab_bytes} bytes; {data} are too few: {advice}")
        self._data = DataFile(self._path / directory.DATA, self._disk, slab_bytes, data // slab_bytes, self._sync)
        stack.callback(self._data.close)
        self._slabs = Slabs(data, slab_bytes, self._data.slabs)
        self._ledger = Ledger()
        self._counters = Counters()
        self._allocator = SsdAllocator(self._slabs, self._ledger, self._counters, self._tombstones)
        self.aging = Aging(self._ledger, self._lock, self._counters, self._forget)
        journal = Journal(self._path, index - SMALL, self._sync, self._disk)
        stack.callback(journal.close)
        self._index = Index(journal, self._ledger, self._tombstones, self._lock, self._health)
        began = time.monotonic()
        records = self._index.load(register)
        fits = (records["nbytes"] <= records["slot"]) & (records["nbytes"] > 0)
        fits[fits] = self._slabs.restore(records["page"][fits], records["slot"][fits])
        self._index.disown(records[~fits])
        records = records[fits]
        columns = {name: records[name] for name in ("page", "nbytes", "slot", "namespace", "checksum")}
        self._ledger.restore({**columns, "size": self._slabs.indices(records["slot"])}, recovery.keys_of(records))
        self._index.start(self._failed)
        seconds = round(time.monotonic() - began, 3)
        log.info("ssd opened", extra={"fields": {"blocks": self._ledger.known, "path": self._path, "seconds": seconds}})

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Files stay open inside. Raises Unavailable once `close` was called."""
        with self._lock:
            if self._closing:
                raise Unavailable("the SSD tier is closed")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._closing:
                    self._lock.notify_all()

    def _await_index(self, blocks: int) -> None:
        """Waits a moment until the index has space for so many blocks. Raises Full, at once while writing pauses. Not
        under the index's lock, which a checkpoint needs."""
        with self._lock:
            if self._health.paused(WRITE) or not self._index.has_space(blocks):
                raise Full("not now")

    def _known(self, blocks: Sequence[Outgoing]) -> list[bool]:
        return [row is not None for row in self._ledger.find_each([out.key for out in blocks])]

    def _grow(self, blocks: Sequence[Outgoing]) -> None:
        """Puts disk behind as many slabs as these blocks need, as far as capacity and file system allow."""
        while self._short_of(blocks):
            fault = self._data.grow(self._min_free)
            with self._lock:
                if fault:
                    self._health.bad(SPACE, fault, pause=False)
                    return
                self._slabs.back()
                self._health.good(SPACE)

    def _short_of(self, blocks: Sequence[Outgoing]) -> bool:
        """Whether these blocks need another slab with disk behind it, and the capacity has one."""
        slabs = self._slabs
        with self._lock:
            if slabs.unbacked is None:
                self._health.good(SPACE)
                return False
            fresh = Counter(len(out.slot) for out, known in zip(blocks, self._known(blocks), strict=True) if not known)
            need = 0
            for slot, n in fresh.items():
                free = len(slabs.classes[slot].free) if slot in slabs.classes else 0
                if slot <= slabs.slab_bytes and n > free:
                    need += -(-(n - free) // (slabs.slab_bytes // slot))
            return need > slabs.unowned

    def _place(self, blocks: Sequence[Outgoing], placed: Placed) -> None:
        """Takes slots for blocks that are not here yet, each once."""
        seen: set[bytes] = set()
        for out, known in zip(blocks, self._known(blocks), strict=True):
            if known or out.key in seen or out.namespace.dropped:
                continue
            seen.add(out.key)
            try:
                if not self._index.namespaces.fits(out.namespace):
                    raise Full("the index has no space for another namespace's description")
                size = self._allocator.size_class(len(out.slot))
                pages = self._allocator.take(size, 1)
            except (Full, Invalid):
                self.totals.refused_blocks += 1
                continue
            try:
                slot, handle = len(out.slot), out.namespace.handle
                (row,) = self._ledger.reserve(pages, [out.key], out.nbytes, slot, size.index, handle)
            except BaseException:
                self._allocator.give(pages)
                raise
            placed.append((out, row))

    def _seal(self, placed: Placed) -> None:
        """The data is written: journals it, then makes it known. Raises OSError with nothing known; else empties
        `placed`."""
        ledger = self._ledger
        with self._lock:
            known = self._known([out for out, _ in placed])
            new = [entry for entry, here in zip(placed, known, strict=True) if not here]
            wanted = [(out, row) for out, row in new if not out.namespace.dropped]
        if wanted:
            self._index.put(wanted)
        with self._lock:
            ledger.set_checksums([row for _, row in wanted], [out.checksum for out, _ in wanted])
            won = [(out, row) for out, row in wanted if not out.namespace.dropped]
            sealed = ledger.seal([row for _, row in won])
            assert all(sealed), "who seals holds the index lock"
            # The others are free again, with a tombstone where they were journalled.
            self._allocator.free([row for _, row in placed if ledger.is_reserved(row)])
            placed.clear()
            self.totals.written_blocks += len(won)
            self.totals.written_bytes += sum(out.nbytes for out, _ in won)
            self._health.good(WRITE)

    def _failed(self, error: OSError) -> None:
        with self._lock:
            self.totals.write_faults += 1
            self._health.bad(WRITE, f"writing fails: {error.strerror or error}")

    # -- the end of a read, and forgetting; under the lock

    def _done_reading(self, row: int, key: bytes, nbytes: int, fault: Exception | None) -> None:
        """Ends a read's lease. A block that failed its check, or three reads, leaves the index; its slot rests."""
        if fault is None:
            self.totals.read_blocks += 1
            self.totals.read_bytes += nbytes
            self._failed_reads.clear(key)
            self._health.good(READ)
        elif isinstance(fault, OSError):
            self.totals.read_faults += 1
            self._health.bad(READ, f"reading fails: {fault.strerror or fault}", pause=False)
            if self._failed_reads.add(key, time.monotonic()):
                self._set_aside(row)
        else:
            self._set_aside(row)
        self._release(row)

    def _set_aside(self, row: int) -> None:
        """Quarantine: out of the index, and held by us."""
        ledger = self._ledger
        if not ledger.is_sealed(row):  # another reader was first, or it was deleted
            return
        self.totals.lost_blocks += 1
        (key,) = ledger.keys([row])
        self._failed_reads.clear(key)
        self._tombstones.add(key)
        ledger.doom([row])
        ledger.lease([row])
        self._quarantine.append(row)
        slots = min(MAX_QUARANTINED, max(1, self._slabs.usable_bytes // QUARANTINE_SHARE // ledger.slot_bytes((row,))))
        while len(self._quarantine) > slots:
            self._release(self._quarantine.pop(0))

    def _release(self, row: int) -> None:
        _, doomed = self._ledger.release([row])
        self._ledger.set_checksums(doomed, [0] * len(doomed))  # they have their tombstones
        self._allocator.free(doomed)

    def _forget(self, rows: Sequence[int]) -> None:
        ledger = self._ledger
        for row, key in zip(rows, ledger.keys(rows), strict=True):
            self._failed_reads.clear(key)
            if ledger.is_leased(row):
                self._tombstones.add(key)
        self._allocator.free(ledger.doom(rows))
