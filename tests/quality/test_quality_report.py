"""Verdicts from numbers alone, the report's files, checkers, task files, and the command lines on a small random
model."""

from __future__ import annotations

import csv
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from kvtier.cli.app import app, load_commands  # noqa: E402
from kvtier.errors import Invalid  # noqa: E402
from kvtier.format import artifact  # noqa: E402
from kvtier.quality import (  # noqa: E402
    checkers,
    evaluate,
    report,
    tasks,
)
from kvtier.quality.checkers import check  # noqa: E402
from kvtier.quality.compare import Result  # noqa: E402
from kvtier.quality.evaluate import BAD, DOUBTFUL, GOOD, Cell, judge  # noqa: E402
from kvtier.quality.schemes import Scheme  # noqa: E402
from tests.quality.test_quality import make, model, text  # noqa: E402

load_commands()


def result(name: str, *kl: float, sequences: int = 2, length: int = 512) -> Result:
    """A scheme with this KL in each run of `length` positions."""
    scheme = (
        Scheme(name, "bf16", "bf16")
        if name == "bf16"
        else Scheme(name, "head", "head", {(0, "k"): torch.tensor([0.1]), (0, "v"): torch.tensor([0.1])})
    )
    made = Result(scheme)
    for _ in range(sequences):
        trace = np.repeat(np.array(kl, np.float32), length)
        made.kl.append(trace)
        for values in (made.nll, made.native_nll, made.top1):
            values.append(np.ones_like(trace))
    return made


# --- verdicts: the numbers are those measured on SmolLM2-135M


@pytest.mark.parametrize(
    ("name", "kl", "word"),
    [
        ("one on the twin", (0.45,), BAD),
        ("skipping half of the layers", (0.24,), BAD),
        ("calibrated", (0.0085,), GOOD),
        ("calibrated, far", (0.012, 0.019, 0.021, 0.021), GOOD),
        ("channel-static beyond its length", (0.013, 0.11, 0.11, 0.11), BAD),
        ("drifting", (0.01, 0.012, 0.011, 0.09), DOUBTFUL),
        ("dull", (0.04, 0.04, 0.04, 0.04), DOUBTFUL),
    ],
)
def test_a_verdict_needs_no_hint(name: str, kl: tuple[float, ...], word: str) -> None:
    best = result("best", *(min(value, 0.02) for value in kl))
    verdicts = {
        one.scheme: one
        for one in judge([Cell("natural", "t", 2048, [result("bf16", *(0.0 for _ in kl)), best, result(name, *kl)])])
    }
    assert set(verdicts) == {"best", name}, "the noise floor is not judged"
    assert verdicts[name].word == word, verdicts[name]
    assert bool(verdicts[name].reasons) == (word != GOOD)


def test_one_bad_cell_is_enough_and_models_are_judged_apart() -> None:
    cells = [
        Cell("natural", "t", 512, [result("a", 0.01), result("b", 0.01)]),
        Cell("natural", "u", 512, [result("a", 0.01), result("b", 0.3)]),
        Cell("natural", "v", 512, [result("a", 0.01), result("b", 0.01)]),
        Cell("twin 512", "t", 512, [result("a", 0.5), result("b", 0.01)]),
    ]
    words = {(one.scheme, one.model): one.word for one in judge(cells)}
    assert words == {("a", "natural"): GOOD, ("b", "natural"): BAD, ("a", "twin 512"): BAD, ("b", "twin 512"): GOOD}
    (reason,) = next(one.reasons for one in judge(cells) if one.word == BAD and one.scheme == "b")
    assert reason.startswith("u, 512 tokens: KL 0.300")
    relative = judge([Cell("natural", "t", 512, [result("a", 0.005), result("b", 0.04)])])
    assert relative[1].word == BAD and "8 times the best" in relative[1].reasons[0]


# --- checkers


