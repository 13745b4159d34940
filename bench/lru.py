"""A daemon that evicts least recently used: `kvtier-server` whose order never learns, as on its SSD tier. Flags are the
daemon's. For `trace`."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvtier.server import main as server_main
from kvtier.store import store
from kvtier.store.eviction import Eviction


def main() -> None:
    """Runs it."""
    order: Any = partial(Eviction, learns=False)
    store.Eviction = order  # type: ignore[misc]
    server_main.main()


if __name__ == "__main__":
    main()
