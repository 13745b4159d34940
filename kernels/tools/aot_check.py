"""Compile every kernel setting for several GPUs without one, and read the machine code for what makes a kernel slow or
wrong.

    python kernels/tools/aot_check.py [--targets sm_80,sm_89,sm_90,sm_100] [--only TEXT] [--json FILE] [--markdown]
                                        [--quick] [--fault NAME]

The real launchers run, on small CPU tensors, under a driver that only compiles: settings, signature and alignment are
those of a real launch. An entry fails on: a compile error; a spill (LDL, STL); more shared memory than the chip has; a
matrix instruction that is missing; global loads of single bytes or halves of K, V or a block; no 16-byte access at all;
a quantizing cast that goes through fp16. Exit status 1 if any entry fails. Each target runs in a process of its own:
compiling sm_90 before sm_89 in one process makes ptxas refuse the latter. `--fault` plants one, to show that it is
seen.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
warnings.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import torch  # noqa: E402
import triton  # noqa: E402
from kvtier_kernels import (  # noqa: E402
    attention,
    expand,
    gather,
    merge,
    paged,
    prefill,
    quantize,
    restore,
    tuning,
    write,
)
from kvtier_kernels.batch_plan import BatchPlan, plan  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime import driver  # noqa: E402

import kvtier.format.layout as layout  # noqa: E402

SHARED = {
    80: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
}  # bytes of shared memory that one program may have
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Narrow loads that a kernel may have: flags are bytes, small scales halves. Attention repeats the load of a flag per
# pipeline stage and register layout (26 seen, head dim 64); K and V by single bytes are 64 and more.
FLAG_LOADS, ATTENTION_FLAG_LOADS = 8, 40
DEADLINE = 900  # seconds for one target
FAULTS = ("spill", "shared", "no-mma", "byte-loads", "compile", "narrow", "cast")


@dataclass
class Entry:
    """One kernel setting. mma: whether matrix instructions must be there, "fp8" for FP8 ones. cast: a quantizing cast
    must be direct."""

    name: str
    run: Callable[[], Any]
    mma: str = ""
    cast: bool = False
    least: int = 80  # compute capability from which it exists
    core: bool = False  # part of --quick


@dataclass
class CompiledKernel:
    """What one compilation gave: resources, instructions by kind, and what is wrong with it."""

    name: str
    target: str
    registers: int = 0
    shared: int = 0
    instructions: int = 0
    seconds: float = 0.0
    mma: str = ""
    failures: list[str] = field(default_factory=list)


def caches(
    width: int, form: str, granularity: tuple[str, str], page: int, heads: int = 2, dtype: torch.dtype = torch.bfloat16
) -> paged.Paged:
    """A small cache, K|V on one row."""
    kv = torch.zeros(4, heads, page, 2 * width, dtype=dtype)
    if form == "fp8":
        codes = torch.zeros(4, heads, page, 2 * width, dtype=torch.uint8)
        if granularity == ("head", "head"):
            return paged.fp8(codes[..., :width], codes[..., width:], torch.ones(heads), torch.ones(heads))
        mixed = paged.interleaved(kv, width, torch.zeros(4, dtype=torch.uint8), granularity)
        return paged.Paged(*(paged.Plane(None, plane.codes, plane.scales, plane.granularity) for plane in mixed))
    return paged.interleaved(kv, width, None if form == "native" else torch.zeros(4, dtype=torch.uint8), granularity)


def planned(
    width: int,
    granularity: tuple[str, str],
    tokens: int,
    page: int,
    small: bool = False,
    form: str = "mixed",
    dtype: str = "bf16",
) -> BatchPlan:
    """A plan of one layer, and of one more that is excluded where the first is native."""
    scale = "bf16" if small else "fp32"
    k, v = (
        layout.Part(n, width, dtype) if form == "native" else layout.Part(n, width, "e4m3fn", g, scale)
        for n, g in zip("kv", granularity, strict=True)
    )
    group = layout.Group("attention", 2, tokens, (layout.Layer(0, (k, v)),))
    native = torch.float16 if dtype == "fp16" else torch.bfloat16
    return plan(layout.Layout((group,)).extents(), [caches(width, form, granularity, page, dtype=native)])


def batch(made: BatchPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Page ids and bodies of two blocks."""
    pages = torch.arange(2 * made.pages).reshape(2, made.pages) % 4
    return pages, torch.zeros(2, made.extents.body_bytes, dtype=torch.uint8)


