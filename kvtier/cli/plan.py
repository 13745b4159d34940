"""`kvtier plan`: how many tokens fit where, natively and in FP8, and when it pays. Reads config.json; asks no daemon
and no GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from kvtier.cli import output
from kvtier.cli.app import Common, command
from kvtier.cli.inputs import BlockSize, EngineBlocks, Exclude, layers, pairs
from kvtier.cli.output import Exit, size
from kvtier.errors import Invalid
from kvtier.format import artifact
from kvtier.models import capacity
from kvtier.models.advice import Advice, advise, beyond_calibration, uncalibrated
from kvtier.models.capacity import Choice
from kvtier.models.model_config import ModelCaches, read_caches
from kvtier.server.settings import parse_size


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Where the engine's pool comes from."""

    memory: Annotated[str, Option("--memory", help="Memory of one GPU, e.g. 80GiB.")] = ""
    utilization: Annotated[
        float, Option("--utilization", min=0.01, max=1, help="Share of it that the engine uses.")
    ] = 0.9
    weights: Annotated[
        str, Option("--weights", help="Bytes of all weights. [default: those of the safetensors files]")
    ] = ""
    reserve: Annotated[str, Option("--reserve", help="Bytes for activations and graphs on each GPU.")] = "2GiB"
    kv_bytes: Annotated[str, Option("--kv-bytes", help="Instead of all these: bytes for KV on each GPU.")] = ""

    def pool_bytes(self, model: Path, tp: int) -> int:
        """Bytes for KV on one rank. Raises Invalid where they cannot be told."""
        if self.kv_bytes:
            return parse_size(self.kv_bytes)
        if not self.memory:
            raise Invalid("say how much memory there is: --memory 80GiB, or --kv-bytes 40GiB for the KV cache alone")
        weights = parse_size(self.weights) if self.weights else weight_bytes(model)
        left = int(parse_size(self.memory) * self.utilization) - weights // tp - parse_size(self.reserve)
        if left <= 0:
            raise Invalid(f"the weights ({size(weights / tp)} a rank) and the reserve leave no room for KV")
        return left


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How the KV is kept."""

    granularity: Annotated[
        str, Option("--granularity", help="Of the scales: tensor, head, block-head, token-head or channel.")
    ] = "head"
    exclude: Exclude = ""
    sliding: Annotated[bool, Option("--sliding", help="Quantize layers with a sliding window too.")] = False
    block: BlockSize = 16
    engine_blocks: EngineBlocks = 1
    tp: Annotated[int, Option("--tp", min=1, max=1024, help="Tensor-parallel ranks.")] = 1
    in_flight: Annotated[
        int, Option("--in-flight", min=0, help="Tokens scheduled at once, which windows hold too.")
    ] = 0

    def choice(self, scales: artifact.Artifact | None) -> Choice:
        """The plan's choice; what an artifact says of format and exclusions stands."""
        excluded = frozenset(layers(self.exclude))
        granularity = self.granularity
        if scales is not None:
            excluded |= set(scales.excluded)
            granularity = next(iter(scales.parts.values())).granularity
        sizes, shares = (self.block, self.engine_blocks), (self.tp, self.in_flight)
        return Choice("e4m3fn", granularity, *sizes, excluded, self.sliding, *shares)


@dataclass(frozen=True, slots=True)
class Figures:
    """Measured or given figures; what is not given is not guessed."""

    arena: Annotated[str, Option("--arena", help="Bytes of the arena (CPU memory).")] = ""
    ssd: Annotated[str, Option("--ssd", help="Bytes of the SSD tier.")] = ""
    redis: Annotated[str, Option("--redis", help="Bytes of Redis.")] = ""
    link: Annotated[float, Option("--link", min=0, help="GB/s from the tier to the GPU, of one engine.")] = 0.0
    overhead: Annotated[
        float, Option("--overhead", min=0, help="Milliseconds that a restore takes whatever its length.")
    ] = 2.0
    prefill: Annotated[str, Option("--prefill", help="Measured prefill, tokens:seconds, e.g. 4096:0.18,32768:1.6.")] = (
        ""
    )
    itl_native: Annotated[
        str, Option("--itl-native", help="Measured ms per output token, context:ms, at two lengths or more.")
    ] = ""
    itl_fp8: Annotated[str, Option("--itl-fp8", help="The same over FP8 KV.")] = ""


