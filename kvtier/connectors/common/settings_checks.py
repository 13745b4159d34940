"""What the settings of every connector have in common. Each check raises Invalid, naming the setting. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvtier.errors import Invalid
from kvtier.protocol.addresses import default_socket


def check_names(where: str, said: Iterable[Any], known: Iterable[str]) -> None:
    """Refuses settings that do not exist."""
    if unknown := sorted(map(str, set(said) - set(known))):
        raise Invalid(f"{where} has no setting {', '.join(unknown)[:200]}; there are {', '.join(known)}")


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Refuses what is not one of the words allowed."""
    if value not in allowed:
        raise Invalid(f"{name} is one of {', '.join(allowed)}, not {value!r:.80}")


def socket_of(said: Mapping[str, Any]) -> str:
    """The path of the daemon's socket; where `kvtier-server` listens if nothing is said."""
    socket = said.get("socket", str(default_socket()))
    if not isinstance(socket, str) or not socket:
        raise Invalid(f"socket is a path, not {socket!r:.80}")
    return socket
