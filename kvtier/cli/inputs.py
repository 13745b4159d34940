"""What commands are given, made into what the client takes: a namespace, content hashes, a range, a request context,
files of bodies.

Files are read whole or in pieces, never executed or mapped; each has a limit. Everything wrong raises Invalid with what
to write instead."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

from kvtier.client.api import Client
from kvtier.errors import Invalid
from kvtier.format.files import read_description, read_file
from kvtier.format.identity import CHAIN, NO_CONTEXT, Description, chain_hashes, request_context

MAX_LIST_BYTES = 256 * 2**20  # of a file of hashes or of token ids
MAX_SALT_BYTES = 64 * 1024
_HEX = re.compile(r"[0-9a-f]+")
_NUMBER = re.compile(r"\d+", re.ASCII)
_PAIR = re.compile(r"(\d+):(\d+(?:\.\d+)?)", re.ASCII)
_DURATION = re.compile(r"(\d{1,9})([smhd])", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

# Options that several commands have.
Exclude = Annotated[str, Option("--exclude", help="Layers that stay native, e.g. 0,1,31.")]
BlockSize = Annotated[int, Option("--block-size", min=1, max=65536, help="Tokens of an engine block.")]
EngineBlocks = Annotated[int, Option("--engine-blocks", min=1, max=4096, help="Engine blocks in a kvtier block.")]
Revision = Annotated[str, Option("--revision", help="The model's revision. [default: told from the files]")]


def description_of(name: str, client: Client, deadline: float) -> Description:
    """The description a NAMESPACE argument means: a JSON file, or the beginning of a digest the daemon knows."""
    if is_file(name):
        return read_description(Path(name))
    return Description.from_json(client.show(name, deadline=deadline)[1])


def is_file(name: str) -> bool:
    """Whether a NAMESPACE argument means a file and not a digest."""
    return name.endswith(".json") or os.sep in name or os.path.exists(name)


def duration(text: str) -> int:
    """Seconds of a time such as 90s, 30m, 24h or 7d; 0 for `off`."""
    match = _DURATION.fullmatch(text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds < 2**32 and text != "off":
        raise Invalid(f"{text!r:.80} is not a time: write a number and s, m, h or d, such as 24h, or off")
    return seconds


def duration_text(seconds: int) -> str:
    """The same back, in the largest unit that says it exactly."""
    unit = next((unit for unit, n in reversed(_UNITS.items()) if seconds and not seconds % n), "")
    return f"{seconds // _UNITS[unit]}{unit}" if unit else "off"


def hashes_of(
    description: Description, group: int, given: Sequence[str], hashes: Path | None, tokens: Path | None
) -> bytes:
    """Concatenated content hashes from exactly one of: hex digits, a file of them (one a line), a file of token ids."""
    if sum((bool(given), hashes is not None, tokens is not None)) != 1:
        ways = "--hash HEX (more than once, if you like), --hashes FILE or --tokens FILE"
        raise Invalid(f"say which blocks by one of {ways}")
    if tokens is not None:
        return b"".join(token_hashes(description, group, read_tokens(tokens)))
    lines = list(given)
    if hashes is not None:
        try:
            text = read_file(hashes, MAX_LIST_BYTES, pipes=True).decode("ascii")
        except UnicodeDecodeError:
            raise Invalid(f"{hashes} is not a list of hex digits, one hash a line") from None
        lines = [line for raw in text.splitlines() if (line := raw.partition("#")[0].strip())]
    nbytes = description.hashing.nbytes
    for place, line in enumerate(lines, 1):
        if not _HEX.fullmatch(line) or len(line) != 2 * nbytes:
            wanted = f"write {2 * nbytes} lower-case hex digits"
            raise Invalid(f"hash {place}: {line!r:.80} is not one of this namespace: {wanted}")
    return bytes.fromhex("".join(lines))


def read_tokens(path: Path) -> list[int]:
    """Token ids from a file: numbers between spaces, commas or line ends, with or without a JSON list's brackets."""
    try:
        text = read_file(path, MAX_LIST_BYTES, pipes=True).decode("ascii").strip()
    except UnicodeDecodeError:
        raise Invalid(f"{path} is not a list of token ids") from None
    words = text.removeprefix("[").removesuffix("]").replace(",", " ").split()
    wrong = next((word for word in words if not _NUMBER.fullmatch(word) or len(word) > 10), None)
    if wrong is not None or not words:
        raise Invalid(f"{path}: {wrong or ''!r:.80} is not a token id: write numbers between spaces or commas")
    return list(map(int, words))


