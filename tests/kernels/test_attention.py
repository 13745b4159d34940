"""decode and prefill against float64, over head dims, groups, orders, granularities, options and block boundaries; case
KVB-03 (poison in unused bytes).
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from kvtier_kernels import paged, reference, tuning
from kvtier_kernels.attention import decode
from kvtier_kernels.batch_plan import plan
from kvtier_kernels.merge import merge
from kvtier_kernels.paged import WIDTHS
from kvtier_kernels.prefill import prefill
from kvtier_kernels.restore import restore

from kvtier.errors import Invalid
from tests.kernels.cases import (
    DEVICE,
    KINDS,
    NANS,
    ORDERS,
    ZEROS,
    Case,
    cache_of,
    exact_attention,
    exact_values,
    layout_of,
    storage,
    worst,
)
from tests.kernels.test_quantize import Setting

FP16, DOTS, NATIVE_BF16 = (
    5e-4,
    5e-2,
    5e-3,
)  # relative: the fp16 upcast; FP8 dots; bf16 multiplied as bf16, in a cache that never holds FP8
# Absolute, natural log. Tensor cores align the products of a step before they add them: on a GPU the f32 sum of a logit
# is a little coarser.
LSE = {"fp16": 1e-5 if DEVICE.type == "cpu" else 1e-4, "channel": 2e-3, "dots": 0.2}
GROUPS = (1, 3, 4, 7, 8)


def sinks(case: Case) -> torch.Tensor:
    return torch.randn(case.heads * case.group, generator=torch.Generator().manual_seed(5))


def grid() -> list[Case]:
    """Every head dim with every granularity; groups, orders, pages, patterns and options turn so that each meets each
    head dim and granularity.
    """
    cases = []
    for i, width in enumerate(WIDTHS):
        for j, kind in enumerate(KINDS):
            turn = i + j
            options: dict[str, Any] = [{}, {"window": 20}, {"cap": 4.0}, {}][turn % 4]
            cases.append(
                Case(
                    width=width,
                    kinds=kind,
                    group=GROUPS[turn % 5],
                    order=ORDERS[(i + 2 * j) % 4],
                    page=(16, 32, 16, 64, 128)[(i + 3 * j) % 5],
                    fp8=("leading", "odd", "all")[turn % 3],
                    lengths=((1, 15, 33), (16, 17, 47), (31, 32, 65))[(i + j) % 3],
                    dtype=(torch.bfloat16, torch.float16)[j % 2],
                    options=options,
                    seed=turn,
                )
            )
    return cases


def name(case: Case) -> str:
    return f"D{case.width}-{case.kinds}-g{case.group}-{case.order}-p{case.page}-{case.fp8}" + "".join(
        f"-{option}" for option in case.options
    )


def limit(case: Case) -> float:
    return LSE["channel" if case.kinds in ("channel", "kivi") else "fp16"]


@pytest.mark.parametrize("case", grid(), ids=name)
def test_decode_is_exact_but_for_fp16(case: Case) -> None:
    error, shift = case.decode_errors()
    assert error < FP16 and shift < limit(case)


@pytest.mark.parametrize(
    "case", [c for c in grid()[::2] if c.width <= 128 or c.kinds not in ("channel", "kivi")], ids=name
)
def test_prefill_is_exact_but_for_fp16(case: Case) -> None:
    counts = tuple(min(length, 19 + i) for i, length in enumerate(case.lengths))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        error, shift = case.prefill_errors(counts)
    assert error < FP16 and shift < limit(case)


@pytest.mark.parametrize("lengths", [(1, 2, 15, 16), (17, 31, 32, 33), (47, 48, 49, 0), (63, 64, 65, 80)])
def test_every_length_around_block_boundaries(lengths: tuple[int, ...]) -> None:
    case = Case(lengths=lengths, group=3, heads=1, fp8="odd", kinds="token-head")
    queries = case.queries(4)
    out, lse = (x.cpu() for x in case.decode(queries))
    kept = [
        (out[i, :, None], lse[i, :, None], *right)
        for i, right in enumerate(case.right(queries, (1,) * 4))
        if lengths[i]
    ]
    error, shift = worst(kept)
    assert error < FP16 and shift < LSE["fp16"]
    for i, length in enumerate(lengths):
        if not length:
            assert out[i].eq(0).all() and lse[i].eq(-torch.inf).all(), "a sequence without keys: 0 and -Inf"


@pytest.mark.parametrize("kind", ["head", "kivi"])
def test_window_cap_and_sinks_together(kind: str) -> None:
    case = Case(width=128, group=3, kinds=kind, lengths=(5, 40, 70), fp8="odd")
    case.options = {"window": 33, "cap": 3.0, "sinks": sinks(case)}
    for error, shift in (case.decode_errors(), case.prefill_errors((5, 21, 33))):
        assert error < FP16 and shift < limit(case)


@pytest.mark.parametrize("kind", ["head", "token-head"])
def test_each_layer_is_written_and_read_with_its_own_scales(kind: str) -> None:
    """Three layers with scales of 0.01, 0.05 and 0.5, unequal for K, V and heads: pages -> block -> other pages ->
    attention, against float64.
    """
    setting = Setting(layout_of(64, 2, 16, KINDS[kind], layers=3), "HND")
    random = torch.Generator().manual_seed(0)
    for view in (view for layer in setting.kv for view in layer):
        assert view is not None
        view.copy_(torch.randn(view.shape, generator=random))
    bodies, _ = setting.run([[5], [2]])
    caches = [
        cache_of(storage("NHD", 6, 2, 16, 64, torch.bfloat16, NANS), KINDS[kind], flags)
        for flags in [torch.zeros(6, dtype=torch.uint8, device=DEVICE)]
        for _ in range(3)
    ]
    restore(plan(setting.extents, caches), bodies.to(DEVICE), torch.tensor([[1], [4]], device=DEVICE))
    table, lengths, starts = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([[1, 4]], [32], [0, 1]))
    queries = torch.randn(1, 6, 64, generator=random).bfloat16().to(DEVICE)
    for layer, cache in enumerate(caches):
        exact = []
        for part in (0, 1):
            static = setting.statics[layer, part] if kind == "head" else None
            made = [reference.quantize(setting.source(layer, part, [page]), kind, static) for page in (5, 2)]
            exact.append(torch.cat([exact_values(quantized, kind) for quantized in made], 1))
        right, lse = exact_attention(queries.cpu().double().transpose(0, 1), exact[0], exact[1], 31, 3)
        for found in (
            decode(queries, cache, table, lengths, 32, dtype=torch.float32),
            prefill(queries, cache, table, starts, lengths, 1, dtype=torch.float32),
        ):
            error, shift = worst([(found[0][0, :, None].cpu(), found[1][0, :, None].cpu(), right, lse)])
            assert error < FP16 and shift < LSE["fp16"], layer


def test_many_query_heads_share_one_kv_head() -> None:
    """71, as Falcon-7B has: decode takes them, prefill says how many it takes."""
    case = Case(group=71, heads=1, lengths=(20,), kinds="block-head")
    error, shift = case.decode_errors()
    assert error < FP16 and shift < LSE["fp16"]
    with pytest.raises(Invalid, match="at most 64 query heads here, not 71"):
        case.prefill(case.queries(1), (1,))


def test_a_long_context_in_many_parts() -> None:
    case = Case(group=4, heads=1, lengths=(600,), kinds="block-head", fp8="leading", options={"splits": 7})
    error, shift = case.decode_errors()
    assert error < FP16 and shift < LSE["fp16"]


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, NATIVE_BF16), (torch.float16, FP16)])
def test_a_cache_that_never_holds_fp8_is_multiplied_in_its_own_format(dtype: torch.dtype, most: float) -> None:
    case = Case(width=96, group=7, heads=1, fp8="none", dtype=dtype, lengths=(1, 33), order="HND")
    assert case.decode_errors()[0] < most and case.prefill_errors((1, 20))[0] < most


@pytest.mark.parametrize("scale", [0.01, 0.05, 0.5, 2.0**-64, 2.0**100])
def test_scales_of_every_size_on_the_read_path(scale: float) -> None:
    """V of one scale from the smallest to enormous: the relative error does not move; K the other way round where
    logits stay sensible.
    """
    case = Case(kinds="head", fp8="all", lengths=(33,), heads=2, group=3)
    assert case.cache.values.scales is not None and case.cache.keys.scales is not None
    for plane, index, factor in ((case.cache.values, 1, scale), (case.cache.keys, 0, min(scale, 0.5))):
        old = plane.scales.clone()  # type: ignore[union-attr]
        ids = case.table[0, :3].long()
        new = torch.full_like(old[ids], factor)
        new[:, 1] *= 0.5  # heads differ
        ratio = (new / old[ids]).double().cpu()[0, :, :, 0]
        plane.scales[ids] = new  # type: ignore[index]
        case.exact[0][index] = case.exact[0][index] * ratio[:, :, None]
    assert case.decode_errors()[0] < FP16 and case.prefill_errors((7,))[0] < FP16


def test_weights_keep_their_tail_under_small_scales() -> None:
    """One key takes a hundredth of the weight, 500 faint ones share the rest: with V scales of 0.01 they must not fall
    out of fp16.
    """
    case = Case(kinds="head", fp8="all", lengths=(512,), heads=1, group=4, page=16)
    queries = torch.full((1, 4, 64), 0.0)
    queries[..., 0] = 60.0
    queries = queries.bfloat16().to(DEVICE)
    out, _ = case.decode(queries)
    ((right, _),) = case.right(queries, (1,))
    assert float((out.cpu()[0, :, None] - right).norm() / right.norm()) < FP16


@pytest.mark.parametrize("width", WIDTHS)
def test_kvb_03_poison_in_unused_bytes_does_not_leak(width: int) -> None:
    """GQA 8/2; the tail of the last page, other pages and the table's entries behind the end are NaN, their scales NaN
    or Inf: bit for bit the same.
    """
    for kind in ("head", "token-head", "kivi") if width == 64 else ("token-head",):
        clean = Case(
            width=width,
            heads=2,
            group=4,
            kinds=kind,
            fp8="all",
            lengths=(1, 15, 16, 17, 33),
            fill=ZEROS,
            unused_scale=1.0,
        )
        queries = clean.queries(5)
        wanted = [x.cpu() for x in (*clean.decode(queries), *clean.prefill(queries, (1, 1, 1, 1, 1)))]
        assert all(bool(x.isfinite().all()) for x in wanted)
        for scale in (torch.nan, torch.inf):
            dirty = replace(clean, fill=NANS, unused_scale=scale)
            found = [x.cpu() for x in (*dirty.decode(queries), *dirty.prefill(queries, (1, 1, 1, 1, 1)))]
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), (kind, scale)


@pytest.mark.parametrize("fp8", ["leading", "odd"])
def test_poison_does_not_leak_from_mixed_pages(fp8: str) -> None:
    clean = Case(group=3, kinds="block-head", fp8=fp8, lengths=(1, 17, 50), fill=ZEROS)
    dirty, queries = replace(clean, fill=NANS), clean.queries(3)
    for a, b in zip(clean.decode(queries), dirty.decode(queries), strict=True):
        assert torch.equal(a, b) and bool(a.isfinite().all())


@pytest.mark.parametrize("width", [64, 96, 128])
@pytest.mark.parametrize("dots", ["qk", "qk+pv"])
def test_fp8_dots_stay_within_their_tolerance(width: int, dots: str) -> None:
    kind = {64: "head", 96: "token-head", 128: "block-head"}[width]
    case = Case(
        width=width,
        group=3,
        kinds=kind,
        fp8="leading",
        lengths=(20, 100),
        heads=1,
        options={"window": 70} if width == 96 else {},
    )
    error, shift = case.prefill_errors((5, 40), dots)
    assert FP16 < error < DOTS and shift < LSE["dots"], "FP8 dots were asked for and must have been used"


def test_fp8_dots_keep_sinks_and_skip_what_is_not_fp8() -> None:
    case = Case(group=3, kinds="head", fp8="odd", lengths=(70,), heads=1)  # no leading FP8 page: all of it is upcast
    case.options = {"sinks": sinks(case)}
    assert case.prefill_errors((20,), "qk+pv")[0] < FP16
    case = Case(group=3, kinds="head", fp8="all", lengths=(64,), heads=1)
    case.options = {"sinks": sinks(case)}
    assert case.prefill_errors((20,), "qk")[0] < DOTS


def test_a_merged_split_equals_no_split() -> None:
    case = Case(group=4, heads=1, lengths=(100, 33), kinds="head")
    queries = case.queries(2)
    whole, parts = replace(case, options={"splits": 1}), replace(case, options={"splits": 3})
    for a, b in zip(whole.decode(queries), parts.decode(queries), strict=True):
        assert (a - b).abs().max() < 1e-3 * a.abs().max()


def test_merge_by_log_sum_exp() -> None:
    random = torch.Generator().manual_seed(0)
    for count, width in ((1, 64), (2, 96), (3, 128), (64, 192)):
        outputs, lses = (
            torch.randn(5, 2, count, width, generator=random),
            torch.randn(5, 2, count, generator=random) * 20,
        )
        lses[0, 0, 1:] = -torch.inf
        lses[1, 1] = -torch.inf
        out, lse = (x.cpu() for x in merge(outputs.to(DEVICE), lses.to(DEVICE)))
        exact = lses.double().logsumexp(2)
        weights = torch.where(exact[..., None] == -torch.inf, 0.0, (lses.double() - exact[..., None]).exp())
        right = (outputs.double() * weights[..., None]).sum(2)
        assert (out - right).abs().max() < 1e-5 and torch.equal(lse == -torch.inf, exact == -torch.inf)
        assert (lse - exact)[exact > -torch.inf].abs().max() < 1e-5
    with pytest.raises(Invalid, match="merge takes"):
        merge(torch.zeros(2, 65, 64), torch.zeros(2, 65))


def test_what_no_kernel_was_checked_for_is_refused_by_name() -> None:
    case = Case(lengths=(33,))
    queries, one = case.queries(1), torch.tensor([33], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    with pytest.raises(Invalid, match="head dim must be one of"):
        odd = torch.zeros(2, 2, 16, 160, dtype=torch.bfloat16, device=DEVICE)
        decode(
            torch.zeros(1, 8, 80, dtype=torch.bfloat16, device=DEVICE),
            paged.interleaved(odd, 80, None),
            case.table,
            one,
            33,
        )
    with pytest.raises(Invalid, match="larger power of two, not 8"):
        small = torch.zeros(4, 2, 8, 128, dtype=torch.bfloat16, device=DEVICE)
        decode(queries, paged.interleaved(small, 64, None), case.table, one, 33)
    with pytest.raises(Invalid, match="do not fit"):
        decode(queries[:, :3], case.cache, case.table, one, 33)
    with pytest.raises(Invalid, match="table must be int32"):
        decode(queries, case.cache, case.table.long(), one, 33)
    with pytest.raises(Invalid, match="cache and sinks must be on meta"):
        decode(queries.to("meta"), case.cache, case.table.to("meta"), one.to("meta"), 33)
    with pytest.raises(Invalid, match="starts must be int32"):
        prefill(queries, case.cache, case.table, starts.to("meta"), one, 1)
    with pytest.raises(Invalid, match="sinks must be"):
        decode(queries, case.cache, case.table, one, 33, sinks=torch.zeros(3))
    with pytest.raises(Invalid, match="dots must be one of"):
        prefill(queries, case.cache, case.table, starts, one, 1, dots="fp8")
    with pytest.raises(Invalid, match="head dim of at most 128"):
        wide = Case(width=192, lengths=(33,))
        prefill(wide.queries(1), wide.cache, wide.table, starts, one, 1, dots="qk")
    with pytest.raises(Invalid, match="over channel scales has a head dim of at most 128"):
        wide = Case(width=192, lengths=(33,), kinds="kivi")
        prefill(wide.queries(1), wide.cache, wide.table, starts, one, 1)
    with tuning.assume((8, 9)), pytest.raises(Invalid, match="need sm_90"):
        prefill(queries, case.cache, case.table, starts, one, 1, dots="qk")
    with pytest.raises(Invalid, match="multiples of 16"):
        paged.interleaved(torch.zeros(2, 2, 16, 136, dtype=torch.bfloat16), 64, None)
    with pytest.warns(RuntimeWarning, match="head dim 256"):
        wide = Case(width=256, lengths=(17,), heads=1, group=1)
        prefill(
            wide.queries(1), wide.cache, wide.table, starts, torch.tensor([17], dtype=torch.int32, device=DEVICE), 1
        )


def test_codes_are_read_by_bits_where_the_chip_has_no_e4m3() -> None:
    """The form for sm_80 gives the same numbers as the native one, to the last bit."""
    case = Case(kinds="head", lengths=(33, 50), group=3)
    queries = case.queries(2)
    native = case.decode(queries)
    with tuning.assume((8, 0)):
        bits = replace(case, options={"splits": tuning.splits(DEVICE, 0, 1) or 1}).decode(queries)
    plain = replace(case, options={"splits": 1}).decode(queries)
    assert torch.equal(bits[0], plain[0]) and torch.equal(bits[1], plain[1])
    assert (native[0] - bits[0]).abs().max() < 1e-3
