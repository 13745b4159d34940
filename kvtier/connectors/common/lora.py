"""Which weights an adapter's name means. Reads an adapter's files whole when it first sees it. Not thread-safe."""

from __future__ import annotations

import logging
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvtier.errors import Invalid, KvtierError
from kvtier.format.fingerprint import fingerprint, resolve_revision
from kvtier.format.identity import canonical_json

MAX_ADAPTERS = 4096
log = logging.getLogger(__name__)


class Adapters:
    """Digests of adapters' weights as they were when this engine first saw them.

    Once an adapter's files change, or it is reloaded in place, nobody can tell which weights wrote what the engine
    holds under its name, for the engine goes on using what it has loaded: from then on its requests are not cached.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[Any, bytes | None]] = {}

    def digest(self, number: int, path: str, reloaded: bool) -> bytes | None:
        """32 bytes; None where the weights are not known for certain."""
        key, stamp = (number, path), _stamp(path)
        known = self._known.get(key)
        if known is None:
            try:
                known = (stamp, _digest(path))
            except (KvtierError, OSError) as error:
                log.warning("kvtier: requests of the adapter at %s are not cached: %s", path, error)
                known = (stamp, None)
        elif known[1] is not None and (known[0] != stamp or reloaded):
            said = "kvtier: the adapter at %s was changed while the engine runs: its requests are not cached any more"
            log.warning(said, path)
            known = (stamp, None)
        if key in self._known or len(self._known) < MAX_ADAPTERS:
            self._known[key] = known
            return known[1]
        return None


def _digest(path: str) -> bytes:
    """Over every byte of an adapter's weights and its configuration. Raises Invalid where they cannot be told."""
    root = Path(path)
    if not root.is_dir():  # a hub id
        return blake2b(canonical_json(resolve_revision(path)), digest_size=32).digest()
    try:
        said = (root / "adapter_config.json").read_text("utf-8")
    except (OSError, ValueError) as error:
        raise Invalid(f"{root}: {error}") from None
    return blake2b(canonical_json([fingerprint(root, full=True), said]), digest_size=32).digest()


def _stamp(path: str) -> Any:
    """What changes when an adapter's files do."""
    try:
        with os.scandir(path) as entries:
            found = ((entry.name, entry.stat()) for entry in entries)
            return sorted((name, st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino) for name, st in found)
    except OSError:
        return None
