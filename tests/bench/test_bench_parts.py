"""Parts of the benchmarks: mixes of requests, the model of timing, growth exponents, workers, and documents that are
what the results say."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import kvtier
from bench import docs, mixes
from bench.harness import Phase, Window
from bench.scaling import exponent
from bench.timing import Device, Served, play, waiting_starts
from bench.trace import SHARE, capacities, predicted, tokens_of
from bench.versus import best
from bench.workers import Failed, Worker
from kvtier.cli import bench
from kvtier.cli.app import app, load_commands

load_commands()

PATIENCE = 30.0


# --- mixes


@pytest.mark.parametrize("name", mixes.MIXES)
def test_a_mix_is_the_same_each_time_and_in_order(name: str) -> None:
    made = mixes.MIXES[name](200)
    assert made == mixes.MIXES[name](200) and len(made) == 200
    assert all(a.at <= b.at for a, b in pairwise(made))
    for r in made:
        assert len(set(r.blocks)) == len(r.blocks), "no block twice in a request"
        assert (len(r.blocks) - 1) * mixes.TOKENS < r.tokens <= len(r.blocks) * mixes.TOKENS and r.output > 0


def test_mixes_share_prefixes_and_nothing_else() -> None:
    """Equal blocks stand at equal places behind equal blocks, or a hit would mean something that no engine can have."""
    for make in mixes.MIXES.values():
        before: dict[int, int | None] = {}
        for r in make(300):
            for head, block in zip((None, *r.blocks), r.blocks, strict=False):
                assert before.setdefault(block, head) == head


def test_mixes_differ_in_what_they_are_named_for() -> None:
    mean = {name: sum(len(r.blocks) for r in make(300)) / 300 for name, make in mixes.MIXES.items()}
    assert mean["short"] < 10 < mean["mixed"] < 60 < mean["long"]


def test_a_published_trace_is_read_and_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 7]}\n{"timestamp": 2000}\n'
    )
    assert mixes.load(path, 1) == [mixes.Request(1.5, 700, 9, (4, 7))]
    with pytest.raises(ValueError, match="line 2"):
        mixes.load(path, 5)


# --- capacity and hits


def test_equal_bytes_hold_nearly_twice_the_blocks_in_fp8() -> None:
    requests = mixes.mixed(300)
    held = capacities(requests)
    distinct = len({block for r in requests for block in r.blocks})
    assert held["BF16"] <= distinct * 8 * SHARE // 100
    assert 1.9 < held["FP8"] / held["BF16"] <= 2.0
    assert (
        predicted(requests, 8 * distinct, "lru")
        >= predicted(requests, held["FP8"], "lru")
        >= predicted(requests, held["BF16"], "lru")
        > 0
    )


def test_one_token_is_always_computed() -> None:
    request = mixes.Request(0, 1000, 1, (1, 2))
    assert tokens_of(request, SimpleNamespace(loaded=16)) == 999  # type: ignore[arg-type]
    assert tokens_of(request, SimpleNamespace(loaded=3)) == 192  # type: ignore[arg-type]


# --- timing

DEVICE = Device(prefill=1000.0, bandwidth=1e12, link=1e9)


def test_a_lone_request_feels_its_own_parts_only() -> None:
    step = DEVICE.step(2000 * DEVICE.token_bytes(False))
    (felt,) = play([Served(5.0, 2000, 10, 0, 0.25)], DEVICE, fp8=False)
    assert felt.first == pytest.approx(0.25 + 2.0) and felt.waited == 0
    assert felt.last == pytest.approx(2.25 + 10 * step) and felt.between == pytest.approx(step)


def test_what_is_loaded_is_not_computed_but_crosses_the_link() -> None:
    (felt,) = play([Served(0.0, 2000, 1, 1500, 0.0)], DEVICE, fp8=False)
    assert felt.first == pytest.approx(1500 * DEVICE.token_bytes(False) / 1e9 + 0.5)
    (half,) = play([Served(0.0, 2000, 1, 1500, 0.0)], DEVICE, fp8=True)
    assert half.first == pytest.approx(1500 * DEVICE.token_bytes(True) / 1e9 + 0.5)
    assert half.between < felt.between


def test_a_second_request_waits_for_the_first_and_decoding_is_shared() -> None:
    first, second = play([Served(0.0, 1000, 100, 0, 0.0), Served(0.5, 1000, 100, 0, 0.0)], DEVICE, fp8=False)
    assert first.waited == 0 and second.waited == pytest.approx(0.5) and second.first == pytest.approx(1.5)
    alone = play([Served(0.0, 1000, 100, 0, 0.0)], DEVICE, fp8=False)[0]
    assert first.between > alone.between and first.last > alone.last


def test_waiting_starts_later_when_less_is_computed() -> None:
    cold = [Served(float(i), 1000, 1, 0, 0.0) for i in range(50)]
    warm = [Served(float(i), 1000, 1, 500, 0.0) for i in range(50)]
    begins = waiting_starts(cold, DEVICE, fp8=False)
    assert 0.7 < begins < 1.5, "a second of prefill each: about one a second"
    assert waiting_starts(warm, DEVICE, fp8=True) > 1.5 * begins


# --- growth


def test_the_exponent_is_the_slope() -> None:
    sizes = (1e3, 1e4, 1e5, 1e6)
    assert exponent(sizes, [7.0] * 4) == pytest.approx(0)
    assert exponent(sizes, [3 * n for n in sizes]) == pytest.approx(1)
    assert exponent(sizes, [n**0.5 for n in sizes]) == pytest.approx(0.5)


def test_of_a_peer_with_several_ways_the_best_of_each_trial_counts() -> None:
    ways = [Phase([Window(1.0, [0.1] * n, {}) for n in calls]) for calls in ((1, 9), (4, 2))]
    assert best(ways) == [4.0, 9.0]


# --- workers

PROGRAM = """
import contextlib, sys, time
from bench.workers import serve
@contextlib.contextmanager
def make():
    print("a library says something on stdout")
    verbs = {"double": lambda x: 2 * x, "fail": lambda: 1 / 0, "sleep": lambda: time.sleep(600)}
    yield verbs | {"end": lambda: sys.exit(7)}, {"is": "up"}
