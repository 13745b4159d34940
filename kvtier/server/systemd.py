"""Messages to systemd: READY, STOPPING, STATUS and WATCHDOG to its socket, if there is one.

Never raises, waits a second at most.
"""

from __future__ import annotations

import os
import socket


def notify(*lines: str) -> bool:
    """Sends lines such as "READY=1" to $NOTIFY_SOCKET. False where there is none."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(1.0)
            sock.sendto("\n".join(lines).encode(), "\0" + address[1:] if address[0] == "@" else address)
    except (OSError, ValueError):
        return False
    return True


def watchdog_seconds() -> float | None:
    """How often the service manager wants to hear WATCHDOG=1: half of what it allows. None: it does not ask."""
    micros = os.environ.get("WATCHDOG_USEC", "")
    for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(micros) / 2e6 if micros.isdigit() and int(micros) > 0 and for_us else None
