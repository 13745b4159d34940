"""A listener that is no daemon, for clients that must survive whatever answers on a path."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.daemon import PATIENCE


@contextmanager
def fake_server(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[float]]]:
    """`answer` gets each accepted socket. Yields the address and the moments of the connections so far."""
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-test-") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        path = f"{directory}/fake.sock"
        listener.bind(path)
        listener.listen(64)
        moments: list[float] = []
        accepted: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                moments.append(time.monotonic())
                accepted.append(sock)
                try:
                    answer(sock)
                except OSError:
                    pass  # the client did not wait

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield path, moments
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for sock in accepted:
                sock.close()
            thread.join(PATIENCE)
            assert not thread.is_alive()
