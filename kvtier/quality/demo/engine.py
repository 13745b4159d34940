"""A small engine around SmolLM2: the two processes of the demo. Process `store` computes KV and stores it, process
`restore` attends to it again.

    python -m kvtier.quality.demo.engine store|restore --socket PATH --artifact DIR [--prompt N] [--positions N]
    [--block N] [--threads N] [--attention ...]

Both write JSON lines to stdout: {"event": "progress" | "stored" | "result", ...}. The one rule: `restore` reads the FP8
bytes where they lie in the daemon's arena, under a lease, and neither copies nor decodes them."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from kvtier_kernels.reference import CODEC, Tile, attention, scale_from_amax
from numpy.typing import NDArray

import kvtier
from kvtier.errors import Invalid, Unavailable
from kvtier.format import artifact, layout
from kvtier.format.artifact import Artifact, PartFormat
from kvtier.format.fingerprint import resolve_revision
from kvtier.format.identity import CHAIN, Description, HashScheme, chain_hashes, f64_hex
from kvtier.quality import smollm, texts
from kvtier.quality.demo.block_io import read_tiles, write_block
from kvtier.quality.demo.driver import CALL, add_options
from kvtier.quality.drift import Drift
from kvtier.quality.smollm import Attend, SmolLM, Step

# Static scales are twice what the calibration data asks for. e4m3 floats: a scale that is too large costs next to
# nothing (1,000x is not measurable on this model), one that is 20x too small destroys it by clipping.
HEADROOM = 2.0
PASSAGES = 2  # of calibration text, each as long as the prompt, so that no stored position is beyond the calibration
CONTROL = 20.0  # the factor on the scales that must destroy the answer
LINGER = 300.0  # seconds that `store` waits to be killed


def emit(event: str, **values: Any) -> None:
    """Says something to the driver: one line of JSON."""
    print(json.dumps({"event": event, **values}), flush=True)


def progress(what: str) -> Step:
    """A callback that tells the driver how far this step is."""
    return lambda done, total: emit("progress", what=what, done=done, total=total)


@dataclass(frozen=True, slots=True)
class Setup:
    """What both processes derive for themselves: model, tokens of the text and (once there is an artifact) identity."""

    model: SmolLM
    name: str
    revision: str
    tokens: list[int]
    prompt: int
    block: int
    scheme: HashScheme

    @property
    def layout(self) -> layout.Layout:
        shape = self.model.shape
        return layout.attention(shape.layers, shape.kv_heads, shape.width, engine_tokens=self.block, granularity="head")

    def describe(self, scales: Artifact) -> Description:
        shape = self.model.shape
        rope: dict[str, str | int] = {"kind": "half", "theta": f64_hex(shape.theta), "width": shape.width}
        return scales.describe(self.layout, self.scheme, rope=rope)

    @property
    def hashes(self) -> list[bytes]:
        return chain_hashes(self.tokens[: self.prompt], self.block)

    @property
    def usable(self) -> int:
        """Blocks that a restoring engine asks for. The prompt's last token makes the first prediction and is computed
        anew: its block is not."""
        return (self.prompt - 1) // self.block


def set_up(arguments: argparse.Namespace) -> Setup:
    """Loads the model and the text. Raises Invalid if the text is shorter, or the model sees less far, than asked."""
    path = smollm.find()
    model = smollm.load(path, progress("load the model"))
    wanted = arguments.prompt + arguments.positions
    tokens = model.encode(texts.evaluation_text())[:wanted]
    if len(tokens) < wanted or wanted > model.shape.context:
        raise Invalid(
            f"prompt and positions are together at most {min(model.shape.context, len(tokens))} tokens, not {wanted}"
        )
    return Setup(
        model,
        *resolve_revision(str(path)),
        tokens,
        arguments.prompt,
        arguments.block,
        HashScheme(CHAIN, "0" * 64, arguments.block),
    )


class Prefill:
    """Attention of a pass from position 0, by torch's own kernel. `cache` fills with each layer's K and V in bf16."""

    def __init__(self) -> None:
        self.cache: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        keys, values = keys.bfloat16(), values.bfloat16()
        self.cache.append((keys, values))
        return F.scaled_dot_product_attention(
            queries[None], keys.float()[None], values.float()[None], is_causal=True, enable_gqa=True
        )[0]


def prefill(setup: Setup, tokens: Sequence[int], what: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's native K and V [kv_heads, tokens, width] of a text from its start."""
    attend = Prefill()
    setup.model.run(torch.tensor(tokens), 0, attend, step=progress(what))
    return attend.cache


