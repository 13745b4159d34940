"""One of many clients of `bench.scaling`: `python -m bench.client_process SOCKET SIZE`. Told to, it puts, gets or only
copies until its time is over."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np

from bench.harness import now
from bench.live import BATCH, DEADLINE, description, fresh
from bench.pools import private
from bench.workers import Handlers, serve
from kvtier.client.api import Client

KEPT = 4  # batches that it reads in turn


def wait_mapped() -> None:
    """Until this process has touched the whole arena."""
    end = now() + 120
    while any(thread.name == "kvtier-populate" for thread in threading.enumerate()):
        if now() > end:
            raise RuntimeError("the arena was not mapped within 120 s")
        time.sleep(0.02)


@contextmanager
def make(path: str, size: int) -> Iterator[tuple[Handlers, dict[str, Any]]]:
    """A client with memory of its own, whose blocks are there already."""
    with Client(f"unix:{path}") as client:
        namespace = client.register(description(size))
        source, target = private(KEPT * BATCH, size, fill=True), private(KEPT * BATCH, size)
        hashes, turn = [b""] * KEPT, count()
        used: list[bytes] = []

        def put(i: int) -> None:
            hashes[i] = fresh()
            done = client.put(namespace, hashes[i], source[i * BATCH : (i + 1) * BATCH], deadline=DEADLINE)
            assert done == BATCH, f"{done} blocks were put: {done.reason}"

        def get(i: int) -> None:
            found = client.get(namespace, hashes[i], deadline=DEADLINE, into=target[i * BATCH : (i + 1) * BATCH])
            assert len(found) == BATCH, f"{len(found)} blocks: {found.reason}"

        def copy(i: int) -> None:
            for n in range(i * BATCH, (i + 1) * BATCH):
                np.copyto(target[n], source[n])

        verbs = {"put": put, "get": get, "copy": copy}

        def work(verb: str, start: float, seconds: float) -> dict[str, Any]:
            calls: list[float] = []
            time.sleep(max(0.0, start - now()))  # the clock is the same in every process
            last = start
            while last < start + seconds:
                begin = now()
                verbs[verb](next(turn) % KEPT)
                last = now()
                calls.append(last - begin)
            if verb == "get":
                used.extend(hashes)
            return {"end": last, "calls": calls}

        def prepare() -> None:
            for old in used:  # they were used, so they would outlive what is only put
                client.delete(namespace, old, deadline=DEADLINE)
            used.clear()
            for i in range(KEPT):
                put(i)

        prepare()
        wait_mapped()
        yield {"work": work, "prepare": prepare}, {}


if __name__ == "__main__":
    serve(lambda: make(sys.argv[1], int(sys.argv[2])))
