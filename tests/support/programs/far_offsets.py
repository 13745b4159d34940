"""Every kernel on a page that begins beyond 2^31 elements, on DEVICE. An offset that overflowed would be a segmentation
fault."""

from __future__ import annotations

import sys

import kvtier_kernels.interpreter  # noqa: F401
import torch
from kvtier_kernels import paged, reference
from kvtier_kernels.attention import decode
from kvtier_kernels.batch_plan import plan
from kvtier_kernels.expand import Expander
from kvtier_kernels.prefill import prefill
from kvtier_kernels.quantize import quantize
from kvtier_kernels.restore import restore

from kvtier.format import layout


def main() -> None:
    torch.set_default_device(sys.argv[1])
    pages, width = 2**31 // (16 * 128) + 8, 64  # the last page begins beyond 2^31 elements and 2^32 bytes
    kv = torch.zeros(pages, 1, 16, 2 * width, dtype=torch.bfloat16)  # zeroed lazily: touched pages alone take memory
    flags = torch.zeros(pages, dtype=torch.uint8)
    cache = paged.interleaved(kv, width, flags, ("block-head", "block-head"))
    extents = layout.attention(1, 1, width, engine_tokens=16, granularity="block-head").extents()
    made, last = plan(extents, [cache]), pages - 1
    x = torch.randn(1, 16, 2 * width, generator=torch.Generator().manual_seed(0), device="cpu").bfloat16()
    kv[last] = x.to(kv.device)
    bodies, ids = torch.zeros(1, extents.body_bytes, dtype=torch.uint8), torch.tensor([[last]])
    quantize(made, ids, bodies)
    wanted = [reference.quantize(x[..., i * width : (i + 1) * width], "block-head") for i in (0, 1)]
    assert torch.equal(bodies[0, extents.data[0][0] :][: 16 * width].cpu(), wanted[0].codes.view(torch.uint8).flatten())
    kv[last] = 0
    restore(made, bodies, ids)
    assert flags[last] == 1 and flags.sum() == 1
    again = torch.zeros_like(bodies)
    quantize(made, ids, again)
    assert torch.equal(again, bodies), "gathered"
    q = torch.ones(1, 2, width, dtype=torch.bfloat16)
    table, lengths, starts = (torch.tensor(i, dtype=torch.int32) for i in ([[last]], [16], [0, 1]))
    found = [
        decode(q, cache, table, lengths, 16, dtype=torch.float32)[0],
        prefill(q, cache, table, starts, lengths, 1, dtype=torch.float32)[0],
    ]
    tile = reference.Tile(
        wanted[0].codes, wanted[1].codes, wanted[0].scales, wanted[1].scales, "block-head", "block-head"
    )
    right = reference.attention(q.cpu().transpose(0, 1), [tile], start=15).output[:, 0]
    assert all((out[0].cpu() - right).norm() / right.norm() < 1e-3 for out in found)
    Expander(enabled=True).expand(made, bodies, ids)
    plain = [reference.dequantize(part.codes, part.scales, "block-head").bfloat16() for part in wanted]
    assert torch.equal(kv[last].cpu(), torch.cat(plain, 2)) and flags.sum() == 0
    print("far")


if __name__ == "__main__":
    main()
