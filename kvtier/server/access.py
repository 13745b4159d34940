"""Tokens and certificates: who may call where the kernel does not say who calls.

Their files may change while the daemon runs. A token file has one line a token, `name tenant role sha256:HEX`: the
digest of a token, not the token, so that a reader of the file or of a backup cannot call. A changed file is noticed
within a second, or at once by `reload`; an unusable one is logged once and changes nothing. No secret reaches a log
line or an error. Thread-safe.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import secrets
import ssl
import stat
import threading
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from kvtier.errors import Invalid, KvtierError, Unauthenticated
from kvtier.server.logs import fields
from kvtier.server.sessions import ROLES, Peer

MAX_TOKENS = 1024  # each call compares with all of them: 0.3 ms at this many (Python 3.11, AMD EPYC)
MIN_TOKEN, MAX_TOKEN = 32, 256  # characters; a digest does not protect a token that can be guessed
_MAX_FILE = 512 * 1024
_LOOK_EVERY = 1.0  # seconds between looks at a file's time of change
_SAY_EVERY = 10.0  # seconds between log lines about refused callers
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LINE = "name tenant role sha256:<64 hex digits>"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Token:
    """One line of a token file. `name` is for people and logs."""

    name: str
    peer: Peer
    digest: bytes


def issue(name: str, tenant: str, role: str) -> tuple[str, str]:
    """A new token (256 random bits) and the line for it. Raises Invalid for names that a file may not hold."""
    token = secrets.token_hex(32)
    line = f"{name} {tenant} {role} sha256:{sha256(token.encode()).hexdigest()}"
    _parse_line(line)
    return token, line


class _Watched:
    """Files that are read again when they changed. Raises Invalid if they cannot be used."""

    def __init__(self, what: str, *paths: Path) -> None:
        self._what, self._paths = what, paths
        self._reading = threading.Lock()
        self._stamp = self._stat()
        self._next_look = time.monotonic() + _LOOK_EVERY
        self._read()

    def _read(self) -> None:
        """Reads them all. Raises Invalid. Under the lock."""
        raise NotImplementedError

    def reload(self) -> None:
        """Reads again now. Raises Invalid, and leaves what was there in force."""
        with self._reading:
            self._stamp = self._stat()
            self._read()

    def _look(self) -> None:
        """Reads changed files again, looking at most every second. Never raises: logs what is wrong, once a change."""
        if time.monotonic() < self._next_look or not self._reading.acquire(blocking=False):
            return
        try:
            self._next_look = time.monotonic() + _LOOK_EVERY
            stamp = self._stat()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._read()
            log.info("reloaded", extra=fields(what=self._what))
        except KvtierError as error:
            log.error("reload failed", extra=fields(what=self._what, reason=error))
        finally:
            self._reading.release()

    def _stat(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


class Tokens(_Watched):
    """The tokens of one file. Raises Invalid if it cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: tuple[Token, ...] = ()
        self._lock = threading.Lock()
        self._refused = 0
        self._say_again = 0.0
        super().__init__("tokens", path)

    def __len__(self) -> int:
        return len(self._entries)

    def check(self, authorization: str | None, caller: str) -> Token:
        """The token of a header ("Bearer ..."). Raises Unauthenticated. `caller` is an address, for the log."""
        self._look()
        scheme, _, text = (authorization or "").partition(" ")
        if authorization is None or scheme.lower() != "bearer":
            raise Unauthenticated('no token: send metadata "authorization: Bearer <token>"')
        # Digests are equally long, and every entry is compared: the time taken tells nothing about the entries.
        presented = sha256(text.strip().encode("utf-8", "surrogatepass")).digest()
        found = None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, presented):
                found = entry
        if found is None or not MIN_TOKEN <= len(text.strip()) <= MAX_TOKEN:
            self._say_refused(caller)
            raise Unauthenticated("this token is not in the daemon's token file")
        return found

    def permit(self, authorization: str, caller: str = "") -> bool:
        """Whether the header holds a token of the file."""
        try:
            self.check(authorization, caller)
        except Unauthenticated:
            return False
        return True

    def _say_refused(self, caller: str) -> None:
        with self._lock:
            self._refused += 1
            if time.monotonic() < self._say_again:
                return
            self._say_again = time.monotonic() + _SAY_EVERY
            refused, self._refused = self._refused, 0
        log.warning("unknown token refused", extra=fields(calls=refused, last=caller))

    def _read(self) -> None:
        text = _read_private("token_file", self._path).decode("utf-8", "replace")
        entries = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                try:
                    entries.append(_parse_line(line))
                except Invalid as error:
                    raise Invalid(f"token_file: {self._path}, line {number}: {error}") from None
        if len(entries) > MAX_TOKENS:
            raise Invalid(f"token_file: {self._path} has {len(entries)} tokens; at most {MAX_TOKENS}")
        for what in ("name", "digest"):
            if len({getattr(entry, what) for entry in entries}) != len(entries):
                raise Invalid(f"token_file: {self._path} has one {what} twice: give each caller its own line")
        self._entries = tuple(entries)


