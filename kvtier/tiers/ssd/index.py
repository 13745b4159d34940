"""The SSD tier's index as it lives: a journal that follows the ledger, tombstones that wait for it, checkpoints.

`lock` keeps the journal in order: who changes what it says holds it, for as long as the disk takes. `tier_lock` is the
tier's own lock, held for microseconds inside it. A thread, the keeper, journals tombstones that no write takes along
and writes checkpoints.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtier.errors import Full, KvtierError
from kvtier.format.identity import check_text
from kvtier.store.ledger import Ledger
from kvtier.store.namespaces import Namespace
from kvtier.tiers.health import INDEX, WRITE, Health
from kvtier.tiers.ssd import recovery
from kvtier.tiers.ssd.journal import RECORD, Journal, NamespaceEntry, Records, checkpoint_bytes
from kvtier.tiers.tier import Outgoing

CHECKPOINT_BYTES = 2**20  # journals are not worth replacing before they have so many bytes, where the capacity allows
DELETED = 0.05  # seconds that a delete waits for its record on disk
CROWDED = 1.0  # seconds that a write waits for the index to be shortened
TIGHT = 0.1  # seconds between looks whether tombstones fit, while no checkpoint can be written
_FRAMES = 256  # bytes of the frames around a write's records
NAMESPACES_SHARE = 8  # one part in 8 of the index is for descriptions
Register = Callable[[bytes, str], Namespace]
log = logging.getLogger(__name__)


class Tombstones:
    """Keys that were forgotten and whose journal records say otherwise. No I/O; under the tier's lock."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self.made = self.durable = 0  # durable: of those made, in the journal or left out by a checkpoint

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: bytes) -> None:
        self._keys.append(key)
        self.made += 1

    def take(self) -> list[bytes]:
        """All that wait, in order, on their way to disk."""
        taken, self._keys = self._keys, []
        return taken

    def put_back(self, keys: list[bytes]) -> None:
        self._keys[:0] = keys

    def checkpointed(self, made: int) -> None:
        """Of the first so many that were made none is needed on disk any more: a checkpoint is younger."""
        done = max(0, len(self._keys) - (self.made - made))
        del self._keys[:done]
        self.durable += done


