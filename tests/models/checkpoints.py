"""Checkpoint directories with KV scales, written raw."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

HEADS = 8


Entry = tuple[str, list[int], bytes]


def f32(*values: float, shape: list[int] | None = None) -> Entry:
    array = np.array(values, "<f4")
    return "F32", [array.size] if shape is None else shape, array.tobytes()


def write(root: Path, files: dict[str, dict[str, Entry]], layers: int = 4, **config: Any) -> Path:
    """A checkpoint directory: config.json and safetensors files, raw."""
    root.mkdir(parents=True, exist_ok=True)
    shape = {"num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": HEADS, "head_dim": 64}
    (root / "config.json").write_text(json.dumps(shape | config))
    for name, tensors in files.items():
        header, data = {}, b""
        for key, (dtype, size, raw) in tensors.items():
            header[key] = {"dtype": dtype, "shape": size, "data_offsets": [len(data), len(data) + len(raw)]}
            data += raw
        head = json.dumps(header).encode()
        (root / name).write_bytes(struct.pack("<Q", len(head)) + head + data)
    return root


def scales(layers: int = 4, **changes: Entry | None) -> dict[str, Entry]:
    """k 0.02 and v 0.03 in every layer; `changes` by "layer.part", None to leave one out."""
    found = {f"{layer}.{part}": f32(value) for layer in range(layers) for part, value in (("k", 0.02), ("v", 0.03))}
    found |= {key.replace("_", "."): entry for key, entry in changes.items() if entry is not None}
    for key, entry in changes.items():
        if entry is None:
            del found[key.replace("_", ".")]
    return {
        f"model.layers.{layer}.self_attn.{part}_scale": entry
        for key, entry in found.items()
        for layer, part in [key.split(".")]
    }
