"""Log-probabilities of an answer's tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from cacheblend_rag.engines.answer import LEAST_LOGPROB, TokenLogprob


class RawLogprob(NamedTuple):
    """A token, its log-probability, and (token, log-probability) of the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, token_id: int, likely: Mapping[int, float], most: int) -> Self:
        """Return what vLLM tells of a token: beside it, its dictionary has the ``most`` likely."""
        top = sorted(likely.items(), key=lambda pair: -pair[1])
        return cls(token_id, likely[token_id], tuple(top[:most]))


def with_texts(raw: Iterable[RawLogprob], tokenizer: Any) -> tuple[TokenLogprob, ...]:
    """Return log-probabilities with the tokens' texts; tokens that were ruled out are left out."""

    def text(token_id: int) -> str:
        return str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))

    return tuple(
        TokenLogprob(
            one.token_id,
            text(one.token_id),
            one.logprob,
            tuple(
                (token_id, text(token_id), logprob)
                for token_id, logprob in one.top
                if math.isfinite(logprob) and logprob > LEAST_LOGPROB
            ),
        )
        for one in raw
    )
