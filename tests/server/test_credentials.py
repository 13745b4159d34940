"""Who may call over gRPC: no token, what each role may do, certificates, files that change while the daemon runs.

All against real daemons; TCP is loopback.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from kvtier.client.api import Client
from kvtier.errors import Denied, Invalid, KvtierError, Unauthenticated, Unavailable
from kvtier.format.layout import HEADER_BYTES
from kvtier.protocol import rpc
from kvtier.protocol.v1 import kvtier_pb2 as pb
from kvtier.server import grpc as grpc_server
from kvtier.server import in_flight
from kvtier.server.access import Tokens, issue
from kvtier.server.settings import Listen, load
from kvtier.server.verbs import Service
from tests.support.daemon import ROOT, Daemon, MiB, description, hashes, put, until
from tests.support.inside import Inside
from tests.support.listeners import ListeningDaemon, RawGrpc, method, pki, write_private

CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def listening() -> Iterator[ListeningDaemon]:
    with ListeningDaemon() as daemon:
        yield daemon


# Callers without a token


def methods() -> list[str]:
    """Every method of the server, from the descriptors."""
    pool = descriptor_pool.Default()
    assert health_pb2.DESCRIPTOR and reflection_pb2.DESCRIPTOR
    services = [pool.FindServiceByName(name) for name in (rpc.SERVICE, grpc_server.HEALTH, grpc_server.REFLECTION)]
    return [f"/{service.full_name}/{m.name}" for service in services for m in service.methods]


NEEDS_NONE = {f"/{grpc_server.HEALTH}/Check"}
NOT_THERE = {f"/{grpc_server.HEALTH}/Watch", f"/{grpc_server.HEALTH}/List"}  # a watcher would keep a thread each
NEEDS = {
    "Delete": "write",
    "Put": "write",
    "DropNamespace": "admin",
    "Pin": "admin",
    "Unpin": "admin",
    "SetTtl": "admin",
}


def sockets_of(pid: int) -> tuple[list[str], list[str]]:
    """(TCP and UDP sockets, Unix sockets) that a process has bound."""
    inodes = {
        os.readlink(f"/proc/{pid}/fd/{fd}")[8:-1]
        for fd in os.listdir(f"/proc/{pid}/fd")
        if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    }
    lines = [
        line.split()
        for name in ("tcp", "tcp6", "udp", "udp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    unix = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return [line[1] for line in lines if line[9] in inodes], sorted(
        {line[7] for line in unix if len(line) > 7 and line[6] in inodes}
    )


def test_by_default_it_listens_on_unix_sockets_that_are_its_users_own() -> None:
    """KVB-23."""
    with Daemon() as daemon:
        internet, unix = sockets_of(daemon.pid)
        assert internet == []
        assert unix == [str(daemon.socket), f"{daemon.socket}.grpc"]
        for path in unix:
            assert Path(path).stat().st_mode & 0o777 == 0o600
        with Client(f"grpc+unix:{daemon.socket}.grpc") as client:
            assert client.status()["pid"] == daemon.pid


@pytest.mark.parametrize("path", methods())
def test_every_method_asks_who_calls(listening: ListeningDaemon, path: str) -> None:
    """KVB-23: without a token, with one nobody knows, with half of one, twice; over plain TCP."""
    good = listening.tokens["acme-admin"]
    with RawGrpc(listening.target) as caller:
        wrong: list[Any] = [
            None,
            [("authorization", "Bearer " + "0" * 64)],
            [("authorization", f"Bearer {good[:-1]}")],
            [("authorization", f"Bearer {good}x")],
            [("authorization", good)],
            [("authorization", f"Basic {good}")],
            [("authorization", "Bearer ")],
            [("authorization", f"Bearer {good}")] * 2,
            [("token", good)],
        ]
        for metadata in wrong:
            code, details = caller.code(path, b"", metadata, streaming=True)
            if path in NEEDS_NONE:
                assert code is CODE.OK
            elif path in NOT_THERE:
                assert code is CODE.UNIMPLEMENTED
            else:
                assert code is CODE.UNAUTHENTICATED
            assert good not in details and "Traceback" not in details
        if path not in NOT_THERE:
            assert caller.code(path, b"", listening.bearer("acme-admin"), streaming=True)[0] is not CODE.UNAUTHENTICATED
    assert good not in listening.log.read_text()


@pytest.mark.parametrize("path", [path for path in methods() if rpc.SERVICE in path])
def test_every_method_asks_for_its_role(listening: ListeningDaemon, path: str) -> None:
    need = NEEDS.get(path.rpartition("/")[2], "read")
    roles = ("read", "write", "admin")
    with RawGrpc(listening.target) as caller:
        for role in roles:
            code, details = caller.code(path, b"", listening.bearer(f"acme-{role}"), streaming=True)
            if roles.index(role) < roles.index(need):
                assert code is CODE.PERMISSION_DENIED and f"needs role {need}" in details
            else:
                assert code not in (CODE.PERMISSION_DENIED, CODE.UNAUTHENTICATED)


def test_another_tenants_token_opens_nothing_of_ours(listening: ListeningDaemon) -> None:
    wanted = description(4096, model="org/ours")
    with listening.client_by("grpc-tcp") as client:
        ns = client.register(wanted)
        put(client, ns, [1])
        name = next(info.namespace.hex() for info in client.list_namespaces() if info.description == ns.digest)
    with RawGrpc(listening.target) as caller:
        ours, theirs = listening.bearer("acme-write"), listening.bearer("other-write")
        known = caller.register(wanted.canonical, ours)
        keys = pb.Keys(
            handle=known.handle, boot=known.boot, layer_hi=1, head_hi=1, hashes=hashes([1]), nbytes=4096 + HEADER_BYTES
        )
        lookup = pb.LookupRequest(
            handle=known.handle, boot=known.boot, run=[pb.Run(layer_hi=1, head_hi=1, hashes=hashes([1]))]
        )
        put_ = pb.PutRequest(keys=keys, checksum=[0])
        for verb, raw in (
            ("Lookup", lookup.SerializeToString()),
            *((verb, keys.SerializeToString()) for verb in ("Prefetch", "Flush", "Delete", "Get")),
            ("Put", rpc.message_chunk(put_)),
        ):
            assert caller.code(method(verb), raw, theirs, streaming=True)[0] is CODE.FAILED_PRECONDITION, (
                verb
            )  # no such handle
        for verb, request in (
            ("ShowNamespace", pb.ShowRequest(name=name)),
            ("DiffNamespaces", pb.DiffRequest(stored=name, live=name)),
        ):
            assert caller.code(method(verb), request.SerializeToString(), theirs)[0] is CODE.NOT_FOUND
        listed = pb.ListReply.FromString(caller.unary(method("ListNamespaces"), b"", theirs))
        assert [info for info in listed.namespace if info.tenant != "other"] == []


def test_health_answers_everyone_and_reflection_those_it_knows(listening: ListeningDaemon) -> None:
    def check(caller: RawGrpc, service: str) -> Any:
        raw = caller.unary(
            f"/{grpc_server.HEALTH}/Check", health_pb2.HealthCheckRequest(service=service).SerializeToString()
        )
        return health_pb2.HealthCheckResponse.FromString(raw).status

    for target in (listening.target, f"unix:{listening.socket}.grpc"):
        with RawGrpc(target) as caller:
            assert check(caller, "") == check(caller, rpc.SERVICE) == health_pb2.HealthCheckResponse.SERVING
            asked = health_pb2.HealthCheckRequest(service="nobody").SerializeToString()
            assert caller.code(f"/{grpc_server.HEALTH}/Check", asked)[0] is CODE.NOT_FOUND
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=rpc.SERVICE),
            ]
            stream = caller.channel.stream_stream(
                f"/{grpc_server.REFLECTION}/ServerReflectionInfo",
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            first, second = list(
                stream(
                    iter([r.SerializeToString() for r in requests]), timeout=10, metadata=listening.bearer("acme-read")
                )
            )
            assert {s.name for s in first.list_services_response.service} == {
                rpc.SERVICE,
                grpc_server.HEALTH,
                grpc_server.REFLECTION,
            }
            assert pb.DESCRIPTOR.serialized_pb in second.file_descriptor_response.file_descriptor_proto


def test_bad_tokens_do_not_fill_the_log(listening: ListeningDaemon) -> None:
    before = listening.log.read_text().count("unknown token refused")
    secret = "5ecre7" * 8
    with RawGrpc(listening.target) as caller:
        for _ in range(200):
            assert (
                caller.code(method("Status"), b"", [("authorization", f"Bearer {secret}")])[0] is CODE.UNAUTHENTICATED
            )
    log = listening.log.read_text()
    assert log.count("unknown token refused") - before <= 2  # one line in ten seconds
    assert secret not in log


def refused(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A daemon on a socket in `directory` that is expected to end by itself."""
    command = [
        sys.executable,
        "-m",
        "kvtier.server",
        "--config=/dev/null",
        f"--socket={directory}/k.sock",
        "--arena-bytes=1MiB",
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--grpc=127.0.0.1:0"], ["token_file"]),
        (["--grpc=0.0.0.0:0", "--token-file=TOKENS"], ["not loopback", "tls_cert"]),
        (["--grpc=127.0.0.1:0", "--token-file=OPEN"], ["chmod 600"]),
        (["--grpc=127.0.0.1:0", "--token-file=PLAIN"], ["line 1", "sha256sum"]),
    ],
)
def test_a_listener_without_its_credentials_refuses_to_start_and_says_what_to_do(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    token, line = issue("me", "acme", "read")
    write_private(tmp_path / "TOKENS", line)
    write_private(tmp_path / "OPEN", line).chmod(0o644)
    write_private(tmp_path / "PLAIN", f"me acme read {token}")
    for name in ("TOKENS", "OPEN", "PLAIN"):
        arguments = [argument.replace(f"={name}", f"={tmp_path}/{name}") for argument in arguments]
    done = refused(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert token not in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == "" and not (tmp_path / "k.sock").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "0.0.0.0", "[::]", "192.0.2.1", "cache.example"])
