"""The dashboard shows these metrics; `test_observed_server` asks a real server for them."""

from __future__ import annotations

import re

from tests.examples.dashboard import SOURCES, asked, queries

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


def test_queries_name_the_metrics_and_no_other_variables() -> None:
    told = [asked(query, "") for _, query in queries()]
    assert not [query for query in told if "$" in query]
    named = {name for query in told for name in re.findall(r"([a-z_:]+)\{", query)}
    named = {re.sub("_(sum|count|bucket)$", "", name) for name in named}
    assert named == EITHER | SERVERS | {f"{SOURCES[1]}{name}" for name in APPLICATIONS}
