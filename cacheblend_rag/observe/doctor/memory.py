"""Findings on memory."""

from __future__ import annotations

from cacheblend_rag.observe.doctor.evidence import Evidence
from cacheblend_rag.observe.doctor.finding import Figure, Finding, FindingCode, SettingChange

MIB = 1 << 20


def no_room(evidence: Evidence) -> Finding | None:
    """A request found no memory to blend, or none at all."""
    memory, chunks = evidence.memory, evidence.missed("no room")
    if not chunks and memory.lack is None:
        return None
    lack = memory.lack or next(
        (str(one.reason) for one in evidence.reports if one.reason is not None), ""
    )
    figures: dict[str, Figure] = {"chunks": chunks, "prompt_tokens": evidence.prompt.tokens}
    figures |= {
        f"{name}_bytes": value
        for name, value in (
            ("needed", memory.needed),
            ("available", memory.available),
            ("kept", memory.kept),
        )
        if value is not None
    }
    if lack:
        figures["allocator"] = lack
    return Finding(
        FindingCode.NO_ROOM,
        "memory",
        "There was no memory to fuse the prompt's KV, so it was computed by ordinary prefill."
        if memory.lack is None
        else "There was no memory to answer the prompt at all.",
        figures,
        _change(evidence),
    )


def _change(evidence: Evidence) -> SettingChange:
    """Return what to lower: memory for chunk KV if that is enough, else the prompt."""
    memory, tokens = evidence.memory, evidence.prompt.tokens
    needed, available, kept = memory.needed or 0, memory.available or 0, memory.kept or 0
    short = max(needed - available, 0)
    if kept and (short or needed) <= kept:
        free = short or needed
        return SettingChange(
            "host_bytes",
            f"{kept / MIB:,.0f} MiB in use",
            f"{max(kept - free, 0) / MIB:,.0f} MiB",
            f"{free / MIB:,.1f} MiB more for the prompt's KV",
        )
    fits = tokens if not needed else int(tokens * min(1.0, available / needed))
    proposed = f"{fits:,}" if 0 < fits < tokens else f"{tokens // 2:,}"
    return SettingChange(
        "tokens of the prompt",
        f"{tokens:,}",
        f"{proposed}, by fewer or shorter passages",
        "the prompt's KV fits the memory that is available",
    )


CHECKS = (no_room,)