def calibrate(setup: Setup) -> Artifact:
    """Static scales per head from topics that the measured text does not contain."""
    length, ids = setup.prompt, setup.model.encode(texts.calibration_text())
    amax: dict[tuple[int, str], torch.Tensor] = {}
    for i in range(PASSAGES):
        start = i * (len(ids) - length) // max(1, PASSAGES - 1)
        for layer, parts in enumerate(
            prefill(setup, ids[start : start + length], f"calibrate on other topics ({i + 1} of {PASSAGES})")
        ):
            for name, x in zip("kv", parts, strict=True):
                seen = x.abs().amax(dim=(1, 2)).float()
                amax[layer, name] = torch.maximum(amax.get((layer, name), seen), seen)
    scales = {key: scale_from_amax(seen * HEADROOM).numpy() for key, seen in amax.items()}
    form = PartFormat("e4m3fn", "head")
    digest = blake2b(struct.pack(f"<{len(ids)}I", *ids), digest_size=32).hexdigest()
    return Artifact(
        setup.name,
        setup.revision,
        {"k": form, "v": form},
        "static",
        CODEC,
        "plain",
        digest,
        scales,
        calibrated_position=length - 1,
    )


def store(arguments: argparse.Namespace) -> None:
    """Process A: calibrate, prefill, quantize into the daemon's arena. Then waits to be killed."""
    setup = set_up(arguments)
    scales = calibrate(setup)
    scales.save(arguments.artifact)
    began = time.perf_counter()
    cache = prefill(setup, setup.tokens[: setup.prompt], "prefill")
    prefilled = time.perf_counter()
    clipped, drift = 0, Drift(scales.scales)
    with kvtier.Client(f"unix:{arguments.socket}") as client:
        namespace = client.register(setup.describe(scales))
        extents = namespace.extents()
        with client.fill(namespace, setup.hashes, deadline=CALL) as slots:
            if slots.error:
                raise Unavailable(f"nothing was reserved: {slots.reason}")
            for i, slot in enumerate(slots):
                span = slice(i * setup.block, (i + 1) * setup.block)
                content = [[part[:, span] for part in parts] for parts in cache]
                if slot is None:
                    continue  # known already
                for (layer, part), counts in write_block(slot, extents, content, scales.scales).items():
                    elements = content[layer]["kv".index(part)].numel()
                    lost, odd = int(counts.clipped.sum()), int(counts.nonfinite.sum())
                    clipped += lost
                    drift.add(layer, part, elements, lost, odd, counts.amax.numpy())
                    if counts.nonfinite.any():
                        raise Invalid(f"{part} of layer {layer} is not finite: nothing is stored")
                emit("progress", what="quantize and store", done=i + 1, total=len(setup.hashes))
        emit(
            "stored",
            blocks=slots.sealed,
            blocks_wanted=len(setup.hashes),
            clipped=clipped,
            amax_share=max((one.value for one in drift.metrics() if one.name.endswith("amax_share")), default=0.0),
            seconds_prefill=prefilled - began,
            seconds_quantize_and_store=time.perf_counter() - prefilled,
        )
        time.sleep(LINGER)
    raise SystemExit("nobody killed this process")


def continuation(prefix: Sequence[Sequence[Tile]], start: int) -> Attend:
    """Attention of a pass that starts at `start`, over a prefix [layer][tile] as it lies and the pass's native K, V."""

    def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        own = Tile(keys.bfloat16(), values.bfloat16(), start=start)
        return attention(queries, [*prefix[layer], own], start=start).output

    return attend


