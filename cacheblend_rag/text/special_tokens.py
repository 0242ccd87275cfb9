"""Finds the special tokens of a tokenizer, and the markers of chat roles."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

CONTROL = re.compile(r"\s*<[|\uff5c].*[|\uff5c]>\s*", re.DOTALL)
"""Typical forms of control tokens, for tokenizers that do not declare them special."""
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Markers:
    """Texts that a tokenizer reads as special tokens; finds them in other texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        # Grouped by first character: most passages hold none of these characters.
        self._by_first: defaultdict[str, list[str]] = defaultdict(list)
        for text in {text for text in texts if len(text) > 1}:
            self._by_first[text[0]].append(text)

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of each marker in a text, overlapping ones too."""
        for first, markers in self._by_first.items():
            if first not in text:
                continue
            for marker in markers:
                at = text.find(marker)
                while at >= 0:
                    yield at, at + len(marker)
                    at = text.find(marker, at + 1)


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the texts that a tokenizer reads as special tokens, by token id.

    Those are the tokens of its roles, other special tokens, and added tokens that look like them or
    that the chat template names. Not included are other added tokens, such as HTML tags, and byte
    tokens.
    """
    ids, texts = (getattr(tokenizer, f"all_special_{what}", ()) for what in ("ids", "tokens"))
    named = dict(zip(ids, texts, strict=True))
    template = str(getattr(tokenizer, "chat_template", None) or "")
    for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        text = token.content
        named_there = len(text.strip()) > 1 and text in template
        if token.special or named_there or CONTROL.fullmatch(text):
            named[token_id] = text
    return {token_id: text for token_id, text in named.items() if not BYTE.fullmatch(text)}
