"""lookup, get, put, delete, pin and unpin against a real daemon."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from kvtier.cli import blocks
from kvtier.cli.output import Exit
from kvtier.client.api import Client
from kvtier.format.identity import CHAIN, Description, HashScheme, request_context
from kvtier.format.layout import attention
from tests.cli.shell import N, Shell


def test_what_is_put_is_got(shell: Shell, stored: dict[str, Any]) -> None:
    found = shell.json("get", stored["digest"][:12], "--tokens", stored["tokens"], "-o", shell.directory / "back")
    assert found == {"asked": N, "got": N, "body_bytes": stored["nbytes"], "bytes": N * stored["nbytes"], "reason": ""}
    assert (shell.directory / "back").read_bytes() == stored["bodies"].read_bytes()
    assert sorted(path.name for path in shell.directory.iterdir()) == ["back", "bodies", "d.json", "tokens"], (
        "nothing is left aside"
    )


def test_a_hash_in_hex_a_list_of_them_and_tokens_name_the_same_blocks(shell: Shell, stored: dict[str, Any]) -> None:
    listed = shell.write("list", "# hashes\n" + "\n".join(one.hex() + "  # a block" for one in stored["hashes"]))
    for which in (
        ["--hashes", listed],
        ["--tokens", stored["tokens"]],
        [word for one in stored["hashes"] for word in ("--hash", one.hex())],
    ):
        assert shell.json("lookup", stored["digest"], *which) == {"asked": N, "known": N, "reason": ""}


def test_bodies_go_through_pipes(shell: Shell, stored: dict[str, Any]) -> None:
    done = shell("get", stored["digest"], "--tokens", stored["tokens"], "-o", "-")
    assert done.exit_code == 0 and done.stdout_bytes == stored["bodies"].read_bytes()
    assert f"got {N} of {N} blocks" in done.stderr
    done = shell("put", stored["digest"], "--tokens", stored["tokens"], "-i", "-", stdin=stored["bodies"].read_bytes())
    assert done.exit_code == 0 and "stored 12 of 12 blocks" in done.stdout


def test_a_part_that_is_known_is_written_and_said(shell: Shell, stored: dict[str, Any]) -> None:
    more = shell.write("more", " ".join(map(str, range(4 * N + 8))))
    found = shell.json("get", stored["digest"], "--tokens", more, "-o", shell.directory / "back", code=Exit.NEGATIVE)
    assert (found["asked"], found["got"], found["reason"]) == (N + 2, N, "miss")
    assert (shell.directory / "back").read_bytes() == stored["bodies"].read_bytes()
    assert shell.json("lookup", stored["digest"], "--tokens", more, code=Exit.NEGATIVE)["known"] == N


def test_more_than_one_piece(shell: Shell, monkeypatch: pytest.MonkeyPatch, stored: dict[str, Any]) -> None:
    monkeypatch.setattr(blocks, "PIECE", 5 * stored["nbytes"])
    assert shell.json("put", stored["digest"], "--tokens", stored["tokens"], "-i", stored["bodies"])["stored"] == N
    assert shell.json("get", stored["digest"], "--tokens", stored["tokens"], "-o", shell.directory / "back")["got"] == N
    assert (shell.directory / "back").read_bytes() == stored["bodies"].read_bytes()


def test_contexts_keep_blocks_apart(shell: Shell, stored: dict[str, Any]) -> None:
    salt = shell.write("salt", "s3cret\n")
    which = ["--tokens", stored["tokens"]]
    assert shell.json("lookup", stored["digest"], *which, "--salt-file", salt, code=Exit.NEGATIVE)["known"] == 0
    assert shell.json("put", stored["digest"], *which, "--salt-file", salt, "-i", stored["bodies"])["stored"] == N
    context = request_context(None, "s3cret").hex()
    assert shell.json("lookup", stored["digest"], *which, "--context", context)["known"] == N
    assert shell.json("delete", stored["digest"], *which, "--context", context)["deleted"] == N
    assert shell.json("lookup", stored["digest"], *which)["known"] == N, "the blocks without salt are others"


def test_delete_and_pins(shell: Shell, stored: dict[str, Any]) -> None:
    which = ["--tokens", stored["tokens"]]
    assert shell.json("pin", stored["digest"], *which)["pinned"] == N
    assert shell.json("status")["pinned_blocks"] == N
    assert shell.json("unpin", stored["digest"], *which)["unpinned"] == N
    assert shell.json("unpin", stored["digest"], *which, code=Exit.NEGATIVE)["unpinned"] == 0
    assert shell.json("delete", stored["digest"], *which)["deleted"] == N
    assert shell.json("delete", stored["digest"], *which, code=Exit.NEGATIVE)["deleted"] == 0
    assert shell.json("pin", stored["digest"], *which, code=Exit.NEGATIVE)["pinned"] == 0
    assert shell.json("get", stored["digest"], *which, "-o", shell.directory / "none", code=Exit.NEGATIVE)["got"] == 0


def test_ranges_of_heads_and_layers(shell: Shell) -> None:
    described = Description(
        "org/heads", "3" * 40, attention(4, 8, 16, engine_tokens=16, dtype="bf16"), HashScheme(CHAIN, "0", 16)
    )
    path = shell.write("d.json", json.dumps(described.to_json()))
    part = Client("unix:/nowhere").register(described).extents(blocks.Range(0, (0, 2), (4, 8))).body_bytes
    bodies = shell.write("bodies", os.urandom(2 * part))
    which = ["--hash", "ab" * 32, "--hash", "cd" * 32, "--layers", ":2", "--heads", "4:8"]
    assert shell.json("put", path, *which, "-i", bodies)["body_bytes"] == part
    assert shell.json("lookup", path, *which)["known"] == 2
    assert shell.json("lookup", path, *which[:4], code=Exit.NEGATIVE)["known"] == 0, "the whole range is another key"
    assert shell("lookup", path, *which[:4], "--heads", "4:9").exit_code == Exit.USAGE
