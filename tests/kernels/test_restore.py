"""restore, expand, transfer and the self-test: blocks back into pages, byte for byte, and through a host arena."""

from __future__ import annotations

import mmap
import time

import numpy as np
import pytest
import torch
from kvtier_kernels import paged, reference, selftest
from kvtier_kernels.batch_plan import plan
from kvtier_kernels.expand import Expander
from kvtier_kernels.paged import WIDTHS
from kvtier_kernels.restore import restore
from kvtier_kernels.transfer import BlockTransfer, RegisteredArena, TransferTicket

from kvtier.errors import Invalid
from tests.kernels.cases import DEVICE, KINDS, NANS, ORDERS, cache_of, layout_of, storage
from tests.kernels.test_quantize import Setting


def empty(setting: Setting, order: str, flags: torch.Tensor | None) -> list[paged.Paged]:
    """Caches like those of the setting, every byte NaN."""
    made = []
    for layer in setting.extents.group.layers:
        kinds = tuple("head" if part.native else part.granularity for part in layer.parts)
        width, group = layer.parts[0].width, setting.extents.group
        made.append(
            cache_of(
                storage(order, 6, group.heads, setting.page, width, torch.bfloat16, NANS), (kinds[0], kinds[1]), flags
            )
        )
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_restored_slots_hold_the_codes_and_scales_of_the_block(order: str, kind: str) -> None:
    """Into another order than they came from; two pages an engine block, an excluded layer between two; page ids below
    0 are skipped, flags follow.
    """
    setting = Setting(layout_of(64, 2, 32, KINDS[kind], layers=3, excluded=(1,)), "HND", page=16)
    bodies, _ = setting.run([[5, 0], [2, 1]])
    flags = torch.zeros(6, dtype=torch.uint8, device=DEVICE)
    flags[0] = 1
    caches = empty(setting, order, flags)
    restore(plan(setting.extents, caches), bodies.to(DEVICE), torch.tensor([[3, 4], [-1, 5]], device=DEVICE))
    assert flags.tolist() == [1, 0, 0, 1, 1, 1], "skipped pages keep their flag, page 0 too"
    for layer, part in ((0, 0), (0, 1), (2, 0), (2, 1)):
        plane = list(caches[layer])[part]
        assert plane.codes is not None and plane.scales is not None
        for page, source, at in ((3, [5, 0], 0), (4, [5, 0], 16), (5, [2, 1], 16)):
            static = setting.statics[layer, part] if kind in ("tensor", "head") else None
            q = reference.quantize(
                setting.source(layer, part, source), "head" if static is not None else KINDS[kind][part], static
            )
            assert torch.equal(plane.codes[page].cpu(), q.codes[:, at : at + 16].view(torch.uint8))
            scales = q.scales[:, at : at + 16] if KINDS[kind][part] == "token-head" else q.scales
            assert torch.equal(plane.scales[page].cpu().flatten(), scales.flatten())
    for part, plane in enumerate(caches[1]):
        assert plane.native is not None
        assert torch.equal(plane.native[3].cpu(), setting.source(1, part, [5])) and torch.equal(
            plane.native[5].cpu(), setting.source(1, part, [1])
        )
        assert bool(plane.native[2].isnan().all()), "no other page was touched"


def test_codes_go_into_an_fp8_engines_cache_and_scales_stay_out_of_it() -> None:
    setting = Setting(layout_of(128, 2, 16, KINDS["head"]), "NHD")
    bodies, _ = setting.run([[1], [4]])
    codes = torch.zeros(2, 6, 2, 16, 128, dtype=torch.uint8, device=DEVICE)
    scales = setting.statics[0].to(DEVICE)
    restore(
        plan(setting.extents, [paged.fp8(codes[0], codes[1], scales[0], scales[1])]),
        bodies.to(DEVICE),
        torch.tensor([[3], [0]], device=DEVICE),
    )
    for part in (0, 1):
        q = reference.quantize(setting.source(0, part, [1]), "head", setting.statics[0, part])
        assert torch.equal(codes[part, 3].cpu(), q.codes.view(torch.uint8))
        assert not codes[part, [1, 2, 4, 5]].any()


