"""Other clients, each a process of its own: `python -m bench.peers lookups|holder SOCKET HASHES`.

lookups   looks the keys up again and again without pause
holder    holds 100 reservations of fresh blocks and 100 leases of the given ones, until it is killed
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

from bench.live import BODY, description, fresh
from kvtier.client.api import Client

HOLDS = 100


def main(what: str, socket: str, hashes: bytes) -> None:
    with Client(f"unix:{socket}") as client, ExitStack() as stack:
        namespace = client.register(description(BODY))
        if what == "holder":
            for _ in range(HOLDS):
                stack.enter_context(client.fill(namespace, fresh()))
                stack.enter_context(client.lease(namespace, hashes))
        print("ready", flush=True)
        while what == "holder":
            time.sleep(60)
        while True:
            client.lookup(namespace, hashes)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3]))