@command("plan")
def plan_command(
    common: Common,
    model: Annotated[Path, Argument(help="Directory of the model, or its config.json.")],
    memory: GpuMemory,
    form: StoredForm,
    figures: Figures,
    context: Annotated[
        str, Option("--context", help="Context lengths, e.g. 2048,8192. [default: the longest and a quarter of it]")
    ] = "",
    scales: Annotated[
        Path | None, Option("--artifact", help="An artifact: its format, exclusions and calibrated length.")
    ] = None,
) -> Exit:
    """Plan capacity: tokens and sequences that fit natively and in FP8, what each tier holds, and when it pays."""
    caches = read_caches(model)
    bundle = artifact.load(scales) if scales is not None else None
    choice = form.choice(bundle)
    contexts = layers(context) or _usual(caches)
    nbytes = memory.pool_bytes(model, choice.tp)
    found = work_out(caches, choice, nbytes, contexts, figures)
    advice = [asdict(one) for one in _advice(caches, choice, contexts, found, bundle)]
    output.result({**found, "advice": advice}, common.json, lambda: _print(found, advice))
    return Exit.OK


def work_out(caches: ModelCaches, choice: Choice, nbytes: int, contexts: list[int], figures: Figures) -> dict[str, Any]:
    """All numbers of a plan as plain data."""
    forms = {"native": replace(choice, dtype=caches.dtype, granularity="none"), "fp8": choice}
    groups = {name: [asdict(group) for group in capacity.group_sizes(caches, one)] for name, one in forms.items()}
    rows = []
    for context in contexts:
        pools = {name: capacity.pool(caches, one, nbytes, context) for name, one in forms.items()}
        row: dict[str, Any] = {"context": context, "ratio": pools["fp8"].concurrency / pools["native"].concurrency}
        for name, pool in pools.items():
            row[name] = {**asdict(pool), "tokens": pool.tokens, "concurrency": pool.concurrency}
            row[name]["sequences"] = int(pool.concurrency)
        rows.append(row)
    bytes_per_token = {name: capacity.stored_bytes(caches, one) for name, one in forms.items()}
    tiers = []
    counts = {"arena": capacity.arena_tokens, "ssd": capacity.ssd_tokens, "redis": capacity.redis_tokens}
    for tier, count in counts.items():
        if text := getattr(figures, tier):
            given = parse_size(text)
            held = {name: count(caches, one, given) for name, one in forms.items()}
            tiers.append({"tier": tier, "bytes": given, **held})
    exclusions = {layer.index: capacity.exclusion_bytes(caches, choice, layer.index) for layer in caches.cached}
    return {
        "model": caches.model,
        "pool_bytes": nbytes,
        "groups": groups,
        "static_scale_bytes": capacity.static_scale_bytes(caches, choice),
        "capacity": rows,
        "stored_bytes_per_token": bytes_per_token,
        "tiers": tiers,
        "exclusion_bytes_per_token": exclusions,
        **_break_evens(bytes_per_token, figures, choice.tp),
    }


def _break_evens(bytes_per_token: dict[str, float], figures: Figures, tp: int) -> dict[str, Any]:
    found: dict[str, Any] = {"restore": None, "decode": None}
    if figures.link and figures.prefill:
        recompute = capacity.prefill_curve(pairs(figures.prefill))
        found["restore"] = {
            name: capacity.restore_break_even(nbytes / tp, figures.link * 1e9, figures.overhead / 1e3, recompute)
            for name, nbytes in bytes_per_token.items()
        }
    if figures.itl_native and figures.itl_fp8:
        lines = [capacity.line(pairs(text)) for text in (figures.itl_native, figures.itl_fp8)]
        ratio = lines[1][1] / lines[0][1] if lines[0][1] else None
        found["decode"] = {"tokens": capacity.decode_break_even(*lines), "slope_ratio": ratio}
    return found


