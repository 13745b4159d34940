"""The claim of a Unix socket's path by one process: a second daemon is refused, the socket of a dead one is removed.

The claim is a lock on a file beside the socket, which the kernel drops with the process. Belongs to one thread.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from kvtier.errors import Unavailable


class SocketClaim:
    """Claims `path` to bind a socket there. Raises Unavailable if another daemon serves it or another file is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lock = path.with_name(path.name + ".lock")
        try:
            self._fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise Unavailable(f"cannot open {lock}: {error.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove_stale()
        except BlockingIOError:
            os.close(self._fd)
            raise Unavailable(f"another daemon serves {path}: stop it, or choose another socket") from None
        except OSError as error:
            os.close(self._fd)
            raise Unavailable(f"cannot claim {path}: {error.strerror}") from None
        except Unavailable:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Removes the socket and gives the path up."""
        self.path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Gives the path up without touching what stands there."""
        os.close(self._fd)

    def _remove_stale(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise Unavailable(f"{self.path} exists and is not a socket: remove it, or choose another socket")
        self.path.unlink()
