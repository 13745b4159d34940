"""Commands about blocks: lookup, get, put, delete, pin, unpin.

Which blocks: a NAMESPACE (digest or description file) and content hashes, given in hex or made from token ids. Bytes:
one file that holds the bodies one after the other, in the order of the hashes, each exactly as long as the namespace's
layout says. Bodies move in pieces of a few MiB."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
from typer import Argument, Option

from kvtier.cli import output
from kvtier.cli.app import Common, command
from kvtier.cli.inputs import context_of, description_of, file_bytes, hashes_of, span
from kvtier.cli.output import Exit, message, size
from kvtier.client.api import Answer, Client, RegisteredNamespace
from kvtier.errors import Invalid
from kvtier.format.layout import Extents, Range
from kvtier.protocol.stops import Stop

PIECE = 8 * 2**20  # bytes of bodies moved at once, but at least one block
STDIO = Path("-")


@dataclass(frozen=True, slots=True)
class NamedBlocks:
    """The arguments that name blocks, the same for every command here."""

    namespace: Annotated[str, Argument(help="Beginning of a digest the daemon knows, or a description file (JSON).")]
    hash_: Annotated[list[str] | None, Option("--hash", help="A content hash in hex; may be repeated.")] = None
    hashes: Annotated[Path | None, Option("--hashes", help="File of content hashes in hex, one a line.")] = None
    tokens: Annotated[Path | None, Option("--tokens", help="File of token ids; hashed by the documented chain.")] = None
    group: Annotated[int, Option("--group", min=0, help="Layer group.")] = 0
    layers: Annotated[str, Option("--layers", help="Range of layers within the group, e.g. 0:16.")] = ":"
    heads: Annotated[str, Option("--heads", help="Range of KV heads, e.g. 0:8.")] = ":"
    context: Annotated[str, Option("--context", help="Request context, 64 hex digits.")] = ""
    adapter: Annotated[str, Option("--adapter", help="Digest of the adapter's weights, in hex.")] = ""
    salt_file: Annotated[Path | None, Option("--salt-file", help="File with the cache salt.")] = None


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """The blocks of one command."""

    ns: RegisteredNamespace
    hashes: bytes
    range_: Range
    context: bytes
    deadline: float

    def __len__(self) -> int:
        return len(self.hashes) // self.ns.hash_bytes

    @property
    def extents(self) -> Extents:
        return self.ns.extents(self.range_)

    def part(self, first: int, n: int) -> bytes:
        """The hashes from number `first`, up to `n` of them."""
        step = self.ns.hash_bytes
        return self.hashes[first * step : (first + n) * step]

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(first, number) of what is moved at once."""
        most = max(1, PIECE // self.extents.body_bytes)
        return ((first, min(most, len(self) - first)) for first in range(0, len(self), most))

    @property
    def options(self) -> dict[str, Any]:
        return {"range_": self.range_, "context": self.context, "deadline": self.deadline}


def _asked(client: Client, common: Common, named: NamedBlocks) -> BlockRequest:
    description = description_of(named.namespace, client, common.deadline)
    range_ = Range(named.group, span(named.layers, "layers"), span(named.heads, "heads"))
    raw = hashes_of(description, named.group, named.hash_ or [], named.hashes, named.tokens)
    if not raw:
        raise Invalid("there is no whole block in what was given: nothing to do")
    asked = BlockRequest(
        client.register(description),
        raw,
        range_,
        context_of(named.context, named.adapter, named.salt_file),
        common.deadline,
    )
    asked.ns.extents(range_)  # refuses a range outside the layout before anything is sent
    return asked


def _counted(
    common: Common, named: NamedBlocks, verb: Callable[[Client, BlockRequest], Answer], word: str
) -> tuple[int, Answer]:
    """A command that asks and counts: prints what it found. Returns (asked, answer)."""
    with common.connected() as client:
        asked = _asked(client, common, named)
        answer = verb(client, asked)
        if answer.error:
            _reachable(client, common)
    _tell(common, len(asked), word, int(answer), answer.reason)
    return len(asked), answer


def _tell(
    common: Common, asked: int, word: str, count: int, reason: str, body_bytes: int | None = None, aside: bool = False
) -> None:
    """Says how many of the blocks asked for were known, got, stored ...; `aside`: on stderr, stdout has the bodies."""
    data: dict[str, Any] = {"asked": asked, word: count, "reason": reason}
    moved = ""
    if body_bytes is not None:
        data |= {"body_bytes": body_bytes, "bytes": count * body_bytes}
        moved = f", {size(count * body_bytes)}"
    said = f"{word} {count} of {asked} blocks{moved}{f' ({reason})' if reason else ''}"
    if aside:
        message(said)
    else:
        output.result(data, common.json, lambda: print(said))


def _reachable(client: Client, common: Common) -> None:
    """Raises what a status call raises: a short answer may mean that the daemon went away meanwhile."""
    client.status(deadline=common.deadline)


@command()
def lookup(common: Common, named: NamedBlocks) -> Exit:
    """Ask how many leading blocks are known. Exit code 1 unless all are."""
    asked, known = _counted(common, named, lambda c, a: c.lookup(a.ns, a.hashes, **a.options), "known")
    return Exit.OK if known == asked else Exit.NEGATIVE


@command()
def delete(common: Common, named: NamedBlocks) -> Exit:
    """Forget blocks (role write). Exit code 1 if none was known, 4 if refused."""
    _, deleted = _counted(common, named, lambda c, a: c.delete(a.ns, a.hashes, **a.options), "deleted")
    if deleted.stop or deleted.error:
        message(deleted.reason)
        return Exit.REFUSED
    return Exit.OK if deleted else Exit.NEGATIVE


@command()
def pin(common: Common, named: NamedBlocks) -> Exit:
    """Keep the leading known blocks from eviction (role admin). Exit code 1 if one is not known, 4 beyond a tenth of
    the arena."""
    asked, pinned = _counted(common, named, lambda c, a: c.pin(a.ns, a.hashes, **a.options), "pinned")
    if pinned < asked and pinned.stop == Stop.CAP:
        return Exit.REFUSED
    return Exit.OK if pinned == asked else Exit.NEGATIVE


@command()
def unpin(common: Common, named: NamedBlocks) -> Exit:
    """End pins (role admin). Exit code 1 if none of these blocks was pinned."""
    _, freed = _counted(common, named, lambda c, a: c.unpin(a.ns, a.hashes, **a.options), "unpinned")
    return Exit.OK if freed else Exit.NEGATIVE


@command()
def get(
    common: Common,
    named: NamedBlocks,
    to: Annotated[Path, Option("--output", "-o", help="File for the bodies, one after the other; - is stdout.")],
) -> Exit:
    """Read the leading known blocks into a file. Exit code 1 unless all came; what came is written."""
    if to == STDIO and common.json:
        raise Invalid("--json and the bodies cannot both go to stdout: give --output a file")
    with common.connected() as client:
        asked = _asked(client, common, named)
        nbytes, came, reason = asked.extents.body_bytes, 0, ""
        with _sink(to) as sink, output.progress("get", len(asked) * nbytes) as moved:
            for first, n in asked.pieces():
                bodies = client.get(asked.ns, asked.part(first, n), **asked.options)
                for body in bodies:
                    sink.write(body)
                came += len(bodies)
                moved(len(bodies) * nbytes)
                if len(bodies) < n:
                    reason = bodies.reason
                    _reachable(client, common)
                    break
    _tell(common, len(asked), "got", came, reason, nbytes, aside=to == STDIO)
    return Exit.OK if came == len(asked) else Exit.NEGATIVE


@command()
def put(
    common: Common,
    named: NamedBlocks,
    source: Annotated[Path, Option("--input", "-i", help="File of the bodies, one after the other; - is stdin.")],
) -> Exit:
    """Store block bodies from a file (role write). Exit code 4 if the daemon did not take them all."""
    with common.connected() as client:
        asked = _asked(client, common, named)
        nbytes, stored, reason = asked.extents.body_bytes, 0, ""
        if source != STDIO and file_bytes(source) != len(asked) * nbytes:
            wanted = f"{len(asked)} bodies of {nbytes} are {len(asked) * nbytes}"
            raise Invalid(f"{source} has {file_bytes(source)} bytes; {wanted}")
        with _source(source) as file, output.progress("put", len(asked) * nbytes) as moved:
            for first, n in asked.pieces():
                raw = file.read(n * nbytes)
                if len(raw) != n * nbytes or (first + n == len(asked) and file.read(1)):
                    stop = f"{stored} blocks were stored before that was seen"
                    raise Invalid(f"{source} does not hold {len(asked)} bodies of {nbytes} bytes; {stop}")
                bodies = np.frombuffer(raw, np.uint8).reshape(n, nbytes)
                answer = client.put(asked.ns, asked.part(first, n), list(bodies), **asked.options)
                stored += answer
                moved(int(answer) * nbytes)
                if answer < n:
                    reason = answer.reason
                    _reachable(client, common)
                    break
    _tell(common, len(asked), "stored", stored, reason, nbytes)
    return Exit.OK if stored == len(asked) else Exit.REFUSED


@contextmanager
def _sink(path: Path) -> Iterator[BinaryIO]:
    """Where bodies go: a file that appears whole or not at all, or stdout."""
    if path == STDIO:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with aside.open("xb") as file:
            yield file
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def _source(path: Path) -> Iterator[BinaryIO]:
    if path == STDIO:
        yield sys.stdin.buffer
        return
    with path.open("rb") as file:
        yield file
