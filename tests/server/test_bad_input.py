"""What hostile or broken clients send to the Unix transport, and the answer: an error or a close within seconds.

Around every test another client reads its blocks without a break and must get every one of them; afterwards nothing is
stored or held that was not before, the daemon's own memory has not grown by 16 MiB at any moment, and no descriptor,
thread or session is left behind.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import resource
import socket
import struct
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from google.protobuf.message import Message

from kvtier.errors import Full, Invalid, KvtierError, NotFound, Stale, from_code
from kvtier.format.identity import MAX_DESCRIPTION_BYTES, canonical_json
from kvtier.format.layout import attention
from kvtier.protocol import frames
from kvtier.protocol.frames import HEADER, MAGIC, MAX_BODY, Verb
from kvtier.protocol.v1 import kvtier_pb2 as pb
from kvtier.server.sessions import MAX_SESSIONS, MAX_SOCKETS
from kvtier.server.unix import MAX_LARGE, MAX_UNKNOWN
from tests.support.daemon import Daemon, MiB, Peer, Raw, description, hashes, is_body, put, until

LIMIT = 5.0  # seconds: the server promises 2 s, and 2 more for the last piece of a frame
# Large calls take turns, so many at a time; one of a half MiB takes up to 4 with its frame, its message and its keys.
GROWTH = MAX_LARGE * 4 * MiB
NBYTES = 4096
MODEL = description(NBYTES, model="victim")
KEYS = 8


class Witness(threading.Thread):
    """Another client that goes on beside the abuse.

    It writes nothing, so whatever is stored afterwards is not its doing.
    """

    def __init__(self, daemon: Daemon) -> None:
        super().__init__()
        self.daemon_under_test = daemon
        self.client = daemon.client()
        self.ns = self.client.register(MODEL)
        put(self.client, self.ns, range(KEYS))
        self.rounds = 0
        self.failures: list[str] = []
        self.peak = 0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                self._once()
            except Exception as error:
                self.failures.append(repr(error))
                return
            self.rounds += 1
            self.stop.wait(0.002)

    def _once(self) -> None:
        wanted = hashes(range(KEYS))
        found = self.client.lookup(self.ns, wanted)
        assert found == KEYS, found.reason
        with self.client.lease(self.ns, wanted) as blocks:
            assert len(blocks) == KEYS, blocks.reason
            assert all(is_body(view, n) for n, view in enumerate(blocks))
        self.peak = max(self.peak, self.daemon_under_test.rss_anon())


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with Daemon(64 * MiB) as daemon:
        yield daemon
        daemon.empty()


@pytest.fixture
def daemon(running: Daemon) -> Iterator[Daemon]:
    """The daemon, watched by a witness before, during and after the test."""
    witness = Witness(running)
    with witness.client:
        until(lambda: running.status()["sessions"] == 2, "earlier tests' sessions end")
        before, memory = running.stored(), running.rss_anon()
        descriptors, threads = running.descriptors(), running.threads()
        witness.start()
        until(lambda: witness.rounds > 2, "the witness goes on")
        try:
            yield running
            first = witness.rounds
            until(lambda: witness.rounds > first + 2 or witness.failures, "the witness goes on after the abuse")
        finally:
            witness.stop.set()
            witness.join()
        assert witness.failures == []
        until(lambda: running.status()["sessions"] == 2, "the abuser's sessions end")
        until(lambda: running.stored() == before, "nothing of it is stored")
        assert witness.peak - memory < GROWTH
        assert running.rss_anon() - memory < GROWTH
        until(
            lambda: running.descriptors() <= descriptors + 1 and running.threads() <= threads + 1,
            "descriptors and threads are back",
        )
        running.status(check_integrity=True)
        assert running.faults() == []


def outcome(connection: Raw, within: float = LIMIT) -> tuple[type[KvtierError], str] | None:
    """The error by which a frame was answered, None for a close without a word.

    Fails if neither comes in time, or the frame was accepted.
    """
    frames.set_timeouts(connection.sock, within, within)
    try:
        status, _, _, reply = connection.receive()
    except (frames.Closed, ConnectionError):
        return None
    except (frames.Idle, TimeoutError):
        pytest.fail(f"neither an answer nor a close within {within:g} s")
    assert status, f"accepted: {reply!r}"
    assert reply
    return type(from_code(status, "")), reply.decode()


def closes(connection: Raw, within: float = LIMIT) -> None:
    """Waits for the end of the stream; answers before it are passed over."""
    end = time.monotonic() + within
    frames.set_timeouts(connection.sock, within, within)
    try:
        while connection.sock.recv(1 << 16):
            assert time.monotonic() < end
    except BlockingIOError:
        pytest.fail(f"still open after {within:g} s")
    except ConnectionError:
        pass


def refused(connection: Raw, verb: int, message: Message | bytes, *kinds: type[KvtierError], match: str = "") -> None:
    """The call is answered with one of these errors, and the socket stays good."""
    status, reply = connection.call(verb, message)
    assert status in [kind.code for kind in kinds], (status, reply)
    assert match in reply.decode(), reply
    assert connection.call(Verb.LOOKUP, lookup_message(connection))[0] == 0


def handle_of(connection: Raw) -> int:
    status, reply = connection.call(Verb.REGISTER, pb.RegisterRequest(description=MODEL.canonical))
    assert status == 0
    return pb.RegisterReply.FromString(reply).handle


def lookup_message(connection: Raw) -> pb.LookupRequest:
    if not hasattr(connection, "handle"):
        connection.handle = handle_of(connection)  # type: ignore[attr-defined]
    return pb.LookupRequest(handle=connection.handle, run=[pb.Run(layer_hi=1, head_hi=1, hashes=hashes([1]))])  # type: ignore[attr-defined]


# Frames

LOOKUP = pb.LookupRequest(handle=1).SerializeToString()


NO_FRAMES: dict[str, tuple[bytes, str]] = {
    "HTTP": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "not a frame of version 1"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(20), "not a frame"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), "not a frame"),
    "zeros": (bytes(24), "not a frame"),
    "ones": (b"\xff" * 4096, "not a frame"),
    "magic": (HEADER.pack(MAGIC ^ 1, 1, Verb.LOOKUP, 0, 1, 0), "not a frame"),
    "version 0": (HEADER.pack(MAGIC, 0, Verb.LOOKUP, 0, 1, 0), "not a frame"),
    "version 2": (HEADER.pack(MAGIC, 2, Verb.LOOKUP, 0, 1, 0), "not a frame"),
    "a byte too long": (HEADER.pack(MAGIC, 1, Verb.LOOKUP, MAX_BODY + 1, 1, 0), "the limit is 1048576"),
    "2^31 bytes": (HEADER.pack(MAGIC, 1, Verb.LOOKUP, 2**31, 1, 0), "a body of 2147483648 bytes"),
    "-1 bytes": (HEADER.pack(MAGIC, 1, Verb.LOOKUP, 2**32 - 1, 1, 0), "a body of 4294967295 bytes"),
    "one and no other": (frames.pack(255, 1, 0, b"") + b"x" * HEADER.size, "unknown verb 255"),
}


@pytest.mark.parametrize("kind", NO_FRAMES)
def test_what_is_no_frame_is_answered_by_name_and_closed(daemon: Daemon, kind: str) -> None:
    data, match = NO_FRAMES[kind]
    for greet in (True, False):
        with Raw(daemon.socket, greet=greet) as connection:
            connection.send(data)
            said = outcome(connection)
            assert said is not None and said[0] is Invalid
            assert not greet or match in said[1]
            closes(connection)


def test_frames_that_stop_half_way_are_closed(daemon: Daemon) -> None:
    frame = frames.pack(Verb.LOOKUP, 1, 0, LOOKUP)
    with ExitStack() as stack:
        connections = [
            stack.enter_context(Raw(daemon.socket, greet=greet)) for greet in (True, False) for _ in range(4)
        ]
        for connection, cut in zip(connections, [1, 23, 24, len(frame) - 1] * 2, strict=True):
            connection.send(frame[:cut])
        for connection in connections:
            assert outcome(connection) is None


def test_a_frame_may_end_with_its_sender(daemon: Daemon) -> None:
    for cut in (1, 12, 24, 25, 500):
        with Raw(daemon.socket) as connection:
            connection.send(frames.pack(Verb.LOOKUP, 1, 0, bytes(1000))[:cut])
            connection.sock.shutdown(socket.SHUT_WR)
            closes(connection)


def test_a_frame_that_drips_is_closed(daemon: Daemon) -> None:
    for greeted, data in (
        (True, frames.pack(Verb.LOOKUP, 1, 0, bytes(1000))),
        (False, frames.pack(Verb.HELLO, 0, 0, bytes(1000))),
    ):
        with Raw(daemon.socket, greet=greeted) as connection:
            began = time.monotonic()
            sent = 0
            try:
                while True:
                    connection.send(data[sent : sent + 1])
                    sent += 1
                    assert time.monotonic() - began < LIMIT
                    time.sleep(0.2)
            except (BrokenPipeError, ConnectionResetError):
                pass
            assert time.monotonic() - began < LIMIT


@pytest.mark.parametrize("verb", [0, Verb.HELLO, max(Verb) + 1, 127, 128, 255])
def test_unknown_verbs_are_named(daemon: Daemon, verb: int) -> None:
    with Raw(daemon.socket) as connection:
        for body in (b"", b"x", bytes(1000)):
            refused(connection, verb, body, Invalid, match=f"unknown verb {int(verb)}")


@pytest.mark.parametrize("verb", [verb for verb in Verb if verb != Verb.HELLO])
def test_no_verb_trips_over_bytes_that_are_no_message(daemon: Daemon, verb: Verb) -> None:
    generator = random.Random(int(verb))
    bodies = [
        b"",
        b"\xff",
        b"\xff" * 1000,
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x08" * 7,
        bytes(5000),
        b"\x0b" * 5000,
        b"\x0a\x01\xff" * 100,
    ]
    bodies += [generator.randbytes(generator.randrange(1, 200)) for _ in range(60)]
    with Raw(daemon.socket) as connection:
        for body in bodies:
            status, reply = connection.call(verb, body)
            assert status != KvtierError.code, reply  # that would be a fault of the daemon's own
            if status:
                assert reply
        assert connection.call(Verb.LOOKUP, lookup_message(connection))[0] == 0


# Numbers, lists and bytes inside well-formed messages


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


ODD = [0, -1, 2**31, 2**63 - 1]
FIELDS = {name: field.number for name, field in pb.Keys.DESCRIPTOR.fields_by_name.items()}


def keys(connection: Raw, id_: int = 1, **fields: Any) -> pb.Keys:
    lookup_message(connection)
    nbytes = MODEL.layout.extents().block_bytes
    given = {
        "handle": connection.handle,
        "layer_hi": 1,
        "head_hi": 1,
        "hashes": hashes([100]),
        "id": id_,
        "nbytes": nbytes,
    }  # type: ignore[attr-defined]
    return pb.Keys(**{**given, **fields})


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("field", ["handle", "group", "layer_lo", "layer_hi", "head_lo", "head_hi", "nbytes", "id"])
def test_odd_numbers_in_a_call(daemon: Daemon, field: str, value: int) -> None:
    """The wire carries 64 bits in any field.

    Those of 32 lose the upper half, as protobuf has it: what is left is still refused.
    """
    verbs = {Verb.RESERVE: "nbytes id", Verb.LEASE: "id", Verb.DELETE: "", Verb.PREFETCH: "", Verb.FLUSH: ""}
    with Raw(daemon.socket) as connection:
        for verb, own in verbs.items():
            if field in ("nbytes", "id") and field not in own:
                continue
            message = (
                keys(connection).SerializeToString() + varint(FIELDS[field] << 3) + varint(value)
            )  # the last value counts
            if (field, value) in {("group", 0), ("layer_lo", 0), ("head_lo", 0)}:
                continue  # what the rest of the call says
            if field == "id" and value:  # any number but 0 may be an id
                status, _ = connection.call(verb, message)
                assert status == 0
                undo = Verb.ABORT if verb == Verb.RESERVE else Verb.RELEASE
                assert connection.call(undo, b"\x08" + varint(value))[0] == 0
                connection.close()
                connection = Raw(daemon.socket)
                continue
            refused(connection, verb, message, Invalid, Stale)
        connection.close()


@pytest.mark.parametrize("value", ODD)
def test_odd_indices_and_ids_of_what_is_held(daemon: Daemon, value: int) -> None:
    with Raw(daemon.socket) as connection:
        assert connection.call(Verb.RESERVE, keys(connection, 1, hashes=hashes([100, 101])))[0] == 0
        assert connection.call(Verb.LEASE, keys(connection, 2, hashes=hashes(range(KEYS))))[0] == 0
        for verb, id_ in ((Verb.SEAL, 1), (Verb.ABORT, 1), (Verb.RELEASE, 2)):
            other = b"\x08" + varint(value)
            refused(connection, verb, other, NotFound)
            if value:
                refused(connection, verb, b"\x08" + varint(id_) + b"\x10" + varint(value), Invalid, match="outside")
            refused(connection, verb, pb.Held(id=id_, index=[0] * 16_385), Invalid, match="16385")
            refused(connection, verb, pb.Held(id=id_, index=[0] * 1_000_000), Invalid, match="1000000")
            refused(connection, verb, pb.Held(id=id_, index=[0, 2**32 - 1]), Invalid)
        refused(connection, Verb.SEAL, pb.Held(id=2), NotFound)
        refused(connection, Verb.RELEASE, pb.Held(id=1), NotFound)
        refused(connection, Verb.RESERVE, keys(connection, 1), Invalid, match="used before")
        refused(connection, Verb.LEASE, keys(connection, 2), Invalid, match="used before")
        assert connection.call(Verb.ABORT, pb.Held(id=1))[0] == connection.call(Verb.RELEASE, pb.Held(id=2))[0] == 0
        for verb in (Verb.SEAL, Verb.ABORT, Verb.RELEASE):
            assert connection.call(verb, pb.Held(id=1))[0] == 0, "finished: saying it again is harmless"


@pytest.mark.parametrize("count", [16_385, 30_000])
def test_too_many_keys_in_a_call(daemon: Daemon, count: int) -> None:
    many = hashes(range(count))
    with Raw(daemon.socket) as connection:
        for verb in (Verb.RESERVE, Verb.LEASE, Verb.DELETE, Verb.PREFETCH, Verb.FLUSH, Verb.PIN, Verb.UNPIN):
            refused(
                connection,
                verb,
                keys(connection, hashes=many),
                Invalid,
                match=f"{count} keys in one call; the limit is 16384",
            )
        run = pb.Run(layer_hi=1, head_hi=1, hashes=many[: len(many) // 2 // 32 * 32])
        rest = pb.Run(layer_hi=1, head_hi=1, hashes=many[len(run.hashes) :])
        refused(
            connection,
            Verb.LOOKUP,
            pb.LookupRequest(handle=connection.handle, run=[run, rest]),
            Invalid,
            match="the limit is 16384",
        )  # type: ignore[attr-defined]
        assert connection.call(Verb.LOOKUP, pb.LookupRequest(handle=connection.handle, run=[run]))[0] == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("runs", [257, 300, 200_000, 500_000])
def test_too_many_runs_in_a_lookup(daemon: Daemon, runs: int) -> None:
    with Raw(daemon.socket) as connection:
        refused(connection, Verb.LOOKUP, lookup_message(connection).SerializeToString() + b"\x1a\x00" * runs, Invalid)


def test_bytes_of_the_wrong_length(daemon: Daemon) -> None:
    with Raw(daemon.socket) as connection:
        for verb in (Verb.RESERVE, Verb.LEASE, Verb.DELETE, Verb.PREFETCH, Verb.FLUSH, Verb.PIN, Verb.UNPIN):
            for size in (1, 31, 33, 63, 8):
                refused(connection, verb, keys(connection, hashes=bytes(size)), Invalid, match="not a multiple of 32")
            for size in (1, 31, 33, 64, 1000):
                refused(connection, verb, keys(connection, context=bytes(size)), Invalid)


def test_shapes_that_do_not_multiply_up(daemon: Daemon) -> None:
    right = MODEL.layout.extents().block_bytes
    with Raw(daemon.socket) as connection:
        for wrong in (right - 1, right + 1, right - 256, right * 2, 4096, 1, 2**40):
            refused(
                connection,
                Verb.RESERVE,
                keys(connection, nbytes=wrong),
                Invalid,
                match=f"have {right} bytes, not {wrong}",
            )
        for range_ in (
            {"layer_hi": 2},
            {"head_hi": 2},
            {"layer_lo": 1},
            {"head_lo": 1},
            {"group": 1},
            {"layer_lo": 1, "layer_hi": 0},
        ):
            for verb in (Verb.RESERVE, Verb.LEASE, Verb.DELETE):
                refused(connection, verb, keys(connection, **range_), Invalid)


def test_ranges_without_end_cost_nothing(daemon: Daemon) -> None:
    """A layout of many layers has a hundred million ranges.

    Asking for ever new ones must not fill the daemon's memory.
    """
    wide = description(layout=attention(1000, 8, 8, engine_tokens=1, dtype="bf16"), model="wide")
    with Raw(daemon.socket) as connection:
        handle = pb.RegisterReply.FromString(
            connection.call(Verb.REGISTER, pb.RegisterRequest(description=wide.canonical))[1]
        ).handle
        for low in range(12):
            runs = [pb.Run(layer_lo=low, layer_hi=1000 - n, head_lo=n % 7, head_hi=n % 7 + 1) for n in range(256)]
            assert connection.call(Verb.LOOKUP, pb.LookupRequest(handle=handle, run=runs))[0] == 0
        for n in range(300):
            message = pb.Keys(handle=handle, layer_lo=n, layer_hi=1000, head_hi=1, hashes=hashes([1]), id=1, nbytes=1)
            assert connection.call(Verb.RESERVE, message)[0] == Invalid.code
        assert connection.call(Verb.DROP, pb.DropRequest(name=wide.digest.hex()))[0] == 0


def test_what_a_session_may_not_hold(daemon: Daemon) -> None:
    arena = daemon.status()["arena_bytes"]
    too_many = arena // 4 // MODEL.layout.extents().slot_bytes + 1
    with Raw(daemon.socket) as connection:
        refused(
            connection,
            Verb.RESERVE,
            keys(connection, hashes=hashes(range(1000, 1000 + too_many))),
            Invalid,
            match="send fewer blocks a call",
        )


# Descriptions

PLAIN = MODEL.to_json()
ONE_PART = PLAIN["layout"]["groups"][0]["layers"][0]


def with_group(**fields: Any) -> bytes:
    return canonical_json({**PLAIN, "layout": {"groups": [{**PLAIN["layout"]["groups"][0], **fields}]}})


BAD_DESCRIPTIONS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"model: m",
    "a list": b"[]",
    "a number": b"1",
    "a huge number": b"1" * 250_000,
    "not a number": b"NaN",
    "deep lists": b"[" * 250_000,
    "deep objects": b'{"a":' * 40_000,
    "deep and closed": b"[" * 100_000 + b"]" * 100_000,
    "deep under quotes": b'["\\"",' * 30_000,
    "quotes without end": b'"' + b'\\"' * 120_000,
    "deep in a string without end": b'["' + b'\\"[' * 80_000,
    "deep in UTF-16": '["\u2200",'.encode("utf-16") * 10_000,
    "UTF-16": MODEL.canonical.decode().encode("utf-16"),
    "UTF-8 mark": b"\xef\xbb\xbf" + MODEL.canonical,
    "not canonical": MODEL.canonical.replace(b",", b", ", 1),
    "trailing space": MODEL.canonical + b" ",
    "a key twice": MODEL.canonical[:-1] + b',"scales":{}}',
    "too large": canonical_json({**PLAIN, "model": "m" * MAX_DESCRIPTION_BYTES}),
    "a field too many": canonical_json({**PLAIN, "zz": 1}),
    "a field that is no text": canonical_json({**PLAIN, "\ud800\n": 1}),
    "a field too few": canonical_json({name: value for name, value in PLAIN.items() if name != "rope"}),
    "a float": canonical_json({**PLAIN, "rope": {"theta": 1e4}}),
    "no text in a value": canonical_json({**PLAIN, "rope": {"theta": "\ud800"}}),
    "a number of 4,000 digits": canonical_json({**PLAIN, "encoding": {"rule": "none", "codec": 10**4000}}),
    "a branch": canonical_json({**PLAIN, "revision": "main"}),
    "a path": canonical_json({**PLAIN, "model": "../../etc/passwd\0"}),
    "a list for an object": canonical_json({**PLAIN, "layout": []}),
    "no tokens": with_group(engine_tokens=0),
    "less than no heads": with_group(heads=-1),
    "2^63-1 layers' worth": with_group(engine_blocks=2**63 - 1),
    "two heads of opaque bytes": with_group(heads=2),
    "a width of 2^31": with_group(layers=[{**ONE_PART, "parts": [["bytes", 2**31, "u8", "none", "fp32"]]}]),
    "a part too short": with_group(layers=[{**ONE_PART, "parts": [["bytes", 16, "u8", "none"]]}]),
    "a format nobody knows": with_group(layers=[{**ONE_PART, "parts": [["bytes", 16, "int3", "none", "fp32"]]}]),
    "one layer twice": with_group(layers=[ONE_PART, ONE_PART]),
}


@pytest.mark.parametrize("kind", BAD_DESCRIPTIONS)
def test_bad_descriptions_are_refused_by_name(daemon: Daemon, kind: str) -> None:
    with Raw(daemon.socket) as connection:
        refused(connection, Verb.REGISTER, pb.RegisterRequest(description=BAD_DESCRIPTIONS[kind]), Invalid)
        refused(connection, Verb.EXPLAIN, pb.ExplainRequest(description=BAD_DESCRIPTIONS[kind]), Invalid)


def test_names_of_namespaces_that_are_none(daemon: Daemon) -> None:
    with Raw(daemon.socket) as connection:
        for name in ("", "abc", "../..", "%s%n", "\0", "g" * 64, "0" * 65, "A" * 8, "é" * 4, "0" * 100_000):
            for verb, message in ((Verb.SHOW, pb.ShowRequest(name=name)), (Verb.DROP, pb.DropRequest(name=name))):
                refused(connection, verb, message, Invalid)
            refused(connection, Verb.DIFF, pb.DiffRequest(stored=name, live=name), Invalid)
        refused(connection, Verb.DROP, pb.DropRequest(name="0" * 64), NotFound)


# Hellos


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (pb.HelloRequest(), Invalid),
        (pb.HelloRequest(protocol=2), Invalid),
        (pb.HelloRequest(protocol=2**32 - 1), Invalid),
        (pb.HelloRequest(protocol=1, session=b"x"), Invalid),
        (pb.HelloRequest(protocol=1, session=bytes(15)), Invalid),
        (pb.HelloRequest(protocol=1, session=bytes(17)), Invalid),
        (pb.HelloRequest(protocol=1, session=bytes(1000)), Invalid),
        (pb.HelloRequest(protocol=1, session=os.urandom(16)), NotFound),
        (pb.HelloRequest(protocol=1, drained=[bytes(16)] * 17), Invalid),
        (pb.HelloRequest(protocol=1, drained=[b""] * 1000), Invalid),
        (pb.HelloRequest(protocol=1, session=bytes(5000)), Invalid),
    ],
)
@pytest.mark.parametrize("passed", [0, 1, 2, 8])
def test_odd_hellos_are_refused_and_what_they_passed_is_closed(
    daemon: Daemon, message: Message, kind: type[KvtierError], passed: int
) -> None:
    before = daemon.descriptors()
    with ExitStack() as stack:
        fds = []
        for _ in range(passed):
            fds.extend(os.pipe())
            stack.callback(os.close, fds[-1])
            stack.callback(os.close, fds[-2])
        for _ in range(5):
            with Raw(daemon.socket, greet=False) as connection:
                status, _ = connection.hello(message, fds)
                assert status == kind.code
                closes(connection)
        until(lambda: daemon.descriptors() <= before, "what was passed is closed")


def test_hellos_with_descriptors_that_are_no_pidfd(daemon: Daemon) -> None:
    """The kernel tells who connects, so whatever rides along is not needed.

    It is closed, and the session is the connecting process's.
    """
    with ExitStack() as stack:
        fds = [stack.enter_context(open(os.devnull)).fileno(), *os.pipe(), os.pidfd_open(1)]
        for fd in fds[1:]:
            stack.callback(os.close, fd)
        before = daemon.descriptors()
        for some in ([], fds[:1], fds[1:2], fds, fds * 20):
            with Raw(daemon.socket, greet=False) as connection:
                status, reply = connection.hello(pb.HelloRequest(protocol=1, map=True), some)
                assert status == 0
                assert (
                    connection.fd is not None
                    and pb.HelloReply.FromString(reply).arena_bytes == os.fstat(connection.fd).st_size
                )
                assert connection.call(Verb.LOOKUP, lookup_message(connection))[0] == 0
                for _ in range(3):  # later frames may carry descriptors too: the kernel drops them
                    socket.send_fds(connection.sock, [frames.pack(Verb.STATUS, 9, 0, b"")], fds)
                    assert connection.receive()[0] == 0
                until(lambda: daemon.descriptors() <= before + 2, "the socket and the pidfd are all that stays")
        until(lambda: daemon.descriptors() <= before, "all are closed")


def test_a_first_frame_that_is_no_hello(daemon: Daemon) -> None:
    for verb in (0, Verb.LOOKUP, Verb.STATUS, Verb.DROP, 255):
        with Raw(daemon.socket, greet=False) as connection:
            connection.send(frames.pack(verb, 1, 0, b""))
            said = outcome(connection)
            assert said is not None and said[0] is Invalid and "the first frame must be a hello" in said[1]
            closes(connection)
    with Raw(daemon.socket, greet=False) as connection:
        connection.send(frames.pack(Verb.HELLO, 1, 0, b"\xff" * 10))
        assert outcome(connection) == (Invalid, "the hello is not a HelloRequest")
    with Raw(daemon.socket, greet=False) as connection:
        connection.send(frames.pack(Verb.HELLO, 0, 0, pb.HelloRequest(protocol=1).SerializeToString()) + b"more")
        assert outcome(connection) == (Invalid, "bytes after the frame: its answer comes first")


# The arena


def test_the_arena_can_be_neither_cut_nor_grown_nor_sealed(daemon: Daemon) -> None:
    with Raw(daemon.socket, pb.HelloRequest(protocol=1, map=True)) as connection:
        assert connection.fd is not None
        for fd in (connection.fd, again := os.open(f"/proc/self/fd/{connection.fd}", os.O_RDWR)):
            for size in (0, 4096, connection.arena_bytes - 4096, connection.arena_bytes + 4096, 2**40):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, size)
            with pytest.raises(OSError):
                os.pwrite(fd, b"x", connection.arena_bytes)  # beyond the end
            with pytest.raises(OSError):
                os.posix_fallocate(fd, connection.arena_bytes, 4096)
            for seal in (1, 2, 4, 8, 16):  # seal, shrink, grow, write, future write
                with pytest.raises(PermissionError):
                    fcntl.fcntl(fd, 1033, seal)
        os.close(again)
        assert os.fstat(connection.fd).st_size == connection.arena_bytes


def test_a_header_that_its_writer_changed_is_not_stored(daemon: Daemon) -> None:
    with Raw(daemon.socket, pb.HelloRequest(protocol=1, map=True)) as connection:
        assert connection.fd is not None
        with mmap.mmap(connection.fd, connection.arena_bytes) as arena:
            for at in (0, 8, 24, 40, 100, 200, 255):
                id_ = at + 1
                status, reply = connection.call(Verb.RESERVE, keys(connection, id_, hashes=hashes([500])))
                assert status == 0
                offset = pb.Slots.FromString(reply).offset[0]
                arena[offset + at] ^= 1
                status, reply = connection.call(Verb.SEAL, pb.Held(id=id_))
                assert status != 0 and b"header" in reply
                found = connection.call(
                    Verb.LOOKUP,
                    pb.LookupRequest(
                        handle=connection.handle, run=[pb.Run(layer_hi=1, head_hi=1, hashes=hashes([500]))]
                    ),
                )  # type: ignore[attr-defined]
                assert list(pb.LookupReply.FromString(found[1]).known) == [0]


# Sockets by the dozen


def test_strangers_that_say_nothing_are_closed_and_limited(daemon: Daemon) -> None:
    began = time.monotonic()
    with ExitStack() as stack, Raw(daemon.socket) as known:
        strangers = [stack.enter_context(Raw(daemon.socket, greet=False)) for _ in range(MAX_UNKNOWN)]
        beyond = [stack.enter_context(Raw(daemon.socket, greet=False)) for _ in range(20)]
        for connection in beyond:
            closes(connection)
        assert time.monotonic() - began < LIMIT
        for n, connection in enumerate(strangers):
            assert known.call(Verb.LOOKUP, lookup_message(known))[0] == 0, (
                f"a known client goes on beside unknown socket {n}"
            )
            closes(connection)
        assert time.monotonic() - began < 2 * LIMIT
    with Raw(daemon.socket) as connection:
        assert connection.call(Verb.STATUS, b"")[0] == 0


def test_strangers_that_drip_are_closed_too(daemon: Daemon) -> None:
    began = time.monotonic()
    hello = frames.pack(Verb.HELLO, 0, 0, pb.HelloRequest(protocol=1, session=bytes(900)).SerializeToString())
    with ExitStack() as stack:
        connections = [stack.enter_context(Raw(daemon.socket, greet=False)) for _ in range(40)]
        sent = 0
        while connections:
            for connection in list(connections):
                try:
                    connection.send(hello[sent : sent + 1])
                except (BrokenPipeError, ConnectionResetError):
                    connections.remove(connection)
            sent += 1
            assert time.monotonic() - began < 2 * LIMIT
            time.sleep(0.1)


def test_a_client_that_takes_no_answers_is_closed(daemon: Daemon) -> None:
    large = description(layout=attention(900, 1, 8, engine_tokens=1, dtype="bf16"), model="large")
    with Raw(daemon.socket) as connection:
        assert connection.call(Verb.REGISTER, pb.RegisterRequest(description=large.canonical))[0] == 0
        show = frames.pack(Verb.SHOW, 1, 0, pb.ShowRequest(name=large.digest.hex()).SerializeToString())
        began = None
        try:
            for _ in range(200):
                connection.send(show)
                until(
                    lambda: struct.unpack("i", fcntl.ioctl(connection.sock, termios.TIOCOUTQ, bytes(4)))[0] == 0,
                    "the frame is taken",
                    within=1.0,
                )
        except AssertionError:
            began = time.monotonic()
        assert began is not None, "answers pile up somewhere"
        until(lambda: not _open(connection.sock), "the daemon closes", within=LIMIT)
    with Raw(daemon.socket) as connection:
        assert connection.call(Verb.DROP, pb.DropRequest(name=large.digest.hex()))[0] == 0


def _open(sock: socket.socket) -> bool:
    try:
        sock.send(b"x", socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def test_an_answer_that_cannot_be_delivered_is_taken_back(daemon: Daemon) -> None:
    with Raw(daemon.socket) as first:
        handle = handle_of(first)
        sockets = daemon.status()["sockets"]
        for id_ in range(1, 40):
            with Raw(daemon.socket, pb.HelloRequest(protocol=1, session=first.session)) as connection:
                verb = Verb.RESERVE if id_ % 2 else Verb.LEASE
                message = pb.Keys(
                    handle=handle,
                    layer_hi=1,
                    head_hi=1,
                    hashes=hashes(range(200, 300) if id_ % 2 else range(KEYS)),
                    id=id_,
                    nbytes=MODEL.layout.extents().block_bytes,
                )
                connection.send(frames.pack(verb, 1, 0, message.SerializeToString()))
        until(lambda: daemon.status()["sockets"] <= sockets + 1, "the sockets are gone")
        for id_ in range(1, 40):  # some answers were on their way before the close: these calls count
            first.call(Verb.ABORT if id_ % 2 else Verb.RELEASE, pb.Held(id=id_))
        # One that is served only now finds its id given up, and holds nothing for longer than a moment.
        until(lambda: daemon.status()["reserved_blocks"] == 0, "nothing stays reserved")


def test_one_process_with_many_sockets(daemon: Daemon) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            first = stack.enter_context(Raw(daemon.socket))
            for _ in range(MAX_SOCKETS - 1):
                stack.enter_context(Raw(daemon.socket, pb.HelloRequest(protocol=1, session=first.session)))
        assert daemon.status()["sockets"] >= 4 * MAX_SOCKETS


def test_large_frames_on_every_socket_of_a_session(daemon: Daemon) -> None:
    """All of them stop just before their end.

    Memory is for a few at a time, and the rest are refused or closed in their turn.
    """
    frame = frames.pack(Verb.LOOKUP, 1, 0, bytes(MAX_BODY))[:-1]
    with ExitStack() as stack:
        first = stack.enter_context(Raw(daemon.socket))
        connections = [
            stack.enter_context(Raw(daemon.socket, pb.HelloRequest(protocol=1, session=first.session)))
            for _ in range(MAX_SOCKETS - 1)
        ]
        began = time.monotonic()

        def push(connection: Raw) -> None:
            frames.set_timeouts(connection.sock, 3 * LIMIT, 3 * LIMIT)
            try:
                connection.send(frame)
            except OSError:
                pass  # closed meanwhile
            closes(connection, 3 * LIMIT)

        threads = [threading.Thread(target=push, args=(connection,)) for connection in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * LIMIT)
        assert time.monotonic() - began < 3 * LIMIT
        assert first.call(Verb.STATUS, b"")[0] == 0


def test_large_calls_take_turns(daemon: Daemon) -> None:
    """Calls of half a megabyte from many threads at once are all answered."""
    answers = []
    message = lambda connection: pb.LookupRequest(  # noqa: E731
        handle=handle_of(connection), run=[pb.Run(layer_hi=1, head_hi=1, hashes=hashes(range(16_384)))]
    )

    def ask() -> None:
        with Raw(daemon.socket) as connection:
            answers.append(connection.call(Verb.LOOKUP, message(connection))[0])

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [0] * 24


def test_more_sessions_than_there_may_be(running: Daemon) -> None:
    """Proper sessions, so no bad input: each may cost its thread, but not more."""
    memory = running.rss_anon()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * MAX_SESSIONS:
        pytest.skip("needs more open files than this system allows")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * MAX_SESSIONS, hard))
    try:
        with ExitStack() as stack:
            opened = 0
            with pytest.raises(Full, match="full, retry"):
                while True:
                    stack.enter_context(Raw(running.socket))
                    opened += 1
            assert running.rss_anon() - memory < opened * 64 * 1024
            assert opened >= MAX_SESSIONS - 8
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    until(lambda: _reachable(running), "there is room again")
    running.quiet()


def _reachable(daemon: Daemon) -> bool:
    try:
        Raw(daemon.socket).close()
    except (KvtierError, frames.Closed, ConnectionError):
        return False
    return True


REPEATER = """
from kvtier.protocol.v1 import kvtier_pb2 as pb
path = Path(ADDRESS.removeprefix("unix:"))
def refused():
    with Raw(path) as connection:
        assert connection.call(200, b"")[0] == 2
