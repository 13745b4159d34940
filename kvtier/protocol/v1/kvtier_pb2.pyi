from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Stop(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END: _ClassVar[Stop]
    MISS: _ClassVar[Stop]
    COLD: _ClassVar[Stop]
    CAP: _ClassVar[Stop]
    NO_TIER: _ClassVar[Stop]
END: Stop
MISS: Stop
COLD: Stop
CAP: Stop
NO_TIER: Stop

class HelloRequest(_message.Message):
    __slots__ = ("protocol", "session", "map", "drained")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    session: bytes
    map: bool
    drained: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, protocol: _Optional[int] = ..., session: _Optional[bytes] = ..., map: bool = ..., drained: _Optional[_Iterable[bytes]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("session", "arena_bytes", "ready_bytes", "tenant", "role", "server")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    READY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    arena_bytes: int
    ready_bytes: int
    tenant: str
    role: str
    server: str
    def __init__(self, session: _Optional[bytes] = ..., arena_bytes: _Optional[int] = ..., ready_bytes: _Optional[int] = ..., tenant: _Optional[str] = ..., role: _Optional[str] = ..., server: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("description",)
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    description: bytes
    def __init__(self, description: _Optional[bytes] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("handle", "namespace", "description", "boot")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    namespace: bytes
    description: bytes
    boot: int
    def __init__(self, handle: _Optional[int] = ..., namespace: _Optional[bytes] = ..., description: _Optional[bytes] = ..., boot: _Optional[int] = ...) -> None: ...

class Keys(_message.Message):
    __slots__ = ("handle", "group", "layer_lo", "layer_hi", "head_lo", "head_hi", "context", "hashes", "id", "nbytes", "boot", "wait_ms")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LAYER_LO_FIELD_NUMBER: _ClassVar[int]
    LAYER_HI_FIELD_NUMBER: _ClassVar[int]
    HEAD_LO_FIELD_NUMBER: _ClassVar[int]
    HEAD_HI_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    group: int
    layer_lo: int
    layer_hi: int
    head_lo: int
    head_hi: int
    context: bytes
    hashes: bytes
    id: int
    nbytes: int
    boot: int
    wait_ms: int
    def __init__(self, handle: _Optional[int] = ..., group: _Optional[int] = ..., layer_lo: _Optional[int] = ..., layer_hi: _Optional[int] = ..., head_lo: _Optional[int] = ..., head_hi: _Optional[int] = ..., context: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., id: _Optional[int] = ..., nbytes: _Optional[int] = ..., boot: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class Slots(_message.Message):
    __slots__ = ("offset", "stop")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    offset: _containers.RepeatedScalarFieldContainer[int]
    stop: Stop
    def __init__(self, offset: _Optional[_Iterable[int]] = ..., stop: _Optional[_Union[Stop, str]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("id", "index")
    ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    id: int
    index: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., index: _Optional[_Iterable[int]] = ...) -> None: ...

class Count(_message.Message):
    __slots__ = ("n", "stop")
    N_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    n: int
    stop: Stop
    def __init__(self, n: _Optional[int] = ..., stop: _Optional[_Union[Stop, str]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("group", "layer_lo", "layer_hi", "head_lo", "head_hi", "hashes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LAYER_LO_FIELD_NUMBER: _ClassVar[int]
    LAYER_HI_FIELD_NUMBER: _ClassVar[int]
    HEAD_LO_FIELD_NUMBER: _ClassVar[int]
    HEAD_HI_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    group: int
    layer_lo: int
    layer_hi: int
    head_lo: int
    head_hi: int
    hashes: bytes
    def __init__(self, group: _Optional[int] = ..., layer_lo: _Optional[int] = ..., layer_hi: _Optional[int] = ..., head_lo: _Optional[int] = ..., head_hi: _Optional[int] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("handle", "context", "run", "bitmap", "boot")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    context: bytes
    run: _containers.RepeatedCompositeFieldContainer[Run]
    bitmap: bool
    boot: int
    def __init__(self, handle: _Optional[int] = ..., context: _Optional[bytes] = ..., run: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., bitmap: bool = ..., boot: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("known", "warm", "bitmap", "later")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    known: _containers.RepeatedScalarFieldContainer[int]
    warm: _containers.RepeatedScalarFieldContainer[int]
    bitmap: _containers.RepeatedScalarFieldContainer[bytes]
    later: bool
    def __init__(self, known: _Optional[_Iterable[int]] = ..., warm: _Optional[_Iterable[int]] = ..., bitmap: _Optional[_Iterable[bytes]] = ..., later: bool = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("description",)
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    description: bytes
    def __init__(self, description: _Optional[bytes] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("line", "nearest")
    LINE_FIELD_NUMBER: _ClassVar[int]
    NEAREST_FIELD_NUMBER: _ClassVar[int]
    line: _containers.RepeatedScalarFieldContainer[str]
    nearest: bytes
    def __init__(self, line: _Optional[_Iterable[str]] = ..., nearest: _Optional[bytes] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("check_integrity",)
    CHECK_INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    check_integrity: bool
    def __init__(self, check_integrity: bool = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data", "message")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    message: bytes
    def __init__(self, data: _Optional[bytes] = ..., message: _Optional[bytes] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("keys", "checksum")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    keys: Keys
    checksum: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, keys: _Optional[_Union[Keys, _Mapping]] = ..., checksum: _Optional[_Iterable[int]] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("known", "reason", "error")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    known: int
    reason: str
    error: int
    def __init__(self, known: _Optional[int] = ..., reason: _Optional[str] = ..., error: _Optional[int] = ...) -> None: ...

class GetReply(_message.Message):
    __slots__ = ("nbytes",)
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    def __init__(self, nbytes: _Optional[int] = ...) -> None: ...

class GetTrailer(_message.Message):
    __slots__ = ("checksum", "stop")
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    checksum: _containers.RepeatedScalarFieldContainer[int]
    stop: Stop
    def __init__(self, checksum: _Optional[_Iterable[int]] = ..., stop: _Optional[_Union[Stop, str]] = ...) -> None: ...

class NamespaceInfo(_message.Message):
    __slots__ = ("namespace", "description", "tenant", "model", "revision", "blocks", "bytes", "ttl")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    description: bytes
    tenant: str
    model: str
    revision: str
    blocks: int
    bytes: int
    ttl: int
    def __init__(self, namespace: _Optional[bytes] = ..., description: _Optional[bytes] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., ttl: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    def __init__(self, namespace: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ...) -> None: ...

class ShowRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ShowReply(_message.Message):
    __slots__ = ("info", "description")
    INFO_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    info: NamespaceInfo
    description: bytes
    def __init__(self, info: _Optional[_Union[NamespaceInfo, _Mapping]] = ..., description: _Optional[bytes] = ...) -> None: ...

class DiffRequest(_message.Message):
    __slots__ = ("stored", "live")
    STORED_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    stored: str
    live: str
    def __init__(self, stored: _Optional[str] = ..., live: _Optional[str] = ...) -> None: ...

class DropRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class TtlRequest(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: int
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[int] = ...) -> None: ...
