"""An SSD tier's directory: who owns it and of which format it is. Used by the tier and by fsck.

    lock           held (flock) by the process that owns the directory; its text is that process's pid
    format.json    {"kvtier_ssd": 1, "slab_bytes": N}
    ttl.json       {name of a namespace: seconds}: times-to-live, where there are any
    blocks         slots, in slabs of `slab_bytes`
    checkpoint.N, journal.N    the index (journal.py)

Nothing here follows a symbolic link inside the directory. Errors say what to do: Invalid for what a person must change,
Unavailable for a directory that another process owns, Full for a disk that fails or is full.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import Full, Invalid, Unavailable
from kvtier.format.layout import SLOT_ALIGN
from kvtier.tiers.ssd.disk import APPEND, CREATE, FRESH, READ, WRITE, Disk

FORMAT = 1
LOCK, FORMAT_FILE, TTLS, DATA, QUARANTINE = "lock", "format.json", "ttl.json", "blocks", "quarantine"
_NEW = {LOCK, f"{FORMAT_FILE}.tmp", "lost+found"}  # what a directory without a format may hold
_MAX_FORMAT_BYTES = 4096
_MAX_TTLS_BYTES = 16_384
_RESOURCES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Turns OSError into Invalid, or into Full where the disk or this process has run out of something."""
    try:
        yield
    except OSError as error:
        file = f" ({error.filename})" if error.filename else ""
        kind = Full if error.errno in _RESOURCES else Invalid
        raise kind(f"cannot use {directory} as SSD tier: {error.strerror or error}{file}") from None


def make(directory: Path, disk: Disk) -> None:
    """The directory, and its parents, durably. Raises OSError."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in missing:
        disk.sync_directory(path.parent)


def claim(directory: Path, disk: Disk) -> int:
    """A descriptor that holds the directory's lock. Raises Unavailable if another process owns it, OSError."""
    lock = disk.open(directory / LOCK, WRITE | CREATE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        owner = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
        disk.close(lock)
        owner = f"process {owner}" if owner.isdigit() else "a process that does not say which"
        advice = "stop it, or give this one a directory of its own"
        raise Unavailable(f"{directory} belongs to another daemon ({owner}): {advice}") from None
    except OSError:
        disk.close(lock)
        raise
    return lock


def read_format(directory: Path, disk: Disk) -> int | None:
    """Bytes of a slab; None for a directory without a format. Raises Invalid (another format, broken), OSError."""
    if (raw := _read(path := directory / FORMAT_FILE, _MAX_FORMAT_BYTES, disk)) is None:
        return None
    try:
        told = json.loads(raw)
        version, slab = told["kvtier_ssd"], told["slab_bytes"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Invalid(f"{path} is not readable: move {directory} away to start with an empty one") from None
    if version != FORMAT:
        advice = "move it away, or run the version that wrote it"
        raise Invalid(f"{directory} has SSD format {str(version)[:20]}; this version reads {FORMAT}: {advice}")
    if type(slab) is not int or not 0 < slab < 2**40 or slab % SLOT_ALIGN:
        slabs = f"slabs of {str(slab)[:20]} bytes, which are not pages of {SLOT_ALIGN}"
        raise Invalid(f"{path} names {slabs}: move {directory} away")
    return slab


def write_format(directory: Path, slab_bytes: int, disk: Disk) -> None:
    """Makes an empty directory one of this format, durably. Raises Invalid if it holds files of others, OSError."""
    if foreign := sorted(entry.name for entry in directory.iterdir() if entry.name not in _NEW):
        advice = "give the SSD tier a directory of its own"
        raise Invalid(f"{directory} holds other files ({', '.join(foreign)[:100]}): {advice}")
    _replace(directory / FORMAT_FILE, json.dumps({"kvtier_ssd": FORMAT, "slab_bytes": slab_bytes}).encode(), disk)


def read_ttls(directory: Path, disk: Disk) -> dict[str, int]:
    """Times-to-live in seconds, by what `expiry` calls a namespace. Raises Invalid for a broken file, OSError."""
    if (raw := _read(path := directory / TTLS, _MAX_TTLS_BYTES, disk)) is None:
        return {}
    try:
        ttls = json.loads(raw)
    except (ValueError, RecursionError):
        ttls = None
    if not isinstance(ttls, dict) or not all(type(seconds) is int and seconds > 0 for seconds in ttls.values()):
        raise Invalid(f"{path} is not readable: remove it, and set the times-to-live again")
    return ttls


def write_ttls(directory: Path, ttls: Mapping[str, int], disk: Disk) -> None:
    """Writes them down, durably, in place of those before. Raises OSError with these left as they were."""
    _replace(directory / TTLS, json.dumps(dict(ttls), separators=(",", ":")).encode(), disk)


def _read(path: Path, most: int, disk: Disk) -> bytes | None:
    try:
        with disk.opened(path, READ) as fd:
            return os.pread(fd, most, 0)
    except FileNotFoundError:
        return None


def _replace(path: Path, data: bytes, disk: Disk) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    disk.unlink(temporary)
    with disk.opened(temporary, APPEND | FRESH) as fd:
        disk.append(fd, data)
        disk.sync(fd)
    disk.rename(temporary, path)
    disk.sync_directory(path.parent)
