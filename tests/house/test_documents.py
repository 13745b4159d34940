"""The documents against the code: the README's map, places that pages name, what rooms say of their files, names."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.house import map as rooms_map
from tests.support.paths import ROOT

# Both ends of a socket have a file for each transport.
SAME_NAME = {"__init__.py", "__main__.py", "unix.py", "grpc.py"}


def packages() -> list[Path]:
    """Every package of ours but the generated one."""
    found = [path.parent for top in ("kvtier", rooms_map.KERNELS) for path in (ROOT / top).rglob("__init__.py")]
    return sorted(path for path in found if path.name != "v1")


def test_the_map_is_that_of_the_import_contracts() -> None:
    assert rooms_map.in_readme() == rooms_map.table(), "run: python -m tests.house.map"


def test_every_room_is_on_the_map() -> None:
    rooms = {room for layer in rooms_map.layers() for room in layer}
    entries = (ROOT / "kvtier").iterdir()
    here = {path.stem for path in entries if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert here - {"__init__"} == rooms


def places() -> list[str]:
    """The rows of README's table "Where to look"."""
    text = (ROOT / "README.md").read_text("utf-8").split("## Where to look", 1)[1].split("\n## ", 1)[0]
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


def test_the_places_that_the_readme_names_exist() -> None:
    """Each file, and behind a colon each name that must be found in it."""
    assert len(places()) > 20
    for row in places():
        files = re.findall(r"`([\w./]+/[\w.]+)`((?:[:,] `\w+`)*)", row)
        assert files or "](" in row, row
        for path, names in files:
            assert (ROOT / path).is_file(), f"README names {path}, which does not exist"
            text = (ROOT / path).read_text("utf-8")
            for name in re.findall(r"`(\w+)`", names):
                assert re.search(rf"\b{name}\b", text), f"README looks for {name} in {path}"


FOLDERS = "kvtier|kvtier_kernels|kernels|tests|bench|docs|proto|packaging|docker"
MADE_BY_RUNS = ("bench/out",)


def pages() -> list[Path]:
    """The documents of the root, of docs/ and beside tests."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "tests").rglob("*.md"))]


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(path: Path) -> None:
    """Files in backticks, modules behind `python -m`, names of kvtier's modules. CHANGELOG speaks of the past too."""
    text = path.read_text("utf-8")
    if path.name == "CHANGELOG.md":
        return
    for name in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)[`:\[]", text):
        where = ROOT / "kernels" / name if name.startswith("kvtier_kernels/") else ROOT / name
        assert "NAME" in name or name.startswith(MADE_BY_RUNS) or where.exists(), f"{path.name} names {name}"
    modules = set(re.findall(r"python -m ((?:bench|tests|kvtier)[\w.]*)", text))
    modules |= set(re.findall(r"(?<![/\w.-])(kvtier(?:_kernels)?(?:\.[a-z_]+)+)(?![\w/-])", text))
    for module in modules - {"kvtier.sock", "kvtier.toml", "kvtier.service", "kvtier.v1", "kvtier.key"}:
        assert is_module(module), f"{path.name} names {module}"


def is_module(name: str) -> bool:
    """Whether this is a module or package of the repository, or a name inside one."""
    parts = name.split(".")
    root = ROOT / "kernels" if parts[0] == "kvtier_kernels" else ROOT
    if parts[-1] == "md":
        return (root / "/".join(parts[:-1])).with_suffix(".md").exists()
    whole, outer = root.joinpath(*parts), root.joinpath(*parts[:-1])
    if whole.is_dir() or whole.with_suffix(".py").is_file():
        return True
    file = outer.with_suffix(".py")
    return file.is_file() and re.search(rf"\b{parts[-1]}\b", file.read_text("utf-8")) is not None


def test_each_invariant_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (I\d+) \|.*\|(.*)\|$", (ROOT / "docs" / "design.md").read_text("utf-8"), re.MULTILINE)
    assert [name for name, _ in rows] == [f"I{number}" for number in range(1, 16)]
    for name, cell in rows:
        paths = re.findall(r"`(tests/[\w./]+)`", cell)
        assert paths and all((ROOT / path).is_file() for path in paths), name


@pytest.mark.parametrize("path", packages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_room_says_what_each_of_its_files_decides(path: Path) -> None:
    text = ast.get_docstring(ast.parse((path / "__init__.py").read_text("utf-8"))) or ""
    if path == ROOT / "kvtier":
        return  # its rooms are README's map
    files = {one.stem for one in path.glob("*.py")} - {"__init__", "__main__"}
    files |= {one.parent.name for one in path.glob("*/__init__.py")}
    listed = re.findall(r"^(\w+) {2,}\S", text.partition("What each file decides:\n")[2], re.MULTILINE)
    assert sorted(listed) == sorted(files), f"{path.name}/__init__.py lists other files than there are"


def test_files_have_names_of_their_own() -> None:
    found: dict[str, list[str]] = {}
    for package in packages():
        for path in package.glob("*.py"):
            found.setdefault(path.name, []).append(path.relative_to(ROOT).as_posix())
    assert not {name: paths for name, paths in found.items() if len(paths) > 1 and name not in SAME_NAME}


MAX_COLUMNS = 120


def prose(text: str) -> list[str]:
    """Lines of a page that are neither code, table, heading nor made by a program."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    left_out = ("|", "  |", "#", "    ", "<!--", "`python -m bench.")
    return [line for line in text.splitlines() if not line.startswith(left_out)]


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_prose_fits_its_columns(path: Path) -> None:
    """A link or a figure that is kept by a program may stand out, as it cannot be broken."""
    for line in prose(path.read_text("utf-8")):
        assert len(line) <= MAX_COLUMNS or "](" in line or "<!--" in line, f"{path.name}: {line}"


SKIPPED = re.compile(r"allow_module_level|^pytestmark = .*\bskip\b", re.MULTILINE)
CORE = ("format", "protocol", "store", "tiers", "server", "client")


def test_every_module_of_the_core_has_tests_under_its_name() -> None:
    missing = []
    for room in CORE:
        for path in (ROOT / "kvtier" / room).rglob("*.py"):
            name = path.relative_to(ROOT / "kvtier")
            if path.stem in ("__init__", "__main__") or name.parts[:2] == ("protocol", "v1"):
                continue
            tests = ROOT / "tests" / name.parent / f"test_{path.name}"
            text = tests.read_text("utf-8") if tests.is_file() else ""
            if not re.search(r"^(def test_|class Test|Test\w+ = )", text, re.MULTILINE) or SKIPPED.search(text):
                missing.append(name.as_posix())
    assert not missing, f"modules without tests in tests/<same path>/test_<module>.py: {missing}"


MAX_LINES = 30_500


def test_the_package_stays_small() -> None:
    """Python of kvtier and its kernels, generated code left out."""
    files = [path for root in ("kvtier", "kernels/kvtier_kernels") for path in (ROOT / root).rglob("*.py")]
    files = [path for path in files if not path.name.endswith("_pb2.py")]
    assert tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["line-length"] == MAX_COLUMNS
    assert sum(len(path.read_text("utf-8").splitlines()) for path in files) <= MAX_LINES
