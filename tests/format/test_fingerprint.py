"""Exact revisions: a branch becomes a commit, local files a fingerprint that follows their content (case KVB-08)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from kvtier.errors import Invalid
from kvtier.format import fingerprint as module
from kvtier.format.fingerprint import SAMPLE_BYTES, SAMPLES, fingerprint, hub_cache, resolve_revision
from kvtier.format.identity import check_revision
from kvtier.format.tensors import read_header

C1, C2 = "1" * 40, "2" * 40


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own for every test: no cache of the machine is read or written."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A local model: two files of weights, one of them above the size that is hashed whole, and static scales."""
    directory = tmp_path / "models" / "m"
    directory.mkdir(parents=True)
    generator = np.random.default_rng(1)
    large = {
        "model.layers.0.self_attn.k_scale": np.full(2, 0.5, np.float32),
        "model.layers.0.self_attn.q_proj.weight": generator.random((1024, 1024), np.float32),
    }
    safetensors.numpy.save_file(large, directory / "model-1.safetensors")
    safetensors.numpy.save_file({"w": generator.random(64, np.float32)}, directory / "model-2.safetensors")
    (directory / "config.json").write_text('{"rope_theta": 10000}')
    (directory / "model.safetensors.index.json").write_text("{}")
    (directory / "modeling.py").write_text("pass")
    (directory / "README.md").write_text("hello")
    age(directory)
    return directory


def age(directory: Path) -> None:
    """Waits until files just written are old enough to be cached."""
    newest = max(info.st_ctime_ns for info in (file.stat() for file in directory.rglob("*")))
    deadline = time.monotonic() + 30
    while time.time_ns() - newest <= module.SETTLED_NS:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def settle_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLED_NS", 20_000_000)


