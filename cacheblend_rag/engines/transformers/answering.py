"""Decodes the answer to a prefilled prompt, and yields its text as it becomes final."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from cacheblend_rag.engines.answer import Delta, FinishReason, Request
from cacheblend_rag.engines.logprobs import RawLogprob, with_texts
from cacheblend_rag.engines.shutdown import working
from cacheblend_rag.engines.transformers.decoding import NextLogits, TextStream, sampled_tokens
from cacheblend_rag.engines.transformers.guiding import Guide
from cacheblend_rag.engines.transformers.prefill import Prefilled


def decoded(
    request: Request,
    prefilled: Prefilled,
    next_logits: NextLogits,
    *,
    tokenizer: Any,
    ends: Collection[int],
    guide: Guide | None,
    tell: Callable[..., Delta],
) -> Iterator[Delta]:
    """Yield text as soon as no later token can change it, and the whole answer at last.

    ends: tokens that end an answer. guide: of the answer's form. tell: makes the last delta of the
    answer's text, tokens, finish reason, prefill report and log-probabilities.
    """
    text = TextStream(tokenizer, request.sampling.stop)
    ends = ends if guide is not None or not request.sampling.ignore_eos else ()
    reason: FinishReason = "length"
    piece, told = "", 0
    raw: list[RawLogprob] = []
    for token, logprob in sampled_tokens(request, prefilled, next_logits, guide):
        if token in ends:
            reason = "stop"
            break
        with working():
            piece = text.feed(token)
            if logprob is not None:
                raw.append(logprob)
        if text.stopped or (guide is not None and guide.is_over):
            reason = "stop"
            break
        if request.cancel.is_set():
            reason = "cancelled"
            break
        if piece:
            yield Delta(piece, logprobs=with_texts(raw[told:], tokenizer))
            piece, told = "", len(raw)
    rest = piece + text.finish()
    logprobs = None if request.sampling.logprobs is None else with_texts(raw, tokenizer)
    last = tell(text.text, text.token_ids, reason, prefilled.report, logprobs=logprobs)
    yield Delta(rest, last.generation, logprobs=(logprobs or ())[told:])
