"""The pictures and tables of README and the docs show the committed figures."""

from __future__ import annotations

import json
import re

from tests.benchmarks import peers, recovered
from tests.benchmarks.chart import CHART, FIGURES, bars, chart
from tests.readme import DOCS, README


def test_the_chart_is_drawn_from_the_committed_figures() -> None:
    assert chart() == CHART.read_text()


def test_the_table_beside_it_says_the_same() -> None:
    table = [line for line in README.read_text().splitlines() if line.startswith("| ")]
    for name, row in (("ttft.json", "the chart"), ("ttft_vllm.json", "the same in vLLM")):
        seconds = dict(bars(json.loads((FIGURES / name).read_text()))).values()
        (line,) = [line for line in table if line.startswith(f"| {row}")]
        assert set(re.findall(r"([\d.]+) s\b", line)) == {f"{one:.1f}" for one in seconds}


def test_the_quality_page_has_the_figures_of_each_model_and_length() -> None:
    assert recovered.chart() == recovered.CHART.read_text()
    assert recovered.table() in (DOCS / "quality.md").read_text()


def test_the_page_of_benchmarks_has_the_peers_figures() -> None:
    found = json.loads((FIGURES / "peers.json").read_text())
    assert peers.table(found) in (DOCS / "benchmarks.md").read_text()
