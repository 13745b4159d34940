"""A directory with a disk that fails when told to, and the lines that its tier logs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.tiers import health
from tests.support.tiers import Shop


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(health, "PAUSE", (0.05, 0.2))
    with Shop(tmp_path / "ssd") as made:
        made.open()
        yield made


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The log's events so far, of faults."""
    caplog.set_level(logging.INFO, "kvtier.tiers.tier")
    return lambda: [record.message for record in caplog.records if record.levelno >= logging.WARNING]
