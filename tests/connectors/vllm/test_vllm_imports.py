"""With vLLM itself: what its connector, its tier and its attention backend load."""

from __future__ import annotations

import pytest

from tests.connectors.loaded import server_modules

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("kvtier.connectors.vllm", "KvtierConnector"),
        ("kvtier.connectors.vllm_tier", "KvtierTier"),
        ("tests.connectors.vllm.cpu_backend", "CpuDualBackend"),
    ],
)
def test_an_engine_loads_no_server(module: str, name: str) -> None:
    assert server_modules(module, name) == []
