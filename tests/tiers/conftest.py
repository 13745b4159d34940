"""Fixtures of the tests of write-behind, promotion and tiering."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.tiering import Counting, Works


@pytest.fixture
def tier() -> Counting:
    return Counting()


@pytest.fixture
def works(tier: Counting) -> Iterator[Works]:
    with Works(tier) as made:
        yield made
