"""How much one call may ask for, and how long it may take when its caller says nothing."""

from __future__ import annotations

MAX_KEYS = 16_384  # of one call
KEYS_PER_CALL = (
    1024  # longer lists are split by clients: a longer call would hold the daemon's interpreter against other clients
)
MAX_RUNS = 256  # of one lookup
MAX_WAIT_MS = 600_000  # of a flush
CHUNK = (
    2 << 20
)  # bytes of a piece of a block where blocks are copied: gRPC streams are at their best above 1 MiB, and its default limit is 4

LOOKUP, CONTROL, BULK = (
    0.05,
    0.25,
    5.0,
)  # default deadlines, seconds: lookup; reserve, seal, lease, release, prefetch; put and get