def token_hashes(description: Description, group: int, tokens: Sequence[int]) -> list[bytes]:
    """Hashes of a prompt's whole blocks, by `identity.chain_hashes`; one of several engine blocks has its last hash."""
    scheme = description.hashing
    if scheme.algorithm != CHAIN or scheme.lookahead or scheme.nbytes != 32:
        made = f"hashes of this namespace are made by {scheme.algorithm!r}, which only its engine can do"
        raise Invalid(f"{made}: give them by --hash or --hashes")
    if not 0 <= group < len(description.layout.groups):
        raise Invalid(f"there is no group {group}; this namespace has {len(description.layout.groups)}")
    each, rest = divmod(description.layout.groups[group].tokens, scheme.block_tokens)
    if rest or not each:
        covers = f"a block of group {group} does not cover whole hash blocks of {scheme.block_tokens} tokens"
        raise Invalid(f"{covers}: give its hashes by --hash or --hashes")
    return chain_hashes(tokens, scheme.block_tokens, chain_seed(scheme.seed))[each - 1 :: each]


def chain_seed(text: str) -> bytes:
    """The bytes a chain starts from: 64 hex digits stand for 32 bytes, any other text for itself in UTF-8."""
    return bytes.fromhex(text) if len(text) == 64 and _HEX.fullmatch(text) else text.encode("utf-8", "surrogatepass")


def span(text: str, what: str) -> tuple[int, int | None]:
    """ "3:7", "3:" or ":" as a half-open range."""
    low, colon, high = text.partition(":")
    if not colon or not all(part == "" or (_NUMBER.fullmatch(part) and len(part) < 6) for part in (low, high)):
        raise Invalid(f"--{what} {text!r:.80} is not a range: write 0:8, or 4: for all from the fifth")
    return int(low or 0), int(high) if high else None


def context_of(context: str, adapter: str, salt_file: Path | None) -> bytes:
    """A request context: 64 hex digits, or of an adapter's digest and a salt in a file (no process list shows it)."""
    if context:
        if adapter or salt_file is not None:
            raise Invalid("--context is the whole context: leave --adapter and --salt-file out")
        if len(context) != 64 or not _HEX.fullmatch(context):
            raise Invalid("--context is 64 lower-case hex digits")
        return bytes.fromhex(context)
    if adapter and (len(adapter) % 2 or not _HEX.fullmatch(adapter)):
        raise Invalid("--adapter is the digest of the adapter's weights, in lower-case hex digits")
    salt = None
    if salt_file is not None:
        try:
            salt = read_file(salt_file, MAX_SALT_BYTES, pipes=True).decode()
        except UnicodeDecodeError:
            raise Invalid(f"{salt_file} is not UTF-8 text") from None
        salt = salt.removesuffix("\n")
    return request_context(bytes.fromhex(adapter) if adapter else None, salt) if adapter or salt else NO_CONTEXT


def file_bytes(path: Path) -> int:
    """The size of a regular file. Raises Invalid for anything else: bodies are counted before the first is sent."""
    try:
        found = path.stat()
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise Invalid(f"{path} is not a regular file")
    return found.st_size


def layers(text: str) -> list[int]:
    """Numbers of a list like "0,1,31". Raises Invalid."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if wrong := next((word for word in words if not (word.isascii() and word.isdigit() and len(word) < 12)), None):
        raise Invalid(f"{wrong!r:.80} is not a number: write 0,1,31")
    return [int(word) for word in words]


def pairs(text: str) -> list[tuple[float, float]]:
    """Pairs of a list like "4096:0.18,32768:1.6". Raises Invalid."""
    found = [_PAIR.fullmatch(word.strip()) for word in text.split(",")]
    if not all(found):
        raise Invalid(f"{text!r:.80} is not a list of pairs: write 4096:0.18,32768:1.6")
    return [(float(match[1]), float(match[2])) for match in found if match]
