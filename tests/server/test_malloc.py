"""mallopt's settings: applied in a process of their own, and absent where the C library has none."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from kvtier.server import malloc


def test_a_large_buffer_is_no_mapping_of_its_own_afterwards() -> None:
    program = (
        "import ctypes; from kvtier.server import malloc; libc = ctypes.CDLL(None)\n"
        "if not hasattr(libc, 'mallopt'): raise SystemExit(0)\n"
        "malloc.tune(); libc.malloc.restype = ctypes.c_void_p; libc.sbrk.restype = ctypes.c_void_p\n"
        "first = libc.malloc(8 << 20); end = libc.sbrk(0)\n"
        "assert first and end - (64 << 20) < first < end, 'it lies in the heap'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_without_mallopt_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    malloc.tune()
