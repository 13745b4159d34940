"""`kvtier doctor`: what this host gives a daemon, what to expect of it, what to do about each finding. Looks at a
daemon if one is there.

Each check is a function that returns findings and changes nothing: it maps at most 256 MiB for a moment and writes one
temporary file that it removes. A check that cannot look says so and is no fault. Figures are of this moment, on
whatever else the host is doing."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import resource
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
from google.protobuf.internal import api_implementation
from rich.console import Console
from typer import Option

from kvtier.cli import output
from kvtier.cli.app import Common, command
from kvtier.cli.output import Exit, size
from kvtier.client.api import Client
from kvtier.errors import KvtierError, NotFound
from kvtier.format.identity import all_one
from kvtier.server.settings import memory_limit
from kvtier.store.arena import Arena

GOOD, NOTE, BAD = "good", "note", "bad"
SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
MiB = 2**20
BUFFER = 128 * MiB  # copied from and to: larger than last-level caches, small enough for a small container
PROBE = 64 * MiB  # backed by memory once
DISK = 64 * MiB
CALLS = 200
MAX_NAMESPACES = 256  # that are looked at
_SO_PEERPIDFD = 77
_LIBRARIES = ("numpy", "protobuf", "grpcio", "xxhash", "prometheus-client", "safetensors", "typer", "rich")


@dataclass(frozen=True, slots=True)
class HostFinding:
    """One thing looked at. `state`: good, note (worth knowing) or bad (will hurt or fail); `advice`: what to do."""

    subject: str
    found: str
    state: str = GOOD
    advice: str = ""


def _judged(subject: str, found: str, advice: str, worse: str = NOTE) -> HostFinding:
    """Good where there is nothing to advise, else `worse`."""
    return HostFinding(subject, found, worse if advice else GOOD, advice)


@command()
def doctor(
    common: Common,
    disk: Annotated[
        Path | None, Option("--disk", help="Directory to write and read 64 MiB in. [default: the temporary directory]")
    ] = None,
) -> Exit:
    """Look at this host and say what to expect and what to change. Exit code 1 if something is bad."""
    findings = [finding for check in (versions, kernel, memory, huge_pages, limits, copies) for finding in check()]
    findings += [*disk_speed(disk or Path(tempfile.gettempdir())), *daemon(common)]
    bad = sum(finding.state == BAD for finding in findings)
    data: dict[str, Any] = {"bad": bad, "findings": [asdict(finding) for finding in findings]}
    output.result(data, common.json, lambda: _print(findings, bad))
    return Exit.NEGATIVE if bad else Exit.OK


def versions() -> Iterator[HostFinding]:
    """What is installed; whether protobuf runs on its compiled implementation."""
    yield HostFinding("kvtier", importlib.metadata.version("kvtier"))
    yield HostFinding("python", platform.python_version())
    for name in _LIBRARIES:
        yield HostFinding(name, importlib.metadata.version(name))
    kind = api_implementation.Type()
    advice = "install a protobuf wheel with its compiled part: each call costs several times more without"
    yield _judged("protobuf implementation", kind, "" if kind == "upb" else advice, BAD)


def kernel() -> Iterator[HostFinding]:
    """The system calls the daemon stands on, tried rather than looked up."""
    yield HostFinding("kernel", platform.release())
    try:
        os.close(os.memfd_create("kvtier-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        yield HostFinding("memfd_create", "works")
    except OSError as error:
        advice = "the arena needs it: allow it in the container's seccomp profile"
        yield HostFinding("memfd_create", f"refused: {error.strerror}", BAD, advice)
    try:
        os.close(os.pidfd_open(os.getpid()))
        pidfd = True
        yield HostFinding("pidfd_open", "works")
    except OSError as error:
        pidfd = False
        advice = "a daemon then relies on SO_PEERPIDFD; allow it in the seccomp profile"
        yield HostFinding("pidfd_open", f"refused: {error.strerror}", NOTE, advice)
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        try:
            os.close(struct.unpack("i", left.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0])
            yield HostFinding("SO_PEERPIDFD", "works")
        except OSError:
            without = "" if pidfd else "; without either, no client may map the arena: use gRPC"
            advice = f"before Linux 6.5 clients pass a pidfd of their own{without}"
            yield HostFinding("SO_PEERPIDFD", "not there", NOTE if pidfd else BAD, advice)


def memory() -> Iterator[HostFinding]:
    """How much there is, whose limit it is under, how fast it is backed."""
    limit, machine = memory_limit(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    whose = "of a control group" if limit < machine else "of the machine"
    request = "request arena + 512 MiB for its container"
    advice = f"the arena is charged to the daemon's limit: {request}; {size(limit // 4)} is the default arena"
    yield HostFinding("memory limit", f"{size(limit)}, {whose}", NOTE if limit < machine else GOOD, advice)
    available = _meminfo("MemAvailable")
    if available is not None:
        advice = "less than the default arena: write a smaller arena_bytes" if available < limit // 4 else ""
        yield _judged("memory available", size(available), advice, BAD)
    swap = _meminfo("SwapTotal")
    if swap:
        slow = "a cold arena may be swapped out, and a block then comes back at the speed of the disk"
        yield HostFinding("swap", size(swap), NOTE, f"{slow}: turn swap off for it")
    if limit < 4 * PROBE:
        yield HostFinding("first touch", "not tried: too little memory", NOTE)
        return
    arena = Arena(PROBE)
    try:
        began = time.perf_counter()
        arena.populate(threading.Event())
        rate = PROBE / (time.perf_counter() - began)
    except KvtierError as error:
        yield HostFinding("first touch", str(error), BAD, "there is not even memory for a small arena")
        return
    finally:
        arena.close()
    backed = f"the default arena is backed {limit / 4 / rate:.0f} s after the start"
    advice = f"{backed}; calls are served from the first 64 MiB on"
    yield HostFinding("first touch", f"{rate / 1e9:.1f} GB/s", GOOD, advice)


def huge_pages() -> Iterator[HostFinding]:
    """Whether shared memory may use huge pages."""
    try:
        text = SHMEM.read_text()
    except OSError:
        yield HostFinding("huge pages for shared memory", "this kernel does not say", NOTE)
        return
    mode = text[text.find("[") + 1 : text.find("]")]
    on = mode in ("always", "within_size", "force")
    advice = "" if on else f"small pages work; `echo within_size > {SHMEM}` lets the kernel use huge ones for the arena"
    yield _judged("huge pages for shared memory", mode, advice)


def limits() -> Iterator[HostFinding]:
    """Locked memory and descriptors of this user's processes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield HostFinding("locked memory (memlock)", "unlimited")
    else:
        need = "engines that pin the arena for DMA may need LimitMEMLOCK=infinity (or --ulimit memlock=-1)"
        yield HostFinding("locked memory (memlock)", size(soft), NOTE, f"the daemon locks nothing; {need}")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft != resource.RLIM_INFINITY and soft < 4096
    advice = "a daemon with many clients needs two per client: LimitNOFILE=65536" if low else ""
    yield _judged("open files (nofile)", str(soft), advice)


