"""The exact revision of a model: a branch becomes the commit it points to, local files become a fingerprint of their
content.

Stored KV outlives the process, so a name that can mean other weights tomorrow ("main", a directory) must never reach a
key: a revision leaves here as a commit or as a fingerprint, or the call is refused. Asks no network. Reads files, so it
may block for seconds on a cold disk: one caller per engine, once. Call it after the engine has loaded its weights,
since loading may move a branch.

What the fingerprint of a local model covers: names and sizes of all weight files; whole, their safetensors headers and
every scale tensor of the attention; of each weight file 16 fixed samples of 64 KiB (the whole file up to 1 MiB); whole,
the configuration, index files and Python code beside them. What it can miss: a change of weights alone that keeps the
size and lies between the samples, as an edit of single values by hand does (new training, merging or quantizing changes
nearly every byte). `full=True` reads everything and misses nothing; the two kinds are different fingerprints, so choose
one for all engines that share KV. Per file the result is kept by path, size, times and inode number: a change in place
that keeps all of these, the change time included, takes a privileged hand or a wrong clock.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from kvtier.errors import Invalid
from kvtier.format.files import open_file, read_file
from kvtier.format.identity import check_revision, check_text
from kvtier.format.scale_names import is_scale
from kvtier.format.tensors import read_header

SAMPLES = 16
SAMPLE_BYTES = 64 * 1024
WEIGHTS = frozenset((".safetensors", ".gguf", ".bin", ".pt", ".pth"))
CONFIGS = frozenset(("config.json", "params.json", "hf_quant_config.json", "quantize_config.json"))
MAX_FILES = 10_000
MAX_CONFIG_BYTES = 64 * 2**20
MAX_CACHE_BYTES = 8 * 2**20
MAX_CACHED = 4096
SETTLED_NS = 2 * 10**9  # a file younger than this may change again within one tick of its clock: not cached

_PERSON_FILE = b"kvtier.file.1"
_PERSON_MODEL = b"kvtier.print.1"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HEX64 = re.compile(r"[0-9a-f]{64}")


def resolve_revision(model: str, revision: str | None = None, *, full: bool = False) -> tuple[str, str]:
    """(model, revision) as a description wants them. `model` is a hub id ("org/name") or the path of a local directory
    or weight file.

    A hub id keeps a revision that is a commit; a branch (None: "main") becomes the commit that the local Hugging Face
    cache has for it. A directory inside that cache is its hub id and commit. Any other local path is its base name and
    its fingerprint (`full`: of all bytes). Raises Invalid where no exact revision can be told, saying what to write.
    """
    if not isinstance(model, str) or not model or "\0" in model:
        raise Invalid(f"model must be a hub id or a path, not {model!r:.80}")
    if os.path.exists(model):
        return _resolve_path(Path(model), revision, full)
    if not _HUB_ID.fullmatch(model) or ".." in model or "--" in model:
        raise Invalid(f"{model!r:.200} is neither an existing path nor a hub id (org/name)")
    check_text("model", model)
    if revision is not None:
        try:
            check_revision(revision)
        except Invalid:
            pass  # a branch
        else:
            return model, revision
    return model, _resolve_branch(model, "main" if revision is None else revision)


def fingerprint(path: str | os.PathLike[str], *, full: bool = False) -> str:
    """ "fingerprint:" and 64 hex digits of the content of a model's directory or of one weight file. Two directories of
    equal content agree, whatever they are called. Raises Invalid if there is nothing to go by, a file is malformed, or
    one changes meanwhile. Keeps a cache on disk.
    """
    root = Path(path).resolve()
    files = {root.name: root} if root.is_file() else _model_files(root)
    if not any(_is_weights(file) or file.name in CONFIGS for file in files.values()):
        raise Invalid(f"{root} holds neither weights ({', '.join(sorted(WEIGHTS))}) nor a config.json")
    cache = _KnownDigests(full)
    total = blake2b(b"full" if full else b"sampled", digest_size=32, person=_PERSON_MODEL)
    for name in sorted(files):
        # A lone file has the name of its kind only: it may be called anything.
        label = os.fsencode(files[name].suffix if files[name] == root else name)
        total.update(len(label).to_bytes(8, "little") + label + bytes.fromhex(cache.get(files[name])))
    cache.save()
    return f"fingerprint:{total.hexdigest()}"


def hub_cache() -> Path:
    """Where the Hugging Face cache lies, by the environment variables that its own library obeys. It need not exist."""
    whole = (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""))
    for name, below in (*whole, ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")):
        if value := os.environ.get(name):
            return Path(os.path.expandvars(value)).expanduser() / below
    return Path("~/.cache/huggingface/hub").expanduser()


def _resolve_branch(model: str, branch: str) -> str:
    """The commit that the local cache has for a branch or tag of a hub model."""
    path = all(part not in ("", ".", "..") for part in branch.split("/"))
    if len(branch) > 255 or not branch.isprintable() or not path:
        raise Invalid(f"revision must be a commit or the name of a branch, not {branch!r:.200}")
    advice = "write the commit itself (40 hex digits), or load the model once so that the cache knows it"
    folder = hub_cache() / f"models--{model.replace('/', '--')}"
    ref = folder / "refs" / branch
    if not ref.is_file():
        unsaid = f"{folder} does not say which commit it means: {advice}"
        raise Invalid(f"revision {branch!r} of {model} is a name that may move, and {unsaid}")
    commit = read_file(ref, 1024).decode("ascii", "replace").strip()
    if not _COMMIT.fullmatch(commit):
        raise Invalid(f"{ref} holds no commit but {commit!r:.80}: {advice}")
    if not (folder / "snapshots" / commit).is_dir():
        raise Invalid(f"revision {branch!r} of {model} points to {commit}, whose files are not in {folder}: {advice}")
    return commit


def _resolve_path(path: Path, revision: str | None, full: bool) -> tuple[str, str]:
    name, found = _hub_snapshot(path) or (path.resolve().name, "")
    check_text("model (the name of the directory)", name)
    if not found:
        found = fingerprint(path, full=full)
    if revision is not None and revision != found:
        advice = "local files are named by their content, leave the revision out"
        raise Invalid(f"{path} is {found}, not revision {revision!r:.200}: {advice}")
    return name, found


def _hub_snapshot(path: Path) -> tuple[str, str] | None:
    """(hub id, commit) of a snapshot in a Hugging Face cache whose files are all links to blobs, which are named by
    their content. A file put there by hand makes it a directory like any other. The blobs themselves are not read."""
    root = path.resolve()
    model = root.parent.parent
    placed = root.parent.name == "snapshots" and model.name.startswith("models--")
    if not placed or not _COMMIT.fullmatch(root.name) or not root.is_dir():
        return None
    blobs = model / "blobs"
    files = _model_files(root)
    if not files or any(not file.is_symlink() or file.resolve().parent != blobs for file in files.values()):
        return None
    return model.name.removeprefix("models--").replace("--", "/"), root.name


def _model_files(root: Path) -> dict[str, Path]:
    """Files under `root` that a fingerprint covers, by path in it. No hidden names; linked directories not followed."""
    if not root.is_dir():
        raise Invalid(f"{root}: neither a directory nor a regular file")
    found: dict[str, Path] = {}
    for directory, below, names in os.walk(root, onerror=_refuse):
        below[:] = [name for name in below if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            file = Path(directory, name)
            kept = _is_weights(file) or name in CONFIGS or name.endswith((".index.json", ".py"))
            if kept and not name.startswith("."):
                found[str(file.relative_to(root))] = file
                if len(found) > MAX_FILES:
                    many = f"more than {MAX_FILES} files of weights and configuration"
                    raise Invalid(f"{root} has {many}: is it a model?")
    return found


def _refuse(error: OSError) -> None:
    raise Invalid(f"{error.filename}: {error.strerror}")


def _is_weights(file: Path) -> bool:
    return file.suffix.lower() in WEIGHTS


def _hash_file(path: Path, full: bool) -> str:
    """64 hex digits over one file: all of it, or what the module's docstring says."""
    with open_file(path) as file:
        before = os.fstat(file.fileno())
        hasher = blake2b(before.st_size.to_bytes(8, "little"), digest_size=32, person=_PERSON_FILE)
        if path.suffix.lower() == ".safetensors":
            spans, head = read_header(path)
            scales = [spans[name] for name in sorted(spans) if is_scale(name)]
            pieces = [(0, len(head)), *((span.start, span.nbytes) for span in scales), *_samples(before.st_size)]
        elif _is_weights(path):
            pieces = list(_samples(before.st_size))
        elif before.st_size > MAX_CONFIG_BYTES:
            raise Invalid(f"{path}: a file of configuration has at most {MAX_CONFIG_BYTES} bytes")
        else:
            pieces = [(0, before.st_size)]
        for start, nbytes in [(0, before.st_size)] if full else pieces:
            _update(hasher.update, file, start, nbytes)
        if _stamp(os.fstat(file.fileno())) != _stamp(before) or _stamp(os.stat(path)) != _stamp(before):
            raise Invalid(f"{path} changed while it was read: try again when it is complete")
    return hasher.hexdigest()


