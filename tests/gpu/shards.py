"""The tests in several processes beside each other on one GPU, as compiling takes most of their time. Needs pytest and
none of its plug-ins.

    python -m tests.gpu.shards [--processes N] [--seconds S] [--also MODULE] -- PYTEST ARGUMENTS

Process i of n runs every n-th test from the i-th on. At the deadline what still runs is killed and named; what failed
is printed whole. `--also` runs one more module beside them and prints what it says. Exit status 1 if anything failed.
As a plug-in of pytest this file picks a process's tests.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent.parent
OWN = (
    "-q",
    "-c",
    "tests/gpu/pytest.ini",
    "--rootdir",
    ".",
    "--confcutdir",
    "tests/gpu",
    "-p",
    "tests.gpu.shards",
    "-p",
    "no:cacheprovider",
)
VARIABLE = "KVTIER_SHARD"  # "i/n"


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leaves every n-th test to this process."""
    index, count = map(int, os.environ.get(VARIABLE, "0/1").split("/"))
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % count != index])
    items[:] = items[index::count]


def start(command: list[str], shard: str) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """The command as a process whose output goes to a file."""
    output = tempfile.TemporaryFile()  # noqa: SIM115
    environment = {**os.environ, VARIABLE: shard, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    ), output


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.shards", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=max(1, min(12, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--seconds", type=float, default=240, help="for all of them together")
    parser.add_argument("--also", default="", help="a module to run beside them")
    parser.add_argument("arguments", nargs="+", help="for pytest")
    given = parser.parse_args()
    began, count = time.monotonic(), given.processes
    tests = [sys.executable, "-m", "pytest", *OWN, *given.arguments]
    running = {f"process {i + 1} of {count}": start(tests, f"{i}/{count}") for i in range(count)}
    if given.also:
        running[given.also] = start([sys.executable, "-m", given.also], "0/1")
    totals: Counter[str] = Counter()
    failed = 0
    for name, (process, output) in running.items():
        try:
            code = process.wait(max(0.1, began + given.seconds - time.monotonic()))
            verdict = f"exit {code}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            code, verdict = 1, "killed at the deadline"
        output.seek(0)
        text = output.read().decode(errors="replace").rstrip()
        last = text.splitlines()[-1] if text else ""
        print(
            f"--- {name}, {verdict}: {last}" if not code and name != given.also else f"--- {name}, {verdict}\n{text}",
            flush=True,
        )
        failed += code != 0
        if name != given.also:
            totals.update(
                {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
            )
    seen = ", ".join(f"{number} {kind}" for kind, number in totals.items()) or "no test ran"
    print(f"{seen}; {failed} of {len(running)} processes failed, {time.monotonic() - began:.0f} s")
    return 1 if failed or not totals["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
