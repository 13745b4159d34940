"""The shared mapping that holds every slot: one memfd, sealed against shrinking and growing before anyone else sees it.

All bytes pass through here. The arena knows offsets and nothing of keys. `populate` backs it with memory once, in steps; nothing is ever
allocated per block (first touch runs at 0.2-1.2 GB/s, warm memory at 8-13). Copies in and out are the caller's, by np.copyto
(it releases the GIL), never by memoryview slices for bulk.
Threads may read and write different slots at the same time without a lock: who may touch which slot is the store's business.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import Full
from kvtier.layout import SLOT_ALIGN

POPULATE_STEP = 64 * 2**20
POISON = 0x7F  # a NaN code in every byte: freed slots are filled with it in tests

_F_ADD_SEALS, _SEALS = 1033, 0x1 | 0x2 | 0x4  # seal | shrink | grow
_MADV_DONTFORK, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 10, 22, 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE, _MAP_FAILED = 0, 0x10, 0x4000, ctypes.c_void_p(-1).value


class Arena:
    """`nbytes` of shared memory, rounded up to pages. `fd` may be handed to other processes; closing is `close`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = (nbytes + SLOT_ALIGN - 1) // SLOT_ALIGN * SLOT_ALIGN
        try:
            self.fd = os.memfd_create("kvtier-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise Full(f"cannot make shared memory: {error.strerror}") from None
        try:
            os.ftruncate(self.fd, self.nbytes)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.fd, self.nbytes)
        except (OSError, ValueError, OverflowError) as error:
            os.close(self.fd)
            raise Full(f"cannot map an arena of {self.nbytes} bytes: {error}") from None
        self.memory = memoryview(self._map)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.ready_bytes = 0  # backed by memory, from the start
        self._lock = threading.Lock()

    def populate(self, stop: threading.Event, threads: int = 2, limit: int | None = None) -> None:
        """Backs the arena with memory up to `limit` (default: all), from the start, in steps. Blocks; may be called again to go on.

        Raises Full if the memory is not there. Returns early once `stop` is set.
        """
        end = self.nbytes if limit is None else min(limit, self.nbytes)
        steps = iter(range(self.ready_bytes, end, POPULATE_STEP))
        done: set[int] = set()
        errors: list[BaseException] = []

        def work() -> None:
            while not stop.is_set() and not errors:
                with self._lock:
                    start = next(steps, None)
                if start is None:
                    return
                size = min(POPULATE_STEP, end - start)
                try:
                    _back(self.array, self.fd, start, size)
                except BaseException as error:
                    errors.append(error)
                    return
                with self._lock:
                    done.add(start)
                    while self.ready_bytes in done:
                        self.ready_bytes = min(self.ready_bytes + POPULATE_STEP, end)

        workers = [threading.Thread(target=work, name=f"populate-{i}", daemon=True) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if errors:
            raise errors[0]

    def poison(self, offset: int, nbytes: int) -> None:
        self.array[offset : offset + nbytes] = POISON

    def close(self) -> None:
        """Unmaps and closes. Views still held elsewhere keep the mapping alive until they are gone."""
        del self.array
        self.memory.release()
        try:
            self._map.close()
        except BufferError:
            pass  # a view is still held; the mapping goes with it
        os.close(self.fd)


def _back(array: npt.NDArray[np.uint8], fd: int, start: int, size: int) -> None:
    try:
        advise(array, start, size, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel before 5.14
            raise Full(f"no memory for bytes {start} to {start + size} of the arena: {error.strerror}") from None
        os.posix_fallocate(fd, start, size)


def advise(array: npt.NDArray[np.uint8], start: int, size: int, advice: int) -> None:
    """madvise over bytes of a mapping (page-aligned). Raises OSError. Releases the GIL."""
    if _libc.madvise(array.ctypes.data + start, size, advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class Mapping:
    """A client's view of a daemon's arena. Not inherited over fork: a child that touches it dies instead of reading someone else's bytes.

    Not an mmap object: that keeps a descriptor of the file open for as long as anyone has a view.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes over `fd`. Raises OSError or ValueError if it cannot be mapped."""
        try:
            if not 0 < nbytes <= os.fstat(fd).st_size:
                raise ValueError(f"the file of the arena has {os.fstat(fd).st_size} bytes, not {nbytes}")
            self.address = _mmap(0, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)
        finally:
            os.close(fd)
        self.nbytes = nbytes
        kind: Any = type("Region", (ctypes.c_ubyte * nbytes,), {})  # a class of our own: its objects may have finalizers
        region = kind.from_address(self.address)
        weakref.finalize(region, _libc.munmap, self.address, nbytes).atexit = False  # with the last view
        self.array: npt.NDArray[np.uint8] = np.frombuffer(region, np.uint8)
        advise(self.array, 0, nbytes, _MADV_DONTFORK)

    def populate(self, start: int, size: int) -> None:
        """Makes page table entries for memory that the daemon has backed already (8-20 GiB/s), so that the first copy does not fault."""
        advise(self.array, start, min(size, self.nbytes - start), _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Gives the arena up, at once and for every view that somebody still has though it is void: such a view reads zeros. Idempotent."""
        if hasattr(self, "array"):
            self._cover(mmap.PROT_READ | mmap.PROT_WRITE)
            del self.array  # last: without a view the range is unmapped here, and may be another mapping's a moment later

    def guard_after_fork(self) -> None:
        """In a fork child: occupies the address range, which fork left empty, with memory that no one may touch.

        Else a later mapping of the child could land there, be read through stale views, and be unmapped when this object dies.
        """
        self._cover(_PROT_NONE)

    def _cover(self, protection: int) -> None:
        _mmap(self.address, self.nbytes, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED, -1)


def _mmap(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    """mmap(2). Returns the address. Raises OSError."""
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)
