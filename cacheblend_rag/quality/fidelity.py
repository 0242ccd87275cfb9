"""Fidelity: how near a rule's predictions are to those of full prefill, on one prompt.

The answer that is looked at is full prefill's own greedy answer, its end token included, so at
least one token. Both predict each of its tokens after the ones before it (teacher forcing).
Log-probabilities are float32; sums are in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.prepare import PromptLike
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers.loading import is_quantized
from cacheblend_rag.engines.transformers.trial import same_logits
from cacheblend_rag.settings import BlendConfig

if TYPE_CHECKING:
    from cacheblend_rag.engines.transformers.engine import TransformersEngine

PLACE_OF_END = 0
"""Stands for the end token while its place is scored; any token would do there."""


@dataclass(frozen=True)
class Fidelity:
    """One prompt's predictions by one rule, compared with full prefill's.

    Args:
        kl: KL(full prefill || rule) in nats, the mean over the answer's tokens.
        top1: share of the answer's tokens that are the rule's most likely ones, too. This and what
            follows only the embedded engine tells.
        same_answer: whether all are, so that the rule's own greedy answer is the same.
        gold_logprob: natural logarithm of the best gold answer's probability; None without one.
        exact: whether predictions differ by rounding alone.
    """

    kl: float
    top1: float | None = None
    same_answer: bool | None = None
    gold_logprob: float | None = None
    exact: bool | None = None


@dataclass(frozen=True)
class Reference:
    """Full prefill's answer to a prompt, which rules are compared with.

    answer: its tokens, the end token included. log_probs: (tokens, vocabulary) float32, its
    predictions. gold: tokens of the gold answer that it finds most likely; empty without gold
    answers. gold_logprob: of that. generation: the answer as the engine gave it.
    """

    answer: tuple[int, ...]
    log_probs: Tensor
    gold: tuple[int, ...]
    gold_logprob: float | None
    generation: Generation

    @property
    def of_itself(self) -> Fidelity:
        """Full prefill's own figures: no divergence, and the gold answer's probability."""
        return Fidelity(0.0, 1.0, True, self.gold_logprob, True)


def reference(
    engine: TransformersEngine, prompt: PromptLike, golds: Sequence[str], sampling: SamplingParams
) -> Reference:
    """Answer a prompt by full prefill and keep the log-probabilities, in one prefill.

    golds: gold answers, each tried with and without a space before it, as templates differ.
    sampling: of the answer, greedy and without stop strings. Raises the errors of
    TransformersEngine.score.
    """
    tried = _gold_tokens(engine, golds)
    told, (found, *scores) = engine.generate_and_score(
        prompt, sampling, lambda answer: [_forced(answer), *tried], full=True
    )
    # The end token is what full prefill finds most likely where the answer ends.
    answer = _forced(told)
    if len(answer) > len(told.token_ids):
        answer = (*answer[:-1], int(found.log_probs[-1].argmax()))
    scored = [
        (_log_prob(score.log_probs, gold), gold) for score, gold in zip(scores, tried, strict=True)
    ]
    likely, gold = max(scored, default=(None, ()))
    return Reference(answer, found.log_probs, gold, likely, told)


def answer_and_compare(
    reference: Reference,
    engine: TransformersEngine,
    prompt: PromptLike,
    sampling: SamplingParams,
    config: BlendConfig | None,
) -> tuple[Generation, Fidelity]:
    """Answer a prompt and compare predictions with a reference's, in one prefill.

    prompt: may be another one than the reference's. config: how KV is blended; None is full
    prefill. Raises the errors of TransformersEngine.score.
    """
    asked = [reference.answer, *([reference.gold] if reference.gold else [])]
    told, scores = engine.generate_and_score(
        prompt, sampling, lambda _: asked, config=config, full=config is None
    )
    found, *of_gold = (score.log_probs for score in scores)
    kl, model = divergences(reference.log_probs, found), engine.model
    same = reference.log_probs.argmax(-1) == found.argmax(-1)
    return told, Fidelity(
        kl=float(kl.mean()),
        top1=float(same.double().mean()),
        same_answer=bool(same.all()),
        gold_logprob=_log_prob(of_gold[0], reference.gold) if of_gold else None,
        exact=same_logits(found, reference.log_probs, model.dtype, quantized=is_quantized(model)),
    )


def divergences(wanted: Tensor, found: Tensor) -> Tensor:
    """Return KL(wanted || found) of each token, (tokens,) float64, in nats.

    wanted, found: (tokens, vocabulary) log-probabilities.
    """
    exact, other = wanted.double(), found.double()
    terms = exact.exp() * (exact - other)
    return terms.where(exact > -torch.inf, 0.0).sum(-1).clamp(min=0.0)


def _forced(told: Generation) -> tuple[int, ...]:
    """Return an answer's tokens; if the model ended it, then a placeholder for the end token."""
    return (*told.token_ids, PLACE_OF_END) if told.finish_reason == "stop" else told.token_ids


def _gold_tokens(engine: TransformersEngine, golds: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the different ways in which the gold answers are tokenized."""
    texts = [f"{before}{gold}" for gold in golds for before in (" ", "")]
    return [tokens for tokens in dict.fromkeys(map(engine.tokenize, texts)) if tokens]


def _log_prob(log_probs: Tensor, answer: Sequence[int]) -> float:
    """Return the log-probability of a whole answer, given those of every token at its steps."""
    chosen = torch.tensor(answer)[:, None]
    return float(log_probs.double().gather(1, chosen).sum())
