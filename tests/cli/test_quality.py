"""`kvtier calibrate` and `kvtier evaluate` from texts to a verdict, on a small random model."""

from __future__ import annotations

import csv
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from kvtier.cli.app import app, load_commands  # noqa: E402
from kvtier.errors import Invalid  # noqa: E402
from kvtier.format import artifact  # noqa: E402
from kvtier.quality import evaluate  # noqa: E402
from tests.quality.small_model import make, model, text  # noqa: E402

load_commands()


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
