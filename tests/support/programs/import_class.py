"""Imports MODULE's CLASS with the engine that it needs, and prints as JSON the modules of the server's rooms that
came with it."""

from __future__ import annotations

import importlib
import json
import sys

from tests.support.programs.import_engine_side import ROOMS


def main() -> None:
    module, name = sys.argv[1:]
    assert isinstance(getattr(importlib.import_module(module), name), type)
    parts = (loaded.split(".") for loaded in sys.modules)
    print(
        json.dumps(sorted(".".join(part) for part in parts if part[0] == "kvtier" and part[1:2] and part[1] in ROOMS))
    )


if __name__ == "__main__":
    main()
