"""The dashboard shows these metrics; `test_observed_server` asks a real server for them."""

from __future__ import annotations

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "observability"
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


def named(source: str) -> set[str]:
    """Return the metrics that the panels' queries name, once a source of metrics was chosen."""
    written = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
    rows = [panel for panel in written["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in rows for target in panel["targets"]]
    asked = " ".join(queries).replace("${source}", source).replace("$job", "")
    assert "$" not in asked.replace("$__rate_interval", ""), "a variable that nobody sets"
    found = re.findall(r"([a-z_:]+)\{", asked)
    return {re.sub("_(sum|count|bucket)$", "", name) for name in found}


def test_queries_name_the_metrics_and_no_other_variables() -> None:
    assert named("") == EITHER | SERVERS | {f"{SOURCES[1]}{name}" for name in APPLICATIONS}
