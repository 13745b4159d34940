"""The public door: what it says to strangers, to clients that vanish, to sizes at its limits, and how long it is gone after a kill -9.

All against real daemons; TCP is loopback.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash

from kvtier import door, rpc, underway
from kvtier.daemon.config import Listen
from kvtier.frames import CHUNK
from kvtier.layout import HEADER_BYTES
from kvtier.service import Service
from kvtier.session import WRITE
from kvtier.session import Peer as PeerOf
from kvtier.v1 import kvtier_pb2 as pb
from tests.daemon import Daemon, MiB, Peer, body, description, hashes, is_body, put, until
from tests.doors import Doors, Knock, ends, method
from tests.inside import Inside

CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    with Doors(256 * MiB) as daemon:
        yield daemon


def idle(daemon: Daemon, within: float = 5.0) -> dict[str, Any]:
    """Waits until no gRPC call is under way and nothing is held."""
    return until(
        lambda: (s := daemon.status())["grpc_calls"] == 0 and s["grpc_bulk_calls"] == 0 and s["held_bytes"] == 0 and s, "the door is idle", within
    )


# A client that goes away in the middle


@pytest.fixture(scope="module")
def long_value() -> Iterator[tuple[Doors, bytes, bytes]]:
    """A daemon with 64 MiB to read in one call: (daemon, description, hashes)."""
    wanted = description(16 * MiB - HEADER_BYTES)
    with Doors(512 * MiB) as daemon:
        with daemon.way("unix", "") as client:
            put(client, client.register(wanted), range(4), deadline=60)
        yield daemon, wanted.canonical, hashes(range(4))


_READER = """
from tests.doors import Knock, method
from kvtier.v1 import kvtier_pb2 as pb
target, canonical, raw, times, how = ARGS
def begin(knock):
    known = knock.register(bytes.fromhex(canonical))
    request = pb.Keys(handle=known.handle, boot=known.boot, layer_hi=1, head_hi=1, hashes=bytes.fromhex(raw)).SerializeToString()
    stream = knock.channel.unary_stream(method("Get"))(request, timeout=60)
    next(stream), next(stream), next(stream)  # the reply and two chunks
    return stream
if how == "cancel":
    with Knock(target) as knock:
        for _ in range(times):
            begin(knock).cancel()
