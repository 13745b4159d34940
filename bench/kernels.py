"""The kernels on a GPU, against what the same GPU copies in the same run. Without a GPU only `--dry-run` works: it
walks through, and measures nothing.

    python -m bench.kernels [decode|prefill|move|link|all] [--json FILE] [--csv FILE] [--seconds N] [--dry-run]

decode   one step over BF16 and over FP8 pages of the same cache, per model of `bench.roofline`: time, share of the
         floor that this GPU's own copies set
prefill  a chunk over a context: fp16 dots over native and FP8 pages, FP8 dots
move     quantize, restore, expand: bytes a second against a copy
link     save and load through registered host memory against plain pinned copies

First comes the self-test of `kvtier_kernels` at each model's head dim; its failures stand beside the times. Files are
written after each case, so a run that is cut short keeps what it had.

Variants of one case run in turns, each over its own layers, together larger than any cache; times are medians of CUDA
events."""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness import median
from bench.report import Report
from bench.roofline import MODELS, Model
from kvtier.format import layout

CASES = ("decode", "prefill", "move", "link")
BEYOND_CACHE = 512 << 20  # bytes that one variant's layers have together at least
TRIALS = 15
PAGE = 16
CUDA = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda" if CUDA else "cpu")
Run = Callable[[int], Any]