def run_quantize(made: BatchPlan) -> None:
    """Launches quantize as the store would."""
    quantize.quantize(made, *batch(made), torch.ones(1, 2, 2))


def run_gather(made: BatchPlan) -> None:
    """Launches gather over native pages."""
    counts = torch.zeros(2, 1, 2, 2, dtype=torch.int32)
    gather.gather(made, *batch(made), counts, counts.clone())


def run_restore(made: BatchPlan) -> None:
    """Launches restore of two blocks."""
    pages, bodies = batch(made)
    restore.restore(made, bodies, pages)


def run_powers(made: BatchPlan) -> None:
    """Launches quantize with scales that are powers of two, as the connectors do."""
    quantize.quantize(made, *batch(made), powers=True)


def run_write(width: int, form: str, page: int) -> None:
    """Launches the engine's write of new tokens."""
    new = torch.zeros(40, 2, width, dtype=torch.bfloat16)
    write.write(caches(width, form, BLOCK, page), new, new, torch.arange(40))


def run_expand(made: BatchPlan) -> None:
    """Launches the dequantizing scatter."""
    pages, bodies = batch(made)
    expand.Expander(enabled=True).expand(made, bodies, pages)


def run_decode(width: int, form: str, granularity: tuple[str, str], page: int, **options: Any) -> None:
    """Launches decode over a mixed table."""
    queries = torch.zeros(2, 8, width, dtype=torch.bfloat16)
    lengths = torch.full((2,), 4 * page, dtype=torch.int32)
    attention.decode(
        queries, caches(width, form, granularity, page), torch.zeros(2, 4, dtype=torch.int32), lengths, 8192, **options
    )


def run_prefill(width: int, form: str, granularity: tuple[str, str], page: int, **options: Any) -> None:
    """Launches prefill over a mixed table."""
    queries = torch.zeros(64, 8, width, dtype=torch.bfloat16)
    lengths, starts = torch.full((2,), 4 * page, dtype=torch.int32), torch.tensor([0, 32, 64], dtype=torch.int32)
    prefill.prefill(
        queries,
        caches(width, form, granularity, page),
        torch.zeros(2, 4, dtype=torch.int32),
        starts,
        lengths,
        32,
        **options,
    )


HEAD, BLOCK, TOKEN, KIVI = (
    ("head", "head"),
    ("block-head", "block-head"),
    ("token-head", "token-head"),
    ("channel", "token-head"),
)


