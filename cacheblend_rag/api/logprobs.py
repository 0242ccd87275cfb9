"""Log-probabilities of an answer's tokens, as each route tells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cacheblend_rag.engines.answer import TokenLogprob

LEAST = -9999.0
"""Stands for the logarithm of 0, which JSON cannot hold; as in vLLM."""


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return them as chat completions have them."""
    return {"content": response_logprobs(tokens), "refusal": None}


def response_logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return them as responses have them: a list of tokens."""
    return [
        {
            **_plain(one.token, one.logprob),
            "top_logprobs": [_plain(text, value) for _, text, value in one.top],
        }
        for one in tokens
    ]


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Return them as completions have them; offset: where the first token's text begins."""
    offsets = []
    for one in tokens:
        offsets.append(offset)
        offset += len(one.token)
    return {
        "tokens": [one.token for one in tokens],
        "token_logprobs": [max(one.logprob, LEAST) for one in tokens],
        "top_logprobs": [{text: max(value, LEAST) for _, text, value in one.top} for one in tokens],
        "text_offset": offsets,
    }


def _plain(text: str, value: float) -> dict[str, Any]:
    spelled = list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": max(value, LEAST), "bytes": spelled}
