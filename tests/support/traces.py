"""Two seeded traces: agents with long shared prefixes, and one-shot traffic. `python -m tests.support.traces` writes
them into tests/data again.

Only `Random.random` is used, whose sequence Python keeps from version to version, so the stored files can be compared
with what this makes.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect
from itertools import accumulate
from random import Random

from kvtier.cli.simulator import Requests, save
from tests.support.paths import DATA


class Maker:
    """Random numbers, fresh block numbers, and a queue of the sessions whose next request is due: (time, number, chain,
    requests left).
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._blocks = self._sessions = 0
        self.due: list[tuple[float, int, list[int], int]] = []

    def fresh(self, n: int) -> list[int]:
        self._blocks += n
        return list(range(self._blocks - n, self._blocks))

    def chance(self) -> float:
        return self._random.random()

    def below(self, n: int) -> int:
        return int(self._random.random() * n)

    def wait(self, mean: float) -> float:
        return -mean * math.log(1 - self._random.random())

    def zipf(self, n: int, power: float) -> int:
        sums = list(accumulate((i + 1) ** -power for i in range(n)))
        return min(n - 1, bisect(sums, self._random.random() * sums[-1]))

    def later(self, at: float, chain: list[int], left: int) -> None:
        self._sessions += 1
        heapq.heappush(self.due, (at, self._sessions, chain, left))


def agents(seed: int = 1, requests: int = 3000) -> Requests:
    """Agents of 12 kinds (prompt and tools of 20 to 79 blocks) work in projects whose popularity drifts, in steps that
    lengthen their context.
    """
    make = Maker(seed)
    kinds = [make.fresh(20 + make.below(60)) for _ in range(12)]
    projects: dict[tuple[int, int], list[int]] = {}
    found: Requests = []
    arrival = 0.0
    while len(found) < requests:
        if not make.due or arrival <= make.due[0][0]:
            now, arrival = arrival, arrival + make.wait(6.0)
            kind, project = make.zipf(12, 1.0), int(now / 600) * 3 + make.zipf(40, 1.0)
            if (kind, project) not in projects:
                projects[kind, project] = make.fresh(5 + make.below(40))
            make.later(
                now, kinds[kind] + projects[kind, project] + make.fresh(1 + make.below(3)), 1 + int(make.wait(12))
            )
            continue
        now, _, chain, left = heapq.heappop(make.due)
        found.append(chain)
        if left > 1:
            chain = chain + make.fresh(1 + make.below(4))
            if make.chance() < 0.04:  # a sub-agent forks the context
                make.later(now + make.wait(8), chain + make.fresh(1 + make.below(4)), 1 + int(make.wait(5)))
            make.later(
                now + make.wait(12.0 if make.chance() > 0.1 else 180.0), chain, left - 1
            )  # a tool answers; a person does
    return found


def one_shot(seed: int = 2, requests: int = 5000) -> Requests:
    """Three of four requests are seen once; some ask about one of 400 documents; some begin a short conversation. All
    share 30 templates.
    """
    make = Maker(seed)
    templates = [make.fresh(1 + make.below(6)) for _ in range(30)]
    documents = [make.fresh(8 + make.below(40)) for _ in range(400)]
    found: Requests = []
    arrival = 0.0
    while len(found) < requests:
        if make.due and make.due[0][0] < arrival:
            now, _, chain, left = heapq.heappop(make.due)
            found.append(chain)
            if left > 1:
                make.later(now + make.wait(60), chain + make.fresh(1 + make.below(4)), left - 1)
            continue
        now, arrival = arrival, arrival + make.wait(0.5)
        template, kind = templates[make.zipf(30, 1.0)], make.chance()
        if kind < 0.75:
            found.append(template + make.fresh(4 + make.below(40)))
        elif kind < 0.9:
            found.append(templates[0] + documents[make.zipf(400, 0.8)] + make.fresh(1))
        else:
            make.later(now, template + make.fresh(2 + make.below(8)), 1 + int(make.wait(3)))
    return found


if __name__ == "__main__":
    save(DATA / "agents.npz", agents())
    save(DATA / "one_shot.npz", one_shot())
