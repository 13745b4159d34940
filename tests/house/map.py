"""The map of the rooms in README.md, made from the import contracts in pyproject.toml and from each room's docstring.

`python -m tests.house.map` writes it between the two markers in README.md; tests/house/test_documents.py compares.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

README = ROOT / "README.md"
BEGIN, END = "<!-- map -->\n", "<!-- /map -->\n"
KERNELS = "kernels/kvtier_kernels"


def contracts(root: Path = ROOT) -> list[dict[str, Any]]:
    """The import contracts as pyproject.toml has them."""
    read = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    found: list[dict[str, Any]] = read["tool"]["importlinter"]["contracts"]
    return found


def layers() -> list[list[str]]:
    """Names of the rooms of each layer, the top first."""
    contract = next(one for one in contracts() if one["type"] == "layers")
    return [[name.strip() for name in line.split("|")] for line in contract["layers"]]


def source_of(room: str) -> Path:
    """The folder of a room of kvtier, or the file of a room that is one module."""
    folder = ROOT / "kvtier" / room
    return folder if folder.is_dir() else folder.with_suffix(".py")


def says(path: Path) -> str:
    """The first line of the docstring of a package or module."""
    file = path / "__init__.py" if path.is_dir() else path
    text = ast.get_docstring(ast.parse(file.read_text("utf-8")))
    assert text, f"{file} has no docstring"
    return text.splitlines()[0].strip()


def link(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix() + ("/" if path.is_dir() else "")
    return f"[`{name}`]({name})"


def sides() -> dict[str, str]:
    """Which process loads a room, where the contracts keep it out of the other one."""
    named = {one["id"]: one for one in contracts()}
    words = {"engine-side": "engine", "server-side": "daemon"}
    return {room.removeprefix("kvtier."): word for id_, word in words.items() for room in named[id_]["source_modules"]}


def table() -> str:
    """The map in Markdown: layers from top to bottom, then the names of the contracts."""
    side = sides()
    lines = ["| layer | room | side | what it is |", "|---:|---|---|---|"]
    for number, rooms in zip(range(len(layers()) - 1, -1, -1), layers(), strict=True):
        for room in rooms:
            path = source_of(room)
            lines.append(f"| {number} | {link(path)} | {side.get(room, 'both')} | {says(path)} |")
    lines.append(f"| beside | {link(ROOT / KERNELS)} | engine | {says(ROOT / KERNELS)} |")
    rules = "\n".join(f"- {one['name']}" for one in contracts())
    return "\n".join(lines) + f"\n\nThe import contracts, by name:\n\n{rules}\n"


def in_readme() -> str:
    """What stands between the markers now."""
    return README.read_text("utf-8").split(BEGIN, 1)[1].split(END, 1)[0]


def main() -> None:
    """Writes the map into README.md."""
    before, rest = README.read_text("utf-8").split(BEGIN, 1)
    README.write_text(before + BEGIN + table() + END + rest.split(END, 1)[1], "utf-8")


if __name__ == "__main__":
    main()
