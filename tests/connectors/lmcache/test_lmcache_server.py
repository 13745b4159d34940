"""A real `lmcache server` with our adapter, driven by LMCache's own benchmarks: what it stored it serves after a
restart, every checksum right, and nothing of it under another namespace."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType

import pytest

from tests.connectors.lmcache.stack import MODEL, describe, spec
from tests.support.daemon import ROOT, Daemon, MiB, die_with_parent, until

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(400)]

LMCACHE = Path(sys.executable).parent / "lmcache"
BENCH_MODEL = "test-model"  # what `lmcache bench server` calls its model
PROMPTS, CHUNKS = 3, 4  # prompts of 1,024 tokens in chunks of 256
WAIT = 120.0  # for a server of this size to start, or to be driven


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


class Server:
    """`lmcache server` with one L2 adapter. A context manager."""

    def __init__(self, adapter: str, log: Path) -> None:
        self.adapter, self.log = adapter, log
        self.port, self.http = free_port(), free_port()

    def spawn(self) -> subprocess.Popen[bytes]:
        said = (
            f"--host 127.0.0.1 --port {self.port} --http-host 127.0.0.1 --http-port {self.http} --chunk-size 256 "
            "--l1-size-gb 0.5"
        )
        said += " --no-l1-use-lazy --eviction-policy LRU --supported-transfer-mode auto"
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [LMCACHE, "server", *said.split(), "--l2-adapter", self.adapter],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                preexec_fn=die_with_parent,
            )

    def __enter__(self) -> Server:
        self.process = self.spawn()
        until(self._up, f"lmcache server is up, and our adapter connected; {self.log}", WAIT)
        return self

    def _up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return '"daemon": "answers"' in json.dumps(json.loads(self.get("status") or b"{}"))

    def get(self, path: str) -> bytes | None:
        """A page of its HTTP API; None if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/{path}", timeout=5) as answer:
                return bytes(answer.read())
        except OSError:
            return None

    def drive(self) -> str:
        """What LMCache's own benchmark says of it."""
        said = (
            f"--rpc-url tcp://127.0.0.1:{self.port} --url http://127.0.0.1:{self.http} --mode cpu "
            "--transfer-mode engine_driven"
        )
        said += f" --num-blocks 128 --num-tokens {256 * CHUNKS} --start 0 --end {PROMPTS} --interval 0.05"
        command = [LMCACHE, "bench", "server", *said.split(), "--kvcache-shape-spec", "(2,128,16,8,64):uint8:8"]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT,
            env=environment(),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.log.read_text()[-4000:]
        return done.stdout

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(WAIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(WAIT)
            raise


def cold(said: str) -> list[str]:
    """What the first lookup of each prompt found: chunks of all."""
    return re.findall(r"cold\] LOOKUP: (\d+/\d+)", said)


def checksums(said: str) -> dict[str, str]:
    """Of the bytes in the engine's cache after each prompt was retrieved."""
    found = dict(re.findall(r"\[(seq \d+)/warm\] CHECKSUM: ([0-9a-f]+)", said))
    assert len(found) == PROMPTS, said
    return found


def test_three_lives_of_a_server(daemon: Daemon, tmp_path: Path) -> None:
    model, other = describe(tmp_path / "model.json"), describe(tmp_path / "other.json", revision="2" * 40)
    adapters = [spec(daemon, path, namespaces={BENCH_MODEL: str(path)}) for path in (model, other)]
    said: list[str] = []
    for life, adapter in enumerate((adapters[0], adapters[0], adapters[1])):
        with Server(adapter, tmp_path / f"server{life}.log") as server:
            said.append(server.drive())
            if life == 0:
                until(lambda: daemon.status()["known_blocks"] == PROMPTS * CHUNKS, "all chunks are stored")
    assert cold(said[0]) == [f"0/{CHUNKS}"] * PROMPTS, said[0]
    assert cold(said[1]) == [f"{CHUNKS}/{CHUNKS}"] * PROMPTS, said[1]
    assert cold(said[2]) == [f"0/{CHUNKS}"] * PROMPTS, said[2]
    for life in (0, 2):  # what was computed and what came back, compared by the benchmark itself
        assert re.search(rf"Checksum OK: *{PROMPTS}\b", said[life]), said[life]
    assert checksums(said[0]) == checksums(said[1]) == checksums(said[2]), said


def test_a_server_does_not_start_without_a_namespace(daemon: Daemon, tmp_path: Path) -> None:
    adapter = spec(daemon, tmp_path, namespaces={})
    process = Server(adapter, tmp_path / "log").spawn()
    try:
        assert process.wait(WAIT) != 0
    finally:
        process.kill()
        process.wait(WAIT)
    assert "has no identity" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("kib", [64, 2048])
def test_lmcaches_bench_of_the_adapter_verifies(daemon: Daemon, tmp_path: Path, kib: int) -> None:
    path = describe(tmp_path / "model.json")
    settled = {
        "module_path": "bench.lmcache_settled",
        "class_name": "Settled",
        "config_class_name": "KvtierL2AdapterConfig",
    }
    adapter = json.dumps(json.loads(spec(daemon, path, namespaces={"bench-model": str(path)})) | settled)
    said = (
        f"--num-keys 8 --data-size-kb {kib} --rounds 3 --warmup-rounds 1 --in-flight 2 --no-skip-verify "
        "--lookup-max-hit-rate 1.0"
    )
    command = [LMCACHE, "bench", "l2", "--l2-adapter", adapter, *said.split()]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT, env=environment(), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 16 keys data verified OK" in done.stdout, done.stdout
    assert "TIMEOUT" not in done.stdout
    for what in ("success_keys", "found", "loaded"):
        assert re.findall(rf"{what}=(\d+/\d+)", done.stdout) == ["16/16"] * 4, done.stdout
    assert daemon.status()["known_blocks"] == 4 * 16 and MODEL != "bench-model"
    assert daemon.status()["used_bytes"] < 256 * MiB
