"""Every call that the SSD tier makes to the file system: a test stands in for it to lose, tear or hold up a write.

One rule: nothing but regular files is opened, and no symbolic link is followed at the last step of a path. All methods
raise OSError. Stateless, thread-safe; all but `free` may block for as long as the disk does.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READ, WRITE, APPEND, DIRECT = os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_APPEND, os.O_DIRECT
CREATE, FRESH = os.O_CREAT, os.O_CREAT | os.O_EXCL
_ALWAYS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY  # O_NONBLOCK: opening a planted pipe would wait


class Disk:
    """The real thing."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor of a regular file."""
        fd = os.open(path, flags | _ALWAYS, 0o600)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    @contextmanager
    def opened(self, path: Path, flags: int) -> Iterator[int]:
        fd = self.open(path, flags)
        try:
            yield fd
        finally:
            self.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def append(self, fd: int, data: bytes) -> None:
        """All of `data` at the end of a file opened with APPEND, or an error after a part of it."""
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwritev(fd, [data], offset)
            if written <= 0:
                raise OSError(errno.EIO, "nothing was written")
            data, offset = data[written:], offset + written

    def read(self, fd: int, data: memoryview, offset: int) -> int:
        """Fills `data` from this offset on, as far as the file goes. Returns the bytes read."""
        done = 0
        while done < len(data):
            got = os.preadv(fd, [data[done:]], offset + done)
            done += got
            if not got or done % 512:  # a part of a sector is the end of the file
                break
        return done

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Puts disk behind a range and lets the file reach to its end."""
        os.posix_fallocate(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        """Makes a file's bytes durable, and its size."""
        os.fdatasync(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Takes the place of `new`, whatever stands there."""
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        """Removes a name; none is no error."""
        path.unlink(missing_ok=True)

    def sync_directory(self, directory: Path) -> None:
        """Makes names of new, renamed and removed files durable."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free(self, directory: Path) -> tuple[int, int]:
        """(bytes of the file system, bytes of it that we may still take)."""
        found = os.statvfs(directory)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


DISK = Disk()
