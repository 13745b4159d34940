"""Our LMCache adapter as it is in a server that has been up for a second: `bench.lmcache_l2` has LMCache's benchmark
load this one.

That benchmark stores in the moment in which its adapter is made, while a client maps the daemon's arena in the
background (0.2 s a GiB): it would measure a start. So this one's constructor waits until the mapping is there; nothing
else differs."""

from __future__ import annotations

import threading
import time
from typing import Any

from kvtier.connectors.lmcache.adapter import KvtierL2Adapter
from kvtier.connectors.lmcache.lmcache_settings import KvtierL2AdapterConfig

WAIT = 60.0

__all__ = ["KvtierL2AdapterConfig", "Settled"]


class Settled(KvtierL2Adapter):
    """Made when the whole arena is mapped."""

    def __init__(self, config: Any, l1_memory_desc: Any = None) -> None:
        super().__init__(config, l1_memory_desc)
        end = time.monotonic() + WAIT
        while not self._traffic.look() or any(thread.name == "kvtier-populate" for thread in threading.enumerate()):
            if time.monotonic() > end:
                raise RuntimeError(f"the arena was not mapped within {WAIT:.0f} s")
            time.sleep(0.01)
