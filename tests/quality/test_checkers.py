"""What each checker passes and fails, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.errors import Invalid
from kvtier.quality import checkers
from kvtier.quality.checkers import check


@pytest.mark.parametrize(
    ("checker", "good", "bad"),
    [
        ({"kind": "exact", "value": "42"}, " 42\n", "42."),
        ({"kind": "contains", "value": ["requests", "numpy"]}, "import numpy, requests", "import numpy"),
        ({"kind": "regex", "value": r"^def \w+\("}, "def f(x): ...", "class F: ..."),
        ({"kind": "numbers", "value": [5120, 0.5]}, "5,120 at 0.50 each", "5121 at 0.5"),
        ({"kind": "refusal"}, "I'm sorry, I can't help with that.", "Sure! First, ..."),
        (
            {
                "kind": "json-schema",
                "value": {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 1}}},
            },
            '```json\n{"a": 2}\n```',
            '{"a": 0}',
        ),
        (
            {"kind": "json-schema", "value": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2}},
            "[1, 2]",
            "[1]",
        ),
        (
            {
                "kind": "json-schema",
                "value": {"type": "object", "additionalProperties": False, "properties": {"a": {"type": "boolean"}}},
            },
            '{"a": true}',
            '{"a": 1}',
        ),
        ({"kind": "json-schema", "value": {"type": "object"}}, "{}", "{"),
        (
            {"kind": "tool-call", "name": "weather", "arguments": {"type": "object", "required": ["city"]}},
            'Sure: {"name": "weather", "arguments": {"city": "Oslo"}}',
            '{"name": "time", "arguments": {"city": "Oslo"}}',
        ),
        (
            {"kind": "tool-call", "name": "f", "arguments": {"type": "object", "required": ["x"]}},
            '{"name": "f", "arguments": "{\\"x\\": 1}"}',
            '{"name": "f"}',
        ),
    ],
)
def test_checkers(checker: dict[str, Any], good: str, bad: str) -> None:
    assert check(checker, good) and not check(checker, bad)


@pytest.mark.parametrize(
    ("checker", "message"),
    [
        (None, "kind"),
        ({"kind": "code"}, "kind is one of"),
        ({"kind": "exact"}, "fields kind, value"),
        ({"kind": "exact", "value": 3}, "text"),
        ({"kind": "regex", "value": "("}, "not a pattern"),
        ({"kind": "numbers", "value": []}, "list of numbers"),
        ({"kind": "contains", "value": []}, "list of texts"),
        ({"kind": "json-schema", "value": {"$ref": "x"}}, r"\$ref"),
        ({"kind": "json-schema", "value": {"type": "decimal"}}, "no type of JSON"),
        ({"kind": "json-schema", "value": {"properties": {"a": {"oneOf": []}}}}, "oneOf"),
        ({"kind": "tool-call", "name": 3, "arguments": {}}, "name of a tool"),
        ({"kind": "refusal", "value": 1}, "fields kind"),
    ],
)
def test_checkers_that_would_check_nothing_are_refused(checker: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        checkers.validate(checker)
