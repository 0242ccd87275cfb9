"""The dashboard shows these metrics; `test_observed_server` asks a real server for them."""

from __future__ import annotations

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "observability"
INTERVAL = "1m"
SOURCES = ("vllm:cacheblend_", "cacheblend_")
"""What begins the names of a server's metrics, and of an application's."""
EITHER = {
    "chunk_hits_total", "chunk_misses_total", "blended_requests_total", "fallbacks_total",
    "reused_tokens_total", "recomputed_tokens_total", "phase_seconds", "load_seconds",
    "recompute_ratio", "guard_divergence_total", "guard_samples_total",
}  # fmt: skip
"""Of servers and of applications."""
APPLICATIONS = {
    "time_to_first_token_seconds", "guard_ratio", "guard_mean_divergence",
    "guard_prefill_divergence", "guard_waiting", "guard_stopped", "guard_raised_total",
}  # fmt: skip
SERVERS = {"vllm:time_to_first_token_seconds"}


def queries() -> list[tuple[str, str]]:
    """Each query with its panel's title and its legend."""
    written = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
    return [
        (f"{panel['title']}: {target['legendFormat']}", target["expr"])
        for panel in written["panels"]
        if panel["type"] != "row"
        for target in panel["targets"]
    ]


def asked(query: str, source: str) -> str:
    """Return a query as Grafana sends it, once a source of metrics was chosen."""
    told = query.replace("${source}", source).replace("$job", ".*")
    return told.replace("$__rate_interval", INTERVAL)


def test_queries_name_the_metrics_and_no_other_variables() -> None:
    told = [asked(query, "") for _, query in queries()]
    assert not [query for query in told if "$" in query]
    named = {name for query in told for name in re.findall(r"([a-z_:]+)\{", query)}
    named = {re.sub("_(sum|count|bucket)$", "", name) for name in named}
    assert named == EITHER | SERVERS | {f"{SOURCES[1]}{name}" for name in APPLICATIONS}
