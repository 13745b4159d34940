"""The SSD tier's index as it lives: a journal that follows the ledger, tombstones that wait for it, checkpoints that shorten it.

`lock` keeps the journal in order: who changes what it says holds it, for as long as the disk takes. `books` is the tier's own lock, held for
microseconds inside it. A thread, the keeper, journals tombstones that no write takes along and writes checkpoints.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from kvtier.errors import Full, KvtierError
from kvtier.format.identity import check_text
from kvtier.store.ledger import Ledger
from kvtier.store.namespaces import Namespace
from kvtier.tiers.health import INDEX, WRITE, Health
from kvtier.tiers.ssd import recovery
from kvtier.tiers.ssd.books import Known, Tombstones
from kvtier.tiers.ssd.journal import RECORD, Journal, Records, checkpoint_bytes
from kvtier.tiers.tier import Outgoing

CHECKPOINT_BYTES = 2**20  # journals are not worth replacing before they have so many bytes, where the capacity allows
DELETED = 0.05  # seconds that a delete waits for its record on disk
CROWDED = 1.0  # seconds that a write waits for the index to be shortened
_FRAMES = 256  # bytes of the frames around a write's records
NAMESPACES_SHARE = 8  # one part in 8 of the index is for descriptions
Register = Callable[[bytes, str], Namespace]

log = logging.getLogger(__name__)


class Index:
    """What is on disk about the blocks of `ledger`. `failed` hears of faults of the disk in the keeper's own writes."""

    def __init__(
        self, journal: Journal, ledger: Ledger, tombstones: Tombstones, books: threading.Condition, health: Health
    ) -> None:
        self.lock = threading.Lock()
        self.checkpoints = 0
        self._journal = journal
        self._ledger = ledger
        self._tombstones = tombstones
        self._books = books
        self._health = health
        self._known = Known(journal.limit // NAMESPACES_SHARE)
        self._tight = False  # something did not find room
        self._stop = False
        self._keeper: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all index files."""
        return self._journal.total

    # -- start and end

    def load(self, register: Callable[[str, bytes], int | None]) -> Records:
        """What is live by the journal, oldest first, under the handles that `register` gives to tenant and description; None leaves a namespace out.

        Reads index files only.
        """
        records, described = recovery.read(self._journal.load())
        if self._journal.damaged:
            log.warning("ssd index damaged", extra={"fields": {"files": ",".join(self._journal.damaged)}})
        self._known.begin(max(described, default=0) + 1)
        handles: dict[int, int] = {}
        for number in recovery.namespaces_of(records) - described.keys():  # a power cut took the description
            self.disown(records[records["namespace"] == number])
        for number in sorted(recovery.namespaces_of(records) & described.keys()):
            handle = register(*described[number])
            if handle is not None:
                handles[number] = handle
                self._known.add(handle, (number, *described[number]))
        return recovery.renumber(records, handles)

    def disown(self, records: Records) -> None:
        """These cannot be: they are to be forgotten on disk too."""
        for key in recovery.keys_of(records):
            self._tombstones.add(key)

    def start(self, failed: Callable[[OSError], None]) -> None:
        """Once the ledger holds what `load` said. `failed` hears of faults of the disk while tombstones are journalled."""
        self._failed = failed
        self._journal.spare = self._spare()
        if self._journal.total + self._journal.spare > self._journal.limit:  # the capacity was made smaller
            self._checkpoint()
        self._keeper = threading.Thread(target=self._keep, name="ssd-keeper", daemon=True)
        self._keeper.start()

    def stop(self, patience: float) -> bool:
        """Ends the keeper, after it has journalled what waits. Whether it ended within `patience` seconds."""
        with self._books:
            self._stop = True
            self._books.notify_all()
        if self._keeper is not None:
            self._keeper.join(patience)
            return not self._keeper.is_alive()
        return True

    # -- what writers do, holding `lock`

    def bury(self) -> None:
        """Journals what was forgotten. Raises OSError or Full; the tombstones wait then."""
        with self._books:
            keys = self._tombstones.take()
        if keys:
            self._append(keys, recovery.forgets(keys))

    def put(self, wanted: Sequence[tuple[Outgoing, int]]) -> None:
        """Journals blocks whose data stands in the slots of these rows. Raises OSError or Full with nothing journalled.

        Tombstones that wait go before: one of the same key is older.
        """
        ledger = self._ledger
        with self._books:
            keys = self._tombstones.take()
            told = self._known.missing(out.namespace for out, _ in wanted)
            records = recovery.puts(
                [out.key for out, _ in wanted],
                nbytes=[out.nbytes for out, _ in wanted],
                page=ledger.pages(row for _, row in wanted),
                slot=[len(out.slot) for out, _ in wanted],
                namespace=[self._known.number(out.namespace.handle, told) for out, _ in wanted],
                checksum=[out.checksum for out, _ in wanted],
            )
        self._append(keys, recovery.join(recovery.forgets(keys), records), told)

    def _append(
        self, keys: list[bytes], records: Records, told: dict[int, tuple[int, str, bytes]] | None = None
    ) -> None:
        told = told or {}
        try:
            self._journal.append(records, told.values())
        except BaseException as error:
            with self._books:
                self._tombstones.put_back(keys)
                self._tight |= isinstance(error, Full)
            raise
        with self._books:
            for handle, one in told.items():
                self._known.add(handle, one)
            self._tombstones.buried += len(keys)
            self._journal.spare = self._spare()
            self._books.notify_all()

    # -- what is asked of it, under the books' lock

    def has_room(self, blocks: int) -> bool:
        """Whether so many blocks can be journalled, with as many that go for them. Waits a moment for a checkpoint, if that is what it needs."""
        need = _FRAMES + 2 * blocks * RECORD.itemsize
        self._tight |= self._journal.room < need
        if self._tight:
            self._books.notify_all()
        return self._books.wait_for(lambda: self._journal.room >= need or self._stop, CROWDED)

    def room_for(self, namespace: Namespace) -> bool:
        """Whether blocks of this namespace can be journalled."""
        return self._known.room_for(namespace)

    def await_burial(self) -> None:
        """Waits a moment until all tombstones so far are on disk."""
        made = self._tombstones.made
        self._books.notify_all()
        self._books.wait_for(lambda: self._tombstones.buried >= made or self._stop, DELETED)

    def due(self) -> bool:
        """Whether the keeper has something to do."""
        return (bool(self._tombstones) and not self._health.paused(WRITE)) or self._checkpoint_due()

    def _checkpoint_due(self) -> bool:
        worth = min(self._journal.limit // 8, max(CHECKPOINT_BYTES, self._journal.spare))
        return (self._journal.since >= worth or self._known.crowded or self._tight) and not self._health.paused(INDEX)

    def _spare(self) -> int:
        """Bytes of a checkpoint of what is known now, and a little more."""
        return checkpoint_bytes(self._ledger.known + 64, self._known.described)

    # -- the keeper

    def _keep(self) -> None:
        stop = False
        while not stop:
            with self._books:
                self._books.wait_for(lambda: self._stop or self.due(), 1.0)
                stop, checkpoint = self._stop, self._checkpoint_due()
                bury = bool(self._tombstones) and (stop or not self._health.paused(WRITE))
            try:
                if bury:
                    with self.lock:
                        self.bury()
                    with self._books:
                        self._health.good(WRITE)
                if checkpoint and not stop:
                    self._checkpoint()
            except Full:
                if stop:  # nobody comes after: a checkpoint leaves out what was forgotten
                    self._checkpoint()
            except OSError as error:
                self._failed(error)
            except Exception:  # a fault of ours must not end upkeep for good
                log.exception("ssd upkeep failed")
                with self._books:
                    self._health.bad(INDEX, "a fault of kvtier's own")

    def _checkpoint(self) -> None:
        """Replaces the journals so far by a checkpoint. A fault of the disk is noted, and tried again after a pause."""
        try:
            with self.lock:
                with self._books:
                    self._tight = False
                    pruned = self._known.keep(self._ledger.handles())
                    if not (
                        pruned or self._journal.since or self._journal.total + self._journal.spare > self._journal.limit
                    ):
                        return
                    described, numbers = dict(self._known.described), dict(self._known.numbers)
                    self._journal.expect(checkpoint_bytes(self._ledger.known, described))
                try:
                    number = self._journal.rotate()
                except OSError:
                    self._journal.expect(0)
                    raise
                with self._books:
                    snapshot, made = recovery.Snapshot(self._ledger), self._tombstones.made
            written = False
            try:
                self._journal.checkpoint(number, described, snapshot.records(numbers))
                written = True
            finally:
                with self.lock:
                    self._journal.replace(number, written)
                with self._books:
                    if written:
                        self._tombstones.settle(made)
                    self._journal.spare = self._spare()
                    self._books.notify_all()
        except OSError as error:
            with self._books:
                self._health.bad(INDEX, f"a checkpoint cannot be written: {error.strerror or error}")
        else:
            with self._books:
                self.checkpoints += 1
                self._health.good(INDEX)


def handle_of(register: Register, tenant: str, description: bytes) -> int | None:
    """The handle of a namespace that the directory holds. None for one of a newer version: its blocks are unreadable, not dangerous."""
    try:
        check_text("tenant", tenant)
        return register(description, tenant).handle
    except KvtierError as error:
        log.warning("ssd namespace not understood", extra={"fields": {"reason": error}})
        return None