def test_what_counts_as_loopback(tmp_path: Path, host: str) -> None:
    """Every TCP listener needs tokens.

    All but loopback need TLS, and a name is not loopback, wherever it points today.
    """
    socket_, tokens = tmp_path / "k.sock", write_private(tmp_path / "tokens", issue("me", "acme", "read")[1])
    listen = {"socket": socket_, "arena_bytes": MiB, "grpc": [f"{host}:1"]}
    with pytest.raises(Invalid, match="token_file"):
        load(Path(os.devnull), listen)
    locked = {**listen, "token_file": tokens}
    if host in ("127.0.0.1", "[::1]", "localhost"):
        load(Path(os.devnull), locked)
    else:
        with pytest.raises(Invalid, match="not loopback"):
            load(Path(os.devnull), locked)
    load(Path(os.devnull), {**locked, "tls_cert": pki().server[0], "tls_key": pki().server[1]})


def test_a_server_made_in_code_has_the_same_checks(tmp_path: Path) -> None:
    with Inside() as inside:
        service = Service(inside.store, inside.sessions)
        write_private(tmp_path / "tokens", issue("me", "acme", "read")[1])
        for listen, tokens, words in (
            (Listen(host="127.0.0.1"), None, "token_file"),
            (Listen(host="0.0.0.0"), Tokens(tmp_path / "tokens"), "tls_cert"),
        ):
            with pytest.raises(Invalid, match=words):
                grpc_server.GrpcServer(service, [listen], unix_peer=None, tokens=tokens)


