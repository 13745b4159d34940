"""Real English text that is on every machine: the help topics inside CPython (`pydoc_data.topics`), split in two halves
that share no paragraph.

The text differs a little between Python versions, so figures made with it do too: state the version beside them. Pure
functions."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pydoc_data.topics import topics

# One bit of a hash of the topic's name says which half it is in, so a topic keeps its half when others come and go.
_CALIBRATION, _EVALUATION = 0, 1


def calibration() -> str:
    """What scales are calibrated on. Topics quote each other at length: paragraphs that `evaluation` has, too, are left
    out."""
    seen = {_words(paragraph) for paragraph in _paragraphs(_EVALUATION)}
    return "\n\n".join(paragraph for paragraph in _paragraphs(_CALIBRATION) if _words(paragraph) not in seen)


def evaluation() -> str:
    """What everything is measured on."""
    return "\n\n".join(_paragraphs(_EVALUATION))


def _paragraphs(half: int) -> Iterator[str]:
    for name, text in sorted(topics.items()):
        if blake2b(name.encode()).digest()[0] & 1 == half:
            yield from text.split("\n\n")


def _words(paragraph: str) -> str:
    return " ".join(paragraph.split())
