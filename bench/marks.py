"""What the figures of `planes` should be. Decided before they were measured, and never changed to fit a machine."""

from __future__ import annotations

MARKS: dict[str, tuple[str, float]] = {
    "put 256 KiB": (">=", 0.65),
    "get 256 KiB": (">=", 0.70),
    "put 1024 KiB": (">=", 0.80),
    "get 1024 KiB": (">=", 0.80),
    "put 4096 KiB": (">=", 0.90),
    "get 4096 KiB": (">=", 0.90),
    "zero-copy p50": ("<=", 5.0),
    "batches share": (">=", 0.15),
    "batches a second": (">=", 2000),
    "million lookup p99 ms": ("<=", 5.0),
    "million zero-copy p99": ("<=", 2.0),
    "million bytes a block": ("<=", 300),
    "million worst call ms": ("<=", 50),
    "beside p99 ms": ("<=", 5.0),
    "killed s": ("<=", 1.0),
}
