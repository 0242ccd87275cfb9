"""The rule for prompts with too few reusable tokens to blend, and its reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cacheblend_rag.kv.fetch import Threshold
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import ChunkReport, MissReason

NO_CHUNK = Reason(ReasonCode.NO_CHUNK, "no known chunk in the prompt")
NOT_STORED = Reason(ReasonCode.NOT_STORED, "no chunk of the prompt is stored")
UNREADABLE = Reason(ReasonCode.UNREADABLE, "no stored chunk could be read")


def threshold(placed: Sequence[PlacedChunk], least: int) -> Threshold:
    """Return how much of a prompt must be found before its layers are read; least: min_tokens."""
    return Threshold([chunk.end - chunk.start for chunk in placed], least)


def refusal(found: Sequence[ChunkReport], least: int) -> tuple[Reason, list[ChunkReport]] | None:
    """Decide by the found chunks of a prompt, before any layer is read.

    found: reports as if all found chunks were used. least: ``min_tokens``. Returns why the prompt
    is not blended, and the reports of its chunks; None if it is blended.
    """
    refused = too_little(sum(chunk.tokens for chunk in found if chunk.hit), least)
    if refused is None:
        return None
    reason, miss = refused
    if miss is None and any(chunk.reason not in ("not stored", "other model") for chunk in found):
        reason = UNREADABLE
    return reason, missed(found, miss) if miss else list(found)


def missed(found: Sequence[ChunkReport], reason: MissReason) -> list[ChunkReport]:
    """Report the found chunks as missed for ``reason``, the others unchanged."""
    return [
        replace(chunk, hit=False, reason=reason, tier=None) if chunk.hit else chunk
        for chunk in found
    ]


def too_little(reusable: int, least: int) -> tuple[Reason, MissReason | None] | None:
    """Return why so few tokens are not worth blending, and the miss reason of their chunks.

    reusable: tokens of chunks that are stored. least: ``min_tokens``. None if blending is worth it;
    without a miss reason the store gives it.
    """
    if reusable == 0:
        return NOT_STORED, None
    if reusable < least:
        why = f"{reusable} reusable tokens are fewer than min_tokens={least}"
        return Reason(ReasonCode.TOO_SHORT, why), "too short"
    return None
