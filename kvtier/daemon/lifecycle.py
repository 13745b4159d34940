"""One life of the daemon: build the floors from the bottom, serve, take them down again.

Ready after the first step of the arena is backed by memory; the rest follows in the background. SIGTERM: no new sockets, calls under way finish.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading

from kvtier.arena import POPULATE_STEP, Arena
from kvtier.daemon.config import Config
from kvtier.errors import Full
from kvtier.lane import Lane
from kvtier.service import Service
from kvtier.session import ADMIN, WRITE, Peer, Sessions
from kvtier.store import Store

SWITCH_INTERVAL = 0.0005  # seconds; with the default 5 ms a client's long lookup delays the others tenfold
log = logging.getLogger(__name__)


def local_peer(uid: int, gid: int, pid: int) -> Peer:
    """Unix peers are tenant `local`; root and the daemon's own user are admin, others may write."""
    return Peer("local", ADMIN if uid in (0, os.geteuid()) else WRITE, uid, pid)


class Daemon:
    """Everything that serves. `start` may raise Invalid, Unavailable (socket taken) or Full (memory); `stop` is idempotent."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._stop = threading.Event()
        self._populator: threading.Thread | None = None

    def start(self) -> None:
        """Returns when calls are accepted."""
        sys.setswitchinterval(SWITCH_INTERVAL)
        self.arena = Arena(self.config.arena_bytes)
        self.store = Store(self.arena, poison=self.config.poison)
        self.sessions = Sessions(self.store)
        self.service = Service(self.store, self.sessions)
        self.lane = Lane(self.config.socket, self.service, local_peer, self.config.mode)
        self.arena.populate(self._stop, limit=POPULATE_STEP)
        gc.collect()
        gc.freeze()  # what lives as long as the daemon is never walked again
        self.lane.start()
        self._populator = threading.Thread(target=self._populate, name="populate", daemon=True)
        self._populator.start()

    def stop(self) -> None:
        """Ends all threads and gives the memory back; clients that are attached keep their mappings until they notice."""
        self._stop.set()
        self.lane.close()
        if self._populator is not None:
            self._populator.join(10)
        self.sessions.close()

    def _populate(self) -> None:
        try:
            self.arena.populate(self._stop)
        except Full as error:
            log.error("the arena is not fully backed by memory; later puts may be slow or fail: %s", error)