def test_a_taken_port_is_an_error_not_a_share() -> None:
    with ListeningDaemon() as daemon:
        done = refused(daemon.directory, f"--grpc=127.0.0.1:{daemon.port}", f"--token-file={daemon.token_file}")
        assert done.returncode == 3 and "cannot listen on 127.0.0.1" in done.stderr and "Traceback" not in done.stderr
        with daemon.client_by("grpc-tcp") as client:
            assert client.status()["pid"] == daemon.pid


def test_half_open_connections_do_not_stop_the_unix_transport(listening: ListeningDaemon) -> None:
    """1,000 connections that say nothing: bounded, gone within `PATIENCE`, and without effect on the Unix transport."""
    before = listening.descriptors()
    wanted = description(4096, model="org/half-open")
    opened: list[socket.socket] = []
    try:
        with listening.client() as client, Client(f"grpc+unix:{listening.socket}.grpc") as neighbour:
            ns = client.register(wanted)
            put(client, ns, range(4))
            for n in range(1000):
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", listening.port))
                opened.append(sock)
                if n % 100 == 50:
                    assert len(client.get(ns, hashes(range(4)))) == 4
                    assert neighbour.status()["known_blocks"] >= 4
            assert listening.descriptors() < before + grpc_server.MAX_CONNECTIONS + 64
            assert len(client.get(ns, hashes(range(4)))) == 4
        with listening.client_by("grpc-tcp") as client:
            until(
                lambda: client.lookup(client.register(wanted), hashes([1]), deadline=2).reason == "miss",
                "TCP answers again",
                10 * in_flight.PATIENCE,
            )
        until(
            lambda: listening.descriptors() < before + 32, "half-open connections are closed", 10 * in_flight.PATIENCE
        )
    finally:
        for sock in opened:
            sock.close()