class Bench:
    """Time left, trials, and sizes: all small on a dry run."""

    def __init__(self, seconds: float, dry: bool) -> None:
        self.until, self.dry = time.monotonic() + seconds, dry

    def late(self) -> bool:
        return time.monotonic() > self.until

    def turns(self, variants: dict[str, Run]) -> dict[str, float]:
        """Median seconds of each variant, in turns. `run(i)` is trial i."""
        if self.dry:
            for run in variants.values():
                run(0)
            return dict.fromkeys(variants, 1.0)
        for run in variants.values():  # compile, warm up
            run(0)
        times: dict[str, list[float]] = {name: [] for name in variants}
        for trial in range(TRIALS):
            names = list(variants) if trial % 2 else list(reversed(variants))
            for name in names:
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record()
                variants[name](trial)
                after.record()
                after.synchronize()
                times[name].append(before.elapsed_time(after) / 1e3)
        return {name: median(found) for name, found in times.items()}

    def copy_rate(self) -> float:
        """Bytes a second, read and written, of a copy on the device: the ceiling."""
        size = 1 << 10 if self.dry else 1 << 30
        a, b = (torch.zeros(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        return 2 * size / self.turns({"copy": lambda _: b.copy_(a)})["copy"]


def make_caches(model: Model, batch: int, context: int, dry: bool) -> tuple[list[Any], list[Any], torch.Tensor]:
    """Layers of BF16 pages, the same number of FP8 ones, and the page table."""
    from kvtier_kernels import paged

    pages, width, heads = batch * context // PAGE, model.width, model.kv_heads
    count = 1 if dry else max(1, -(-BEYOND_CACHE // (pages * heads * PAGE * width * 2)))
    made: list[list[Any]] = [[], []]
    for fp8 in (0, 1):
        for _ in range(count):
            kv = torch.randn(
                pages, heads, PAGE, 2 * width, device=DEVICE, dtype=torch.float32 if not CUDA else torch.bfloat16
            ).bfloat16()
            flags = torch.full((pages,), fp8, dtype=torch.uint8, device=DEVICE)
            cache = paged.interleaved(kv, width, flags, ("block-head", "block-head"))
            # what restore leaves behind: any codes but NaN, and scales that make them about as large as the native
            # elements
            if fp8:
                for plane in cache:
                    assert plane.codes is not None and plane.scales is not None
                    plane.codes.copy_(torch.randint(0, 0x7E, plane.codes.shape, dtype=torch.uint8, device=DEVICE))
                    plane.scales.fill_(0.01)
            made[fp8].append(cache)
    table = torch.randperm(pages, device=DEVICE).int().reshape(batch, -1)
    return made[0], made[1], table


def bench_check(report: Report, bench: Bench) -> None:
    from kvtier_kernels import selftest

    for width in sorted({model.width for model in MODELS}):
        reasons = {
            name: reason for name, reason in selftest.run(DEVICE, width, PAGE, "block-head").reasons.items() if reason
        }
        for name, reason in reasons.items():
            print(f"self-test, head dim {width}, {name}: {reason}")
        report.add(
            "self-test", f"head dim {width}, kernels that must not be used", len(reasons), "kernels", mark=("<=", 0)
        )


def bench_decode(report: Report, bench: Bench) -> None:
    from kvtier_kernels.attention import decode

    rate = bench.copy_rate()
    for model in MODELS:
        for batch, context in ((1, 64),) if bench.dry else ((1, 8192), (1, 32768), (8, 8192), (8, 32768)):
            if bench.late():
                return
            native, fp8, table = make_caches(model, batch, context, bench.dry)
            q = torch.randn(
                batch, 4 if bench.dry and model.q_heads == model.kv_heads else model.q_heads, model.width, device=DEVICE
            ).bfloat16()
            lengths = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)

            def over(
                caches: list[Any],
                q: torch.Tensor = q,
                table: torch.Tensor = table,
                lengths: torch.Tensor = lengths,
                most: int = context,
            ) -> Run:
                return lambda i: decode(q, caches[i % len(caches)], table, lengths, most)

            times = bench.turns({"BF16 pages": over(native), "FP8 pages": over(fp8)})
            case = f"decode, {model.name}, batch {batch}, {context:,} tokens"
            for name, nbytes in (
                ("BF16 pages", model.token_bytes(None)),
                ("FP8 pages", model.token_bytes("block-head", PAGE)),
            ):
                # What is read runs at most at the rate a copy reads: a copy's rate counts both directions.
                report.add(
                    case,
                    name,
                    times[name] * 1e6,
                    "us",
                    batch * context * nbytes / rate * 1e6,
                    batch * context * nbytes / rate / times[name],
                )
            report.add(case, "FP8 to BF16", times["FP8 pages"] / times["BF16 pages"], "ratio", mark=("<=", 0.6))


def bench_prefill(report: Report, bench: Bench) -> None:
    from kvtier_kernels.prefill import prefill

    for model in MODELS:
        context, chunk = (64, 8) if bench.dry else (16384, 2048)
        if bench.late():
            return
        native, fp8, table = make_caches(model, 1, context, bench.dry)
        q = torch.randn(chunk, model.q_heads, model.width, device=DEVICE).bfloat16()
        starts, lengths = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, chunk], [context]))

        def over(
            caches: list[Any],
            dots: str,
            q: torch.Tensor = q,
            table: torch.Tensor = table,
            starts: torch.Tensor = starts,
            lengths: torch.Tensor = lengths,
            most: int = chunk,
        ) -> Run:
            return lambda i: prefill(q, caches[i % len(caches)], table, starts, lengths, most, dots=dots)

        variants = {"BF16 pages": over(native, "fp16"), "FP8 pages": over(fp8, "fp16")}
        if model.width <= 128 and (not CUDA or torch.cuda.get_device_capability() >= (9, 0)):
            variants |= {f"FP8 pages, FP8 dots {dots}": over(fp8, dots) for dots in ("qk", "qk+pv")}
        times = bench.turns(variants)
        flop = 4 * model.q_heads * model.width * (chunk * (context - chunk) + chunk * (chunk + 1) // 2)
        for name, seconds in times.items():
            report.add(
                f"prefill, {model.name}, {chunk:,} of {context:,} tokens", name, flop / seconds / 1e12, "TFLOP/s"
            )


def model_plan(model: Model, tokens: int, dry: bool) -> tuple[Any, Any]:
    """The plan of a model's layers over caches of `tokens`, and the pages of its blocks."""
    from kvtier_kernels import paged
    from kvtier_kernels.batch_plan import plan

    layers, pages = (2 if dry else model.layers), tokens // PAGE
    flags = torch.zeros(pages, dtype=torch.uint8, device=DEVICE)
    shape = (pages, model.kv_heads, PAGE, 2 * model.width)
    caches = [
        paged.interleaved(torch.randn(shape, device=DEVICE).bfloat16(), model.width, flags, ("block-head",) * 2)
        for _ in range(layers)
    ]
    made = layout.attention(layers, model.kv_heads, model.width, engine_tokens=PAGE, granularity="block-head")
    return plan(made.extents(), caches), torch.randperm(pages, device=DEVICE)[:, None]


def bench_move(report: Report, bench: Bench) -> None:
    from kvtier_kernels.expand import Expander
    from kvtier_kernels.quantize import quantize
    from kvtier_kernels.restore import restore

    rate = bench.copy_rate()
    for model in MODELS[:1] if bench.dry else MODELS:
        if bench.late():
            return
        made, pages = model_plan(model, 32 if bench.dry else 8192, bench.dry)
        bodies = torch.zeros(len(pages), made.extents.slot_bytes, dtype=torch.uint8, device=DEVICE)
        expander = Expander(enabled=True)

        def save(_: int, made: Any = made, pages: Any = pages, bodies: torch.Tensor = bodies) -> None:
            made.flags.zero_()
            quantize(made, pages, bodies)

        variants: dict[str, Run] = {
            "quantize": save,
            "restore": lambda _, m=made, p=pages, b=bodies: restore(m, b, p),
            "expand": lambda _, m=made, p=pages, b=bodies, e=expander: e.expand(m, b, p),
        }
        fp8 = len(pages) * made.extents.body_bytes
        for name, seconds in bench.turns(variants).items():
            moved = fp8 * (2 if name == "restore" else 3)
            report.add(
                f"move, {model.name}, {len(pages)} blocks",
                name,
                moved / seconds / 1e9,
                "GB/s",
                rate / 1e9,
                moved / seconds / rate,
                (">=", 0.8 * rate / 1e9),
            )


def bench_link(report: Report, bench: Bench) -> None:
    import mmap

    from kvtier_kernels.transfer import BlockTransfer, RegisteredArena

    if bench.late():
        return
    model = MODELS[0]
    made, pages = model_plan(model, 32 if bench.dry else 4096, bench.dry)
    slot, size, count = made.extents.slot_bytes, made.extents.body_bytes, len(pages)
    memory = np.frombuffer(mmap.mmap(-1, slot * count), dtype=np.uint8)
    bodies = [memory[i * slot + 256 : i * slot + 256 + size] for i in range(count)]
    registered, whole = RegisteredArena(memory, DEVICE), torch.zeros(slot * count, dtype=torch.uint8, device=DEVICE)
    host = registered.tensor(memory)
    mover = BlockTransfer(made, registered)

    def awaited(ticket: Any) -> None:
        if not ticket.wait(60):
            raise RuntimeError("a batch took more than a minute")
        ticket.before(torch.cuda.current_stream()) if CUDA else None

    def save(_: int) -> None:
        made.flags.zero_()  # or what a load left as FP8 would be saved verbatim
        awaited(mover.save(pages, bodies))

    variants: dict[str, Run] = {
        "copy to host": lambda _: host.copy_(whole, non_blocking=True),
        "save": save,
        "copy to device": lambda _: whole.copy_(host, non_blocking=True),
        "load": lambda _: awaited(mover.load(bodies, pages)),
    }
    times = bench.turns(variants)
    for name, ceiling in (("save", "copy to host"), ("load", "copy to device")):
        most = slot * count / times[ceiling]
        report.add(
            f"link, {model.name}, {count} blocks",
            name,
            size * count / times[name] / 1e9,
            "GB/s",
            most / 1e9,
            size * count / times[name] / most,
        )
    registered.close()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("case", nargs="?", default="all", choices=(*CASES, "all"))
    parser.add_argument("--json", type=Path, help="keep the rows in this file")
    parser.add_argument("--csv", type=Path, help="keep them in this file, too")
    parser.add_argument("--seconds", type=float, default=240, help="start no further case after this time")
    parser.add_argument("--dry-run", action="store_true", help="walk through small cases; nothing is measured or kept")
    arguments = parser.parse_args()
    if not CUDA and not arguments.dry_run:
        print("no GPU: bench.kernels measures nothing here. --dry-run walks through it", file=sys.stderr)
        return 2
    if not CUDA:
        os.environ["TRITON_INTERPRET"] = "1"
        import kvtier_kernels.interpreter  # noqa: F401
    import triton  # after the interpreter was chosen

    report, bench, failed = Report("bench.kernels", sys.argv[1:]), Bench(arguments.seconds, arguments.dry_run), []
    report.machine |= {
        "device": torch.cuda.get_device_name() if CUDA else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    for name, run in (
        ("check", bench_check),
        ("decode", bench_decode),
        ("move", bench_move),
        ("link", bench_link),
        ("prefill", bench_prefill),
    ):
        if arguments.case not in (name, "all") and name != "check":
            continue
        try:
            run(report, bench)
        except Exception:  # the cases after it still run
            traceback.print_exc()
            failed.append(name)
        if not arguments.dry_run:
            keep(report, arguments.json, arguments.csv)
    if arguments.dry_run:
        with tempfile.TemporaryDirectory() as away:
            keep(report, Path(away, "rows.json"), Path(away, "rows.csv"))
        print(
            f"dry run: {len(report.rows)} rows would have been kept; nothing was measured; failed: "
            f"{', '.join(failed) or 'nothing'}"
        )
        return 1 if failed or not report.rows else 0
    print(report.machine)
    report.print()
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed or any(row.case == "self-test" and row.value for row in report.rows) else 0


def keep(report: Report, json_file: Path | None, csv_file: Path | None) -> None:
    """Writes the rows so far."""
    if json_file:
        report.write(json_file)
    if csv_file:
        with csv_file.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["case", "metric", "value", "unit", "ceiling", "ratio"])
            writer.writerows([row.case, row.metric, row.value, row.unit, row.ceiling, row.ratio] for row in report.rows)


if __name__ == "__main__":
    sys.exit(main())
