"""Files that people name: read whole within a limit, or refused at once with their name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvtier.errors import Invalid
from kvtier.format.files import naming, open_file, read_description, read_file
from kvtier.format.identity import MAX_DESCRIPTION_BYTES, Description, HashScheme
from kvtier.format.layout import attention

ONE = Description("m", "1" * 40, attention(1, 2, 8, engine_tokens=16, dtype="bf16"), HashScheme("sha256_cbor", "0", 16))


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == read_file(str(path), 6) == b"12345"
    with pytest.raises(Invalid, match=r"/x: more than 4 bytes"):
        read_file(path, 4)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """A FIFO without a writer would be waited for."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for name, words in (
        ("fifo", "not a regular file"),
        ("", "not a regular file"),
        ("absent", "No such file"),
        ("loop", "Too many levels"),
    ):
        with pytest.raises(Invalid, match=f"{tmp_path / name}: {words}"):
            read_file(tmp_path / name, 10)
    with pytest.raises(Invalid, match="not a regular file"):
        read_file("/dev/zero", 10)
    with pytest.raises(Invalid, match="null byte"):
        read_file("a\0b", 10)


def test_an_error_of_the_disk_while_reading_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    with pytest.raises(Invalid, match=r"cannot read .*/x: Input/output error"), open_file(tmp_path / "x"):
        raise OSError(5, "Input/output error")


def test_the_name_stands_before_the_message() -> None:
    with pytest.raises(Invalid, match=r"^a/b\.json: wrong$"), naming("a/b.json"):
        raise Invalid("wrong")


def test_a_description_need_not_be_canonical(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(ONE.to_json(), indent=4))
    assert read_description(path) == ONE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 200_000, "is not JSON"),
        ("{}", "is not a description: description lacks format"),
        (" " * (4 * MAX_DESCRIPTION_BYTES + 1), "more than 1048576 bytes"),
    ],
)
def test_what_is_no_description_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(Invalid, match=rf"model\.json:? .*{words.removeprefix('is ')}"):
        read_description(path)


def test_a_pipe_is_read_where_a_caller_lets_it(tmp_path: Path) -> None:
    """`kvtier lookup --tokens <(...)`: whoever gave the pipe waits for its other end."""
    reading, writing = os.pipe()
    os.write(writing, b"1 2 3")
    os.close(writing)
    try:
        assert read_file(f"/dev/fd/{reading}", 100, pipes=True) == b"1 2 3"
        with pytest.raises(Invalid, match="not a regular file"):
            read_file(f"/dev/fd/{reading}", 100)
    finally:
        os.close(reading)
    with pytest.raises(Invalid):
        read_file(tmp_path, 100, pipes=True)
