"""The digest of an artifact is part of every namespace made with it, for ever: golden values, in fresh interpreters of
every Python found here.

A second writing needs the standard library only, so that Pythons without numpy can say the same.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvtier.format.artifact import Artifact, PartFormat, load
from kvtier.format.identity import pack_scales
from tests.support.paths import ROOT

GOLDEN_SCALES = "9cf574a05565840db00c845e2d6fbec249049ed4767d54be87af622526ad84c5"
GOLDEN_DIGEST = "0c54706edf1723b64a827db429944cd5b36e4e50a7c6b5e6bbe06f253a0c0384"

SECOND_WRITING = """
import hashlib, json, struct, sys
manifest, scales = json.load(open(sys.argv[1])), json.load(open(sys.argv[2]))
def canonical(data):
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
packed = {name: "".join(struct.pack(">f", value).hex() for value in values) for name, values in scales.items()}
manifest["scales"] = hashlib.blake2b(canonical(packed), digest_size=32, person=b"kvtier.scales.1").hexdigest()
print(manifest["scales"], hashlib.blake2b(canonical(manifest), digest_size=32, person=b"kvtier.art.1").hexdigest())
"""
OURS = "import sys; from kvtier.format.artifact import load; a = load(sys.argv[1]); print(a.scales_digest, a.digest)"


def golden() -> Artifact:
    """Every field away from its default; scales whose bits differ in every byte, a subnormal among them; text that is
    not ASCII."""
    scales = {
        (layer, part): np.array([0.0173 * (layer + 1), 1e-40 if part == "v" else 3.25, 447.9], np.float32)
        for layer in (0, 2, 11)
        for part in "kv"
    }
    return Artifact(
        "org/modèl",
        "fingerprint:" + "7" * 64,
        {"k": PartFormat("e4m3fn", "head"), "v": PartFormat("e4m3fn", "head")},
        "percentile",
        1,
        "plain",
        "mix:" + "5" * 64,
        scales,
        (1, 3),
        4095,
        {"kl": "0.0144", "samples": 32, "mix": "chat 3, コード 5"},
    )


def interpreters() -> list[str]:
    """Every supported Python that starts on this machine."""
    found = [
        sys.executable,
        *(path for name in ("python3.11", "python3.12", "python3.13") if (path := shutil.which(name))),
    ]
    return [
        path
        for path in found
        if subprocess.run([path, "-c", ""], capture_output=True, timeout=60, check=False).returncode == 0
    ]


def test_golden_digests_in_fresh_interpreters(tmp_path: Path) -> None:
    one = golden()
    assert (one.scales_digest, one.digest) == (GOLDEN_SCALES, GOLDEN_DIGEST)
    one.save(tmp_path / "artifact")
    assert load(tmp_path / "artifact") == one
    for name, data in (
        ("manifest.json", one.to_json()),
        ("scales.json", {f"{i}.{p}": v.tolist() for (i, p), v in one.scales.items()}),
    ):
        (tmp_path / name).write_text(json.dumps(data), "utf-8")
    assert len(pack_scales(one.scales)) == 6
    said = set()
    for number, python in enumerate(interpreters() * 2):
        environment = {**os.environ, "PYTHONHASHSEED": ("0", "1", "random")[number % 3]}
        command = [python, "-S", "-c", SECOND_WRITING, str(tmp_path / "manifest.json"), str(tmp_path / "scales.json")]
        said.add(
            subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
        )
        ours = [sys.executable, "-c", OURS, str(tmp_path / "artifact")]
        said.add(
            subprocess.run(
                ours, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
            ).stdout
        )
    assert said == {f"{GOLDEN_SCALES} {GOLDEN_DIGEST}\n"}
