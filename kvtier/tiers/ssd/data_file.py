"""The data file of an SSD tier: slots by offset, straight between file and memory. Knows nothing of keys.

Preallocated slab by slab, so that a write needs no more of the file system than its own bytes. O_DIRECT, or the page
cache where the file system refuses, at opening or at the first transfer; said once. Transfers of different slots may
run beside each other and beside `grow`, which one thread calls. All methods may block on the disk and raise OSError.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kvtier.tiers.ssd.disk import CREATE, DIRECT, WRITE, Disk

WRITERS, PARALLEL_BYTES = 4, 4 * 2**20  # threads that write one batch; a smaller batch needs one
T = TypeVar("T")
log = logging.getLogger(__name__)


class DataFile:
    """The file at `path`, made if need be and cut to whole slabs, `most` at most. `sync`: what is written is durable
    before `write` returns."""

    def __init__(self, path: Path, disk: Disk, slab_bytes: int, most: int, sync: bool) -> None:
        self._disk, self._slab_bytes, self._sync = disk, slab_bytes, sync
        self._directory = path.parent
        self.direct = True
        try:
            self._fd = disk.open(path, WRITE | CREATE | DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = disk.open(path, WRITE | CREATE)
            self._use_the_page_cache()
        try:
            size = disk.size(self._fd)
            self.slabs = min(size // slab_bytes, most)  # with disk behind them, of `nbytes` together
            if size > self.nbytes:  # the capacity was made smaller, or a slab was never finished
                disk.truncate(self._fd, self.nbytes)
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        return self.slabs * self._slab_bytes

    def read(self, slot: memoryview, offset: int) -> int:
        """Fills a slot as far as the file goes: the bytes read. A file that was cut gets its length back."""
        got = self._transfer(self._disk.read, slot, offset)
        if got < len(slot):
            try:
                self._disk.allocate(self._fd, 0, self.nbytes)
            except OSError:
                pass  # writes past the end lengthen it too
        return got

    def write(self, slots: Sequence[tuple[memoryview, int]]) -> None:
        """Writes slots, several at once where that pays. Raises after the last write: until then no slot is free."""
        small = sum(len(slot) for slot, _ in slots) < PARALLEL_BYTES
        parts = [slots] if small else [slots[first::WRITERS] for first in range(min(WRITERS, len(slots)))]
        faults: list[BaseException] = []

        def work(part: Sequence[tuple[memoryview, int]]) -> None:
            try:
                for slot, offset in part:
                    self._transfer(self._disk.write, slot, offset)
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=work, args=(part,), name="ssd-writer", daemon=True) for part in parts[1:]]
        for thread in threads:
            thread.start()
        work(parts[0])
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]
        if self._sync:
            self._disk.sync(self._fd)

    def grow(self, min_free: int) -> str:
        """Puts disk behind one more slab if `min_free` bytes stay free on the file system. Why not, "" if it did."""
        free = self._disk.free(self._directory)[1]
        if free - self._slab_bytes < min_free:
            return f"the file system has {free} free bytes, of which {min_free} are for others"
        try:
            self._disk.allocate(self._fd, self.nbytes, self._slab_bytes)
        except OSError as error:
            try:
                self._disk.truncate(self._fd, self.nbytes)
            except OSError:
                pass  # the next start does
            return f"the file cannot grow: {error.strerror}"
        self.slabs += 1
        return ""

    def close(self) -> None:
        self._disk.close(self._fd)

    def _transfer(self, call: Callable[[int, memoryview, int], T], slot: memoryview, offset: int) -> T:
        try:
            return call(self._fd, slot, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
        self._use_the_page_cache()
        return call(self._fd, slot, offset)

    def _use_the_page_cache(self) -> None:
        """From here on: the file system takes no O_DIRECT, or takes it and then refuses what is aligned to pages."""
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False
        log.warning("ssd buffered", extra={"fields": {"path": self._directory}})
