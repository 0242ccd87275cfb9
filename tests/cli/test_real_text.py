from __future__ import annotations

import random
from collections import Counter

import pytest

from cacheblend_rag.bench.workload import Cutter, draw_real_texts
from cacheblend_rag.demo.passages import load_real_texts
from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.text.encoder import PromptEncoder
from tests.toy import TOY

TEXTS = ("One two three. Four five.", "Six seven.", "Eight nine ten. Eleven twelve thirteen.")


def words(text: str) -> int:
    return len(text.split())


def cutter(seed: int = 0) -> Cutter:
    return Cutter(random.Random(seed), TEXTS, words, "\n\n")


def test_texts_are_cut_one_behind_the_other_and_none_comes_twice():
    pieces, whole = cutter(), "\n\n".join(TEXTS)
    cut = [pieces.cut(4) for _ in range(3)]
    assert [words(piece) for piece in cut] == [4, 4, 4]
    assert sorted(" ".join(cut).split() + pieces.cut(1).split()) == sorted(whole.split())


@pytest.fixture(scope="module")
def encoder():
    return PromptEncoder(load_tokenizer(TOY))


def draw(encoder: PromptEncoder, chunks: int, selector: str = "hkvd"):
    return draw_real_texts(
        random.Random(3),
        encoder,
        chunks=chunks,
        chunk_tokens=512,
        question_tokens=32,
        selector=selector,
        name="texts",
    )


def test_chunks_are_as_long_as_words_allow_and_share_no_text(encoder):
    texts = draw(encoder, 32)
    assert all(500 <= len(encoder.chunk(chunk.text)) <= 512 for chunk in texts.chunks)
    assert 20 <= len(encoder.chunk(texts.question)) <= 32
    cut, source = (
        Counter(word for text in texts for word in text.split())
        for texts in ((chunk.text for chunk in texts.chunks), load_real_texts().passages)
    )
    assert cut.total() > 5000
    assert cut <= source
    assert len(texts.prompt().encode(encoder).token_ids) <= texts.most_tokens


def test_chunks_of_a_prior_have_those_before_them_as_context(encoder):
    first, second, third = draw(encoder, 3, "prior").chunks
    assert tuple(third.context)[::2] == (first.text, second.text)
    assert not first.context
