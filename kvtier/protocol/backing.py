"""madvise and mmap(2) at an address, which Python does not offer: how the arena's memory is backed and mapped.

Both ends use it.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np
import numpy.typing as npt

POPULATE_STEP = 64 * 2**20
DONTFORK, POPULATE_READ, POPULATE_WRITE = 10, 22, 23  # MADV_...

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value
munmap = _libc.munmap


def advise(array: npt.NDArray[np.uint8], start: int, size: int, advice: int) -> None:
    """madvise over bytes of a mapping (page-aligned). Raises OSError. Releases the GIL."""
    if _libc.madvise(array.ctypes.data + start, size, advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def map_at(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    """mmap(2). Returns the address. Raises OSError."""
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)
