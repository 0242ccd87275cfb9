"""What an answer tells beside the API's own fields: its report, and the passages it is from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cacheblend_rag.api.answers import Asked
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.printable import one_line

if TYPE_CHECKING:
    from cacheblend_rag.rag.ordering import Source


def extra_of(asked: Asked, answers: Sequence[Generation]) -> dict[str, Any]:
    """Return the field ``cacheblend``: the report of the first answer, and the sources if any."""
    report = answers[0].report.to_dict()
    if asked.sources is None:
        return {"report": report}
    return {"sources": [source.to_dict() for source in asked.sources], "report": report}


def sources_text(sources: Sequence[Source]) -> str:
    """Return a short list of documents for the end of an answer; "" without sources."""
    names = dict.fromkeys(one_line(source.chunk.document_id or "") for source in sources)
    listed = "".join(f"\n- {name}" for name in names if name)
    return f"\n\nSources:{listed}" if listed else ""
