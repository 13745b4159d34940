"""The daemon's settings: a dozen at most, from one TOML file and from flags that override it, checked once. Each message says what to write.

Closed: an unknown name is refused with the nearest known one. Values are plain text, numbers and lists of text; nothing is expanded or executed.
Pure functions but for looking at files and at this process's memory limit. Contents of token and TLS files are read by the door, not here.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.errors import Denied, Invalid
from kvtier.protocol.addresses import default_socket, grpc_beside
from kvtier.server.sessions import ADMIN, WRITE, Peer
from kvtier.server.setting_values import METRICS_HOST, PARSERS, Listen, SsdSettings, User
from kvtier.tiers.redis.location import RedisLocation

DEFAULT_FILE = Path("/etc/kvtier/kvtier.toml")
MAX_FILE_BYTES = 64 * 1024
MIN_ARENA = 2**20
_SUN_PATH = 107  # bytes of a Unix socket's path


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its key in the file, its flag, what it is when nothing is said, and what it means."""

    name: str
    flag: str
    default: str
    meaning: str


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "socket",
        "--socket",
        "/run/kvtier/kvtier.sock, or kvtier.sock in the user's runtime directory",
        "path of the lane's Unix socket",
    ),
    Setting("socket_mode", "--socket-mode", "600", "permissions of the Unix sockets, octal as text"),
    Setting(
        "users",
        "--user",
        "[]",
        "who may connect by Unix socket, and as whom: a list of `uid:ID TENANT ROLE`, `gid:ID TENANT ROLE`, `any TENANT ROLE`",
    ),
    Setting(
        "arena_bytes",
        "--arena-bytes",
        "a quarter of the memory limit",
        "shared memory for blocks: a number of bytes, or text such as `16GiB`",
    ),
    Setting(
        "grpc",
        "--grpc",
        "a Unix socket beside `socket`",
        "list of gRPC listeners: `unix:/path` or `host:port`; `off` for none",
    ),
    Setting(
        "token_file",
        "--token-file",
        "none",
        "file of `name tenant role sha256:DIGEST` lines; any TCP gRPC listener needs one",
    ),
    Setting("tls_cert", "--tls-cert", "none", "certificate chain (PEM); any listener that is not loopback needs one"),
    Setting("tls_key", "--tls-key", "none", "private key of `tls_cert` (PEM)"),
    Setting(
        "tls_client_ca",
        "--tls-client-ca",
        "none",
        "clients must show a certificate of this authority (PEM): mutual TLS",
    ),
    Setting(
        "ssd",
        "--ssd",
        "none",
        "the SSD tier, a table: `path` and `size` of everything in it; `sync` (settled survives a power cut), `write` (bytes a second) and `daily` "
        "(bytes a day) that may be written, `free` bytes left to others on its file system. As a flag: `path=/var/lib/kvtier,size=2TiB`",
    ),
    Setting(
        "redis",
        "--redis",
        "none",
        "the Redis tier, a table: `url` (`redis://`, `rediss://` or `unix://`; user and password percent-encoded), `password_file`, `ca`, `cert`, "
        "`key` (PEM), `cluster`, `sentinel` (what the primary is called), `prefix` of all names, `ttl` in seconds, `timeout` of a call in seconds, "
        "`connections`, `write` (bytes a second). As a flag: `url=redis://host:6379,password_file=/etc/kvtier/redis`",
    ),
    Setting(
        "metrics",
        "--metrics",
        "off",
        "where `/metrics`, `/live` and `/ready` listen: a port (on loopback) or `host:port`",
    ),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True, slots=True)