def entries() -> Iterator[Entry]:
    """Every default setting: each kernel by head dim, and for head dim 128 whatever else changes its code."""
    for width in paged.WIDTHS:
        yield from by_width(width)
    for name, kinds, small, tokens in (
        ("head", HEAD, False, 16),
        ("token-head", TOKEN, False, 16),
        ("kivi", KIVI, True, 64),
        ("block-head", BLOCK, False, 544),
    ):
        yield Entry(
            f"quantize[D128,{name},{tokens}]",
            lambda k=kinds, s=small, t=tokens: run_quantize(planned(128, k, t, 16, s)),
            cast=True,
        )
    yield Entry(
        "quantize[D128,head,16,fp16]", lambda: run_quantize(planned(128, HEAD, 16, 16, dtype="fp16")), cast=True
    )
    yield Entry("quantize[D128,native,16]", lambda: run_quantize(planned(128, HEAD, 16, 16, form="native")))
    yield Entry("restore[D128,kivi,64]", lambda: run_restore(planned(128, KIVI, 64, 16, True)))
    yield Entry("restore[D128,native]", lambda: run_restore(planned(128, HEAD, 16, 16, form="native")))
    yield Entry("write[D128,native,page 16]", lambda: run_write(128, "native", 16))
    yield Entry("gather[D128,head]", lambda: run_gather(planned(128, HEAD, 16, 16, form="fp8")))
    yield Entry("gather[D128,kivi]", lambda: run_gather(planned(128, KIVI, 64, 16, True)))
    yield Entry("expand[D128,kivi,64]", lambda: run_expand(planned(128, KIVI, 64, 16, True)))
    for form, kinds, page in (("mixed", TOKEN, 16), ("mixed", BLOCK, 64), ("fp8", HEAD, 16), ("native", HEAD, 16)):
        name = f"[D128,{form},{kinds[0]},page {page}]"
        yield Entry(f"decode{name}", lambda f=form, k=kinds, p=page: run_decode(128, f, k, p), mma="f16")
        if form != "fp8":
            yield Entry(f"prefill{name}", lambda f=form, k=kinds, p=page: run_prefill(128, f, k, p), mma="f16")
    full: dict[str, Any] = {"window": 128, "cap": 30.0, "sinks": torch.zeros(8)}
    yield Entry(
        "decode[D128,mixed,block-head,page 16,window+cap+sinks]",
        lambda: run_decode(128, "mixed", BLOCK, 16, **full),
        mma="f16",
    )
    yield Entry(
        "prefill[D128,mixed,block-head,page 16,window+cap+sinks]",
        lambda: run_prefill(128, "mixed", BLOCK, 16, **full),
        mma="f16",
    )


def by_width(width: int) -> Iterator[Entry]:
    """What is compiled for every head dim."""
    yield Entry(
        f"quantize[D{width},block-head,16]", lambda: run_quantize(planned(width, BLOCK, 16, 16)), cast=True, core=True
    )
    yield Entry(
        f"quantize[D{width},block-head,16,powers]", lambda: run_powers(planned(width, BLOCK, 16, 16)), cast=True
    )
    yield Entry(f"write[D{width},mixed,page 16]", lambda: run_write(width, "mixed", 16), core=True)
    yield Entry(f"restore[D{width},block-head,16]", lambda: run_restore(planned(width, BLOCK, 16, 16)))
    yield Entry(f"expand[D{width},block-head,16]", lambda: run_expand(planned(width, BLOCK, 16, 16)))
    yield Entry(f"merge[D{width}]", lambda: merge.merge(torch.zeros(4, 8, width), torch.zeros(4, 8)))
    for kinds in (BLOCK, KIVI):
        yield Entry(
            f"decode[D{width},mixed,{kinds[0]},page 16]",
            lambda k=kinds: run_decode(width, "mixed", k, 16),
            mma="f16",
            core=kinds == BLOCK,
        )
        if kinds == KIVI and width > 128:
            continue  # refused by name
        yield Entry(
            f"prefill[D{width},mixed,{kinds[0]},page 16]",
            lambda k=kinds: run_prefill(width, "mixed", k, 16),
            mma="f16",
            core=kinds == BLOCK,
        )
    for dots in ("qk", "qk+pv") if width <= 128 else ():
        run = lambda o=dots: run_prefill(width, "mixed", BLOCK, 16, dots=o)  # noqa: E731
        yield Entry(f"prefill[D{width},mixed,block-head,page 16,{dots}]", run, mma="fp8", least=90, core=width == 128)


