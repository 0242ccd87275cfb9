"""Results of one rule on one question, and the file in which an evaluation keeps them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.quality.dataset import EvalQuestion
from cacheblend_rag.quality.fidelity import PromptFidelity
from cacheblend_rag.quality.metrics import exact_match, holds_answer, rouge_l, token_f1
from cacheblend_rag.result_log import ResultLog
from cacheblend_rag.text.prompt import BlendPrompt


@dataclass(frozen=True)
class PromptRecord:
    """One rule's result on one question.

    text: the answer. exact, f1, rouge, holds: its scores. compute_share: as in BlendReport.
    chunk_tokens: tokens of the prompt's chunks. fresh_tokens: those of them that were computed.
    not_blended: why the prompt was not blended, None if it was, or was not meant to be. fidelity:
    to full prefill of the same prompt. ttft_seconds: time to first token. Both are None if they
    were not to be measured.
    """

    text: str
    exact: float
    f1: float
    rouge: float
    holds: float
    compute_share: float
    chunk_tokens: int
    fresh_tokens: int
    not_blended: str | None = None
    fidelity: PromptFidelity | None = None
    ttft_seconds: float | None = None

    @classmethod
    def of(
        cls, generation: Generation, text: str, golds: Sequence[str], **measured: Any
    ) -> PromptRecord:
        """Score an answer. text: what counts as its text. measured: the last three fields."""
        report = generation.report
        return cls(
            text=text,
            exact=exact_match(text, golds),
            f1=token_f1(text, golds),
            rouge=rouge_l(text, golds),
            holds=float(holds_answer(text, golds)),
            compute_share=report.compute_share,
            chunk_tokens=sum(chunk.tokens for chunk in report.chunks),
            fresh_tokens=sum(c.recomputed if c.hit else c.tokens for c in report.chunks),
            **measured,
        )


def question_key(question: EvalQuestion, prompt: BlendPrompt) -> str:
    """Return a hash of all that a question's results depend on."""
    documents = [[d.document_id, d.separator, list(d.chunks)] for d in question.documents]
    passages = [[p.text, p.document_id, list(p.context)] for p in question.passages]
    parts = [prompt.text, prompt.is_rendered, list(question.answers), documents, passages]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class RecordLog(ResultLog[PromptRecord]):
    """The log of an evaluation: one result per rule and question."""

    work, kind = "evaluation", PromptRecord
