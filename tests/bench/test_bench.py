"""The benchmarks run to their end and write rows of the exact schema. Their figures are not looked at: a test machine
is no place for that."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.harness import Child, Effort, interleave, percentile, ratios, turns
from bench.report import Report
from tests.support.paths import ROOT
from tests.support.redis_servers import needs_redis

DEADLINE = 100.0
ROW = {
    "case": str,
    "metric": str,
    "value": float,
    "unit": str,
    "ceiling": float | None,
    "ratio": float | None,
    "command": str,
}
MARK = {"case": str, "metric": str, "value": float, "sign": str, "mark": float | int, "met": bool}
CASES = ("copy", "zerocopy", "batches", "million", "beside", "killed")


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE
    )


def check_file(path: Path, command: str) -> None:
    text = path.read_text()
    assert text.splitlines()[1].startswith(' "command": '), "a kept result begins with the command that made it"
    kept = json.loads(text)
    assert list(kept) == ["command", "commit", "date", "machine", "marks", "rows"]
    assert kept["command"] == command
    assert re.fullmatch(r"[0-9a-f]{12}\+?|unknown", kept["commit"]) and re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\dZ", kept["date"]
    )
    assert set(kept["machine"]) >= {
        "cpu",
        "cores",
        "llc_bytes",
        "memory_bytes",
        "kernel",
        "python",
        "libraries",
        "load_1m",
    }
    assert kept["rows"]
    for schema, items in ((ROW, kept["rows"]), (MARK, kept["marks"])):
        for item in items:
            assert list(item) == list(schema)
            assert all(isinstance(item[name], kind) for name, kind in schema.items()), item
    assert len({(row["case"], row["metric"]) for row in kept["rows"]}) == len(kept["rows"]), "two rows of one name"
    assert all(row["command"] == command for row in kept["rows"])


QUICK = [
    ("bench.ceilings", None),
    ("bench.door", None),
    ("bench.scrape", None),
    *(("bench.planes", case) for case in CASES),
    ("bench.abuse", "noise"),
    ("bench.abuse", "half"),
    pytest.param("bench.redis", None, marks=[pytest.mark.slow, needs_redis]),
    ("bench.scaling", "blocks"),
    *(pytest.param("bench.scaling", case, marks=pytest.mark.slow) for case in ("clients", "sizes", "batches")),
    *(
        pytest.param("bench.trace", case, marks=pytest.mark.slow)
        for case in ("formats", "engines", "restart", "failing")
    ),
    pytest.param("bench.versus", "redis", marks=[pytest.mark.slow, needs_redis]),
]


@pytest.mark.long
@pytest.mark.parametrize(("module", "case"), QUICK)
def test_quick_run(module: str, case: str | None, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "rows.json"
    arguments = [*([case] if case else []), "--quick", "--json", str(out)]
    done = run(module, *arguments)
    assert done.returncode == 0, done.stderr
    check_file(out, " ".join(["python", "-m", module, *arguments]))
    assert [path.name for path in out.parent.iterdir()] == ["rows.json"], "nothing half-written stays behind"
    assert "marks" in done.stdout.splitlines()[-1]


def test_unknown_case_is_refused() -> None:
    done = run("bench.planes", "nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr


def test_missed_mark_is_reported_and_fails_only_when_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("bench.none", ["--json", "x"])
    report.share("case", "good", [0.9, 0.8, 0.7], (">=", 0.8))
    report.add("case", "bad", 5.1, "ms", mark=("<=", 5.0))
    assert report.finish(tmp_path / "rows.json", strict=False) == 0
    assert report.finish(None, strict=True) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 2 marks met; missed: case: bad 5.1 (mark <= 5)"
    check_file(tmp_path / "rows.json", "python -m bench.none --json x")
    assert [mark.met for mark in report.marks] == [True, False]


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    report = Report("bench.none", [])
    report.add("case", "metric", 1.0, "s")
    (tmp_path / "rows.json").mkdir()  # cannot be replaced by a file
    with pytest.raises(OSError):
        report.write(tmp_path / "rows.json")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_phases_take_turns_in_every_order() -> None:
    assert len({tuple(turns("abc", trial)) for trial in range(6)}) == 6
    assert [turns("ab", trial) for trial in range(2)] == [["a", "b"], ["b", "a"]]


def test_every_window_is_long_enough() -> None:
    done = interleave({"short": lambda: None, "long": lambda: time.sleep(0.02)}, Effort(3, 0.005), {"me": os.getpid()})
    for phase in done.values():
        assert len(phase.windows) == 3
        assert all(
            window.elapsed >= 0.005 and window.calls and set(window.cpu) == {"client", "me"} for window in phase.windows
        )
    assert len(ratios(done["short"], done["long"])) == 3


def test_percentile_is_a_measured_value() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert (percentile(values, 0), percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (
        1.0,
        3.0,
        5.0,
        5.0,
    )


def test_child_that_is_not_ready_is_an_error_and_is_ended() -> None:
    for program, words in (
        ("import time; time.sleep(600)", "not ready within"),
        ("raise SystemExit(3)", "ended with 3"),
        ("print('no')", "said"),
    ):
        child = Child(["-c", program], deadline=1.0)
        with pytest.raises(RuntimeError, match=words):
            child.__enter__()
        assert child.process.poll() is not None


def test_terminated_benchmark_ends_its_daemon() -> None:
    bench = subprocess.Popen(
        [sys.executable, "-m", "bench.planes", "zerocopy"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 30
        # the daemon and the empty server
        while len(children := Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()) < 2:
            assert bench.poll() is None and time.monotonic() < end, "the benchmark did not start its servers"
            time.sleep(0.02)
        bench.terminate()
        assert bench.wait(30) == 143
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    finally:
        bench.kill()
        bench.wait(10)


def test_child_dies_with_a_killed_parent() -> None:
    program = (
        "from bench.harness import Child\nimport time\nwith Child(['-c', 'print(\"ready\", flush=True); import "
        "time; time.sleep(600)']) as child:\n"
    )
    program += "    print(child.pid, flush=True)\n    time.sleep(600)\n"
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(10)
    end = time.monotonic() + 10
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < end, "the child outlived its parent"
        time.sleep(0.01)
