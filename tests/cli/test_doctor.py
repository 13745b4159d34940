"""`kvtier doctor`: every check runs here, with and without a daemon, and says the right thing when the host is worse
than this one."""

from __future__ import annotations

import json
import os
import resource
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier.cli import doctor
from kvtier.cli.app import app, load_commands
from kvtier.cli.doctor import BAD, GOOD, NOTE, HostFinding
from kvtier.cli.output import Exit
from kvtier.client.api import Client
from kvtier.format.identity import CHAIN, Description, HashScheme, f32_hex
from kvtier.format.layout import attention
from tests.support.daemon import Daemon, MiB

load_commands()

GiB = 1 << 30


def run(*arguments: object, address: str = "unix:/nowhere/kvtier.sock") -> tuple[int, dict[str, HostFinding]]:
    """(exit code, findings by subject) of the command under --json."""
    done = CliRunner().invoke(app, ["doctor", "--json", *map(str, arguments)], env={"KVTIER_ADDRESS": address})
    data: Any = json.loads(done.stdout)
    findings = [HostFinding(**one) for one in data["findings"]]
    assert data["bad"] == sum(one.state == BAD for one in findings)
    assert all(one.state in (GOOD, NOTE, BAD) and one.subject and one.found for one in findings)
    assert all(one.advice for one in findings if one.state != GOOD and not one.found.startswith("not tried")), (
        "what is not good comes with advice"
    )
    return done.exit_code, {one.subject: one for one in findings}


def one(found: Any, subject: str) -> HostFinding:
    return next(finding for finding in found if finding.subject == subject)


def test_this_host_with_a_daemon(tmp_path: Path) -> None:
    with Daemon(16 * MiB) as daemon:
        code, found = run("--disk", tmp_path, address=daemon.address)
    assert code in (Exit.OK, Exit.NEGATIVE)
    assert {
        "kernel",
        "memfd_create",
        "pidfd_open",
        "SO_PEERPIDFD",
        "memory limit",
        "memcpy",
        "first touch",
        "disk",
    } <= set(found)
    assert {
        "locked memory (memlock)",
        "open files (nofile)",
        "huge pages for shared memory",
        "protobuf implementation",
    } <= set(found)
    assert "GB/s" in found["memcpy"].found and "GB/s" in found["disk"].found
    assert found["memfd_create"].state == GOOD and found["daemon"].found.endswith(f"pid {daemon_pid(found)}")
    assert "us" in found["round trip (status call)"].found and found["arena"].state == GOOD
    assert list(tmp_path.iterdir()) == [], "the trial file is gone"


def test_a_namespace_of_scale_one_is_a_note() -> None:
    layout = attention(1, 2, 8, engine_tokens=16, granularity="head")

    def quantized(model: str, value: float) -> Description:
        scales = {f"0.{part}": f32_hex(value) * 2 for part in "kv"}
        return Description(model, "0" * 40, layout, HashScheme(CHAIN, "0" * 64, 16), rule="checkpoint", scales=scales)

    with Daemon(16 * MiB) as daemon, Client(daemon.address) as client:
        for model, value in (("org/calibrated", 0.5), ("org/one", 1.0)):
            client.lookup(client.register(quantized(model, value)), [bytes(32)], deadline=30)
        _, found = run(address=daemon.address)
    assert found["uncalibrated"].state == NOTE and found["uncalibrated"].found.endswith(" of org/one")
    assert "kvtier calibrate" in found["uncalibrated"].advice


def daemon_pid(found: dict[str, HostFinding]) -> str:
    return found["daemon"].found.rpartition(" ")[2]


def test_without_a_daemon_it_is_a_note() -> None:
    _, found = run()
    assert found["daemon"].state == NOTE and "start one with kvtier-server" in found["daemon"].advice
    assert "arena" not in found


def test_the_text_says_the_same_to_people() -> None:
    done = CliRunner().invoke(app, ["doctor"], env={"KVTIER_ADDRESS": "unix:/nowhere/kvtier.sock", "TERM": "dumb"})
    assert "memcpy: " in done.stdout and "start one with kvtier-server" in done.stdout
    assert done.stdout.rstrip().endswith(("nothing bad", " bad"))


def test_a_small_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a small limit nothing large is tried, and the limit is named with what the memfd costs."""
    monkeypatch.setattr(doctor, "memory_limit", lambda: 200 * MiB)
    found = list(doctor.memory())
    assert one(found, "memory limit").state == NOTE and "request arena + 512 MiB" in one(found, "memory limit").advice
    assert one(found, "first touch").found.startswith("not tried")
    assert next(doctor.copies()).found.startswith("not tried")


def test_too_little_memory_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_meminfo", lambda name: {"MemAvailable": 10 * MiB, "SwapTotal": GiB}.get(name))
    found = list(doctor.memory())
    assert (
        one(found, "memory available").state == BAD and "smaller arena_bytes" in one(found, "memory available").advice
    )
    assert one(found, "swap").state == NOTE


def test_an_old_or_locked_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(doctor, "_SO_PEERPIDFD", 9999)
    found = list(doctor.kernel())
    assert one(found, "memfd_create").state == BAD and one(found, "pidfd_open").state == NOTE
    assert one(found, "SO_PEERPIDFD").state == BAD and "use gRPC" in one(found, "SO_PEERPIDFD").advice
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "_SO_PEERPIDFD", 9999)
    assert one(list(doctor.kernel()), "SO_PEERPIDFD").state == NOTE, "a pidfd that clients pass will do"


def test_low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda kind: {resource.RLIMIT_MEMLOCK: (65536, 65536), resource.RLIMIT_NOFILE: (1024, 4096)}[kind],
    )
    found = list(doctor.limits())
    assert (
        one(found, "locked memory (memlock)").state == NOTE
        and "64.0 KiB" in one(found, "locked memory (memlock)").found
    )
    assert one(found, "open files (nofile)").state == NOTE and "LimitNOFILE" in one(found, "open files (nofile)").advice
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert all(finding.state == GOOD for finding in doctor.limits())


def test_huge_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "SHMEM", tmp_path / "shmem_enabled")
    assert next(doctor.huge_pages()).state == NOTE
    for text, state in (
        ("always within_size advise [never] deny force", NOTE),
        ("always [within_size] advise never", GOOD),
    ):
        (tmp_path / "shmem_enabled").write_text(text)
        assert next(doctor.huge_pages()).state == state


def test_disks_that_are_full_absent_or_not_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert next(doctor.disk_speed(tmp_path / "absent")).state == BAD
    monkeypatch.setattr(doctor, "DISK", 2**60)
    assert next(doctor.disk_speed(tmp_path)).advice == "too little to try its speed"
    monkeypatch.undo()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert next(doctor.disk_speed(tmp_path)).state == NOTE


def test_slow_protobuf_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.api_implementation, "Type", lambda: "python")
    assert one(list(doctor.versions()), "protobuf implementation").state == BAD


def test_it_exits_with_1_if_something_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.api_implementation, "Type", lambda: "python")
    code, found = run()
    assert code == Exit.NEGATIVE and found["protobuf implementation"].state == BAD


def test_sockets_are_closed_again() -> None:
    """Looking leaves no descriptor behind."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        list(doctor.kernel())
    left, right = socket.socketpair()
    left.close()
    right.close()
    assert len(os.listdir("/proc/self/fd")) == before
