"""A client's view of the arena: the daemon's memory, mapped, and given up when the daemon goes."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.protocol.backing import DONTFORK, POPULATE_WRITE, advise, map_at, munmap

_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000


class Mapping:
    """A client's view of a daemon's arena.

    Not inherited over fork: a child that touches it dies instead of reading someone else's bytes. Not an mmap object:
    that keeps a descriptor of the file open for as long as there is a view.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes over `fd`. Raises OSError or ValueError if it cannot be mapped."""
        try:
            if not 0 < nbytes <= os.fstat(fd).st_size:
                raise ValueError(f"the file of the arena has {os.fstat(fd).st_size} bytes, not {nbytes}")
            self.address = map_at(0, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)
        finally:
            os.close(fd)
        self.nbytes = nbytes
        kind: Any = type(
            "Region", (ctypes.c_ubyte * nbytes,), {}
        )  # a class of our own: its objects may have finalizers
        region = kind.from_address(self.address)
        weakref.finalize(region, munmap, self.address, nbytes).atexit = False  # with the last view
        self.array: npt.NDArray[np.uint8] = np.frombuffer(region, np.uint8)
        advise(self.array, 0, nbytes, DONTFORK)

    def populate(self, start: int, size: int) -> None:
        """Makes page table entries for memory that the daemon has backed (8-20 GiB/s): then no first copy faults."""
        advise(self.array, start, min(size, self.nbytes - start), POPULATE_WRITE)

    def close(self) -> None:
        """Gives the arena up, at once and for every view still held though void, which reads zeros. Idempotent."""
        if hasattr(self, "array"):
            self._cover(mmap.PROT_READ | mmap.PROT_WRITE)
            # Last: without a view the range is unmapped here, and may be another mapping's a moment later.
            del self.array

    def guard_after_fork(self) -> None:
        """In a fork child: occupies the address range, which fork left empty, with memory that no one may touch.

        Else a later mapping of the child could land there, be read through stale views, and be unmapped when this
        object dies.
        """
        self._cover(_PROT_NONE)

    def _cover(self, protection: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        map_at(self.address, self.nbytes, protection, flags, -1)
