"""With LMCache itself: what its adapter loads."""

from __future__ import annotations

import pytest

from tests.connectors.loaded import server_modules

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(300)]


def test_an_engine_loads_no_server() -> None:
    assert server_modules("kvtier.connectors.lmcache", "KvtierL2Adapter") == []
