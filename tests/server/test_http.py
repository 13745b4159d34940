"""The HTTP pages.

Live and ready are different answers, a dead thread is not ready, silent connections do not stop them, tokens.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.server import metrics
from kvtier.server.access import issue
from kvtier.server.http import MAX_CONNECTIONS, Endpoint, Page, parse_request
from kvtier.server.lifecycle import Daemon as Life
from kvtier.server.settings import Config, Listen
from tests.server.test_metrics import Watched, fetch, free_port
from tests.support.daemon import Daemon, MiB, until
from tests.support.listeners import pki, write_private


@pytest.fixture(scope="module")
def daemon() -> Iterator[Watched]:
    with Watched() as running:
        yield running


# --- health


@contextmanager
def life(directory: Path) -> Iterator[tuple[Life, int]]:
    """A daemon in this process, to reach its threads."""
    port = free_port()
    daemon = Life(Config(directory / "k.sock", 8 * MiB, metrics=Listen(host="127.0.0.1", port=port)))
    daemon.start()
    try:
        yield daemon, port
    finally:
        daemon.stop()


def test_live_and_ready_are_different_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with life(tmp_path) as (daemon, port):
        assert fetch(port, "/live") == (200, "live\n") and fetch(port, "/ready") == (200, "ready\n")
        os.write(daemon.sessions._wake_write, b"x")  # the thread that waits for dead processes ends
        until(lambda: not daemon.sessions.alive(), "it ends")
        assert fetch(port, "/ready") == (503, "the thread of the process watcher has died\n")
        assert fetch(port, "/live") == (200, "live\n"), "alive, but not fit for calls"
        assert daemon.beat() is False
        status, text = fetch(port, "/metrics")
        assert status == 200 and "\nkvtier_ready 0.0\n" in text
        monkeypatch.setattr(daemon, "_beat", time.monotonic() - 100)
        status, text = fetch(port, "/live")
        assert status == 503 and text.startswith("the main thread has not moved for 100 s")


def test_a_dead_transport_is_not_ready(tmp_path: Path) -> None:
    with life(tmp_path) as (daemon, port):
        daemon.unix._closing = True
        daemon.unix._listener.shutdown(socket.SHUT_RDWR)
        until(lambda: not daemon.unix.alive(), "the accepting thread ends")
        assert fetch(port, "/ready") == (503, "the thread of the Unix transport has died\n")


def test_not_ready_before_the_arena_and_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first step of the arena is being backed the health pages answer.

    Live, not ready, nothing to export yet.
    """
    port, going = free_port(), threading.Event()
    original = metrics.Exporter.__init__
    daemon = Life(Config(tmp_path / "k.sock", 8 * MiB, metrics=Listen(host="127.0.0.1", port=port)))
    monkeypatch.setattr(metrics.Exporter, "__init__", lambda *arguments: (going.wait(20), original(*arguments))[1])
    starter = threading.Thread(target=daemon.start)
    starter.start()
    try:
        until(lambda: _answers(port), "the endpoint is up")
        assert (
            fetch(port, "/ready") == (503, "starting\n")
            and fetch(port, "/live")[0] == 200
            and fetch(port, "/metrics")[0] == 503
        )
        going.set()
        starter.join(20)
        assert fetch(port, "/ready")[0] == 200
        daemon._stop.set()
        daemon._accepting = False
        assert fetch(port, "/ready") == (503, "stopping\n")
    finally:
        going.set()
        starter.join(20)
        daemon.stop()
    assert not _answers(port)


def _answers(port: int) -> bool:
    try:
        return bool(fetch(port, "/live"))
    except OSError:
        return False


# --- the endpoint


@contextmanager
def endpoint(
    pages: dict[str, tuple[bool, Callable[[], Page]]], permit: Callable[[str], bool] | None = None
) -> Iterator[int]:
    made = Endpoint(Listen(host="127.0.0.1"), pages, permit)
    try:
        yield made.port
    finally:
        made.close()
        assert not made.alive()


