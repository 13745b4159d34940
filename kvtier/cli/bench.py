"""`kvtier bench [NAME] [ARGUMENT ...]`: the benchmarks of a checkout; elsewhere it says how to get them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import typer

import kvtier
from kvtier.cli import output
from kvtier.cli.app import app
from kvtier.cli.output import Exit

_HERE = ("ceilings", "planes", "versus", "scaling", "trace", "tiers", "redis", "door", "scrape", "abuse", "policy")
_ELSEWHERE = ("fallback", "lmcache_l2", "vllm_restore", "vllm_modes", "kernels")  # in other environments
NAMES = _HERE + _ELSEWHERE


def checkout() -> Path | None:
    """The root of the checkout, if this package is part of one."""
    root = Path(kvtier.__file__).resolve().parent.parent
    return root if (root / "bench" / "__init__.py").exists() else None


def summary(root: Path, name: str) -> str:
    """The first paragraph of a benchmark's docstring, on one line."""
    said = ast.get_docstring(ast.parse((root / "bench" / f"{name}.py").read_bytes())) or ""
    return " ".join(said.partition("\n\n")[0].split())


@app.command(
    "bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench(context: typer.Context) -> None:
    """Run a benchmark of the checkout: kvtier bench NAME [its arguments]. Without a name: a list of them."""
    root, arguments = checkout(), context.args
    if root is None:
        how = "clone the repository and say `make venv`, then `.venv/bin/kvtier bench`"
        output.message(f"the benchmarks are not installed with the package: {how}")
        raise SystemExit(Exit.USAGE)
    there = [name for name in NAMES if (root / "bench" / f"{name}.py").exists()]
    if not arguments or arguments[0] in ("--help", "-h"):
        output.table(("name", "what it measures"), [(name, summary(root, name)) for name in there])
        raise SystemExit(Exit.OK)
    if arguments[0] not in there:
        output.message(f"there is no benchmark {arguments[0]!r:.80}: choose one of {', '.join(there)}")
        raise SystemExit(Exit.USAGE)
    program = [sys.executable, "-m", f"bench.{arguments[0]}", *arguments[1:]]
    raise SystemExit(subprocess.run(program, cwd=root, check=False).returncode)
