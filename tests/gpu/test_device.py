"""What only a GPU can show: bits against the CPU's reference at size, graphs that replay, streams and events, and a
needle under FP8 dots.
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from kvtier_kernels import paged, reference, selftest
from kvtier_kernels.attention import decode
from kvtier_kernels.batch_plan import plan
from kvtier_kernels.paged import WIDTHS
from kvtier_kernels.prefill import prefill
from kvtier_kernels.quantize import quantize
from kvtier_kernels.transfer import BlockTransfer, RegisteredArena

from kvtier.client.torch_views import part_tensor, scale_tensor
from tests.kernels.cases import DEVICE, KINDS, Case, layout_of

CUDA = DEVICE.type == "cuda"
BLOCKS, LAYERS = (256, 8) if CUDA else (2, 1)


@pytest.mark.parametrize("kind", ["head", "block-head", "token-head", "channel"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_self_test_passes(width: int, kind: str) -> None:
    if not CUDA and width not in (64, 256) and kind != "head":
        pytest.skip("all of them on a GPU only")
    for dtype in (torch.bfloat16, torch.float16) if CUDA else (torch.bfloat16,):
        reasons = selftest.run(DEVICE, width, granularity=kind, dtype=dtype).reasons
        if kind == "channel" and width > 128:
            assert "at most 128" in reasons.pop("prefill"), "refused by name"
        assert all(reason == "" for reason in reasons.values()), reasons


@pytest.mark.parametrize("kind", ["head", "block-head", "token-head", "kivi"])
def test_no_code_differs_from_the_cpus_reference(kind: str) -> None:
    """Raw bits as KV: every exponent, subnormals, NaN and Inf."""
    made = layout_of(128, 2, 16, KINDS[kind], layers=LAYERS)
    extents, random = made.extents(), torch.Generator().manual_seed(0)
    raw = [
        torch.randint(-32768, 32768, (BLOCKS, 2, 16, 256), dtype=torch.int16, generator=random).view(torch.bfloat16)
        for _ in range(LAYERS)
    ]
    flags = torch.zeros(BLOCKS, dtype=torch.uint8, device=DEVICE)
    caches = [paged.interleaved(kv.to(DEVICE), 128, flags, KINDS[kind]) for kv in raw]
    bodies = torch.zeros(BLOCKS, extents.slot_bytes, dtype=torch.uint8, device=DEVICE)
    statics = torch.full((LAYERS, 2, 2), 0.05)
    seen = quantize(plan(extents, caches), torch.arange(BLOCKS, device=DEVICE)[:, None], bodies, statics.to(DEVICE))
    found, differing = bodies[:, : extents.body_bytes].cpu().numpy(), 0
    for block in range(BLOCKS):
        for layer in range(LAYERS):
            for part in (0, 1):
                x = raw[layer][block, ..., part * 128 : part * 128 + 128]
                q = reference.quantize(x, KINDS[kind][part], statics[layer, part] if kind == "head" else None)
                differing += int(
                    (
                        part_tensor(found[block], extents, layer, part).view(torch.uint8) != q.codes.view(torch.uint8)
                    ).sum()
                )
                differing += int((scale_tensor(found[block], extents, layer, part) != q.scales).sum())
                differing += int((seen.nonfinite[block, layer, part].cpu() != q.counts.nonfinite).sum())
                differing += int((seen.clipped[block, layer, part].cpu() != q.counts.clipped).sum())
    assert differing == 0


@pytest.mark.skipif(not CUDA, reason="graphs need a GPU")
def test_a_captured_graph_sees_new_flags_and_lengths() -> None:
    case = Case(lengths=(64, 33), group=4, kinds="head", fp8="leading")
    queries, lengths = case.queries(2), torch.tensor([40, 20], dtype=torch.int32, device=DEVICE)
    decode(queries, case.cache, case.table, lengths, 64)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode(queries, case.cache, case.table, lengths, 64)
    for now in ([64, 33], [17, 1]):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        graph.replay()
        right = decode(queries, case.cache, case.table, lengths, 64)
        assert torch.equal(out, right[0]) and torch.equal(lse, right[1])


def test_a_batch_is_readable_when_its_ticket_says_so() -> None:
    extents = layout_of(128, 2, 16, KINDS["head"], layers=LAYERS).extents()
    flags = torch.zeros(BLOCKS, dtype=torch.uint8, device=DEVICE)
    caches = [
        paged.interleaved(torch.randn(BLOCKS, 2, 16, 256).bfloat16().to(DEVICE), 128, flags, KINDS["head"])
        for _ in range(LAYERS)
    ]
    made, slot = plan(extents, caches), extents.slot_bytes
    memory = np.frombuffer(mmap.mmap(-1, BLOCKS * slot), dtype=np.uint8)
    bodies = [memory[i * slot + 256 : i * slot + 256 + extents.body_bytes] for i in range(BLOCKS)]
    pages, statics = torch.arange(BLOCKS)[:, None], torch.full((LAYERS, 2, 2), 0.05, device=DEVICE)
    registered = RegisteredArena(memory, DEVICE)
    mover = BlockTransfer(made, registered, staging=3)
    ticket = mover.save(pages, bodies, statics)
    if CUDA:
        ticket.before(torch.cuda.current_stream())
    for cache in caches:  # the engine reuses its pages at once, ordered behind the ticket
        assert cache.keys.native is not None
        cache.keys.native.zero_()
    assert ticket.wait(30) and int(ticket.seen.nonfinite.sum()) == 0
    assert any(bool(body[-64:].any()) for body in bodies)
    before = [body.copy() for body in bodies]
    assert mover.load(bodies, pages).wait(30) and bool(flags.all())
    assert mover.save(pages, bodies, statics).wait(30)
    assert all(np.array_equal(a, b) for a, b in zip(before, bodies, strict=True)), "saved again verbatim"
    registered.close()


@pytest.mark.parametrize("dots", ["fp16", "qk", "qk+pv"])
def test_a_needle_in_a_long_context(dots: str) -> None:
    """One key in a long context points at one value: it must come back whole, and the coherent rest must not shrink."""
    context, width = (131072 if CUDA else 192), 128
    pages, random = context // 16, torch.Generator().manual_seed(0)
    kv = torch.zeros(pages, 1, 16, 2 * width, dtype=torch.bfloat16, device=DEVICE)
    cache = paged.interleaved(kv, width, torch.ones(pages, dtype=torch.uint8, device=DEVICE), KINDS["head"])
    k, v = (torch.randn(pages, 1, 16, width, generator=random) * size for size in (0.05, 1.0))
    v += 0.3  # what all values have in common
    needle, mark = context // 3, torch.sign(torch.randn(width, generator=random))
    k[needle // 16, 0, needle % 16], v[needle // 16, 0, needle % 16] = mark * 2, mark * 4
    for plane, x, scale in zip(cache, (k, v), (0.01, 0.02), strict=True):
        assert plane.codes is not None and plane.scales is not None
        plane.codes.copy_((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).to(DEVICE))
        plane.scales.fill_(scale)
    q = torch.stack([mark * 3, torch.zeros(width)])[:, None].bfloat16()
    q = (
        q.expand(2, 2, width).contiguous().to(DEVICE)
    )  # [2 tokens, 2 heads]: one looks for the needle, one averages everything
    lengths, starts = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([context], [0, 2]))
    table = torch.arange(pages, dtype=torch.int32, device=DEVICE)[None]
    out = prefill(q, cache, table, starts, lengths, 2, dtype=torch.float32, dots=dots)[0].cpu().double()
    keys, values = (
        plane.codes.view(torch.float8_e4m3fn).cpu().double().reshape(context, width) * s
        for plane, s in zip(cache, (0.01, 0.02), strict=True)
    )  # type: ignore[union-attr]
    for i in (0, 1):
        weights = (keys[: context - 1 + i] @ q[i, 0].cpu().double() * width**-0.5).softmax(0)
        right = weights @ values[: context - 1 + i]
        gain = float(out[i, 0] @ right / (right @ right))
        assert gain == pytest.approx(1, abs=5e-3 if dots != "fp16" else 1e-4), i
