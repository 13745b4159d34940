"""docs/operations.md, docs/watch.md and packaging/ against the code: settings, metrics, status, log lines, exit codes,
alerts, the systemd unit.

`python -m tests.house.test_operations_docs` writes the tables of both pages anew from the code.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvtier.server.main import EXIT_CODES
from kvtier.server.meters import KINDS
from kvtier.server.metrics import CALLS, COUNTERS, GAUGES
from kvtier.server.settings import SETTINGS, from_values
from tests.support.daemon import Daemon, MiB
from tests.support.paths import ROOT

RUN = ROOT / "docs" / "operations.md"
WATCH = ROOT / "docs" / "watch.md"
ALERTS = ROOT / "packaging" / "alerts.yml"
UNIT = ROOT / "packaging" / "kvtier.service"

# What a name of the status means, beside its unit. Names that lower tiers add are documented with them.
STATUS = {
    "boot": "names this life of the daemon; a new one voids handles and mappings",
    "pid": "of the daemon",
    "version": "of the daemon",
    "start_time": "unix seconds",
    "arena_bytes": "capacity for blocks",
    "arena_ready_bytes": "bytes of the arena that memory is behind already",
    "used_bytes": "slots taken, padding included",
    "known_blocks": "sealed blocks in the arena",
    "namespaces": "registered",
    "leased_blocks": "blocks that are being read",
    "leased_bytes": "bytes of their slots",
    "reserved_blocks": "slots that are being filled",
    "reserved_bytes": "bytes of these slots",
    "pinned_blocks": "blocks an operator has pinned",
    "pinned_bytes": "bytes of their slots",
    "sessions": "clients with a session (and one for each tenant with pins)",
    "sockets": "of all sessions",
    "held_bytes": "slots that sessions hold, each session counted by itself",
    "limbo_sessions": "sessions without a socket whose process lives",
    "limbo_bytes": "bytes that these sessions hold",
    "grpc_calls": "gRPC calls under way",
    "grpc_bulk_calls": "puts and gets among these",
    "grpc_cut_total": "gRPC calls ended because they stood still or took too long",
    "lookup_keys_total": "keys asked for by lookups",
    "lookup_hits_total": "leading keys that were known",
    "lookup_warm_total": "leading known keys that were in the arena",
    "lookup_misses_total": "lookups that ended at an unknown key",
    "lease_keys_total": "keys asked for by leases and gets",
    "leased_blocks_total": "blocks that these were given",
    "leased_bytes_total": "bytes of the slots of these blocks",
    "sealed_blocks_total": "blocks stored",
    "sealed_bytes_total": "bytes of the blocks stored",
    "already_blocks_total": "blocks written that another writer had stored first",
    "aborted_blocks_total": "slots given back unsealed",
    "evicted_blocks_total": "blocks forgotten so that others fit",
    "evicted_bytes_total": "bytes of the blocks evicted",
    "deleted_blocks_total": "blocks forgotten on demand",
    "expired_blocks_total": "blocks forgotten because they were not used for their namespace's time-to-live",
    "drained_slabs_total": "slabs emptied for another block size",
    "full_total": "reservations refused: the arena is full of blocks in use, or a cap is reached",
    "bad_headers_total": "blocks dropped because a writer had changed their header",
}

# What an event means. The code is searched for events; each must be here.
EVENTS = {
    "ready": "calls are accepted",
    "metrics listen": "the HTTP pages are there",
    "grpc listen": "gRPC listens",
    "arena backed": "memory is behind all of the arena",
    "arena not backed": "part of it has none and will not get any: puts may be slow or fail",
    "not ready": "a background thread has died: see the reason",
    "ready again": "all background threads run again",
    "reloaded": "tokens or certificates were read anew",
    "reload failed": "tokens or certificates could not be used: the old ones stay in force",
    "stopping": "SIGTERM or SIGINT came",
    "stopped": "the daemon has ended; seconds: how long calls and write-behind took to end",
    "calls cut off": "calls of the Unix transport were still under way at the end of the drain",
    "accepting fails": "out of descriptors or the like; said once, and tried again",
    "accepting again": "connections are accepted again",
    "no thread for another socket": "a connection was closed for want of a thread",
    "session in limbo": "a client's last socket closed while its process may still touch slots",
    "process ended with slots": "a client's process ended; the slots it held are free again",
    "namespace dropped": "an admin dropped one",
    "time-to-live set": "an admin gave a namespace a time-to-live; 0 seconds: took it away",
    "admin call": "drop, pin, unpin or ttl over gRPC",
    "unknown token refused": "at most every 10 s, with the number of calls since the last",
    "lane socket failed": "a fault of kvtier in one connection of the Unix transport",
    "verb failed": "a fault of kvtier in one call of the Unix transport",
    "call failed": "a fault of kvtier in one call over gRPC",
    "page failed": "a fault of kvtier in an HTTP page",
    "returning slots failed": "a fault of kvtier when a client ended",
    "ssd opened": "the index was read",
    "ssd buffered": "the file system refuses O_DIRECT: the page cache is used",
    "ssd index damaged": "index files end before their size; what follows there never happened",
    "ssd namespace not understood": "blocks of a newer version: left alone, not served",
    "ssd still busy": "a disk call had not returned at the end; the directory stays locked until the process is gone",
    "ssd upkeep failed": "a fault of kvtier in the index's own thread",
    "redis opened": "Redis accepts the login, and this user may do what the tier needs",
    "redis upkeep failed": "a fault of kvtier in the tier's own thread",
    "asking redis failed": "a fault of kvtier while Redis was asked what it has",
    "tier degraded": "a tier's medium fails, or has no room; said once, until it works again",
    "tier recovered": "the tier works again",
    "settling failed": "a fault of kvtier while blocks were copied down",
    "promoting failed": "a fault of kvtier while a block was copied up",
    "expiring failed": "a fault of kvtier while blocks past their time-to-live were forgotten",
}
DAEMON_SIDE = ("store", "tiers", "server")


def table(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def settings_table() -> str:
    return table((f"`{s.name}`", f"`{s.flag}`", s.default, s.meaning) for s in SETTINGS)


def metrics_table() -> str:
    rows = [(f"`{f.name}`", "gauge", ", ".join(f.labels), f.help) for f in GAUGES]
    rows += [(f"`{f.name}_total`", "counter", ", ".join(f.labels), f.help) for f in COUNTERS]
    rows += [(f"`{CALLS.name}`", "histogram", ", ".join(CALLS.labels), CALLS.help)]
    return table(rows)


def status_table() -> str:
    return table((f"`{name}`", meaning) for name, meaning in STATUS.items())


def logged() -> dict[str, tuple[str, set[str]]]:
    """Of the source: {event: (level, names of fields)}. Every log call there has a constant event."""
    found: dict[str, tuple[str, set[str]]] = {}
    for path in sorted(path for room in DAEMON_SIDE for path in (ROOT / "kvtier" / room).rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) == "log"
            ):
                continue
            where = f"{path.name}:{node.lineno}"
            assert isinstance(node.args[0], ast.Constant) and len(node.args) == 1, (
                f"{where}: an event is a constant, what varies is a field"
            )
            event = str(node.args[0].value)
            assert "%" not in event and "{" not in event, where
            level = "error" if node.func.attr == "exception" else node.func.attr
            names = found.setdefault(event, (level, set()))[1]
            assert found[event][0] == level, f"{where}: {event!r} has two levels"
            for keyword in node.keywords:
                if keyword.arg in ("extra", None):
                    names |= field_names(keyword.value, tree)
    return found


def field_names(node: ast.expr, tree: ast.Module) -> set[str]:
    """Names in fields(...), {"fields": {...}} or what a local name was set to."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "fields":
        return {str(keyword.arg) for keyword in node.keywords}
    if isinstance(node, ast.Dict):
        inner = node.values[0]
        if isinstance(inner, ast.Dict):
            return {str(key.value) for key in inner.keys if isinstance(key, ast.Constant)}
        node = inner
    source = ast.unparse(node)
    for other in ast.walk(tree):
        if isinstance(other, ast.Assign) and ast.unparse(other.targets[0]) == source:
            return {
                str(key.value) for key in getattr(other.value, "keys", []) if isinstance(key, ast.Constant)
            } or field_names(other.value, tree)
        if isinstance(other, ast.FunctionDef) and isinstance(node, ast.Call) and other.name == ast.unparse(node.func):
            returned = next(n.value for n in ast.walk(other) if isinstance(n, ast.Return) and n.value is not None)
            return field_names(returned, tree)
    return set()


