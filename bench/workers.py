"""Processes that do what they are told by a line of JSON and answer by one: contestants of `versus`, clients of
`scaling`, engines of `trace`.

Each may run in an environment of its own, so this file needs the standard library only. A worker's stdout is a private
pipe: whatever its libraries print goes to stderr, which is kept in a file and shown when the worker fails. Every wait
has a deadline; a worker ends with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
Handlers = Mapping[str, Callable[..., Any]]

_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """For the moment between fork and exec."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Failed(RuntimeError):
    """`worker` failed, ended or did not answer in time; the message has the end of what it wrote."""

    def __init__(self, worker: Worker, message: str) -> None:
        super().__init__(f"{' '.join(worker.arguments[1:])}: {message}")
        self.worker = worker


class Worker:
    """One process. A context manager: leaving it ends the process. `ready` is what it said of itself. Not
    thread-safe."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        deadline: float = 120.0,
    ) -> None:
        self.arguments, self.deadline = [python, *arguments], deadline
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
        self.ready: dict[str, Any] = {}
        self._heard = b""

    def __enter__(self) -> Self:
        self._said = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            self.arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            cwd=ROOT,
            env=self.environment,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        try:
            self.ready = self.answer(self.deadline)
        except BaseException:
            self.stop()
            raise
        return self

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, what: str, /, **arguments: Any) -> None:
        """Sends a command; `answer` takes what comes of it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([what, arguments]).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Failed(self, f"is gone ({error}): {self._end()}") from None

    def answer(self, deadline: float = 60.0) -> Any:
        """What came of the last command. Raises Failed."""
        assert self.process.stdout is not None
        end = time.monotonic() + deadline
        while b"\n" not in self._heard:
            if not select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise Failed(self, f"did not answer within {deadline:.0f} s: {self._end()}")
            some = os.read(self.process.stdout.fileno(), 1 << 20)
            if not some:
                raise Failed(self, f"ended with {self.process.wait(10)}: {self._end()}")
            self._heard += some
        line, self._heard = self._heard.split(b"\n", 1)
        said = json.loads(line)
        if "error" in said:
            raise Failed(self, f"{self._end()}{said['error']}")
        return said["answer"]

    def ask(self, what: str, /, deadline: float = 60.0, **arguments: Any) -> Any:
        """`tell` and `answer`."""
        self.tell(what, **arguments)
        return self.answer(deadline)

    def stop(self) -> None:
        """Closes its input, which ends it; SIGTERM and SIGKILL for what has not ended in 10 s."""
        process = self.process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        for act in (lambda: None, process.terminate, process.kill):
            act()
            try:
                process.wait(10)
                break
            except subprocess.TimeoutExpired:
                continue
        if process.stdout is not None:
            process.stdout.close()
        self._said.close()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _end(self) -> str:
        """The end of what it wrote to stderr."""
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - 1500))
        return self._said.read().decode(errors="replace")


def serve(make: Callable[[], contextlib.AbstractContextManager[tuple[Handlers, dict[str, Any]]]]) -> None:
    """A worker's main: `make` yields (what each verb does, what the worker says of itself). Returns when its input ends
    or on SIGTERM."""
    out = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def say(**what: Any) -> None:
        out.write(json.dumps(what).encode() + b"\n")

    try:
        with make() as (handlers, about):
            say(answer=about)
            for line in sys.stdin.buffer:
                verb, arguments = json.loads(line)
                try:
                    say(answer=handlers[verb](**arguments))
                except Exception:
                    say(error=traceback.format_exc(limit=-4))
    except Exception:
        say(error=traceback.format_exc(limit=-4))
        raise SystemExit(1) from None
