"""What both ends of gRPC agree on: names of methods, how bytes are framed, status codes, keep-alive, sizes of messages.

No state, no I/O. Put and get carry bytes as `Chunk` messages, whose tag and length are written and read here by hand:
through a protobuf field every byte would be copied twice more (1.4 to 5 CPU seconds a GB instead of 0.8 to 1.2), and
generated stubs of any language still understand it.
"""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError, Message

from kvtier.errors import (
    Deadline,
    Denied,
    Full,
    Invalid,
    KvtierError,
    Lost,
    NotFound,
    Stale,
    Unauthenticated,
    Unavailable,
)
from kvtier.protocol.fields import read_varint, write_varint
from kvtier.protocol.frames import Verb
from kvtier.protocol.v1 import kvtier_pb2 as pb

SERVICE = "kvtier.v1.Kvtier"
METHODS: dict[int, str] = {
    Verb.REGISTER: "Register",
    Verb.LOOKUP: "Lookup",
    Verb.PREFETCH: "Prefetch",
    Verb.FLUSH: "Flush",
    Verb.DELETE: "Delete",
    Verb.EXPLAIN: "Explain",
    Verb.STATUS: "Status",
    Verb.LIST: "ListNamespaces",
    Verb.SHOW: "ShowNamespace",
    Verb.DIFF: "DiffNamespaces",
    Verb.DROP: "DropNamespace",
    Verb.PIN: "Pin",
    Verb.UNPIN: "Unpin",
    Verb.TTL: "SetTtl",
}
PUT, GET = "Put", "Get"  # the two that carry bytes: the Unix transport has reserve and seal, lease and release instead

MAX_MESSAGE = 4 * 2**20  # bytes, either way: gRPC's own default, so that a client of any language can read every answer
MAX_DETAILS = 1024  # characters of an error's message: it travels as HTTP/2 trailers, of which peers take 8 KiB
PING = 30.0  # seconds between a client's pings on a quiet connection; the server accepts three times as many
_PING_PATIENCE = 10.0
_DATA, _MESSAGE = b"\x0a", b"\x12"  # tags of Chunk's fields 1 and 2, both with a length
_LENGTH_DIGITS = 5  # bytes of the number that says it

# One table, both ways. Going back, the first error of a code is the one that is raised.
STATUS: dict[type[KvtierError], grpc.StatusCode] = {
    Invalid: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Denied: grpc.StatusCode.PERMISSION_DENIED,
    NotFound: grpc.StatusCode.NOT_FOUND,
    Full: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Deadline: grpc.StatusCode.DEADLINE_EXCEEDED,
    Stale: grpc.StatusCode.FAILED_PRECONDITION,
    Lost: grpc.StatusCode.DATA_LOSS,
    KvtierError: grpc.StatusCode.INTERNAL,
}
# What gRPC itself and things between the two ends may answer.
_FOREIGN: dict[grpc.StatusCode, type[KvtierError]] = {
    grpc.StatusCode.CANCELLED: Unavailable,  # cut: a call stood still too long, or the daemon stops
    grpc.StatusCode.ABORTED: Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: NotFound,  # a daemon older than this client
}
_ERRORS = {code: kind for kind, code in STATUS.items()} | _FOREIGN


def status_of(error: KvtierError) -> tuple[grpc.StatusCode, str]:
    """The status that carries an error, and its details."""
    kind = next(cls for cls in type(error).__mro__ if cls in STATUS)
    return STATUS[kind], str(error)[:MAX_DETAILS]


def error_of(code: grpc.StatusCode, details: str) -> KvtierError:
    """The error that a status stands for."""
    return _ERRORS.get(code, KvtierError)(details)


def data_chunk(piece: bytes | memoryview) -> bytes:
    """A Chunk with this piece as its data: one copy."""
    return b"".join((_DATA, write_varint(len(piece)), piece))


def message_chunk(message: Message) -> bytes:
    """A Chunk with this message inside."""
    raw = message.SerializeToString()
    return b"".join((_MESSAGE, write_varint(len(raw)), raw))


def open_chunk(raw: bytes) -> tuple[bool, memoryview]:
    """(whether it is a message, its bytes without a copy).

    Raises Invalid for what is no Chunk, or one that holds nothing.
    """
    tag = raw[:1]
    if tag in (_DATA, _MESSAGE):
        length, at = read_varint(raw, 1, _LENGTH_DIGITS)
        if length >= 0 and at + length == len(raw):
            return tag == _MESSAGE, memoryview(raw)[at:]
    try:  # unusual, but perhaps still a Chunk: unknown fields, a length with more digits than it needs
        chunk = pb.Chunk.FromString(raw)
    except DecodeError:
        raise Invalid("a stream of bytes consists of Chunk messages") from None
    kind = chunk.WhichOneof("kind")
    if kind is None:
        raise Invalid("a Chunk holds data or a message; this one holds nothing")
    return kind == "message", memoryview(getattr(chunk, kind))


def server_options(ping: float = PING) -> list[tuple[str, int]]:
    """Channel arguments of the server. `ping` as the clients have it."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE),
        ("grpc.max_send_message_length", MAX_MESSAGE),
        ("grpc.max_metadata_size", 8192),
        ("grpc.max_concurrent_streams", 64),  # of one connection
        ("grpc.so_reuseport", 0),  # a second daemon on the port is an error, not a share of the calls
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", int(ping * 1000 / 3)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_time_ms", int(ping * 1000)),  # ours, to find peers that vanished without a word
        ("grpc.keepalive_timeout_ms", int(_PING_PATIENCE * 1000)),
    ]


def client_options(ping: float = PING) -> list[tuple[str, int]]:
    """Channel arguments of our client, which agree with `server_options` of the same `ping`."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE),
        ("grpc.max_send_message_length", MAX_MESSAGE),
        ("grpc.keepalive_time_ms", int(ping * 1000)),
        ("grpc.keepalive_timeout_ms", int(_PING_PATIENCE * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),  # an idle connection stays known to what lies between
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),  # gRPC doubles this with jitter
        ("grpc.min_reconnect_backoff_ms", 1000),  # an attempt without an answer lasts this long
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_retries", 0),  # we say ourselves what is asked again
        ("grpc.enable_http_proxy", 0),  # a proxy leads out of the cluster; the store is inside
        ("grpc.use_local_subchannel_pool", 1),  # one connection a client, which ends with it
        ("grpc.service_config_disable_resolution", 1),
    ]
