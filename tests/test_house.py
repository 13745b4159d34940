"""The house itself: floors, what may be imported where, lengths, fresh generated code, words in the documents that must be true."""

from __future__ import annotations

import ast
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
from tests.daemon import Daemon

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT / "kvtier" / "v1"
MAX_FILE_LINES = 400
MAX_TEST_FILE_LINES = 800  # a test per way to be malformed takes room
MAX_FUNCTION_LINES = 60

# Longer than that for a reason. An entry that is no longer needed fails the test too.
LONG_FILES: dict[str, str] = {
    "kvtier/connection.py": "one client's sockets, session, mapping and back-off share one lock and one state",
}
LONG_FUNCTIONS: dict[str, str] = {
    "kernels/kvtier_kernels/prefill.py:_prefill": "one Triton kernel: its phases share registers, a call inside costs alias analysis",
}

# Which third-party packages a file may import, by the longest matching prefix of its path. The standard library is free.
EVERYWHERE = {"kvtier", "numpy"}
MAY_IMPORT: dict[str, set[str]] = {
    "kvtier/": EVERYWHERE | {"xxhash"},
    "kvtier/artifact.py": EVERYWHERE | {"safetensors"},
    "kvtier/tensors.py": EVERYWHERE | {"safetensors"},
    "kvtier/lane.py": EVERYWHERE | {"google"},
    "kvtier/service.py": EVERYWHERE | {"google"},
    "kvtier/session.py": EVERYWHERE | {"google"},
    "kvtier/frames.py": EVERYWHERE | {"google"},
    "kvtier/calls.py": EVERYWHERE | {"google"},
    "kvtier/channel.py": EVERYWHERE | {"grpc"},
    "kvtier/client.py": EVERYWHERE | {"google"},
    "kvtier/connection.py": EVERYWHERE | {"google"},
    "kvtier/door.py": EVERYWHERE | {"google", "grpc", "grpc_health", "grpc_reflection"},
    "kvtier/local.py": EVERYWHERE | {"google"},
    "kvtier/remote.py": EVERYWHERE | {"google", "xxhash"},
    "kvtier/rpc.py": EVERYWHERE | {"google", "grpc"},
    "kvtier/tiers/redis_link.py": EVERYWHERE | {"redis"},
    "kvtier/tiers/redis_wire.py": EVERYWHERE | {"redis"},
    "kvtier/cli/": EVERYWHERE | {"google", "rich", "typer"},
    "kvtier/daemon/": EVERYWHERE | {"google", "prometheus_client", "rich", "typer"},
    "kvtier/torch_views.py": EVERYWHERE | {"torch"},
    "kvtier/connectors/lmcache/": EVERYWHERE | {"lmcache"},
    "kvtier/connectors/pages.py": EVERYWHERE | {"torch"},
    "kvtier/connectors/quantizing.py": EVERYWHERE | {"kvtier_kernels", "torch"},
    "kvtier/connectors/quantizing_gpu.py": EVERYWHERE | {"kvtier_kernels", "torch"},
    "kvtier/connectors/vllm/": EVERYWHERE | {"kvtier_kernels", "prometheus_client", "torch", "vllm"},
    "kvtier/connectors/vllm_dual/": EVERYWHERE | {"kvtier_kernels", "torch", "vllm"},
    "kvtier/connectors/vllm_tier/tier.py": EVERYWHERE | {"vllm"},
    "kvtier/workbench/": EVERYWHERE | {"gguf", "kvtier_kernels", "rich", "safetensors", "tokenizers", "torch", "transformers", "typer"},
    "kernels/kvtier_kernels/": EVERYWHERE | {"kvtier_kernels", "torch", "triton"},
    "kernels/tools/": EVERYWHERE | {"kvtier_kernels", "torch", "triton"},
}
FLOOR_0 = {"artifact", "errors", "fingerprint", "identity", "layout", "tensors"}  # all that the kernels may know

