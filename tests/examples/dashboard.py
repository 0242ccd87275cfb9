"""The committed dashboard, as Grafana reads it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples" / "observability"
INTERVAL = "1m"


def generator() -> ModuleType:
    """Return the module that writes the dashboard."""
    spec = spec_from_file_location("observability_dashboard", FOLDER / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def panels() -> Iterator[dict[str, Any]]:
    written = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
    yield from (panel for panel in written["panels"] if panel["type"] != "row")


def queries() -> list[tuple[str, str]]:
    """Each query with its panel's title and its legend."""
    return [
        (f"{panel['title']}: {target['legendFormat']}", target["expr"])
        for panel in panels()
        for target in panel["targets"]
    ]


def asked(query: str, source: str) -> str:
    """Return a query as Grafana sends it, once a source of metrics was chosen."""
    told = query.replace("${source}", source).replace("$job", ".*")
    return told.replace("$__rate_interval", INTERVAL)
