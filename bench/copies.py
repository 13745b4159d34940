"""Blocks copied through the lane, and the same copies without the store: the `copy` case of `planes`.

Put goes through `Client.put`; get with copy is `Client.get` into a pool that exists already, as an engine's staging
buffer does. What comes back is compared with what was put."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bench.empty import EmptyLane
from bench.harness import Effort, KiB, MiB, Phase, interleave, ratios
from bench.live import BATCH, DEADLINE, Live, arena_for, fresh, measure_calls
from bench.marks import MARKS
from bench.pools import Bytes, endless, pool_bytes, private, shared
from bench.report import Report
from kvtier.client.api import Fill, Lease
from kvtier.format.layout import HEADER_BYTES
from kvtier.protocol.frames import Verb
from kvtier.protocol.v1 import kvtier_pb2 as pb


class Copier:
    """One batch of blocks through the lane, and the same copies without the store. `recent` holds the batches put last,
    which `get` reads."""

    def __init__(self, live: Live, empty: EmptyLane, size: int, quick: bool) -> None:
        nblocks = pool_bytes(quick, BATCH * size) // size // BATCH * BATCH
        self.live = live
        self.source, self.target, self.mapped = (
            private(nblocks, size, fill=True),
            private(nblocks, size),
            shared(nblocks, size),
        )
        self.recent: deque[tuple[bytes, range]] = deque(maxlen=nblocks // BATCH)
        self.puts, self.ins, self.outs = (endless(nblocks, BATCH) for _ in range(3))
        self.turn = 0
        calls = measure_calls(live)
        self.reserve, self.seal = empty.call(calls.reserve), empty.call(calls.seal)
        self.lease, self.release = empty.call(calls.lease), empty.call(calls.release)

    def put(self) -> None:
        hashes, blocks = fresh(), next(self.puts)
        sealed = self.live.client.put(self.live.namespace, hashes, [self.source[i] for i in blocks], deadline=DEADLINE)
        assert sealed == BATCH, f"{sealed} of {BATCH} blocks were put"
        self.recent.append((hashes, blocks))

    def get(self) -> None:
        self.turn += 1
        hashes, to = self.recent[self.turn % len(self.recent)]
        into = [self.target[i] for i in to]
        blocks = self.live.client.get(self.live.namespace, hashes, deadline=DEADLINE, into=into)
        assert len(blocks) == BATCH, f"{len(blocks)} of {BATCH} blocks: {blocks.reason}"

    def copy_in(self) -> None:
        blocks = next(self.ins)
        for i in blocks:
            np.copyto(self.mapped[i], self.source[i])

    def copy_out(self) -> None:
        blocks = next(self.outs)
        for i in blocks:
            np.copyto(self.target[i], self.mapped[i])

    def empty_put(self) -> None:
        self.reserve()
        self.copy_in()
        self.seal()

    def empty_get(self) -> None:
        self.lease()
        self.copy_out()
        self.release()

    def check(self) -> None:
        """Everything in `recent` comes back as it was put."""
        for i in self.target:
            i.fill(0)
        for _ in range(len(self.recent)):
            self.get()
        for _, blocks in self.recent:
            assert all(np.array_equal(self.source[i], self.target[i]) for i in blocks), (
                "the store gave back other bytes than were put"
            )


def pipelined(copier: Copier, nbatches: int, read: bool) -> Callable[[], None]:
    """A run of batches with two in flight: a second thread reserves (leases) the next and seals (releases) the last
    while this one copies."""
    client, namespace = copier.live.client, copier.live.namespace

    def open_(hashes: bytes) -> tuple[Lease | Fill, list[Bytes | None]]:
        held = (
            client.lease(namespace, hashes, deadline=DEADLINE)
            if read
            else client.fill(namespace, hashes, deadline=DEADLINE)
        )
        return held, list(held.__enter__())

    def close(held: Lease | Fill) -> None:
        held.__exit__(None, None, None)
        if isinstance(held, Fill):
            assert held.sealed == BATCH, f"{held.sealed} of {BATCH} blocks were put: {held.reason}"

    def run() -> None:
        work = [
            copier.recent[i % len(copier.recent)] if read else (fresh(), next(copier.puts)) for i in range(nbatches)
        ]
        with ThreadPoolExecutor(1) as control:
            ahead = deque(control.submit(open_, hashes) for hashes, _ in work[:2])
            closed = []
            for n, (_, blocks) in enumerate(work):
                held, bodies = ahead.popleft().result()
                assert len(bodies) == BATCH, f"{len(bodies)} of {BATCH} blocks: {held.reason}"
                for i, body in zip(blocks, bodies, strict=True):
                    assert body is not None, held.reason
                    if read:
                        np.copyto(copier.target[i], body)
                    else:
                        np.copyto(body, copier.source[i])
                closed.append(control.submit(close, held))
                if n + 2 < nbatches:
                    ahead.append(control.submit(open_, work[n + 2][0]))
            for done in closed:
                done.result(DEADLINE)
        if not read:
            copier.recent.extend(work)

    return run


def split_calls(copier: Copier, nbatches: int, read: bool) -> Callable[[], None]:
    """The same with one thread, below the client library: a call is sent before the copy it hides behind and its answer
    read after it."""
    opener, closer = copier.live.raw(), copier.live.raw()
    memory, nbytes = opener.attachment.memory, copier.live.body_bytes
    opening, closing = (Verb.LEASE, Verb.RELEASE) if read else (Verb.RESERVE, Verb.SEAL)

    def open_(hashes: bytes) -> int:
        keys = opener.keys(hashes, reserve=not read)
        opener.send(opening, keys)
        return keys.id

    def run() -> None:
        work = [
            copier.recent[i % len(copier.recent)] if read else (fresh(), next(copier.puts)) for i in range(nbatches)
        ]
        following = open_(work[0][0])
        for n, (_, blocks) in enumerate(work):
            id_, offsets = following, pb.Slots.FromString(opener.answer()).offset
            if n + 1 < nbatches:
                following = open_(work[n + 1][0])
            for i, offset in zip(blocks, offsets, strict=True):
                slot = memory[offset + HEADER_BYTES : offset + HEADER_BYTES + nbytes]
                if read:
                    np.copyto(copier.target[i], slot)
                else:
                    np.copyto(slot, copier.source[i])
            if n:
                closer.answer()
            closer.send(closing, pb.Held(id=id_))
        closer.answer()
        if not read:
            copier.recent.extend(work)

    return run


def copy(report: Report, quick: bool) -> None:
    """Put and get-with-copy of 32 blocks a call against the same copies inside an empty pair of calls; beside it, plain
    np.copyto."""
    sizes = (128 * KiB, 1 * MiB) if quick else (128 * KiB, 256 * KiB, 1 * MiB, 4 * MiB)
    for size in sizes:
        nbatches = pool_bytes(quick, BATCH * size) // (BATCH * size)
        with Live(arena_for(4 * nbatches * BATCH, size), size) as live, EmptyLane(live.options) as empty:
            copier = Copier(live, empty, size, quick)
            for _ in range(4 * nbatches):  # the client's first touch of each slot is not what is measured
                copier.put()
            watch = {"daemon": live.pid}
            puts = interleave(
                {"put": copier.put, "empty": copier.empty_put, "copy": copier.copy_in}, Effort.of(quick), watch
            )
            gets = interleave(
                {"get": copier.get, "empty": copier.empty_get, "copy": copier.copy_out}, Effort.of(quick), watch
            )
            copier.check()
            _copy_rows(report, size, "put", puts)
            _copy_rows(report, size, "get", gets)
            if size == 1 * MiB:
                _in_flight_rows(report, copier, 4 if quick else 32, Effort.of(quick))


def _in_flight_rows(report: Report, copier: Copier, nbatches: int, effort: Effort) -> None:
    for verb, read, plain in (("put", False, copier.copy_in), ("get", True, copier.copy_out)):
        phases: dict[str, Callable[[], object]] = {
            "thread": pipelined(copier, nbatches, read),
            "split": split_calls(copier, nbatches, read),
            "one": _times(copier.get if read else copier.put, nbatches),
            "copy": _times(plain, nbatches),
        }
        done = interleave(phases, effort, {"daemon": copier.live.pid})
        for name, what in (
            ("one", "one batch in flight"),
            ("thread", "two batches in flight"),
            ("split", "two in flight, raw split calls"),
        ):
            report.share(f"{verb} 1024 KiB, {what}", "share of np.copyto", ratios(done[name], done["copy"]))
        copier.check()


def _times(call: Callable[[], None], n: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(n):
            call()

    return run


def _copy_rows(report: Report, size: int, verb: str, done: dict[str, Phase]) -> None:
    case = f"{verb} {size // KiB} KiB"
    gigabytes = BATCH * size / 1e9
    lane, empty, plain = done[verb], done["empty"], done["copy"]
    report.add(
        case, "speed, 32 blocks a call", lane.rate * gigabytes, "GB/s", empty.rate * gigabytes, ratios(lane, empty)
    )
    report.share(case, "share of copies in an empty pair", ratios(lane, empty), MARKS.get(case))
    report.share(case, "share of np.copyto", ratios(lane, plain))
    report.share(case, "empty pair's share of np.copyto", ratios(empty, plain))
    for who in ("client", "daemon"):
        report.add(
            case,
            f"CPU of the {who}",
            lane.cpu_per_call(who) / gigabytes,
            "s/GB",
            empty.cpu_per_call("client") / gigabytes if who == "client" else None,
        )
    report.add(case, "worst call", lane.worst * 1e3, "ms", empty.worst * 1e3, lane.worst / empty.worst)