else:
    # A child a get, forked before this process has used gRPC: a hundred interpreters would take a minute to start.
    for _ in range(times):
        reading, told = os.pipe()
        child = os.fork()
        if child == 0:
            stream = begin(Knock(target))
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
def test_readers_that_vanish_take_no_thread_and_no_lease(long_value: tuple[Doors, bytes, bytes], how: str) -> None:
    """KVB-12 a: 100 gets cancelled after two chunks, 100 whose process is killed; many more than there are places for gets."""
    daemon, canonical, raw = long_value
    ns_of = description(16 * MiB - HEADER_BYTES)
    with daemon.way("unix", "") as client:
        assert len(client.get(client.register(ns_of), raw, deadline=60)) == 4
        before = daemon.rss_anon()
        with Peer(_READER, daemon, f"unix:{daemon.socket}.grpc", canonical.hex(), raw.hex(), 100, how) as peer:
            assert peer.hear(90) == "done"
        idle(daemon)
        assert daemon.rss_anon() < before + 64 * MiB
        ns = client.register(ns_of)  # every place is free: as many gets at once as there are
        got: list[int] = []
        threads = [threading.Thread(target=lambda: got.append(len(client.get(ns, raw[:32], deadline=60)))) for _ in range(door.MAX_BULK)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert got == [1] * door.MAX_BULK
    daemon.status(check_integrity=True)


@pytest.fixture
def ajar(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[door.Door, str]]:
    """A door in this process with patience for half a second, over a store of its own: (door, target)."""
    monkeypatch.setattr(door, "STALL", 0.5)
    monkeypatch.setattr(underway, "PATIENCE", 0.5)
    with Inside(64 * MiB) as inside, tempfile.TemporaryDirectory() as directory:
        service = Service(inside.store, inside.sessions)
        path = Path(directory) / "door.sock"
        made = door.Door(service, [Listen(path)], unix_peer=PeerOf("local", WRITE))
        made.start()
        try:
            yield made, f"unix:{path}"
        finally:
            made.close()
        assert not path.exists()


def test_clients_that_stand_still_are_cut(ajar: tuple[door.Door, str]) -> None:
    """A put that stops sending, a get that stops reading, a call whose message never comes: none keeps a thread or a slot."""
    made, target = ajar
    wanted = description(4 * MiB)
    with Knock(target) as knock:
        known = knock.register(wanted.canonical)
        which = {"handle": known.handle, "boot": known.boot, "layer_hi": 1, "head_hi": 1}
        sums = [xxhash.xxh3_64_intdigest(body(n, 4 * MiB)) for n in range(3)]
        request = pb.PutRequest(keys=pb.Keys(hashes=hashes(range(3)), nbytes=4 * MiB + HEADER_BYTES, **which), checksum=sums)
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

        upload = knock.channel.stream_unary(method("Put"))
        assert pb.PutReply.FromString(upload(pieces(True), timeout=30)).known == 3
        get = knock.channel.unary_stream(method("Get"))(pb.Keys(hashes=hashes(range(3)), **which).SerializeToString(), timeout=30)
        next(get)  # and no more: what is left does not fit what the transport buffers
        request.keys.hashes = hashes(range(10, 14))
        request.checksum.append(0)
        stuck = [upload.future(pieces(False), timeout=30) for _ in range(3)]
        stuck += [upload.future(nothing(), timeout=30), knock.channel.stream_unary(method("Lookup")).future(nothing(), timeout=30)]
        try:
            for call in stuck:
                assert call.exception(timeout=10).code() is CODE.CANCELLED
            until(lambda: made.gauges()["grpc_calls"] == made.gauges()["grpc_bulk_calls"] == 0, "every call ends", 10)
        finally:
            release.set()
        assert made.gauges()["grpc_cut_total"] == 6
        with pytest.raises(grpc.RpcError):
            list(get)
        assert knock.code(method("Status")) == (CODE.OK, "")


def test_a_clients_deadline_ends_the_call(ajar: tuple[door.Door, str]) -> None:
    made, target = ajar
    release = threading.Event()

    def nothing() -> Iterator[bytes]:
        release.wait(30)
        yield b""

    with Knock(target) as knock:
        call = knock.channel.stream_unary(method("Put")).future(nothing(), timeout=0.1)
        assert call.exception(timeout=10).code() is CODE.DEADLINE_EXCEEDED
        until(lambda: made.gauges()["grpc_calls"] == 0, "the call ends", 5)
        release.set()


def test_more_puts_and_gets_than_there_are_places_hear_full(doors: Doors) -> None:
    release = threading.Event()

    def nothing() -> Iterator[bytes]:
        release.wait(30)
        yield b""

    with Knock(f"unix:{doors.socket}.grpc") as knock:
        upload = knock.channel.stream_unary(method("Put"))
        held = [upload.future(nothing(), timeout=30) for _ in range(door.MAX_BULK)]
        until(lambda: doors.status()["grpc_bulk_calls"] == door.MAX_BULK, "all places are taken")
        assert ends(lambda: upload(nothing(), timeout=10)) == (CODE.RESOURCE_EXHAUSTED, f"full, retry: {door.MAX_BULK} puts and gets are under way")
        assert knock.code(method("Status")) == (CODE.OK, "")  # small calls have threads of their own
        release.set()
        for call in held:
            call.cancel()
    idle(doors)


# Sizes


def test_sizes_up_to_the_largest_block_come_back_and_the_next_is_refused(doors: Doors) -> None:
    """KVB-12 b: around a piece of 2 MiB, around gRPC's 4 MiB, and around the largest block; alone and in one call with others."""
    with doors.way("tcp") as client:
        for edge in (2 * MiB, 4 * MiB, 16 * MiB):
            for nbytes in (edge - HEADER_BYTES - 16, edge - HEADER_BYTES, edge - HEADER_BYTES + 16, edge)[: 2 if edge == 16 * MiB else 4]:
                ns = client.register(description(nbytes, model=f"org/{nbytes}"))
                for numbers in ([0], [1, 2]):
                    put(client, ns, numbers, deadline=60)
                    got = client.get(ns, hashes(numbers), deadline=60)
                    assert [is_body(one, n) for n, one in zip(numbers, got, strict=True)] == [True] * len(numbers), nbytes
                client.delete(ns, hashes(range(3)))
    with Knock(doors.target) as knock:
        code, details = ends(lambda: knock.register(description(16 * MiB).canonical, doors.bearer("acme-write")))
        if code is CODE.OK:  # the namespace may exist; no block of it may
            known = knock.register(description(16 * MiB).canonical, doors.bearer("acme-write"))
            keys = pb.Keys(handle=known.handle, boot=known.boot, layer_hi=1, head_hi=1, hashes=hashes([1]), nbytes=16 * MiB + HEADER_BYTES)
            first = rpc.message_chunk(pb.PutRequest(keys=keys, checksum=[0]))
            code, details = ends(lambda: knock.channel.stream_unary(method("Put"))(iter([first]), timeout=30, metadata=doors.bearer("acme-write")))
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
def test_a_piece_above_its_limit_is_refused_by_name_and_the_channel_stays_good(doors: Doors, nbytes: int, code: Any, words: str) -> None:
    with Knock(f"unix:{doors.socket}.grpc") as knock:
        known = knock.register(description(8 * MiB).canonical)
        keys = pb.Keys(handle=known.handle, boot=known.boot, layer_hi=1, head_hi=1, hashes=hashes([1]), nbytes=8 * MiB + HEADER_BYTES)
        messages = [rpc.message_chunk(pb.PutRequest(keys=keys, checksum=[0])), rpc.data_chunk(bytes(nbytes))]
        upload = knock.channel.stream_unary(method("Put"))
        got, details = ends(lambda: upload(iter(messages), timeout=30))
        assert got is code and words in details
        assert knock.code(method("Lookup"), bytes(nbytes))[0] in (CODE.INVALID_ARGUMENT, CODE.RESOURCE_EXHAUSTED)
        assert knock.code(method("Status")) == (CODE.OK, "")
        good = body(1, 8 * MiB)
        request = pb.PutRequest(keys=keys, checksum=[xxhash.xxh3_64_intdigest(good)])
        pieces = [rpc.message_chunk(request), *(rpc.data_chunk(good.data[at : at + CHUNK]) for at in range(0, 8 * MiB, CHUNK))]
        assert pb.PutReply.FromString(upload(iter(pieces), timeout=30)).known == 1
    idle(doors)


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
def test_malformed_puts_are_refused_by_name_and_store_nothing(doors: Doors, messages: list[Any], words: str) -> None:
    with Knock(f"unix:{doors.socket}.grpc") as knock:
        known = knock.register(description(4096).canonical)
        keys = pb.Keys(handle=known.handle, boot=known.boot, layer_hi=1, head_hi=1, hashes=hashes([77]), nbytes=4096 + HEADER_BYTES)
        request = pb.PutRequest(keys=keys, checksum=[0])
        bootless = pb.PutRequest(keys=keys, checksum=[0])
        bootless.keys.boot = 0
        named = {"request": rpc.message_chunk(request), "no boot": rpc.message_chunk(bootless)}
        before = doors.stored()
        code, details = ends(lambda: knock.channel.stream_unary(method("Put"))(iter([named.get(m, m) for m in messages]), timeout=10))
        assert code is CODE.INVALID_ARGUMENT and words in details
        assert doors.stored() == before


def test_a_body_other_than_its_checksum_is_not_stored(doors: Doors) -> None:
    with Knock(f"unix:{doors.socket}.grpc") as knock:
        known = knock.register(description(4096).canonical)
        keys = pb.Keys(handle=known.handle, boot=known.boot, layer_hi=1, head_hi=1, hashes=hashes([81, 82]), nbytes=4096 + HEADER_BYTES)
        sums = [xxhash.xxh3_64_intdigest(body(81, 4096)), 1]
        messages = [rpc.message_chunk(pb.PutRequest(keys=keys, checksum=sums)), *(rpc.data_chunk(body(n, 4096).data) for n in (81, 82))]
        reply = pb.PutReply.FromString(knock.channel.stream_unary(method("Put"))(iter(messages), timeout=10))
        assert reply.known == 0 and "checksum" in reply.reason
    idle(doors)
    assert doors.status()["reserved_blocks"] == 0


def test_a_handle_of_another_life_is_stale(doors: Doors) -> None:
    """A restarted daemon may give the same number to another namespace: a handle alone would bring another model's blocks."""
    with Knock(f"unix:{doors.socket}.grpc") as knock:
        known = knock.register(description(4096).canonical)
        for verb in ("Prefetch", "Flush", "Delete", "Pin", "Unpin", "Get"):
            keys = pb.Keys(handle=known.handle, boot=known.boot ^ 2, layer_hi=1, head_hi=1, hashes=hashes([1])).SerializeToString()
            assert knock.code(method(verb), keys, streaming=True)[0] is CODE.FAILED_PRECONDITION, verb
            keys = pb.Keys(handle=known.handle, layer_hi=1, head_hi=1, hashes=hashes([1])).SerializeToString()
            assert knock.code(method(verb), keys, streaming=True)[0] is CODE.INVALID_ARGUMENT, verb
        run = pb.Run(layer_hi=1, head_hi=1, hashes=hashes([1]))
        for boot, code in ((known.boot, CODE.OK), (0, CODE.INVALID_ARGUMENT), (known.boot ^ 2, CODE.FAILED_PRECONDITION)):
            request = pb.LookupRequest(handle=known.handle, boot=boot, run=[run])
            assert knock.code(method("Lookup"), request.SerializeToString())[0] is code
