"""The four methods of answering that the demo compares."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_rag.settings import LeadInKind


@dataclass(frozen=True)
class Method:
    """One way to answer: full prefill when ``lead_in`` is None, else a rule."""

    name: str
    label: str
    lead_in: LeadInKind | None
    selector: str = "none"
    ratio: float = 0.0


METHODS = (
    Method("full", "full prefill", None),
    Method("reuse", "plain reuse", "instruction"),
    Method("blend", "blend", "instruction", "prior", 0.2),
    Method("contextual", "contextual", "document"),
)


def needed_lead_ins() -> list[LeadInKind]:
    """Return the lead-ins that the methods need an engine for, in order of appearance."""
    return list(dict.fromkeys(m.lead_in for m in METHODS if m.lead_in is not None))
