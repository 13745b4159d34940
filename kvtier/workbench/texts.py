"""Real English text that is on every machine: the help topics inside CPython (`pydoc_data.topics`), split in two halves that share no topic.

The text differs a little between Python versions, so figures made with it do too: state the version beside them. Pure functions.
"""

from __future__ import annotations

from hashlib import blake2b
from pydoc_data.topics import topics

# One bit of a hash of the topic's name says which half it is in, so a topic keeps its half when others come and go.
_CALIBRATION, _EVALUATION = 0, 1


def calibration() -> str:
    """What scales are calibrated on."""
    return _half(_CALIBRATION)


def evaluation() -> str:
    """What everything is measured on. No topic of it is in `calibration`."""
    return _half(_EVALUATION)


def _half(wanted: int) -> str:
    return "\n\n".join(text for name, text in sorted(topics.items()) if blake2b(name.encode()).digest()[0] & 1 == wanted)
