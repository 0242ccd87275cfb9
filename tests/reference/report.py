"""The reference page of reports, from their classes' docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping

from cacheblend_rag.report import (
    BlendReport,
    ChunkReport,
    FillReport,
    GuardReport,
    PhaseSeconds,
    PrecomputeReport,
)
from cacheblend_rag.trace import Deviations, Trace, TracedLayer, TracedSelection, TracedTokens

REPORTS: Mapping[type, str] = {
    BlendReport: "A request",
    ChunkReport: "A chunk of its prompt",
    PhaseSeconds: "Its time, by phase",
    PrecomputeReport: "Precomputing",
    FillReport: "Filling on miss",
    GuardReport: "A guard",
    Trace: "A trace",
    TracedSelection: "A choice of tokens, in a trace",
    TracedTokens: "Tokens, in a trace",
    TracedLayer: "A layer, in a trace",
    Deviations: "How far fresh KV is from stored KV, in a layer",
}
HEAD = """# Reports

After this page you can look up every field of a report.

`answer.report` is a `BlendReport`; `to_dict()` and a server's `cacheblend.report` have the same
names in JSON, with the code of each reason beside its sentence (`reason_code`):
[all reasons](../troubleshooting.md#reasons).
"""
_FIELD = re.compile(r"^(\w+(?:, \w+)*): (.+?)(?=^\w+(?:, \w+)*: |\Z)", re.MULTILINE | re.DOTALL)


def report_page() -> str:
    """Return the fields of all reports as a page of Markdown, one table per class."""
    return "\n".join(
        [HEAD, *(_section(f"{of}: `{kind.__name__}`", kind) for kind, of in REPORTS.items())]
    )


def fields_of(kind: type) -> dict[str, str]:
    """Return the fields that a class's docstring describes, by name."""
    said = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2].partition("\nRaises:")[0]
    return {name: _line(text) for name, text in _FIELD.findall(inspect.cleandoc(said))}


def _section(title: str, kind: type) -> str:
    about = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[0]
    rows = [f"| `{name}` | {text} |" for name, text in fields_of(kind).items()]
    return "\n".join(
        [f"## {title}", "", _line(about), "", "| field | |", "| --- | --- |", *rows, ""]
    )


def _line(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())
