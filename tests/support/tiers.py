"""Blocks and memory for the tests of tiers: numbered blocks with real headers, in slots aligned as the arena's are."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kvtier.errors import KvtierError, Lost, NotFound, Unavailable
from kvtier.format.block import digest, header_template, headers
from kvtier.format.identity import NO_CONTEXT, Description, derive_keys
from kvtier.format.layout import HEADER_BYTES, Range
from kvtier.store.namespaces import Namespaces
from kvtier.tiers.ssd import inspection
from kvtier.tiers.ssd.ssd import MIN_CAPACITY, Ssd
from kvtier.tiers.tier import Outgoing, Tier
from tests.support.daemon import body, content_hash, description
from tests.support.disks import Failing

ABSENT = (NotFound, Lost, Unavailable, OSError)  # what a read that brings nothing may raise


def memory(nbytes: int) -> memoryview:
    """Page-aligned memory of its own, zeros."""
    return memoryview(mmap.mmap(-1, nbytes))


class Registry:
    """A registry of namespaces, as a daemon has one."""

    def __init__(self) -> None:
        self.namespaces = Namespaces(set, lambda namespace: 0)
        self.register = self.namespaces.register

    def samples(self, nbytes: int = 1024, tenant: str = "t", **fields: Any) -> Samples:
        return Samples(self, description(nbytes, **fields), tenant)


class Samples:
    """The numbered blocks of one namespace."""

    def __init__(self, registry: Registry, wanted: Description, tenant: str) -> None:
        self.namespace = registry.register(wanted.canonical, tenant)
        self.resolved = wanted.layout.resolve(Range())
        self.extents = wanted.layout.extents()
        self.nbytes, self.slot_bytes = self.extents.block_bytes, self.extents.slot_bytes
        self._template = header_template(self.namespace.digest, self.resolved, NO_CONTEXT, self.extents, 32)

    def key(self, n: int) -> bytes:
        return derive_keys(self.namespace.digest, self.resolved, NO_CONTEXT, content_hash(n), 32)[0]

    def keys(self, numbers: Sequence[int]) -> list[bytes]:
        return [self.key(n) for n in numbers]

    def block(self, n: int) -> bytes:
        """Header and body."""
        head: bytes = headers(self._template, [self.key(n)], [content_hash(n)]).tobytes()
        return head + body(n, self.nbytes - HEADER_BYTES).tobytes()

    def outgoing(self, n: int) -> Outgoing:
        """Block n on its way down, in a slot of its own."""
        slot, block = memory(self.slot_bytes), self.block(n)
        slot[: self.nbytes] = block
        return Outgoing(self.key(n), self.namespace, slot, self.nbytes, digest(block))

    def put(self, tier: Tier, numbers: Sequence[int]) -> list[bool]:
        return tier.write([self.outgoing(n) for n in numbers])

    def get(self, tier: Tier, n: int) -> bytes | None:
        """Block n, checked against what it must be; None for any absence. Fails for anything but the right bytes."""
        slot = memory(self.slot_bytes)
        try:
            checksum = tier.read(self.key(n), slot, self.nbytes)
        except ABSENT:
            return None
        found, right = bytes(slot[: self.nbytes]), self.block(n)
        assert found == right, f"block {n} is not what was put"
        assert checksum == digest(right)
        return found

    def known(self, tier: Tier, numbers: Sequence[int]) -> list[int]:
        """Those of these blocks that the tier says it has."""
        return [n for n, here in zip(numbers, tier.find(self.keys(numbers)), strict=True) if here]

    def whole(self, tier: Tier, numbers: Sequence[int]) -> list[int]:
        """Those of these blocks that can be read; each is right."""
        return [n for n in numbers if self.get(tier, n) is not None]


def fault_of(tier: Tier, samples: Samples, n: int) -> type[KvtierError | OSError] | None:
    """What a read of block n raises; None if it is whole."""
    try:
        tier.read(samples.key(n), memory(samples.slot_bytes), samples.nbytes)
    except ABSENT as error:
        return type(error)
    return None


def flip(data: bytes, at: int, bit: int = 0) -> bytes:
    """These bytes with one bit turned."""
    changed = np.frombuffer(data, np.uint8).copy()
    changed[at] ^= 1 << bit
    return changed.tobytes()


class Shop:
    """A directory, a disk that fails when told to, and the tiers opened there one after another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.disk = Failing()
        self.registry = Registry()
        self.samples = self.registry.samples()
        self.tier: Ssd = None  # type: ignore[assignment]

    def __enter__(self) -> Shop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Proves that books, journal and data file agree."""
        self.disk.heal()
        try:
            if kind is None:
                self.tier.check_integrity()
        finally:
            self.tier.close()
        if kind is None:
            report = inspection.check(self.path)
            assert not report.findings, report.findings
            assert report.blocks == self.tier.gauges()["blocks"]

    def open(self, capacity: int = MIN_CAPACITY, **options: object) -> Ssd:
        """A tier on this directory, in place of the one before."""
        if self.tier is not None:
            self.tier.close()
        self.registry = Registry()
        self.samples = self.registry.samples()
        self.tier = Ssd(self.path, capacity, self.registry.register, disk=self.disk, **options)  # type: ignore[arg-type]
        return self.tier

    def data(self) -> bytearray:
        return bytearray((self.path / "blocks").read_bytes())

    def used(self) -> int:
        """Bytes of the disk that the directory takes."""
        total = 0
        for path in [self.path, *self.path.rglob("*")]:
            try:
                total += path.lstat().st_blocks * 512
            except FileNotFoundError:
                pass  # a half that was just finished or removed
        return total

    def place(self, n: int) -> int:
        """Where block n stands in the data file."""
        found = self.data().find(self.samples.block(n))
        assert found >= 0
        return found


def degraded(tier: Ssd) -> int:
    return tier.gauges()["degraded"]


def checkpoints(tier: Ssd) -> int:
    return tier.gauges()["checkpoints_total"]
