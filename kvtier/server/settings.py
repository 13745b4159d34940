"""The daemon's settings. A new one is an entry in `SETTINGS`, a field in `Config` and a flag in server/main.py.

A dozen at most, from one TOML file and from flags that override it, checked once; each message says what to write. An
unknown name is refused with the nearest known one. Values are plain text, numbers and lists of text; nothing is
expanded or executed. Pure functions but for looking at files, at names of users and groups, and at this process's
memory limit. Contents of token and TLS files are read by access.py, not here.
"""

from __future__ import annotations

import difflib
import grp
import ipaddress
import os
import pwd
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.errors import Denied, Invalid
from kvtier.format.identity import check_text
from kvtier.protocol.addresses import default_socket, grpc_beside
from kvtier.server.sessions import ADMIN, ROLES, WRITE, Peer
from kvtier.tiers.redis import location
from kvtier.tiers.redis.location import RedisLocation
from kvtier.tiers.ssd.ssd import MAX_CAPACITY, MIN_CAPACITY

DEFAULT_FILE = Path("/etc/kvtier/kvtier.toml")
MAX_FILE_BYTES = 64 * 1024
MIN_ARENA = 2**20
MAX_LISTENERS = 8
MAX_USERS = 1024
METRICS_HOST = "127.0.0.1"  # where a bare port listens
_SUN_PATH = 107  # bytes of a Unix socket's path

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
            return False  # a name may point elsewhere tomorrow

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
        sizes = f"write={self.write},daily={self.daily},free={self.free}"
        return f"path={self.path},size={self.size},sync={str(self.sync).lower()},{sizes}"


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "4 GiB", "1.5G" or a plain number."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise Invalid(f"{text!r:.80} is not a size: write 512MiB, 4GiB or a number of bytes")
    unit = _UNITS[match[2].lower()]
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


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
        forms = '"uid:1000 TENANT ROLE", "gid:1000 TENANT ROLE" or "any TENANT ROLE"'
        raise Invalid(f"{text!r:.80} names no user: write {forms}; roles: {', '.join(ROLES)}")
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
        what = "would lock the daemon's own user out or make the socket executable"
        raise Invalid(f'{value} {what}: write "600", "660" or "666"')
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
        value = _pairs(value.split(","), f"{value!r:.80} is not path=/var/lib/kvtier,size=2TiB")
    if not isinstance(value, dict) or not {"path", "size"} <= set(value):
        raise Invalid('the SSD tier needs a path and a size: write [ssd] path = "/var/lib/kvtier", size = "2TiB"')
    _check_keys("ssd", value, ("path", "size", "sync", "write", "daily", "free"))
    sizes = {name: _size(value[name]) for name in ("size", "write", "daily", "free") if name in value}
    if not MIN_CAPACITY <= sizes["size"] <= MAX_CAPACITY:
        raise Invalid(
            f"an SSD tier has {MIN_CAPACITY} to {MAX_CAPACITY} bytes, not {sizes['size']}: write another size"
        )
    return SsdSettings(path=_path(value["path"]), sync=_flag("ssd", "sync", value), **sizes)


def _redis(value: Any) -> RedisLocation | None:
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
        value = _pairs(parts, "this is not url=redis://host:6379,password_file=/etc/kvtier/redis")
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
    if "write" in value:
        options["write"] = _size(value["write"])
    return location.make(value["url"], options | {"cluster": _flag("redis", "cluster", value)})


def _pairs(parts: Sequence[str], wrong: str) -> dict[str, str]:
    """What a table given as text says: {key: value} of `key=value` parts. Raises Invalid, which begins with `wrong`."""
    pairs = [part.partition("=") for part in parts]
    if any(not mark for _, mark, _ in pairs) or len({name.strip() for name, _, _ in pairs}) != len(pairs):
        raise Invalid(f"{wrong}: write each key once, with its value")
    return {name.strip(): text.strip() for name, _, text in pairs}


def _flag(table: str, name: str, value: Mapping[str, Any]) -> bool:
    said = value.get(name, False)
    if said not in (True, False, "true", "false"):
        raise Invalid(f"{table}.{name} is true or false, not {said!r:.80}")
    return said in (True, "true")


