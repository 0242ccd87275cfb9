"""Compares a tokenizer's vocabulary with the tokens that a GGUF file lists."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cacheblend_rag.models.gguf.refusal import HUB_FORMAT, CannotConvertError

BYTE_LETTERS = bytes_to_unicode()
SPACE = "\u2581"
"""Stands for a space in SentencePiece vocabularies."""


def check_vocabulary(backend: Tokenizer, tokens: Sequence[str]) -> None:
    """Raise CannotConvertError unless each token has its place in the list as its id.

    Of a token that is listed twice, one id counts.
    """
    for number, token in enumerate(tokens):
        spellings = _spellings(token)
        held = backend.id_to_token(number)
        is_known = any(backend.token_to_id(each) is not None for each in spellings)
        if held not in {None, *spellings} or not is_known:
            raise CannotConvertError(
                f"its tokenizer is read with {held!r} as token {number}, which is {token!r}: "
                f"{HUB_FORMAT}"
            )


def _spellings(token: str) -> set[str]:
    """Return how vocabularies may spell a token: with other characters for spaces or for bytes."""
    by_bytes = "".join(BYTE_LETTERS[byte] for byte in token.encode("utf-8", "surrogatepass"))
    return {token, token.replace(" ", SPACE), by_bytes}
