"""A namespace's description in a file, as operators write it and engines are given it."""

from __future__ import annotations

import json
from pathlib import Path

from kvtier.errors import Invalid
from kvtier.format.identity import MAX_DESCRIPTION_BYTES, Description


def read_description(path: Path) -> Description:
    """A description from a file; the JSON need not be in canonical form."""
    raw = read_file(path, 4 * MAX_DESCRIPTION_BYTES)
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{path} is not JSON: {error!s:.200}") from None
    try:
        return Description.from_json(data)
    except Invalid as error:
        raise Invalid(f"{path} is not a description: {error}") from None


def read_file(path: Path, most: int) -> bytes:
    """A file whole. Raises Invalid if it cannot be read or is longer than `most`."""
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}") from None
    if len(raw) > most:
        raise Invalid(f"{path} has more than {most} bytes")
    return raw
