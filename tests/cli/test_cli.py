"""`kvtier` against a real daemon: every command, every documented exit code, JSON and text, and the examples of
docs/cli.md as they stand there."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvtier.cli import blocks
from kvtier.cli.app import app, load_commands
from kvtier.cli.inputs import chain_seed, context_of, read_tokens, span, token_hashes
from kvtier.cli.output import Exit, size
from kvtier.client.api import Client
from kvtier.errors import Invalid
from kvtier.format.identity import CHAIN, Description, HashScheme, chain_hashes, request_context
from kvtier.format.layout import attention, opaque
from tests.support.daemon import Daemon, MiB, description, hashes
from tests.support.paths import ROOT

load_commands()

BODY = 1000  # bytes a caller gives; the layout pads it
N = 12


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(64 * MiB) as running:
        yield running


class Shell:
    """Runs commands in this process against one address; a directory of files beside it."""

    def __init__(self, address: str, directory: Path) -> None:
        self.directory = directory
        self._environment = {"KVTIER_ADDRESS": address, "TERM": "dumb"}
        self._runner = CliRunner()

    def __call__(self, *arguments: object, stdin: bytes | None = None, **environment: str) -> Any:
        return self._runner.invoke(app, list(map(str, arguments)), input=stdin, env=self._environment | environment)

    def json(self, *arguments: object, code: Exit = Exit.OK) -> Any:
        """The object a command prints under --json; asserts the exit code, and that stdout is that one line."""
        done = self(*arguments, "--json")
        assert done.exit_code == code, done.output
        assert done.stdout.count("\n") == 1
        return json.loads(done.stdout)

    def write(self, name: str, data: bytes | str) -> Path:
        path = self.directory / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path


@pytest.fixture
def shell(daemon: Daemon, tmp_path: Path) -> Shell:
    return Shell(daemon.address, tmp_path)


@pytest.fixture
def stored(shell: Shell, request: pytest.FixtureRequest) -> dict[str, Any]:
    """A namespace of its own with N blocks in it: description file, digest, tokens, hashes, bodies."""
    described = Description(
        "org/m", "2" * 40, opaque(BODY, "cd" * 32, engine_tokens=4), HashScheme(CHAIN, request.node.name, 4)
    )
    nbytes = shell_body_bytes(described)
    given = {
        "description": shell.write("d.json", json.dumps(described.to_json(), indent=2)),
        "digest": described.digest.hex(),
        "tokens": shell.write("tokens", " ".join(map(str, range(4 * N + 3)))),
        "hashes": chain_hashes(range(4 * N), 4, chain_seed(request.node.name)),
        "bodies": shell.write("bodies", os.urandom(N * nbytes)),
        "nbytes": nbytes,
    }
    done = shell("put", given["description"], "--tokens", given["tokens"], "-i", given["bodies"])
    assert done.exit_code == 0, done.output
    return given


def shell_body_bytes(described: Description) -> int:
    return Client("unix:/nowhere").register(described).extents().body_bytes


# --- blocks in and out


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


# --- namespaces and the daemon


def test_status_names_what_the_daemon_counts(shell: Shell, daemon: Daemon) -> None:
    found = shell.json("status")
    assert found["pid"] == daemon.pid and found["arena_bytes"] > 0 and found["sealed_blocks_total"] >= 0
    assert shell.json("status", "--check")["boot"] == found["boot"]
    text = shell("status").stdout
    assert all(name in text for name in found)


def test_namespaces_are_listed_shown_and_dropped(shell: Shell, stored: dict[str, Any]) -> None:
    mine = [one for one in shell.json("namespaces")["namespaces"] if one["description"] == stored["digest"]]
    assert len(mine) == 1 and mine[0]["blocks"] == N and mine[0]["tenant"] == "local" and mine[0]["model"] == "org/m"
    assert stored["digest"][:16] in shell("namespaces").stdout
    found = shell.json("show", stored["digest"][:8])
    assert (
        found["namespace"] == mine[0] and Description.from_json(found["description"]).digest.hex() == stored["digest"]
    )
    text = shell("show", stored["digest"][:8], "--description").stdout
    assert Description.from_json(json.loads(text)).digest.hex() == stored["digest"], (
        "what it prints is a file that commands take"
    )
    assert stored["digest"] in shell("show", stored["digest"][:8]).stdout
    assert shell.json("ttl", stored["digest"], "36h")["namespace"]["ttl"] == 36 * 3600
    assert "36h" in shell("namespaces").stdout
    for wrong in ("", "24", "0s", "1.5h", "-1h", "1w", "999999999d"):
        assert shell("ttl", "--", stored["digest"], wrong).exit_code == Exit.USAGE, wrong
    assert "time-to-live off" in shell("ttl", stored["digest"], "off").stdout
    assert shell("drop", stored["digest"]).exit_code == Exit.USAGE, "without a terminal nobody can be asked"
    assert shell.json("drop", stored["digest"], "--yes")["dropped_blocks"] == N
    assert shell.json("show", stored["digest"], code=Exit.NEGATIVE)["error"] == "NotFound"


def test_differences_are_named_field_by_field(shell: Shell, stored: dict[str, Any]) -> None:
    other = json.loads(stored["description"].read_text()) | {"revision": "4" * 40}
    live = shell.write("live.json", json.dumps(other))
    line = f"revision: {'2' * 40} stored, {'4' * 40} live"
    assert shell.json("diff", stored["digest"], live, code=Exit.NEGATIVE) == {"differences": [line]}
    assert shell.json("diff", "nearest", stored["description"]) == {"differences": []}
    assert shell.json("diff", stored["description"], stored["digest"]) == {"differences": []}
    assert shell("diff", stored["digest"], stored["digest"]).stdout == "no difference\n"
    assert line in shell("diff", stored["description"], live).stdout


# --- exit codes


def test_exit_code_2_for_what_is_said_wrong(shell: Shell, stored: dict[str, Any]) -> None:
    which = ["--tokens", stored["tokens"]]
    short = shell.write("short", b"x" * (N * stored["nbytes"] - 1))
    for wrong, says in (
        (["get", stored["digest"], *which, "-o", "-", "--json"], "cannot both go to stdout"),
        (["lookup", stored["digest"]], "say which blocks by one of"),
        (["lookup", stored["digest"], *which, "--hash", "ab"], "say which blocks by one of"),
        (["lookup", stored["digest"], "--hash", "xy"], "write 64 lower-case hex digits"),
        (["lookup", stored["digest"], "--hashes", "/nowhere"], "cannot read /nowhere"),
        (["lookup", stored["digest"], *which, "--context", "ab"], "64 lower-case hex digits"),
        (["lookup", stored["digest"], *which, "--layers", "1-2"], "is not a range"),
        (["lookup", stored["digest"], *which, "--group", "1"], "no group 1"),
        (["lookup", stored["digest"], "--tokens", shell.write("few", "1 2 3")], "no whole block"),
        (["lookup", shell.write("broken.json", "{")], "is not JSON"),
        (["lookup", shell.write("other.json", "{}")], "is not a description"),
        (["lookup", "xyz", *which], "is not the beginning of a digest"),
        (["put", stored["digest"], *which, "-i", short], "12 bodies of"),
        (["put", stored["digest"], *which, "-i", "/nowhere"], "cannot read /nowhere"),
        (["get", stored["digest"], *which, "-o", "/nowhere/out"], "/nowhere"),
        (["status", "--address", "ftp://x"], "ftp"),
    ):
        done = shell(*wrong)
        assert done.exit_code == Exit.USAGE and says in done.stderr, (wrong, done.output)
    assert shell("no-such-command").exit_code == Exit.USAGE and shell("put").exit_code == Exit.USAGE
    done = shell("put", stored["digest"], *which, "-i", "-", stdin=short.read_bytes())
    assert done.exit_code == Exit.USAGE and "does not hold 12 bodies" in done.stderr


def test_exit_code_3_without_a_daemon(shell: Shell, stored: dict[str, Any], daemon: Daemon, tmp_path: Path) -> None:
    which = ["--tokens", stored["tokens"]]
    absent = f"unix:{tmp_path}/none.sock"
    for what in (
        ["status"],
        ["namespaces"],
        ["lookup", stored["description"], *which],
        ["get", stored["description"], *which, "-o", tmp_path / "x"],
    ):
        done = shell(*what, "--address", absent)
        assert done.exit_code == Exit.UNREACHABLE and "no daemon at" in done.stderr, done.output
    with daemon.stopped():
        done = shell("status", "--deadline", "0.2", "--json")
    assert done.exit_code == Exit.UNREACHABLE and json.loads(done.stdout)["error"] in ("Deadline", "Unavailable")
    assert not (tmp_path / "x").exists()


def test_exit_code_4_for_what_is_not_allowed_or_does_not_fit(tmp_path: Path) -> None:
    """A reader may look and get; it may not put, delete, pin or drop. And a pin ends at a tenth of the arena."""
    with Daemon(64 * MiB, "--user", f"uid:{os.geteuid()} readers read") as running:
        shell = Shell(running.address, tmp_path)
        path = shell.write("d.json", json.dumps(description(BODY).to_json()))
        bodies = shell.write("b", bytes(shell_body_bytes(description(BODY))))
        which = ["--hash", "ab" * 32]
        assert shell.json("lookup", path, *which, code=Exit.NEGATIVE)["known"] == 0
        for what in (
            ["put", path, *which, "-i", bodies],
            ["delete", path, *which],
            ["pin", path, *which],
            ["unpin", path, *which],
        ):
            done = shell(*what)
            assert done.exit_code == Exit.REFUSED and "role" in done.output, (what, done.output)
        digest = shell.json("namespaces")["namespaces"][0]["description"]
        assert shell.json("drop", digest, "--yes", code=Exit.REFUSED)["error"] == "Denied"
        assert shell.json("ttl", digest, "24h", code=Exit.REFUSED)["error"] == "Denied"
        assert shell.json("status", "--check", code=Exit.REFUSED)["error"] == "Denied"
        running.terminate()  # `Daemon` would ask for an integrity check, which needs an admin
        running.start()
        running.arguments = running.arguments[:-2]
        running.terminate()
        running.start()
        large = description(MiB)
        big = shell.write("big.json", json.dumps(large.to_json()))
        with Client(running.address) as client:
            ns = client.register(large)
            assert client.put(ns, hashes(range(8)), [np.zeros(MiB, np.uint8)] * 8) == 8
        found = shell.json(
            "pin",
            big,
            *[word for n in range(8) for word in ("--hash", n.to_bytes(32, "little").hex())],
            code=Exit.REFUSED,
        )
        assert 0 < found["pinned"] < 8 and found["reason"].startswith("full")


def test_exit_code_5_and_the_mapping_of_errors() -> None:
    from kvtier import errors
    from kvtier.cli.output import code_of

    assert (
        code_of(errors.Lost("x")) == Exit.FAULT
        and code_of(errors.KvtierError("x")) == Exit.FAULT
        and code_of(errors.Stale("x")) == Exit.FAULT
    )
    assert code_of(errors.Denied("x")) == Exit.REFUSED and code_of(errors.Full("x")) == Exit.REFUSED
    assert code_of(errors.NotFound("x")) == Exit.NEGATIVE and code_of(errors.Invalid("x")) == Exit.USAGE
    assert {code_of(kind("x")) for kind in errors.BY_CODE.values()} <= set(Exit)


def test_a_token_opens_the_door_and_only_its_digest_is_kept(shell: Shell, tmp_path: Path) -> None:
    """Made for a file, used over TCP: what the file holds is no token."""
    file = tmp_path / "tokens"
    secret = shell("token", "alice", "team", "write", "--file", file).stdout
    second = shell.json("token", "bob", "team", "read")
    file.write_text(file.read_text() + second["line"] + "\n")
    assert (
        file.stat().st_mode & 0o077 == 0
        and secret.strip() not in file.read_text()
        and second["token"] not in file.read_text()
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Daemon(16 * MiB, "--grpc", f"127.0.0.1:{port}", "--token-file", str(file)) as daemon:
        over_tcp = Shell(f"grpc://127.0.0.1:{port}", tmp_path)
        right, wrong = shell.write("right", secret), shell.write("wrong", "0" * 64)
        assert over_tcp("status", "--token-file", right).exit_code == Exit.OK
        for refused in (
            ["status"],
            ["status", "--token-file", wrong],
            ["get", "abcd", "--hash", "ab" * 32, "-o", "x", "--token-file", wrong],
        ):
            done = over_tcp(*refused)
            assert done.exit_code == Exit.REFUSED and "token" in done.stderr, done.output
        path = shell.write("d.json", json.dumps(description(BODY).to_json()))
        bodies = shell.write("b", bytes(2 * shell_body_bytes(description(BODY))))
        which = ["--hash", "ab" * 32, "--hash", "cd" * 32]
        assert over_tcp("put", path, *which, "-i", bodies, "--token-file", right).exit_code == Exit.OK
        assert (
            over_tcp(
                "get", path, *which, "-o", tmp_path / "back", "--token-file", shell.write("bob", second["token"])
            ).exit_code
            == Exit.OK
        )
        assert (tmp_path / "back").read_bytes() == bodies.read_bytes()
        log = daemon.log.read_text()
    assert secret.strip() not in log and second["token"] not in log and "0" * 64 not in log
    assert (
        shell("token", "a b", "team", "write").exit_code == Exit.USAGE
        and shell("token", "alice", "team", "owner").exit_code == Exit.USAGE
    )


# --- small things


def test_tokens_make_the_documented_chain(tmp_path: Path) -> None:
    described = Description(
        "m",
        "1" * 40,
        attention(2, 2, 8, engine_tokens=4, dtype="bf16", engine_blocks=2),
        HashScheme(CHAIN, "0" * 64, 4),
    )
    assert token_hashes(described, 0, range(21)) == chain_hashes(range(21), 4)[1::2], (
        "a block of two engine blocks has the last one's hash"
    )
    engine = Description(
        "m", "1" * 40, attention(2, 2, 8, engine_tokens=4, dtype="bf16"), HashScheme("sha256_cbor", "0", 4)
    )
    with pytest.raises(Invalid, match="made by 'sha256_cbor', which only its engine can do"):
        token_hashes(engine, 0, range(8))
    assert chain_seed("0" * 64) == bytes(32) and chain_seed("0") == b"0" and chain_seed("ü") == "ü".encode()
    path = tmp_path / "t"
    for text in ("1 2 3", "[1, 2,3]\n", "1,2,\n3"):
        path.write_text(text)
        assert read_tokens(path) == [1, 2, 3]
    for text in ("", "[]", "1 -2", "1.5", "0x3", "99999999999", "ü"):
        path.write_text(text)
        with pytest.raises(Invalid):
            read_tokens(path)


def test_spans_and_contexts() -> None:
    assert [span(text, "heads") for text in (":", "3:", ":4", "3:4")] == [(0, None), (3, None), (0, 4), (3, 4)]
    assert context_of("", "", None) == bytes(32) and context_of("ab" * 32, "", None) == bytes.fromhex("ab" * 32)
    assert context_of("", "abcd", None) == request_context(bytes.fromhex("abcd"), None)
    for wrong in (("AB" * 32, "", None), ("ab" * 32, "ab", None), ("", "abc", None)):
        with pytest.raises(Invalid):
            context_of(*wrong)


def test_sizes_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 3 * 2**29, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "5.0 TiB",
    ]


def test_the_installed_commands_speak() -> None:
    for program, words in (
        ("kvtier.cli", ["namespaces", "doctor", "put", "unpin"]),
        ("kvtier.server", ["--arena-bytes", "--metrics"]),
    ):
        found = subprocess.run(
            [sys.executable, "-m", program, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )
        assert all(word in found.stdout for word in words)
        version = subprocess.run(
            [sys.executable, "-m", program, "--version"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert re.fullmatch(r"\d+\.\d+\.\d+\n", version.stdout)


# --- the page


def examples() -> list[tuple[str, list[tuple[str, str]]]]:
    """Of docs/cli.md: (heading, [(command, what it prints)]) of every console block; `...` in the output stands for
    anything."""
    found = []
    for heading, block in re.findall(
        r"^## ([^\n]+)\n(?:(?!^## ).)*?```console\n(.*?)```",
        (ROOT / "docs" / "cli.md").read_text(),
        re.DOTALL | re.MULTILINE,
    ):
        entries = [
            (part.split("\n", 1)[0], part.split("\n", 1)[1] if "\n" in part else "") for part in block.split("$ ")[1:]
        ]
        found.append((heading, entries))
    return found


def test_the_page_names_every_command_and_exit_code() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    commands = {info.name for info in app.registered_commands}
    assert commands <= set(re.findall(r"`kvtier ([a-z-]+)", text)), "a command without a word on the page"
    assert (
        set(re.findall(r"kvtier ([a-z-]+)", "\n".join(c for _, entries in examples() for c, _ in entries))) <= commands
    )
    codes = dict(re.findall(r"^\| (\d) \| (\w+)", text, re.MULTILINE))
    assert set(map(int, codes)) == {int(code) for code in Exit}


def test_the_examples_of_the_page_run_as_they_stand(tmp_path: Path) -> None:
    """All console blocks in order, in one directory, by a shell, against a fresh daemon; what each prints must be what
    the page shows."""
    scripts = tmp_path / "bin"
    scripts.mkdir()
    for name, module in (("kvtier", "kvtier.cli"), ("python", "")):
        path = scripts / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {f"-m {module}" if module else ""} "$@"\n')
        path.chmod(0o755)
    told = [entry for _, entries in examples() for entry in entries]
    assert len(told) >= 10
    with Daemon(64 * MiB) as daemon:
        environment = {
            **os.environ,
            "PATH": f"{scripts}:{os.environ['PATH']}",
            "KVTIER_ADDRESS": daemon.address,
            "PYTHONPATH": str(ROOT),
        }
        for line, expected in told:
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            pattern = re.escape(expected).replace(re.escape("..."), r"[^\n]*")
            assert re.fullmatch(pattern, done.stdout), (
                f"$ {line}\n{done.stdout}{done.stderr}\nthe page says\n{expected}"
            )
