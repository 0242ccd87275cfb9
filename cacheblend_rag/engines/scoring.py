"""Scores of given answers: how likely each token was after a blended or an ordinary prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cacheblend_rag.engines.prepare import PromptLike
from cacheblend_rag.engines.question_time import Hints
from cacheblend_rag.report import BlendReport
from cacheblend_rag.settings import BlendConfig


@dataclass(frozen=True)
class ContinuationScore:
    """The model's predictions at each step of a given answer.

    Args:
        log_probs: (tokens, vocabulary) float32, natural logarithms, on the host; row i predicts the
            answer's token i after the prompt and its first i tokens.
        report: how the prompt was prefilled.
    """

    log_probs: Tensor
    report: BlendReport


class ScoringEngine(Protocol):
    """An engine that can score given answers; the embedded one does."""

    def score(
        self,
        prompt: PromptLike,
        continuation: Sequence[int],
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
        full: bool = False,
    ) -> ContinuationScore:
        """Return how likely every token was at each step of a given answer."""
