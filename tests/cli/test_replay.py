"""`kvtier replay`: what it prints for a trace, at equal bytes and at shares of the distinct blocks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier.cli import replay as command
from kvtier.cli.app import app, load_commands
from kvtier.cli.output import Exit
from kvtier.cli.simulator import POLICIES, SHARES, Kvtier, Lru, blocks_held, hit_ratio, load, save
from kvtier.format.layout import attention
from tests.support.traces import DATA

load_commands()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A trace of 60 requests over 15 blocks."""
    path = tmp_path / "small.npz"
    save(path, [[i % 7, 100 + i % 5, 200 + i % 3] for i in range(60)])
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_the_command_compares_both_formats_at_equal_bytes(small: Path) -> None:
    done = run(small, "--bytes", "256MiB", "--tokens", 16, "--json")
    assert done.exit_code == Exit.OK, done.output
    data = json.loads(done.stdout)
    assert [(row["format"], row["policy"]) for row in data["rows"]] == [("bf16", "lru")] + [
        ("e4m3fn", name) for name in [*POLICIES, "belady"]
    ]
    extents = {dtype: attention(32, 8, 128, engine_tokens=16, dtype=dtype).extents() for dtype in ("bf16", "e4m3fn")}
    assert {row["format"]: (row["slot_bytes"], row["blocks"]) for row in data["rows"]} == {
        dtype: (e.slot_bytes, blocks_held(2**28, e)) for dtype, e in extents.items()
    }
    assert (
        data["times_the_blocks"] == blocks_held(2**28, extents["e4m3fn"]) / blocks_held(2**28, extents["bf16"]) != 2.0
    )
    requests = load(small)
    assert data["before"] == hit_ratio(requests, Lru(blocks_held(2**28, extents["bf16"])))
    assert data["after"] == hit_ratio(requests, Kvtier(blocks_held(2**28, extents["e4m3fn"])))
    assert (data["requests"], data["distinct_blocks"], data["arena_bytes"]) == (60, 15, 2**28)


def test_the_doubling_follows_the_layout(small: Path) -> None:
    found = [
        json.loads(run(small, "--bytes", "1GiB", "--layout", shape, "--json").stdout)["times_the_blocks"]
        for shape in ("32,8,128", "2,1,64")
    ]
    assert found[0] != found[1] and all(1 <= times < 2.2 for times in found)


def test_the_command_says_it_in_words(small: Path) -> None:
    done = run(small, "--bytes", "256MiB", "--tokens", 16)
    assert re.search(r"e4m3fn +belady", done.stdout) and re.search(
        r"FP8 holds [12]\.\d{3} times the blocks of BF16\. BF16 with LRU hits 0\.\d{4}", done.stdout
    )


def test_without_bytes_the_command_prints_every_order_at_every_share(small: Path) -> None:
    data = json.loads(run(small, "--json").stdout)
    assert [(row["share"], row["policy"]) for row in data["rows"]] == [
        (share, name) for share in SHARES for name in [*POLICIES, "belady"]
    ]
    assert all(0 <= row["hit_ratio"] <= 1 for row in data["rows"]) and "arena_bytes" not in data
    assert len(run(small).stdout.splitlines()) == 1 + len(SHARES)


def test_a_stored_trace_hits_more_in_fp8_with_our_order() -> None:
    data = json.loads(run(DATA / "one_shot.npz", "--bytes", "60GB", "--json").stdout)
    assert data["after"] > data["before"] + 0.02 and 1.9 < data["times_the_blocks"] < 2.0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["absent.npz"], "cannot read"),
        (["{small}", "--bytes", "much"], "is not a size"),
        (["{small}", "--bytes", "64KiB"], "hold no block"),
        (["{small}", "--layout", "32,8"], "three numbers"),
        (["{small}", "--layout", "32,8,0"], "three numbers"),
        (["{empty}"], "has no request"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(arguments: list[str], why: str, small: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    done = run(*(argument.format(small=small, empty=empty) for argument in arguments))
    assert done.exit_code == Exit.USAGE and why in done.stderr


def test_a_plot_without_matplotlib_is_refused_before_anything_is_replayed(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(command, "load", lambda path: pytest.fail("it replays"))
    done = run(small, "--plot", tmp_path / "curves.png")
    assert done.exit_code == Exit.USAGE and "pip install 'kvtier[bench]'" in done.stderr


def test_curves_are_drawn_where_matplotlib_is(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run(small, "--bytes", "256MiB", "--tokens", 16, "--plot", tmp_path / "curves.png")
    assert done.exit_code == Exit.OK, done.output
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert run(small, "--plot", tmp_path / "curves.nonsense").exit_code == Exit.USAGE
