"""Findings on chunks that are not reused, for want of memory or for another reason."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from cacheblend_rag.observe.doctor.evidence import Evidence
from cacheblend_rag.observe.doctor.finding import Figure, Finding, FindingCode, SettingChange
from cacheblend_rag.observe.doctor.similar import SimilarChunk
from cacheblend_rag.reason import ReasonCode

SHORT_PROMPT = 1000
"""Tokens below which little can be gained."""
MUCH_MISSED = 0.1
"""Share of a prompt whose KV must be missing for that to be a fault."""
MIB = 1 << 20
LEAST_GAIN = 1.5
"""A short prompt is named unless it is so many times sooner."""


def cannot_be_blended(evidence: Evidence) -> Finding | None:
    """The engine serves every prompt by ordinary prefill."""
    why = evidence.refusal
    if why is None:
        return None
    return Finding(
        FindingCode.CANNOT_BE_BLENDED,
        "This engine serves every prompt by ordinary prefill.",
        {"reason": str(why), "reason_code": why.code.value},
        SettingChange("model", "cannot be blended", "another model or server", "chunks are reused"),
    )


def no_room(evidence: Evidence) -> Finding | None:
    """A request found no memory to blend, or none at all."""
    memory, chunks = evidence.memory, evidence.missed(ReasonCode.NO_ROOM)
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
        "There was no memory to fuse the prompt's KV, so it was computed by ordinary prefill."
        if memory.lack is None
        else "There was no memory to answer the prompt at all.",
        figures,
        _less_memory(evidence),
    )


def _less_memory(evidence: Evidence) -> SettingChange:
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


def guard_stopped(evidence: Evidence) -> Finding | None:
    """The guard has stopped blending, since answers diverged."""
    chunks = evidence.missed(ReasonCode.GUARD_STOPPED)
    if not chunks:
        return None
    return Finding(
        FindingCode.GUARD_STOPPED,
        "The guard has stopped blending, since answers diverged too far from full prefill.",
        {"chunks": chunks},
        SettingChange(
            "recompute_ratio",
            f"{evidence.config.ratio:g}",
            "what `cacheblend-rag tune` finds, then engine.reset_guard()",
            "blending goes on, with answers near full prefill's",
        ),
    )


def tier_fails(evidence: Evidence) -> Finding | None:
    """A tier of the store cannot be used."""
    of_chunks = evidence.missed_tiers(ReasonCode.STORE_ERROR)
    failing = {name: one for name, one in evidence.tiers.items() if one.errors or one.skipped}
    names = sorted({*of_chunks, *failing})
    if not names:
        return None
    figures: dict[str, Figure] = {"chunks_missed": sum(of_chunks.values())}
    for name in names:
        facts = failing.get(name)
        if facts is not None:
            figures |= {f"{name}_errors": facts.errors, f"{name}_skipped": facts.skipped}
    first = names[0]
    return Finding(
        FindingCode.TIER_FAILS,
        f"The tier {first!r} of the store cannot be used, and is skipped.",
        figures,
        SettingChange(
            "store.tiers",
            f"{first!r} fails",
            f"start the server of {first!r}, or leave this tier out",
            "its chunks are found again, and no request waits for its timeout",
        ),
    )


def damaged(evidence: Evidence) -> Finding | None:
    """Stored KV is damaged, or signed with another key."""
    chunks, forged = evidence.missed(ReasonCode.DAMAGED), evidence.missed(ReasonCode.BAD_SIGNATURE)
    if not chunks + forged:
        return None
    return Finding(
        FindingCode.DAMAGED,
        "Stored KV of the prompt's chunks is damaged, or was signed with another key.",
        {"damaged_chunks": chunks, "chunks_with_bad_signature": forged},
        SettingChange(
            "CACHEBLEND_MAC_KEY" if forged else "store",
            "another key" if forged else "holds damaged chunks",
            "the key that chunks were stored with"
            if forged
            else "`precompute(verify=True)`, or `index --repair`",
            "the chunks are reused",
        ),
    )


def other_model(evidence: Evidence) -> Finding | None:
    """Stored KV belongs to another model, tokenizer, instruction, lead-in or namespace."""
    chunks = evidence.missed(ReasonCode.OTHER_MODEL)
    if not chunks:
        return None
    return Finding(
        FindingCode.OTHER_MODEL,
        "The store holds these chunks as another model, tokenizer, instruction, lead-in or "
        "namespace computed them.",
        {"chunks": chunks, "tokens": evidence.missed_tokens(ReasonCode.OTHER_MODEL)},
        SettingChange(
            "instruction",
            f"{evidence.prompt.instruction[:40]!r}, lead-in {evidence.prompt.lead_in}",
            "the model, instruction, lead-in and namespace that the chunks were indexed with, "
            "or index again",
            "the chunks are reused",
        ),
    )


def white_space_differs(evidence: Evidence) -> Finding | None:
    """The prompt holds chunks with other white space than they were registered with."""
    found = [one for one in evidence.similar if one.differs == "white space"]
    return _of_similar(
        evidence,
        found,
        FindingCode.WHITE_SPACE_DIFFERS,
        "The prompt holds registered chunks with other white space: only runs of tokens are found.",
        "white space of the prompt's template",
    )


def text_differs(evidence: Evidence) -> Finding | None:
    """The prompt holds chunks with other words than they were registered with."""
    found = [one for one in evidence.similar if one.differs == "text"]
    return _of_similar(
        evidence,
        found,
        FindingCode.TEXT_DIFFERS,
        "The prompt holds texts that are nearly, but not word for word, registered chunks.",
        "text that is registered (splitter, cleaning)",
    )


def _of_similar(
    evidence: Evidence,
    similar: Sequence[SimilarChunk],
    code: FindingCode,
    sentence: str,
    setting: str,
) -> Finding | None:
    if not similar:
        return None
    first, altered = similar[0], [one.altered for one in evidence.chunks if one.altered]
    return Finding(
        code,
        sentence,
        {
            **({"altered": altered[0]} if altered else {}),
            "chunks_found": len(evidence.prompt.chunks),
            "chunks_in_other_form": len(similar),
            "shared_runs_of_words": round(median(one.share for one in similar), 3),
            "registered": first.registered,
            "in_prompt": first.found,
        },
        SettingChange(
            setting,
            repr(first.found),
            f"{first.registered!r}, as registered",
            f"{len(similar)} more chunks are found and reused whole",
        ),
    )


def not_stored(evidence: Evidence) -> Finding | None:
    """Registered chunks have no stored KV."""
    reasons: tuple[ReasonCode, ...] = (ReasonCode.NOT_STORED, ReasonCode.BEING_FILLED)
    chunks = evidence.missed(*reasons)
    if not chunks:
        return None
    return Finding(
        FindingCode.NOT_STORED,
        "The KV of registered chunks in this prompt is not stored, so it is computed.",
        {
            "chunks_missed": chunks,
            "chunks": len(evidence.prompt.chunks),
            "tokens_missed": evidence.missed_tokens(*reasons),
        },
        SettingChange(
            "fill_on_miss",
            "off, or not done yet",
            "on, or run `precompute` (`index --repair`); if chunks were evicted, more host_bytes "
            "or disk_bytes",
            "the chunks are reused",
        ),
        is_fault=evidence.missed_tokens(*reasons) >= MUCH_MISSED * evidence.prompt.tokens,
    )


def no_known_chunk(evidence: Evidence) -> Finding | None:
    """The prompt holds no registered chunk in any form."""
    prompt = evidence.prompt
    if prompt.chunks or evidence.chunks or evidence.similar or evidence.refusal is not None:
        return None
    return Finding(
        FindingCode.NO_KNOWN_CHUNK,
        "The prompt holds no registered chunk.",
        {"known_chunks": prompt.known_chunks, "prompt_tokens": prompt.tokens},
        SettingChange(
            "registered chunks",
            f"{prompt.known_chunks:,} are known",
            "those of this prompt: `precompute` them, and give the kv_path and namespace that "
            "they are registered under",
            "the chunks are found and reused",
        ),
    )


def prompt_too_short(evidence: Evidence) -> Finding | None:
    """The prompt is too short for a gain."""
    tokens, chunks = evidence.prompt.tokens, evidence.missed(ReasonCode.TOO_SHORT)
    blend, full = evidence.blend_seconds, evidence.full_seconds
    gains_little = evidence.is_quiet and blend > 0 and full < LEAST_GAIN * blend
    short = tokens < SHORT_PROMPT and gains_little
    if not chunks and not short:
        return None
    figures: dict[str, Figure] = {
        "prompt_tokens": tokens,
        "reusable_tokens": sum(evidence.prompt.chunk_tokens),
        "min_tokens": evidence.config.min_tokens,
    }
    if not chunks:
        figures |= {"full_seconds": round(full, 4), "blend_seconds": round(blend, 4)}
    return Finding(
        FindingCode.PROMPT_TOO_SHORT,
        f"The prompt is short: below about {SHORT_PROMPT:,} tokens there is little to gain.",
        figures,
        SettingChange(
            "tokens of the prompt",
            f"{tokens:,}",
            f"more passages, from about {SHORT_PROMPT:,} tokens on; min_tokens stays",
            "prefill takes long enough for reuse to save time",
        ),
    )


def prefill_sooner(evidence: Evidence) -> Finding | None:
    """The cost model serves the prompt by ordinary prefill, by measured speeds."""
    told = next(
        (one.reason for one in evidence.reports if one.reason_code == ReasonCode.SLOW), None
    )
    if told is None or not evidence.is_quiet:
        return None
    return Finding(
        FindingCode.PREFILL_SOONER,
        "By the speeds measured here, ordinary prefill is sooner than blending.",
        {"measured": str(told), "prompt_tokens": evidence.prompt.tokens},
        SettingChange(
            "store.tiers",
            "slower than computing",
            "a faster tier for these chunks (host, device), or a lower recompute_ratio",
            "blending becomes sooner, and the cost model chooses it again",
        ),
    )


CHECKS = (
    cannot_be_blended, no_room, guard_stopped, tier_fails, damaged, other_model,
    white_space_differs, text_differs, not_stored, no_known_chunk, prompt_too_short, prefill_sooner,
)  # fmt: skip
