"""A daemon that evicts least recently used: `kvtier-server` whose order never learns, as on its SSD tier. Flags are the daemon's. For `trace`."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvtier import store
from kvtier.daemon import cli
from kvtier.order import Order


def main() -> None:
    """Runs it."""
    order: Any = partial(Order, learns=False)
    store.Order = order  # type: ignore[misc]
    cli.main()


if __name__ == "__main__":
    main()