def _samples(size: int) -> Iterator[tuple[int, int]]:
    """(start, bytes) of the fixed samples of a file of weights: evenly spread, the first and last bytes among them; all
    of a small file."""
    if size <= SAMPLES * SAMPLE_BYTES:
        yield 0, size
        return
    for i in range(SAMPLES):
        yield i * (size - SAMPLE_BYTES) // (SAMPLES - 1), SAMPLE_BYTES


def _update(update: Callable[[bytes], None], file: BinaryIO, start: int, nbytes: int) -> None:
    """Feeds these bytes of the file, with their place, so that no two lists of pieces look the same."""
    update(start.to_bytes(8, "little") + nbytes.to_bytes(8, "little"))
    file.seek(start)
    while nbytes:
        piece = file.read(min(nbytes, 1 << 22))
        if not piece:
            raise Invalid(f"{file.name} became shorter while it was read")
        update(piece)
        nbytes -= len(piece)


def _stamp(info: os.stat_result) -> list[int]:
    return [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]


class _KnownDigests:
    """Hashes of files by path and stamp, in one JSON file. It only saves time: missing, corrupt or unwritable, files
    are read anew.

    Two processes that save at once may lose each other's entries, never mix them.
    """

    def __init__(self, full: bool) -> None:
        self._kind = "full" if full else "sampled"
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        self._path = Path(base).expanduser() / "kvtier" / "fingerprints.json"
        self._changed = False
        try:
            data = json.loads(read_file(self._path, MAX_CACHE_BYTES))
            self._entries = {str(key): entry for key, entry in data["1"].items() if _is_entry(entry)}
        except (Invalid, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._entries = {}

    def get(self, path: Path) -> str:
        """The hash of a file, from the cache if nothing about the file has changed."""
        real = os.path.realpath(path)
        key = f"{self._kind}:{real}"
        try:
            stamp = _stamp(os.stat(real))
        except OSError as error:
            raise Invalid(f"{path}: {error.strerror}") from None
        entry = self._entries.get(key)
        if entry and entry[:-1] == stamp:
            return str(entry[-1])
        digest = _hash_file(path, self._kind == "full")
        if time.time_ns() - max(stamp[1], stamp[2]) > SETTLED_NS:
            self._entries.pop(key, None)
            self._entries[key] = [*stamp, digest]
            self._changed = True
        return digest

    def save(self) -> None:
        """Writes the newest MAX_CACHED entries aside and renames them into place. Raises nothing where that fails."""
        if not self._changed:
            return
        newest = dict(list(self._entries.items())[-MAX_CACHED:])
        aside = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                aside.write_text(json.dumps({"1": newest}), "ascii")
                os.replace(aside, self._path)
            finally:
                aside.unlink(missing_ok=True)
        except OSError:
            pass  # a read-only home: the next call reads the files again


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 5 or not all(type(number) is int for number in entry[:-1]):
        return False
    return isinstance(entry[-1], str) and _HEX64.fullmatch(entry[-1]) is not None
