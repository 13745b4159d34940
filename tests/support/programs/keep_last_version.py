"""Writes what `tests/data/last_version/` keeps: SSD directories and Redis values as the version under which this runs
writes them.

    PYTHONPATH=/path/to/that/version python keep_last_version.py --server kvtier.server OUT

Run it with the code of the version before a change of folders or formats, not with the code under test. `kvtier.server`
is the module of that version's server process (kvtier.daemon where the package has no folders yet). OUT gets
`ssd.tar.xz` and `blocks.json`; needs redis-server, the redis library and GNU tar. What the modules are called in either
version is tried in turn.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtier import Client
from kvtier.version import __version__

CONTEXT = bytes(range(32))  # a request context: blocks of an adapter or a salt
WEEK = 7 * 86_400  # seconds


def body(n: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Byte i of block n: the number in the first 8 bytes, then (31 n + i) mod 113."""
    made = ((31 * n + np.arange(nbytes)) % 113).astype(np.uint8)
    made[:8] = np.frombuffer(n.to_bytes(8, "little"), np.uint8)
    return made


def hashes(numbers: Sequence[int]) -> bytes:
    """Content hashes of these blocks, concatenated."""
    return b"".join(n.to_bytes(32, "little") for n in numbers)


def named(name: str, *modules: str) -> Any:
    """What is called so in the first of these modules that exists."""
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError):
            return getattr(importlib.import_module(module), name)
    raise SystemExit(f"{name} is in none of {modules}")


def descriptions() -> dict[str, Any]:
    """Namespaces of several sizes: small and odd, larger than a page, FP8 with static scales, one to drop."""
    identity, layout = ("kvtier.format.identity", "kvtier.identity"), ("kvtier.format.layout", "kvtier.layout")
    make, scheme = named("Description", *identity), named("HashScheme", *identity)
    opaque, group = named("opaque", *layout), named("Group", *layout)
    layer, part = named("Layer", *layout), named("Part", *layout)
    hashing = scheme(named("CHAIN", *identity), "0", 16)
    heads = tuple(layer(i, tuple(part(name, 64, "e4m3fn", "head") for name in ("k", "v"))) for i in range(2))
    scales = {f"{i}.{name}": "3f8000003d4ccccd" for i in range(2) for name in ("k", "v")}
    fp8 = named("Layout", *layout)((group("attention", 2, 16, heads),))
    return {
        "small": make("org/small", "1" * 40, opaque(1000, "ab" * 32, engine_tokens=16), hashing),
        "large": make("org/large", "2" * 40, opaque(10_000, "cd" * 32, engine_tokens=16, layers=3), hashing),
        "fp8": make("org/fp8", "3" * 40, fp8, hashing, rule="static", codec=1, scales=scales),
        "dropped": make("org/dropped", "4" * 40, opaque(5000, "ef" * 32, engine_tokens=16), hashing),
    }


