"""Why an answer ends where it does, as codes. What programs decide, they decide by these; texts are for people."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from kvtier.errors import KvtierError

PRESENT = 2**64 - 1  # in the place of an offset: the block is there already


class Stop(IntEnum):
    """The numbers of `Stop` in the proto."""

    END = 0  # all that was asked for
    MISS = 1
    COLD = 2  # only a lower tier has the next block: prefetch first
    CAP = 3  # the session or the tenant holds all it may: retry
    NO_TIER = 4  # there is no lower tier


_TEXTS: dict[int, str] = {
    Stop.END: "",
    Stop.MISS: "miss",
    Stop.COLD: "cold: prefetch first",
    Stop.CAP: "full, retry: the session or tenant holds all it may",
    Stop.NO_TIER: "there is no lower tier",
}


class Ending(NamedTuple):
    """Why an answer is not larger: a stop of a daemon that answered, or the code of the error that cut it short
    (`kvtier.errors`).
    """

    stop: int = Stop.END
    error: int = 0
    reason: str = ""

    @property
    def whole(self) -> bool:
        """Whether the answer is all that was asked for."""
        return not self.stop and not self.error

    @classmethod
    def at(cls, stop: int) -> Ending:
        """The daemon answered, up to here. A number of a newer daemon has a text too."""
        return cls(stop, 0, _TEXTS.get(stop, f"stopped ({stop})"))

    @classmethod
    def by(cls, error: KvtierError) -> Ending:
        """An error cut the answer short."""
        return cls(Stop.END, error.code, str(error))


WHOLE = Ending()
MISS = Ending.at(Stop.MISS)