# TLS


@pytest.fixture(scope="module")
def tls() -> Iterator[ListeningDaemon]:
    with ListeningDaemon(tls=pki().server) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def mutual() -> Iterator[ListeningDaemon]:
    """Asks clients for a certificate of the good authority."""
    with ListeningDaemon(tls=pki().server, client_ca=pki().good.ca) as daemon:
        yield daemon


def credentials(ca: Path, pair: tuple[Path, Path] | None = None) -> Any:
    key, cert = (pair[1].read_bytes(), pair[0].read_bytes()) if pair else (None, None)
    return grpc.ssl_channel_credentials(ca.read_bytes(), key, cert)


@pytest.mark.parametrize("path", methods())
def test_nothing_passes_a_tls_port_in_clear(tls: ListeningDaemon, path: str) -> None:
    """KVB-23."""
    with RawGrpc(tls.target) as caller:
        assert caller.code(path, b"", tls.bearer("acme-admin"), streaming=True)[0] is CODE.UNAVAILABLE


@pytest.mark.parametrize("path", methods())
def test_nothing_passes_with_a_certificate_of_another_authority(mutual: ListeningDaemon, path: str) -> None:
    """KVB-23: the health route neither, as the connection itself is refused."""
    for pair in (None, pki().stranger, pki().expired):
        with RawGrpc(mutual.target, credentials(pki().good.ca, pair)) as caller:
            assert caller.code(path, b"", mutual.bearer("acme-admin"), streaming=True)[0] is CODE.UNAVAILABLE
    with RawGrpc(mutual.target, credentials(pki().good.ca, pki().client)) as caller:
        assert caller.code(path, b"", mutual.bearer("acme-admin"), streaming=True)[0] is not CODE.UNAVAILABLE


def test_a_certificate_alone_does_not_replace_the_token(mutual: ListeningDaemon) -> None:
    with RawGrpc(mutual.target, credentials(pki().good.ca, pki().client)) as caller:
        assert caller.code(method("Status"))[0] is CODE.UNAUTHENTICATED
    cert, key = map(str, pki().client)
    with mutual.client_by("grpc-tls", cert=cert, key=key) as client:
        assert client.status()["pid"] == mutual.pid


def raises(client: Client, kind: type[KvtierError], words: str) -> None:
    """What is for people raises; reads answer a miss with the same words."""
    wanted = client.register(description())
    with client:
        with pytest.raises(kind, match=words) as caught:
            client.status()
        assert type(caught.value) is kind
        answer = client.lookup(wanted, hashes([1]), deadline=5)
        assert answer == 0 and words in answer.reason