@pytest.mark.parametrize(
    ("checker", "good", "bad"),
    [
        ({"kind": "exact", "value": "42"}, " 42\n", "42."),
        ({"kind": "contains", "value": ["requests", "numpy"]}, "import numpy, requests", "import numpy"),
        ({"kind": "regex", "value": r"^def \w+\("}, "def f(x): ...", "class F: ..."),
        ({"kind": "numbers", "value": [5120, 0.5]}, "5,120 at 0.50 each", "5121 at 0.5"),
        ({"kind": "refusal"}, "I'm sorry, I can't help with that.", "Sure! First, ..."),
        (
            {
                "kind": "json-schema",
                "value": {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 1}}},
            },
            '```json\n{"a": 2}\n```',
            '{"a": 0}',
        ),
        (
            {"kind": "json-schema", "value": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2}},
            "[1, 2]",
            "[1]",
        ),
        (
            {
                "kind": "json-schema",
                "value": {"type": "object", "additionalProperties": False, "properties": {"a": {"type": "boolean"}}},
            },
            '{"a": true}',
            '{"a": 1}',
        ),
        ({"kind": "json-schema", "value": {"type": "object"}}, "{}", "{"),
        (
            {"kind": "tool-call", "name": "weather", "arguments": {"type": "object", "required": ["city"]}},
            'Sure: {"name": "weather", "arguments": {"city": "Oslo"}}',
            '{"name": "time", "arguments": {"city": "Oslo"}}',
        ),
        (
            {"kind": "tool-call", "name": "f", "arguments": {"type": "object", "required": ["x"]}},
            '{"name": "f", "arguments": "{\\"x\\": 1}"}',
            '{"name": "f"}',
        ),
    ],
)
def test_checkers(checker: dict[str, Any], good: str, bad: str) -> None:
    assert check(checker, good) and not check(checker, bad)


@pytest.mark.parametrize(
    ("checker", "message"),
    [
        (None, "kind"),
        ({"kind": "code"}, "kind is one of"),
        ({"kind": "exact"}, "fields kind, value"),
        ({"kind": "exact", "value": 3}, "text"),
        ({"kind": "regex", "value": "("}, "not a pattern"),
        ({"kind": "numbers", "value": []}, "list of numbers"),
        ({"kind": "contains", "value": []}, "list of texts"),
        ({"kind": "json-schema", "value": {"$ref": "x"}}, r"\$ref"),
        ({"kind": "json-schema", "value": {"type": "decimal"}}, "no type of JSON"),
        ({"kind": "json-schema", "value": {"properties": {"a": {"oneOf": []}}}}, "oneOf"),
        ({"kind": "tool-call", "name": 3, "arguments": {}}, "name of a tool"),
        ({"kind": "refusal", "value": 1}, "fields kind"),
    ],
)
def test_checkers_that_would_check_nothing_are_refused(checker: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        checkers.validate(checker)


def test_task_files(tmp_path: Path) -> None:
    good = {"prompt": "p", "checker": {"kind": "exact", "value": "x"}}
    (tmp_path / "t.jsonl").write_text(
        json.dumps(good) + "\n\n" + json.dumps(good | {"name": "n", "max_tokens": 3, "stratum": "s"}) + "\n"
    )
    found = tasks.read(tmp_path / "t.jsonl")
    assert [(one.name, one.max_tokens, one.stratum) for one in found] == [("line 1", 64, "tasks"), ("n", 3, "s")]
    for bad, message in (
        ("{", "line 1: not JSON"),
        ("[1]", "a task is an object"),
        (json.dumps(good | {"temperature": 1}), "unknown fields: temperature"),
        (json.dumps(good | {"prompt": ""}), "prompt"),
        (json.dumps(good | {"max_tokens": 0}), "max_tokens"),
        (json.dumps(good | {"checker": {"kind": "regex", "value": "["}}), "line 1: not a pattern"),
        ("", "0 tasks"),
    ):
        (tmp_path / "bad.jsonl").write_text(bad)
        with pytest.raises(Invalid, match=message):
            tasks.read(tmp_path / "bad.jsonl")
    assert len({one.stratum for one in tasks.built_in()}) == 4


def test_repetition() -> None:
    assert tasks.repetition([1, 2, 3]) == 0 == tasks.repetition(list(range(50)))
    assert tasks.repetition([1, 2] * 50) > 0.9


# --- end to end on a small random model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a tokenizer of single characters, as a directory."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    words = {chr(i) if 32 <= i < 127 else f"<{i}>": i for i in range(128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<0>", pad_token="<1>").save_pretrained(
        path
    )
    model().save_pretrained(path)
    return path


