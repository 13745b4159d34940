"""Free-running answers: JSON and tool calls, repetition, and a user's own tasks.

They are made with the same prompts, seed and sampling for every scheme; their checkers decide."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtier.errors import Invalid
from kvtier.format.files import read_file
from kvtier.quality.checkers import check, valid_json, validate
from kvtier.quality.compare import Step
from kvtier.quality.loaded_model import LoadedModel
from kvtier.quality.schemes import Quantizer, Scheme

MAX_FILE_BYTES = 64 * 2**20
MAX_TASKS = 10_000


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt and how its answer is checked; `stratum` is a name for the report."""

    name: str
    prompt: str
    checker: dict[str, Any]
    max_tokens: int = 64
    stratum: str = "tasks"


@dataclass(frozen=True, slots=True)
class TaskAnswers:
    """One scheme's free-running answers to one stratum of tasks: passed, that hold whole JSON, mean share of repeated
    4-grams, and how many equal the native answer's first tokens."""

    stratum: str
    scheme: str
    tasks: int
    passed: int
    json: int
    repetition: float
    same_tokens: float


def generate(
    loaded: LoadedModel,
    prompt: Sequence[int],
    scheme: Scheme | None,
    most: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """Up to `most` tokens after the prompt, greedy at temperature 0; a seed draws the same numbers in every scheme."""
    cache, generator = Quantizer(scheme).new_cache(loaded), torch.Generator().manual_seed(seed)
    for given in loaded.passes(torch.tensor(list(prompt)), cache):
        logits = given[-1].float().cpu()
    answer: list[int] = []
    while True:
        chances = (logits / temperature).softmax(-1) if temperature > 0 else None
        drawn = logits.argmax() if chances is None else torch.multinomial(chances, 1, generator=generator)
        chosen = int(drawn)
        if chosen in loaded.end:
            return answer
        answer.append(chosen)
        if len(answer) == most:
            return answer
        logits = loaded.logits(torch.tensor([chosen]), cache)[-1].float().cpu()


def answer_all(
    loaded: LoadedModel,
    tasks: Sequence[Task],
    schemes: Sequence[Scheme | None],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    step: Step | None = None,
) -> tuple[list[TaskAnswers], list[dict[str, Any]]]:
    """Each scheme's answers to every task, by stratum, and each as a row. First tokens are compared to schemes[0]'s."""
    rows: list[dict[str, Any]] = []
    done = 0
    for task in tasks:
        prompt = loaded.encode(loaded.chat(task.prompt))
        first: list[int] | None = None
        for scheme in schemes:
            ids = generate(loaded, prompt, scheme, task.max_tokens, temperature, seed)
            first = ids if first is None else first
            text = loaded.decode(ids)
            same = next(
                (i for i, (a, b) in enumerate(zip(first, ids, strict=False)) if a != b), min(len(first), len(ids))
            )
            rows.append(
                {
                    "task": task.name,
                    "stratum": task.stratum,
                    "scheme": "native" if scheme is None else scheme.name,
                    "passed": check(task.checker, text),
                    "json": valid_json(text),
                    "repetition": repetition(ids),
                    "same_tokens": same / max(1, len(first), len(ids)),
                    "answer": text,
                }
            )
            done += 1
            if step is not None:
                step(done, len(tasks) * len(schemes))
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((str(row["stratum"]), str(row["scheme"])), []).append(row)
    found = []
    for (stratum, name), mine in groups.items():
        mean = {key: sum(row[key] for row in mine) / len(mine) for key in ("repetition", "same_tokens")}
        found.append(
            TaskAnswers(stratum, name, len(mine), sum(r["passed"] for r in mine), sum(r["json"] for r in mine), **mean)
        )
    return found, rows


def repetition(ids: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that stood before: 0 for none, near 1 for a loop."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def read(path: Path) -> list[Task]:
    """Tasks of a JSONL file: {"prompt", "checker"[, "name", "max_tokens", "stratum"]}. Raises Invalid with the line."""
    tasks = []
    for number, line in enumerate(read_file(path, MAX_FILE_BYTES).decode("utf-8", "replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Invalid(f"{path}, line {number}: not JSON: {error!s:.200}") from None
        try:
            tasks.append(_task(data, number))
        except Invalid as error:
            raise Invalid(f"{path}, line {number}: {error}") from None
    if not 1 <= len(tasks) <= MAX_TASKS:
        raise Invalid(f"{path} has {len(tasks)} tasks; 1 to {MAX_TASKS} are read")
    return tasks


def _task(data: Any, number: int) -> Task:
    if not isinstance(data, dict) or (
        unknown := sorted(set(data) - {"prompt", "checker", "name", "max_tokens", "stratum"})
    ):
        raise Invalid(
            "a task is an object" if not isinstance(data, dict) else f"unknown fields: {', '.join(unknown)[:200]}"
        )
    prompt, most, name, stratum = (
        data.get("prompt"),
        data.get("max_tokens", 64),
        data.get("name", f"line {number}"),
        data.get("stratum", "tasks"),
    )
    if not isinstance(prompt, str) or not prompt or not isinstance(name, str) or not isinstance(stratum, str):
        raise Invalid("prompt, name and stratum are text")
    if type(most) is not int or not 1 <= most <= 8192:
        raise Invalid("max_tokens is from 1 to 8192")
    validate(data.get("checker"))
    return Task(name, prompt, data["checker"], most, stratum)


def built_in() -> list[Task]:
    """A few tasks of each kind that a product depends on: JSON of a schema, a tool call, a figure from a text, long
    generation."""
    person = {
        "type": "object",
        "required": ["name", "age"],
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    }
    city = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}
    return [
        Task(
            "person",
            'Answer with JSON only: {"name": ..., "age": ...} for Ada, who is 36.',
            {"kind": "json-schema", "value": person},
            48,
            "json",
        ),
        Task(
            "weather",
            'You may call a tool by answering {"name": "weather", "arguments": {"city": "..."}}. What is the weather '
            "in Oslo?",
            {"kind": "tool-call", "name": "weather", "arguments": city},
            48,
            "tool calls",
        ),
        Task(
            "revenue",
            "Report: revenue was 4812 in March and 5120 in April. What was the revenue in April?",
            {"kind": "numbers", "value": [5120]},
            32,
            "figures",
        ),
        Task(
            "story", "Write a long story about a lighthouse.", {"kind": "regex", "value": r"\w"}, 160, "long generation"
        ),
    ]
