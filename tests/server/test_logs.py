"""Log lines: key=value or JSON, one line each, and nothing that a caller sends can forge one."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from kvtier.server.logs import JsonFormatter, TextFormatter, fields


def record(event: str, **values: Any) -> logging.LogRecord:
    made = logging.LogRecord("kvtier.server.unix", logging.WARNING, "", 0, event, (), None)
    made.created, made.msecs = 1.25, 250.0
    made.__dict__.update(fields(**values))
    return made


def test_a_line_is_key_value_or_json() -> None:
    said = record("namespace dropped", tenant="a b", blocks=3, path=Path("/x"), hostile='"\n level=error event=forged')
    text = TextFormatter().format(said)
    assert text.startswith(
        "time=1970-01-01T00:00:01.250Z level=warning module=server.unix "
        'event="namespace dropped" tenant="a b" blocks=3 path=/x'
    )
    assert "\n" not in text and 'hostile="\\"\\n level=error' in text, (
        "what a caller sends cannot begin a line or a field"
    )
    parsed = json.loads(JsonFormatter().format(said))
    assert (
        parsed["blocks"] == 3
        and parsed["tenant"] == "a b"
        and parsed["path"] == "/x"
        and parsed["event"] == "namespace dropped"
    )


def test_an_exception_stays_on_its_line() -> None:
    try:
        raise ValueError("broken\nline")
    except ValueError:
        said = record("verb failed")
        said.exc_info = sys.exc_info()
    assert "\n" not in TextFormatter().format(said) and "ValueError" in TextFormatter().format(said)
    assert "ValueError" in json.loads(JsonFormatter().format(said))["exception"]


def test_time_is_utc_with_milliseconds() -> None:
    said = record("x")
    said.created, said.msecs = time.time(), 7.0
    assert json.loads(JsonFormatter().format(said))["time"].endswith(".007Z")
