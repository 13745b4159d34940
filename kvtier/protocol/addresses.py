"""The default sockets: where a daemon listens, and a client connects, when no setting says otherwise."""

from __future__ import annotations

import os
from pathlib import Path


def default_socket() -> Path:
    """/run/kvtier/kvtier.sock where that directory exists, else kvtier.sock in the user's runtime directory."""
    system = Path("/run/kvtier")
    if system.is_dir():
        return system / "kvtier.sock"
    return Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")) / "kvtier.sock"


def grpc_beside(path: str) -> str:
    """The gRPC socket beside `path`, for clients that cannot map the arena: kvtier.sock has kvtier.sock.grpc."""
    return f"{path}.grpc"
