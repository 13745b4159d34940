"""The code base itself: import contracts, who may import what, fresh generated code, commands in the documents."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier
from tests.support.daemon import Daemon
from tests.support.paths import ROOT

GENERATED = ROOT / "kvtier" / "protocol" / "v1"
MAX_FUNCTION_LINES = 70

# Longer than that for a reason. An entry that is no longer needed fails the test too.
LONG_FUNCTIONS: dict[str, str] = {
    "kvtier/models/advice.py:advise": "one list of advice, in the order in which it is read",
    "tests/cli/test_quality.py:test_the_commands_from_texts_to_a_verdict": "one story of two commands",
}

# Third-party packages that a file may import, by the longest matching prefix of its path. The standard library is free.
EVERYWHERE = {"kvtier", "numpy"}
MAY_IMPORT: dict[str, set[str]] = {
    "kvtier/": EVERYWHERE,
    "kvtier/format/": EVERYWHERE | {"safetensors", "xxhash"},
    "kvtier/protocol/": EVERYWHERE | {"google"},
    "kvtier/protocol/rpc.py": EVERYWHERE | {"google", "grpc"},
    "kvtier/tiers/": EVERYWHERE | {"xxhash"},
    "kvtier/tiers/redis/connections.py": EVERYWHERE | {"redis"},
    "kvtier/tiers/redis/exchange.py": EVERYWHERE | {"redis"},
    "kvtier/server/": EVERYWHERE | {"google", "xxhash"},
    "kvtier/server/main.py": EVERYWHERE | {"typer"},
    "kvtier/server/metrics.py": EVERYWHERE | {"prometheus_client"},
    "kvtier/server/grpc.py": EVERYWHERE | {"google", "grpc", "grpc_health", "grpc_reflection"},
    "kvtier/client/": EVERYWHERE | {"google", "xxhash"},
    "kvtier/client/grpc_channel.py": EVERYWHERE | {"grpc"},
    "kvtier/client/torch_views.py": EVERYWHERE | {"torch"},
    "kvtier/connectors/common/": EVERYWHERE | {"google", "kvtier_kernels", "torch"},
    "kvtier/connectors/lmcache/": EVERYWHERE | {"lmcache"},
    "kvtier/connectors/vllm/": EVERYWHERE | {"kvtier_kernels", "prometheus_client", "torch", "vllm"},
    "kvtier/quality/": EVERYWHERE
    | {"gguf", "kvtier_kernels", "rich", "safetensors", "tokenizers", "torch", "transformers", "typer"},
    "kvtier/cli/": EVERYWHERE | {"google", "rich", "typer"},
    "kernels/kvtier_kernels/": EVERYWHERE | {"kvtier_kernels", "torch", "triton"},
    "kernels/tools/": EVERYWHERE | {"kvtier_kernels", "torch", "triton"},
}

# Code in stored bytes would run when they are read; nothing here needs any of these.
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
BANNED_CALLS = {
    "eval",
    "exec",
    "__import__",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "os.popen",
}


def sources(*folders: str) -> list[Path]:
    """Every Python file under these folders of the repository but the generated ones."""
    found = [
        path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if GENERATED not in path.parents
    ]
    assert found, f"no source under {folders}"
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def imported(tree: ast.AST) -> set[str]:
    """Full names of all modules that a file imports; for `from a import b` both a and a.b, as b may be a module."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


# --- rooms