def _check_keys(table: str, value: dict[str, Any], known: Sequence[str]) -> None:
    if odd := next((name for name in value if name not in known), None):
        raise Invalid(f"{table} has no key {odd[:80]!r}: its keys are {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its key in the file, how its value is read, what it is when nothing is said, and what it means."""

    name: str
    parse: Callable[[Any], Any]
    default: str
    meaning: str

    @property
    def flag(self) -> str:
        """Its flag. A list is given by repeating one, so the flag of `users` is singular."""
        return "--user" if self.name == "users" else f"--{self.name.replace('_', '-')}"


SETTINGS: tuple[Setting, ...] = (
    Setting("socket", _path, "/run/kvtier/kvtier.sock, or kvtier.sock in the user's runtime directory",
        "path of the Unix transport's socket"),
    Setting("socket_mode", _mode, "600", "permissions of the Unix sockets, octal as text"),
    Setting("users", _several(parse_user, MAX_USERS), "[]",
        "who may connect by Unix socket, and as whom: a list of "
        "`uid:ID TENANT ROLE`, `gid:ID TENANT ROLE`, `any TENANT ROLE`"),
    Setting("arena_bytes", _size, "a quarter of the memory limit",
        "shared memory for blocks: a number of bytes, or text such as `16GiB`"),
    Setting("grpc", _grpc, "a Unix socket beside `socket`",
        "list of gRPC listeners: `unix:/path` or `host:port`; `off` for none"),
    Setting("token_file", _path, "none",
        "file of `name tenant role sha256:DIGEST` lines; any TCP gRPC listener needs one"),
    Setting("tls_cert", _path, "none", "certificate chain (PEM); any listener that is not loopback needs one"),
    Setting("tls_key", _path, "none", "private key of `tls_cert` (PEM)"),
    Setting("tls_client_ca", _path, "none", "clients must show a certificate of this authority (PEM): mutual TLS"),
    Setting("ssd", _ssd, "none",
        "the SSD tier, a table: `path` and `size` of everything in it; `sync` (settled survives a power cut), "
        "`write` (bytes a second) and `daily` (bytes a day) that may be written, `free` bytes left to others on its "
        "file system. As a flag: `path=/var/lib/kvtier,size=2TiB`"),
    Setting("redis", _redis, "none",
        "the Redis tier, a table: `url` (`redis://`, `rediss://` or `unix://`; user and password percent-encoded), "
        "`password_file`, `ca`, `cert`, `key` (PEM), `cluster`, `sentinel` (what the primary is called), `prefix` of "
        "all names, `ttl` in seconds, `timeout` of a call in seconds, `connections`, `write` (bytes a second). "
        "As a flag: `url=redis://host:6379,password_file=/etc/kvtier/redis`"),
    Setting("metrics", _metrics, "off",
        "where `/metrics`, `/live` and `/ready` listen: a port (on loopback) or `host:port`"),
)  # fmt: skip
BY_NAME = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True, slots=True)
class Config:
    """Checked settings, named as in the file. poison: freed slots get NaN codes (tests only, a flag without a key)."""

    socket: Path
    arena_bytes: int
    socket_mode: int = 0o600
    users: tuple[User, ...] = ()
    grpc: tuple[Listen, ...] = ()
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    metrics: Listen | None = None
    ssd: SsdSettings | None = None
    redis: RedisLocation | None = None
    poison: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for path in (self.socket, *(listen.path for listen in self.grpc if listen.path is not None)):
            _check_socket(path)
        if len({str(self.socket), *map(str, self.grpc)}) <= len(self.grpc):
            raise Invalid("grpc names one listener twice: write each once")
        if any(listen.path == self.socket for listen in self.grpc):
            raise Invalid(f"socket and grpc are both {self.socket}: choose another path for one of them")
        if self.arena_bytes < MIN_ARENA:
            least = f"an arena has at least {MIN_ARENA} bytes"
            raise Invalid(f'{least}, not {self.arena_bytes}: write arena_bytes = "4GiB", say')
        limit = memory_limit()
        if self.arena_bytes > limit:
            excess = f"an arena of {self.arena_bytes} bytes does not fit the {limit} bytes this process may use"
            raise Invalid(f"{excess}: choose a smaller arena_bytes")
        self._check_credentials()

    def _check_credentials(self) -> None:
        """TCP needs a token, what is not loopback needs TLS as well, and TLS files come in pairs."""
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise Invalid(f"tls_cert and tls_key belong together: write {missing} too")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise Invalid("tls_client_ca asks clients for certificates over TLS: write tls_cert and tls_key too")
        for name in ("token_file", "tls_cert", "tls_key", "tls_client_ca"):
            path = getattr(self, name)
            if path is not None and not os.access(path, os.R_OK):
                absent = f"{name}: {path} does not exist or cannot be read by this user"
                raise Invalid(f"{absent}: create it, or correct the path")
        listeners = [("grpc", listen) for listen in self.grpc if listen.path is None]
        if self.metrics is not None and not self.metrics.loopback:
            listeners.append(("metrics", self.metrics))
        for name, listen in listeners:
            check_listener(name, listen, self.token_file is not None, self.tls_cert is not None)

    def peer(self, uid: int, gid: int, pid: int) -> Peer:
        """Who a process on a Unix socket is: what the first matching entry of `users` says. Raises Denied. Without a
        match root and the daemon's own user are admins of tenant `local`; others may write there if `users` is empty.
        """
        for user in self.users:
            if user.matches(uid, gid):
                return Peer(user.tenant, user.role, uid, pid)
        if uid in (0, os.geteuid()):
            return Peer("local", ADMIN, uid, pid)
        if self.users:
            who = f"uid {uid} with gid {gid} is not among the daemon's users"
            raise Denied(f'{who}: add "uid:{uid} TENANT ROLE" to the setting `users`')
        return Peer("local", WRITE, uid, pid)


