"""`kvtier` as a whole against a real daemon: every documented exit code, and the examples of docs/cli.md as they stand
there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.cli.app import app
from kvtier.cli.output import Exit
from kvtier.client.api import Client
from tests.cli.shell import BODY, N, Shell, shell_body_bytes
from tests.support.daemon import Daemon, MiB, description, hashes
from tests.support.paths import ROOT


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
