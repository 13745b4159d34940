"""Real redis-servers for the tests: single, replicated, watched by Sentinels, a cluster; and a proxy in front that
delays, stands still and cuts.

Each listens on a free port of loopback, and most on a Unix socket too, in a directory of its own; leaving the `with`
ends it. Where redis-server is not installed the tests that need it are skipped and say how: tests/support/redis.sh.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import redis

from tests.support.daemon import PATIENCE, die_with_parent, until

BINARY = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(
    BINARY is None, reason="no redis-server and no valkey-server here: run tests/support/redis.sh, or install either"
)


def free_port() -> int:
    """A port that nobody has now. Below the ephemeral range, so that no connection takes it; a cluster's bus needs the
    one 10,000 higher too.
    """
    for _ in range(1000):
        port = 12_000 + int.from_bytes(os.urandom(2), "little") % 10_000
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


class Server:
    """One redis-server. A context manager; `kill`, `start` and `stopped` may be called inside it."""

    def __init__(
        self, *arguments: str, password: str | None = None, port: int | None = None, tls: Sequence[str] = ()
    ) -> None:
        assert BINARY is not None
        self.password = password
        self._fixed = port
        self.arguments = list(arguments)
        self._tls = list(tls)
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self._directory = tempfile.TemporaryDirectory(prefix="kvtier-redis-")
        self.directory = Path(self._directory.name)
        self.socket = self.directory / "r.sock"
        try:
            for _ in range(5):
                self.port = self._fixed or free_port()
                if self.start():
                    return self
            raise AssertionError(self.log())
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._directory.cleanup()

    def start(self) -> bool:
        """Starts it; whether it answers. False: its port was taken meanwhile."""
        listen = ["--port", "0", "--tls-port", str(self.port), *self._tls] if self._tls else ["--port", str(self.port)]
        command = [
            str(BINARY),
            *listen,
            "--bind",
            "127.0.0.1",
            "--unixsocket",
            str(self.socket),
            "--dir",
            str(self.directory),
        ]
        command += [
            "--save",
            "",
            "--appendonly",
            "no",
            "--logfile",
            str(self.directory / "log"),
            "--repl-diskless-sync-delay",
            "0",
        ]
        if self.password is not None:
            command += ["--requirepass", self.password]
        self.process = subprocess.Popen(
            [*command, *self.arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent
        )
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self.process.poll() is not None:
                return False
            try:
                with self.client() as client:
                    client.ping()
                return True
            except (redis.ConnectionError, redis.TimeoutError):
                time.sleep(0.01)
        return False

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE)
            self.process = None

    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP for a while: it takes connections and answers nothing."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def url(self) -> str:
        """Over the Unix socket."""
        return f"unix://{self.socket}"

    @property
    def tcp(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> redis.Redis:
        """A client of redis-py, as an operator would use it."""
        return redis.Redis(unix_socket_path=str(self.socket), password=self.password, socket_timeout=PATIENCE)

    def names(self) -> list[bytes]:
        with self.client() as client:
            return sorted(client.keys("*"))

    def tell(self, *words: Any) -> Any:
        with self.client() as client:
            return client.execute_command(*words)


@contextmanager
def cluster(nodes: int = 3) -> Iterator[list[Server]]:
    """Primaries that share the slots evenly."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Server("--cluster-enabled", "yes", "--cluster-node-timeout", "5000"))
            for _ in range(nodes)
        ]
        share = 16_384 // nodes
        for i, server in enumerate(servers):
            last = 16_384 if i == nodes - 1 else (i + 1) * share
            server.tell("CLUSTER", "ADDSLOTSRANGE", i * share, last - 1)
            server.tell("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for server in servers[1:]:
            servers[0].tell("CLUSTER", "MEET", "127.0.0.1", server.port)
        until(lambda: all(_whole(server, nodes) for server in servers), "the cluster is one")
        yield servers


def _whole(server: Server, nodes: int) -> bool:
    said = server.tell("CLUSTER", "INFO").decode()
    return (
        "cluster_state:ok" in said and f"cluster_known_nodes:{nodes}" in said and "cluster_slots_assigned:16384" in said
    )


def move_slot(servers: Sequence[Server], slot: int, to: Server, halfway: threading.Event | None = None) -> None:
    """Moves a slot with its names to another node, as redis-cli does; stands still in the middle until `halfway` is
    set.
    """
    ids = {server.port: server.tell("CLUSTER", "MYID").decode() for server in servers}
    (source,) = (server for server in servers if server is not to and _has(server, slot))
    to.tell("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.port])
    source.tell("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[to.port])
    names = source.tell("CLUSTER", "GETKEYSINSLOT", slot, 1000)
    for name in names[: len(names) // 2 + 1]:
        source.tell("MIGRATE", "127.0.0.1", to.port, name, 0, 5000)
    if halfway is not None:
        assert halfway.wait(PATIENCE)
    for name in names[len(names) // 2 + 1 :]:
        source.tell("MIGRATE", "127.0.0.1", to.port, name, 0, 5000)
    for server in (to, source, *servers):
        server.tell("CLUSTER", "SETSLOT", slot, "NODE", ids[to.port])


def _has(server: Server, slot: int) -> bool:
    """Whether this node itself serves a slot, as it sees it."""
    for low, high, primary, *_ in server.tell("CLUSTER", "SLOTS"):
        if low <= slot <= high:
            return bool(primary[1] == server.port)
    return False


@contextmanager
def sentinels(primary: Server, name: str, number: int = 3) -> Iterator[list[tuple[str, int]]]:
    """Sentinels that watch `primary`, and promote its replica one second after it is gone."""
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="kvtier-sentinel-") as directory:
        ports: list[int] = []
        for i in range(number):
            port = free_port()
            file = Path(directory) / f"{i}.conf"
            file.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {directory}\nlogfile {directory}/{i}.log\n"
                f"sentinel monitor {name} 127.0.0.1 {primary.port} {number // 2 + 1}\n"
                f"sentinel down-after-milliseconds {name} 1000\nsentinel failover-timeout {name} 5000\n"
            )
            process = subprocess.Popen(
                [str(BINARY), str(file), "--sentinel"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
            )
            stack.callback(process.wait, PATIENCE)
            stack.callback(process.kill)
            ports.append(port)
        until(
            lambda: all(_sees(port, name, number - 1) for port in ports),
            "the Sentinels know each other and the replica",
        )
        yield [("127.0.0.1", port) for port in ports]


def _sees(port: int, name: str, others: int) -> bool:
    try:
        with redis.Redis(port=port, socket_timeout=PATIENCE) as client:
            state = client.sentinel_master(name)
        return state["num-other-sentinels"] >= others and state["num-slaves"] >= 1
    except redis.RedisError:
        return False


class Proxy:
    """Passes bytes on between a port of its own and `target`, which may change. A context manager.

    delay    seconds before bytes go on
    cut      bytes from the target after which a connection ends, once
    frozen   nothing passes
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.delay = 0.0
        self.cut: int | None = None
        self.frozen = False
        self.connections = 0
        self._stop = threading.Event()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Proxy:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE)
        self.drop()
        for thread in self._threads:
            thread.join(PATIENCE)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def drop(self) -> None:
        """Ends all connections."""
        for one in self._open:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it ended by itself

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._pass, args=(here,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _pass(self, here: socket.socket) -> None:
        with here:
            try:
                there = socket.create_connection(self.target, timeout=PATIENCE)
            except OSError:
                return
            with there:
                self._open += [here, there]
                left = None
                try:
                    while not self._stop.is_set():
                        if self.frozen:
                            time.sleep(0.005)
                            continue
                        for one in select.select([here, there], [], [], 0.02)[0]:
                            data = one.recv(1 << 16)
                            if not data:
                                return
                            if self.delay:
                                self._stop.wait(self.delay)
                            if one is there and self.cut is not None:
                                left = self.cut if left is None else left
                                if len(data) >= left:
                                    self.cut = None
                                    here.sendall(data[:left])
                                    return
                                left -= len(data)
                            (there if one is here else here).sendall(data)
                except OSError:
                    return
