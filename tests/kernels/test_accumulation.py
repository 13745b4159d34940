"""Why FP8 sums must be promoted: an emulation of the tensor core's accumulator of sm_90, with and without the two
levels that `prefill` has by construction.

Model: the products of one step of k = 32 are exact; they and the running sum are aligned to the largest exponent among
them and truncated toward zero to 13 fraction bits. It is a model from published reports (DeepSeek-V3, SageAttention2),
not a measurement.
"""

from __future__ import annotations

import pytest
import torch
from kvtier_kernels import prefill, tuning
from kvtier_kernels.paged import WIDTHS

STEP, FRACTION = 32, 13


def add(total: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """total [n] plus products [n, 32], as the tensor core does."""
    largest = torch.maximum(total.abs(), products.abs().amax(1)).clamp_min(1e-300)
    unit = torch.exp2(torch.floor(torch.log2(largest)) - FRACTION)
    return torch.trunc(total / unit) * unit + (torch.trunc(products / unit[:, None]) * unit[:, None]).sum(1)


def emulate(weights: torch.Tensor, values: torch.Tensor, promoted: list[int | None]) -> torch.Tensor:
    """weights [tokens] . values [tokens, d], once for each entry: after so many tokens the sum moves on into FP32 and
    starts anew. [entries, d]
    """
    shape = (len(promoted), values.shape[1])
    high, low = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    products = (weights[:, None] * values).reshape(-1, STEP, values.shape[1])
    for i, step in enumerate(products):
        low = add(low.flatten(), step.T.repeat(len(promoted), 1)).reshape(shape)
        for entry, tokens in enumerate(promoted):
            if tokens and (i + 1) * STEP % tokens == 0:
                high[entry] = (high[entry] + low[entry]).float().double()
                low[entry] = 0
    return high + low


def problem(tokens: int, width: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax weights and values with a mean of 0.3 sigma, both rounded to e4m3fn."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(tokens, width, generator=random) + 0.3 * torch.sign(torch.randn(width, generator=random))
    logits = torch.randn(tokens, generator=random)
    weights = torch.exp(logits - logits.max()) * 448
    values = values / values.abs().max() * 448
    return weights.to(torch.float8_e4m3fn).double(), values.to(torch.float8_e4m3fn).double()


@pytest.mark.parametrize(("tokens", "gain"), [(8192, 0.966), (32768, 0.864), (131072, 0.640)])
def test_the_loss_without_promotion_and_none_with_ours(tokens: int, gain: float) -> None:
    weights, values = problem(tokens)
    exact = weights @ values

    tiles = {tuning.prefill(width, False, "qk+pv", torch.device("cpu")).tile for width in WIDTHS if width <= 128} | {
        prefill.PROMOTED
    }
    assert max(tiles) <= prefill.PROMOTED
    alone, *ours = (emulate(weights, values, [None, *tiles]) @ exact / (exact @ exact)).tolist()
    assert alone == pytest.approx(gain, abs=0.03)
    assert ours == pytest.approx([1.0] * len(ours), abs=3e-4)