def test_there_is_nothing_else(daemon: Watched) -> None:
    for path in ("/", "/metrics/", "/debug", "/../etc/passwd", "/config", "/env"):
        assert fetch(daemon.port, path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert fetch(daemon.port, "/metrics", method)[0] == 405
    assert fetch(daemon.port, "/live", "HEAD") == (200, "")
    assert fetch(daemon.port, "/live?probe=1")[0] == 200


def test_what_is_no_request_is_refused(daemon: Watched) -> None:
    for raw in (
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /live HTTP/2\r\n\r\n",
        b"GET live HTTP/1.1\r\n\r\n",
        b"x" * 9000,
        b"\xff\x00" * 100 + b"\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", daemon.port), timeout=20) as sock:
            sock.sendall(raw)
            assert sock.recv(100).startswith(b"HTTP/1.1 400 "), raw[:20]
    assert parse_request(b"GET /x HTTP/1.1\r\nAuthorization: a\r\nauthorization: b\r\n\r\n") is None
    assert fetch(daemon.port, "/live")[0] == 200


@pytest.mark.long
def test_half_open_connections_do_not_stop_the_pages_for_long() -> None:
    """More silent connections than there are places.

    Each is cut after a while, and beyond the places they are closed at once.
    """
    with endpoint({"/live": (False, lambda: Page(200, b"live\n"))}) as port:
        silent = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(MAX_CONNECTIONS + 5)]
        try:
            assert any(sock.recv(1) == b"" for sock in silent[-5:]), "beyond the places"
            until(lambda: _answers(port), "the silent ones are cut", 20)
        finally:
            for sock in silent:
                sock.close()


def test_metrics_ask_for_a_token_where_there_are_tokens_and_health_does_not() -> None:
    pages = {"/metrics": (True, lambda: Page(200, b"secret 1\n")), "/live": (False, lambda: Page(200, b"live\n"))}
    with endpoint(pages, lambda header: header == "Bearer right") as port:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
            status, text = fetch(port, "/metrics", **headers)
            assert status == 401 and "secret" not in text and "right" not in text
        assert fetch(port, "/metrics", Authorization="Bearer right") == (200, "secret 1\n")
        assert fetch(port, "/live") == (200, "live\n")


def test_a_page_that_fails_says_nothing_of_why(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Page:
        raise RuntimeError("inner secret")

    with endpoint({"/metrics": (False, broken)}) as port:
        assert fetch(port, "/metrics") == (500, "internal error; see the daemon's log\n")
    assert "page failed" in caplog.text


def test_a_daemon_says_nothing_over_tcp_unless_it_is_told(tmp_path: Path) -> None:
    """The default start has no TCP socket at all."""
    with Daemon(8 * MiB) as daemon, daemon.client() as client:
        assert client.status()["pid"] == daemon.pid
        inodes = set()
        for name in os.listdir(f"/proc/{daemon.pid}/fd"):
            try:
                inodes.add(os.readlink(f"/proc/{daemon.pid}/fd/{name}"))
            except OSError:
                continue
        listening = {
            f"socket:[{line.split()[9]}]"
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/{daemon.pid}/net/{table}").read_text().splitlines()[1:]
        }
        assert not inodes & listening


def test_off_loopback_the_pages_are_locked(tmp_path: Path) -> None:
    """TLS with the daemon's certificate; `/metrics` for bearers of a token, health for everyone who speaks TLS.

    Plain text hears nothing.
    """
    port = free_port()
    secret, line = issue("prometheus", "ops", "read")
    tokens = write_private(tmp_path / "tokens", line + "\n")
    cert, key = pki().server
    arguments = [
        "--grpc",
        "off",
        "--metrics",
        f"0.0.0.0:{port}",
        "--token-file",
        str(tokens),
        "--tls-cert",
        str(cert),
        "--tls-key",
        str(key),
    ]
    trusting = ssl.create_default_context(cafile=str(pki().good.ca))

    def ask(path: str, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPSConnection("localhost", port, timeout=20, context=trusting)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    with Daemon(8 * MiB, *arguments) as daemon:
        assert ask("/live") == (200, "live\n") and ask("/ready") == (200, "ready\n")
        assert ask("/metrics")[0] == ask("/metrics", Authorization=f"Bearer {'0' * 64}")[0] == 401
        status, text = ask("/metrics", Authorization=f"Bearer {secret}")
        assert status == 200 and "kvtier_ready 1.0" in text and secret not in text
        with pytest.raises((OSError, http.client.HTTPException)):
            fetch(port, "/live")
        assert ask("/live")[0] == 200
        assert secret not in daemon.log.read_text()
