"""Writes `tests/data/last_version/client.zip`: the modules that a client of the version under which this runs needs.

    PYTHONPATH=/path/to/that/version python keep_client.py OUT.zip

Run it with the code of the version before a change, not with the code under test. The modules are those that are loaded
once a client has been made for each transport.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import kvtier

MOMENT = (2026, 1, 1, 0, 0, 0)  # of every entry, so that the same code makes the same file


def main() -> None:
    """See the top of this file."""
    for address in ("unix:/none", "grpc+unix:/none"):
        kvtier.Client(address).close()
    root = Path(str(kvtier.__file__)).parent.parent
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] == "kvtier"]
    files = sorted(Path(str(module.__file__)) for module in loaded)
    with zipfile.ZipFile(sys.argv[1], "w", zipfile.ZIP_DEFLATED) as made:
        for file in files:
            made.writestr(zipfile.ZipInfo(str(file.relative_to(root)), MOMENT), file.read_bytes(), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    main()