def test_what_is_wrong_has_a_name(listening: ListeningDaemon, tls: ListeningDaemon, mutual: ListeningDaemon) -> None:
    ca = str(pki().good.ca)
    raises(listening.client_by("grpc-tcp", ""), Unauthenticated, "no token")
    raises(listening.client_by("grpc-tcp", token="0" * 64), Unauthenticated, "not in the daemon's token file")
    raises(
        tls.client_by("grpc-tls", ca=str(pki().evil.ca)),
        Unavailable,
        ["certificate of 127.0.0.1", " is refused: unable to get local issuer"][0],
    )
    raises(mutual.client_by("grpc-tls"), Unavailable, "ask for a certificate")
    raises(Client(f"grpc://{tls.target}", token=tls.tokens["acme-read"]), Unavailable, "does it speak TLS")
    raises(
        Client(f"grpcs://{listening.target}", token=tls.tokens["acme-read"], ca=ca), Unavailable, "does not speak TLS"
    )
    with (
        listening.client_by("grpc-tcp", "acme-write") as client,
        pytest.raises(Denied, match="needs role admin") as caught,
    ):
        client.drop("abcd")
    assert type(caught.value) is Denied


@pytest.mark.parametrize(
    ("which", "words"), [("expired", "certificate has expired"), ("elsewhere", "another host name")]
)
def test_a_bad_certificate_of_the_daemon_has_a_name(which: str, words: str) -> None:
    with ListeningDaemon(tls=getattr(pki(), which)) as daemon:
        raises(daemon.client_by("grpc-tls"), Unavailable, words)


@pytest.mark.parametrize(
    ("address", "credentials", "words"),
    [
        ("http://x:1", {}, "not an address"),
        ("grpc:x:1", {}, "not an address"),
        ("", {}, "not an address"),
        ("grpc://x", {}, "not host:port"),
        ("grpc://x:0", {}, "not host:port"),
        ("grpc://x:70000", {}, "not host:port"),
        ("grpc://u@x:1", {}, "not host:port"),
        ("unix:/x", {"token": "a"}, "the unix transport takes no token"),
        ("grpc://cache.example:1", {"token": "a"}, "in clear"),
        ("grpc://10.0.0.1:1", {"token": "a"}, "in clear"),
        ("grpc://127.0.0.1:1", {"ca": "x"}, "write grpcs://"),
        ("grpcs://127.0.0.1:1", {"ca": "/nowhere/ca.pem"}, "cannot read /nowhere/ca.pem"),
        ("grpcs://127.0.0.1:1", {"cert": "x"}, "belong together"),
        ("grpc://127.0.0.1:1", {"token": "a b"}, "printable characters"),
        ("grpc://127.0.0.1:1", {"token": ""}, "printable characters"),
    ],
)
def test_a_client_refuses_what_cannot_be_right(address: str, credentials: dict[str, str], words: str) -> None:
    with pytest.raises(Invalid, match=words):
        Client(address, **credentials)


# Files that change


class Locked(ListeningDaemon):
    """A daemon with TLS files of its own, which a test may replace; errors of reloading are expected in its log."""

    def __init__(self, directory: Path, pair: tuple[Path, Path]) -> None:
        self.cert, self.key = directory / "cert.pem", directory / "key.pem"
        self.show(pair)
        super().__init__(tls=(self.cert, self.key))

    def show(self, pair: tuple[Path, Path]) -> None:
        for source, target in zip(pair, (self.cert, self.key), strict=True):
            write_private(target, source.read_text())

    def faults(self) -> list[str]:
        return [line for line in super().faults() if 'event="reload failed"' not in line]


def test_certificates_are_reloaded_without_a_restart(tmp_path: Path) -> None:
    """A connection that is open stays; new ones see the new certificate.

    Files that do not fit together leave the old ones in force.
    """
    evil = pki().evil
    with Locked(tmp_path, pki().server) as daemon, daemon.client_by("grpc-tls") as old:
        assert old.status()["pid"] == daemon.pid
        daemon.show(evil.issue("other-server"))
        assert until(lambda: knows(daemon, evil.ca), "the new certificate is shown")
        assert not knows(daemon, pki().good.ca)
        assert old.status()["pid"] == daemon.pid
        write_private(daemon.key, pki().server[1].read_text())  # not this certificate's
        until(
            lambda: (knows(daemon, evil.ca), "reload failed" in daemon.log.read_text())[1],
            "it is said that the files do not fit",
        )
        assert knows(daemon, evil.ca)
        daemon.show(pki().server)
        until(lambda: knows(daemon, pki().good.ca), "the first certificate is shown again")
        log = daemon.log.read_text()
        assert log.count("reload failed") <= 2 and "PRIVATE" not in log


