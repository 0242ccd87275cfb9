"""Compares a tokenizer's vocabulary with the tokens that a GGUF file lists."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cacheblend_rag.models.gguf.refusal import HUB_FORMAT, CannotConvertError

BYTE_LETTERS = bytes_to_unicode()
SPACE = "\u2581"
"""The character for a space in SentencePiece vocabularies."""


def check_merges(tokens: Sequence[str], merges: Sequence[str]) -> None:
    """Raise CannotConvertError unless each merge joins two tokens to a third."""
    known = set(tokens)
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= known:
            raise CannotConvertError(
                f"its tokenizer merges {left!r} and {right!r}, which are no tokens or make none: "
                f"{HUB_FORMAT}"
            )


def check_vocabulary(backend: Tokenizer, tokens: Sequence[str]) -> None:
    """Raise CannotConvertError unless each token's id is its index in the list.

    For a token that is listed twice, either id is right.
    """
    for number, token in enumerate(tokens):
        spellings = _spellings(token)
        held = backend.id_to_token(number)
        is_known = any(backend.token_to_id(each) is not None for each in spellings)
        if held not in {None, *spellings} or not is_known:
            raise CannotConvertError(
                f"transformers reads token {number} of its tokenizer as {held!r}, not {token!r}: "
                f"{HUB_FORMAT}"
            )


def _spellings(token: str) -> set[str]:
    """Return a token's spellings in vocabularies: with other characters for spaces or bytes."""
    by_bytes = "".join(BYTE_LETTERS[byte] for byte in token.encode("utf-8", "surrogatepass"))
    return {token, token.replace(" ", SPACE), by_bytes}
