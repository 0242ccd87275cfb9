"""Cuts text into sentences, and sentences into chunks of about equal length."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate

CountTokens = Callable[[str], int]

_END = re.compile(r"[.!?][\"')\]\u201d\u2019]*\s+|\n\s*\n")
_LAST_WORD = re.compile(r"(\w+)[.]$")
_ABBREVIATIONS = re.compile(
    "dr|mr|mrs|ms|st|jr|sr|co|inc|ltd|corp|prof|gen|col|capt|lt|sgt|rev|hon|gov|sen|rep|vs|no|vol|"
    "ca|approx|dept|est|fig|eg|ie|etc|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec"
)
_PIECES = re.compile(r"\w+|[^\w\s]")


def estimate_tokens(text: str) -> int:
    """Return about how many tokens a text has, for where no tokenizer is at hand.

    It counts words and punctuation marks, and adds a fifth: tokenizers split some words.
    """
    return round(1.2 * len(_PIECES.findall(text)))


def split_sentences(text: str) -> list[str]:
    """Return a text's sentences without the white space around them.

    A full stop after a single letter, a common abbreviation, or between digits ends none; a blank
    line does.
    """
    sentences, start = [], 0
    for end in _END.finditer(text):
        if _ends_sentence(text[start : end.end()].rstrip(), text[end.end() : end.end() + 1]):
            sentences.append(text[start : end.end()].strip())
            start = end.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def cut_text(text: str, chunk_tokens: int, count_tokens: CountTokens) -> tuple[str, ...]:
    """Return the text in chunks that end with sentences, as equal in length as these allow.

    chunk_tokens: about how many a chunk has; a sentence that is longer is a chunk by itself.
    """
    sentences = split_sentences(text)
    lengths = [count_tokens(sentence) for sentence in sentences]
    total = sum(lengths)
    count = max(1, round(total / chunk_tokens))
    chunks: list[list[str]] = [[] for _ in range(count)]
    for sentence, length, end in zip(sentences, lengths, accumulate(lengths), strict=True):
        chunks[int((end - length / 2) * count / total)].append(sentence)
    return tuple(" ".join(chunk) for chunk in chunks if chunk)


def _ends_sentence(sentence: str, following: str) -> bool:
    word = _LAST_WORD.search(sentence)
    if word is None:
        return True
    last = word[1].lower()
    if last.isdigit():
        return not following.isdigit()
    return len(last) > 1 and not _ABBREVIATIONS.fullmatch(last)
