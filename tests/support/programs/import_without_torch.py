"""Imports the modules that it is given where torch, engines and the like cannot be imported.

Prints, as JSON, which of those came in nevertheless.
"""

from __future__ import annotations

import importlib
import json
import sys

BARRED = ("torch", "triton", "transformers", "tokenizers", "gguf", "vllm", "lmcache", "kvtier_kernels", "redis")


def main() -> None:
    for name in BARRED:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in sys.argv[1:]:
        importlib.import_module(name)
    there = (name for name, module in sys.modules.items() if module is not None)
    print(json.dumps(sorted(name for name in there if name.split(".")[0] in BARRED)))


if __name__ == "__main__":
    main()
