"""KV of a model into a block's body and back: the torch views joined with the number format.

Writing quantizes by the layout's granularity; reading yields tiles straight over the body, nothing is copied or
decoded. A tile is valid as long as the slot it looks at (until seal, or the end of the lease). Keeps no state; any
thread may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from kvtier_kernels.reference import Counts, Tile, quantize
from numpy.typing import NDArray

from kvtier.client.torch_views import body_tensor, part_tensor, scale_tensor
from kvtier.errors import Invalid
from kvtier.format.layout import STATIC, Extents

Content = Sequence[Sequence[torch.Tensor]]  # [layer][part]: [heads, tokens, width]
# (layer's number in the model, part): f32 [heads of the model] or [1], as in an artifact
StaticScales = Mapping[tuple[int, str], NDArray[np.float32]]


def write_block(
    body: NDArray[np.uint8], extents: Extents, content: Content, scales: StaticScales
) -> dict[tuple[int, str], Counts]:
    """Fills the body with one block's KV of the layers and heads of `extents`, padding with zeros; returns what each
    quantized part saw.

    Native parts are copied bit for bit and must have the layout's dtype. A caller that finds counts.nonfinite must not
    seal the block. Raises Invalid for content that does not fit the layout, and KeyError for a static part without
    scales."""
    whole = body_tensor(body, extents)
    group, heads = extents.group, slice(*extents.heads)
    counts = {}
    whole.zero_()  # the padding between parts is content too: equal KV makes equal bytes
    layers = extents.range_layers
    if len(content) != len(layers):
        raise Invalid(f"this range has {len(layers)} layers, not {len(content)}")
    for i, (layer, parts) in enumerate(zip(layers, content, strict=True)):
        if len(parts) != len(layer.parts):
            raise Invalid(f"layer {layer.index} has {len(layer.parts)} parts, not {len(parts)}")
        for j, (part, x) in enumerate(zip(layer.parts, parts, strict=True)):
            target = part_tensor(whole, extents, i, j)
            if x.shape != target.shape or (part.native and x.dtype != target.dtype):
                raise Invalid(
                    f"{part.name} of layer {layer.index} is {part.dtype} of shape {tuple(target.shape)}, not "
                    f"{x.dtype} of shape {tuple(x.shape)}"
                )
            if part.native:
                target.copy_(x)
                continue
            static = None
            if part.granularity in STATIC:
                values = torch.from_numpy(np.array(scales[layer.index, part.name]))
                static = values if part.granularity == "tensor" else values[heads]
            quantized = quantize(x, part.granularity, static, engine_blocks=group.engine_blocks, dtype=part.dtype)
            target.copy_(quantized.codes)
            scale_tensor(whole, extents, i, j).copy_(quantized.scales)
            counts[layer.index, part.name] = quantized.counts
    return counts


def read_tiles(body: NDArray[np.uint8], extents: Extents, start: int) -> list[Tile]:
    """One tile per layer of a block of K and V, straight over the body. `start`: position of its first token."""
    whole = body_tensor(body, extents)
    tiles = []
    for i, layer in enumerate(extents.range_layers):
        if [part.name for part in layer.parts] != ["k", "v"]:
            raise Invalid(f"layer {layer.index} has the parts {[part.name for part in layer.parts]}, not k and v")
        k, v = layer.parts
        key_scales, value_scales = (
            None if part.native else scale_tensor(whole, extents, i, j) for j, part in enumerate(layer.parts)
        )
        keys, values = part_tensor(whole, extents, i, 0), part_tensor(whole, extents, i, 1)
        tiles.append(Tile(keys, values, key_scales, value_scales, k.granularity, v.granularity, start))
    return tiles