def events_table() -> str:
    code = logged()
    return table(
        (f"`{event}`", code[event][0], ", ".join(sorted(code[event][1])), meaning) for event, meaning in EVENTS.items()
    )


TABLES = {
    "settings": (RUN, settings_table),
    "metrics": (WATCH, metrics_table),
    "status": (WATCH, status_table),
    "events": (WATCH, events_table),
}


def part(name: str) -> str:
    """The table of a part of its page, head and all."""
    page = TABLES[name][0]
    match = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", page.read_text(), re.DOTALL)
    assert match, f"{page.name} has no part {name}"
    return match[1]


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_those_of_the_code(name: str) -> None:
    found = "".join(part(name).splitlines(keepends=True)[2:])
    assert found == TABLES[name][1](), "run: python -m tests.house.test_operations_docs"


def test_every_log_line_of_the_daemon_is_known() -> None:
    assert set(logged()) == set(EVENTS)


def test_the_status_has_these_names() -> None:
    with Daemon(8 * MiB) as daemon:
        assert set(daemon.status()) == set(STATUS)


def test_exit_codes() -> None:
    text = RUN.read_text()
    section = text[text.index("## Exit codes") : text.index("## From start to stop")]
    assert set(map(int, re.findall(r"^\| (\d) \|", section, re.MULTILINE))) == {0, *EXIT_CODES.values()}