class Config:
    """Checked settings, under the names of the file. poison: fill freed slots with NaN codes (tests only, a flag without a key)."""

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
            raise Invalid(
                f'an arena has at least {MIN_ARENA} bytes, not {self.arena_bytes}: write arena_bytes = "4GiB", say'
            )
        limit = memory_limit()
        if self.arena_bytes > limit:
            raise Invalid(
                f"an arena of {self.arena_bytes} bytes does not fit the {limit} bytes this process may use: choose a smaller arena_bytes"
            )
        self._check_locks()

    def _check_locks(self) -> None:
        """TCP needs a token, what is not loopback needs TLS as well, and TLS files come in pairs."""
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise Invalid(f"tls_cert and tls_key belong together: write {missing} too")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise Invalid(
                "tls_client_ca asks clients for certificates, which needs TLS: write tls_cert and tls_key too"
            )
        for name in ("token_file", "tls_cert", "tls_key", "tls_client_ca"):
            path = getattr(self, name)
            if path is not None and not os.access(path, os.R_OK):
                raise Invalid(
                    f"{name}: {path} does not exist or cannot be read by this user: create it, or correct the path"
                )
        listeners = [("grpc", listen) for listen in self.grpc if listen.path is None]
        if self.metrics is not None and not self.metrics.loopback:
            listeners.append(("metrics", self.metrics))
        for name, listen in listeners:
            if self.token_file is None:
                raise Invalid(
                    f'{name}: {listen} is open to whoever reaches it: write token_file = "/etc/kvtier/tokens", or listen on {_instead(name)}'
                )
            if not listen.loopback and self.tls_cert is None:
                raise Invalid(
                    f"{name}: {listen} is not loopback, so tokens and blocks would cross the network in clear: write tls_cert and tls_key too"
                )

    def peer(self, uid: int, gid: int, pid: int) -> Peer:
        """Who a process on a Unix socket is: the first entry of `users` that matches; else root and the daemon's own user are admin of `local`, and
        others may write there if there are no entries at all. Raises Denied."""
        for user in self.users:
            if user.matches(uid, gid):
                return Peer(user.tenant, user.role, uid, pid)
        if uid in (0, os.geteuid()):
            return Peer("local", ADMIN, uid, pid)
        if self.users:
            raise Denied(
                f'uid {uid} with gid {gid} is not among the daemon\'s users: add "uid:{uid} TENANT ROLE" to the setting `users`'
            )
        return Peer("local", WRITE, uid, pid)


def load(file: Path | None, flags: Mapping[str, Any], *, poison: bool = False) -> Config:
    """The settings of `file` (None: the default file, if it is there) with `flags` (None: not given) over them. Raises Invalid."""
    if file is None and DEFAULT_FILE.exists():
        file = DEFAULT_FILE
    said: dict[str, tuple[str, Any]] = {}
    if file is not None:
        said.update({name: (f"{file}: {name}", value) for name, value in read_file(file).items()})
    said.update({name: (_BY_NAME[name].flag, value) for name, value in flags.items() if value is not None})
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
        if name not in _BY_NAME:
            near = difflib.get_close_matches(name[:80], _BY_NAME, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(_BY_NAME)}"
            raise Invalid(f"{where}: there is no setting {name[:80]!r}: {hint}")
    return values


def from_values(said: Mapping[str, tuple[str, Any]], *, poison: bool = False) -> Config:
    """Settings from raw values: {name: (where it was said, value)}. Raises Invalid, saying where."""
    values: dict[str, Any] = {}
    for name, (where, value) in said.items():
        try:
            values[name] = PARSERS[name](value)
        except Invalid as error:
            raise Invalid(f"{where}: {error}") from None
    socket = values.setdefault("socket", default_socket())
    values.setdefault("arena_bytes", memory_limit() // 4)
    values.setdefault("grpc", (Listen(path=Path(grpc_beside(str(socket)))),))
    return Config(**values, poison=poison)


def _check_socket(path: Path) -> None:
    nbytes = len(os.fsencode(path))
    if nbytes > _SUN_PATH:
        raise Invalid(
            f"the path of socket {str(path)[:40]}... has {nbytes} bytes; the system allows {_SUN_PATH}: choose a shorter one"
        )
    if not path.parent.is_dir():
        raise Invalid(f"the directory {path.parent} does not exist: create it, or choose another socket")


def _instead(name: str) -> str:
    return "a Unix socket" if name == "grpc" else f"{METRICS_HOST} instead"


# -- this machine


def memory_limit() -> int:
    """Bytes of memory this process may use: the least limit of its control groups (a memfd is charged to them), else the machine's memory."""
    return min(
        [
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            *_cgroup_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")),
        ]
    )


def _cgroup_limits(root: Path, own: Path) -> list[int]:
    """Limits of this process's control group and of all above it, version 2 and 1. Inside a container the root is the container's own."""
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
