"""README's chart shows the committed figures."""

from __future__ import annotations

import json
import re

from tests.benchmarks.chart import CHART, FIGURES, bars, chart
from tests.readme import README


def test_the_chart_is_drawn_from_the_committed_figures() -> None:
    assert chart() == CHART.read_text()


def test_the_table_beside_it_says_the_same() -> None:
    table = [line for line in README.read_text().splitlines() if line.startswith("| ")]
    for name, row in (("ttft.json", "the chart"), ("ttft_vllm.json", "the same in vLLM")):
        seconds = dict(bars(json.loads((FIGURES / name).read_text()))).values()
        (line,) = [line for line in table if line.startswith(f"| {row}")]
        assert set(re.findall(r"([\d.]+) s\b", line)) == {f"{one:.1f}" for one in seconds}
