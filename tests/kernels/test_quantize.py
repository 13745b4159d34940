"""quantize against `reference`, bit for bit: codes, scales, counts and padding, over widths, orders, granularities and
formats; cases KVB-01 and 02.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from kvtier_kernels import paged, reference
from kvtier_kernels.batch_plan import BatchPlan, plan
from kvtier_kernels.paged import WIDTHS
from kvtier_kernels.quantize import QuantizeCounts, quantize

from kvtier.client.torch_views import part_tensor, scale_tensor
from kvtier.errors import Invalid
from kvtier.format.layout import STATIC as STATIC_KINDS
from kvtier.format.layout import Layout
from tests.kernels.cases import DEVICE, KINDS, NANS, ORDERS, STATIC, cache_of, layout_of, storage
from tests.support.paths import ROOT

RUBBISH = 0x55


class Setting:
    """Caches full of seeded KV with odd values among it, and the plan over them."""

    def __init__(
        self,
        made: Layout,
        order: str = "NHD",
        *,
        page: int | None = None,
        pages: int = 6,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        group = made.groups[0]
        self.extents, self.page = made.extents(), page or group.engine_tokens
        width, random = group.layers[0].parts[0].width, torch.Generator().manual_seed(seed)
        self.flags = torch.zeros(pages, dtype=torch.uint8, device=DEVICE)
        self.kv, caches = [], []
        for layer in group.layers:
            views = storage(order, pages, group.heads, self.page, width, dtype)
            for view in views:
                view.copy_(
                    torch.randn(view.shape, generator=random)
                    * torch.exp2(torch.randint(-6, 7, view.shape[:3], generator=random))[..., None]
                )
            kinds = tuple("head" if part.native else part.granularity for part in layer.parts)
            caches.append(cache_of(views, (kinds[0], kinds[1]), None if layer.parts[0].native else self.flags))
            self.kv.append([plane.native for plane in caches[-1]])
        self.caches = caches
        self.plan: BatchPlan = plan(self.extents, caches)
        self.statics = torch.tensor([[STATIC[(i + j) % 3] for j in range(2)] for i in range(len(caches))])[
            ..., : group.heads
        ].contiguous()

    def source(self, layer: int, part: int, pages: list[int]) -> torch.Tensor:
        view = self.kv[layer][part]
        assert view is not None
        return torch.cat([view[i] for i in pages], dim=1).cpu()

    def run(self, pages: list[list[int]]) -> tuple[torch.Tensor, QuantizeCounts]:
        bodies = torch.full((len(pages), self.extents.slot_bytes), RUBBISH, dtype=torch.uint8, device=DEVICE)
        seen = quantize(self.plan, torch.tensor(pages, device=DEVICE), bodies, self.statics.to(DEVICE))
        return bodies.cpu(), QuantizeCounts(*(x.cpu() for x in seen))

    def check(self, pages: list[list[int]]) -> torch.Tensor:
        """Asserts that everything written equals the reference, padding included, and nothing else was. Returns the
        bodies.
        """
        bodies, seen = self.run(pages)
        group, size = self.extents.group, self.extents.body_bytes
        assert (bodies[:, size:] == RUBBISH).all(), "bytes behind the body were touched"
        for block, ids in enumerate(pages):
            wanted = np.zeros(size, np.uint8)
            for i, layer in enumerate(group.layers):
                for j, part in enumerate(layer.parts):
                    x, target = self.source(i, j, ids), part_tensor(wanted, self.extents, i, j)
                    if part.native:
                        target.copy_(x)
                        assert torch.equal(
                            seen.nonfinite[block, i, j], (~x.isfinite()).sum(dim=(1, 2), dtype=torch.int32)
                        )
                        continue
                    static = self.statics[i, j] if part.granularity in STATIC_KINDS else None
                    # The layout repeats a tensor's scale per head; the kernel is given it that way.
                    kind = "head" if part.granularity == "tensor" else part.granularity
                    q = reference.quantize(
                        x, kind, static, engine_blocks=group.engine_blocks, scale_dtype=part.scale_dtype
                    )
                    target.copy_(q.codes)
                    scale_tensor(wanted, self.extents, i, j).copy_(q.scales)
                    for name, found, right in zip(QuantizeCounts._fields, seen, q.counts, strict=True):
                        assert torch.equal(found[block, i, j].double(), right.double()), (
                            f"{name} of {part.name} in layer {i}"
                        )
            differing = int((bodies[block, :size].numpy() != wanted).sum())
            assert differing == 0, f"{differing} of {size} bytes differ"
        return bodies


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_order_and_format_equals_the_reference(width: int, kind: str) -> None:
    for order in ORDERS:
        for dtype in (torch.bfloat16, torch.float16):
            native = "bf16" if dtype == torch.bfloat16 else "fp16"
            setting = Setting(layout_of(width, 2, 16, KINDS[kind], dtype=native), order, dtype=dtype, seed=width)
            setting.check([[3]])


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_several_engine_blocks_in_several_layers(kind: str) -> None:
    """Pages in any order, smaller than an engine block; scales differ per layer, K and V; an excluded layer between
    them stays native.
    """
    made = layout_of(64, 2, 32, KINDS[kind], blocks=2, layers=3, excluded=(1,))
    Setting(made, "HND", page=16, pages=9).check([[8, 0, 3, 5], [1, 2, 7, 6]])


@pytest.mark.parametrize("kind", ["block-head", "token-head", "channel"])
@pytest.mark.parametrize("tokens", [48, 64, 544])
def test_engine_blocks_longer_than_a_tile_or_no_power_of_two(kind: str, tokens: int) -> None:
    width = 256 if tokens == 64 else 64
    Setting(layout_of(width, 1, tokens, KINDS[kind]), "NHD", page=16, pages=40).check([list(range(tokens // 16))])


def test_small_scales_are_rounded_before_they_are_used() -> None:
    for blocks in (1, 2):
        Setting(layout_of(96, 2, 16, KINDS["kivi"], blocks=blocks, small=True), "interleaved").check([[2, 4][:blocks]])


@pytest.mark.parametrize("kind", ["tensor", "head", "block-head", "token-head", "kivi"])
def test_odd_values_have_their_one_answer(kind: str) -> None:
    """KVB-01 and KVB-02 on the eviction path: zero and equal rows, NaN and Inf, values that clip, an all-zero block."""
    setting = Setting(layout_of(64, 2, 16, KINDS[kind]), "NHD")
    for view in setting.kv[0]:
        assert view is not None
        page = view[3]
        page.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
        page[0, 0], page[1, 3], page[0, 5] = 0.0, 0.5, -0.5
        page[0, 6, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
        page[1, 7, :3] = torch.tensor([3e38, -3e38, 1e-40])
        view[4] = 0.0
        view[5, :, :, 0] = -0.0
        view[5, :, :, 1:] = 0.0
    bodies = setting.check([[3], [4], [5]])
    heads, extents = bodies[:, : setting.extents.body_bytes].numpy(), setting.extents
    for part in (0, 1):
        zero = part_tensor(heads[1], extents, 0, part).view(torch.uint8)
        assert set(zero.unique().tolist()) == {0x00}
        assert part_tensor(heads[2], extents, 0, part).view(torch.uint8)[..., 0].eq(0x80).all()
        scales = torch.stack([scale_tensor(heads[i], extents, 0, part) for i in range(3)])
        assert scales.isfinite().all() and (scales > 0).all()
        rows = part_tensor(heads[0], extents, 0, part)
        assert rows[0, 0].float().eq(0).all()
        if kind == "token-head":
            assert rows[1, 3].view(torch.uint8).eq(0x7E).all() and rows[0, 5].view(torch.uint8).eq(0xFE).all()
            back = rows[1, 3].float() * scale_tensor(heads[0], extents, 0, part)[1, 3]
            assert ((back - 0.5).abs() < 0.5e-6).all()


def test_a_block_without_odd_values_has_no_nan_code() -> None:
    setting = Setting(layout_of(64, 2, 16, KINDS["head"]), "split")
    bodies, seen = setting.run([[0], [1]])
    data = bodies[:, : setting.extents.body_bytes].reshape(2, 2, -1)[:, :, setting.extents.data[0][0] :]
    assert not ((data & 0x7F) == 0x7F).any() and seen.nonfinite.sum() == 0 and seen.clipped.sum() > 0


def test_a_page_that_is_fp8_already_is_saved_verbatim() -> None:
    """Quantized, restored into the native slots, saved again: the same bytes, and the native page beside it is
    quantized as usual.
    """
    from kvtier_kernels.restore import restore

    for kind in ("head", "block-head", "token-head", "kivi", "channel"):
        setting = Setting(layout_of(64, 2, 16, KINDS[kind], layers=2, excluded=(1,)), "interleaved")
        before = setting.check([[1], [4]])
        restore(setting.plan, before[:1].to(DEVICE), torch.tensor([[1]], device=DEVICE))
        assert setting.flags.tolist() == [0, 1, 0, 0, 0, 0]
        after, seen = setting.run([[1], [4]])
        assert torch.equal(after, before), kind
        assert seen.clipped[0].sum() == 0 and seen.amax[0, 0].sum() == 0


def test_codes_of_an_fp8_engine_are_gathered_as_they_are() -> None:
    from kvtier_kernels.gather import gather

    random, extents = torch.Generator().manual_seed(0), layout_of(128, 2, 32, KINDS["head"]).extents()
    codes = torch.randint(0, 256, (2, 6, 2, 16, 128), dtype=torch.uint8, generator=random).to(DEVICE)
    scales = torch.tensor(STATIC[:2], device=DEVICE)
    made = plan(extents, [paged.fp8(codes[0], codes[1], scales[0], scales[1])])
    bodies = torch.zeros(1, extents.body_bytes, dtype=torch.uint8, device=DEVICE)
    nonfinite, clipped = (torch.zeros(1, 1, 2, 2, dtype=torch.int32, device=DEVICE) for _ in range(2))
    gather(made, torch.tensor([[4, 1]], device=DEVICE), bodies, nonfinite, clipped)
    body = bodies[0].cpu().numpy()
    for part in (0, 1):
        wanted = torch.cat([codes[part, 4], codes[part, 1]], 1).cpu()
        assert torch.equal(part_tensor(body, extents, 0, part).view(torch.uint8), wanted)
        assert torch.equal(scale_tensor(body, extents, 0, part)[:, 0], scales[part].cpu())
        assert torch.equal(nonfinite[0, 0, part].cpu(), ((wanted & 0x7F) == 0x7F).sum((1, 2), dtype=torch.int32))
        assert torch.equal(clipped[0, 0, part].cpu(), ((wanted & 0x7F) == 0x7E).sum((1, 2), dtype=torch.int32))
    with pytest.raises(Invalid, match="nothing to quantize"):
        quantize(made, torch.tensor([[4, 1]], device=DEVICE), bodies, torch.ones(1, 2, 2, device=DEVICE))


def test_formats_and_shapes_that_do_not_fit_are_refused_by_name() -> None:
    setting = Setting(layout_of(64, 2, 16, KINDS["head"]))
    bodies = torch.zeros(1, setting.extents.body_bytes, dtype=torch.uint8, device=DEVICE)
    pages = torch.tensor([[0]], device=DEVICE)
    with pytest.raises(Invalid, match="need their scales"):
        quantize(setting.plan, pages, bodies)
    with pytest.raises(Invalid, match="statics must be f32"):
        quantize(setting.plan, pages, bodies, torch.ones(2, device=DEVICE))
    with pytest.raises(Invalid, match="page ids"):
        quantize(setting.plan, torch.tensor([[0, 1]], device=DEVICE), bodies, setting.statics)
    with pytest.raises(Invalid, match="bodies must be"):
        quantize(setting.plan, pages, bodies[:, 1:], setting.statics)
    with pytest.raises(Invalid, match="all must be on one device"):
        quantize(setting.plan, pages.to("meta"), bodies, setting.statics)
    with pytest.raises(Invalid, match="statics must be on"):
        quantize(setting.plan, pages, bodies, setting.statics.to("meta"))
    with pytest.raises(
        Invalid, match="within 2\\^31 elements"
    ):  # heads outermost, so many pages that head 1 is out of reach of 32 bits
        far = (
            torch.zeros(1, dtype=torch.bfloat16, device="meta")
            .expand(8)
            .as_strided((2, 2, 16, 64), (16 * 64, 2**31, 64, 1))
        )
        paged.native(far, far)
    for dtype in ("e5m2", "e4m3fnuz"):
        other = layout_of(64, 2, 16, KINDS["head"]).to_json()
        for part in other["groups"][0]["layers"][0]["parts"]:
            part[2] = dtype
        with pytest.raises(Invalid, match=f"e4m3fn only, not {dtype}"):
            plan(Layout.from_json(other).extents(), setting.caches)
    with pytest.raises(Invalid, match="one page size"):
        plan(layout_of(64, 2, 24, KINDS["head"]).extents(), setting.caches)
    with pytest.raises(Invalid, match="width 96 in the layout and 64"):
        plan(layout_of(96, 2, 16, KINDS["head"]).extents(), setting.caches)


@pytest.mark.timeout(300)
def test_offsets_beyond_2_31() -> None:
    """Every kernel, in a process of its own: an offset that overflowed would be a segmentation fault there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.programs.far_offsets", DEVICE.type],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0 and done.stdout == "far\n", f"{done.returncode}: {done.stderr[-2000:]}"


def test_nothing_is_read_from_pages_of_others() -> None:
    """Every byte of other pages is NaN; the result is finite."""
    setting = Setting(layout_of(64, 2, 16, KINDS["block-head"]), "NHD")
    for view in setting.kv[0]:
        assert view is not None
        for page in (0, 1, 2, 4, 5):
            view[page] = torch.full_like(view[page].contiguous().view(torch.uint8), NANS).view(view.dtype)
    setting.check([[3]])
