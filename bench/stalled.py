"""A daemon whose SSD tier stands still from SIGUSR1 to SIGUSR2: `kvtier-server` with a `FaultyTier` around its tier.
Flags are the daemon's."""

from __future__ import annotations

import signal
from typing import Any

from kvtier.server import lifecycle
from kvtier.server import main as server_main
from kvtier.tiers.ssd.ssd import Ssd
from tests.support.faulty_tier import FaultyTier, Rates


def main() -> None:
    """Runs it."""

    def build(*arguments: Any, **options: Any) -> Any:
        ssd = Ssd(*arguments, **options)
        tier: Any = FaultyTier(ssd, 0, Rates())
        tier.aging = ssd.aging  # what the daemon asks of an SSD tier beyond the protocol
        signal.signal(signal.SIGUSR1, lambda *_: tier.stall())
        signal.signal(signal.SIGUSR2, lambda *_: tier.resume())
        return tier

    lifecycle.Ssd = build  # type: ignore[assignment,misc]
    server_main.main()


if __name__ == "__main__":
    main()
