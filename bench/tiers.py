"""The SSD tier against the disk it stands on: puts and gets, reading the index, memory's readers while it hangs, the
disk it takes.

`python -m bench.tiers [--quick] [--strict] [--json FILE] [--dir DIR]`. The ceiling of a put is pwritev of the same
slots to a preallocated file plus xxh3 of the same blocks, that of a get preadv plus xxh3, both O_DIRECT with as many
threads, in the same run. Takes up to 2 GiB in DIR for a while."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count, cycle
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import xxhash

from bench.harness import Child, Effort, KiB, MiB, Phase, end_cleanly, interleave, now, percentile, ratios
from bench.live import BATCH, HASH, description, leases, slot_bytes
from bench.pools import POPULATE_WRITE, memfd, populate
from bench.report import Report
from kvtier.client.api import Client
from kvtier.format.block import digest, header_template, headers
from kvtier.format.identity import NO_CONTEXT, derive_keys
from kvtier.format.layout import Range
from kvtier.store.namespaces import Namespaces
from kvtier.tiers.ssd import recovery
from kvtier.tiers.ssd.data_file import WRITERS
from kvtier.tiers.ssd.disk import Disk
from kvtier.tiers.ssd.journal import Journal
from kvtier.tiers.ssd.ssd import Ssd
from kvtier.tiers.tier import Outgoing

MARKS: dict[str, tuple[str, float]] = {
    "1024 KiB": (">=", 0.85),
    "256 KiB": (">=", 0.60),
    "100,000": ("<=", 0.5),
    "1,000,000": ("<=", 5.0),
    "stalled p99": ("<=", 2.0),
    "disk": ("<=", 1.0),
}
STALL = 30.0  # seconds


class Blocks:
    """Slots of one block size in memory, under keys that are new with each batch."""

    def __init__(self, namespaces: Namespaces, body_bytes: int, slots: int) -> None:
        wanted = description(body_bytes)
        self.namespace = namespaces.register(wanted.canonical, "bench")
        self._resolved = wanted.layout.resolve(Range())
        extents = wanted.layout.extents()
        self.nbytes, self.slot_bytes = extents.block_bytes, extents.slot_bytes
        self._template = header_template(self.namespace.digest, self._resolved, NO_CONTEXT, extents, HASH)
        mapping = memfd(slots * self.slot_bytes)[0]
        populate(mapping, POPULATE_WRITE)
        whole = memoryview(mapping)
        np.frombuffer(whole, np.uint8)[:] = np.arange(slots * self.slot_bytes) % 113
        self.slots = [whole[at : at + self.slot_bytes] for at in range(0, slots * self.slot_bytes, self.slot_bytes)]
        self._turn = cycle(range(0, slots - BATCH + 1, BATCH))

    def batch(self) -> tuple[list[bytes], list[memoryview]]:
        """The next slots, as fresh blocks: (keys, slots)."""
        start = next(self._turn)
        slots = self.slots[start : start + BATCH]
        return self.renamed(slots), slots

    def renamed(self, slots: Sequence[memoryview]) -> list[bytes]:
        """Makes these slots fresh blocks: their keys, which stand in their headers too."""
        hashes = [os.urandom(HASH) for _ in slots]
        keys = derive_keys(self.namespace.digest, self._resolved, NO_CONTEXT, b"".join(hashes), HASH)
        for slot, head in zip(slots, headers(self._template, keys, hashes), strict=True):
            slot[: len(head)] = head.tobytes()
        return keys

    def put(self, tier: Ssd) -> list[bytes]:
        """A batch through the tier, as the settler does it: a digest each, then one write. Returns its keys."""
        keys, slots = self.batch()
        out = [
            Outgoing(k, self.namespace, s, self.nbytes, digest(s[: self.nbytes]))
            for k, s in zip(keys, slots, strict=True)
        ]
        assert all(tier.write(out)), tier.gauges()
        return keys


def transfers(report: Report, body_bytes: int, quick: bool, where: Path) -> None:
    """Batches of 32 through the tier and raw."""
    total, slot = (64 if quick else 640) * MiB, slot_bytes(body_bytes)
    places = total // slot
    with tempfile.TemporaryDirectory(dir=where) as name, ThreadPoolExecutor(WRITERS) as pool, ExitStack() as stack:
        namespaces = Namespaces(set, lambda _: 0)
        blocks = Blocks(namespaces, body_bytes, 2 * BATCH if quick else 4 * BATCH)
        tier = Ssd(Path(name) / "ssd", total, namespaces.register)
        stack.callback(tier.close)
        fd = os.open(Path(name) / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        stack.callback(os.close, fd)
        os.posix_fallocate(fd, 0, places * slot)
        turn, target = count(), blocks.slots[:BATCH]

        def shared(work: Callable[[int], None]) -> None:
            """Work on each of the batch, as many at once as the tier has writers."""
            list(pool.map(lambda first: [work(i) for i in range(first, BATCH, WRITERS)], range(WRITERS)))

        def raw_put() -> None:
            _, slots = blocks.batch()
            first = next(turn) * BATCH
            for one in slots:
                xxhash.xxh3_64_intdigest(one[: blocks.nbytes])
            shared(lambda i: _whole(os.pwritev(fd, [slots[i]], (first + i) % places * slot), slot))

        for _ in range(places // BATCH + 1):  # every place has been written once: what is measured overwrites
            blocks.put(tier)
            raw_put()
        done = interleave({"tier": lambda: blocks.put(tier), "raw": raw_put}, Effort.of(quick, 15, 0.3))
        _share(report, body_bytes, "put", done)
        which = cycle([blocks.put(tier) for _ in range(max(1, places // BATCH // 2))])

        def get() -> None:
            keys = next(which)
            shared(lambda i: _whole(tier.read(keys[i], target[i], blocks.nbytes) > 0, True))

        def raw_get() -> None:
            first = next(turn) * BATCH

            def one(i: int) -> None:
                _whole(os.preadv(fd, [target[i]], (first + i) % places * slot), slot)
                xxhash.xxh3_64_intdigest(target[i][: blocks.nbytes])

            shared(one)

        _share(report, body_bytes, "get", interleave({"tier": get, "raw": raw_get}, Effort.of(quick, 15, 0.3)))


def _whole(done: int, wanted: int) -> None:
    assert done == wanted


def _share(report: Report, body_bytes: int, what: str, done: dict[str, Phase]) -> None:
    case, gigabytes = f"{body_bytes // KiB} KiB", BATCH * body_bytes / 1e9
    report.add(case, f"{what} rate", done["tier"].rate * gigabytes, "GB/s", done["raw"].rate * gigabytes)
    report.share(case, what, ratios(done["tier"], done["raw"]), MARKS[case])


def rebuild(report: Report, blocks: int, quick: bool, where: Path) -> None:
    """Opening a directory whose journal has so many blocks, in frames of 8."""
    with tempfile.TemporaryDirectory(dir=where) as name:
        path, namespaces = Path(name) / "ssd", Namespaces(set, lambda _: 0)
        capacity = max(64 * MiB, blocks * 4096 * 5 // 4)
        Ssd(path, capacity, namespaces.register).close()
        namespace = namespaces.register(description(3 * KiB).canonical, "bench")
        records = recovery.puts(
            [os.urandom(32) for _ in range(blocks)],
            page=np.arange(blocks, dtype=np.uint32),
            slot=np.full(blocks, 4096, np.uint32),
            nbytes=np.full(blocks, 3328, np.uint32),
            namespace=np.ones(blocks, np.uint32),
            checksum=np.ones(blocks, np.uint32),
        )
        journal = Journal(path, 2**40, False, Disk())
        list(journal.load())
        for at in range(0, blocks, 8):
            journal.append(records[at : at + 8], [(1, "bench", namespace.description.canonical)] if at == 0 else [])
        journal.close()
        os.truncate(path / "blocks", capacity)  # a hole: no data is read
        times = []
        for _ in range(1 if quick else 3):
            start = now()
            tier = Ssd(path, capacity * 17 // 16, Namespaces(set, lambda _: 0).register)
            times.append(now() - start)
            assert tier.gauges()["blocks"] >= blocks * 99 // 100, tier.gauges()
            tier.close()
        report.add(
            f"index of {blocks:,} blocks", "open", sorted(times)[len(times) // 2], "s", mark=MARKS.get(f"{blocks:,}")
        )


def stalled(report: Report, quick: bool, where: Path) -> None:
    """Leases of 32 blocks in memory, while others are put, before, while and after the SSD tier stands still."""
    seconds = 1.0 if quick else STALL
    with tempfile.TemporaryDirectory(dir=where) as name, ExitStack() as stack:
        socket = Path(name) / "k.sock"
        arguments = [
            "-m",
            "bench.stalled",
            "--config",
            os.devnull,
            "--socket",
            str(socket),
            "--arena-bytes",
            "256MiB",
            "--grpc",
            "off",
        ]
        daemon = stack.enter_context(Child([*arguments, "--ssd", f"path={name}/ssd,size=512MiB,free=0"]))
        client, writer = (stack.enter_context(Client(f"unix:{socket}")) for _ in range(2))
        ns, hashes, stop = client.register(description(64 * KiB)), os.urandom(BATCH * HASH), threading.Event()

        def puts() -> None:
            mine = writer.register(description(64 * KiB))
            while not stop.is_set():
                with writer.fill(mine, os.urandom(4 * HASH), deadline=5.0):
                    pass
                time.sleep(0.01)

        def measure() -> list[float]:
            return leases(client, ns, hashes, int(seconds), "leases")

        with client.fill(ns, hashes, deadline=5.0):
            pass
        thread = threading.Thread(target=puts, daemon=True)
        thread.start()
        before = measure()
        os.kill(daemon.pid, signal.SIGUSR1)
        during = measure()
        assert client.status()["settle_queue_blocks"] > 0, "the tier did not stand still"
        os.kill(daemon.pid, signal.SIGUSR2)
        calm = [*before, *measure()]
        stop.set()
        thread.join(10)
        _stall_rows(report, f"SSD tier stalled for {seconds:.0f} s", calm, during)


def _stall_rows(report: Report, case: str, calm: Sequence[float], during: Sequence[float]) -> None:
    ratio = percentile(during, 99) / percentile(calm, 99)
    report.add(case, "lease p99", percentile(during, 99) * 1e3, "ms", percentile(calm, 99) * 1e3, ratio)
    report.add(case, "lease p99 over undisturbed", ratio, "ratio", mark=MARKS["stalled p99"])
    report.add(case, "worst lease", max(during) * 1e3, "ms", max(calm) * 1e3)
    report.add(case, "leases", len(during), "calls")


def peak(report: Report, quick: bool, where: Path) -> None:
    """The most that the directory takes while ten times its capacity is put."""
    capacity = (16 if quick else 128) * MiB
    with tempfile.TemporaryDirectory(dir=where) as name:
        path, namespaces, most = Path(name) / "ssd", Namespaces(set, lambda _: 0), 0
        blocks = Blocks(namespaces, 60 * KiB, 2 * BATCH)
        tier = Ssd(path, capacity, namespaces.register)
        for _ in range(10 * capacity // (BATCH * blocks.slot_bytes)):
            blocks.put(tier)
            most = max(most, sum(_disk(entry.path) for entry in os.scandir(path)))
        tier.close()
    report.add(
        "disk taken by puts of 10 times the capacity",
        "peak over capacity",
        most / capacity,
        "ratio",
        mark=MARKS["disk"],
    )


def _disk(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0  # a half that was just finished


def main(
    quick: Annotated[bool, typer.Option(help="Walk through everything, measure nothing worth reading.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a mark is missed.")] = False,
    json: Annotated[Path | None, typer.Option(help="Keep the rows in this file.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where the files go. [default: the temporary directory]")
    ] = None,
) -> None:
    """What the SSD tier costs beside its disk."""
    end_cleanly()
    arguments = [
        *(["--quick"] if quick else []),
        *(["--strict"] if strict else []),
        *(["--json", str(json)] if json else []),
    ]
    report = Report("bench.tiers", [*arguments, *(["--dir", str(directory)] if directory else [])])
    where = directory or Path(tempfile.gettempdir())
    for body_bytes in (MiB, 256 * KiB):
        transfers(report, body_bytes, quick, where)
    for blocks in (1_000, 10_000) if quick else (100_000, 1_000_000):
        rebuild(report, blocks, quick, where)
    peak(report, quick, where)
    stalled(report, quick, where)
    raise SystemExit(report.finish(json, strict))


if __name__ == "__main__":
    typer.run(main)