def timed(times):
    began = time.monotonic()
    for _ in range(times):
        refused()
    return time.monotonic() - began
first = timed(2)
row = timed(20)
with Raw(path) as connection:
    assert connection.call(Verb.STATUS, b"")[0] == 0
say([first, row, timed(2)])
"""


def test_a_process_that_goes_on_with_bad_input_is_answered_more_slowly(daemon: Daemon) -> None:
    """Over as many connections as it likes.

    A good call ends the row, and the witness, another process's client, is answered as ever.
    """
    with Peer(REPEATER, daemon) as peer:
        first, row, again = peer.hear()
    assert row > 20 * 0.08, "20 refusals in a row, most of which cost 100 ms"
    assert first >= 0.003 and again >= 0.003


# Room


@pytest.mark.alone
def test_a_full_arena_says_so_at_once() -> None:
    """Two sessions hold all that a tenant may hold.

    Who comes then hears it without waiting, and goes on as soon as there is room.
    """
    with Daemon(64 * MiB) as daemon, ExitStack() as stack:
        clients = [stack.enter_context(daemon.client()) for _ in range(3)]
        spaces = [client.register(description(MiB - 512)) for client in clients]
        share = daemon.status()["arena_bytes"] // 4 // spaces[0].extents().slot_bytes
        with ExitStack() as held:
            for n, (client, ns) in enumerate(zip(clients[:2], spaces, strict=False)):
                slots = held.enter_context(client.fill(ns, hashes(range(100 * n, 100 * n + share))))
                assert slots.reason == ""
            began = time.monotonic()
            with clients[2].fill(spaces[2], hashes([999])) as slots:
                assert slots.reason.startswith("full, retry: this tenant holds")
            answer = clients[2].put(spaces[2], hashes([999]), [bytes(spaces[2].extents().body_bytes)])
            assert answer == 0 and answer.reason.startswith("full, retry")
            assert time.monotonic() - began < 1.0
        put(clients[2], spaces[2], [999])