# Code in stored bytes would run when they are read; nothing here needs any of these.
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
BANNED_CALLS = {"eval", "exec", "__import__", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen"}


def sources(*folders: str) -> list[Path]:
    """Every Python file under these folders of the repository but the generated ones."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if GENERATED not in path.parents]
    assert found, f"no source under {folders}"
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def imported(tree: ast.AST) -> set[str]:
    """Full names of all modules imported anywhere in a file; for `from a import b` both a and a.b, as b may be a module."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


# --- floors


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_logo=True, cache_dir=None, verbose=False))"
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}"}
    return subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source in which floors may be broken."""
    root = tmp_path_factory.mktemp("house")
    for folder in ("kvtier", "kernels"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def test_floors_hold() -> None:
    found = lint_imports(ROOT)
    assert found.returncode == 0, found.stdout + found.stderr
    assert " 0 broken" in found.stdout


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("kvtier/layout.py", "from kvtier.identity import f32_hex", "imports only point down"),
        ("kvtier/errors.py", "from kvtier import workbench", "imports only point down"),
        ("kvtier/stray.py", "x = 1", "imports only point down"),
        ("kvtier/layout.py", "import torch", "without torch"),
        ("kvtier/daemon/__init__.py", "import transformers.utils", "without torch"),
        ("kvtier/identity.py", "import redis", "only tiers.redis_link and redis_wire import redis"),
        ("kvtier/layout.py", "import grpc", "and the client import grpc"),
        ("kernels/kvtier_kernels/__init__.py", "import kvtier.views", "floor 0 only"),
        ("kvtier/layout.py", "import kvtier_kernels", "only the workbench imports the kernels"),
    ],
)
def test_a_broken_floor_is_noticed(copy: Path, file: str, line: str, broken: str) -> None:
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
    if name.startswith("kernels/"):
        inside = {module.split(".")[1] for module in modules if module.startswith("kvtier.")}
        assert inside <= FLOOR_0 and "kvtier" not in modules, f"the kernels know floor 0 only, not {sorted(inside - FLOOR_0)}"


def test_the_core_runs_without_torch() -> None:
    """Imports every module of the core and of the daemon in a fresh interpreter where torch and its like cannot be imported."""
    skipped = ("kvtier/workbench/", "kvtier/torch_views.py", "kvtier/connectors/pages.py", "kvtier/connectors/vllm/", "kvtier/daemon/__main__.py")
    skipped += (
        "kvtier/connectors/lmcache/",
        "kvtier/connectors/quantizing.py",
        "kvtier/connectors/quantizing_gpu.py",
        "kvtier/connectors/vllm_dual/",
    )
    skipped += ("kvtier/connectors/vllm_tier/tier.py",)
    files = [path for path in sources("kvtier") if not name_of(path).startswith(skipped)]
    redis = {f"kvtier/tiers/redis{name}.py" for name in ("", "_asker", "_calls", "_link", "_upkeep", "_wire")}  # loaded where that tier is configured
    files = [path for path in files if name_of(path) not in redis]
    modules = sorted({name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files})
    assert {"kvtier", "kvtier.client", "kvtier.daemon", "kvtier.store"} <= set(modules)
    program = (
        "import importlib, sys\n"
        "barred = ('torch', 'triton', 'transformers', 'tokenizers', 'gguf', 'vllm', 'lmcache', 'kvtier_kernels', 'redis')\n"
        "for name in barred: sys.modules[name] = None\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(sorted(name for name, module in sys.modules.items() if module is not None and name.split('.')[0] in barred))\n"
    )
    found = subprocess.run([sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[]"


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
        assert called != "torch.load" or arguments.get("weights_only") == "True", f"{where}: torch.load without weights_only=True"
        assert arguments.get("allow_pickle") in (None, "False"), f"{where} allows pickle"
        assert not called.startswith("subprocess.") or arguments.get("shell") in (None, "False"), f"{where} starts a shell"


def test_files_and_functions_are_short_or_have_a_reason() -> None:
    long_files, long_functions = set(), set()
    for path in sources("kvtier", "kernels", "bench", "tests"):
        text = path.read_text("utf-8")
        if text.count("\n") > (MAX_TEST_FILE_LINES if name_of(path).startswith("tests/") else MAX_FILE_LINES):
            long_files.add(name_of(path))
        for function in functions(ast.parse(text)):
            if (function.end_lineno or 0) - function.lineno + 1 > MAX_FUNCTION_LINES:
                long_functions.add(f"{name_of(path)}:{function.name}")
    assert long_files == set(LONG_FILES), "files that are too long, or no longer are"
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
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([*command, *map(str, protos)], check=True, timeout=60)
    fresh = {path.name: path.read_text("utf-8") for path in (tmp_path / "kvtier" / "v1").iterdir()}
    stored = {path.name: path.read_text("utf-8") for path in GENERATED.glob("*_pb2*")}
    assert fresh == stored, "run make proto"
    assert "Protobuf Python Version: 6.31" in stored["kvtier_pb2.py"], "the generated code must run on protobuf 6.31 up to 7.x"


# --- what the documents promise


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_commands_in_the_documents_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    commands = "\n".join(re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text))
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
    found = subprocess.run(["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert {"demo", "test", "lint", "bench", "proto", "clean"} <= set(re.findall(r"^  make ([a-z-]+)", found.stdout, re.MULTILINE))


def test_ci_is_a_script_that_runs_what_the_readme_says() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    text = script.read_text("utf-8")
    assert "make test\n" in text and "make lint\n" in text
    budgets = [int(budget) for budget in re.findall(r"^\s*(?:if .*then )?part \S+ (\d+) make", text, re.MULTILINE)]
    total = int(re.search(r"total_budget=(\d+)", text)[1])  # type: ignore[index]
    assert budgets and total <= 3600


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert kvtier.__version__ == project["version"]
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
