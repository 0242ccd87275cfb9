"""Log-probabilities of an answer's tokens, as each route tells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cacheblend_rag.engines.answer import LEAST_LOGPROB, TokenLogprob


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return them as chat completions have them."""
    return {"content": response_logprobs(tokens), "refusal": None}


def response_logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return them as responses have them: a list of tokens."""
    return [one.to_openai() for one in tokens]


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Return them as completions have them; offset: where the first token's text begins."""
    told = [one.to_openai() for one in tokens]
    offsets = []
    for one in told:
        offsets.append(offset)
        offset += len(one["token"])
    return {
        "tokens": [one["token"] for one in told],
        "token_logprobs": [one["logprob"] for one in told],
        "top_logprobs": [
            {text: max(logprob, LEAST_LOGPROB) for _, text, logprob in one.top} for one in tokens
        ],
        "text_offset": offsets,
    }
