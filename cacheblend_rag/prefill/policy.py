"""When blending a prompt is not worth it: the rule and its words, for every engine."""

from __future__ import annotations

from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import MissReason

NO_CHUNK = Reason(ReasonCode.NO_CHUNK, "no known chunk in the prompt")
NOT_STORED = Reason(ReasonCode.NOT_STORED, "no chunk of the prompt is stored")
UNREADABLE = Reason(ReasonCode.UNREADABLE, "no stored chunk could be read")


def too_little(reusable: int, least: int) -> tuple[Reason, MissReason | None] | None:
    """Return why so few tokens are not worth blending, and what to say of their chunks.

    reusable: tokens of chunks that are stored, or known to be there. least: ``min_tokens``. None
    when they are worth it; no word of the chunks leaves the reason to the store.
    """
    if reusable == 0:
        return NOT_STORED, None
    if reusable < least:
        why = f"{reusable} reusable tokens are fewer than min_tokens={least}"
        return Reason(ReasonCode.TOO_SHORT, why), "too short"
    return None