def load(file: Path | None, flags: Mapping[str, Any], *, poison: bool = False) -> Config:
    """Settings of `file` (None: the default, if it exists), overridden by `flags` (None: not given). Raises Invalid."""
    if file is None and DEFAULT_FILE.exists():
        file = DEFAULT_FILE
    said: dict[str, tuple[str, Any]] = {}
    if file is not None:
        said.update({name: (f"{file}: {name}", value) for name, value in read_file(file).items()})
    said.update({name: (BY_NAME[name].flag, value) for name, value in flags.items() if value is not None})
    return from_values(said, poison=poison)


def read_file(file: Path) -> dict[str, Any]:
    """The raw values of a file, names checked. Raises Invalid."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise Invalid(f"cannot read {file}: {error.strerror}; correct --config") from None
    return parse_toml(raw, str(file))


def parse_toml(raw: bytes, where: str) -> dict[str, Any]:
    """The raw values of a file's bytes, names checked. Raises Invalid."""
    if len(raw) > MAX_FILE_BYTES:
        raise Invalid(f"{where} has more than {MAX_FILE_BYTES} bytes: this is not a file of settings")
    try:
        values = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{where} is not TOML: {error!s:.200}") from None
    for name in values:
        if name not in BY_NAME:
            near = difflib.get_close_matches(name[:80], BY_NAME, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(BY_NAME)}"
            raise Invalid(f"{where}: there is no setting {name[:80]!r}: {hint}")
    return values


def from_values(said: Mapping[str, tuple[str, Any]], *, poison: bool = False) -> Config:
    """Settings from raw values: {name: (where it was said, value)}. Raises Invalid, saying where."""
    values: dict[str, Any] = {}
    for name, (where, value) in said.items():
        try:
            values[name] = BY_NAME[name].parse(value)
        except Invalid as error:
            raise Invalid(f"{where}: {error}") from None
    socket = values.setdefault("socket", default_socket())
    values.setdefault("arena_bytes", memory_limit() // 4)
    values.setdefault("grpc", (Listen(path=Path(grpc_beside(str(socket)))),))
    return Config(**values, poison=poison)


def _check_socket(path: Path) -> None:
    nbytes = len(os.fsencode(path))
    if nbytes > _SUN_PATH:
        long = f"the path of socket {str(path)[:40]}... has {nbytes} bytes"
        raise Invalid(f"{long}; the system allows {_SUN_PATH}: choose a shorter one")
    if not path.parent.is_dir():
        raise Invalid(f"the directory {path.parent} does not exist: create it, or choose another socket")


def check_listener(name: str, listen: Listen, tokens: bool, tls: bool) -> None:
    """Raises Invalid for a TCP listener without tokens, or for one that is not loopback without TLS."""
    if not tokens:
        instead = "a Unix socket" if name == "grpc" else f"{METRICS_HOST} instead"
        reach = f"{name}: {listen} is open to whoever reaches it"
        raise Invalid(f'{reach}: write token_file = "/etc/kvtier/tokens", or listen on {instead}')
    if not listen.loopback and not tls:
        clear = f"{name}: {listen} is not loopback, so tokens and blocks would cross the network in clear"
        raise Invalid(f"{clear}: write tls_cert and tls_key too")


# -- this machine


def memory_limit() -> int:
    """Bytes that this process may use: the least limit of its control groups, which count a memfd, or the machine's."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, *_cgroup_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")))


def _cgroup_limits(root: Path, own: Path) -> list[int]:
    """Limits of this process's control group and all above it, version 2 and 1; a container's root is its own."""
    files = [root / "memory.max", root / "memory" / "memory.limit_in_bytes"]
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        files += [base.joinpath(*parts[:n], name) for n in range(1, len(parts) + 1)]
    limits = []
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return limits
