"""A short round of every fuzz target, all kept inputs first; and the runner itself, which must notice what it is there
for.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from tests.fuzz import __main__ as runner
from tests.fuzz import target as targets
from tests.fuzz.__main__ import TARGETS, fuzz, share
from tests.fuzz.mutate import MAX_INPUT, Mutator
from tests.fuzz.target import Broken, Target, kept
from tests.support.paths import ROOT

INPUTS = 15_000


@pytest.mark.parametrize("name", TARGETS)
def test_a_short_round(name: str) -> None:
    found = fuzz(name, share(INPUTS, name), seed=11)
    assert not found.failure, found.failure
    assert found.inputs >= len(kept(name)) > 0 and len(found.outcomes) > 1, "inputs are both taken and refused"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_longer_round_from_the_command_line() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", "60000", "--seed", "12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(re.search(rf"^{name} +\d+", done.stdout, re.MULTILINE) for name in TARGETS)
    assert "no crash, no hang, no growth beyond the limit" in done.stdout


def test_every_target_has_kept_seeds_that_are_taken() -> None:
    """Mutation begins from what is well-formed; seeds that are refused would fuzz the first check only."""
    for name, kind in TARGETS.items():
        made = kind()
        try:
            said = [made.run(data) for data in kept(name)]
        finally:
            made.close()
        assert len(said) >= 1 and any(word in ("taken", "200", "answered") for word in said), name


class Fragile(Target):
    """Fails on inputs with a certain byte, in the way that `kind` says."""

    name = "fragile"
    check_every = 10
    kind: ClassVar[str] = ""
    hoard: ClassVar[list[bytearray]] = []

    def run(self, data: bytes) -> str:
        if 0x7F in data:
            if self.kind == "raise":
                raise ValueError("not among the allowed errors")
            if self.kind == "log":
                runner.logging.getLogger("kvtier.fragile").error("verb failed")
        if self.kind == "hoard":
            self.hoard.append(bytearray(b"x" * 40_000))
        return "taken"

    def check(self) -> None:
        if self.kind == "state":
            raise Broken("inconsistent")


@pytest.mark.parametrize(
    ("kind", "says"),
    [("raise", "not among the allowed errors"), ("log", "a fault was logged"), ("state", "inconsistent")],
)
def test_the_runner_notices_and_keeps_the_input(
    kind: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "SEEDS", tmp_path)
    monkeypatch.setitem(TARGETS, "fragile", Fragile)
    monkeypatch.setattr(Fragile, "kind", kind)
    targets.keep("fragile", b"seed of a fragile thing", "seed-")
    found = fuzz("fragile", 3000, seed=1)
    assert says in found.failure
    names = [path.name for path in (tmp_path / "fragile").iterdir()]
    assert any(name.startswith("found-") for name in names)
    if kind == "raise":
        again = fuzz("fragile", 1, seed=2)
        assert says in again.failure and again.inputs == 0, "the kept input is tried first"


def test_the_runner_notices_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "SEEDS", tmp_path)
    monkeypatch.setitem(TARGETS, "fragile", Fragile)
    monkeypatch.setattr(Fragile, "kind", "hoard")
    monkeypatch.setattr(runner, "WARM", 100)
    monkeypatch.setattr(runner, "GROWTH", 16 * 2**20)
    targets.keep("fragile", b"seed", "seed-")
    try:
        assert "grew by" in fuzz("fragile", 1500, seed=1).failure
    finally:
        Fragile.hoard.clear()


def test_a_run_follows_from_its_seed() -> None:
    def inputs(seed: int) -> list[bytes]:
        mutator = Mutator(random.Random(seed), [b"abc", b"defghijkl" * 10], [b"word"])
        return [mutator.next() for _ in range(300)]

    assert inputs(1) == inputs(1) != inputs(2)
    assert len(set(inputs(1))) > 200 and max(map(len, inputs(1))) <= MAX_INPUT


def test_a_wrong_target_is_a_usage_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--target", "nothing"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and "there is no target nothing" in done.stderr
