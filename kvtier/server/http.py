"""`/metrics`, `/live` and `/ready` over HTTP: off unless the setting `metrics` says where; apart from the data path.

One request a connection, of at most 8 KiB, within 5 s; at most 16 connections at once, further ones are closed.
`/metrics` asks for a token where there is a token file; the two health pages answer everyone. One thread accepts, and
one more serves each connection.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtier.errors import Unavailable
from kvtier.server.logs import fields
from kvtier.server.settings import Listen

MAX_REQUEST = 8192
MAX_CONNECTIONS = 16
PATIENCE = 5.0  # seconds for a whole connection
TEXT = "text/plain; charset=utf-8"
_REASONS = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed",
    500: "Internal Server Error", 503: "Unavailable",
}  # fmt: skip
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Page:
    """An answer: HTTP status, body, content type."""

    status: int
    body: bytes
    kind: str = TEXT


@dataclass(frozen=True, slots=True)
class Request:
    """What is looked at of a request: method, path without query, and the Authorization header."""

    method: str
    path: str
    authorization: str = ""


class Endpoint:
    """Listens at once; `pages` maps a path to (whether it asks for a token, what makes the page). `permit` judges an
    Authorization header; None: there are no tokens, everyone may read. Raises Unavailable if the address is taken.
    """

    def __init__(
        self,
        listen: Listen,
        pages: Mapping[str, tuple[bool, Callable[[], Page]]],
        permit: Callable[[str], bool] | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._pages = pages
        self._permit = permit
        self._tls = tls
        self._closing = False
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        family = socket.AF_INET6 if listen.host.startswith("[") else socket.AF_INET
        try:
            self._listener = socket.create_server((listen.host.strip("[]"), listen.port), family=family, backlog=64)
        except OSError as error:
            why = f"cannot listen on {listen} for metrics: {error.strerror or error}"
            raise Unavailable(f"{why}; choose another address for `metrics`") from None
        self.port = int(self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name="metrics", daemon=True)
        self._acceptor.start()

    def alive(self) -> bool:
        """Whether the accepting thread runs."""
        return self._acceptor.is_alive()

    def close(self) -> None:
        """Stops accepting; connections under way end within `PATIENCE`."""
        self._closing = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # some kernels answer ENOTCONN for a listener
        self._acceptor.join(PATIENCE)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if not self._closing:
                    time.sleep(0.1)  # out of descriptors: let some close
                continue
            if not self._places.acquire(blocking=False):
                sock.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(sock,), name="metrics-call", daemon=True).start()
            except RuntimeError:
                self._places.release()
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        until = time.monotonic() + PATIENCE
        try:
            sock.settimeout(PATIENCE)
            if self._tls is not None:
                sock = self._tls().wrap_socket(sock, server_side=True)
            raw = read_request(sock, until)
            if raw:
                sock.sendall(self.answer(raw))
        except (OSError, ValueError):
            pass  # gone, too slow, or no TLS: such a peer gets no answer
        finally:
            sock.close()
            self._places.release()

    def answer(self, raw: bytes) -> bytes:
        """The whole reply to a request's bytes."""
        request = parse_request(raw)
        page = Page(400, b"not a request this endpoint reads\n") if request is None else self._page(request)
        head = f"HTTP/1.1 {page.status} {_REASONS[page.status]}\r\nContent-Type: {page.kind}\r\n"
        head += f"Content-Length: {len(page.body)}\r\nConnection: close\r\n"
        if page.status == 401:
            head += "WWW-Authenticate: Bearer\r\n"
        if page.status == 405:
            head += "Allow: GET, HEAD\r\n"
        return f"{head}\r\n".encode() + (b"" if request is not None and request.method == "HEAD" else page.body)

    def _page(self, request: Request) -> Page:
        if request.path not in self._pages:
            return Page(404, f"there are {', '.join(self._pages)}\n".encode())
        if request.method not in ("GET", "HEAD"):
            return Page(405, b"only GET and HEAD\n")
        private, make = self._pages[request.path]
        if private and self._permit is not None and not self._permit(request.authorization):
            return Page(401, b"this page needs a token: Authorization: Bearer TOKEN\n")
        try:
            return make()
        except Exception:
            log.exception("page failed", extra=fields(path=request.path))
            return Page(500, b"internal error; see the daemon's log\n")


def read_request(sock: socket.socket, until: float) -> bytes:
    """Bytes up to the empty line, at most `MAX_REQUEST`; b"" if the peer closes or is too slow."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        left = until - time.monotonic()
        if left <= 0 or len(raw) >= MAX_REQUEST:
            return raw if len(raw) >= MAX_REQUEST else b""
        sock.settimeout(left)
        piece = sock.recv(MAX_REQUEST - len(raw))
        if not piece:
            return b""
        raw += piece
    return raw


def parse_request(raw: bytes) -> Request | None:
    """Method, path and Authorization of a request's head. None for anything malformed or too long."""
    head, end, _ = raw.partition(b"\r\n\r\n")
    if not end:
        return None
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[1].startswith("/") or words[2] not in ("HTTP/1.0", "HTTP/1.1"):
        return None
    said = [line.partition(":") for line in lines[1:]]
    authorization = [value.strip() for name, colon, value in said if colon and name.lower() == "authorization"]
    if len(authorization) > 1:
        return None
    return Request(words[0], words[1].partition("?")[0], authorization[0] if authorization else "")
