"""The gRPC transport.

Clients that vanish or stand still, sizes at its limits, restarts, bytes that change on their way.

Against real daemons, but where patience must be shortened: then a server in this process over a store of its own. TCP
is loopback.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash

from kvtier.format.layout import HEADER_BYTES
from kvtier.protocol import rpc
from kvtier.protocol.limits import CHUNK
from kvtier.protocol.v1 import kvtier_pb2 as pb
from kvtier.server import grpc as grpc_server
from kvtier.server import in_flight
from kvtier.server.sessions import WRITE
from kvtier.server.sessions import Peer as PeerOf
from kvtier.server.settings import Listen
from kvtier.server.verbs import Service
from tests.support.daemon import ROOT, Daemon, MiB, Peer, body, description, hashes, is_body, put, until
from tests.support.inside import Inside
from tests.support.listeners import ListeningDaemon, RawGrpc, ends, method

CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def listening() -> Iterator[ListeningDaemon]:
    with ListeningDaemon(256 * MiB) as daemon:
        yield daemon


def idle(daemon: Daemon, within: float = 5.0) -> dict[str, Any]:
    """Waits until no gRPC call is under way and nothing is held."""
    return until(
        lambda: (s := daemon.status())["grpc_calls"] == 0 and s["grpc_bulk_calls"] == 0 and s["held_bytes"] == 0 and s,
        "the server is idle",
        within,
    )


# A client that goes away in the middle


@pytest.fixture(scope="module")
def long_value() -> Iterator[tuple[ListeningDaemon, bytes, bytes]]:
    """A daemon with 64 MiB to read in one call: (daemon, description, hashes)."""
    wanted = description(16 * MiB - HEADER_BYTES)
    with ListeningDaemon(512 * MiB) as daemon:
        with daemon.client_by("grpc-unix", "") as client:
            put(client, client.register(wanted), range(4), deadline=60)
        yield daemon, wanted.canonical, hashes(range(4))


_READER = """
from tests.support.listeners import RawGrpc, method
from kvtier.protocol.v1 import kvtier_pb2 as pb
target, canonical, raw, times, how = ARGS
def begin(caller):
    known = caller.register(bytes.fromhex(canonical))
    request = pb.Keys(handle=known.handle, boot=known.boot, layer_hi=1, head_hi=1, hashes=bytes.fromhex(raw))
    stream = caller.channel.unary_stream(method("Get"))(request.SerializeToString(), timeout=60)
    next(stream), next(stream), next(stream)  # the reply and two chunks
    return stream
if how == "cancel":
    with RawGrpc(target) as caller:
        for _ in range(times):
            begin(caller).cancel()
