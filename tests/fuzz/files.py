"""Targets that read a file or a request's head: block headers, artifacts, descriptions, settings, tokens, HTTP."""

from __future__ import annotations

import json
import os
import random
import struct
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from kvtier.errors import Invalid, Lost, Unauthenticated
from kvtier.format import artifact
from kvtier.format.block import HEADER_BYTES, header_template, headers, parse_header, verify
from kvtier.format.identity import CHAIN, Description, HashScheme, diff, parse_description
from kvtier.format.layout import Range, attention, opaque
from kvtier.server.access import Tokens, issue
from kvtier.server.http import Endpoint, Page
from kvtier.server.settings import Listen, from_values, parse_toml
from tests.fuzz.target import Broken, Target, answered

HASHES = HashScheme(CHAIN, "0", 16)
MEMORY = (
    "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
)  # a disk would flush each small file that is written anew


def descriptions() -> list[Description]:
    """One of each kind: opaque, native, quantized with static scales."""
    scaled = attention(2, 2, 16, engine_tokens=16, dtype="e4m3fn", granularity="head")
    scales = {f"{layer}.{part}": "3f8000003f000000" for layer in range(2) for part in ("k", "v")}
    return [
        Description("org/m", "1" * 40, opaque(64, "ab" * 32, engine_tokens=16), HASHES),
        Description(
            "org/native",
            "2" * 64,
            attention(3, 4, 8, engine_tokens=16, dtype="bf16", excluded=(1,)),
            HASHES,
            rope={"theta": "40c3880000000000"},
        ),
        Description("org/fp8", f"fingerprint:{'3' * 64}", scaled, HASHES, "4" * 64, "static", 1, scales),
    ]


class Headers(Target):
    """The first 256 bytes of a block, as a tier gives them back."""

    name = "header"
    weight = 20
    words = (b"KVTIER\r\n", bytes(32))

    def first_seeds(self) -> Sequence[bytes]:
        found = []
        for description in descriptions():
            extents = description.layout.extents(Range())
            resolved = description.layout.resolve(Range())
            template = header_template(description.digest, resolved, bytes(32), extents, 32)
            block = headers(template, [b"k" * 32], [b"h" * 32]).tobytes()
            found.append(block + bytes(extents.body_bytes))
        return found

    def run(self, data: bytes) -> str:
        said = answered(lambda: parse_header(data), Lost)
        if said == "taken":
            header = parse_header(data)
            ours = answered(lambda: verify(data, header.key), Lost)
            if (ours == "taken") != (header.nbytes == len(data)):
                raise Broken("a block of another length passes, or one of its own does not")
            if answered(lambda: verify(data, bytes(32)), Lost) == "taken" and header.key != bytes(32):
                raise Broken("a block passes as that of another key")
            if header.nbytes <= HEADER_BYTES:
                raise Broken("a block without a body")
        return said


class Artifacts(Target):
    """The two files of an artifact: u32 length of the manifest, manifest, safetensors file."""

    name = "artifact"
    weight = 5
    words = (b"F32", b'"dtype"', b"data_offsets", b"layers.0.k_scale", b"static", b"shape", b"__metadata__")

    def __init__(self) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="kvtier-fuzz-", dir=MEMORY)
        self._directory = Path(self._own.name)

    def first_seeds(self) -> Sequence[bytes]:
        found = []
        for granularity, heads in (("head", 2), ("tensor", 1)):
            scales = {
                (layer, part): np.full(heads, 0.5 + layer, np.float32) for layer in range(2) for part in ("k", "v")
            }
            parts = {part: artifact.PartFormat("e4m3fn", granularity) for part in ("k", "v")}
            made = artifact.Artifact("org/m", "1" * 40, parts, "static", 1, "plain", "none", scales)
            with tempfile.TemporaryDirectory() as directory:
                made.save(Path(directory) / "a")
                manifest, weights = (
                    (Path(directory) / "a" / name).read_bytes() for name in (artifact.MANIFEST, artifact.SCALES)
                )
            found.append(struct.pack("<I", len(manifest)) + manifest + weights)
        return found

    def run(self, data: bytes) -> str:
        cut = 4 + (struct.unpack_from("<I", data)[0] if len(data) >= 4 else 0)
        manifest = data[4:cut]
        (self._directory / artifact.MANIFEST).write_bytes(manifest)
        (self._directory / artifact.SCALES).write_bytes(data[cut:])
        said = answered(lambda: artifact.load(self._directory), Invalid)
        if said == "taken":
            loaded = artifact.load(self._directory)
            if loaded.canonical != manifest or not all(np.isfinite(values).all() for values in loaded.scales.values()):
                raise Broken("an artifact that `save` would not have written was taken")
        return said

    def close(self) -> None:
        self._own.cleanup()


