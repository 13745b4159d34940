"""Imports the modules that it is given, and prints the modules of the server's rooms that came with them, as JSON.

An engine that is not installed is passed over; a missing module of kvtier itself is an error.
"""

from __future__ import annotations

import importlib
import json
import sys

ROOMS = ("store", "tiers", "server", "cli")


def main() -> None:
    for name in sys.argv[1:]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in ("kvtier", "kvtier_kernels"):
                raise
    loaded = (name.split(".") for name in sys.modules)
    print(
        json.dumps(sorted(".".join(name) for name in loaded if name[0] == "kvtier" and name[1:2] and name[1] in ROOMS))
    )


if __name__ == "__main__":
    main()