def compare(native: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """How far predictions [positions, vocabulary] are from the native ones: share of equal first choices, mean
    KL(native || other) in nats; and their perplexity on the text."""
    p, q = (F.log_softmax(logits.double(), dim=-1) for logits in (native, other))
    agreement = (native.argmax(dim=-1) == other.argmax(dim=-1)).double().mean().item()
    return {
        "top1": agreement,
        "top1_standard_error": math.sqrt(agreement * (1 - agreement) / len(targets)),
        "kl": (p.exp() * (p - q)).sum(dim=-1).mean().item(),
        "perplexity": F.nll_loss(q, targets).exp().item(),
    }


def lies_in(body: NDArray[np.uint8], tile: Tile) -> bool:
    """Whether codes and scales of a tile are inside the body: views, not copies."""
    first = address(body)
    return all(
        t is None or first <= t.data_ptr() < first + body.nbytes
        for t in (tile.keys, tile.values, tile.key_scales, tile.value_scales)
    )


def through_kernels(
    setup: Setup,
    extents: layout.Extents,
    bodies: Sequence[NDArray[np.uint8]],
    reference: torch.Tensor,
    targets: torch.Tensor,
) -> dict[str, float]:
    """The same continuation with the Triton kernels, over blocks restored into native slots, against `reference`'s."""
    from kvtier.quality.demo.kernel_attention import DualCache  # needs triton, which the rest does not

    start = len(bodies) * setup.block
    rest = torch.tensor(setup.tokens[start:-1])
    cache = DualCache(extents, len(bodies), len(rest))
    first, last = (min(bodies, key=address), max(bodies, key=address))
    arena = np.ctypeslib.as_array(
        (ctypes.c_uint8 * (address(last) + last.nbytes - address(first))).from_address(address(first))
    )
    arena.flags.writeable = False
    cache.load(arena, bodies)
    found = setup.model.run(rest, start, cache.attend(), len(targets), progress("continue, through the kernels"))
    return compare(reference, found, targets)


def address(body: NDArray[np.uint8]) -> int:
    """Where a body lies in memory."""
    at: int = body.__array_interface__["data"][0]
    return at


def restore(arguments: argparse.Namespace) -> None:
    """Process B: find and lease the prefix, recompute it natively as the baseline, and continue over both."""
    setup = set_up(arguments)
    scales = artifact.load(arguments.artifact)
    description = setup.describe(scales)
    # `positions` predictions are scored: the first is made by the prompt's last token, the last one has its answer in
    # the text.
    targets = torch.tensor(setup.tokens[setup.prompt :])
    with kvtier.Client(f"unix:{arguments.socket}") as client:
        namespace = client.register(description)
        extents = namespace.extents()
        began = time.perf_counter()
        known = client.lookup(namespace, setup.hashes, deadline=CALL)
        with client.lease(namespace, setup.hashes[: min(known, setup.usable)], deadline=CALL) as blocks:
            bodies = list(blocks)
            by_block = [read_tiles(body, extents, i * setup.block) for i, body in enumerate(bodies)]
            restored = [list(layer) for layer in zip(*by_block, strict=True)]
            seconds_restore = time.perf_counter() - began
            if not bodies:
                raise Unavailable(f"no block of the prefix was restored ({known} known): {blocks.reason}")
            for body, tiles in zip(bodies, by_block, strict=True):
                if not all(lies_in(body, tile) for tile in tiles):
                    raise AssertionError("a restored tile is a copy")
            start = len(bodies) * setup.block
            began = time.perf_counter()
            native = [[Tile(*parts)] for parts in prefill(setup, setup.tokens[:start], "recompute natively")]
            seconds_recompute = time.perf_counter() - began

            def predict(prefix: Sequence[Sequence[Tile]], what: str) -> torch.Tensor:
                rest = torch.tensor(setup.tokens[start:-1])
                return setup.model.run(rest, start, continuation(prefix, start), len(targets), progress(what))

            baseline = predict(native, "continue, native")
            reference = predict(restored, "continue, restored FP8")
            right = compare(baseline, reference, targets)
            wrong_scales = [
                [
                    replace(tile, key_scales=tile.key_scales * CONTROL, value_scales=tile.value_scales * CONTROL)
                    for tile in tiles
                ]
                for tiles in restored
            ]
            control = compare(baseline, predict(wrong_scales, f"control: scales x {CONTROL:.0f}"), targets)
            kernels = (
                None
                if arguments.attention == "reference"
                else through_kernels(setup, extents, bodies, reference, targets)
            )
    bf16_bytes = sum(t.nbytes for tiles in native for tile in tiles for t in (tile.keys, tile.values))
    tensors = [t for tiles in restored for tile in tiles for t in (tile.keys, tile.values)]
    emit(
        "result",
        description=description.canonical.decode(),
        hashes=[h.hex() for h in setup.hashes],
        tokens_restored=start,
        blocks_restored=len(bodies),
        blocks_known=known,
        bytes_bf16=bf16_bytes,
        bytes_codes=sum(t.nbytes for t in tensors),
        bytes_bodies=sum(body.nbytes for body in bodies),
        positions=len(targets),
        seconds_restore=seconds_restore,
        seconds_recompute=seconds_recompute,
        native_perplexity=compare(baseline, baseline, targets)["perplexity"],
        restored=right,
        control=control,
        kernels=kernels,
    )


def main() -> None:
    """Entry point of an engine process: `store` or `restore`."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtier.quality.demo.engine", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("role", choices=("store", "restore"))
    parser.add_argument("--socket", required=True, help="the daemon's Unix socket")
    parser.add_argument(
        "--artifact", required=True, help="directory of the scales: `store` writes it, `restore` reads it"
    )
    add_options(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    {"store": store, "restore": restore}[arguments.role](arguments)


if __name__ == "__main__":
    main()
