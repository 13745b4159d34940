"""What can go wrong, named by what the caller can do about it. A closed list with one table to wire codes and back.

retry later    Full (the service is out of room), Unavailable (nobody answers), Deadline (no answer in time)
fix the call   Invalid (malformed or over a limit), Denied (not allowed; Unauthenticated: not known), NotFound (a name
               nobody knows)
attach again   Stale (a handle, id or mapping from before a restart of the daemon)
treat as lost  Lost (the bytes are gone or failed their check; the caller sees a miss)

Reads and writes of the client library raise only Invalid; everything else becomes "less, with a reason".
"""

from __future__ import annotations


class KvtierError(Exception):
    """Root of all errors of this package. `code` is the number on the wire, unique to the class."""

    code = 1


class Invalid(KvtierError):
    """The call is malformed, inconsistent or over a limit. Sending it again cannot help."""

    code = 2


class Denied(KvtierError):
    """The caller's role or identity does not allow this."""

    code = 3


class Unauthenticated(Denied):
    """The two ends do not know each other: a missing or wrong token, a certificate that is refused. The message says
    which.
    """

    code = 10


class NotFound(KvtierError):
    """A named thing (namespace, id) that the service does not have."""

    code = 4


class Full(KvtierError):
    """No room within the capacity or the caller's cap. The message says which. Retry later."""

    code = 5


class Unavailable(KvtierError):
    """The service does not answer: absent, stopping, or the connection broke."""

    code = 6


class Deadline(KvtierError):
    """No answer within the call's deadline. Whether the call took effect is unknown; ids make repeating it safe."""

    code = 7


class Stale(KvtierError):
    """A handle, id or mapping from another life of the daemon. Attach and register again."""

    code = 8


class Lost(KvtierError):
    """The bytes failed a check, or were changed where only the daemon may write. The block is dropped."""

    code = 9


_ALL = (KvtierError, Invalid, Denied, NotFound, Full, Unavailable, Deadline, Stale, Lost, Unauthenticated)
BY_CODE: dict[int, type[KvtierError]] = {cls.code: cls for cls in _ALL}


def from_code(code: int, message: str) -> KvtierError:
    """The error a wire code stands for. An unknown code (a newer peer) becomes the root class."""
    return BY_CODE.get(code, KvtierError)(message)
