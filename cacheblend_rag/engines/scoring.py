"""Scores of given answers: how likely each token was after a blended or an ordinary prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.prepare import PromptLike
from cacheblend_rag.engines.question_time import Hints
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError, PromptTooLongError
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
        """Return how likely every token was at each step of a given answer.

        Args:
            prompt: as for generate. It is prefilled as generate does, so that the given answer has
                no part in the choice of what is recomputed.
            continuation: the answer's tokens, at least one.
            config: as for generate.
            hints: as for generate.
            full: whether to prefill without stored KV, as generate_full does.

        Raises:
            PromptError: when the prompt is empty.
            PromptTooLongError: when prompt and answer are longer than the context window.
            ConfigError: when there is no token to score, or ``config`` does not suit the model.
            OutOfMemoryError: when there is no memory for it.
        """
        return self.score_each(prompt, [continuation], config=config, hints=hints, full=full)[0]

    def score_each(
        self,
        prompt: PromptLike,
        continuations: Sequence[Sequence[int]],
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
        full: bool = False,
    ) -> tuple[ContinuationScore, ...]:
        """Return the scores of several given answers after one prefill.

        Args:
            prompt: as for score.
            continuations: the answers' tokens; each is scored as if it were alone.
            config: as for score.
            hints: as for score.
            full: as for score.
        """
        ...

    def generate_and_score(
        self,
        prompt: PromptLike,
        sampling: SamplingParams,
        continuations: Callable[[Generation], Sequence[Sequence[int]]],
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
        full: bool = False,
    ) -> tuple[Generation, tuple[ContinuationScore, ...]]:
        """Generate an answer, and score given answers by teacher forcing, after one prefill.

        Args:
            prompt: as for score.
            sampling: how the answer is drawn.
            continuations: gets the answer, and returns the answers to score.
            config: as for score.
            hints: as for score.
            full: as for score.
        """
        ...


def check_scored(
    prompt_tokens: int, continuations: Sequence[Sequence[int]], context_window: int
) -> None:
    """Check continuations before they are scored.

    Raises ConfigError for one without tokens, and PromptTooLongError if the longest does not fit
    behind the prompt.
    """
    if not all(continuations):
        raise ConfigError("continuation is empty: give at least one token to score")
    tokens = prompt_tokens + max(map(len, continuations), default=0)
    if tokens > context_window:
        raise PromptTooLongError(tokens, context_window)
