"""What is logged of requests: a line of each at DEBUG, and a warning of the first needless miss."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from cacheblend_rag.engines.answer import FULL_PREFILL, PROMPT_SCORED, Generation, Request
from cacheblend_rag.reason import ReasonCode
from cacheblend_rag.report import (
    PREFILL_PHASES,
    BlendReport,
    ChunkReport,
    count_chunks,
    reused_and_recomputed,
)
from cacheblend_rag.text.reencoded import FORMS
from cacheblend_rag.text.registry import ChunkRegistry

logger = logging.getLogger(__name__)

CAUSES: Mapping[ReasonCode | None, str] = {
    ReasonCode.UNKNOWN: "its passages were never given to precompute (CacheBlendPrecompute in "
    "LlamaIndex, CacheBlendTransformer in LangChain) of an engine with this registry: kv_path, "
    "namespace",
    ReasonCode.ALTERED_TEXT: "its passages differ from the indexed ones: cut, or changed by a "
    "template",
    ReasonCode.NOT_STORED: "their KV was never computed, or was evicted: precompute them, or give "
    "the engine fill_on_miss=True",
    ReasonCode.OTHER_MODEL: "their KV was computed after another instruction, or by another model "
    "or tokenizer: precompute them with the engine that answers",
}
RE_ENCODED = (
    "its passages stand in it {}, and too few of their tokens are left to find them by: put them "
    "into prompts as they are indexed (json.dumps with ensure_ascii=False)"
)


def log_report(report: BlendReport) -> None:
    """Log a request's summary; codes and numbers only, no text of the prompt."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    why = "" if report.reason is None else f" ({report.reason.code.value})"
    logger.debug(
        "request %s: %d tokens reused, %d recomputed, %d computed%s; %s; first token %.1f ms: %s",
        report.request_id,
        report.reused_tokens,
        report.recomputed_tokens,
        report.computed_tokens,
        why,
        _hits(report.chunks),
        report.seconds.time_to_first_token * 1000,
        _phases(vars(report.seconds), report.seconds.load_by_tier),
    )


def log_blend(
    request_id: str,
    chunks: Sequence[ChunkReport],
    seconds: Mapping[str, float],
    load_by_tier: Mapping[str, float],
) -> None:
    """Log what a worker's blend of a request reused, and its phases."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    logger.debug(
        "request %s: %d tokens reused, %d recomputed; %s; %s",
        request_id,
        *reused_and_recomputed(chunks),
        _hits(chunks),
        _phases(seconds, load_by_tier),
    )


def _hits(chunks: Sequence[ChunkReport]) -> str:
    """Return how many chunks were hits in which tier, and misses by code."""
    found, missed = count_chunks(chunks)
    told = ", ".join(f"{count} {name}" for name, count in sorted((found + missed).items()))
    return f"{found.total()} of {len(chunks)} chunks hit" + (told and f" ({told})")


def _phases(seconds: Mapping[str, float], load_by_tier: Mapping[str, float]) -> str:
    """Return the phases that took time, in milliseconds, and loading by tier."""
    spent = {name: seconds.get(name) for name in PREFILL_PHASES}
    told = " ".join(f"{name} {value * 1000:.1f}" for name, value in spent.items() if value)
    tiers = ", ".join(f"{tier} {value * 1000:.1f}" for tier, value in load_by_tier.items())
    return told + (tiers and f" (load from {tiers})")


class FirstMiss:
    """Warns once, about the first prompt that reuses nothing although chunks were expected.

    Chunks are expected if hints were given, or if the prompt holds known chunks, be it re-encoded.
    """

    def __init__(self, registry: ChunkRegistry) -> None:
        self._registry = registry
        self._said = False

    def see(self, request: Request, answer: Generation) -> None:
        """Check the result of a prompt; an AnswerHook."""
        report, prepared = answer.report, request.prepared
        is_asked = (
            report.reason in (FULL_PREFILL, PROMPT_SCORED) or request.steering.refusal is not None
        )
        uncalled = is_asked or answer.finish_reason == "cancelled"
        is_healing = any(one.reason_code == ReasonCode.BEING_FILLED for one in report.chunks)
        if self._said or report.blended or uncalled or is_healing:
            return
        cause = self._cause(prepared.text, prepared.expects_chunks, answer)
        if cause:
            self._said = True
            logger.warning("nothing was reused of a prompt with retrieved passages: %s", cause)

    def _cause(self, text: str, expected: bool, answer: Generation) -> str:
        codes = Counter(chunk.reason_code for chunk in answer.report.chunks)
        code = codes.most_common(1)[0][0] if codes else None
        if code in {None, ReasonCode.UNKNOWN, ReasonCode.ALTERED_TEXT}:
            for how, undo in FORMS.items():
                if (plain := undo(text)) != text and self._registry.find(plain):
                    return RE_ENCODED.format(how)
        return CAUSES.get(code, answer.report.reason or "") if expected else ""
