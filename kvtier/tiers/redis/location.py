"""Where a Redis is and how to come in: the settings of the Redis tier, read from a URL and options, checked once.

The password is in no text that this makes: neither `str`, `repr` nor an error's message. Pure but for `secret`, which
reads the password's file at each new connection, so that a rotated password needs no restart. Knows nothing of the
redis library: a daemon without this tier never loads that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote_to_bytes

from kvtier.errors import Invalid

PORT = 6379
MAX_NODES = 64
MAX_SECRET = 4096
_URL = re.compile(r"(redis|rediss|unix)://(?:([^@/?#]*)@)?([^@/?#]*)(/[^?#]*)?", re.ASCII)
_NODE = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?", re.ASCII)
_SCHEMES = 'write "redis://host:6379", "rediss://host:6379" (TLS) or "unix:///path/to/redis.sock"'
Address = tuple[str, int]  # host and port; ("/path", 0) for a Unix socket


@dataclass(frozen=True, slots=True)
class RedisLocation:
    """nodes: the server, or some nodes of the cluster, or the Sentinels. sentinel: the name of what these watch.
    prefix: how the names of the blocks begin; daemons that are to share blocks need the same. connections: to each
    server at most. write: bytes a second that may be written (0: no limit). ttl (0: none), timeout: seconds."""

    nodes: tuple[Address, ...]
    tls: bool = False
    db: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    sentinel: str = ""
    cluster: bool = False
    prefix: str = "kvtier"
    ttl: int = 0
    timeout: float = 2.0
    connections: int = 16
    write: int = 0

    def __post_init__(self) -> None:
        if self.password is not None and self.password_file is not None:
            raise Invalid("a password stands in the URL and in password_file: write it in one place")
        if self.cluster and self.sentinel:
            raise Invalid("cluster and sentinel exclude each other: a cluster does its own failover")
        if len(self.nodes) > 1 and not (self.cluster or self.sentinel):
            raise Invalid("several hosts are a cluster or Sentinels: write cluster = true or sentinel = NAME too")
        if self.cluster and self.db:
            raise Invalid("a cluster has database 0 only")
        if (self.ca or self.cert or self.key) and not self.tls:
            raise Invalid('ca, cert and key need TLS: write url = "rediss://..."')
        if (self.cert is None) != (self.key is None):
            raise Invalid("cert and key belong together: write both")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.prefix, re.ASCII):
            raise Invalid("prefix is 1 to 64 letters, digits, dots, dashes or underscores")
        limits = [0.05 <= self.timeout <= 60, 2 <= self.connections <= 256, 0 <= self.ttl < 2**31, 0 <= self.db < 65536]
        if not all(limits):
            ranges = "timeout is 0.05 to 60 seconds, connections 2 to 256, ttl 0 to 2147483647 seconds"
            raise Invalid(f"{ranges}, the database 0 to 65535")

    @property
    def unix(self) -> bool:
        return self.nodes[0][0].startswith("/")

    def check_files(self) -> None:
        self.secret()
        for name in ("ca", "cert", "key"):
            path = getattr(self, name)
            if path is not None and not os.access(path, os.R_OK):
                advice = "create it, or correct the path"
                raise Invalid(f"{name}: {path} does not exist or cannot be read by this user: {advice}")

    def secret(self) -> str | None:
        """The password as it is now. Raises Invalid where its file cannot be read."""
        if self.password_file is None:
            return self.password
        try:
            with self.password_file.open("rb") as stream:
                raw = stream.read(MAX_SECRET + 1)
        except OSError as error:
            raise Invalid(f"password_file {self.password_file}: {error.strerror}") from None
        if len(raw) > MAX_SECRET:
            advice = "it holds the password and a line end, no more"
            raise Invalid(f"password_file {self.password_file} has more than {MAX_SECRET} bytes: {advice}")
        try:
            return raw.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise Invalid(f"password_file {self.password_file} is not UTF-8 text") from None

    def __str__(self) -> str:
        nodes = ",".join(host if not port else f"{host}:{port}" for host, port in self.nodes)
        scheme = "unix" if self.unix else "rediss" if self.tls else "redis"
        user = f"{self.user or ''}{':***' if self.password is not None else ''}"
        url = f"{scheme}://{user + '@' if user else ''}{nodes}{f'/{self.db}' if self.db and not self.unix else ''}"
        options: dict[str, object] = {"url": url}
        for name in ("password_file", "ca", "cert", "sentinel", "cluster"):
            if value := getattr(self, name):
                options[name] = "true" if value is True else value
        options |= {"prefix": self.prefix, "ttl": self.ttl, "timeout": f"{self.timeout:g}"}
        options |= {"connections": self.connections, "write": self.write}
        return ",".join(f"{name}={value}" for name, value in options.items())


def parse_url(url: object) -> dict[str, object]:
    """Fields of `RedisLocation` from "redis://user:password@host:port/db" and its like. Raises Invalid, without
    repeating the URL: it may hold a password."""
    match = _URL.fullmatch(url) if isinstance(url, str) and len(url) <= 8192 else None
    if match is None:
        encoded = "user and password percent-encoded, so that none of @ / ? # stands in them"
        raise Invalid(f"url is not one of Redis: {_SCHEMES}; {encoded}")
    scheme, login, hosts, path = match.groups()
    found: dict[str, object] = {"tls": scheme == "rediss"}
    if login is not None:
        user, colon, password = login.partition(":")
        found["user"] = _decoded(user) or None
        if colon:
            found["password"] = _decoded(password)
    if scheme == "unix":
        if hosts or not path or len(path) < 2:
            raise Invalid('a Unix socket needs its whole path: write url = "unix:///run/redis/redis.sock"')
        return found | {"nodes": ((path, 0),)}
    nodes = [_node(one) for one in hosts.split(",")]
    if len(nodes) > MAX_NODES:
        raise Invalid(f"{len(nodes)} hosts; {MAX_NODES} are enough to find a cluster")
    if path not in (None, "/"):
        if not re.fullmatch(r"/[0-9]{1,5}", path, re.ASCII):
            raise Invalid('behind the host is the number of the database or nothing: write url = "redis://host:6379/0"')
        found["db"] = int(path[1:])
    return found | {"nodes": tuple(nodes)}


def make(url: object, options: Mapping[str, object] | None = None) -> RedisLocation:
    """`RedisLocation` from a URL and further fields. Raises Invalid."""
    return RedisLocation(**{**parse_url(url), **(options or {})})  # type: ignore[arg-type]


def _node(text: str) -> Address:
    match = _NODE.fullmatch(text)
    port = int(match[2] or PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise Invalid(f"url names no host: {_SCHEMES}")
    return match[1].strip("[]"), port


def _decoded(text: str) -> str:
    if re.search(r"%(?![0-9A-Fa-f]{2})", text):
        raise Invalid("user and password in the url are percent-encoded: a % alone is written %25")
    try:
        return unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise Invalid("user and password in the url are not UTF-8 text") from None
