"""Known texts are not encoded again, and prompts have the same tokens as without."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.encoder import PromptEncoder
from cacheblend_rag.text.prompt import BlendPrompt
from tests.tokenizer_kinds import CORPUS, END, KINDS, START, UNUSABLE, tokenizer_of

WORDS = [word for line in CORPUS for word in line.split()]
UNSKIPPED = {"unigram", *UNUSABLE}
"""Kinds whose tokens inside of a text are not known to be independent of what is beside it."""
EDGES = ["", " ", "\n\n", "(", " half", "way ", f"{END}\n{START}user\n", "\u00e9\u4e2d"]
edges = st.sampled_from(EDGES)


def passage(seed: int, words: int = 120) -> str:
    drawn = random.Random(seed)
    return " ".join(drawn.choice(WORDS) for _ in range(words)).replace(" _", "_")


class Counting:
    """A tokenizer that keeps the texts it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def encode(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        return self._tokenizer.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    @property
    def characters(self) -> int:
        return sum(map(len, self.texts))


def counting(kind: str = "tiktoken") -> tuple[Counting, PromptEncoder]:
    tokenizer = Counting(tokenizer_of(kind))
    return tokenizer, PromptEncoder(tokenizer)


def both_ways(tokenizer: Any, prompt: BlendPrompt) -> tuple[Any, Any]:
    """A prompt's tokens with texts that are known, and by an encoder that keeps none."""
    encoder = PromptEncoder(tokenizer)
    prompt.encode(encoder)
    return prompt.encode(encoder), prompt.encode(PromptEncoder(tokenizer, known_bytes=0))


@pytest.mark.parametrize("kind", [*KINDS, *UNUSABLE])
@settings(max_examples=25, deadline=None)
@given(
    parts=st.lists(st.tuples(edges, st.integers(0, 3), edges, edges), min_size=1, max_size=4),
    question=edges,
)
def test_prompts_have_the_tokens_of_the_whole_text(
    kind: str, parts: list[tuple[str, int, str, str]], question: str
) -> None:
    pieces: list[str | Chunk] = []
    for before, seed, begins, ends in parts:
        pieces += [before, Chunk(f"{begins}{passage(seed)}{ends}")]
    prompt = BlendPrompt.of(*pieces, f"{question}Why?")
    kept, new = both_ways(tokenizer_of(kind), prompt)
    assert kept == new
    if not any(mark in chunk for _, _, *edges in parts for chunk in edges for mark in (START, END)):
        assert list(kept.token_ids) == tokenizer_of(kind).encode(prompt.text)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_edges_of_known_chunks_are_encoded_again(kind: str) -> None:
    tokenizer, encoder = counting(kind)
    chunks = [Chunk(passage(seed)) for seed in range(4)]
    for chunk in chunks:
        encoder.chunk(chunk.text)
    tokenizer.texts.clear()
    prompt = BlendPrompt.of("Context: ", *chunks, "\nWhy?")
    prompt.encode(encoder)
    size = sum(len(chunk.text) for chunk in chunks)
    assert (tokenizer.characters < size / 2) == (kind not in UNSKIPPED)


def test_texts_used_last_are_kept_within_a_number_of_bytes() -> None:
    tokenizer = Counting(tokenizer_of("tiktoken"))
    encoder = PromptEncoder(tokenizer, known_bytes=12_000)
    texts = [passage(seed) for seed in range(12)]
    for text in texts:
        encoder.chunk(text)
        encoder.chunk(texts[0])  # used again and again

    def encodes(text: str) -> bool:
        tokenizer.texts.clear()
        encoder.chunk(text)
        return bool(tokenizer.texts)

    assert not encodes(texts[0])
    assert not encodes(texts[-1])
    assert encodes(texts[1])
    assert not encodes(texts[1])
    encoder.chunk(passage(1, words=20_000))  # larger than the room: others are kept
    assert not encodes(texts[1])


def _superwords() -> PreTrainedTokenizerFast:
    """A tokenizer with a token across two words."""
    letters = [*"abcdefghijklmnopqrstuvwxyz .", "lampxy"]
    merges = [("e", " "), ("e ", "l")]
    vocabulary = {text: i for i, text in enumerate([*letters, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="."))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def _swallowing() -> Any:
    """A tokenizer with a word that takes the spaces after it along."""
    tokenizer = copy.deepcopy(tokenizer_of("tiktoken"))
    tokenizer.add_tokens([AddedToken("lamp", rstrip=True, normalized=False)])
    return tokenizer


def _with_marker() -> Any:
    """A tokenizer with a special token of two words."""
    tokenizer = copy.deepcopy(tokenizer_of("tiktoken"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end of turn>"]})
    return tokenizer


@pytest.mark.parametrize("make", [_superwords, _swallowing, _with_marker])
def test_where_a_token_may_lie_across_words_prompts_are_encoded_whole(make: Any) -> None:
    tokenizer = Counting(make())
    encoder = PromptEncoder(tokenizer)
    text = "the lamp of the harbour lit the ships " * 20
    prompt = BlendPrompt.of(Chunk(text), "why")
    for _ in range(2):
        tokenizer.texts.clear()
        assert list(prompt.encode(encoder).token_ids) == make().encode(prompt.text)
        assert prompt.text in tokenizer.texts