def test_the_rooms_are_few() -> None:
    entries = [path.name for path in (ROOT / "kvtier").iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 15, sorted(entries)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    assert len(next(contract for contract in contracts if contract["type"] == "layers")["layers"]) <= 10


MAKERS = {"NamedTuple", "namedtuple", "Enum", "IntEnum", "make_dataclass", "NewType", "TypedDict", "type"}


def made(node: ast.AST) -> str | None:
    """The name of the class that a statement makes, by `class` or by a call."""
    if isinstance(node, ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.value.args) > 1:
        maker, name = ast.unparse(node.value.func).split(".")[-1], node.value.args[0]
        if maker in MAKERS and isinstance(name, ast.Constant):
            return str(name.value)
    return None


def test_class_names_occur_once_unless_one_implements_the_other() -> None:
    """A class may have the name of its base, written `module.Name`. A leading underscore makes no other name."""
    found: dict[str, list[str]] = {}
    for path in sources("kvtier", "kernels"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            name = made(node)
            bases = node.bases if isinstance(node, ast.ClassDef) else []
            if name is not None and name not in {ast.unparse(base).split(".")[-1] for base in bases}:
                found.setdefault(name.lstrip("_"), []).append(name_of(path))
    assert not {name: places for name, places in found.items() if len(places) > 1}


def imported_by(program: str, modules: list[str]) -> object:
    """What a program of tests/support/programs prints of these modules, in a fresh interpreter."""
    command = [sys.executable, "-m", f"tests.support.programs.{program}", *modules]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def engine_side() -> list[str]:
    """Modules that an engine may load and that need no engine, no torch and no triton to be imported."""
    heavy = (
        "torch",
        "triton",
        "vllm",
        "lmcache",
        "transformers",
        "tokenizers",
        "gguf",
        "safetensors.torch",
        "kvtier_kernels",
    )
    names = []
    for path in sources("kvtier/client", "kvtier/connectors", "kvtier/models", "kvtier/quality"):
        if not any(module.split(".")[0] in heavy for module in imported(ast.parse(path.read_bytes()))):
            names.append(name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    return names


def test_an_engine_loads_no_server() -> None:
    """Each module by itself, as an engine's process would load it; with the engines themselves: tests/connectors."""
    names = engine_side()
    assert {"kvtier.client.api", "kvtier.connectors.common.lookups", "kvtier.quality.drift"} <= set(names)
    assert imported_by("import_engine_side", names) == []


ENGINE_SIDE = ("kvtier/errors.py", *(f"kvtier/{room}" for room in ("format", "protocol", "client", "models")),
    "kvtier/quality", "kvtier/connectors", "kernels/kvtier_kernels")  # fmt: skip
BY_NAME = {"import_module", "resolve_name", "run_module", "run_path", "__import__"}
IMPORTS_BY_NAME = {"kvtier/quality/report.py"}  # matplotlib, where it is
STARTS_A_DAEMON = {"kvtier/quality/demo/driver.py"}  # as a process of its own


@pytest.mark.parametrize(
    "path", [path for path in sources("kvtier", "kernels") if name_of(path).startswith(ENGINE_SIDE)], ids=name_of
)
def test_an_engine_loads_no_server_by_name_either(path: Path) -> None:
    """What contracts do not see: modules whose names are strings, also inside functions."""
    tree = ast.parse(path.read_bytes())
    words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = [word for word in words if re.fullmatch(r"kvtier\.(store|tiers|server|cli)(\.\w+)*", word)]
    assert not named or name_of(path) in STARTS_A_DAEMON
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    by_name = {ast.unparse(call).split(".")[-1] for call in calls} & BY_NAME
    assert not by_name or name_of(path) in IMPORTS_BY_NAME, f"imports by a name: {by_name}"


# --- who may import whom


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys; from importlinter.cli import lint_imports; "
        "sys.exit(lint_imports(no_logo=True, cache_dir=None, verbose=False))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}"}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source in which contracts may be broken."""
    root = tmp_path_factory.mktemp("house")
    for folder in ("kvtier", "kernels"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


ENGINE = ["kvtier.client", "kvtier.connectors", "kvtier.models", "kvtier.quality"]
DAEMON = ["kvtier.store", "kvtier.tiers", "kvtier.server"]
CONTRACTS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "engine-side": (ENGINE, DAEMON, []),
    "server-side": (DAEMON, ENGINE, []),
    "no-torch": (
        ["kvtier"],
        ["torch", "triton", "transformers", "tokenizers", "gguf", "vllm", "lmcache"],
        ["kvtier.client.torch_views -> torch", "kvtier.connectors.** -> **", "kvtier.quality.** -> **"],
    ),
    "engines": (["kvtier.connectors.common"], ["vllm", "lmcache"], []),
    "redis": (
        ["kvtier", "kvtier_kernels"],
        ["redis"],
        ["kvtier.tiers.redis.connections -> redis", "kvtier.tiers.redis.exchange -> redis"],
    ),
    "grpc": (
        ["kvtier", "kvtier_kernels"],
        ["grpc", "grpc_health", "grpc_reflection"],
        [
            "kvtier.client.grpc_channel -> grpc",
            "kvtier.protocol.rpc -> grpc",
            "kvtier.server.grpc -> grpc",
            "kvtier.server.grpc -> grpc_health",
            "kvtier.server.grpc -> grpc_reflection",
        ],
    ),
    "kernels": (
        ["kvtier_kernels"],
        ["kvtier.*", "google", "grpc", "redis", "gguf", "tokenizers", "transformers", "vllm", "lmcache"],
        ["kvtier_kernels.** -> kvtier.errors", "kvtier_kernels.** -> kvtier.format.**"],
    ),
    "who-uses-kernels": (
        ["kvtier"],
        ["kvtier_kernels"],
        ["kvtier.connectors.** -> kvtier_kernels.**", "kvtier.quality.** -> kvtier_kernels.**"],
    ),
}


def test_the_contracts_say_what_their_names_say() -> None:
    """Written out here, so that none is hollowed out under its name."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    said = {
        one["id"]: (one["source_modules"], one["forbidden_modules"], one.get("ignore_imports", []))
        for one in contracts
        if one["type"] == "forbidden"
    }
    assert said == CONTRACTS
    (layers,) = (one for one in contracts if one["type"] == "layers")
    assert layers["exhaustive"] and not layers.get("ignore_imports")


def test_the_import_contracts_hold() -> None:
    found = lint_imports(ROOT)
    assert found.returncode == 0, found.stdout + found.stderr
    assert " 0 broken" in found.stdout


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("kvtier/format/layout.py", "from kvtier.protocol.stops import Stop", "imports only point down"),
        ("kvtier/client/api.py", "import kvtier.store.store", "an engine loads no server"),
        ("kvtier/tiers/tier.py", "import kvtier.client.api", "the daemon loads no client"),
        ("kvtier/errors.py", "from kvtier import quality", "imports only point down"),
        ("kvtier/stray.py", "x = 1", "imports only point down"),
        ("kvtier/format/layout.py", "import torch", "runs without torch"),
        ("kvtier/server/__init__.py", "import transformers.utils", "runs without torch"),
        ("kvtier/format/identity.py", "import redis", "tiers.redis.connections and exchange import redis"),
        ("kvtier/format/layout.py", "import grpc", "grpc is imported by both sides"),
        ("kernels/kvtier_kernels/__init__.py", "import kvtier.client.answers", "formats only"),
        ("kvtier/format/layout.py", "import kvtier_kernels", "by connectors and by quality alone"),
    ],
)
def test_a_broken_contract_is_noticed(copy: Path, file: str, line: str, broken: str) -> None:
    path = copy / file
    before = path.read_bytes() if path.exists() else None
    try:
        path.write_bytes((before or b"") + f"\n{line}\n".encode())
        found = lint_imports(copy)
    finally:
        path.unlink() if before is None else path.write_bytes(before)
    assert found.returncode != 0
    assert any(broken in verdict for verdict in found.stdout.splitlines() if "BROKEN" in verdict), found.stdout


