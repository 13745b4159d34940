"""madvise and mmap at an address, on a small mapping."""

from __future__ import annotations

import errno
import mmap

import numpy as np
import pytest

from kvtier.protocol.backing import POPULATE_WRITE, advise, map_at, munmap

PAGE = mmap.PAGESIZE


def test_memory_is_backed_and_given_back() -> None:
    memory = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint8)
    try:
        advise(array, 0, 4 * PAGE, POPULATE_WRITE)
    except OSError as error:
        assert error.errno == errno.EINVAL, "kernels before 5.14 do not know it"
    array[:] = 7
    advise(array, PAGE, PAGE, mmap.MADV_DONTNEED)
    assert not array[PAGE : 2 * PAGE].any() and (array[2 * PAGE :] == 7).all()


def test_what_the_kernel_refuses_is_an_oserror() -> None:
    array = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
    with pytest.raises(OSError) as caught:
        advise(array, 0, PAGE, 12345)
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(OSError):
        map_at(0, 0, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)


def test_a_mapping_has_an_address() -> None:
    address = map_at(0, PAGE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    assert address % PAGE == 0 and address
    assert munmap(address, PAGE) == 0