class CompileOnly:
    """A driver for triton that has a target and no device."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(entry: Entry, target: GPUTarget) -> list[tuple[str, Any]]:
    """Runs the launcher and compiles each kernel that it would start: (name, compiled kernel)."""
    found: list[tuple[str, Any]] = []

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002
        options = {name: compile[name] for name in ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion")}
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        found.append((fn.name, triton.compile(source, target=target, options=options)))
        return True  # neither compile nor launch it

    knobs.runtime.jit_cache_hook = hook
    try:
        entry.run()
    finally:
        knobs.runtime.jit_cache_hook = None
    return found


MMA = re.compile(r"\b(HMMA|HGMMA|QMMA|QGMMA|UTC\w*MMA)\b")


def inspect(entry: Entry, kernel: Any, target: GPUTarget, result: CompiledKernel) -> None:
    """Reads one kernel's machine code into the result."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [BIN / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, timeout=60, check=False
        ).stdout
        sass = subprocess.run(
            [BIN / "nvdisasm", "-c", file.name], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    registers = re.search(r"REG:(\d+)", usage)
    result.registers = max(result.registers, int(registers[1]) if registers else 0)
    result.shared = max(result.shared, kernel.metadata.shared)
    result.instructions += len(
        re.findall(r"^\s+(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\w+\s+)?[A-Z][A-Z0-9_.]+.*;", sass, re.MULTILINE)
    )
    kinds = sorted(set(MMA.findall(sass)))
    result.mma = " ".join(dict.fromkeys([*result.mma.split(), *kinds]))
    spills, narrow = len(re.findall(r"\b(?:LDL|STL)\b", sass)), len(re.findall(r"\bLDG\.E\.[US](?:8|16)\b", sass))
    if spills:
        result.failures.append(f"{spills} spills")
    if result.shared > SHARED[target.arch]:
        result.failures.append(f"{result.shared} bytes of shared memory, {SHARED[target.arch]} allowed")
    if narrow > (ATTENTION_FLAG_LOADS if entry.mma else FLAG_LOADS):
        result.failures.append(f"{narrow} global loads of bytes or halves")
    if not re.search(r"\b(?:LDG|LDGSTS|STG)\S*\.(?:128|256)\b", sass) and not kernel.name.endswith(
        "_mark"
    ):  # which writes one byte a page
        result.failures.append("no 16-byte access")
    if entry.cast and target.arch >= 89 and "STG" in sass and re.search(r"E4M3\.F16|F2FP\.F16\.F32", sass):
        result.failures.append("a quantizing cast goes through fp16")


def check(entry: Entry, target: GPUTarget, name: str) -> CompiledKernel:
    """Compiles and reads one entry."""
    result, began = CompiledKernel(entry.name, name), time.perf_counter()
    try:
        with tuning.assume((target.arch // 10, target.arch % 10)):
            for kernel in compiled(entry, target):
                if not kernel[0].endswith("_merge") or entry.name.startswith("merge"):
                    inspect(entry, kernel[1], target, result)
    except Exception as error:  # whatever the compiler raises is this entry's failure
        result.failures.append(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:200]}")
    else:
        wanted = {
            "": None,
            "f16": {90: "HGMMA" if "prefill" in entry.name else "HMMA", 100: "MMA"}.get(target.arch, "HMMA"),
        }
        wanted["fp8"] = {90: "QGMMA"}.get(target.arch, "UTC")
        expected = wanted[entry.mma]
        if expected is not None and expected not in result.mma:
            result.failures.append(f"no {expected}, only {result.mma or 'none'}")
    result.seconds = time.perf_counter() - began
    return result


def plant(fault: str) -> None:
    """Makes one kernel bad in one way, as a change of code might."""
    from kvtier_kernels import tile

    plain_prefill = tuning.prefill
    if fault == "spill":
        tuning.prefill = lambda *a: tuning.Tuning(128, 4, 2, plain_prefill(*a).rows)
    elif fault == "shared":
        tuning.prefill = lambda *a: tuning.Tuning(64, 8, 6, plain_prefill(*a).rows)
    elif fault == "no-mma":
        edit(attention.step, "tl.dot(q, tl.trans(k))", "tl.sum(q[:, None, :] * k[None, :, :], axis=2).to(tl.float32)")
        edit(
            attention.step,
            "tl.dot(weights.to(tl.float16), v, acc * (decay * (unit / higher))[:, None])",
            "acc + tl.sum(weights)",
        )
    elif fault == "byte-loads":
        edit(
            tile.offsets,
            "tl.multiple_of(tl.reshape(starts[:, None] + (within * rows.token)[None, :], [TILE]), 16)",
            "tl.reshape(starts[:, None] + (within * rows.token)[None, :], [TILE])",
        )
    elif fault == "compile":
        edit(tile.token_scales, "step = rows.token if SCALES == 2 else 0", "step = rows.nothing")
    elif fault == "narrow":
        edit(restore._restore, "tl.multiple_of(tl.load(entry + DATA_AT), ALIGN)", "tl.load(entry + DATA_AT)")
        edit(restore._restore, "tl.multiple_of(tl.load(entry + data_field), ALIGN)", "tl.load(entry + data_field)")
    elif fault == "cast":
        tuning.casts_directly = lambda device: True


def edit(function: Any, old: str, new: str) -> None:
    """Puts a fault into a kernel's source, in this process only."""
    assert function.src.count(old) == 1, old
    function._unsafe_update_src(function.src.replace(old, new))


def run_target(name: str, only: str, fault: str, quick: bool) -> list[CompiledKernel]:
    """All entries for one target, in this process."""
    target = GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    driver.set_active(CompileOnly(target))
    if fault:
        plant(fault)
    chosen = [
        entry for entry in entries() if only in entry.name and entry.least <= target.arch and (entry.core or not quick)
    ]
    return [check(entry, target, name) for entry in chosen]


def markdown(results: list[CompiledKernel]) -> str:
    """The table of docs/kernels.md: one line an entry, a column a target."""
    targets = list(dict.fromkeys(result.target for result in results))
    lines = [f"| kernel | {' | '.join(targets)} |", f"|---|{'---|' * len(targets)}"]
    for name in dict.fromkeys(result.name for result in results):
        cells = []
        for target in targets:
            found = [result for result in results if (result.name, result.target) == (name, target)]
            cells.append(
                f"{found[0].registers} r, {found[0].shared // 1024} K{' FAIL' if found[0].failures else ''}"
                if found
                else "-"
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default="sm_80,sm_89,sm_90,sm_100")
    parser.add_argument("--only", default="", help="entries whose name contains this")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="the kernels' main settings only")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/kernels.md")
    parser.add_argument("--fault", default="", choices=("", *FAULTS), help="plant a fault of this class")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    targets = arguments.targets.split(",")
    if arguments.here:
        print(
            json.dumps(
                [asdict(result) for result in run_target(targets[0], arguments.only, arguments.fault, arguments.quick)]
            )
        )
        return 0

    def child(target: str) -> list[CompiledKernel]:
        command = [
            sys.executable,
            __file__,
            "--here",
            "--targets",
            target,
            "--only",
            arguments.only,
            "--fault",
            arguments.fault,
        ]
        command += ["--quick"] if arguments.quick else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
        if done.returncode:
            raise SystemExit(f"{target}: {done.stderr[-3000:]}")
        return [CompiledKernel(**result) for result in json.loads(done.stdout.splitlines()[-1])]

    began = time.perf_counter()
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        results = [result for part in pool.map(child, targets) for result in part]
    failing = [result for result in results if result.failures]
    for result in failing:
        print(f"FAIL {result.target} {result.name}: {'; '.join(result.failures)}")
    if arguments.markdown:
        print(markdown(results))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    seconds = time.perf_counter() - began
    print(f"{len(results)} compilations, {len(failing)} failing, Triton {triton.__version__}, {seconds:.0f} s")
    return 1 if failing or not results else 0


if __name__ == "__main__":
    sys.exit(main())
