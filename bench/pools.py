"""Memory to copy between: pools of blocks, private or in a memfd mapping, larger than the last-level cache and touched
before use."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bench.harness import MiB, llc_bytes
from kvtier.format.layout import HEADER_BYTES, SLOT_ALIGN, pad

Bytes = NDArray[np.uint8]

POPULATE_READ, POPULATE_WRITE = 22, 23
_LIBC = ctypes.CDLL(None, use_errno=True)


def pool_bytes(quick: bool, batch_bytes: int) -> int:
    """Size of a pool: four batches at least and eight last-level caches, so that a block is out of every cache when its
    turn comes again."""
    return max(4 * batch_bytes, 0 if quick else 8 * llc_bytes())


def private(nblocks: int, nbytes: int, fill: bool = False) -> list[Bytes]:
    """`nblocks` rows of one piece of private memory, touched; random if `fill`."""
    pool = np.empty((nblocks, nbytes), np.uint8)
    if fill:
        generator = np.random.default_rng(1)
        for row in pool:
            row[:] = np.frombuffer(generator.bytes(nbytes), np.uint8)
    else:
        pool.fill(1)
    return list(pool)


def memfd(nbytes: int, mappings: int = 1) -> list[mmap.mmap]:
    """Shared mappings of one fresh memfd, untouched. The memory is free again when the last mapping and the last view
    of it are gone."""
    fd = os.memfd_create("kvtier-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return [mmap.mmap(fd, nbytes) for _ in range(mappings)]
    finally:
        os.close(fd)


def shared(nblocks: int, body_bytes: int) -> list[Bytes]:
    """Writable views of the bodies of `nblocks` slots of a shared mapping, touched, laid out as in the arena: pages of
    header and body.

    The header's 256 bytes matter: where source and target stand at the same offset within a page, 256 KiB blocks leave
    a mapping at less than half the speed (4.3 against 10.9 GB/s on an AMD EPYC virtual machine; 1 MiB blocks do not
    care)."""
    slot_bytes = pad(HEADER_BYTES + body_bytes, SLOT_ALIGN)
    mapping = memfd(nblocks * slot_bytes)[0]
    populate(mapping, POPULATE_WRITE, threads=2)
    whole = np.frombuffer(mapping, np.uint8)
    return [
        whole[start + HEADER_BYTES : start + HEADER_BYTES + body_bytes]
        for start in range(0, nblocks * slot_bytes, slot_bytes)
    ]


def populate(mapping: mmap.mmap, advice: int, threads: int = 1, step: int = 64 * MiB) -> None:
    """Back the whole mapping with memory (or with page-table entries) by madvise, in steps shared by `threads`
    threads."""
    base = np.frombuffer(mapping, np.uint8).ctypes.data
    steps = iter(range(0, len(mapping), step))
    lock = threading.Lock()
    failed: list[OSError] = []

    def work() -> None:
        while True:
            with lock:
                start = next(steps, None)
            if start is None or failed:
                return
            length = min(step, len(mapping) - start)
            if _LIBC.madvise(ctypes.c_void_p(base + start), ctypes.c_size_t(length), advice):
                failed.append(OSError(ctypes.get_errno(), "madvise"))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise failed[0]


def endless(nblocks: int, batch: int) -> Iterator[range]:
    """Consecutive batches of block numbers, over and over."""
    while True:
        for start in range(0, nblocks - batch + 1, batch):
            yield range(start, start + batch)
