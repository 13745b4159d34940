"""The ahead-of-time check sees a planted fault of each class, and finds none where none was planted. The whole table:
`make aot`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CHECK = ROOT / "kernels" / "tools" / "aot_check.py"


def check(path: Path, only: str, fault: str, target: str = "sm_90") -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        str(CHECK),
        "--targets",
        target,
        "--only",
        only,
        "--json",
        str(path),
        *(["--fault", fault] if fault else []),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert path.exists(), done.stderr[-2000:]
    results = json.loads(path.read_text())
    assert len(results) == 1, "one entry is meant"
    assert done.returncode == (1 if results[0]["failures"] else 0)
    failures: list[str] = results[0]["failures"]
    return failures


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "only", "seen"),
    [
        ("", "decode[D64,mixed,block-head,page 16]", ""),
        ("byte-loads", "decode[D64,mixed,block-head,page 16]", "global loads of bytes"),
        ("no-mma", "decode[D128,fp8,head,page 16]", "no HMMA"),
        ("compile", "decode[D64,mixed,block-head,page 16]", "CompilationError"),
        ("spill", "prefill[D128,mixed,block-head,page 16]", "spills"),
        ("shared", "prefill[D128,mixed,block-head,page 16]", "bytes of shared memory"),
        ("narrow", "restore[D64,block-head,16]", "no 16-byte access"),
        ("cast", "quantize[D64,block-head,16]", "goes through fp16"),
    ],
)
def test_a_planted_fault_is_seen(tmp_path: Path, fault: str, only: str, seen: str) -> None:
    failures = check(tmp_path / "found.json", only, fault, "sm_89" if fault in ("shared", "cast") else "sm_90")
    assert failures == [] if not fault else any(seen in failure for failure in failures), failures
