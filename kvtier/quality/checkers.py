"""Whether an answer is right: exact, by pattern, by numbers, as JSON of a schema, as a tool call. Pure functions;
nothing in an answer is executed.

A checker is {"kind": ..., ...} in a task file. Unknown kinds, fields and schema keywords are refused when the file is
read, so that a task is never passed because nobody looked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvtier.errors import Invalid

MAX_PATTERN = 1000
MAX_ANSWER = 20_000  # characters that a pattern is matched against
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_FIELDS: dict[str, set[str]] = {
    **{kind: {"value"} for kind in ("exact", "contains", "regex", "numbers", "json-schema")},
    "tool-call": {"name", "arguments"},
    "refusal": set(),
}
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_KEYWORDS = {
    *("type", "enum", "const", "description", "title"),
    *("properties", "required", "additionalProperties", "items"),
    *("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"),
}
_FIRST_PERSON = r"I (?:can(?:no|')t|am unable|am not able|won't)|I'm (?:sorry|unable|not able)"
_REFUSAL = re.compile(rf"\b(?:{_FIRST_PERSON}|cannot (?:help|assist|provide))", re.IGNORECASE)


def check(checker: Mapping[str, Any], answer: str) -> bool:
    """Whether the answer passes. Raises Invalid for a checker that `validate` would refuse."""
    validate(checker)
    kind, text = checker["kind"], answer.strip()[:MAX_ANSWER]
    value: Any = checker.get("value")
    if kind == "exact":
        return text == value
    if kind == "contains":
        return all(part in text for part in ([value] if isinstance(value, str) else value))
    if kind == "regex":
        return re.search(value, text) is not None
    if kind == "numbers":
        found = [float(number) for number in _NUMBER.findall(text.replace(",", ""))]
        limits = [(float(wanted), 1e-9 * max(1.0, abs(float(wanted)))) for wanted in value]
        return all(any(abs(number - wanted) <= limit for number in found) for wanted, limit in limits)
    if kind == "refusal":
        return _REFUSAL.search(text) is not None
    data = first_json(text)
    if data is _NOTHING:
        return False
    if kind == "json-schema":
        return fits(data, value)
    arguments = data.get("arguments", data.get("parameters")) if isinstance(data, dict) else None
    if isinstance(arguments, str):  # some formats have the arguments as a string of JSON
        arguments = first_json(arguments)
    return isinstance(data, dict) and data.get("name") == checker["name"] and fits(arguments, checker["arguments"])


def validate(checker: Any) -> None:
    """Raises Invalid unless a known kind with exactly its fields, a pattern that compiles, a schema of known words."""
    kind = checker.get("kind") if isinstance(checker, Mapping) else None
    if kind not in _FIELDS:
        raise Invalid(f"the checker's kind is one of {', '.join(_FIELDS)}, not {kind!r:.80}")
    if set(checker) != _FIELDS[kind] | {"kind"}:
        raise Invalid(f"a checker of kind {kind} has the fields {', '.join(sorted(_FIELDS[kind] | {'kind'}))}")
    value: Any = checker.get("value")
    if kind in ("exact", "regex") and not isinstance(value, str):
        raise Invalid(f"the value of {kind} is text")
    listed = value if isinstance(value, list) and value else [None]
    if kind == "contains" and not (isinstance(value, str) or all(isinstance(part, str) for part in listed)):
        raise Invalid("the value of contains is text, or a list of texts")
    if kind == "numbers" and not all(type(part) in (int, float) for part in listed):
        raise Invalid("the value of numbers is a list of numbers")
    if kind == "regex":
        if len(value) > MAX_PATTERN:
            raise Invalid(f"a pattern has at most {MAX_PATTERN} characters")
        try:
            re.compile(value)
        except re.error as error:
            raise Invalid(f"not a pattern: {error}") from None
    if kind == "tool-call" and not isinstance(checker["name"], str):
        raise Invalid("the name of a tool is text")
    if kind in ("json-schema", "tool-call"):
        _check_schema(value if kind == "json-schema" else checker["arguments"])


_NOTHING = object()


def first_json(text: str) -> Any:
    """The first JSON object or array in a text, `_NOTHING` if there is none: models wrap JSON in prose and fences."""
    decoder = json.JSONDecoder()
    for place, character in enumerate(text):
        if character in "[{":
            try:
                return decoder.raw_decode(text, place)[0]
            except (ValueError, RecursionError):
                continue
    return _NOTHING


def valid_json(text: str) -> bool:
    """Whether there is a whole JSON object or array in the text."""
    return first_json(text) is not _NOTHING


def fits(data: Any, schema: Mapping[str, Any]) -> bool:
    """Whether plain data fits a schema of the keywords known here."""
    if "type" in schema:
        kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if isinstance(data, bool):  # In Python True is an int; in JSON it is not.
            kinds = [kind for kind in kinds if kind == "boolean"]
        if not any(isinstance(data, _TYPES[kind]) for kind in kinds):
            return False
    if "enum" in schema and data not in schema["enum"]:
        return False
    if "const" in schema and data != schema["const"]:
        return False
    number = isinstance(data, int | float) and not isinstance(data, bool)
    if number and not schema.get("minimum", data) <= data <= schema.get("maximum", data):
        return False
    if isinstance(data, str) and not schema.get("minLength", 0) <= len(data) <= schema.get("maxLength", len(data)):
        return False
    if isinstance(data, list):
        inside = "items" not in schema or all(fits(item, schema["items"]) for item in data)
        return inside and schema.get("minItems", 0) <= len(data) <= schema.get("maxItems", len(data))
    if isinstance(data, dict):
        known = schema.get("properties", {})
        if any(name not in data for name in schema.get("required", [])):
            return False
        if schema.get("additionalProperties") is False and set(data) - set(known):
            return False
        return all(fits(value, known[name]) for name, value in data.items() if name in known)
    return True


def _check_schema(schema: Any, depth: int = 0) -> None:
    if not isinstance(schema, Mapping) or depth > 32:
        raise Invalid("a schema is an object, nested at most 32 deep")
    if unknown := sorted(set(schema) - _KEYWORDS):
        raise Invalid(f"schema keywords that are not known here: {', '.join(map(str, unknown))[:200]}")
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in _TYPES:
            raise Invalid(f"{kind!r:.80} is no type of JSON")
    for inner in schema.get("properties", {}).values():
        _check_schema(inner, depth + 1)
    if "items" in schema:
        _check_schema(schema["items"], depth + 1)
