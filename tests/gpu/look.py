"""What this machine has of what `tests/gpu/run.sh` needs, before any time is spent on it.

    python -m tests.gpu.look [--dry-run]

Prints versions, and one line for everything that is missing with what cannot run without it. Exit status 1 if anything
is.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

NEEDED = {
    "torch": "anything",
    "triton": "anything",
    "numpy": "anything",
    "kvtier.format.layout": "anything: PYTHONPATH must name the project",
    "kvtier_kernels.reference": "anything: PYTHONPATH must name the project's folder `kernels`",
    "pytest": "the tests",
    "rich": "the benchmarks",
}


def missing(dry: bool) -> list[str]:
    """A line for each thing that is not there. Prints what is."""
    lacking = []
    print(f"Python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} CPUs")
    for name, purpose in NEEDED.items():
        try:
            module = importlib.import_module(name)
        except Exception as error:  # whatever it is, it is not there
            lacking.append(f"{name}, needed for {purpose} ({type(error).__name__}: {error})")
            continue
        if hasattr(module, "__version__"):
            print(f"{name} {module.__version__}")
    if dry:
        return lacking
    # Triton compiles its launcher with them at the first launch.
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")):
        lacking.append("a C compiler, needed for any launch")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        lacking.append(f"Python.h in {sysconfig.get_path('include')}, needed for any launch")
    try:
        import torch

        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            capability = "".join(map(str, torch.cuda.get_device_capability()))
            print(f"{torch.cuda.get_device_name()}, sm_{capability}, CUDA {torch.version.cuda}")
            print(f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB of its memory are free")
        else:
            lacking.append("a GPU that torch sees: only --dry-run can run here")
    except ImportError:
        pass  # said above
    return lacking


def main() -> int:
    """Entry point."""
    lacking = missing("--dry-run" in sys.argv[1:])
    for line in lacking:
        print(f"MISSING {line}")
    print(f"{len(lacking)} missing" if lacking else "all there")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