else:
    # A child a get, forked before this process has used gRPC: a hundred interpreters would take a minute to start.
    for _ in range(times):
        reading, told = os.pipe()
        child = os.fork()
        if child == 0:
            stream = begin(RawGrpc(target))
            os.write(told, b"x")
            time.sleep(60)
        os.close(told)
        assert os.read(reading, 1) == b"x"
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
say("done")
"""


@pytest.mark.parametrize("how", ["cancel", "kill"])
def test_readers_that_vanish_take_no_thread_and_no_lease(
    long_value: tuple[ListeningDaemon, bytes, bytes], how: str
) -> None:
    """KVB-12 a: 100 gets cancelled after two chunks, 100 whose process is killed.

    Many more than there are places for gets.
    """
    daemon, canonical, raw = long_value
    ns_of = description(16 * MiB - HEADER_BYTES)
    with daemon.client_by("grpc-unix", "") as client:
        assert len(client.get(client.register(ns_of), raw, deadline=60)) == 4
        before = daemon.rss_anon()
        with Peer(_READER, daemon, f"unix:{daemon.socket}.grpc", canonical.hex(), raw.hex(), 100, how) as peer:
            assert peer.hear(90) == "done"
        idle(daemon)
        assert daemon.rss_anon() < before + 64 * MiB
        ns = client.register(ns_of)  # every place is free: as many gets at once as there are
        got: list[int] = []
        threads = [
            threading.Thread(target=lambda: got.append(len(client.get(ns, raw[:32], deadline=60))))
            for _ in range(grpc_server.MAX_TRANSFERS_EACH)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert got == [1] * grpc_server.MAX_TRANSFERS_EACH
    daemon.status(check_integrity=True)


@pytest.fixture
def ajar(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[grpc_server.GrpcServer, str]]:
    """A server in this process with patience for half a second, over a store of its own: (server, target)."""
    monkeypatch.setattr(grpc_server, "STALL", 0.5)
    monkeypatch.setattr(in_flight, "PATIENCE", 0.5)
    with Inside(64 * MiB) as inside, tempfile.TemporaryDirectory() as directory:
        service = Service(inside.store, inside.sessions)
        path = Path(directory) / "k.sock"
        made = grpc_server.GrpcServer(service, [Listen(path)], unix_peer=PeerOf("local", WRITE))
        made.start()
        try:
            yield made, f"unix:{path}"
        finally:
            made.close()
        assert not path.exists()


def test_clients_that_stand_still_are_cut(ajar: tuple[grpc_server.GrpcServer, str]) -> None:
    """A put that stops sending, a get that stops reading, a call whose message never comes.

    None keeps a thread or a slot.
    """
    made, target = ajar
    wanted = description(4 * MiB)
    with RawGrpc(target) as caller:
        known = caller.register(wanted.canonical)
        which = {"handle": known.handle, "boot": known.boot, "layer_hi": 1, "head_hi": 1}
        sums = [xxhash.xxh3_64_intdigest(body(n, 4 * MiB)) for n in range(3)]
        request = pb.PutRequest(
            keys=pb.Keys(hashes=hashes(range(3)), nbytes=4 * MiB + HEADER_BYTES, **which), checksum=sums
        )
        release = threading.Event()

        def pieces(complete: bool) -> Iterator[bytes]:
            yield rpc.message_chunk(request)
            for n in range(3):
                for at in range(0, 4 * MiB, CHUNK):
                    yield rpc.data_chunk(body(n, 4 * MiB).data[at : at + CHUNK])
            if not complete:
                release.wait(30)

        def nothing() -> Iterator[bytes]:
            release.wait(30)
            yield b""

        upload = caller.channel.stream_unary(method("Put"))
        assert pb.PutReply.FromString(upload(pieces(True), timeout=30)).known == 3
        get = caller.channel.unary_stream(method("Get"))(
            pb.Keys(hashes=hashes(range(3)), **which).SerializeToString(), timeout=30
        )
        next(get)  # and no more: what is left does not fit what the transport buffers
        request.keys.hashes = hashes(range(10, 14))
        request.checksum.append(0)
        stuck = [upload.future(pieces(False), timeout=30) for _ in range(3)]
        stuck += [
            upload.future(nothing(), timeout=30),
            caller.channel.stream_unary(method("Lookup")).future(nothing(), timeout=30),
        ]
        try:
            for call in stuck:
                assert call.exception(timeout=10).code() is CODE.CANCELLED
            until(lambda: made.gauges()["grpc_calls"] == made.gauges()["grpc_bulk_calls"] == 0, "every call ends", 10)
        finally:
            release.set()
        assert made.gauges()["grpc_cut_total"] == 6
        with pytest.raises(grpc.RpcError):
            list(get)
        assert caller.code(method("Status")) == (CODE.OK, "")


def test_a_clients_deadline_ends_the_call(ajar: tuple[grpc_server.GrpcServer, str]) -> None:
    made, target = ajar
    release = threading.Event()

    def nothing() -> Iterator[bytes]:
        release.wait(30)
        yield b""

    with RawGrpc(target) as caller:
        call = caller.channel.stream_unary(method("Put")).future(nothing(), timeout=0.1)
        assert call.exception(timeout=10).code() is CODE.DEADLINE_EXCEEDED
        until(lambda: made.gauges()["grpc_calls"] == 0, "the call ends", 5)
        release.set()


def test_more_puts_and_gets_than_there_are_places_hear_full(listening: ListeningDaemon) -> None:
    release = threading.Event()

    def nothing() -> Iterator[bytes]:
        release.wait(30)
        yield b""

    def full(who: str, words: str) -> None:
        said = ends(lambda: upload(nothing(), timeout=10, metadata=listening.bearer(who)))
        assert said == (CODE.RESOURCE_EXHAUSTED, f"full, retry: {words} are under way")

    with RawGrpc(listening.target) as caller:
        upload = caller.channel.stream_unary(method("Put"))
        held = [
            upload.future(nothing(), timeout=30, metadata=listening.bearer("acme-write"))
            for _ in range(grpc_server.MAX_TRANSFERS_EACH)
        ]
        until(
            lambda: listening.status()["grpc_bulk_calls"] == grpc_server.MAX_TRANSFERS_EACH,
            "all places of the tenant are taken",
        )
        full("acme-write", f"{grpc_server.MAX_TRANSFERS_EACH} puts and gets of this tenant")
        left = grpc_server.MAX_TRANSFERS - grpc_server.MAX_TRANSFERS_EACH
        held += [upload.future(nothing(), timeout=30, metadata=listening.bearer("other-write")) for _ in range(left)]
        until(lambda: listening.status()["grpc_bulk_calls"] == grpc_server.MAX_TRANSFERS, "all places are taken")
        full("other-write", f"{grpc_server.MAX_TRANSFERS} puts and gets")
        assert caller.code(method("Status"), b"", listening.bearer("acme-read")) == (
            CODE.OK,
            "",
        )  # small calls have threads of their own
        release.set()
        for call in held:
            call.cancel()
    idle(listening)


# Sizes


def test_sizes_up_to_the_largest_block_come_back_and_the_next_is_refused(listening: ListeningDaemon) -> None:
    """KVB-12 b: around a piece of 2 MiB, around gRPC's 4 MiB, and around the largest block.

    Alone and in one call with others.
    """
    with listening.client_by("grpc-tcp") as client:
        for edge in (2 * MiB, 4 * MiB, 16 * MiB):
            for nbytes in (edge - HEADER_BYTES - 16, edge - HEADER_BYTES, edge - HEADER_BYTES + 16, edge)[
                : 2 if edge == 16 * MiB else 4
            ]:
                ns = client.register(description(nbytes, model=f"org/{nbytes}"))
                for numbers in ([0], [1, 2]):
                    put(client, ns, numbers, deadline=60)
                    got = client.get(ns, hashes(numbers), deadline=60)
                    assert [is_body(one, n) for n, one in zip(numbers, got, strict=True)] == [True] * len(numbers), (
                        nbytes
                    )
                client.delete(ns, hashes(range(3)))
    with RawGrpc(listening.target) as caller:
        code, details = ends(lambda: caller.register(description(16 * MiB).canonical, listening.bearer("acme-write")))
        if code is CODE.OK:  # the namespace may exist; no block of it may
            known = caller.register(description(16 * MiB).canonical, listening.bearer("acme-write"))
            keys = pb.Keys(
                handle=known.handle,
                boot=known.boot,
                layer_hi=1,
                head_hi=1,
                hashes=hashes([1]),
                nbytes=16 * MiB + HEADER_BYTES,
            )
            first = rpc.message_chunk(pb.PutRequest(keys=keys, checksum=[0]))
            code, details = ends(
                lambda: caller.channel.stream_unary(method("Put"))(
                    iter([first]), timeout=30, metadata=listening.bearer("acme-write")
                )
            )
        assert code is CODE.INVALID_ARGUMENT and str(16 * MiB) in details


@pytest.mark.parametrize(
    ("nbytes", "code", "words"),
    [
        (CHUNK + 1, CODE.INVALID_ARGUMENT, f"a piece of {CHUNK + 1} bytes; the limit is {CHUNK}"),
        (rpc.MAX_MESSAGE - 5, CODE.INVALID_ARGUMENT, f"the limit is {CHUNK}"),
        (rpc.MAX_MESSAGE, CODE.RESOURCE_EXHAUSTED, str(rpc.MAX_MESSAGE)),
        (64 * MiB, CODE.RESOURCE_EXHAUSTED, str(rpc.MAX_MESSAGE)),
    ],
)
def test_a_piece_above_its_limit_is_refused_by_name_and_the_channel_stays_good(
    listening: ListeningDaemon, nbytes: int, code: Any, words: str
) -> None:
    with RawGrpc(f"unix:{listening.socket}.grpc") as caller:
        known = caller.register(description(8 * MiB).canonical)
        keys = pb.Keys(
            handle=known.handle,
            boot=known.boot,
            layer_hi=1,
            head_hi=1,
            hashes=hashes([1]),
            nbytes=8 * MiB + HEADER_BYTES,
        )
        messages = [rpc.message_chunk(pb.PutRequest(keys=keys, checksum=[0])), rpc.data_chunk(bytes(nbytes))]
        upload = caller.channel.stream_unary(method("Put"))
        got, details = ends(lambda: upload(iter(messages), timeout=30))
        assert got is code and words in details
        assert caller.code(method("Lookup"), bytes(nbytes))[0] in (CODE.INVALID_ARGUMENT, CODE.RESOURCE_EXHAUSTED)
        assert caller.code(method("Status")) == (CODE.OK, "")
        good = body(1, 8 * MiB)
        request = pb.PutRequest(keys=keys, checksum=[xxhash.xxh3_64_intdigest(good)])
        pieces = [
            rpc.message_chunk(request),
            *(rpc.data_chunk(good.data[at : at + CHUNK]) for at in range(0, 8 * MiB, CHUNK)),
        ]
        assert pb.PutReply.FromString(upload(iter(pieces), timeout=30)).known == 1
    idle(listening)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "begins with a Chunk that holds a PutRequest"),
        ([rpc.data_chunk(b"x")], "begins with a Chunk that holds a PutRequest"),
        ([b"\xff\xff"], "consists of Chunk messages"),
        ([b""], "this one holds nothing"),
        ([b"\x12\x03\xff\xff\xff"], "not the message that Put takes"),
        (["request", "request"], "bodies only"),
        (["request", b"\x0a\x00"], "in chunks of its own"),
        (["request"], "in chunks of its own"),
        (["request", rpc.data_chunk(bytes(1024)), rpc.data_chunk(bytes(3073))], "in chunks of its own"),
        (["no boot"], "goes with the boot number"),
    ],
)
def test_malformed_puts_are_refused_by_name_and_store_nothing(
    listening: ListeningDaemon, messages: list[Any], words: str
) -> None:
    with RawGrpc(f"unix:{listening.socket}.grpc") as caller:
        known = caller.register(description(4096).canonical)
        keys = pb.Keys(
            handle=known.handle, boot=known.boot, layer_hi=1, head_hi=1, hashes=hashes([77]), nbytes=4096 + HEADER_BYTES
        )
        request = pb.PutRequest(keys=keys, checksum=[0])
        bootless = pb.PutRequest(keys=keys, checksum=[0])
        bootless.keys.boot = 0
        named = {"request": rpc.message_chunk(request), "no boot": rpc.message_chunk(bootless)}
        before = listening.stored()
        code, details = ends(
            lambda: caller.channel.stream_unary(method("Put"))(iter([named.get(m, m) for m in messages]), timeout=10)
        )
        assert code is CODE.INVALID_ARGUMENT and words in details
        assert listening.stored() == before


def test_a_body_other_than_its_checksum_is_not_stored(listening: ListeningDaemon) -> None:
    with RawGrpc(f"unix:{listening.socket}.grpc") as caller:
        known = caller.register(description(4096).canonical)
        keys = pb.Keys(
            handle=known.handle,
            boot=known.boot,
            layer_hi=1,
            head_hi=1,
            hashes=hashes([81, 82]),
            nbytes=4096 + HEADER_BYTES,
        )
        sums = [xxhash.xxh3_64_intdigest(body(81, 4096)), 1]
        messages = [
            rpc.message_chunk(pb.PutRequest(keys=keys, checksum=sums)),
            *(rpc.data_chunk(body(n, 4096).data) for n in (81, 82)),
        ]
        reply = pb.PutReply.FromString(caller.channel.stream_unary(method("Put"))(iter(messages), timeout=10))
        assert reply.known == 0 and "checksum" in reply.reason
    idle(listening)
    assert listening.status()["reserved_blocks"] == 0


def test_a_handle_of_another_life_is_stale(listening: ListeningDaemon) -> None:
    """A restarted daemon may give the same number to another namespace.

    A handle alone would bring another model's blocks.
    """
    with RawGrpc(f"unix:{listening.socket}.grpc") as caller:
        known = caller.register(description(4096).canonical)
        for verb in ("Prefetch", "Flush", "Delete", "Pin", "Unpin", "Get"):
            keys = pb.Keys(
                handle=known.handle, boot=known.boot ^ 2, layer_hi=1, head_hi=1, hashes=hashes([1])
            ).SerializeToString()
            assert caller.code(method(verb), keys, streaming=True)[0] is CODE.FAILED_PRECONDITION, verb
            keys = pb.Keys(handle=known.handle, layer_hi=1, head_hi=1, hashes=hashes([1])).SerializeToString()
            assert caller.code(method(verb), keys, streaming=True)[0] is CODE.INVALID_ARGUMENT, verb
        run = pb.Run(layer_hi=1, head_hi=1, hashes=hashes([1]))
        for boot, code in (
            (known.boot, CODE.OK),
            (0, CODE.INVALID_ARGUMENT),
            (known.boot ^ 2, CODE.FAILED_PRECONDITION),
        ):
            request = pb.LookupRequest(handle=known.handle, boot=boot, run=[run])
            assert caller.code(method("Lookup"), request.SerializeToString())[0] is code


# A daemon that comes and goes


# Forks


# An arena that cannot be mapped


# the sparse arena of the daemon goes with it


# Bytes that change on their way


# Other languages: stubs that know nothing of our framing


def test_generated_stubs_understand_the_server(listening: ListeningDaemon, tmp_path: Path) -> None:
    """What grpc_tools makes of the proto, as it would for any language.

    Messages go through protobuf on the client's side.
    """
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{ROOT / 'proto'}",
        f"--grpc_python_out={tmp_path}",
        "kvtier/v1/kvtier.proto",
    ]
    subprocess.run(command, check=True, timeout=60)
    file = tmp_path / "kvtier" / "v1" / "kvtier_pb2_grpc.py"
    file.write_text(file.read_text("utf-8").replace("from kvtier.v1 import", "from kvtier.protocol.v1 import"))
    spec = importlib.util.spec_from_file_location("kvtier_pb2_grpc", file)
    assert spec is not None and spec.loader is not None
    stubs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stubs)
    nbytes = 5 * MiB
    bodies = [body(n, nbytes).tobytes() for n in range(3)]
    wanted = description(nbytes, model="org/stubs")
    with grpc.insecure_channel(listening.target) as channel:
        stub = stubs.KvtierStub(channel)
        call: dict[str, Any] = {"metadata": listening.bearer("acme-admin"), "timeout": 30}
        known = stub.Register(pb.RegisterRequest(description=wanted.canonical), **call)
        keys = pb.Keys(handle=known.handle, boot=known.boot, layer_hi=1, head_hi=1, hashes=hashes(range(3)))
        lookup = pb.LookupRequest(
            handle=known.handle,
            boot=known.boot,
            bitmap=True,
            run=[pb.Run(layer_hi=1, head_hi=1, hashes=hashes(range(4)))],
        )

        def chunks() -> Iterator[pb.Chunk]:
            keys.nbytes = nbytes + HEADER_BYTES
            request = pb.PutRequest(keys=keys, checksum=[xxhash.xxh3_64_intdigest(one) for one in bodies])
            yield pb.Chunk(message=request.SerializeToString())
            for one in bodies:
                for at in range(0, nbytes, CHUNK):
                    yield pb.Chunk(data=one[at : at + CHUNK])

        assert stub.Lookup(lookup, **call).known == [0]
        assert stub.Put(chunks(), **call) == pb.PutReply(known=3)
        assert stub.Lookup(lookup, **call) == pb.LookupReply(known=[3], warm=[3], bitmap=[b"\x07"])
        came = list(stub.Get(keys, **call))
        assert pb.GetReply.FromString(came[0].message).nbytes == nbytes + HEADER_BYTES
        trailer = pb.GetTrailer.FromString(came[-1].message)
        assert all(chunk.WhichOneof("kind") == "data" and len(chunk.data) <= CHUNK for chunk in came[1:-1])
        raw = b"".join(chunk.data for chunk in came[1:-1])
        blocks = [raw[at : at + nbytes + HEADER_BYTES] for at in range(0, len(raw), nbytes + HEADER_BYTES)]
        assert [block[HEADER_BYTES:] for block in blocks] == bodies and trailer.stop == pb.END
        assert [xxhash.xxh3_64_intdigest(block) for block in blocks] == list(trailer.checksum)
        assert stub.Pin(keys, **call).n == stub.Unpin(keys, **call).n == 3
        assert stub.Prefetch(keys, **call).stop == stub.Flush(keys, **call).stop == pb.NO_TIER
        name = known.description.hex()
        assert stub.ShowNamespace(pb.ShowRequest(name=name), **call).description == wanted.canonical
        assert stub.DiffNamespaces(pb.DiffRequest(stored=name, live=name), **call).line == []
        assert name in {info.description.hex() for info in stub.ListNamespaces(pb.ListRequest(), **call).namespace}
        assert stub.Explain(pb.ExplainRequest(description=wanted.canonical), **call).nearest == known.description
        assert json.loads(stub.Status(pb.StatusRequest(check_integrity=True), **call).json)["pid"] == listening.pid
        assert stub.Delete(keys, **call).n == 3
        assert stub.SetTtl(pb.TtlRequest(name=name, seconds=60), **call).ttl == 60
        assert stub.DropNamespace(pb.DropRequest(name=name), **call).n == 0
        assert ends(lambda: stub.Lookup(lookup, **call))[0] is CODE.FAILED_PRECONDITION