class Kept:
    """What one medium holds in the end, by namespace: numbers of the blocks that must be whole, must be absent, may be
    either.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.described = descriptions()
        self.registered = {name: client.register(one) for name, one in self.described.items()}
        self.said: dict[str, dict[str, Any]] = {
            name: {
                "description": one.canonical.decode(),
                "context": "",
                "ttl": 0,
                "whole": [],
                "absent": [],
                "either": [],
            }
            for name, one in self.described.items()
        }

    def put(self, name: str, numbers: Sequence[int], context: bytes | None = None) -> None:
        """Puts blocks and waits until the lower tier has them."""
        ns, options = self.registered[name], {} if context is None else {"context": context}
        nbytes = ns.extents().body_bytes
        for at in range(0, len(numbers), 32):
            some = numbers[at : at + 32]
            answer = self.client.put(ns, hashes(some), [body(n, nbytes) for n in some], deadline=30.0, **options)
            assert answer == len(some), answer.reason
            assert self.client.flush(ns, hashes(some), deadline=30.0, **options) == len(some)
        said = self.said[name]
        said["whole"] += numbers
        said["context"] = context.hex() if context is not None else ""

    def delete(self, name: str, numbers: Sequence[int]) -> None:
        """Deletes blocks."""
        assert self.client.delete(self.registered[name], hashes(numbers), deadline=30.0) == len(numbers)
        self.said[name]["whole"] = [n for n in self.said[name]["whole"] if n not in numbers]
        self.said[name]["absent"] += numbers

    def drop(self, name: str) -> None:
        """Drops a namespace."""
        self.client.drop(self._digest(name), deadline=30.0)
        said = self.said[name]
        said["absent"], said["whole"] = said["whole"], []

    def expire(self, name: str) -> None:
        """Gives a namespace a time-to-live of a week."""
        self.client.set_ttl(self._digest(name), WEEK, deadline=30.0)
        self.said[name]["ttl"] = WEEK

    def _digest(self, name: str) -> str:
        return next(i.namespace.hex() for i in self.client.list_namespaces() if i.model == self.described[name].model)


@contextlib.contextmanager
def server(module: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """A server process of this version and a client of it."""
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/s.sock"
        command = [sys.executable, "-m", module, "--socket", socket, "--arena-bytes", "64MiB", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None and process.stdout.readline().startswith("ready")
            with Client(f"unix:{socket}") as client:
                yield process, client
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(30)


def ssd(module: str, path: Path, killed: bool) -> dict[str, Any]:
    """Writes a directory; ends the server by kill -9, while it writes more, or as it should be ended."""
    with server(module, "--ssd", f"path={path},size=4MiB,free=0") as (process, client):
        kept = Kept(client)
        kept.put("small", range_of(0, 60))
        kept.put("dropped", range_of(0, 10))
        kept.put("large", range_of(100, 110))
        kept.put("fp8", range_of(200, 230), CONTEXT)
        kept.delete("small", [3, 17, 58])
        kept.drop("dropped")
        kept.expire("large")
        for at in (1000, 1200):  # so many puts and deletes that a checkpoint replaces the journal
            kept.put("small", range_of(at, at + 100))
            kept.delete("small", range_of(at, at + 100))
        time.sleep(1.0)  # what follows stands in a journal behind the checkpoint
        kept.put("small", range_of(60, 80))
        kept.delete("small", [70])
        if killed:
            ns, numbers = kept.registered["small"], range_of(300, 396)
            client.put(ns, hashes(numbers), [body(n, ns.extents().body_bytes) for n in numbers])
            assert client.flush(ns, hashes(numbers[:40])) == 40  # the rest is on its way
            kept.said["small"]["whole"] += numbers[:40]
            kept.said["small"]["either"] = numbers[40:]
            process.send_signal(signal.SIGKILL)
            process.wait(30)
    return kept.said


def redis(module: str, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What a Redis holds: blocks as they are meant, and name -> value (base64) as they stand there."""
    import redis as library

    socket = folder / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while not socket.exists():
                time.sleep(0.05)
            with server(module, "--redis", f"url=unix://{socket}") as (_, client):
                kept = Kept(client)
                kept.put("small", range_of(0, 6))
                kept.put("fp8", range_of(200, 203), CONTEXT)
                kept.delete("small", [4])
            connection = library.Redis(unix_socket_path=str(socket))
            names = sorted(name for name in connection.keys("*"))
            values = {name.decode(): base64.b64encode(connection.get(name)).decode() for name in names}
            return kept.said, values
        finally:
            process.terminate()


def range_of(first: int, end: int) -> list[int]:
    """The numbers from `first` up to `end`."""
    return list(range(first, end))


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="kvtier.server")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept: dict[str, Any] = {"version": __version__, "ssd": {}}
        for end in ("ended", "killed"):
            kept["ssd"][end] = ssd(given.server, folder / end, end == "killed")
        kept["redis"], kept["values"] = redis(given.server, folder)
        tar = ["tar", "--sparse", "--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner", "-cJf"]
        subprocess.run([*tar, given.out.resolve() / "ssd.tar.xz", "ended", "killed"], cwd=folder, check=True)
    text = json.dumps(kept, indent=1)
    text = re.sub(r"\[[\s\d,]*\]", lambda numbers: "".join(numbers[0].split()), text)  # numbers on one line
    (given.out / "blocks.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
