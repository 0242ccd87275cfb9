"""Fidelity: how near a blend's predictions are to those of full prefill, on one prompt.

The answer that is looked at is full prefill's own: its greedy answer of at most so many tokens, its
end token included if it ends before, so at least one. Both ways predict each of its tokens after
the ones before it (teacher forcing). Log-probabilities are float32; sums are in float64.
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
from cacheblend_rag.settings import BlendConfig

if TYPE_CHECKING:
    from cacheblend_rag.engines.transformers.engine import TransformersEngine
    from cacheblend_rag.engines.transformers.prefill import ContinuationScore

TOKENS = 16
PLACE_OF_END = 0
"""Stands for the end token while its place is scored; any token would do there."""


@dataclass(frozen=True)
class PromptFidelity:
    """One prompt's predictions by one setting, compared with those of full prefill.

    kl_first: KL(full prefill || setting) of the answer's first token, in nats. kl: the mean over
    the answer's tokens. top1: share of its tokens that are the setting's most likely ones, too.
    same_answer: whether all are, so that the setting's own greedy answer is the same. gold_logprob:
    the natural logarithm of the best gold answer's probability by the setting; None without gold
    answers. gold_tokens: how many tokens that answer has.
    """

    kl_first: float
    kl: float
    top1: float
    same_answer: bool
    gold_logprob: float | None = None
    gold_tokens: int = 0

    @property
    def gold_logprob_mean(self) -> float | None:
        """``gold_logprob`` per token."""
        return None if self.gold_logprob is None else self.gold_logprob / self.gold_tokens


@dataclass(frozen=True)
class Reference:
    """Full prefill's answer to a prompt, which settings are compared with.

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
    def of_itself(self) -> PromptFidelity:
        """Full prefill's own figures: no divergence, and the gold answer's probability."""
        return PromptFidelity(0.0, 0.0, 1.0, True, self.gold_logprob, len(self.gold))


def reference(
    engine: TransformersEngine,
    prompt: PromptLike,
    golds: Sequence[str] = (),
    tokens: int = TOKENS,
    *,
    sampling: SamplingParams | None = None,
) -> Reference:
    """Answer a prompt by full prefill and keep the log-probabilities, in one prefill.

    golds: gold answers, each tried with and without a space before it, as templates differ. tokens:
    most tokens of the answer that is compared. sampling: of the answer, greedy and without stop
    strings; by default so many tokens. Raises the errors of TransformersEngine.score.
    """
    tried = _gold_tokens(engine, golds)
    told, (found, *scores) = engine.generate_and_score(
        prompt,
        sampling or SamplingParams.greedy(tokens),
        lambda answer: [_forced(answer, tokens), *tried],
        full=True,
    )
    # The end token is what full prefill finds most likely where the answer ends.
    answer = _forced(told, tokens)
    if len(answer) > len(told.token_ids):
        answer = (*answer[:-1], int(found.log_probs[-1].argmax()))
    scored = [
        (_log_prob(score.log_probs, gold), gold) for score, gold in zip(scores, tried, strict=True)
    ]
    likely, gold = max(scored, default=(None, ()))
    return Reference(answer, found.log_probs, gold, likely, told)


def compare(
    reference: Reference,
    engine: TransformersEngine,
    prompt: PromptLike,
    config: BlendConfig | None = None,
    *,
    full: bool = False,
) -> PromptFidelity:
    """Compare a setting's predictions with a reference, which may be of another prompt.

    config: how KV is blended. full: compare full prefill of ``prompt`` instead. Raises the errors
    of TransformersEngine.score.
    """
    scores = engine.score_each(prompt, _asked(reference), config=config, full=full)
    return _compared(reference, scores)


def answer_and_compare(
    reference: Reference,
    engine: TransformersEngine,
    prompt: PromptLike,
    sampling: SamplingParams,
    config: BlendConfig | None = None,
    *,
    full: bool = False,
) -> tuple[Generation, PromptFidelity]:
    """As compare, and generate the setting's own answer too, all after one prefill."""
    told, scores = engine.generate_and_score(
        prompt, sampling, lambda _: _asked(reference), config=config, full=full
    )
    return told, _compared(reference, scores)


def divergences(wanted: Tensor, found: Tensor) -> Tensor:
    """Return KL(wanted || found) of each token, (tokens,) float64, in nats.

    wanted, found: (tokens, vocabulary) log-probabilities.
    """
    exact, other = wanted.double(), found.double()
    terms = exact.exp() * (exact - other)
    return terms.where(exact > -torch.inf, 0.0).sum(-1).clamp(min=0.0)


def _asked(reference: Reference) -> list[tuple[int, ...]]:
    """Return the token sequences to score: the reference's answer, and its gold answer if any."""
    return [reference.answer, *([reference.gold] if reference.gold else [])]


def _forced(told: Generation, tokens: int) -> tuple[int, ...]:
    """Return an answer's first tokens; if it ends earlier, then a placeholder for EOS."""
    begun = told.token_ids[:tokens]
    ended = told.finish_reason == "stop" and len(begun) < tokens
    return (*begun, PLACE_OF_END) if ended else begun


def _compared(reference: Reference, scores: Sequence[ContinuationScore]) -> PromptFidelity:
    """Compare with a reference; scores: of the sequences that ``_asked`` returned."""
    found, *of_gold = (score.log_probs for score in scores)
    kl = divergences(reference.log_probs, found)
    same = reference.log_probs.argmax(-1) == found.argmax(-1)
    return PromptFidelity(
        kl_first=float(kl[0]),
        kl=float(kl.mean()),
        top1=float(same.double().mean()),
        same_answer=bool(same.all()),
        gold_logprob=_log_prob(of_gold[0], reference.gold) if of_gold else None,
        gold_tokens=len(reference.gold),
    )


def _gold_tokens(engine: TransformersEngine, golds: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the different ways in which the gold answers are tokenized."""
    texts = [f"{before}{gold}" for gold in golds for before in (" ", "")]
    return [tokens for tokens in dict.fromkeys(map(engine.tokenize, texts)) if tokens]


def _log_prob(log_probs: Tensor, answer: Sequence[int]) -> float:
    """Return the log-probability of a whole answer, given those of every token at its steps."""
    chosen = torch.tensor(answer)[:, None]
    return float(log_probs.double().gather(1, chosen).sum())
