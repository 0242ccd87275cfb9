"""The committed dashboard, as Grafana reads it."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "observability"
INTERVAL = "1m"
SOURCES = ("vllm:cacheblend_", "cacheblend_")
"""What begins the names of a server's metrics, and of an application's."""


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