def test_a_native_namespace_comes_back_unchanged_and_clears_flags() -> None:
    setting = Setting(layout_of(96, 2, 16, ("head", "head"), excluded=(0,)), "split")
    bodies = setting.check([[2], [3]])
    flags = torch.ones(6, dtype=torch.uint8, device=DEVICE)
    caches = empty(setting, "interleaved", flags)
    restore(plan(setting.extents, caches), bodies.to(DEVICE), torch.tensor([[0], [5]], device=DEVICE))
    assert flags.tolist() == [0, 1, 1, 1, 1, 0]
    for part, plane in enumerate(caches[0]):
        assert plane.native is not None
        assert torch.equal(plane.native[5].cpu().view(torch.int16), setting.source(0, part, [3]).view(torch.int16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [64, 192])
def test_expand_equals_the_reference_bit_for_bit(width: int, kind: str) -> None:
    setting = Setting(
        layout_of(width, 2, 32, KINDS[kind], layers=3, excluded=(1,), small=kind == "kivi"), "NHD", page=16
    )
    bodies, _ = setting.run([[5, 0]])
    flags = torch.ones(6, dtype=torch.uint8, device=DEVICE)
    caches = empty(setting, "HND", flags)
    expander = Expander(enabled=True)
    expander.expand(plan(setting.extents, caches), bodies.to(DEVICE), torch.tensor([[4, -1]], device=DEVICE))
    assert flags.tolist() == [1, 1, 1, 1, 0, 1]
    for layer, part in ((0, 0), (0, 1), (2, 0), (2, 1)):
        plane = list(caches[layer])[part]
        spec = setting.extents.group.layers[layer].parts[part]
        static = setting.statics[layer, part] if kind in ("tensor", "head") else None
        q = reference.quantize(
            setting.source(layer, part, [5, 0]),
            "head" if static is not None else spec.granularity,
            static,
            scale_dtype=spec.scale_dtype,
        )
        wanted = reference.dequantize(q.codes, q.scales, "head" if static is not None else spec.granularity)[
            :, :16
        ].bfloat16()
        assert plane.native is not None and torch.equal(
            plane.native[4].cpu().view(torch.int16), wanted.view(torch.int16)
        )
    assert caches[1].keys.native is not None and torch.equal(caches[1].keys.native[4].cpu(), setting.source(1, 0, [5]))
    assert (expander.blocks, expander.bytes_read) == (1, setting.extents.body_bytes) and expander.launches >= 2
    assert expander.bytes_written == 3 * 2 * 2 * 32 * width * 2 and expander.seconds > 0


def test_a_skipped_page_does_not_hide_that_page_0_was_restored() -> None:
    """Page 0 and null pages in one batch: page 0 holds FP8 now and must say so, and native elements again once it is
    expanded.
    """
    setting = Setting(layout_of(64, 1, 16, KINDS["block-head"]))
    bodies, _ = setting.run([[4], [5], [3]])
    ids = torch.tensor([[-1], [0], [-1]], device=DEVICE)
    restore(setting.plan, bodies.to(DEVICE), ids)
    assert setting.flags.tolist() == [1, 0, 0, 0, 0, 0]
    Expander(enabled=True).expand(setting.plan, bodies.to(DEVICE), ids)
    assert setting.flags.tolist() == [0] * 6


def test_expand_is_off_unless_asked_for() -> None:
    setting = Setting(layout_of(64, 2, 16, KINDS["head"]))
    bodies = torch.zeros(1, setting.extents.body_bytes, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(Invalid, match="expand is off"):
        Expander().expand(setting.plan, bodies, torch.tensor([[0]], device=DEVICE))


# --- transfer


def arena_of(slots: int, slot_bytes: int) -> np.ndarray:  # type: ignore[type-arg]
    """A mapping like the daemon's."""
    return np.frombuffer(mmap.mmap(-1, slots * slot_bytes), dtype=np.uint8)


def test_blocks_travel_to_an_arena_and_back() -> None:
    """More blocks than staging holds; bodies lie behind a header, as in slots; then into other pages, with the same
    attention bytes.
    """
    setting = Setting(layout_of(64, 2, 16, KINDS["head"], layers=2), "interleaved")
    slot, size = setting.extents.slot_bytes, setting.extents.body_bytes
    memory = arena_of(5, slot)
    memory[:] = 0xEE
    bodies = [memory[i * slot + 256 : i * slot + 256 + size] for i in range(5)]
    registered = RegisteredArena(memory, DEVICE)
    pages = torch.tensor([[4], [2], [0], [5], [1]])
    ticket = BlockTransfer(setting.plan, registered, staging=2).save(pages, bodies, setting.statics.to(DEVICE))
    assert ticket.wait(60) and ticket.done()
    wanted, seen = setting.run(pages.tolist())
    for body, right in zip(bodies, wanted, strict=True):
        assert np.array_equal(body, right[:size].numpy())
    assert all(memory[i * slot] == 0xEE for i in range(5)), "headers are the daemon's"
    assert all(torch.equal(a, b) for a, b in zip(ticket.seen, seen, strict=True))
    flags = torch.zeros(6, dtype=torch.uint8, device=DEVICE)
    caches = empty(setting, "NHD", flags)
    back = BlockTransfer(plan(setting.extents, caches), registered, staging=3)
    assert back.load(bodies, torch.tensor([[0], [1], [2], [3], [5]])).wait(60)
    assert flags.tolist() == [1, 1, 1, 1, 0, 1]
    for i, (source, target) in enumerate(zip([4, 2, 0, 5, 1], [0, 1, 2, 3, 5], strict=True)):
        q = reference.quantize(setting.source(1, 1, [source]), "head", setting.statics[1, 1])
        codes = caches[1].values.codes
        assert codes is not None and torch.equal(codes[target].cpu(), q.codes.view(torch.uint8)), i
    expander = Expander(enabled=True)
    assert back.load(bodies[:1], torch.tensor([[4]]), expander).wait(60) and expander.blocks == 1
    registered.close()
    registered.close()
    with pytest.raises(Invalid, match="registered arena"):
        back.load(bodies[:1], torch.tensor([[4]]))


def test_transfer_refuses_what_it_must_not_touch() -> None:
    setting = Setting(layout_of(64, 2, 16, KINDS["block-head"]))
    size, slot = setting.extents.body_bytes, setting.extents.slot_bytes
    memory = arena_of(2, slot)
    registered, pages = RegisteredArena(memory, DEVICE), torch.tensor([[0]])
    mover = BlockTransfer(setting.plan, registered)
    with pytest.raises(Invalid, match="registered arena"):
        mover.load([np.zeros(size, np.uint8)], pages)
    with pytest.raises(Invalid, match="bytes"):
        mover.load([memory[: size - 1]], pages)
    with pytest.raises(Invalid, match="one body for each row"):
        mover.load([memory[:size]], torch.tensor([[0], [1]]))
    locked = memory[:size].view()
    locked.flags.writeable = False
    with pytest.raises(Invalid, match="writable"):
        mover.save(pages, [locked])
    with pytest.raises(Invalid, match="a load sees nothing"):
        _ = mover.load([memory[:size]], pages).seen
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    registered.close()


def test_a_wait_has_a_deadline() -> None:
    class Never:
        def query(self) -> bool:
            return False

    ticket, began = TransferTicket(Never(), [bytearray(1)]), time.monotonic()
    assert not ticket.wait(0.05) and time.monotonic() - began < 5
    with pytest.raises(Invalid, match="before it is done"):
        _ = ticket.seen


# --- self-test


@pytest.mark.parametrize("width", WIDTHS)
def test_the_self_test_passes_here(width: int) -> None:
    kind = ("head", "block-head", "channel", "token-head", "head")[WIDTHS.index(width)]
    report = selftest.run(DEVICE, width, granularity=kind)
    assert (
        report.reasons == dict.fromkeys(("quantize", "expand", "restore", "decode", "prefill", "gather"), "")
        and report.usable
    )


def test_the_self_test_fails_where_a_kernel_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention without the V scale's factor; and a device on which nothing works."""
    right = selftest.decode

    def wrong(*arguments: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(*arguments, **options)  # type: ignore[arg-type]
        return out * 1.01, lse

    monkeypatch.setattr(selftest, "decode", wrong)
    report = selftest.run(DEVICE, 64)
    assert not report.usable and "relative error" in report.reasons["decode"] and report.reasons["prefill"] == ""
    monkeypatch.setattr(selftest, "prefill", lambda *a, **o: 1 / 0)
    assert "ZeroDivisionError" in selftest.run(DEVICE, 64).reasons["prefill"]
    assert "head dim" in "".join(selftest.run(DEVICE, 80).reasons.values())
    assert not selftest.run(torch.device("meta"), 64).usable
