"""The chart of the README shows what was kept, whatever that is."""

from __future__ import annotations

import copy
import re
from xml.etree import ElementTree

from bench import chart, docs

SVG = "{http://www.w3.org/2000/svg}"


def test_the_chart_is_what_the_kept_result_says() -> None:
    result = docs.kept("vllm_restore")
    made = chart.restore(result, docs.machine(result))
    assert (docs.ROOT / "docs" / "restore.svg").read_text("utf-8") == made, "say: make benchdocs"
    assert docs.machine(result) in made and result["commit"] in made and result["command"] in made


def test_bars_are_as_long_as_the_seconds() -> None:
    result = copy.deepcopy(docs.kept("vllm_restore"))
    for row in result["rows"]:
        if row["metric"] == chart.RESTORED:
            row["value"] = 1.5
        if row["metric"] == chart.COMPUTED:
            row["value"] = 6.0
    picture = ElementTree.fromstring(chart.restore(result, "a machine"))
    widths = [float(bar.attrib["width"]) for bar in picture.iter(f"{SVG}rect")]
    assert len(widths) == 4 and widths[0] == 4 * widths[1] == widths[2] == 4 * widths[3]
    said = [text.text or "" for text in picture.iter(f"{SVG}text")]
    assert said.count("6.00 s recomputed") == 2 and said.count("1.50 s restored, 4.0 times as fast") == 2
    assert any(re.search(r"a machine\.$", line) for line in said)
