"""The small model, and one thread of torch for it. Imports torch only where a test already has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvtier.quality.loaded_model import LoadedModel


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    from tests.quality.small_model import make

    return make()


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
