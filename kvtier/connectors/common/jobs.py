"""Loads and saves as plain data that may travel between processes. Block ids are the engine's; 0: "not this one"."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

MAX_SEEN = 1 << 20


@dataclass(slots=True)
class Run:
    """Blocks of one group in order: a content hash each, and the engine blocks that each consists of."""

    group: int
    hashes: list[bytes] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)

    def block_ids(self, start: int = 0) -> set[int]:
        """Engine blocks of the entries from `start` on."""
        return {block for entry in self.blocks[start:] for block in entry if block}


@dataclass(slots=True)
class Load:
    """Blocks that a request was promised. `sync`: the next step needs them. `whole`: a part of it is of no use."""

    id: int
    request: str
    context: bytes
    sync: bool
    whole: bool
    runs: list[Run]


@dataclass(slots=True)
class Save:
    """Blocks that are full once the step has run."""

    id: int
    context: bytes
    run: Run


class SeenBefore:
    """Which hashes were asked for before: the newest `MAX_SEEN`. Not thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, bytes], None] = OrderedDict()

    def before(self, group: int, hash_: bytes) -> bool:
        """Whether this is not the first time."""
        known = (group, hash_) in self._known
        self._known[group, hash_] = None
        self._known.move_to_end((group, hash_))
        if len(self._known) > MAX_SEEN:
            self._known.popitem(last=False)
        return known
