"""Blocks between an engine's pages and a host arena: one contiguous copy a block, one gather or scatter a batch, never
small pieces over the link.

    save   pages -> quantize -> staging on the device -> one copy a block -> the arena's slots      then, and not
           before, a host may read them
    load   the arena's slots -> one copy a block -> staging -> restore (or expand) -> pages         then, and not
           before, the slots may be released

Everything of one BlockTransfer runs in order on a stream of its own, so staging is reused safely and a batch larger
than it goes in pieces. The stream first waits for the engine's: pages may still be written or read by earlier steps.
What comes back is a TransferTicket, an event with what it guards; every wait has a deadline. Host memory is registered
once (`RegisteredArena`), or copies are neither direct nor asynchronous. On a CPU the same steps are plain copies. A
BlockTransfer belongs to one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier.errors import Invalid, Unavailable
from kvtier_kernels.batch_plan import BatchPlan
from kvtier_kernels.expand import Expander
from kvtier_kernels.quantize import QuantizeCounts, quantize
from kvtier_kernels.restore import restore

Body = NDArray[np.uint8]
_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegister flags
STAGING = 32  # bodies in a Mover's staging; at 1 MiB a block 32 MiB of device memory


class RegisteredArena:
    """Host memory that a device copies from and to directly. `memory`: the whole arena mapping, uint8, which must
    outlive this object.

    Raises Unavailable if the driver refuses (locked-memory limit, read-only mapping on an old one): the caller then
    moves no KV. `close` once all tickets are done; it is what lets the mapping be unmapped.
    """

    def __init__(self, memory: NDArray[np.uint8], device: torch.device) -> None:
        if memory.dtype != np.uint8 or not memory.flags.c_contiguous:
            raise Invalid("an arena is one contiguous run of uint8")
        # "cuda" without a number is the current one: tensors always name theirs, and BlockTransfer compares.
        unnumbered = device.type == "cuda" and device.index is None
        self.device = torch.device("cuda", torch.cuda.current_device()) if unnumbered else device
        self.writable = bool(memory.flags.writeable)
        self._memory: NDArray[np.uint8] | None = memory
        self._address: int = memory.__array_interface__["data"][0]
        self._end = self._address + memory.nbytes
        if device.type == "cuda":
            flags = _PORTABLE if self.writable else _PORTABLE | _READ_ONLY
            code = int(torch.cuda.cudart().cudaHostRegister(self._address, memory.nbytes, flags))
            if code:
                self._memory = None
                # CUDA keeps the error for whoever asks next: this launch takes it, not one of the engine's.
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=self.device)
                raise Unavailable(f"cudaHostRegister refused {memory.nbytes} bytes with error {code}")

    def tensor(self, body: Body) -> Tensor:
        """A body inside the arena as a tensor, nothing copied. Raises Invalid if it lies outside, or after close."""
        address: int = body.__array_interface__["data"][0]
        inside = self._address <= address and address + body.nbytes <= self._end
        if self._memory is None or not inside or not body.flags.c_contiguous:
            raise Invalid("this body does not lie in the registered arena")
        raw = (ctypes.c_uint8 * body.nbytes).from_address(address)
        raw.body = body  # type: ignore[attr-defined]
        return torch.frombuffer(raw, dtype=torch.uint8)

    def close(self) -> None:
        """Takes the registration back. Harmless to repeat."""
        if self._memory is not None and self.device.type == "cuda":
            torch.cuda.cudart().cudaHostUnregister(self._address)
        self._memory = None


class TransferTicket:
    """A batch on its way. What it moves stays referenced until it is done."""

    def __init__(self, event: Any, kept: Sequence[Any], seen: Sequence[QuantizeCounts] = ()) -> None:
        self._event, self._kept, self._seen = event, list(kept), seen  # seen: one for each piece of a save

    def done(self) -> bool:
        """Whether all of it has happened. Never waits."""
        if self._event is not None and not self._event.query():
            return False
        self._kept.clear()
        return True

    def wait(self, seconds: float) -> bool:
        """Waits until it is done, at most so long; False if it is not."""
        until, pause = time.monotonic() + seconds, 20e-6
        while not self.done():
            if time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(pause * 2, 1e-3)
        return True

    def before(self, stream: Any) -> None:
        """Work given to this stream from now on (that reads restored or reuses saved pages) starts after the batch."""
        if self._event is not None:
            stream.wait_event(self._event)

    @property
    def seen(self) -> QuantizeCounts:
        """What quantization saw, on the host, [blocks, layers, parts, heads]. A block with a non-finite value must not
        be sealed. Raises Invalid before the ticket is done, and for a load."""
        if not self._seen or not self.done():
            raise Invalid("a load sees nothing, and a save nothing before it is done")
        return QuantizeCounts(*(torch.cat(parts) for parts in zip(*self._seen, strict=True)))


class BlockTransfer:
    """Moves blocks of one plan. Save and load want one each, or they wait for each other."""

    def __init__(self, plan: BatchPlan, arena: RegisteredArena, staging: int = STAGING) -> None:
        if staging < 1 or arena.device != plan.device:
            raise Invalid("a mover needs staging for a block, and an arena registered for its device")
        self.plan, self.arena = plan, arena
        pitch = plan.extents.slot_bytes
        self._staging = torch.zeros(staging, pitch, dtype=torch.uint8, device=plan.device)
        self._stream = None
        if plan.device.type == "cuda":
            self._stream = torch.cuda.Stream(plan.device)
            self._stream.wait_stream(torch.cuda.current_stream(plan.device))  # which zeroes the staging
            self._staging.record_stream(self._stream)  # so its memory is nobody else's while a batch is under way

    def save(self, pages: Tensor, bodies: Sequence[Body], statics: Tensor | None = None) -> TransferTicket:
        """Quantizes blocks from their pages [blocks, pages of a block] into bodies in the arena. Returns at once;
        raises Invalid for what does not fit."""
        targets = self._hosts(pages, bodies, writing=True)
        pieces: list[QuantizeCounts] = []
        if self._stream is not None and statics is not None and statics.is_cuda:
            statics.record_stream(self._stream)

        def move(staging: Tensor, ids: Tensor, hosts: list[Tensor]) -> None:
            seen = quantize(self.plan, ids, staging, statics)
            for slot, host in zip(staging, hosts, strict=True):
                host.copy_(slot[: host.numel()], non_blocking=True)
            pieces.append(QuantizeCounts(*(_to_host(x) for x in seen)))

        return TransferTicket(self._run(pages, targets, move), (bodies, pages, statics), pieces)

    def load(self, bodies: Sequence[Body], pages: Tensor, expander: Expander | None = None) -> TransferTicket:
        """Puts blocks from the arena into their pages [blocks, pages of a block], as FP8 where they are FP8; with an
        expander, as native elements."""
        sources = self._hosts(pages, bodies, writing=False)

        def move(staging: Tensor, ids: Tensor, hosts: list[Tensor]) -> None:
            for slot, host in zip(staging, hosts, strict=True):
                slot[: host.numel()].copy_(host, non_blocking=True)
            if expander is None:
                restore(self.plan, staging, ids)
            else:
                expander.expand(self.plan, staging, ids)

        return TransferTicket(self._run(pages, sources, move), (bodies, pages))

    def _hosts(self, pages: Tensor, bodies: Sequence[Body], writing: bool) -> list[Tensor]:
        if pages.dim() != 2 or len(bodies) != pages.shape[0] or not bodies:
            found = f"{len(bodies)} bodies, ids of shape {tuple(pages.shape)}"
            raise Invalid(f"one body for each row of page ids, and at least one: {found}")
        if any(body.nbytes != self.plan.extents.body_bytes for body in bodies):
            raise Invalid(f"bodies of this plan have {self.plan.extents.body_bytes} bytes")
        if writing and not (self.arena.writable and all(body.flags.writeable for body in bodies)):
            raise Invalid("blocks are saved into reserved, writable slots")
        return [self.arena.tensor(body) for body in bodies]

    def _run(self, pages: Tensor, hosts: list[Tensor], move: Callable[[Tensor, Tensor, list[Tensor]], None]) -> Any:
        """`move` for each piece of the batch that fits the staging, in order; the event of their end, None on a CPU."""
        room = len(self._staging)
        if self._stream is None:
            for at in range(0, len(hosts), room):
                move(self._staging[: len(hosts[at : at + room])], pages[at : at + room], hosts[at : at + room])
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.plan.device))
        with torch.cuda.stream(self._stream):
            ids = pages if pages.is_cuda else pages.pin_memory().to(self.plan.device, non_blocking=True)
            ids.record_stream(self._stream)
            for at in range(0, len(hosts), room):
                move(self._staging[: len(hosts[at : at + room])], ids[at : at + room], hosts[at : at + room])
            event = torch.cuda.Event()
            event.record(self._stream)
        return event


def _to_host(x: Tensor) -> Tensor:
    """A copy on the host that is there once the stream has come so far."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
