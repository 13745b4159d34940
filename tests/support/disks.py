"""Stand-ins for the SSD tier's disk: one that fails when told to, and one that remembers what was done to it, for
crashes at any point.

Both do the real thing to real files.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.tiers.ssd.disk import Disk

SECTOR = 512


class Failing(Disk):
    """Calls by these names raise. `fail("write", errno.EIO, times=1)`; `times` None: until `heal`; `calls` counts."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._faults: dict[str, tuple[int, int | None, Callable[..., bool]]] = {}
        self.free_bytes: int | None = None

    def fail(self, name: str, code: int, times: int | None = None, when: Callable[..., bool] = lambda *_: True) -> None:
        self._faults[name] = (code, times, when)

    def heal(self) -> None:
        self._faults.clear()

    def _hit(self, name: str, *arguments: Any) -> None:
        self.calls[name] += 1
        code, times, when = self._faults.get(name, (0, None, lambda *_: False))
        if when(*arguments):
            if times is not None:
                if times <= 0:
                    return
                self._faults[name] = (code, times - 1, when)
            raise OSError(code, os.strerror(code))

    def open(self, path: Path, flags: int) -> int:
        self._hit("open", path, flags)
        return super().open(path, flags)

    def append(self, fd: int, data: bytes) -> None:
        try:
            self._hit("append", fd, data)
        except OSError:
            super().append(fd, data[: len(data) // 2])  # as a full disk does: a part of it is there
            raise
        super().append(fd, data)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        self._hit("write", fd, data, offset)
        super().write(fd, data, offset)

    def read(self, fd: int, data: memoryview, offset: int) -> int:
        self._hit("read", fd, data, offset)
        return super().read(fd, data, offset)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._hit("allocate", fd, offset, nbytes)
        super().allocate(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._hit("truncate", fd, nbytes)
        super().truncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        self._hit("sync", fd)
        super().sync(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._hit("rename", old, new)
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._hit("unlink", path)
        super().unlink(path)

    def sync_directory(self, directory: Path) -> None:
        self._hit("sync_directory", directory)
        super().sync_directory(directory)

    def free(self, directory: Path) -> tuple[int, int]:
        self._hit("free", directory)
        total, free = super().free(directory)
        return total, free if self.free_bytes is None else self.free_bytes


READ_ONLY = dict.fromkeys(("append", "write", "allocate", "truncate", "rename", "unlink"), errno.EROFS)


# Crashes


@dataclass(frozen=True, slots=True)
class Op:
    """One thing that was done: write, size, sync, create, rename (to `event`), unlink, sync_directory; or "event", what
    the test noted.
    """

    kind: str
    name: str = ""
    at: int = 0
    data: bytes = b""
    event: Any = None


class Recording(Disk):
    """Remembers every change, in order, with the events that the test notes in between."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}

    def note(self, event: Any) -> None:
        with self._lock:
            self.ops.append(Op("event", event=event))

    def open(self, path: Path, flags: int) -> int:
        with self._lock:
            there = path.exists()
            fd = super().open(path, flags)
            self._names[fd] = path.name
            if not there:
                self.ops.append(Op("create", path.name))
            return fd

    def append(self, fd: int, data: bytes) -> None:
        with self._lock:
            self.ops.append(Op("write", self._names[fd], os.fstat(fd).st_size, bytes(data)))
            super().append(fd, data)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        with self._lock:
            self.ops.append(Op("write", self._names[fd], offset, bytes(data)))
            super().write(fd, data, offset)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        with self._lock:
            self.ops.append(Op("size", self._names[fd], offset + nbytes))
            super().allocate(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        with self._lock:
            self.ops.append(Op("size", self._names[fd], nbytes))
            super().truncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        with self._lock:
            super().sync(fd)
            self.ops.append(Op("sync", self._names[fd]))

    def rename(self, old: Path, new: Path) -> None:
        with self._lock:
            super().rename(old, new)
            self.ops.append(Op("rename", old.name, event=new.name))
            self._names = {fd: new.name if name == old.name else name for fd, name in self._names.items()}

    def unlink(self, path: Path) -> None:
        with self._lock:
            if path.exists():
                self.ops.append(Op("unlink", path.name))
            super().unlink(path)

    def sync_directory(self, directory: Path) -> None:
        with self._lock:
            super().sync_directory(directory)
            self.ops.append(Op("sync_directory"))


@dataclass(slots=True)
class _File:
    """An inode: what is durable, and the changes since its last sync."""

    durable: bytearray = field(default_factory=bytearray)
    waiting: list[Op] = field(default_factory=list)


def after_kill(ops: Sequence[Op], chance: random.Random) -> dict[str, bytes]:
    """The files after a kill -9 behind these operations: everything is there, but a write that was under way may be
    there in part.
    """
    return _crash(
        ops,
        lambda file, last: _land(
            file, last, lambda op: _torn(op, chance) if op is last and chance.random() < 0.7 else op
        ),
        -1,
        last=True,
    )


def after_power_cut(ops: Sequence[Op], chance: random.Random) -> dict[str, bytes]:
    """The files after a power cut behind these operations: of what was not synced anything may be missing, or there in
    part; of names not synced the first few changes have happened.
    """

    def fate(op: Op) -> Op | None:
        kept = chance.random()
        return None if kept < 0.4 else _torn(op, chance) if kept < 0.6 else op

    return _crash(ops, lambda file, last: _land(file, last, fate), chance.randrange(1 << 30))


def _crash(
    ops: Sequence[Op], land: Callable[[_File, Op | None], bytes], choice: int, last: bool = False
) -> dict[str, bytes]:
    names: dict[str, _File] = {}
    states: list[dict[str, _File]] = [{}]  # of the directory: as it was synced, and after each change since
    for op in ops:
        if op.kind in ("write", "size"):
            names[op.name].waiting.append(op)
        elif op.kind == "sync":
            file = names[op.name]
            file.durable, file.waiting = bytearray(_land(file, None, lambda one: one)), []
        elif op.kind == "create":
            names[op.name] = _File()
        elif op.kind == "rename":
            names[op.event] = names.pop(op.name)
        elif op.kind == "unlink":
            del names[op.name]
        if op.kind in ("create", "rename", "unlink"):
            states.append(dict(names))
        elif op.kind == "sync_directory":
            states = [dict(names)]
    under_way = ops[-1] if last and ops and ops[-1].kind == "write" else None
    return {name: land(file, under_way) for name, file in states[choice % len(states)].items()}


def _land(file: _File, last: Op | None, fate: Callable[[Op], Op | None]) -> bytes:
    content = bytearray(file.durable)
    for waiting in file.waiting:
        op = fate(waiting)
        if op is None:
            continue
        if op.kind == "size":
            del content[op.at :]
            content.extend(bytes(op.at - len(content)))
        else:
            content.extend(bytes(max(0, op.at - len(content))))
            content[op.at : op.at + len(op.data)] = op.data
    return bytes(content)


def _torn(op: Op, chance: random.Random) -> Op:
    """The first part of a write: whole sectors of the data file, any byte of others."""
    if op.kind != "write":
        return op
    kept = chance.randrange(len(op.data) + 1)
    return Op("write", op.name, op.at, op.data[: kept // SECTOR * SECTOR if op.name == "blocks" else kept])
