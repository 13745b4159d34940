"""Values of settings: what their text means. Used for the file and for flags alike, so a message says only what to write, not where.

Pure functions but for names of users and groups, which this host knows. Whatever is no value of its kind raises Invalid.
"""

from __future__ import annotations

import grp
import ipaddress
import os
import pwd
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import Invalid
from kvtier.format.identity import check_text
from kvtier.server.sessions import ROLES
from kvtier.tiers.redis import location

MAX_LISTENERS = 8
MAX_USERS = 1024
METRICS_HOST = "127.0.0.1"  # where a bare port listens

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]i?|)b?", re.IGNORECASE | re.ASCII)
_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Listen:
    """A listener: a Unix socket's `path`, or `host` and `port` (0: any free one)."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def loopback(self) -> bool:
        """Whether only this host can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False  # a name: nobody knows where it points tomorrow

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path is not None else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class User:
    """Which Unix peers are which tenant: `kind` is uid, gid (the primary group) or any."""

    kind: str
    number: int
    tenant: str
    role: int

    def matches(self, uid: int, gid: int) -> bool:
        return self.kind == "any" or self.number == (uid if self.kind == "uid" else gid)


@dataclass(frozen=True, slots=True)
class SsdSettings:
    """The SSD tier. size, free: bytes; write: bytes a second, daily: bytes a day, 0 for no limit."""

    path: Path
    size: int
    sync: bool = False
    write: int = 0
    daily: int = 0
    free: int = 2**30

    def __str__(self) -> str:
        return f"path={self.path},size={self.size},sync={str(self.sync).lower()},write={self.write},daily={self.daily},free={self.free}"


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "4 GiB", "1.5G" or a plain number."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise Invalid(f"{text!r:.80} is not a size: write 512MiB, 4GiB or a number of bytes")
    return (
        int(float(match[1]) * _UNITS[match[2].lower()]) if "." in match[1] else int(match[1]) * _UNITS[match[2].lower()]
    )


def parse_listen(text: Any) -> Listen:
    """ "unix:/path" or "host:port" (IPv6 in brackets)."""
    if isinstance(text, str) and text.startswith("unix:"):
        return Listen(path=_path(text.removeprefix("unix:")))
    return parse_tcp(text)


def parse_tcp(text: Any) -> Listen:
    """ "host:port"; the host is an address or a name. Raises Invalid."""
    match = _HOST_PORT.fullmatch(text) if isinstance(text, str) else None
    if not match or int(match[2]) > 65535:
        raise Invalid(f"{text!r:.80} is not a listener: write unix:/path/to.sock, 127.0.0.1:50051 or [::1]:50051")
    host = match[1]
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise Invalid(f"{host} is not an IPv6 address: write [::1]:{match[2]}, say") from None
    return Listen(host=host, port=int(match[2]))


def parse_user(text: Any) -> User:
    """ "uid:1000 tenant write", "gid:engines tenant read" or "any tenant read"."""
    words = text.split() if isinstance(text, str) else []
    kind, _, name = words[0].partition(":") if words else ("", "", "")
    if len(words) != 3 or kind not in ("uid", "gid", "any") or (kind == "any") == bool(name) or words[2] not in ROLES:
        raise Invalid(
            f'{text!r:.80} names no user: write "uid:1000 TENANT ROLE", "gid:1000 TENANT ROLE" or "any TENANT ROLE"; roles: {", ".join(ROLES)}'
        )
    check_text("tenant", words[1])
    return User(kind, _number(kind, name), words[1], ROLES.index(words[2]))


def _number(kind: str, name: str) -> int:
    if kind == "any":
        return -1
    if name.isascii() and name.isdigit():
        if len(name) > 10 or int(name) >= 2**32 - 1:
            raise Invalid(f"{kind} {name[:80]} does not exist: ids are below {2**32 - 1}")
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid if kind == "uid" else grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):
        raise Invalid(f"{kind} {name!r:.80} is not known on this host: write its number") from None


def _path(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value) or len(str(value)) > 4096:
        raise Invalid(f"{value!r:.80} is not a path: write it as text")
    return Path(os.path.abspath(value))


def _mode(value: Any) -> int:
    if not isinstance(value, str) or not re.fullmatch(r"0?[0-7]{3}", value, re.ASCII):
        raise Invalid(f'{value!r:.80} is not octal text: write "660", say')
    mode = int(value, 8)
    if mode & 0o111 or mode & 0o600 != 0o600:
        raise Invalid(
            f'{value} would lock the daemon\'s own user out or make the socket executable: write "600", "660" or "666"'
        )
    return mode


def _size(value: Any) -> int:
    if type(value) is int and 0 <= value < 2**62:
        return value
    if not isinstance(value, str):
        raise Invalid(f'{value!r:.80} is not a size: write "512MiB", "4GiB" or a number of bytes')
    return parse_size(value)