def test_the_example_file_is_one(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", RUN.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        values = tomllib.loads(block) | {"socket": str(tmp_path / "k.sock"), "arena_bytes": "64MiB"}
        made = from_values({name: (name, value) for name, value in values.items()})
        assert made.users and made.metrics is not None


def test_flags_and_commands_of_the_page_exist() -> None:
    text = RUN.read_text() + WATCH.read_text()
    flags = {setting.flag for setting in SETTINGS} | {"--config", "--check", "--version", "--help", "--log-format"}
    other = {"--ulimit", "--system", "--now"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= flags | other


def test_alerts_ask_for_metrics_that_exist() -> None:
    text = ALERTS.read_text()
    exported = (
        {f.name for f in GAUGES}
        | {f"{f.name}_total" for f in COUNTERS}
        | {f"{CALLS.name}_{suffix}" for suffix in ("bucket", "sum", "count")}
    )
    asked = set(re.findall(r"\bkvtier_[a-z_]+", "\n".join(re.findall(r"expr: (.*)", text))))
    assert asked and asked <= exported
    alerts = text.split("- alert: ")[1:]
    assert len(alerts) == len({alert.split("\n")[0] for alert in alerts}) >= 8
    for alert in alerts:
        assert all(f"{word}:" in alert for word in ("expr", "labels", "summary", "action")), alert.split("\n")[0]
    assert set(re.findall(r'kind="(\w+)"', text)) <= set(KINDS.values())
    for event in re.findall(r"`([a-z]+ [a-z ]+)`", text):
        assert event in EVENTS, f"an alert names a log line that does not exist: {event}"


def test_the_unit_is_one_that_systemd_reads(tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert (
        "RestartPreventExitStatus=2" in text
        and "RuntimeDirectory=kvtier" in text
        and "LimitMEMLOCK=" in text
        and "Type=notify" in text
    )
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed here")
    copy = tmp_path / "kvtier.service"
    copy.write_text(text.replace("/usr/bin/kvtier-server", sys.executable))
    found = subprocess.run(
        [program, "verify", str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    assert str(copy.name) not in found.stderr, found.stderr


def main() -> None:
    """Writes the tables of both pages from the code."""
    for name, (page, make) in TABLES.items():
        text = page.read_text()
        head = "".join(part(name).splitlines(keepends=True)[:2])
        begin, end = text.index(f"<!-- {name} -->\n") + len(f"<!-- {name} -->\n"), text.index(f"<!-- /{name} -->")
        page.write_text(text[:begin] + head + make() + text[end:])


if __name__ == "__main__":
    main()