class Certificates(_Watched):
    """The daemon's certificates and key, and the authority of clients' certificates, if any. Raises Invalid."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self.cert, self.key, self.client_ca = cert, key, client_ca
        self._files: tuple[bytes, bytes, bytes | None] = (b"", b"", None)
        self._context: ssl.SSLContext | None = None
        super().__init__("certificates", *(path for path in (cert, key, client_ca) if path is not None))

    def current(self) -> tuple[bytes, bytes, bytes | None]:
        """(chain, key, client authority) as PEM, as in force now: the same object as long as nothing changed."""
        self._look()
        return self._files

    def context(self) -> ssl.SSLContext:
        """The same for a server of the standard library."""
        self._look()
        assert self._context is not None
        return self._context

    def _read(self) -> None:
        authority = _read_file("tls_client_ca", self.client_ca) if self.client_ca is not None else None
        files = _read_file("tls_cert", self.cert), _read_private("tls_key", self.key), authority
        self._context, self._files = self._check(), files

    def _check(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key, password=lambda: "")
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or "not PEM"
            files = f"tls_cert {self.cert}, tls_key {self.key}, tls_client_ca {self.client_ca}"
            rule = "they are PEM files, the key is the certificate's and has no passphrase"
            raise Invalid(f"{files} cannot be used together: {reason}; {rule}") from None
        return context


def _parse_line(line: str) -> Token:
    words = line.split()
    if len(words) != 4:
        raise Invalid(f"{len(words)} words; write {_LINE}")
    name, tenant, role, digest = words
    for what, word in (("name", name), ("tenant", tenant)):
        if not _NAME.fullmatch(word):
            raise Invalid(f"a {what} has 1 to 64 letters, digits, dots, dashes and underscores")
    if role not in ROLES:
        raise Invalid(f"role must be {', '.join(ROLES[:-1])} or {ROLES[-1]}")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):  # never shown: it may be a token in clear
        raise Invalid(f"the last word is not a digest; write {_LINE}, with the output of: printf %s TOKEN | sha256sum")
    return Token(name, Peer(tenant, ROLES.index(role)), bytes.fromhex(digest.removeprefix("sha256:")))


def _read_private(what: str, path: Path) -> bytes:
    """A secret file's bytes. Raises Invalid if others than owner and group may read it, or than the owner write it."""
    try:
        info = path.stat()
    except OSError as error:
        raise Invalid(f"{what}: cannot read {path}: {error.strerror}") from None
    if info.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        mode = f"{stat.S_IMODE(info.st_mode):03o}"
        raise Invalid(f"{what}: {path} has mode {mode}, which lets others in: chmod 600 {path}")
    if info.st_uid not in (0, os.geteuid()):
        owner = f"{what}: {path} belongs to uid {info.st_uid}, who could change it"
        raise Invalid(f"{owner}: it must be root's or the daemon's own")
    return _read_file(what, path)


def _read_file(what: str, path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_FILE + 1)
    except OSError as error:
        raise Invalid(f"{what}: cannot read {path}: {error.strerror}") from None
    if len(raw) > _MAX_FILE:
        raise Invalid(f"{what}: {path} has more than {_MAX_FILE} bytes")
    return raw


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_mtime_ns, info.st_ino, info.st_size
