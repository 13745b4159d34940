"""Deadlines and limits of a call, which both ends share: how long it may take, how much it may ask for.

A deadline is what the client gives a call when its caller says nothing; the server's own limits of time end calls that
no deadline ends. Limits of one end alone stand with it: sockets in server/unix.py, calls under way in server/grpc.py,
settings in server/settings.py.
"""

from __future__ import annotations

# Default deadlines, seconds. They travel with a call as its deadline.
LOOKUP_DEADLINE = 0.05
CONTROL_DEADLINE = 0.25  # reserve, seal, lease, release, prefetch
TRANSFER_DEADLINE = 5.0  # put and get, with their bytes
HELLO_DEADLINE = 1.0  # opening a session

# What the server allows at most, seconds.
PATIENCE = (
    2.0  # until it is known who calls; also for the rest of a frame that has begun, and for a client to take its answer
)
STALL = 10.0  # a gRPC call may wait so long for its client to send or take something
LONGEST = 600.0  # any gRPC call
MAX_WAIT_MS = 600_000  # a flush

# How much one call may ask for.
MAX_KEYS = 16_384
KEYS_PER_CALL = (
    1024  # clients split longer lists: a longer call would hold the daemon's interpreter against other clients
)
MAX_RUNS = 256  # of one lookup
# Bytes of a piece of a block where blocks are copied: gRPC streams are at their best above 1 MiB, and its default
# limit is 4.
CHUNK = 2 << 20

# What one session may have.
MAX_OPEN = 4096  # reservations and leases
MAX_DRAINED = 16  # earlier sessions that one hello names
SESSION_ID = 16  # bytes of a session's id
