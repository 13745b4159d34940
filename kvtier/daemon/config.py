"""The daemon's settings, checked once. Each message says what to write instead."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import Invalid

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", re.IGNORECASE)
MIN_ARENA = 2**20
_SUN_PATH = 107  # bytes of a Unix socket's path


@dataclass(frozen=True, slots=True)
class Config:
    """socket: path of the lane; mode: its permissions; arena_bytes: shared memory for blocks; poison: fill freed slots (tests only)."""

    socket: Path
    arena_bytes: int
    mode: int = 0o600
    poison: bool = False

    def __post_init__(self) -> None:
        if len(os.fsencode(self.socket)) > _SUN_PATH:
            raise Invalid(f"the socket's path has {len(os.fsencode(self.socket))} bytes; the system allows {_SUN_PATH}: choose a shorter --socket")
        if not self.socket.parent.is_dir():
            raise Invalid(f"the directory {self.socket.parent} does not exist: create it, or choose another --socket")
        if self.arena_bytes < MIN_ARENA:
            raise Invalid(f"an arena has at least {MIN_ARENA} bytes, not {self.arena_bytes}: write --arena-bytes 4GiB, say")
        limit = memory_limit()
        if self.arena_bytes > limit:
            raise Invalid(f"an arena of {self.arena_bytes} bytes does not fit the {limit} bytes this process may use: choose a smaller --arena-bytes")


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "4 GiB", "1.5G" or a plain number."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise Invalid(f"{text!r} is not a size: write 512MiB, 4GiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def memory_limit() -> int:
    """Bytes of memory this process may use: the container's limit if there is one (a memfd is charged to it), else the machine's memory."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limit = min(limit, int(text))
    return limit


def default_socket() -> Path:
    """/run/kvtier/kvtier.sock where that directory exists, else kvtier.sock in the user's runtime directory."""
    system = Path("/run/kvtier")
    if system.is_dir():
        return system / "kvtier.sock"
    return Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")) / "kvtier.sock"
