"""Has an engine answer a prompt with a trace, and collects what explains how it was served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cacheblend_rag.explanation import Explanation
from cacheblend_rag.report import BlendReport

if TYPE_CHECKING:
    from cacheblend_rag.engines.answering import Hints
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.prepare import PreparedPrompt
    from cacheblend_rag.settings import BlendConfig

COMPARED_TOKENS = 16


@dataclass(frozen=True)
class Cost:
    """What a blend cost and saved, against full prefill of the same prompt.

    Args:
        blend_seconds: time to first token, asked again without a trace.
        full_seconds: time to first token of full prefill.
        divergence: mean Kullback-Leibler divergence of the blend's predictions from full prefill's,
            along full prefill's answer, in nats per token; None if it could not be measured.
        tokens: how many tokens of the answer were compared.
    """

    blend_seconds: float
    full_seconds: float
    divergence: float | None
    tokens: int

    @property
    def speedup(self) -> float:
        """How many times sooner the blend's first token came."""
        return self.full_seconds / self.blend_seconds if self.blend_seconds > 0 else 0.0


@dataclass(frozen=True)
class Explained:
    """A served prompt, explained.

    Args:
        report: of the request.
        tokens: the text of each token of the prompt, in order; empty if it is not known.
        answer: the text that was generated.
        cost: the comparison with full prefill, if it was asked for.
    """

    report: BlendReport
    tokens: tuple[str, ...] = ()
    answer: str = ""
    cost: Cost | None = None

    @property
    def explanation(self) -> Explanation:
        """The report's explanation."""
        return Explanation.of(self.report)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, which ``read_explained`` reads back."""
        return {
            "report": self.report.to_dict(),
            "explanation": self.explanation.to_dict(),
            "tokens": list(self.tokens),
            "answer": self.answer,
            "cost": None if self.cost is None else asdict(self.cost),
        }


def explain_prompt(
    engine: Engine,
    prompt: Any,
    *,
    config: BlendConfig | None = None,
    hints: Hints = (),
    max_tokens: int = COMPARED_TOKENS,
    compare: bool = False,
) -> Explained:
    """Answer a prompt with a trace, and return what explains it.

    engine: answers. prompt, config, hints: as for ``Engine.generate``. max_tokens: of the answer.
    compare: whether full prefill answers, too. The traced request comes first, so that it finds
    the store as it is; it is not the one that is timed against full prefill.

    Raises what ``Engine.generate`` raises.
    """
    from cacheblend_rag.engines.sampling import SamplingParams

    config = config or engine.config
    sampling = SamplingParams.greedy(max_tokens=max_tokens)
    prepared = engine.prepare(prompt, hints)
    asked = config.with_changes(trace=True)
    answer = engine.generate(prepared, sampling, config=asked)
    return Explained(
        report=answer.report,
        tokens=token_texts(engine.tokenizer, prepared),
        answer=answer.text,
        cost=_cost(engine, prepared, config, max_tokens) if compare else None,
    )


def _cost(engine: Engine, prompt: PreparedPrompt, config: BlendConfig, max_tokens: int) -> Cost:
    from cacheblend_rag.engines.sampling import SamplingParams

    # Full prefill uses no cached prefix, so the blend that is compared with it does not either.
    config = config.with_changes(reuse_prefix=False)
    sampling = SamplingParams.greedy(max_tokens=max_tokens)
    engine.generate_full(prompt, SamplingParams.greedy(max_tokens=1))  # first-request costs
    blended = engine.generate(prompt, SamplingParams.greedy(max_tokens=1), config=config)
    full = engine.generate_full(prompt, sampling)
    answer = full.token_ids[:COMPARED_TOKENS]
    found = None
    if blended.report.blended and answer:
        found = engine.compare_with_full_prefill(prompt, answer, config=config)
    return Cost(
        blend_seconds=blended.report.seconds.time_to_first_token,
        full_seconds=full.report.seconds.time_to_first_token,
        divergence=None if found is None else found.blend,
        tokens=len(answer),
    )


def token_texts(tokenizer: Any, prompt: PreparedPrompt) -> tuple[str, ...]:
    """Return the text of each token of a prompt; joined they are the prompt, if that can be told.

    Tokenizers that tell no offsets, or other tokens for the whole text, have each token decoded.
    """
    ids = prompt.token_ids
    return _sliced(tokenizer, prompt.text, ids) or tuple(tokenizer.decode([one]) for one in ids)


def _sliced(tokenizer: Any, text: str, ids: Sequence[int]) -> tuple[str, ...] | None:
    """Return the prompt's text, cut where its tokens begin; None if the tokenizer cannot tell."""
    try:
        for special in (False, True):
            found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
            if list(found["input_ids"]) == list(ids):
                return _cut(text, found["offset_mapping"])
    except (NotImplementedError, TypeError, ValueError, KeyError):
        return None  # a tokenizer without offsets
    return None


def _cut(text: str, offsets: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Return the text from each token's begin to the next one's; a special token has none."""
    texts, done = [], 0
    for start, end in offsets:
        texts.append(text[done : max(done, end)] if end > start else "")
        done = max(done, end)
    return tuple(texts)
