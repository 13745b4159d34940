"""Requests to replay: a published trace, or one of three mixes made from a seed. A block of either is 512 tokens; equal
numbers are equal prefixes.

Mixes use `Random.random` only, whose sequence Python keeps from version to version: the same arguments make the same
requests everywhere."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

TOKENS = 512  # of a block


@dataclass(frozen=True, slots=True)
class Request:
    """Arrival in seconds, tokens in and out, and the blocks of the input, the last of which may be begun only."""

    at: float
    tokens: int
    output: int
    blocks: tuple[int, ...]


def load(path: Path, most: int) -> list[Request]:
    """The first `most` requests of a trace in Mooncake's format. Raises ValueError naming the line."""
    found = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(islice(lines, most), 1):
            try:
                said = json.loads(line)
                blocks = tuple(int(block) for block in said["hash_ids"])
                found.append(
                    Request(said["timestamp"] / 1000, int(said["input_length"]), int(said["output_length"]), blocks)
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error!r:.100}") from None
    return found


class Maker:
    """Random numbers, fresh blocks, and the conversations whose next request is due."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._blocks = self._begun = 0
        self.due: list[tuple[float, int, tuple[int, ...], int]] = []  # (time, number, blocks so far, requests left)

    def fresh(self, n: int) -> tuple[int, ...]:
        self._blocks += n
        return tuple(range(self._blocks - n, self._blocks))

    def between(self, low: int, high: int) -> int:
        return low + int(self._random.random() * (high - low + 1))

    def wait(self, mean: float) -> float:
        return -mean * math.log(1 - self._random.random())

    def begin(self, at: float, blocks: tuple[int, ...], requests: int) -> None:
        self._begun += 1
        heapq.heappush(self.due, (at, self._begun, blocks, requests))


def _conversations(
    make: Maker,
    n: int,
    every: float,
    begin: Callable[[float], tuple[tuple[int, ...], int]],
    grow: tuple[int, int],
    think: float,
) -> list[Request]:
    """`n` requests: conversations begin every `every` seconds and grow by some blocks (answer and next question) after
    a pause to think."""
    found: list[Request] = []
    arrival = 0.0
    while len(found) < n:
        if not make.due or arrival <= make.due[0][0]:
            blocks, requests = begin(arrival)
            make.begin(arrival, blocks, requests)
            arrival += make.wait(every)
            continue
        at, _, blocks, left = heapq.heappop(make.due)
        tokens = TOKENS * len(blocks) - make.between(0, TOKENS - 1)
        found.append(Request(at, tokens, make.between(50, 400), blocks))
        if left > 1:
            make.begin(at + make.wait(think), blocks + make.fresh(make.between(*grow)), left - 1)
    return found


def short(n: int, seed: int = 1) -> list[Request]:
    """Chat: one of 8 system prompts of two blocks, a question of one or two; 1 to 8 turns a conversation."""
    make = Maker(seed)
    prompts = [make.fresh(2) for _ in range(8)]
    return _conversations(
        make,
        n,
        0.5,
        lambda _: (prompts[make.between(0, 7)] + make.fresh(make.between(1, 2)), make.between(1, 8)),
        (1, 2),
        20,
    )


def long(n: int, seed: int = 2) -> list[Request]:
    """Questions about documents of 32 to 128 blocks; every third asks about a document that somebody has asked about
    before."""
    make = Maker(seed)
    documents: list[tuple[int, ...]] = []

    def begin(_: float) -> tuple[tuple[int, ...], int]:
        if not documents or make.between(0, 2):
            documents.append(make.fresh(make.between(32, 128)))
            return documents[-1] + make.fresh(1), make.between(1, 4)
        return documents[-1 - make.between(0, min(len(documents), 40) - 1)] + make.fresh(1), make.between(1, 4)

    return _conversations(make, n, 4.0, begin, (1, 1), 30)


def mixed(n: int, seed: int = 3) -> list[Request]:
    """Three conversations of four are chat, one is about a document; one in ten is an agent instead: 20 blocks of
    tools, 5 to 20 steps."""
    make = Maker(seed)
    prompts = [make.fresh(2) for _ in range(8)]
    tools = [make.fresh(20) for _ in range(3)]

    def begin(_: float) -> tuple[tuple[int, ...], int]:
        if not make.between(0, 9):
            return tools[make.between(0, 2)] + make.fresh(1), make.between(5, 20)
        if not make.between(0, 3):
            return make.fresh(make.between(32, 128)), make.between(1, 4)
        return prompts[make.between(0, 7)] + make.fresh(make.between(1, 2)), make.between(1, 8)

    return _conversations(make, n, 1.5, begin, (1, 2), 15)


MIXES: dict[str, Callable[[int], list[Request]]] = {"short": short, "long": long, "mixed": mixed}
