"""docs/restore.svg: time to the first token, restored against recomputed, drawn from bench/results/vllm_restore.json.

Plain SVG text, readable on light and dark pages; every figure and the machine stand in it. `python -m bench.docs`
writes it, and a test compares.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

WIDTH, LEFT, RIGHT, BAR, PAIR = 760, 130, 150, 24, 78  # pixels; PAIR: from one prompt length to the next
COMPUTED, RESTORED = "time to first token, recomputed", "time to first token, restored"
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 }
.small { font-size: 11px; fill: #59636e }
.computed { fill: #8c959f } .restored { fill: #0969da }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 }
  .computed { fill: #656c76 } .restored { fill: #4493f8 }
}
"""


def restore(result: dict[str, Any], machine: str) -> str:
    """The picture of a result of `bench.vllm_restore`: two bars a prompt length, seconds from 0."""
    seconds: dict[int, dict[str, float]] = {}
    for row in result["rows"]:
        length = re.fullmatch(r"restore, (\d+) tokens", row["case"])
        if length and row["metric"] in (COMPUTED, RESTORED):
            seconds.setdefault(int(length[1]), {})[row["metric"]] = row["value"]
    longest = max(value for pair in seconds.values() for value in pair.values())
    scale = (WIDTH - LEFT - RIGHT) / longest
    title = "Time to the first token: prefix computed again, or restored from kvtier"
    body = [_text(16, 26, title, "title")]
    y = 48
    for length, pair in sorted(seconds.items()):
        body.append(_text(16, y + BAR + 4, f"{length:,} tokens"))
        share = pair[COMPUTED] / pair[RESTORED]
        for place, (metric, name, note) in enumerate(
            ((COMPUTED, "computed", "recomputed"), (RESTORED, "restored", f"restored, {share:.1f} times as fast"))
        ):
            top, width = y + place * (BAR + 3), pair[metric] * scale
            body.append(f'<rect class="{name}" x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR}"/>')
            body.append(_text(LEFT + width + 8, top + 17, f"{pair[metric]:.2f} s {note}"))
        y += PAIR
    about = f"SmolLM2-135M in vLLM on CPU, fresh engine each time, median. {machine}."
    when = f"{result['date'][:10]}, commit {result['commit']}: {result['command']}"
    body += [_text(16, y + 8, about, "small"), _text(16, y + 24, when, "small")]
    height = y + 36
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    lines = [f'{head} role="img">', f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", *body, "</svg>"]
    return "\n".join(lines) + "\n"


def _text(x: float, y: float, said: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y}">{escape(said)}</text>'
