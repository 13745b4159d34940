"""The interface that the connector is written against, as recorded of vLLM 0.32 and 0.33: what is installed is still
that, and every override fits.

`signatures.json` was made by `signatures` from both versions' sources: {version: {"Class.method": [parameters,
abstract]}}.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics

from kvtier.connectors.vllm import KvtierConnector, compat
from kvtier.connectors.vllm.stats import KvtierPromMetrics, KvtierStats

pytestmark = pytest.mark.vllm

Signatures = dict[str, tuple[list[str], bool]]
CLASSES = {
    "KVConnectorBase_V1",
    "SupportsHMA",
    "KVConnectorStats",
    "KVConnectorPromMetrics",
    "KVConnectorWorkerMetadata",
    "KVConnectorTransferResults",
}


def signatures(*files: Path) -> Signatures:
    """Of everything public that `CLASSES` define in these sources: names of the parameters, and whether it must be
    overridden. Fields count too."""
    found: Signatures = {}
    for file in files:
        for cls in ast.parse(file.read_text("utf-8")).body:
            if not isinstance(cls, ast.ClassDef) or cls.name not in CLASSES:
                continue
            for node in cls.body:
                if isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__init__"):
                    arguments = node.args
                    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
                    names += [f"*{one.arg}" for one in (arguments.vararg, arguments.kwarg) if one is not None]
                    found[f"{cls.name}.{node.name}"] = (
                        names,
                        "abstractmethod" in map(ast.unparse, node.decorator_list),
                    )
                elif isinstance(node, ast.AnnAssign):
                    found[f"{cls.name}.{ast.unparse(node.target)}"] = ([], False)
    return found


def recorded() -> dict[str, Signatures]:
    data = json.loads((Path(__file__).parent / "signatures.json").read_text("utf-8"))
    return {
        version: {name: (parameters, abstract) for name, (parameters, abstract) in table.items()}
        for version, table in data.items()
    }


def test_the_installed_version_has_the_recorded_interface() -> None:
    tables = recorded()
    version = ".".join(vllm.__version__.split(".")[:2])
    assert set(tables) == set(compat.TESTED) and version in tables
    assert signatures(Path(inspect.getfile(base)), Path(inspect.getfile(metrics))) == tables[version]


@pytest.mark.parametrize("version", compat.TESTED)
def test_the_connector_fits_both_versions(version: str) -> None:
    table = recorded()[version]
    other = {name for one in recorded().values() for name in one}
    for ours, theirs in (
        (KvtierConnector, ("KVConnectorBase_V1", "SupportsHMA")),
        (KvtierStats, ("KVConnectorStats",)),
        (KvtierPromMetrics, ("KVConnectorPromMetrics",)),
    ):
        abstract = {
            name.partition(".")[2] for name, (_, must) in table.items() if must and name.partition(".")[0] in theirs
        }
        assert abstract <= set(dir(ours)) and not getattr(ours, "__abstractmethods__", None)
        for name, member in vars(ours).items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            known = [table[f"{cls}.{name}"][0] for cls in theirs if f"{cls}.{name}" in table]
            if known:
                parameters = [
                    f"*{p.name}" if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) else p.name
                    for p in inspect.signature(function).parameters.values()
                ]
                assert parameters == known[0], name
            elif ours is KvtierConnector:
                assert any(f"{cls}.{name}" in other for cls in theirs), f"{name} is in neither version"