def copies() -> Iterator[HostFinding]:
    """The ceiling of every put and get: numpy copies out of a mapping."""
    if memory_limit() < 4 * BUFFER:
        yield HostFinding("memcpy", "not tried: too little memory", NOTE)
        return
    with mmap.mmap(-1, BUFFER) as source_map, mmap.mmap(-1, BUFFER) as target_map:
        source, target = np.frombuffer(source_map, np.uint8), np.frombuffer(target_map, np.uint8)
        source[:] = 1
        rates = []
        for _ in range(8):
            began = time.perf_counter()
            np.copyto(target, source)
            rates.append(BUFFER / (time.perf_counter() - began))
        del source, target
    rate = median(rates[1:])
    slow = rate < 2e9
    why = "; that is slow: is the host overcommitted or throttled?" if slow else ""
    advice = f"a put or get of 1 MiB moves at about this speed: {MiB / rate * 1e6:.0f} us{why}"
    yield HostFinding("memcpy", f"{rate / 1e9:.1f} GB/s", NOTE if slow else GOOD, advice)


def disk_speed(directory: Path) -> Iterator[HostFinding]:
    """Writing and reading one file, past the page cache where the file system allows."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        yield HostFinding("disk", f"{directory}: {error.strerror}", BAD, "give --disk a directory that is there")
        return
    free = found.f_bavail * found.f_frsize
    if free < 2 * DISK:
        yield HostFinding("disk", f"{directory}: {size(free)} free", NOTE, "too little to try its speed")
        return
    try:
        write, read, direct = _disk_rates(directory)
    except OSError as error:
        yield HostFinding("disk", f"{directory}: {error.strerror}", NOTE, "cannot be written to by this user")
        return
    how = "O_DIRECT" if direct else "through the page cache: no O_DIRECT here"
    cached = "a lower tier here would use the page cache: its memory counts against the container too"
    rates = f"write {write / 1e9:.2f}, read {read / 1e9:.2f} GB/s ({how}), {size(free)} free"
    state, advice = (GOOD, "only a lower tier needs it") if direct else (NOTE, cached)
    yield HostFinding("disk", f"{directory}: {rates}", state, advice)


def daemon(common: Common) -> Iterator[HostFinding]:
    """The daemon at the address, if there is one: round trip, arena, limits."""
    try:
        with common.client() as client:
            status = client.status(deadline=common.deadline)
            unscaled = _uncalibrated(client, common.deadline)
            times = []
            for _ in range(CALLS):
                began = time.perf_counter()
                client.status(deadline=common.deadline)
                times.append(time.perf_counter() - began)
    except KvtierError as error:
        advice = "start one with kvtier-server, or correct --address"
        yield HostFinding("daemon", f"none at {common.where}: {error}", NOTE, advice)
        return
    yield HostFinding("daemon", f"{common.where}, version {status['version']}, pid {status['pid']}")
    ordered = sorted(times)
    text = f"{median(ordered) * 1e6:.0f} us, p99 {ordered[int(0.99 * CALLS)] * 1e6:.0f} us"
    quiet = "the Unix transport answers in 0.1 ms on a quiet host: busy cores, or gRPC?"
    yield _judged("round trip (status call)", text, quiet if median(ordered) > 1e-3 else "")
    ready, total = status["arena_ready_bytes"], status["arena_bytes"]
    where = "if this number stands still, see the daemon's log for `arena not backed`"
    behind = f"still being backed by memory: {where}" if ready < total else ""
    yield _judged("arena", f"{size(total)}, {size(ready)} backed, {size(status['used_bytes'])} used", behind)
    advice = "every scale is 1.0: kvtier calibrate makes better ones, kvtier evaluate says what 1.0 costs"
    for name in unscaled:
        yield HostFinding("uncalibrated", name, NOTE, advice)
    yield from _daemon_limits(status["pid"])


def _uncalibrated(client: Client, deadline: float) -> list[str]:
    """Namespaces of quantized KV whose static scales are all 1.0; of the first MAX_NAMESPACES."""
    found = []
    for info in client.list_namespaces(deadline=deadline)[:MAX_NAMESPACES]:
        try:
            _, description = client.show(info.description.hex(), deadline=deadline)
        except NotFound:
            continue  # dropped meanwhile
        if all_one(description["scales"]):
            found.append(f"namespace {info.description.hex()[:16]} of {info.model}")
    return found


def _daemon_limits(pid: int) -> Iterator[HostFinding]:
    try:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except OSError:
        return  # another host's, another container's, or another user's
    files = next((line.split()[3] for line in lines if line.startswith("Max open files")), "")
    if files.isdigit() and int(files) < 4096:
        advice = "two per client and socket: LimitNOFILE=65536 in its unit"
        yield HostFinding("the daemon's open files", files, NOTE, advice)


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _disk_rates(directory: Path) -> tuple[float, float, bool]:
    """(bytes a second written, bytes a second read, whether past the page cache). Raises OSError."""
    handle, name = tempfile.mkstemp(dir=directory, prefix=".kvtier-doctor-")
    try:
        os.close(handle)
        os_direct = getattr(os, "O_DIRECT", 0)
        try:
            descriptor, direct = os.open(name, os.O_RDWR | os.O_CLOEXEC | os_direct), bool(os_direct)
        except OSError:
            descriptor, direct = os.open(name, os.O_RDWR | os.O_CLOEXEC), False
        try:
            with mmap.mmap(-1, 4 * MiB) as buffer:  # page-aligned, as O_DIRECT wants it
                buffer[:] = os.urandom(4096) * (4 * MiB // 4096)
                began = time.perf_counter()
                for at in range(0, DISK, len(buffer)):
                    os.pwrite(descriptor, buffer, at)
                os.fsync(descriptor)
                middle = time.perf_counter()
                if not direct:
                    os.posix_fadvise(descriptor, 0, DISK, os.POSIX_FADV_DONTNEED)
                for at in range(0, DISK, len(buffer)):
                    os.preadv(descriptor, [buffer], at)
                end = time.perf_counter()
        finally:
            os.close(descriptor)
    finally:
        os.unlink(name)
    return DISK / (middle - began), DISK / (end - middle), direct


def _print(findings: list[HostFinding], bad: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    marks = {GOOD: "[green]good[/]", NOTE: "[yellow]note[/]", BAD: "[red]bad [/]"}
    for finding in findings:
        console.print(f"{marks[finding.state]}  {finding.subject}: ", end="")
        console.print(finding.found, markup=False)
        if finding.advice:
            console.print(f"      {finding.advice}", markup=False, style="dim")
    console.print(f"{bad} bad" if bad else "nothing bad", style="bold")
