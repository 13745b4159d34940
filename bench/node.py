"""The daemon and the engines of `bench.trace`: started, replayed against, stopped and started again on the same socket
and the same files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import Child, now
from bench.live import DEADLINE, arena_for, slot_bytes
from bench.mixes import Request
from bench.workers import Worker
from kvtier.client.api import Client
from kvtier.store.allocator import Slabs

CHUNK = 50  # requests that an engine is told at once


@dataclass(frozen=True, slots=True)
class Result:
    """One request: blocks of the store that it has, that were known, that were loaded; seconds of lookup, load and
    save."""

    blocks: int
    known: int
    loaded: int
    lookup: float
    load: float
    save: float


class Node:
    """A daemon with an arena of `blocks` blocks, perhaps an SSD tier of so many bytes, and engines. A context
    manager."""

    def __init__(
        self,
        blocks: int,
        body_bytes: int,
        parts: int,
        where: Path,
        *,
        module: str = "kvtier.server",
        ssd_bytes: int = 0,
    ) -> None:
        arena = arena_for(blocks, body_bytes)
        slabs = Slabs(arena)
        self.capacity = slabs.count * (slabs.slab_bytes // slot_bytes(body_bytes))
        self.body_bytes, self.parts, self.where = body_bytes, parts, where
        self.path = where / "kvtier.sock"
        self.arguments = [
            "-m",
            module,
            "--config",
            os.devnull,
            "--socket",
            str(self.path),
            "--arena-bytes",
            str(arena),
            "--grpc",
            "off",
        ]
        self.arguments += ["--ssd", f"path={where}/ssd,size={ssd_bytes},free=0"] if ssd_bytes else []
        self.daemon: Child | None = None
        self.engines: list[Worker] = []

    def __enter__(self) -> Node:
        self._stack = ExitStack()
        self.client = self._stack.enter_context(Client(f"unix:{self.path}"))
        self._stack.callback(self.stop)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> float:
        """Seconds until it accepts calls."""
        begin = now()
        self.daemon = Child(self.arguments, deadline=60.0).__enter__()
        return now() - begin

    def stop(self) -> float:
        """Seconds until it has drained and ended."""
        begin = now()
        if self.daemon is not None:
            self.daemon.stop()
            self.daemon = None
        return now() - begin

    def settle(self) -> None:
        """Until the arena is memory and what was put is in the lower tier."""
        end = now() + 60
        while (status := self.status())["arena_ready_bytes"] < status["arena_bytes"] or status.get(
            "settle_queue_blocks", 0
        ):
            if now() > end:
                raise RuntimeError(f"the daemon did not settle within 60 s: {status}")
            time.sleep(0.02)

    def status(self) -> dict[str, Any]:
        """The daemon's."""
        return self.client.status(deadline=DEADLINE)

    def start_engines(self, n: int) -> None:
        """Starts engines until there are `n`."""
        arguments = ["-m", "bench.engine", str(self.path), str(self.body_bytes), str(self.parts)]
        self.engines += [self._stack.enter_context(Worker(arguments)) for _ in range(n - len(self.engines))]

    def replay(self, requests: Sequence[Request], engines: int, tick: Callable[[int], object]) -> list[Result]:
        """Every request once, dealt to the engines in turn, each of which serves its own one after the other without a
        pause."""
        self.start_engines(engines)
        found: list[Result] = []
        for at in range(0, len(requests), CHUNK * engines):
            chunk = requests[at : at + CHUNK * engines]
            shares = [chunk[i::engines] for i in range(engines)]
            for engine, share in zip(self.engines, shares, strict=False):
                engine.tell("run", requests=[r.blocks for r in share])
            mine: list[Result | None] = [None] * len(chunk)
            for i, (engine, share) in enumerate(zip(self.engines, shares, strict=False)):
                answers = engine.answer(300.0)
                mine[i::engines] = [
                    Result(len(r.blocks) * self.parts, *answer) for r, answer in zip(share, answers, strict=True)
                ]
            found += [one for one in mine if one is not None]
            tick(len(chunk))
        return found