def _metrics(value: Any) -> Listen | None:
    if value in ("", "off"):
        return None
    if type(value) is int or (isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 5):
        return parse_tcp(f"{METRICS_HOST}:{value}")
    return parse_tcp(value)


def _several(parse: Callable[[Any], Any], most: int) -> Callable[[Any], tuple[Any, ...]]:
    def parse_all(value: Any) -> tuple[Any, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise Invalid(f'{value!r:.80} is not a list: write ["...", "..."]')
        if len(value) > most:
            raise Invalid(f"{len(value)} entries; at most {most}")
        return tuple(parse(one) for one in value)

    return parse_all


def _grpc(value: Any) -> tuple[Listen, ...]:
    return () if value in (["off"], "off") else _several(parse_listen, MAX_LISTENERS)(value)


def _ssd(value: Any) -> SsdSettings | None:
    """A table, or "key=value,key=value"; "off" for none."""
    if value == "off":
        return None
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",")]
        if any(not mark for _, mark, _ in pairs) or len({name.strip() for name, _, _ in pairs}) != len(pairs):
            raise Invalid(f"{value!r:.80} is not path=/var/lib/kvtier,size=2TiB: write each key once, with its value")
        value = {name.strip(): text.strip() for name, _, text in pairs}
    if not isinstance(value, dict) or not {"path", "size"} <= set(value):
        raise Invalid('the SSD tier needs a path and a size: write [ssd] path = "/var/lib/kvtier", size = "2TiB"')
    _check_keys("ssd", value, ("path", "size", "sync", "write", "daily", "free"))
    sync = value.get("sync", False)
    if sync not in (True, False, "true", "false"):
        raise Invalid(f"ssd.sync is true or false, not {sync!r:.80}")
    sizes = {name: _size(value[name]) for name in ("size", "write", "daily", "free") if name in value}
    return SsdSettings(path=_path(value["path"]), sync=sync in (True, "true"), **sizes)


def _redis(value: Any) -> location.RedisLocation | None:
    """A table, or "key=value,key=value"; "off" for none. No message repeats the url: it may hold a password."""
    if value == "off":
        return None
    if isinstance(value, str):
        parts: list[str] = []
        for part in value.split(","):  # the hosts of a url are parted by commas too
            if parts and not re.match(r"\s*[a-z_]+\s*=", part):
                parts[-1] += f",{part}"
            else:
                parts.append(part)
        pairs = [part.partition("=") for part in parts]
        if any(not mark for _, mark, _ in pairs) or len({name.strip() for name, _, _ in pairs}) != len(pairs):
            raise Invalid(
                "this is not url=redis://host:6379,password_file=/etc/kvtier/redis: write each key once, with its value"
            )
        value = {name.strip(): text.strip() for name, _, text in pairs}
    if not isinstance(value, dict) or "url" not in value:
        raise Invalid('the Redis tier needs a url: write [redis] url = "redis://host:6379"')
    paths, numbers = ("password_file", "ca", "cert", "key"), {"ttl": int, "timeout": float, "connections": int}
    _check_keys("redis", value, ("url", *paths, "sentinel", "cluster", "prefix", *numbers, "write"))
    options: dict[str, Any] = {name: _path(value[name]) for name in paths if name in value}
    for name in ("sentinel", "prefix"):
        if name in value:
            if not isinstance(value[name], str) or not value[name]:
                raise Invalid(f"redis.{name} is a name, not {value[name]!r:.80}")
            options[name] = value[name]
    for name, kind in numbers.items():
        if name in value:
            try:
                options[name] = kind(value[name])
            except (TypeError, ValueError):
                raise Invalid(f"redis.{name} is a number, not {value[name]!r:.80}") from None
    if (cluster := value.get("cluster", False)) not in (True, False, "true", "false"):
        raise Invalid(f"redis.cluster is true or false, not {cluster!r:.80}")
    if "write" in value:
        options["write"] = _size(value["write"])
    return location.make(value["url"], options | {"cluster": cluster in (True, "true")})


def _check_keys(table: str, value: dict[str, Any], known: Sequence[str]) -> None:
    if odd := next((name for name in value if name not in known), None):
        raise Invalid(f"{table} has no key {odd[:80]!r}: its keys are {', '.join(known)}")


PARSERS: dict[str, Callable[[Any], Any]] = {
    "socket": _path,
    "socket_mode": _mode,
    "users": _several(parse_user, MAX_USERS),
    "arena_bytes": _size,
    "grpc": _grpc,
    "token_file": _path,
    "tls_cert": _path,
    "tls_key": _path,
    "tls_client_ca": _path,
    "ssd": _ssd,
    "redis": _redis,
    "metrics": _metrics,
}
