"""One contestant of `bench.versus`, in whatever environment it needs: `python -m bench.contest NAME --batches N --batch
N --size N --dir DIR`.

A contestant moves whole batches: from its own memory into a store, and back into its own memory. That is what is timed;
making room for a put and checking are not. Its memory has several batches, so that what a call touches has left the
caches when its turn comes again. Standard library and numpy here; what a contestant imports is its own module's
business."""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.workers import Handlers, serve

Bytes = NDArray[np.uint8]
Call = Callable[[int], object]  # moves batch i

WHERE = {
    "copy": ("bench.contestants", "Copy"),
    "kvtier": ("bench.contestants", "Kvtier"),
    "kvtier-ssd": ("bench.contestants", "KvtierSsd"),
    "redis": ("bench.contestants", "RedisPy"),
    "mooncake-tcp": ("bench.mooncake", "Tcp"),
    "mooncake-shm": ("bench.mooncake", "Shm"),
    "mooncake-dummy": ("bench.mooncake", "Dummy"),
    "nixl": ("bench.nixl", "PageCache"),
    "nixl-direct": ("bench.nixl", "Direct"),
    "vllm-files": ("bench.vllm_files", "Files"),
}


class Field:
    """What every contestant is given: its part of the memory, a directory, and a stack that takes down what it
    starts."""

    def __init__(self, batches: int, batch: int, size: int, directory: str, stack: ExitStack) -> None:
        self.batches, self.batch, self.size, self.directory, self.stack = batches, batch, size, directory, stack

    def memory(self, filled: bool) -> Bytes:
        """[batches, batch, size], touched, on pages of its own; random if `filled`."""
        import mmap

        mapping = mmap.mmap(-1, self.batches * self.batch * self.size)
        made = np.frombuffer(mapping, np.uint8).reshape(self.batches, self.batch, self.size)
        if filled:
            generator = np.random.default_rng(1)
            for part in made.reshape(-1, self.size):
                part[:] = np.frombuffer(generator.bytes(self.size), np.uint8)
        else:
            made.fill(1)
        return made


class Contestant:
    """What moves batches. `verbs` says how; those that begin with "put" write, the others read what was put last of
    that batch.

    servers   pids whose CPU time belongs to it, by name; versions: of what it runs
    most      calls of one window, for stores that run full
    """

    def __init__(self, field: Field) -> None:
        self.field = field
        self.verbs: dict[str, Call] = {}
        self.servers: dict[str, int] = {}
        self.versions: dict[str, str] = {}
        self.most = 1_000_000
        self.source, self.target = self.make_memory()

    def make_memory(self) -> tuple[Bytes, Bytes]:
        """(what is put, where it is got to)"""
        return self.field.memory(True), self.field.memory(False)

    def room(self) -> None:
        """Before each window of puts: makes room for `most` of them. Nothing of what was put last of a batch may go."""

    def warm(self) -> None:
        """Everything has been put and got once; a store that recycles memory has touched all of it."""
        for verb in self.verbs:
            if verb.startswith("put"):
                self.room()
                for i in range(self.field.batches):
                    self.verbs[verb](i)

    def check(self) -> None:
        """What comes back is what was put."""
        for verb, call in self.verbs.items():
            if verb.startswith("get") and "without" not in verb:
                self.target.fill(0)
                for i in range(self.field.batches):
                    call(i)
                    assert np.array_equal(self.source[i], self.target[i]), (
                        f"{verb}: other bytes came back than were put"
                    )


def handlers(contestant: Contestant) -> Handlers:
    """What the contestant's process does when it is told to."""
    turn = count()

    def window(verb: str, seconds: float) -> dict[str, Any]:
        """Calls one after the other until `seconds` are over: seconds of each."""
        call, batches = contestant.verbs[verb], contestant.field.batches
        calls: list[float] = []
        start = last = time.perf_counter()
        end = start + seconds
        while last < end and len(calls) < contestant.most:
            begin = time.perf_counter()
            call(next(turn) % batches)
            last = time.perf_counter()
            calls.append(last - begin)
        return {"elapsed": last - start, "calls": calls}

    def touch(verb: str) -> None:
        """Every batch once, untimed: a cache on the way has seen them all."""
        for i in range(contestant.field.batches):
            contestant.verbs[verb](i)

    return {
        "window": window,
        "touch": touch,
        "room": contestant.room,
        "warm": contestant.warm,
        "check": contestant.check,
    }


@contextmanager
def make(name: str, arguments: argparse.Namespace) -> Iterator[tuple[Handlers, dict[str, Any]]]:
    """The contestant of this name, up and running."""
    module, kind = WHERE[name]
    with ExitStack() as stack:
        field = Field(arguments.batches, arguments.batch, arguments.size, arguments.dir, stack)
        contestant: Contestant = getattr(importlib.import_module(module), kind)(field)
        yield (
            handlers(contestant),
            {
                "pid": os.getpid(),
                "verbs": list(contestant.verbs),
                "servers": contestant.servers,
                "versions": contestant.versions,
            },
        )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.contest")
    parser.add_argument("name", choices=WHERE)
    for name in ("batches", "batch", "size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dir", required=True)
    arguments = parser.parse_args()
    serve(lambda: make(arguments.name, arguments))


if __name__ == "__main__":
    main()