class JournalNamespaces:
    """Namespaces that the journal describes, each under a number that is never used for another; `limit`: bytes of
    their frames. Under the tier's lock."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self.next = 1  # numbers below are taken
        self.crowded = False  # one was refused because the limit was reached
        self.numbers: dict[int, int] = {}  # by handle
        self.described: dict[int, tuple[str, bytes]] = {}  # by number: tenant and description

    def add(self, handle: int, entry: NamespaceEntry) -> None:
        number, tenant, description = entry
        self.numbers[handle] = number
        self.described[number] = (tenant, description)
        self._bytes += _size(tenant, description)
        self.next = max(self.next, number + 1)

    def fits(self, namespace: Namespace) -> bool:
        """Whether this one is in the journal or may still be written to it."""
        if namespace.handle in self.numbers:
            return True
        fits = self._bytes + _size(namespace.tenant, namespace.description.canonical) <= self._limit
        self.crowded |= not fits
        return fits

    def missing(self, namespaces: Iterable[Namespace]) -> dict[int, NamespaceEntry]:
        """What must be journalled before records can name these: {handle: ...}, each under a fresh number."""
        new: dict[int, NamespaceEntry] = {}
        for namespace in namespaces:
            if namespace.handle not in self.numbers and namespace.handle not in new:
                new[namespace.handle] = (self.next + len(new), namespace.tenant, namespace.description.canonical)
        return new

    def number(self, handle: int, new: Mapping[int, NamespaceEntry]) -> int:
        """The number of a namespace that is in the journal, or among the `new` ones."""
        known = self.numbers.get(handle)
        return new[handle][0] if known is None else known

    def keep(self, handles: set[int]) -> bool:
        """Forgets all but these: the next checkpoint will not name them. Whether there were any."""
        gone = self.numbers.keys() - handles
        for handle in gone:
            tenant, description = self.described.pop(self.numbers.pop(handle))
            self._bytes -= _size(tenant, description)
        self.crowded = False
        return bool(gone)


class Index:
    """What is on disk about the blocks of `ledger`."""

    def __init__(
        self, journal: Journal, ledger: Ledger, tombstones: Tombstones, tier_lock: threading.Condition, health: Health
    ) -> None:
        self.lock = threading.Lock()
        self.checkpoints = 0
        self._journal, self._ledger, self._tombstones = journal, ledger, tombstones
        self._tier_lock, self._health = tier_lock, health
        self.namespaces = JournalNamespaces(journal.limit // NAMESPACES_SHARE)
        self._tight = self._stop = False  # tight: something did not fit into the limit
        self._keeper: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        return self._journal.total

    def load(self, register: Register) -> Records:
        """What is live by the journal, oldest first, under the handles of namespaces that `register` makes. Reads index
        files only. Blocks of a namespace that is not understood are left out; a later checkpoint does not name them."""
        records, described = recovery.read(self._journal.load())
        if self._journal.damaged:
            log.warning("ssd index damaged", extra={"fields": {"files": ",".join(self._journal.damaged)}})
        self.namespaces.next = max(described, default=0) + 1
        handles: dict[int, int] = {}
        for number in recovery.namespaces_of(records) - described.keys():  # a power cut took the description
            self.disown(records[records["namespace"] == number])
        for number in sorted(recovery.namespaces_of(records) & described.keys()):
            handle = _handle_of(register, *described[number])
            if handle is not None:
                handles[number] = handle
                self.namespaces.add(handle, (number, *described[number]))
        return recovery.renumber(records, handles)

    def disown(self, records: Records) -> None:
        """These cannot be: they are to be forgotten on disk too."""
        for key in recovery.keys_of(records):
            self._tombstones.add(key)

    def start(self, failed: Callable[[OSError], None]) -> None:
        """Once the ledger holds what `load` said. `failed` hears of faults while tombstones are journalled."""
        self._failed = failed
        self._journal.spare = self._spare()
        if self._journal.total + self._journal.spare > self._journal.limit:  # the capacity was made smaller
            self._checkpoint()
        self._keeper = threading.Thread(target=self._keep, name="ssd-keeper", daemon=True)
        self._keeper.start()

    def stop(self, patience: float) -> bool:
        """Ends the keeper, after it has journalled what waits. Whether it ended within `patience` seconds."""
        with self._tier_lock:
            self._stop = True
            self._tier_lock.notify_all()
        if self._keeper is not None:
            self._keeper.join(patience)
            return not self._keeper.is_alive()
        return True

    # -- what writers do, holding `lock`

    def put_tombstones(self) -> None:
        """Journals what was forgotten. Raises OSError or Full; the tombstones wait then."""
        with self._tier_lock:
            keys = self._tombstones.take()
        if keys:
            self._append(keys, recovery.forgets(keys), {})

    def put(self, wanted: Sequence[tuple[Outgoing, int]]) -> None:
        """Journals blocks whose data stands in the slots of these rows. Raises OSError or Full with nothing journalled.
        Tombstones that wait go before: one of the same key is older."""
        ledger = self._ledger
        with self._tier_lock:
            keys = self._tombstones.take()
            new = self.namespaces.missing(out.namespace for out, _ in wanted)
            records = recovery.puts(
                [out.key for out, _ in wanted],
                nbytes=[out.nbytes for out, _ in wanted],
                page=ledger.pages(row for _, row in wanted),
                slot=[len(out.slot) for out, _ in wanted],
                namespace=[self.namespaces.number(out.namespace.handle, new) for out, _ in wanted],
                checksum=[out.checksum for out, _ in wanted],
            )
        self._append(keys, recovery.join(recovery.forgets(keys), records), new)

    def _append(self, keys: list[bytes], records: Records, new: Mapping[int, NamespaceEntry]) -> None:
        try:
            self._journal.append(records, new.values())
        except BaseException as error:
            with self._tier_lock:
                self._tombstones.put_back(keys)
                self._tight |= isinstance(error, Full)
            raise
        with self._tier_lock:
            for handle, entry in new.items():
                self.namespaces.add(handle, entry)
            self._tombstones.durable += len(keys)
            self._journal.spare = self._spare()
            self._tier_lock.notify_all()

    # -- what is asked of it, under the tier's lock

    def has_space(self, blocks: int) -> bool:
        """Whether so many blocks can be journalled, with as many that go for them and the tombstones that wait. Waits a
        moment for a checkpoint, if that is what it needs."""

        def fits() -> bool:
            need = _FRAMES + (2 * blocks + len(self._tombstones)) * RECORD.itemsize
            return self._journal.free >= need

        if not fits():
            self._tight = True
        if self._tight:
            self._tier_lock.notify_all()
        return self._tier_lock.wait_for(lambda: fits() or self._stop, CROWDED)

    def await_tombstones(self) -> None:
        """Waits a moment until all tombstones so far are on disk."""
        made = self._tombstones.made
        self._tier_lock.notify_all()
        self._tier_lock.wait_for(lambda: self._tombstones.durable >= made or self._stop, DELETED)

    def due(self) -> bool:
        return (bool(self._tombstones) and not self._health.paused(WRITE)) or self._checkpoint_due()

    def _checkpoint_due(self) -> bool:
        worth = min(self._journal.limit // 8, max(CHECKPOINT_BYTES, self._journal.spare))
        wanted = self._journal.since >= worth or self.namespaces.crowded or self._tight
        return wanted and not self._health.paused(INDEX)

    def _spare(self) -> int:
        """Bytes of a checkpoint of what is known now, and a little more."""
        return checkpoint_bytes(self._ledger.known + 64, self.namespaces.described)

    def _keep(self) -> None:
        stop = False
        while not stop:
            with self._tier_lock:
                self._tier_lock.wait_for(lambda: self._stop or self.due(), 1.0)
                stop, checkpoint = self._stop, self._checkpoint_due()
                tombstones = bool(self._tombstones) and (stop or not self._health.paused(WRITE))
            try:
                if tombstones:
                    with self.lock:
                        self.put_tombstones()
                    with self._tier_lock:
                        self._health.good(WRITE)
                if checkpoint and not stop:
                    self._checkpoint()
            except Full:  # tombstones do not fit; a checkpoint leaves out what was forgotten
                with self._tier_lock:
                    paused = self._health.paused(INDEX) and not stop
                    if paused:
                        self._tier_lock.wait_for(lambda: self._stop, TIGHT)
                if not paused:
                    self._checkpoint()
            except OSError as error:
                self._failed(error)
            except Exception:  # a fault of ours must not end upkeep for good
                log.exception("ssd upkeep failed")
                with self._tier_lock:
                    self._health.bad(INDEX, "a fault of kvtier's own")

    def _checkpoint(self) -> None:
        """Replaces the journals so far by a checkpoint. A fault of the disk is noted, and tried again after a pause."""
        try:
            with self.lock:
                with self._tier_lock:
                    self._tight = False
                    pruned = self.namespaces.keep(self._ledger.handles())
                    over = self._journal.total + self._journal.spare > self._journal.limit
                    if not (pruned or self._journal.since or over):
                        return
                    described, numbers = dict(self.namespaces.described), dict(self.namespaces.numbers)
                    self._journal.coming = checkpoint_bytes(self._ledger.known, described)
                try:
                    number = self._journal.rotate()
                except OSError:
                    self._journal.coming = 0
                    raise
                with self._tier_lock:
                    sealed, made = self._ledger.copy_sealed(), self._tombstones.made
            written = False
            try:
                self._journal.checkpoint(number, described, recovery.sealed_records(*sealed, numbers))
                written = True
            finally:
                with self.lock:
                    self._journal.replace(number, written)
                with self._tier_lock:
                    if written:
                        self._tombstones.checkpointed(made)
                    self._journal.spare = self._spare()
                    self._tier_lock.notify_all()
        except OSError as error:
            with self._tier_lock:
                self._health.bad(INDEX, f"a checkpoint cannot be written: {error.strerror or error}")
        else:
            with self._tier_lock:
                self.checkpoints += 1
                self._health.good(INDEX)


def _handle_of(register: Register, tenant: str, description: bytes) -> int | None:
    """Of a namespace in the directory. None for one of a newer version: its blocks are unreadable, not dangerous."""
    try:
        check_text("tenant", tenant)
        return register(description, tenant).handle
    except KvtierError as error:
        log.warning("ssd namespace not understood", extra={"fields": {"reason": error}})
        return None


def _size(tenant: str, description: bytes) -> int:
    return len(description) + len(tenant.encode()) + 32
