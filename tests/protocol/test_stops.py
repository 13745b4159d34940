"""How an answer ended, as code and words. The numbers are pinned in test_frozen.py."""

from __future__ import annotations

from kvtier.errors import Full, NotFound
from kvtier.protocol.stops import PRESENT, WHOLE, Ending, Stop


def test_each_has_a_text_of_its_own() -> None:
    texts = [Ending.at(stop).reason for stop in Stop]
    assert len(set(texts)) == len(Stop) and [stop for stop in Stop if not Ending.at(stop).reason] == [Stop.END]
    assert Ending.at(99).stop == 99 and "99" in Ending.at(99).reason, "a newer daemon may have more"


def test_only_an_answer_without_stop_or_error_is_whole() -> None:
    assert WHOLE.whole and Ending.at(Stop.END).whole
    assert not Ending.at(Stop.MISS).whole
    cut = Ending.by(Full("no space"))
    assert (cut.whole, cut.error, cut.reason) == (False, Full.code, "no space") != Ending.by(NotFound("no space"))


def test_no_offset_looks_like_present() -> None:
    assert PRESENT == 2**64 - 1
