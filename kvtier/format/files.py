"""Reading files that people name: at most so many bytes, and every error an Invalid that names the file. Blocks on
disk, and on a FIFO only where a caller lets it. Nothing is kept between calls, hence thread-safe."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from kvtier.errors import Invalid
from kvtier.format.identity import MAX_DESCRIPTION_BYTES, Description


@contextmanager
def open_file(path: str | os.PathLike[str], pipes: bool = False) -> Iterator[BinaryIO]:
    """A regular file, open for reading. Raises Invalid naming the path if it is missing, unreadable or of another kind;
    never waits for the other end of a FIFO, unless `pipes` lets it: `<(...)` and /dev/stdin, named by who waits."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipes else os.O_NONBLOCK))
    except (OSError, ValueError) as error:
        raise Invalid(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        kind = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(kind) or (pipes and not stat.S_ISDIR(kind))):
            raise Invalid(f"{path}: not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def read_file(path: str | os.PathLike[str], most: int, pipes: bool = False) -> bytes:
    """The bytes of a file. Raises Invalid naming it if it cannot be read or has more than `most`. `pipes` as above."""
    with open_file(path, pipes) as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise Invalid(f"{path}: more than {most} bytes")
    return raw


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts the file's name before the message of an Invalid."""
    try:
        yield
    except Invalid as error:
        raise Invalid(f"{path}: {error}") from None


def read_description(path: str | os.PathLike[str]) -> Description:
    """A namespace's description from a file, as operators write it: the JSON need not be in canonical form."""
    raw = read_file(path, 4 * MAX_DESCRIPTION_BYTES, pipes=True)
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{path} is not JSON: {error!s:.200}") from None
    try:
        return Description.from_json(data)
    except Invalid as error:
        raise Invalid(f"{path} is not a description: {error}") from None