@pytest.mark.parametrize("path", sources("kvtier", "kernels"), ids=name_of)
def test_imports_stay_within_what_a_place_may_use(path: Path) -> None:
    name = name_of(path)
    allowed = MAY_IMPORT[max((prefix for prefix in MAY_IMPORT if name.startswith(prefix)), key=len)]
    modules = imported(ast.parse(path.read_bytes()))
    extra = {module.split(".")[0] for module in modules} - allowed - sys.stdlib_module_names
    assert not extra, f"{name} imports {sorted(extra)}"


def test_the_core_runs_without_torch() -> None:
    """Every module of the core and of the daemon, where torch and its like cannot be imported."""
    skipped = ("kvtier/quality/", "kvtier/connectors/", "kvtier/client/torch_views.py", "kvtier/server/__main__.py")
    optional = ("kvtier/tiers/redis/",)  # loaded where that tier is configured
    files = [path for path in sources("kvtier") if not name_of(path).startswith(skipped + optional)]
    modules = sorted({name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files})
    assert {"kvtier", "kvtier.client.api", "kvtier.server", "kvtier.store.store"} <= set(modules)
    assert imported_by("import_without_torch", modules) == []


# --- what is written


@pytest.mark.parametrize("path", sources("kvtier", "kernels", "bench", "tests"), ids=name_of)
def test_nothing_runs_code_from_data(path: Path) -> None:
    tree = ast.parse(path.read_bytes())
    modules = {module.split(".")[0] for module in imported(tree)}
    assert not modules & BANNED_MODULES, f"{name_of(path)} imports {sorted(modules & BANNED_MODULES)}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        where = f"{name_of(path)}:{node.lineno}"
        assert called not in BANNED_CALLS, f"{where} calls {called}"
        arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert called != "torch.load" or arguments.get("weights_only") == "True", (
            f"{where}: torch.load without weights_only=True"
        )
        assert arguments.get("allow_pickle") in (None, "False"), f"{where} allows pickle"
        assert not called.startswith("subprocess.") or arguments.get("shell") in (None, "False"), (
            f"{where} starts a shell"
        )


