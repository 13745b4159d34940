"""forked_mapping guard|plain|occupied: a child of this process meets its parent's mapping of an arena.

Prints how the child ended (a signal, or an exit code) and the byte that the parent still reads. `occupied`: the child
exits with 0 if the guarded address is still its own, without access, after it has made mappings of its own.
"""

from __future__ import annotations

import mmap
import os
import sys

from kvtier.client.mapping import Mapping
from kvtier.store.arena import Arena


def child(what: str, mapping: Mapping) -> int:
    if what != "plain":
        mapping.guard_after_fork()
    if what != "occupied":
        return int(mapping.array[0])
    others = [mmap.mmap(-1, 1 << 20) for _ in range(8)]
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if int(line.split("-")[0], 16) == mapping.address]
    return 0 if lines and lines[0].split()[1] == "---p" and others else 1


def main() -> None:
    arena = Arena(1 << 20)
    mapping = Mapping(os.dup(arena.fd), arena.nbytes)
    mapping.array[:] = 7
    forked = os.fork()
    if not forked:
        os._exit(child(sys.argv[1], mapping))
    _, status = os.waitpid(forked, 0)
    print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), int(mapping.array[0]))


if __name__ == "__main__":
    main()
