"""Log lines of the daemon: one per state change, nothing per request, as key=value or as JSON on stderr.

A line is a constant event and fields: log.info("namespace dropped", extra=fields(tenant=..., blocks=...)). Fields
never hold a token, a salt, a key, a content hash or a session id; docs/operations.md lists every event. Text is
quoted, so that a hostile name cannot forge a line.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

FORMATS = ("text", "json")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:/@+%,[]")


def fields(**values: Any) -> dict[str, Any]:
    """What `extra` takes: named values of one line."""
    return {"fields": values}


class TextFormatter(logging.Formatter):
    """time=... level=... module=... event="..." key=value ..."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{name}={_quote(value)}" for name, value in _pairs(self, record).items())


class JsonFormatter(logging.Formatter):
    """The same as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_pairs(self, record), default=str)


def setup(form: str) -> None:
    """Sends the lines of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)


def _pairs(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    pairs: dict[str, Any] = {
        "time": f"{stamp}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "module": record.name.removeprefix("kvtier."),
        "event": record.getMessage(),
    }
    for name, value in getattr(record, "fields", {}).items():
        pairs[name] = value if isinstance(value, int | float | bool) or value is None else str(value)
    if record.exc_info:
        pairs["exception"] = formatter.formatException(record.exc_info)
    return pairs


def _quote(value: Any) -> str:
    text = str(value)
    return text if text and set(text) <= _PLAIN else json.dumps(text)