def test_functions_fit_a_screen_or_have_a_reason() -> None:
    long_functions = set()
    for path in sources("kvtier", "kernels", "bench", "tests"):
        for function in functions(ast.parse(path.read_text("utf-8"))):
            if (function.end_lineno or 0) - function.lineno + 1 > MAX_FUNCTION_LINES:
                long_functions.add(f"{name_of(path)}:{function.name}")
    assert long_functions == set(LONG_FUNCTIONS), "functions that are too long, or no longer are"


@pytest.mark.parametrize("path", sources("kvtier", "kernels"), ids=name_of)
def test_what_is_public_says_what_it_does(path: Path) -> None:
    tree = ast.parse(path.read_bytes())
    assert ast.get_docstring(tree), f"{name_of(path)} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name_of(path)}:{node.lineno} {node.name} has no docstring"


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    protos = sorted((ROOT / "proto").rglob("*.proto"))
    assert protos
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{ROOT / 'proto'}",
        f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}",
    ]
    subprocess.run([*command, *map(str, protos)], check=True, timeout=60)
    fresh = {path.name: path.read_text("utf-8") for path in (tmp_path / "kvtier" / "v1").iterdir()}
    stored = {path.name: path.read_text("utf-8") for path in GENERATED.glob("*_pb2*")}
    assert fresh == stored, "run make proto"
    assert "Protobuf Python Version: 6.31" in stored["kvtier_pb2.py"], (
        "the generated code must run on protobuf 6.31 up to 7.x"
    )


# --- what the documents promise


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_commands_in_the_documents_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    commands = "\n".join(
        re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text)
    )
    wanted = set(re.findall(r"(?:^|\s)make ((?:[a-z][a-z-]*\b ?)+)", commands, re.MULTILINE))
    missing = {target for targets in wanted for target in targets.split()} - make_targets()
    assert not missing, f"{path.name} names make targets that do not exist: {sorted(missing)}"
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (path.parent / link).exists(), f"{path.name} links to {link}, which does not exist"


def test_the_readme_shows_how_to_begin() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for command in ("make demo", "make test", "make lint", "make bench"):
        assert command in text


def run_example(address: str) -> subprocess.CompletedProcess[str]:
    """The README's program, run against the daemon at `address`."""
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert program.count("unix:/tmp/kvtier.sock") == 1
    command = [sys.executable, "-c", program.replace("unix:/tmp/kvtier.sock", address)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_the_readme_example_prints_what_the_readme_says() -> None:
    (said,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    with Daemon("256MiB") as daemon:
        found = run_example(daemon.address)
    assert found.stdout == said, found.stderr


def test_the_readme_example_without_a_daemon_answers_less_and_goes_on(tmp_path: Path) -> None:
    found = run_example(f"unix:{tmp_path}/nobody.sock")
    assert found.stdout == "sealed 0 known 0\n[]\nknown 0\n", found.stderr
    assert found.stderr.splitlines()[-1].startswith("kvtier.errors.Unavailable"), "explain is for people and raises"


def test_make_explains_itself() -> None:
    found = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert {"demo", "test", "lint", "bench", "proto", "clean"} <= set(
        re.findall(r"^  make ([a-z-]+)", found.stdout, re.MULTILINE)
    )


def test_ci_is_a_script_that_runs_what_the_readme_says() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    text = script.read_text("utf-8")
    assert "make test\n" in text and "make lint\n" in text
    budgets = [int(budget) for budget in re.findall(r"^\s*(?:if .*then )?part \S+ (\d+) make", text, re.MULTILINE)]
    total = int(re.search(r"total_budget=(\d+)", text)[1])  # type: ignore[index]
    assert budgets and total <= 4500


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert kvtier.__version__ == project["version"]
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