serve(make)
"""


def test_a_worker_answers_whatever_its_libraries_print() -> None:
    with Worker(["-c", PROGRAM], deadline=PATIENCE) as worker:
        assert worker.ready == {"is": "up"}
        assert worker.ask("double", PATIENCE, x=21) == 42
        with pytest.raises(Failed, match="ZeroDivisionError"):
            worker.ask("fail", PATIENCE)
        assert worker.ask("double", PATIENCE, x="ab") == "abab", "a call that failed ends nothing"
        process = worker.process
    assert process.poll() is not None


@pytest.mark.long
def test_a_worker_that_is_late_or_gone_is_an_error_that_shows_what_it_said() -> None:
    with Worker(["-c", PROGRAM], deadline=PATIENCE) as worker:
        worker.tell("sleep")
        with pytest.raises(Failed, match="did not answer within"):
            worker.answer(0.2)
    with Worker(["-c", PROGRAM], deadline=PATIENCE) as worker, pytest.raises(Failed, match="a library says something"):
        worker.ask("end", PATIENCE)
    with pytest.raises(Failed, match="no_such_module") as found:
        Worker(["-c", "import no_such_module"], deadline=PATIENCE).__enter__()
    assert found.value.worker.process.poll() is not None


# --- documents


def test_documents_and_csv_are_what_the_results_say() -> None:
    done = docs.stale()
    assert not done, "say: make benchdocs"


RESULT = {
    "command": "python -m bench.none",
    "commit": "abc",
    "date": "2026-01-02T03:04",
    "machine": {"cpu": "C", "cores": 2, "kernel": "6", "python": "3.11", "load_1m": 0.5},
    "marks": [{"case": "one", "metric": "speed", "value": 1.5, "sign": ">=", "mark": 2.0, "met": False}],
    "rows": [
        {"case": "one", "metric": "speed", "value": 1.5, "unit": "GB/s", "ceiling": 3.0, "ratio": 0.5, "command": "c"},
        {
            "case": "one",
            "metric": "speed, p10 of the ratio",
            "value": 0.4,
            "unit": "ratio",
            "ceiling": None,
            "ratio": None,
            "command": "c",
        },
        {
            "case": "one",
            "metric": "speed, p90 of the ratio",
            "value": 0.6,
            "unit": "ratio",
            "ceiling": None,
            "ratio": None,
            "command": "c",
        },
        {
            "case": "two",
            "metric": "speed",
            "value": 12345.6,
            "unit": "GB/s",
            "ceiling": None,
            "ratio": None,
            "command": "c",
        },
    ],
}


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "kept", lambda name: RESULT)


@pytest.mark.usefixtures("result")
def test_tables_and_figures_come_from_rows() -> None:
    text = "\n".join(
        f"before <!-- {said} -->old<!-- end --> after"
        for said in ("table marks x", 'table rows x "*"', 'table grid x "o*" "speed"')
    )
    made = docs.render(
        text + '\n<!-- fig x "one" "speed" .2f -->9<!-- end --> and <!-- fig x "one" "speed" r.1f --><!-- end -->'
    )
    assert "0 of 1 marks are met" in made and "| one | speed | 1.50 | >= 2 | **missed** |" in made
    assert (
        "| one | speed | 1.50 GB/s | 3.00 | 0.500 | 0.400 to 0.600 |" in made
        and "| two | speed | 12,346 GB/s |  |  |  |" in made
    )
    assert "|  | speed, GB/s |\n| --- | --- |\n| one | 1.50 |\n<!-- end -->" in made
    assert '.2f -->1.50<!-- end --> and <!-- fig x "one" "speed" r.1f -->0.5<!-- end -->' in made
    assert "old" not in made and docs.render(made) == made, "made twice it is the same"


@pytest.mark.usefixtures("result")
@pytest.mark.parametrize(
    "said",
    ["table rows x nothing", "table curves x", 'fig x "one" "height" .2f', "table marks", 'fig x "one" "speed" zz'],
)
def test_a_marker_that_means_nothing_is_refused(said: str) -> None:
    with pytest.raises(docs.Wrong, match="<!-- "):
        docs.render(f"<!-- {said} --><!-- end -->")


def test_what_was_not_measured_says_how_to() -> None:
    assert "Not measured yet: `python -m bench.nothing --json bench/results/nothing.json`." in docs.render(
        "<!-- table marks nothing --><!-- end -->"
    )
    with pytest.raises(docs.Absent):
        docs.render('<!-- fig nothing "one" "speed" .2f --><!-- end -->')


def test_the_check_says_what_is_stale(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "RESULTS", tmp_path)
    monkeypatch.setattr(docs, "DOCUMENTS", ("page.md",))
    (tmp_path / "page.md").write_text("nothing made here\n")
    assert docs.main(["--check"]) == 1 and capsys.readouterr().out == "rows.csv is stale: say make benchdocs\n"
    assert docs.main([]) == 0 and docs.main(["--check"]) == 0
    assert docs.main(["--chekc"]) == 2


# --- kvtier bench


def test_the_command_lists_benchmarks_and_runs_one(capfd: pytest.CaptureFixture[str]) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["bench"])
    assert done.exit_code == 0 and {"planes", "versus", "scaling", "trace"} <= {
        line.split(" ")[0] for line in done.stdout.splitlines()
    }
    assert all((docs.ROOT / "bench" / f"{name}.py").exists() for name in bench.NAMES)
    assert runner.invoke(app, ["bench", "nonsense"]).exit_code == 2
    assert runner.invoke(app, ["bench", "scaling", "nonsense", "--quick"]).exit_code == 2, (
        "its arguments and its exit code are the benchmark's"
    )
    assert "nonsense is none of blocks, clients" in capfd.readouterr().err


def test_without_a_checkout_the_command_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kvtier, "__file__", str(tmp_path / "kvtier" / "__init__.py"))
    done = CliRunner().invoke(app, ["bench", "planes"])
    assert done.exit_code == 2 and "clone the repository" in done.stderr
