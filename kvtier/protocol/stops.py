"""Why an answer ends where it does, as codes. What programs decide, they decide by these; texts are for people."""

from __future__ import annotations

from enum import IntEnum

PRESENT = 2**64 - 1  # in the place of an offset: the block is there already


class Stop(IntEnum):
    """The numbers of `Stop` in the proto."""

    END = 0  # all that was asked for
    MISS = 1
    COLD = 2  # only a lower tier has the next block: prefetch first
    CAP = 3  # the session or the tenant holds all it may: retry
    NO_TIER = 4  # there is no lower tier


TEXTS: dict[int, str] = {
    Stop.END: "",
    Stop.MISS: "miss",
    Stop.COLD: "cold: prefetch first",
    Stop.CAP: "full, retry: the session or tenant holds all it may",
    Stop.NO_TIER: "there is no lower tier",
}
