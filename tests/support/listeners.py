"""Daemons that listen for every transport, and bare callers: for the tests of gRPC, tokens and TLS.

TCP listeners are on loopback. Certificates come from throwaway authorities, one set for a whole test run.
"""

from __future__ import annotations

import functools
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench.pki import Authority
from kvtier.client.api import Client
from kvtier.protocol import rpc
from kvtier.protocol.v1 import kvtier_pb2 as pb
from kvtier.server.access import issue
from tests.support.daemon import Daemon, MiB

TRANSPORTS = ("unix", "grpc-unix", "grpc-tcp", "grpc-tls")


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def write_private(path: Path, text: str) -> Path:
    """A file that only we may read, replaced at once."""
    aside = path.with_name(path.name + ".new")
    aside.touch(0o600)
    aside.write_text(text)
    aside.replace(path)
    return path


@dataclass(frozen=True)
class Pki:
    """An authority the daemons trust, one they do not, and certificates by both."""

    directory: Path
    good: Authority
    evil: Authority
    server: tuple[Path, Path]
    client: tuple[Path, Path]
    stranger: tuple[Path, Path]  # a client's, by the other authority
    expired: tuple[Path, Path]
    elsewhere: tuple[Path, Path]  # for another host


_keep: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def pki() -> Pki:
    """Made once a test run: each certificate takes openssl some 20 ms."""
    _keep.append(made := tempfile.TemporaryDirectory(prefix="kvtier-pki-"))
    directory = Path(made.name)
    good, evil = Authority(directory, "good"), Authority(directory, "evil")
    return Pki(
        directory,
        good,
        evil,
        good.issue("server"),
        good.issue("client"),
        evil.issue("stranger"),
        good.issue("expired", days=-1),
        good.issue("elsewhere", hosts="DNS:elsewhere.example"),
    )


class ListeningDaemon(Daemon):
    """A daemon on all transports: Unix, gRPC on a Unix socket, on TCP of loopback; tokens of every role in two tenants.

    `tls`: a certificate and key for TCP; `client_ca`: whose clients it takes; `port`: where it listens.
    """

    def __init__(
        self,
        arena_bytes: int | str = 64 * MiB,
        *arguments: str,
        tls: tuple[Path, Path] | None = None,
        client_ca: Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(arena_bytes, *arguments, **options)
        self.port, self.tls = free_port(), tls
        self.token_file = self.directory / "tokens"
        self.tokens: dict[str, str] = {}
        lines = []
        for tenant in ("acme", "other"):
            for role in ("read", "write", "admin"):
                self.tokens[f"{tenant}-{role}"], line = issue(f"{tenant}-{role}", tenant, role)
                lines.append(line)
        write_private(self.token_file, "# who may call\n\n" + "\n".join(lines) + "\n")
        self.arguments += [
            f"--grpc=127.0.0.1:{self.port}",
            f"--grpc=unix:{self.socket}.grpc",
            f"--token-file={self.token_file}",
        ]
        if tls is not None:
            self.arguments += [f"--tls-cert={tls[0]}", f"--tls-key={tls[1]}"]
        if client_ca is not None:
            self.arguments.append(f"--tls-client-ca={client_ca}")

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def address_of(self, transport: str, who: str = "acme-admin") -> tuple[str, dict[str, str]]:
        """What a client by one of `TRANSPORTS` is made of: address, and its credentials.

        `who` is empty for no token.
        """
        if transport == "unix":
            return self.address, {}
        credentials = {"token": self.tokens[who]} if who else {}
        if transport == "grpc-unix":
            return f"grpc+unix:{self.socket}.grpc", credentials
        if transport == "grpc-tcp":
            return f"grpc://{self.target}", credentials
        return f"grpcs://{self.target}", {"ca": str(pki().good.ca), **credentials}

    def client_by(self, transport: str, who: str = "acme-admin", **more: str) -> Client:
        """A client by one of `TRANSPORTS`."""
        address, credentials = self.address_of(transport, who)
        return Client(address, **{**credentials, **more})

    def bearer(self, who: str) -> tuple[tuple[str, str], ...]:
        """Call metadata that holds a token."""
        return (("authorization", f"Bearer {self.tokens[who]}"),)


class RawGrpc:
    """A bare gRPC channel, without our client: methods by name, raw messages. A context manager."""

    def __init__(self, target: str, credentials: Any = None, options: list[tuple[str, Any]] | None = None) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0), *(options or [])]
        self.channel = (
            grpc.secure_channel(target, credentials, options) if credentials else grpc.insecure_channel(target, options)
        )

    def __enter__(self) -> RawGrpc:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def unary(self, path: str, raw: bytes = b"", metadata: Any = None, timeout: float = 10) -> bytes:
        """One message there and back. Raises grpc.RpcError."""
        answer: bytes = self.channel.unary_unary(path)(raw, timeout=timeout, metadata=metadata)
        return answer

    def code(
        self, path: str, raw: bytes = b"", metadata: Any = None, streaming: bool = False
    ) -> tuple[grpc.StatusCode, str]:
        """How a call ends: status code and details."""
        try:
            if streaming:
                list(self.channel.stream_stream(path)(iter([raw]), timeout=10, metadata=metadata))
            else:
                self.unary(path, raw, metadata)
        except grpc.RpcError as error:
            return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""

    def register(self, canonical: bytes, metadata: Any = None) -> pb.RegisterReply:
        """A namespace's handle."""
        return pb.RegisterReply.FromString(
            self.unary(method("Register"), pb.RegisterRequest(description=canonical).SerializeToString(), metadata)
        )


def method(name: str) -> str:
    return f"/{rpc.SERVICE}/{name}"


def ends(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    """How a call of a generated stub ends."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""
