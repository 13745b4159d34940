"""namespaces, show, diff and drop against a real daemon."""

from __future__ import annotations

import json
from typing import Any

from kvtier.cli.output import Exit
from kvtier.format.identity import Description
from tests.cli.shell import N, Shell


def test_namespaces_are_listed_shown_and_dropped(shell: Shell, stored: dict[str, Any]) -> None:
    mine = [one for one in shell.json("namespaces")["namespaces"] if one["description"] == stored["digest"]]
    assert len(mine) == 1 and mine[0]["blocks"] == N and mine[0]["tenant"] == "local" and mine[0]["model"] == "org/m"
    assert stored["digest"][:16] in shell("namespaces").stdout
    found = shell.json("show", stored["digest"][:8])
    assert (
        found["namespace"] == mine[0] and Description.from_json(found["description"]).digest.hex() == stored["digest"]
    )
    text = shell("show", stored["digest"][:8], "--description").stdout
    assert Description.from_json(json.loads(text)).digest.hex() == stored["digest"], (
        "what it prints is a file that commands take"
    )
    assert stored["digest"] in shell("show", stored["digest"][:8]).stdout
    assert shell.json("ttl", stored["digest"], "36h")["namespace"]["ttl"] == 36 * 3600
    assert "36h" in shell("namespaces").stdout
    for wrong in ("", "24", "0s", "1.5h", "-1h", "1w", "999999999d"):
        assert shell("ttl", "--", stored["digest"], wrong).exit_code == Exit.USAGE, wrong
    assert "time-to-live off" in shell("ttl", stored["digest"], "off").stdout
    assert shell("drop", stored["digest"]).exit_code == Exit.USAGE, "without a terminal nobody can be asked"
    assert shell.json("drop", stored["digest"], "--yes")["dropped_blocks"] == N
    assert shell.json("show", stored["digest"], code=Exit.NEGATIVE)["error"] == "NotFound"


def test_differences_are_named_field_by_field(shell: Shell, stored: dict[str, Any]) -> None:
    other = json.loads(stored["description"].read_text()) | {"revision": "4" * 40}
    live = shell.write("live.json", json.dumps(other))
    line = f"revision: {'2' * 40} stored, {'4' * 40} live"
    assert shell.json("diff", stored["digest"], live, code=Exit.NEGATIVE) == {"differences": [line]}
    assert shell.json("diff", "nearest", stored["description"]) == {"differences": []}
    assert shell.json("diff", stored["description"], stored["digest"]) == {"differences": []}
    assert shell("diff", stored["digest"], stored["digest"]).stdout == "no difference\n"
    assert line in shell("diff", stored["description"], live).stdout
