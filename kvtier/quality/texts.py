"""Texts to calibrate and evaluate on: files of named strata, cut into pieces of tokens that are spread over each text.

A stratum is a kind of use (chat, code, tables ...): scales must fit all of them, and what one needs more than the
others should be seen. Files are read whole, up to a limit; nothing is downloaded. The built-in text is on every
machine: the help topics inside CPython (`pydoc_data.topics`), split in two halves that share no paragraph. It differs a
little between Python versions, so figures made with it do too: state the version beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from kvtier.errors import Invalid
from kvtier.format.files import read_file
from kvtier.format.identity import check_text

MAX_FILE_BYTES = 256 * 2**20
BUILT_IN = "manual"  # stratum of the text that is on every machine: CPython's help topics

Encode = Callable[[str], list[int]]

# One bit of a hash of the topic's name says which half it is in, so a topic keeps its half when others come and go.
_CALIBRATION, _EVALUATION = 0, 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One piece of text of one stratum, as token ids."""

    stratum: str
    tokens: tuple[int, ...]


def calibration_text() -> str:
    """What scales are calibrated on. Topics quote each other at length: paragraphs that `evaluation_text` has, too, are
    left out.
    """
    seen = {_words(paragraph) for paragraph in _paragraphs(_EVALUATION)}
    return "\n\n".join(paragraph for paragraph in _paragraphs(_CALIBRATION) if _words(paragraph) not in seen)


def evaluation_text() -> str:
    """What everything is measured on."""
    return "\n\n".join(_paragraphs(_EVALUATION))


def _paragraphs(half: int) -> Iterator[str]:
    for name, text in sorted(topics.items()):
        if blake2b(name.encode()).digest()[0] & 1 == half:
            yield from text.split("\n\n")


def _words(paragraph: str) -> str:
    return " ".join(paragraph.split())


def read(sources: Sequence[str], encode: Encode, length: int, number: int, *, evaluation: bool = False) -> list[Sample]:
    """Pieces of `length` tokens from "stratum=FILE" sources, `number` of each stratum; the built-in text where there
    are no sources.

    FILE is .jsonl (a line is {"text": ...} or {"tokens": [...]}, with its own "stratum" if it likes), .tokens (ids
    between spaces) or plain text. The lines of a .jsonl are documents of their own, never joined: one longer than
    `length` is cut, a shorter one stays short. Raises Invalid for a stratum without a piece."""
    documents: dict[str, list[list[int]]] = {}
    if not sources:
        documents[BUILT_IN] = [encode(evaluation_text() if evaluation else calibration_text())]
    for source in sources:
        stratum, equals, name = source.partition("=")
        if not equals or not stratum or not name:
            raise Invalid(f"{source!r:.200}: write stratum=FILE, e.g. chat=dialogs.jsonl")
        for own, tokens in _documents(Path(name), stratum, encode):
            documents.setdefault(own, []).append(tokens)
    samples = []
    for stratum, found in documents.items():
        pieces = _pieces(found, length, number)
        if not pieces:
            raise Invalid(f"stratum {stratum} has no piece of 2 tokens or more")
        samples += [Sample(stratum, tuple(piece)) for piece in pieces]
    return samples


def digest(samples: Iterable[Sample]) -> str:
    """64 hex digits over the samples, in their order: names calibration data."""
    hasher = blake2b(digest_size=32)
    for sample in samples:
        name, tokens = sample.stratum.encode(), np.array(sample.tokens, "<u4").tobytes()
        hasher.update(len(name).to_bytes(8, "little") + name + len(tokens).to_bytes(8, "little") + tokens)
    return hasher.hexdigest()


def mix(samples: Iterable[Sample]) -> str:
    """ "chat 12, code 4": pieces of each stratum."""
    counts: dict[str, int] = {}
    for sample in samples:
        counts[sample.stratum] = counts.get(sample.stratum, 0) + 1
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _documents(path: Path, stratum: str, encode: Encode) -> list[tuple[str, list[int]]]:
    check_text("stratum", stratum)
    raw = read_file(path, MAX_FILE_BYTES)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise Invalid(f"{path} is not UTF-8 text") from None
    if path.suffix == ".tokens":
        return [(stratum, _ids(path, text.replace(",", " ").split()))]
    if path.suffix != ".jsonl":
        return [(stratum, encode(text))]
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Invalid(f"{path}, line {number}: not JSON: {error!s:.200}") from None
        if not isinstance(data, dict) or isinstance(data.get("text"), str) == isinstance(data.get("tokens"), list):
            raise Invalid(f'{path}, line {number}: write {{"text": "..."}} or {{"tokens": [...]}}')
        own = data.get("stratum", stratum)
        check_text(f"stratum in line {number} of {path}", own)
        found.append((own, encode(data["text"]) if "text" in data else _ids(path, data["tokens"])))
    return found


def _ids(path: Path, words: Sequence[object]) -> list[int]:
    if not all(type(word) is int or (isinstance(word, str) and word.isascii() and word.isdigit()) for word in words):
        raise Invalid(f"{path}: token ids are numbers")
    ids = [int(str(word)) for word in words]
    if any(not 0 <= number < 2**31 for number in ids):
        raise Invalid(f"{path}: a token id is from 0 to 2^31 - 1")
    return ids


def _pieces(documents: list[list[int]], length: int, number: int) -> list[list[int]]:
    """Up to `number` pieces, spread evenly over all documents in turn."""
    starts: list[tuple[int, int]] = []
    for i, tokens in enumerate(documents):
        all_of = range(0, max(1, len(tokens) - length + 1), length)
        starts += [(i, at) for at in all_of if len(tokens) - at >= 2]
    if len(starts) > number:
        starts = [starts[i * (len(starts) - 1) // max(1, number - 1)] for i in range(number)]
    return [documents[i][at : at + length] for i, at in dict.fromkeys(starts)]