class Descriptions(Target):
    """What a client registers."""

    name = "description"
    weight = 5
    words = tuple(
        json.dumps(word).encode()
        for word in ("layout", "groups", "parts", "hash", "seed", "scales", "rope", "e4m3fn", "bf16", "opaque", "none")
    )

    def first_seeds(self) -> Sequence[bytes]:
        return [description.canonical for description in descriptions()]

    def make(self, rng: random.Random) -> bytes | None:
        """A description with one value exchanged, in canonical form."""
        data = json.loads(rng.choice(self.first_seeds()))
        place: object = data
        for _ in range(8):
            if isinstance(place, dict) and place:
                key: object = rng.choice(list(place))
            elif isinstance(place, list) and place:
                key = rng.randrange(len(place))
            else:
                break
            if rng.random() < 0.4 or not isinstance(place[key], dict | list):  # type: ignore[index]
                place[key] = rng.choice(
                    (
                        0,
                        1,
                        -1,
                        65536,
                        2**40,
                        None,
                        True,
                        "",
                        "x",
                        "e4m3fn",
                        "a" * 2000,
                        [],
                        {},
                        [0],
                        {"x": 1},
                        1.5,
                        "\ud800",
                        "..\x00",
                    )
                )  # type: ignore[index]
                break
            place = place[key]  # type: ignore[index]
        return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()

    def run(self, data: bytes) -> str:
        said = answered(lambda: parse_description(data), Invalid)
        if said == "taken":
            made = parse_description(data)
            if made.canonical != data or Description.from_json(made.to_json()).digest != made.digest:
                raise Broken("a description that reads back as another")
            extents = made.layout.extents(Range())
            if not 0 < extents.body_bytes < 2**40:
                raise Broken("a layout without a size")
            for other in descriptions():
                if bool(diff(other, made)) == (other.digest == made.digest):
                    raise Broken("a difference that is none, or none where there is one")
        return said


class Settings(Target):
    """The daemon's TOML file."""

    name = "config"
    weight = 10
    words = (
        b"arena_bytes",
        b"users",
        b"grpc",
        b"metrics",
        b"socket_mode",
        b' = "',
        b" = [",
        b"uid:",
        b"unix:",
        b"127.0.0.1:",
        b"GiB",
        b"'''",
        b"0x",
        b"inf",
        b"1979-05-27",
    )

    def first_seeds(self) -> Sequence[bytes]:
        return [
            b'arena_bytes = "64MiB"\nsocket_mode = "660"\nmetrics = 9464\n',
            b'socket = "/tmp/kvtier-fuzz.sock"\narena_bytes = 8388608\n'
            b'users = ["uid:1000 engines write", "any guests read"]\n',
            b'grpc = ["unix:/tmp/a.sock", "127.0.0.1:50051"]\ntoken_file = "/nowhere"\n'
            b'tls_cert = "/c"\ntls_key = "/k"\ntls_client_ca = "/a"\n',
        ]

    def run(self, data: bytes) -> str:
        def read() -> None:
            values = parse_toml(data, "fuzz")
            values.setdefault("socket", "/tmp/kvtier-fuzz.sock")
            values.setdefault("arena_bytes", "8MiB")
            made = from_values({name: (name, value) for name, value in values.items()})
            if any(listen.path is None for listen in made.grpc) and made.token_file is None:
                raise Broken("a TCP listener without tokens")

        return answered(read, Invalid)


class TokenFiles(Target):
    """The token file, and the header that a stranger sends: file, a NUL, header."""

    name = "tokens"
    weight = 5
    words = (b"sha256:", b" admin ", b" read ", b"#", b"Bearer ", b"\n")

    def __init__(self) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="kvtier-fuzz-", dir=MEMORY)
        self._path = Path(self._own.name) / "tokens"
        self._path.touch(0o600)
        self._secret = issue("mine", "tenant", "admin")

    def first_seeds(self) -> Sequence[bytes]:
        token = "0123456789abcdef" * 4
        line = f"alice team write sha256:{sha256(token.encode()).hexdigest()}"
        return [
            f"# tokens\n{line}\nbob team read sha256:{'7' * 64}\n\0Bearer {token}".encode(),
            f"{line}\n\0bearer  {token} ".encode(),
        ]

    def run(self, data: bytes) -> str:
        text, _, header = data.partition(b"\0")
        self._path.write_bytes(text + b"\n" + self._secret[1].encode() + b"\n")

        def read() -> None:
            tokens = Tokens(self._path)
            if tokens.check(f"Bearer {self._secret[0]}", "fuzz").name != "mine":
                raise Broken("a token is another's")
            if tokens.check(header.decode("utf-8", "surrogateescape"), "fuzz").name == "mine":
                raise Broken("somebody guessed a token")

        return answered(read, Invalid, Unauthenticated)

    def close(self) -> None:
        self._own.cleanup()


class Http(Target):
    """The head of a request to the metrics endpoint."""

    name = "http"
    weight = 10
    words = (
        b"GET ",
        b"HEAD ",
        b" HTTP/1.1\r\n",
        b"Authorization: Bearer ",
        b"/metrics",
        b"/live",
        b"\r\n\r\n",
        b"Content-Length: 9\r\n",
    )

    def __init__(self) -> None:
        pages = {"/metrics": (True, lambda: Page(200, b"kvtier 1\n")), "/live": (False, lambda: Page(200, b"live\n"))}
        self._endpoint = Endpoint(Listen(host="127.0.0.1"), pages, lambda header: header == "Bearer 0123456789")

    def first_seeds(self) -> Sequence[bytes]:
        return [
            b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer 0123456789\r\n\r\n",
            b"GET /live?x=1 HTTP/1.0\r\n\r\n",
            b"HEAD /metrics HTTP/1.1\r\nAccept: text/plain\r\n\r\n",
        ]

    def run(self, data: bytes) -> str:
        said = self._endpoint.answer(data)
        status = said.split(b" ", 2)[1].decode()
        if not said.startswith(b"HTTP/1.1 ") or b"\r\n\r\n" not in said or status == "500":
            raise Broken(f"an answer that is none: {said[:80]!r}")
        if b"kvtier 1" in said and b"0123456789" not in data:
            raise Broken("a page without its token")
        return status

    def check(self) -> None:
        if not self._endpoint.alive():
            raise Broken("the endpoint has died")

    def close(self) -> None:
        self._endpoint.close()