def _advice(
    caches: ModelCaches, choice: Choice, contexts: list[int], found: dict[str, Any], bundle: artifact.Artifact | None
) -> list[Advice]:
    decode, last = found["decode"], found["capacity"][-1]
    tokens = decode["tokens"] if decode else None
    advice = advise(caches, choice, contexts[-1], last["ratio"], tokens, decode is not None)
    warnings = [beyond_calibration(bundle, contexts[-1]), uncalibrated(bundle)] if bundle is not None else []
    return [one for one in warnings if one is not None] + advice


def weight_bytes(model: Path) -> int:
    """Bytes of the safetensors files beside a config.json. Raises Invalid if there are none."""
    folder = model if model.is_dir() else model.parent
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not total:
        advice = "say how large the weights are with --weights, or give --kv-bytes"
        raise Invalid(f"{folder} has no safetensors files: {advice}")
    return total


def _usual(caches: ModelCaches) -> list[int]:
    longest = caches.positions or 8192
    return sorted({max(1, longest // 4), longest})


def _print(found: dict[str, Any], advice: list[dict[str, str]]) -> None:
    print(f"{found['model']}: {size(found['pool_bytes'])} for KV on each rank")
    rows: list[tuple[object, ...]] = []
    for name in ("native", "fp8"):
        for group in found["groups"][name]:
            shape = "x".join(map(str, (group["heads"], *group["widths"])))
            per_token = group["payload_bytes"] + group["scale_bytes"]
            row = (name, group["kind"], group["dtype"], len(group["layers"]), shape, group["window"] or "-")
            rows.append((*row, round(per_token), group["page_bytes"]))
    output.table(("", "layers", "dtype", "number", "heads x widths", "window", "bytes/token", "page"), rows)
    print()
    columns = ("context", "native tokens", "sequences", "FP8 tokens", "sequences", "ratio", "unused in last blocks")
    capacity: list[tuple[object, ...]] = []
    for row in found["capacity"]:
        native, fp8 = row["native"], row["fp8"]
        held = [(one["tokens"], one["sequences"]) for one in (native, fp8)]
        capacity.append((row["context"], *held[0], *held[1], f"{row['ratio']:.3f}", f"{fp8['remainder']:.2%}"))
    output.table(columns, capacity)
    stored = found["stored_bytes_per_token"]
    fewer = stored["native"] / stored["fp8"]
    sizes = f"{stored['native']:,.0f} bytes natively, {stored['fp8']:,.0f} in FP8"
    print(f"\nin kvtier a token is {sizes} ({fewer:.3f} times fewer)")
    if found["tiers"]:
        tiers = [(t["tier"], size(t["bytes"]), t["native"], t["fp8"]) for t in found["tiers"]]
        output.table(("tier", "size", "native tokens", "FP8 tokens"), tiers)
    print(_sentence("restore instead of recompute", found["restore"], "give --link and --prefill"))
    decode = found["decode"] and {"": found["decode"]["tokens"]}
    print(_sentence("FP8 decode instead of native", decode, "give --itl-native and --itl-fp8"))
    for one in advice:
        print(f"{one['topic']}: {one['found']}\n    {one['do']}")


def _sentence(what: str, lengths: dict[str, float | None] | None, ask: str) -> str:
    if lengths is None:
        return f"{what}: not worked out; {ask}"
    where = {name: "at no length" if n is None else f"from {n:,.0f} tokens on" for name, n in lengths.items()}
    return f"{what}: pays {', '.join(f'{name} {text}'.strip() for name, text in where.items())}"