def run(*arguments: object, code: int = 0) -> Any:
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"TERM": "dumb"})
    assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
    return done


def test_the_commands_from_texts_to_a_verdict(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.txt").write_text(bytes(text(4000)).decode())
    (tmp_path / "code.jsonl").write_text(json.dumps({"text": bytes(text(300, 1)).decode()}) + "\n")
    (tmp_path / "other.txt").write_text(bytes(text(9000, 2)).decode())
    sources = ("--text", f"chat={tmp_path}/chat.txt", "--text", f"code={tmp_path}/code.jsonl")
    done = run(
        "calibrate",
        directory,
        *sources,
        "--length",
        "128",
        "--samples",
        "3",
        "--sensitivity",
        "64",
        "--save",
        tmp_path / "a",
        "--statistics",
        tmp_path / "s.csv",
        "--json",
    )
    found, made = json.loads(done.stdout), artifact.load(tmp_path / "a")
    assert found["digest"] == made.digest and made.calibrated_position == 127 and made.report["mix"] == "chat 3, code 2"
    assert (
        set(found["sensitivity"]) == {"0", "1"} and sum(found["strata"].values()) == 4 and len(found["clip_curve"]) == 7
    )
    assert made.revision.startswith("fingerprint:")
    seen = list(csv.DictReader((tmp_path / "s.csv").open()))
    assert len(seen) == 2 * 2 * 2 and {"amax chat", "amax code", "p99.9", "scale"} <= set(seen[0])
    for row in seen:
        assert (
            float(row["amax"])
            == max(float(row["amax chat"]), float(row["amax code"]))
            >= float(row["p99.9"])
            > float(row["p50"])
        )
        assert float(row["scale"]) == pytest.approx(2 * float(row["amax"]) / 448)
    assert "not calibrated" not in run("artifact", "show", tmp_path / "a").output
    task = {"prompt": "abc", "checker": {"kind": "regex", "value": "."}, "max_tokens": 6, "stratum": "own"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task))
    common = (
        "--text",
        f"other={tmp_path}/other.txt",
        "--lengths",
        "256,600",
        "--twin",
        "0",
        "--tasks",
        tmp_path / "tasks.jsonl",
        "--no-answers",
    )
    options = ("--schemes", "bf16,one,tensor,token-head,kivi", "--without", "1", "--passages", "3", "--threads", "1")
    done = run(
        "evaluate", directory, "--artifact", tmp_path / "a", "--report", tmp_path / "r", *common, *options, "--json"
    )
    found = json.loads(done.stdout)
    names = {"artifact", "one", "tensor", "token-head", "kivi", "artifact, layer 1 native"}
    assert {one["scheme"] for one in found["verdicts"]} == names
    assert [one["topic"] for one in found["warnings"]] == ["calibrated length"], "calibrated on 128 tokens, used at 600"
    assert "calibrated on 128 tokens, used up to 600" in done.stderr
    said = (tmp_path / "r" / "report.md").read_text()
    assert (
        "**Warning: calibrated length.**" in said
        and "one (uncalibrated: scale 1.0)" in said
        and "KL 0-512" in said
        and "KL 512-600" in said
    )
    assert "| own | native | 1 of 1 |" in said and "| needles | artifact |" in said and "| copy | kivi |" in said
    rows = list(csv.DictReader((tmp_path / "r" / "comparison.csv").open()))
    assert {row["scheme"] for row in rows} == names | {"bf16"} and {row["sequences"] for row in rows} == {"2"}
    assert all(float(row["kl"]) >= -1e-6 and row["kl_half"] for row in rows)
    layer_rows = list(csv.DictReader((tmp_path / "r" / "layers.csv").open()))
    own = [row for row in layer_rows if row["scheme"] == "artifact, layer 1 native"]
    assert {row["layer"] for row in own} == {"0"} and all(0 < float(row["amax_over_limit"]) < 1 for row in own)
    plots = list((tmp_path / "r").glob("*.png"))
    assert len(plots) == (2 if importlib.util.find_spec("matplotlib") else 0)
    run("artifact", "verify", tmp_path / "a", directory, code=2)  # a checkpoint without scales of its own
    run(
        "calibrate",
        directory,
        *sources,
        "--length",
        "64",
        "--samples",
        "1",
        "--granularity",
        "tensor",
        "--save",
        tmp_path / "t",
    )
    options = (
        "--text",
        f"other={tmp_path}/other.txt",
        "--lengths",
        "64",
        "--twin",
        "0",
        "--passages",
        "0",
        "--no-answers",
        "--sequences",
        "1",
    )
    found = json.loads(
        run("evaluate", directory, "--artifact", tmp_path / "t", "--report", tmp_path / "rt", *options, "--json").stdout
    )
    assert {one["scheme"] for one in found["verdicts"]} == {"artifact", "one", "block-head", "token-head", "kivi"}, (
        "all that it can give"
    )