def poke(path: Path, offset: int, change: Callable[[int], int] = lambda byte: byte ^ 1) -> None:
    """Changes one byte in place; size and name stay."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([change(byte)]))


# --- hub ids


def hub(root: Path, branch: str = "main", commit: str = C1, name: str = "models--org--m") -> Path:
    folder = root / name
    (folder / "refs" / branch).parent.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / branch).write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
    return folder


def test_a_commit_or_fingerprint_stays_as_it_is() -> None:
    for revision in (C1, "a" * 64, "fingerprint:" + "0" * 64):
        assert resolve_revision("org/m", revision) == ("org/m", revision)


def test_a_branch_becomes_the_commit_it_points_to_and_follows_it(home: Path) -> None:
    root = home / ".cache/huggingface/hub"
    hub(root)
    assert resolve_revision("org/m") == resolve_revision("org/m", "main") == ("org/m", C1)
    hub(root, "refs/pr/7", C2)
    assert resolve_revision("org/m", "refs/pr/7") == ("org/m", C2)
    hub(root, "main", C2)
    assert resolve_revision("org/m") == ("org/m", C2), "main has moved"
    hub(root, name="models--gpt2")
    assert resolve_revision("gpt2") == ("gpt2", C1)


@pytest.mark.parametrize(
    ("variable", "below"),
    [("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_the_cache_is_looked_for_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, below: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    assert hub_cache() == tmp_path / "elsewhere" / below
    hub(tmp_path / "elsewhere" / below)
    assert resolve_revision("org/m") == ("org/m", C1)
    monkeypatch.setenv("HF_HUB_CACHE", "~/of-mine")
    assert hub_cache() == Path.home() / "of-mine"


@pytest.mark.parametrize("revision", [None, "main", "v1", C1[:7], C1.upper().replace("1", "A"), "fingerprint:12"])
def test_a_branch_nobody_knows_is_refused_with_advice(revision: str | None) -> None:
    with pytest.raises(Invalid, match=r"write the commit itself \(40 hex digits\)"):
        resolve_revision("org/m", revision)


def test_a_broken_cache_is_refused(home: Path) -> None:
    folder = hub(home / ".cache/huggingface/hub")
    for content in ("", "main", "g" * 40, C1[:-1], C1 * 2, "x" * 5000):
        (folder / "refs/main").write_text(content)
        with pytest.raises(Invalid, match=r"refs/main"):
            resolve_revision("org/m")
    (folder / "refs/main").write_text(C2)
    with pytest.raises(Invalid, match="whose files are not in"):
        resolve_revision("org/m")


@pytest.mark.parametrize(
    "branch", ["", "..", "../main", "a/../../main", "/etc/passwd", "a//b", "a\0b", "a\nb", "x" * 5000, "."]
)
def test_hostile_branches_are_refused(home: Path, branch: str) -> None:
    folder = hub(home / ".cache/huggingface/hub")
    (folder.parent / "main").write_text(C1)
    with pytest.raises(Invalid, match="revision must be a commit or the name of a branch"):
        resolve_revision("org/m", branch)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../x",
        "/etc/nothing-here",
        "a/../../x",
        "a\\..\\x",
        "a\0b",
        "x" * 5000,
        "a/b/c",
        "org/m\n",
        "org/",
        "./m",
        "a--b",
    ],
)
def test_hostile_model_names_are_refused(name: str) -> None:
    with pytest.raises(Invalid):
        resolve_revision(name, C1)


# --- directories inside the cache


def snapshot(root: Path, commit: str = C1) -> Path:
    """A model as the Hugging Face library lays it out: links into a folder of blobs."""
    folder = hub(root, commit=commit)
    (folder / "blobs").mkdir(exist_ok=True)
    for name, content in (("config.json", b"{}"), ("model.bin", b"weights")):
        (folder / "blobs" / f"{name}-{commit}").write_bytes(content)
        (folder / "snapshots" / commit / name).symlink_to(f"../../blobs/{name}-{commit}")
    return folder / "snapshots" / commit


def test_a_snapshot_is_its_hub_id_and_commit(tmp_path: Path) -> None:
    path = snapshot(tmp_path / "hub")
    assert resolve_revision(str(path)) == resolve_revision(str(path), C1) == ("org/m", C1)
    (tmp_path / "link").symlink_to(path)
    assert resolve_revision(str(tmp_path / "link")) == ("org/m", C1)
    with pytest.raises(Invalid, match=f"is {C1}, not revision '{C2}'"):
        resolve_revision(str(path), C2)


def test_a_snapshot_with_a_file_put_there_by_hand_is_a_directory_like_any_other(tmp_path: Path) -> None:
    path = snapshot(tmp_path / "hub")
    (path / "model.bin").unlink()
    (path / "model.bin").write_bytes(b"changed")
    name, revision = resolve_revision(str(path))
    assert name == C1 and revision == fingerprint(path)


# --- local directories


def test_a_fingerprint_is_a_revision_and_names_the_content_alone(model: Path, tmp_path: Path) -> None:
    name, revision = resolve_revision(str(model))
    check_revision(revision)
    assert name == "m" and revision.startswith("fingerprint:")
    shutil.copytree(model, tmp_path / "copy" / "other")
    assert fingerprint(tmp_path / "copy" / "other") == revision
    (model / "README.md").write_text("changed")
    (model / ".hidden").mkdir()
    (model / ".hidden" / "x.bin").write_text("x")
    assert fingerprint(model) == revision, "neither prose nor hidden files are the model"
    assert resolve_revision(str(model), revision) == ("m", revision)
    with pytest.raises(Invalid, match="leave the revision out"):
        resolve_revision(str(model), C1)


def test_weights_replaced_in_place_at_equal_size_are_another_revision(model: Path) -> None:
    """KVB-08: a directory without a revision whose file of weights is replaced in place."""
    before = fingerprint(model)
    path = model / "model-1.safetensors"
    size = path.stat().st_size
    other = {
        "model.layers.0.self_attn.k_scale": np.full(2, 0.5, np.float32),
        "model.layers.0.self_attn.q_proj.weight": np.random.default_rng(2).random((1024, 1024), np.float32),
    }
    safetensors.numpy.save_file(other, path)
    assert path.stat().st_size == size
    assert fingerprint(model) != before


def test_times_put_back_by_hand_do_not_hide_a_change(model: Path) -> None:
    before = fingerprint(model)
    path = model / "model-2.safetensors"
    info = path.stat()
    poke(path, info.st_size - 1)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert path.stat().st_mtime_ns == info.st_mtime_ns
    assert fingerprint(model) != before


@pytest.mark.parametrize("full", [False, True])
def test_every_covered_byte_counts(model: Path, full: bool) -> None:
    """One byte changed anywhere that is covered: header, scale tensors, both ends of every sample, configuration,
    index, code."""
    path = model / "model-1.safetensors"
    size = path.stat().st_size
    assert size > SAMPLES * SAMPLE_BYTES
    spans, _ = read_header(path)
    scale = spans["model.layers.0.self_attn.k_scale"]
    offsets = {scale.start, scale.start + scale.nbytes - 1}
    for i in range(SAMPLES):
        start = i * (size - SAMPLE_BYTES) // (SAMPLES - 1)
        offsets |= {start, start + SAMPLE_BYTES - 1}
    assert max(offsets) == size - 1
    offsets = {offset for offset in offsets if offset > 200}  # the header is below
    seen = {fingerprint(model, full=full)}
    for offset in sorted(offsets):
        poke(path, offset)
        seen.add(fingerprint(model, full=full))
        poke(path, offset)
    for name, offset in (
        ("model-2.safetensors", 100),
        ("config.json", 3),
        ("model.safetensors.index.json", 1),
        ("modeling.py", 0),
    ):
        raw = (model / name).read_bytes()
        poke(model / name, offset if name != "model-2.safetensors" else len(raw) - 5)
        seen.add(fingerprint(model, full=full))
        (model / name).write_bytes(raw)
    assert len(seen) == 1 + len(offsets) + 4
    assert fingerprint(model, full=full) in seen, "all changes undone"


def test_a_scale_between_two_samples_counts_and_a_weight_there_only_when_full(model: Path) -> None:
    path = model / "model-1.safetensors"
    tensors = {f"w{i}": np.zeros(2**18, np.float32) for i in range(4)} | {
        "model.layers.0.attention.prob_scale": np.ones(300, np.float32)
    }
    safetensors.numpy.save_file(tensors, path)
    size = path.stat().st_size
    covered = [range(start, start + nbytes) for start, nbytes in module._samples(size)]
    gap = covered[3].stop + 10
    assert gap < covered[4].start
    sampled, full = fingerprint(model), fingerprint(model, full=True)
    assert sampled != full
    poke(path, gap)
    assert fingerprint(model) == sampled, "what sampling can miss, as the docstring says"
    assert fingerprint(model, full=True) != full
    spans, _ = read_header(path)
    start = spans["model.layers.0.attention.prob_scale"].start + 4 * 150
    for offset in range(start, start + 4):
        before = fingerprint(model)
        poke(path, offset)
        assert fingerprint(model) != before


@pytest.mark.parametrize("change", ["add", "remove", "rename", "longer"])
def test_the_set_of_files_counts(model: Path, change: str) -> None:
    before = fingerprint(model)
    path = model / "model-2.safetensors"
    if change == "add":
        (model / "adapter.bin").write_bytes(b"x")
    elif change == "remove":
        path.unlink()
    elif change == "rename":
        path.rename(model / "model-3.safetensors")
    else:
        (model / "config.json").write_text('{"rope_theta": 10000 }')
    assert fingerprint(model) != before


@pytest.mark.parametrize("suffix", [".gguf", ".bin", ".pt", ".pth", ".GGUF"])
def test_other_weights_count_and_may_stand_alone(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(b"\x80\x04K\x01." + bytes(100))
    name, alone = resolve_revision(str(path))
    assert name == path.name
    poke(path, 50)
    assert fingerprint(path) != alone
    poke(path, 50)
    path.rename(tmp_path / f"other{suffix}")
    assert fingerprint(tmp_path / f"other{suffix}") == alone, "whatever it is called"


# --- what is refused


def test_what_cannot_be_fingerprinted_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "prose").mkdir()
    (tmp_path / "prose" / "notes.txt").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    for path in (tmp_path / "empty", tmp_path / "prose", tmp_path / "notes.txt"):
        with pytest.raises(Invalid, match=r"holds neither weights .* nor a config\.json"):
            resolve_revision(str(path))
    with pytest.raises(Invalid, match="neither a directory nor a regular file"):
        fingerprint(tmp_path / "absent")
    (model / "model-2.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(Invalid, match=r"model-2\.safetensors: not a safetensors file"):
        fingerprint(model)
    (model / "model-2.safetensors").unlink()
    (model / "model-2.safetensors").symlink_to("nowhere")
    with pytest.raises(Invalid, match=r"model-2\.safetensors: No such file"):
        fingerprint(model)
    (model / "model-2.safetensors").unlink()
    os.mkfifo(model / "model-2.safetensors")
    with pytest.raises(Invalid, match="not a regular file"):
        fingerprint(model)


def test_a_file_that_changes_while_it_is_read_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = module._update

    def slow(*arguments: Any) -> None:
        update(*arguments)
        poke(model / "model-2.safetensors", (model / "model-2.safetensors").stat().st_size - 1)

    monkeypatch.setattr(module, "_update", slow)
    with pytest.raises(Invalid, match="changed while it was read"):
        fingerprint(model)


# --- the cache of hashes


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    hash_file = module._hash_file

    def count(path: Path, full: bool) -> str:
        read.append(path.name)
        return hash_file(path, full)

    monkeypatch.setattr(module, "_hash_file", count)
    return read


def test_files_are_read_once_and_again_when_they_change(
    model: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    read = counting(monkeypatch)
    first = fingerprint(model)
    assert len(read) == 5
    assert fingerprint(model) == first and len(read) == 5
    os.utime(model / "config.json")
    age(model)
    assert fingerprint(model) == first and read[5:] == ["config.json"]
    fingerprint(model, full=True)
    assert len(read) == 11, "the two kinds do not answer for each other"
    cache = home / ".cache/kvtier/fingerprints.json"
    assert [p.name for p in cache.parent.iterdir()] == ["fingerprints.json"] and len(
        json.loads(cache.read_bytes())["1"]
    ) == 10


def test_a_file_just_written_is_not_cached(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLED_NS", 3600 * 10**9)
    read = counting(monkeypatch)
    fingerprint(model)
    fingerprint(model)
    assert len(read) == 10


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b'{"1": 5}',
        b'{"1": {"x": [1,2,3,4,5], "y": 1}}',
        b"x" * (8 * 2**20 + 1),
    ],
)
def test_a_corrupt_cache_is_ignored_and_mended(
    model: Path, monkeypatch: pytest.MonkeyPatch, home: Path, damage: bytes
) -> None:
    right = fingerprint(model)
    cache = home / ".cache/kvtier/fingerprints.json"
    cache.write_bytes(damage)
    read = counting(monkeypatch)
    assert fingerprint(model) == right and len(read) == 5
    assert len(json.loads(cache.read_bytes())["1"]) == 5


def test_a_cache_that_cannot_be_written_costs_time_only(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = fingerprint(model)
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert fingerprint(model) == right
    (tmp_path / "directory/kvtier/fingerprints.json").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "directory"))
    assert fingerprint(model) == right
    assert [p.name for p in (tmp_path / "directory/kvtier").iterdir()] == ["fingerprints.json"]


def test_the_cache_is_bounded(model: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(module, "MAX_CACHED", 3)
    fingerprint(model)
    assert len(json.loads((home / ".cache/kvtier/fingerprints.json").read_bytes())["1"]) == 3


def test_another_process_agrees(model: Path) -> None:
    program = (
        "import sys; from kvtier.format.fingerprint import resolve_revision; print(resolve_revision(sys.argv[1])[1])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "random", "XDG_CACHE_HOME": str(model.parent / "other-cache")}
    found = subprocess.run(
        [sys.executable, "-c", program, str(model)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.strip() == fingerprint(model)
