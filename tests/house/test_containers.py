"""The images' files against the code: what they copy and start exists, the compose file's settings are real, no torch.

That the server's steps give a root file system that runs is `docker/rootfs.sh`, run by hand: docs/containers.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.paths import ROOT

DOCKER = ROOT / "docker"
SERVER, GPU = DOCKER / "server.Dockerfile", DOCKER / "gpu.Dockerfile"
COMPOSE = (DOCKER / "compose.yml").read_text()


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, its text), continuation lines joined, comments left out."""
    text = re.sub(r"\\\n", " ", "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#")))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("path", [SERVER, GPU], ids=lambda path: path.stem)
def test_what_an_image_copies_is_there_and_its_base_may_be_chosen(path: Path) -> None:
    said = instructions(path)
    assert said[0][0] == "ARG" and said[0][1].startswith("BASE=")
    assert all(text.startswith("${BASE}") for kind, text in said if kind == "FROM")
    for kind, text in said:
        if kind == "COPY" and not text.startswith("--from"):
            *sources, _ = text.split()
            assert sources and all((ROOT / source).exists() for source in sources), text
        if kind == "RUN" and text.startswith("docker/"):
            script = ROOT / text.split()[0]
            assert script.stat().st_mode & 0o111 and f"docker/{script.name}" in path.read_text()


def test_the_server_is_nobody_in_particular_and_says_how_it_is() -> None:
    said = dict(instructions(SERVER))
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", said["USER"])
    command, flag, *arguments = json.loads(said["HEALTHCHECK"].partition("CMD ")[2])
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert command in scripts and json.loads(said["ENTRYPOINT"])[0] in scripts
    program = "import sys; from kvtier.cli.app import main; sys.argv[0] = 'kvtier'; main()"
    arguments = ["unix:/nobody/here.sock" if argument.startswith("unix:") else argument for argument in arguments]
    found = subprocess.run(
        [sys.executable, "-c", program, flag, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 3, f"no daemon, and nothing wrong with the command: {found.stderr}"


def test_torch_is_nowhere_in_what_the_server_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["redis"]]
    assert not [one for one in wanted if re.match(r"(torch|triton|vllm|lmcache|transformers|nvidia)", one)]
    install = (DOCKER / "install.sh").read_text()
    assert '".[redis]"' in install and "must not have" in install


@pytest.mark.parametrize("script", sorted(DOCKER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_scripts(script: Path) -> None:
    shell = "bash" if script.read_text().startswith("#!/bin/bash") else "sh"
    subprocess.run([shell, "-n", str(script)], check=True, timeout=60)


def service(name: str) -> str:
    match = re.search(rf"^  {name}:.*?\n(.*?)(?=^  \S|^\S|\Z)", COMPOSE, re.MULTILINE | re.DOTALL)
    assert match, name
    return match[1]


def test_the_compose_files_settings_are_settings(tmp_path: Path) -> None:
    lines = service("kvtier").partition("command:\n")[2]
    arguments = [match[1].strip('"') for line in lines.splitlines() if (match := re.match(r"      - (.*)", line))]
    arguments = arguments[: next(i for i, one in enumerate(arguments) if one.startswith("url=")) + 1]
    arguments = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", one) for one in arguments]
    command = [sys.executable, "-m", "kvtier.server", "--socket", str(tmp_path / "k.sock"), *arguments, "--check"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert (
        said["ssd"].startswith("path=/var/lib/kvtier/ssd")
        and "redis:6379" in said["redis"]
        and said["socket_mode"] == "666"
    )


def test_every_service_that_stays_is_locked_down() -> None:
    for name in ("redis", "kvtier", "client"):
        text = service(name)
        for words in ("read_only: true", "cap_drop: [ALL]", "no-new-privileges:true"):
            assert words in text, (name, words)
    assert "privileged: true" not in COMPOSE and "/var/run/docker.sock" not in COMPOSE
    assert "/run/kvtier:ro" in service("client") and "network_mode: none" in service("client")