def test_scale_one_must_be_asked_for_and_is_labelled(directory: Path, tmp_path: Path) -> None:
    done = run("calibrate", directory, "--uncalibrated", "--granularity", "tensor", "--save", tmp_path / "one")
    assert "UNCALIBRATED" in done.stderr and artifact.load(tmp_path / "one").uncalibrated
    (tmp_path / "t.txt").write_text(bytes(text(2000)).decode())
    options = (
        "--text",
        f"t={tmp_path}/t.txt",
        "--lengths",
        "64",
        "--sequences",
        "1",
        "--twin",
        "0",
        "--passages",
        "0",
        "--no-answers",
        "--schemes",
        "bf16",
    )
    done = run("evaluate", directory, "--artifact", tmp_path / "one", "--report", tmp_path / "r", *options)
    assert "scale 1.0: every scale is 1.0: nothing was calibrated" in done.stderr
    assert "artifact (uncalibrated: scale 1.0)" in (tmp_path / "r" / "report.md").read_text()


def test_what_does_not_fit_is_refused(directory: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("calibrate", tmp_path / "nowhere", "--save", tmp_path / "x"), "neither a directory"),
        (
            ("calibrate", directory, "--rule", "median", "--length", "64", "--samples", "1", "--save", tmp_path / "x"),
            "rule is one of",
        ),
        (
            ("calibrate", directory, "--exclude", "9", "--length", "64", "--samples", "1", "--save", tmp_path / "x"),
            "excluded layer 9",
        ),
        (("calibrate", directory, "--device", "nowhere", "--save", tmp_path / "x"), "no device 'nowhere'"),
        (("calibrate", directory, "--dtype", "int8", "--save", tmp_path / "x"), "runs in bfloat16, float16, float32"),
        (("evaluate", directory, "--schemes", "best", "--report", tmp_path / "r"), "scheme 'best'"),
        (("evaluate", directory, "--lengths", "100000", "--report", tmp_path / "r"), "sees 4096 tokens"),
    ):
        assert message in run(*arguments, code=2).stderr
    assert not (tmp_path / "x").exists()
    run("calibrate", directory, "--length", "64", "--samples", "1", "--save", tmp_path / "a")
    stranger = replace(make(), revision="c" * 40)
    settings = evaluate.EvaluationSettings(schemes=("bf16",), lengths=(64,), factor=0, passages=0)
    with pytest.raises(Invalid, match="the artifact belongs to revision"):
        evaluate.run(stranger, settings, [], lambda length, number: [], artifact.load(tmp_path / "a"))


def test_an_empty_table_is_a_file_too(tmp_path: Path) -> None:
    made = evaluate.Evaluation(make(), {}, cells=[Cell("natural", "t", 512, [result("a", 0.01, sequences=1)])])
    files = report.write(made, tmp_path / "r")
    assert all(file.exists() for file in files) and (tmp_path / "r" / "answers.csv").read_text() == "nothing\n"