def knows(daemon: ListeningDaemon, ca: Path) -> bool:
    """Whether a new connection accepts the daemon's certificate under this authority."""
    with Client(f"grpcs://{daemon.target}", token=daemon.tokens["acme-read"], ca=str(ca)) as client:
        try:
            return bool(client.status())
        except KvtierError:
            return False


@pytest.mark.parametrize("how", ["by itself", "SIGHUP"])
def test_tokens_are_reloaded_without_a_restart(tmp_path: Path, how: str) -> None:
    with Locked(tmp_path, pki().server) as daemon, daemon.client_by("grpc-tls", "acme-read") as client:
        assert client.status()["pid"] == daemon.pid
        token, line = issue("new", "acme", "read")

        def replace(text: str) -> None:
            write_private(daemon.token_file, text)
            if how == "SIGHUP":
                os.kill(daemon.pid, signal.SIGHUP)

        def known(client: Client) -> bool:
            try:
                return bool(client.status())
            except Unauthenticated:
                return False

        with daemon.client_by("grpc-tls", token=token) as fresh:
            assert not known(fresh)
            replace(line + "\n")
            until(lambda: known(fresh), "the new token is known")
            until(lambda: not known(client), "the old token is not")
            replace("new acme read letmein\n")
            until(
                lambda: (known(fresh), "reload failed" in daemon.log.read_text())[1],
                "it is said that the file cannot be used",
            )
            assert known(fresh) and not known(client)
            assert "letmein" not in daemon.log.read_text()
            daemon.token_file.unlink()
            time.sleep(1.2)  # longer than between two looks at the files
            assert known(fresh) and not known(client)


def test_a_file_others_may_read_is_not_taken(tmp_path: Path) -> None:
    cert, key = (shutil.copy(path, tmp_path) for path in pki().server)
    write_private(tmp_path / "tokens", issue("me", "acme", "read")[1])
    Path(key).chmod(0o644)
    done = refused(
        tmp_path, "--grpc=127.0.0.1:0", f"--token-file={tmp_path}/tokens", f"--tls-cert={cert}", f"--tls-key={key}"
    )
    assert done.returncode == 2 and "chmod 600" in done.stderr


# Users of Unix sockets


def test_where_users_are_told_apart_the_wide_socket_asks_for_a_token() -> None:
    """gRPC does not say which user connected, so it must not be a way around the setting `users`."""
    with ListeningDaemon(MiB, "--user=uid:4242 acme read", "--socket-mode=666") as daemon:
        path = Path(f"{daemon.socket}.grpc")
        assert path.stat().st_mode & 0o777 == 0o666
        with RawGrpc(f"unix:{path}") as caller:
            assert caller.code(method("Status"))[0] is CODE.UNAUTHENTICATED
            assert caller.code(method("Status"), b"", daemon.bearer("other-read"))[0] is CODE.OK
    with Daemon(MiB, "--user=uid:4242 acme read", "--socket-mode=666") as plain:
        path = Path(f"{plain.socket}.grpc")
        assert path.stat().st_mode & 0o777 == 0o600
        with Client(f"grpc+unix:{path}") as client:
            assert client.status()["pid"] == plain.pid


def test_a_wide_socket_makes_writers_not_admins() -> None:
    with Daemon(MiB, "--socket-mode=666") as daemon, Client(f"grpc+unix:{daemon.socket}.grpc") as client:
        ns = client.register(description(1024))
        put(client, ns, [1])
        with pytest.raises(Denied, match="needs role admin"):
            client.pin(ns, hashes([1]))
