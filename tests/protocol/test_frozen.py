"""What stands on the wire for ever: numbers and types of fields, verbs, codes and methods, written out. Programs of
other versions rely on every one. A new one is added here; none is changed, and a number that is gone is not used again.
"""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor

from kvtier.errors import BY_CODE
from kvtier.protocol import rpc
from kvtier.protocol.frames import HEADER, MAGIC, QUIET, VERSION, Verb
from kvtier.protocol.stops import Stop
from kvtier.protocol.v1 import kvtier_pb2 as pb

MESSAGES = {
    "Chunk": "1 bytes data, 2 bytes message",
    "Count": "1 uint64 n, 2 Stop stop",
    "DiffRequest": "1 string stored, 2 string live",
    "DropRequest": "1 string name",
    "ExplainReply": "1 repeated string line, 2 bytes nearest",
    "ExplainRequest": "1 bytes description",
    "GetReply": "1 uint64 nbytes",
    "GetTrailer": "1 repeated fixed64 checksum, 2 Stop stop",
    "Held": "1 uint64 id, 2 repeated uint32 index",
    "HelloReply": "1 bytes session, 2 uint64 arena_bytes, 3 uint64 ready_bytes, 4 string tenant, 5 string role, "
    "6 string server",
    "HelloRequest": "1 uint32 protocol, 2 bytes session, 3 bool map, 4 repeated bytes drained",
    "Keys": "1 uint32 handle, 2 uint32 group, 3 uint32 layer_lo, 4 uint32 layer_hi, 5 uint32 head_lo, "
    "6 uint32 head_hi, "
    "7 bytes context, 8 bytes hashes, 9 uint64 id, 10 uint64 nbytes, 11 fixed64 boot, 12 uint32 wait_ms",
    "ListReply": "1 repeated NamespaceInfo namespace",
    "ListRequest": "",
    "LookupReply": "1 repeated uint32 known, 2 repeated uint32 warm, 3 repeated bytes bitmap, 4 bool later",
    "LookupRequest": "1 uint32 handle, 2 bytes context, 3 repeated Run run, 4 bool bitmap, 5 fixed64 boot",
    "NamespaceInfo": "1 bytes namespace, 2 bytes description, 3 string tenant, 4 string model, 5 string revision, "
    "6 uint64 blocks, 7 uint64 bytes, 8 uint32 ttl",
    "PutReply": "1 uint64 known, 2 string reason, 3 uint32 error",
    "PutRequest": "1 Keys keys, 2 repeated fixed64 checksum",
    "RegisterReply": "1 uint32 handle, 2 bytes namespace, 3 bytes description, 4 fixed64 boot",
    "RegisterRequest": "1 bytes description",
    "Run": "1 uint32 group, 2 uint32 layer_lo, 3 uint32 layer_hi, 4 uint32 head_lo, 5 uint32 head_hi, 6 bytes hashes",
    "ShowReply": "1 NamespaceInfo info, 2 bytes description",
    "ShowRequest": "1 string name",
    "Slots": "1 repeated uint64 offset, 2 Stop stop",
    "StatusReply": "1 string json",
    "StatusRequest": "1 bool check_integrity",
    "TtlRequest": "1 string name, 2 uint32 seconds",
}
STOPS = {"END": 0, "MISS": 1, "COLD": 2, "CAP": 3, "NO_TIER": 4}
VERBS = {
    "HELLO": 1, "REGISTER": 2, "LOOKUP": 3, "PREFETCH": 4, "RESERVE": 5, "SEAL": 6, "ABORT": 7, "LEASE": 8,
    "RELEASE": 9, "FLUSH": 10, "DELETE": 11, "EXPLAIN": 12, "STATUS": 13, "LIST": 14, "SHOW": 15, "DIFF": 16,
    "DROP": 17, "PIN": 18, "UNPIN": 19, "TTL": 20,
}  # fmt: skip
ERRORS = {
    "KvtierError": 1, "Invalid": 2, "Denied": 3, "NotFound": 4, "Full": 5, "Unavailable": 6, "Deadline": 7, "Stale": 8,
    "Lost": 9, "Unauthenticated": 10,
}  # fmt: skip
METHODS = {
    "Register": ("RegisterRequest", "RegisterReply"),
    "Lookup": ("LookupRequest", "LookupReply"),
    "Prefetch": ("Keys", "Count"),
    "Flush": ("Keys", "Count"),
    "Delete": ("Keys", "Count"),
    "Put": ("stream Chunk", "PutReply"),
    "Get": ("Keys", "stream Chunk"),
    "Explain": ("ExplainRequest", "ExplainReply"),
    "Status": ("StatusRequest", "StatusReply"),
    "ListNamespaces": ("ListRequest", "ListReply"),
    "ShowNamespace": ("ShowRequest", "ShowReply"),
    "DiffNamespaces": ("DiffRequest", "ExplainReply"),
    "DropNamespace": ("DropRequest", "Count"),
    "Pin": ("Keys", "Count"),
    "Unpin": ("Keys", "Count"),
    "SetTtl": ("TtlRequest", "NamespaceInfo"),
}
TYPES = {value: name[5:].lower() for name, value in vars(FieldDescriptor).items() if name.startswith("TYPE_")}


def field(one: FieldDescriptor) -> str:
    named = one.message_type or one.enum_type
    kind = named.name if named is not None else TYPES[one.type]
    return f"{one.number} {'repeated ' if one.is_repeated else ''}{kind} {one.name}"


def test_fields_have_their_numbers_and_types() -> None:
    found = {
        name: ", ".join(field(one) for one in sorted(message.fields, key=lambda one: one.number))
        for name, message in pb.DESCRIPTOR.message_types_by_name.items()
    }
    assert found == MESSAGES


def test_codes_have_their_numbers() -> None:
    assert {stop.name: stop.value for stop in Stop} == dict(pb.Stop.items()) == STOPS
    assert {verb.name: verb.value for verb in Verb} == VERBS and QUIET == 0x80
    assert {kind.__name__: code for code, kind in BY_CODE.items()} == ERRORS
    assert (HEADER.format, HEADER.size, MAGIC, VERSION) == ("<HBBIQQ", 24, 0x764B, 1)


def test_methods_have_their_names_and_messages() -> None:
    (service,) = pb.DESCRIPTOR.services_by_name.values()

    def side(stream: bool, message: str) -> str:
        return f"stream {message}" if stream else message

    found = {
        one.name: (side(one.client_streaming, one.input_type.name), side(one.server_streaming, one.output_type.name))
        for one in service.methods
    }
    assert service.full_name == rpc.SERVICE == "kvtier.v1.Kvtier" and found == METHODS
    assert {*rpc.METHODS.values(), rpc.PUT, rpc.GET} == METHODS.keys()
