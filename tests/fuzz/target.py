"""What a target is, and the kept seeds on disk."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar

SEEDS = Path(__file__).resolve().parent / "seeds"
FOUND = "found-"  # inputs that failed once, kept beside the seeds


class Broken(AssertionError):
    """An input had an effect that none may have."""


class Target:
    """Something that reads bytes from strangers. Made once a run; `close` ends what it started.

    name     of its directory of seeds and on the command line
    weight   its share of the inputs of a run over all targets
    words    what its format is made of, for the mutator
    """

    name: ClassVar[str]
    weight: ClassVar[int] = 1
    words: ClassVar[tuple[bytes, ...]] = ()
    check_every: ClassVar[int] = 500

    def run(self, data: bytes) -> str:
        """Reads an input and says in a word how it was answered: "taken", or the kind of error. Raises for anything
        that must not happen.
        """
        raise NotImplementedError

    def first_seeds(self) -> Sequence[bytes]:
        """Well-formed inputs, from which the kept ones were written."""
        raise NotImplementedError

    def make(self, rng: random.Random) -> bytes | None:
        """An input made from structure, where mutation alone would not get far. None: mutate."""
        return None

    def check(self) -> None:
        """Raises if the state behind the target is broken. Called every `check_every` inputs and at the end."""

    def close(self) -> None:
        """Ends what was started."""


def kept(name: str) -> list[bytes]:
    """The kept inputs of a target, those that failed once first."""
    paths = sorted((SEEDS / name).glob("*"), key=lambda path: (not path.name.startswith(FOUND), path.name))
    return [path.read_bytes() for path in paths if path.is_file()]


def keep(name: str, data: bytes, prefix: str) -> Path:
    """Writes an input among a target's seeds and returns where."""
    path = SEEDS / name / f"{prefix}{blake2b(data, digest_size=6).hexdigest()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def answered(call: Callable[[], object], *allowed: type[BaseException]) -> str:
    """Runs it: "taken", or the name of the allowed error it ended with. Everything else goes on up."""
    try:
        call()
    except allowed as error:
        return type(error).__name__
    return "taken"
