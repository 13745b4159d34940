"""What `dual` and `expand` add to the kernels: the write that clears flags, scales that are powers of two, and a GPU's
way to and from a block held against the CPU's, byte for byte.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvtier_kernels import paged, reference
from kvtier_kernels.attention import decode
from kvtier_kernels.batch_plan import plan
from kvtier_kernels.prefill import prefill
from kvtier_kernels.quantize import quantize
from kvtier_kernels.write import write

from kvtier.connectors.common import quantizing
from kvtier.connectors.common.pages import PartCache
from kvtier.connectors.common.quantizing import HostCaches, QuantizedCaches
from kvtier.connectors.common.quantizing_gpu import DeviceCaches
from kvtier.errors import Invalid
from kvtier.format import layout
from tests.kernels.cases import DEVICE, ORDERS, cache_of, exact_attention, layout_of, storage, worst

KINDS = ("block-head", "block-head")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


# Write and clear


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("page", "width"), [(16, 64), (32, 128)])
def test_new_tokens_stand_in_their_slots_and_clear_their_pages_alone(order: str, page: int, width: int) -> None:
    views = storage(order, 8, 3, page, width, torch.bfloat16, 0x55)
    page_flags = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1], dtype=torch.uint8, device=DEVICE)
    cache = cache_of(views, KINDS, page_flags)
    before = [plane.native.clone() for plane in cache if plane.native is not None]
    slots = torch.tensor([2 * page, 2 * page + 1, -1, 5 * page + 3, 4 * page, -1], device=DEVICE)
    keys, values = (
        random(9, 3, width, seed=1),
        random(9, 3, width, seed=2),
    )  # more rows than slots: padding of a captured graph
    write(cache, keys, values, slots)
    assert page_flags.tolist() == [0, 1, 0, 0, 0, 0, 1, 1], (
        "the last page's flag stays, though -1 // tokens is that page"
    )
    for plane, old, new in zip(cache, before, (keys, values), strict=True):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                old[slot // page, :, slot % page] = new[token]
        assert plane.native is not None and torch.equal(plane.native.view(torch.int16), old.view(torch.int16))


def test_a_cache_without_flags_is_written_too_and_what_does_not_fit_is_refused() -> None:
    kv = torch.zeros(4, 2, 16, 128, dtype=torch.float16, device=DEVICE)
    cache, new = paged.interleaved(kv, 64, None), random(3, 2, 64, dtype=torch.float16)
    write(cache, new, new, torch.tensor([5, 6, 40], dtype=torch.int32, device=DEVICE))
    assert (
        torch.equal(kv[0, :, 6, 64:], new[1])
        and torch.equal(kv[2, :, 8, :64], new[2])
        and int((kv != 0).any(3).sum()) == 6
    )
    slots = torch.tensor([1, 2, 3], device=DEVICE)
    write(cache, new, new, slots[:0])
    for keys, values, where in (
        (new[:2], new, slots),
        (new, new[:, :1], slots),
        (new, new[..., :48], slots),
        (new, new, slots.float()),
    ):
        with pytest.raises(Invalid):
            write(cache, keys, values, where)


def test_a_restored_prefix_goes_on_in_native_pages() -> None:
    """Restored pages, then new tokens by the kernel into pages that held somebody's FP8 before; decode and prefill read
    both.
    """
    width, page, heads, group = 64, 16, 2, 3
    kv = random(8, heads, page, 2 * width)
    page_flags = torch.ones(8, dtype=torch.uint8, device=DEVICE)  # every page is somebody's FP8
    cache = paged.interleaved(kv, width, page_flags, KINDS)
    exact: list[list[torch.Tensor]] = [[], []]
    for at, table_page in enumerate((6, 1)):
        for j, plane in enumerate(cache):
            quantized = reference.quantize(
                random(heads, page, width, seed=10 * at + j).cpu(), "block-head", powers=True
            )
            assert plane.codes is not None and plane.scales is not None
            plane.codes[table_page] = quantized.codes.view(torch.uint8).to(DEVICE)
            plane.scales[table_page] = quantized.scales[:, :, None].to(DEVICE)
            exact[j].append(reference.dequantize(quantized.codes, quantized.scales, "block-head").double())
    new = [random(20, heads, width, seed=100 + j) for j in (0, 1)]
    slots = torch.tensor([3 * page + i for i in range(16)] + [5 * page + i for i in range(4)], device=DEVICE)
    write(cache, new[0], new[1], slots)
    assert page_flags.tolist() == [1, 1, 1, 0, 1, 0, 1, 1]
    keys, values = (torch.cat([*exact[j], new[j].cpu().double().transpose(0, 1)], 1) for j in (0, 1))
    table, lengths = (
        torch.tensor([[6, 1, 3, 5]], dtype=torch.int32, device=DEVICE),
        torch.tensor([52], dtype=torch.int32, device=DEVICE),
    )
    queries = random(20, heads * group, width, seed=7)
    out, lse = decode(queries[-1:], cache, table, lengths, 52, dtype=torch.float32)
    right = exact_attention(queries[-1:].cpu().double().transpose(0, 1), keys, values, 51, group)
    assert max(worst([(out[0, :, None].cpu(), lse[0, :, None].cpu(), *right)])) < 5e-4
    starts = torch.tensor([0, 20], dtype=torch.int32, device=DEVICE)
    out, lse = prefill(queries, cache, table, starts, lengths, 20, dtype=torch.float32)
    right = exact_attention(queries.cpu().double().transpose(0, 1), keys, values, 32, group)
    assert max(worst([(out.cpu().transpose(0, 1), lse.cpu().T, *right)])) < 5e-4


# Powers of two


def test_a_scale_that_is_a_power_of_two_is_the_next_one_up() -> None:
    amax = torch.tensor([0.0, 1e-30, 1.0, 447.9, 448.0, 448.1, 896.0, 3.0e38, 2.0**-60])
    plain, powers = reference.scale_from_amax(amax), reference.scale_from_amax(amax, powers=True)
    assert torch.equal(torch.frexp(powers)[0], torch.full_like(amax, 0.5))
    assert bool(((powers >= plain) & (powers < 2 * plain)).all()) and powers[4] == 1.0 and powers[5] == 2.0
    assert powers.min() == reference.MIN_SCALE and powers.max() <= reference.MAX_SCALE


@pytest.mark.parametrize("kind", ["block-head", "token-head", "channel"])
@pytest.mark.parametrize("small", [False, True])
def test_quantize_with_powers_equals_the_reference(kind: str, small: bool) -> None:
    width, page = 64, 16
    cache = paged.interleaved(random(6, 2, page, 2 * width, seed=3) * 3, width, None)
    extents = layout_of(width, 2, page, (kind, kind), small=small).extents()
    bodies = torch.zeros(2, extents.slot_bytes, dtype=torch.uint8, device=DEVICE)
    quantize(plan(extents, [cache]), torch.tensor([[4], [1]], device=DEVICE), bodies, powers=True)
    for body, page_id in zip(bodies.cpu(), (4, 1), strict=True):
        for j, plane in enumerate(cache):
            assert plane.native is not None
            right = reference.quantize(
                plane.native[page_id].cpu(), kind, scale_dtype="bf16" if small else "fp32", powers=True
            )
            for head in range(2):
                start, count = head * extents.head_stride, extents.group.scale_bytes(extents.group.layers[0].parts[j])
                codes = body[start + extents.data[0][j] : start + extents.data[0][j] + page * width]
                scales = body[start + extents.scales[0][j] : start + extents.scales[0][j] + count]
                assert torch.equal(codes, right.codes[head].view(torch.uint8).flatten())
                assert torch.equal(scales.view(torch.bfloat16 if small else torch.float32).float(), right.scales[head])


@pytest.mark.parametrize("native", ["bf16", "fp16"])
def test_the_tables_are_the_reference(native: str) -> None:
    """Every element and every code, under scales of every kind; and the scale of every magnitude."""
    elements = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(quantizing.TORCH[native])
    for scale in (2.0**-64, 2.0**-9, 1.0, 4.0, 0.37):
        right = reference.quantize(elements.reshape(1, 1, -1), "tensor", torch.tensor([scale]))
        assert np.array_equal(quantizing.encoder(native, scale), right.codes.view(torch.uint8).flatten().numpy())
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(1, 1, -1)
        plain = reference.dequantize(codes, torch.tensor([[scale]]), "tensor").to(quantizing.TORCH[native])
        assert np.array_equal(
            quantizing.decoder(native, scale), plain.view(torch.int16).flatten().numpy().view(np.uint16)
        )
    magnitudes = elements[: 0x7F80 if native == "bf16" else 0x7C00]
    right = reference.scale_from_amax(magnitudes.float(), powers=True).numpy()
    found = np.array([quantizing.scale_of(bits, native) for bits in range(0, len(magnitudes), 7)])
    assert np.array_equal(found, right[::7])


# A GPU's way against the CPU's


def caches_of(
    kind: type[QuantizedCaches],
    order: str,
    page: int,
    ratio: int,
    blocks: int,
    in_place: bool,
    seed: int,
    flagged: bool = True,
) -> tuple[QuantizedCaches, torch.Tensor, list[torch.Tensor]]:
    """Two layers of two heads of 64, bound to blocks of `blocks` engine blocks of `ratio` pages each; their flags and
    their tensors.
    """
    views = [storage(order, 12, 2, page, 64, torch.bfloat16) for _ in range(2)]
    for number, view in enumerate(view for layer in views for view in layer):
        view.copy_(random(*view.shape, seed=seed + number))
    page_flags = torch.zeros(12, dtype=torch.uint8, device=DEVICE)
    made = kind({}, True, ratio, native="bf16", in_place=in_place)
    for number, layer in enumerate(views):
        cells = (layer[0][..., :64], layer[0][..., 64:]) if len(layer) == 1 else layer
        parts = [layout.Part(name, 64, "e4m3fn", "block-head") for name in "kv"]
        made.layers.append(
            (
                f"layer {number}",
                [PartCache(part, cell.view(torch.uint8)) for part, cell in zip(parts, cells, strict=True)],
            )
        )
        made.paged.append(cache_of(layer, KINDS, page_flags if flagged else None))
    made.bind(
        layout.attention(2, 2, 64, engine_tokens=page * ratio, engine_blocks=blocks, granularity="block-head").extents()
    )
    return made, page_flags, [view for layer in views for view in layer]


@pytest.mark.parametrize(
    ("in_place", "flagged"),
    [(True, True), (False, True), (False, False)],
    ids=["dual", "expand beside dual", "expand on an engine's own attention"],
)
@pytest.mark.parametrize(
    ("order", "ratio", "blocks"), [("interleaved", 1, 1), ("NHD", 2, 1), ("HND", 1, 3), ("interleaved", 2, 2)]
)
def test_a_gpu_saves_and_restores_the_bytes_that_a_cpu_does(
    order: str, ratio: int, blocks: int, in_place: bool, flagged: bool
) -> None:
    if DEVICE.type != "cpu":
        pytest.skip("both ways need the same memory: on Triton's interpreter")
    host, _, _ = caches_of(HostCaches, order, 16, ratio, blocks, in_place, 1, flagged)
    device, _, _ = caches_of(DeviceCaches, order, 16, ratio, blocks, in_place, 1, flagged)
    saved = [np.full(host.extents.body_bytes, 0x33, np.uint8) for _ in range(2)]
    entry = list(range(1, 1 + blocks))
    for caches, body in zip((host, device), saved, strict=True):
        assert caches.look(caches.write(None, entry, body)) == (0, "")
    assert np.array_equal(saved[0], saved[1])
    counted: list[dict[str, float]] = []
    results = []
    wanted = [0, *entry[1:]] if blocks > 1 else entry
    for kind in (HostCaches, DeviceCaches):
        caches, page_flags, tensors = caches_of(kind, order, 16, ratio, blocks, in_place, 50, flagged)
        page_flags.fill_(1)
        counts: dict[str, float] = {}

        def add(name: str, value: float, _: object, counts: dict[str, float] = counts) -> None:
            counts[name] = counts.get(name, 0) + value

        caches.count = add
        caches.read(None, [wanted], [saved[0]])
        again = np.zeros_like(saved[0])
        if in_place and 0 not in wanted:
            assert caches.look(caches.write(None, entry, again)) == (0, "") and np.array_equal(again, saved[0])
            assert counts["verbatim_blocks"] >= 1
        results.append((page_flags.clone(), [tensor.clone() for tensor in tensors]))
        counted.append(counts)
    pages = [page for block in wanted if block for page in range(block * ratio, (block + 1) * ratio)]
    assert (
        results[0][0].tolist()
        == results[1][0].tolist()
        == [int(in_place or not flagged or page not in pages) for page in range(12)]
    )
    for mine, theirs in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))
    if not in_place:
        assert counted[0]["expand_blocks"] == counted[1]["expand_blocks"] == 1


@pytest.mark.parametrize("kind", [HostCaches, DeviceCaches])
def test_a_value_that_is_not_finite_names_its_layer(kind: type[QuantizedCaches]) -> None:
    caches, _, tensors = caches_of(kind, "interleaved", 16, 1, 1, True, seed=1)
    body = np.zeros(caches.extents.body_bytes, np.uint8)
    tensors[1][3, 1, 7, 100] = float("inf")
    assert caches.look(caches.write(None, [3], body)) == (0, "layer 1")
    assert caches.look(caches.write(None, [4], body)) == (0, "")
    tensors[0][4, 0, 0, 0] = float("nan")
    assert caches.look(caches.write(None, [4], body)) == (0, "layer 0")


def test_caches_that_do_not_fit_their_blocks_are_refused() -> None:
    caches, _, _ = caches_of(HostCaches, "interleaved", 16, 1, 1, True, seed=1)
    with pytest.raises(Invalid, match="layer 0"):
        caches.bind(layout.attention(2, 2, 64, engine_tokens=32, granularity="block-head").extents())
    with pytest.raises(Invalid, match="layer 0"):
        caches.bind(layout.attention(2, 2, 64, engine_tokens=16, granularity="head").extents())
