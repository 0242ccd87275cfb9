"""A long document's chunks hold all of its text, overlap as they were asked to, and fit."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.rag.document_windows import AnalysisPlan, cut_document
from cacheblend_rag.text.encoder import PromptEncoder
from tests.models import make_tokenizer, words
from tests.toy import TOY

SIZES = [(16, 0), (16, 8), (40, 8), (64, 5), (200, 32), (2048, 256)]
STOP, COMMA = "\u3002\uff01\uff1f\uff1b", "\uff0c"
CHINESE = (
    f"第一章讲述了工厂的历史{STOP[0]}它建于一九零二年{COMMA}后来被烧毁{STOP[1]}谁重建了它{STOP[2]}"
    * 40
)


def counting(tokenizer):
    encoder = PromptEncoder(tokenizer)
    return lambda text: len(encoder.chunk(text))


def prose(paragraphs, seed):
    """Paragraphs of sentences, with some lines and blanks between them."""
    draw = random.Random(seed)
    breaks = ["\n\n", "\n", "\n  \n", " ", "\n\n\n\n"]
    return "".join(
        " ".join(f"{words(draw.randrange(1, 30), draw.random())}." for _ in range(4))
        + draw.choice(breaks)
        for _ in range(paragraphs)
    )


@pytest.mark.parametrize(("chunk_tokens", "overlap"), SIZES)
def test_every_character_is_in_a_chunk_and_chunks_overlap_as_said(chunk_tokens, overlap):
    text, count = prose(120, 1), counting(make_tokenizer())
    plan = AnalysisPlan(chunk_tokens=chunk_tokens, overlap=overlap)
    done = cut_document(text, plan, count)
    held = set()
    for one in done:
        assert one.tokens == count(text[one.start : one.end]) <= chunk_tokens
        held.update(range(one.start, one.end))
    assert all(at in held or text[at].isspace() for at in range(len(text)))
    for before, after in pairwise(done):
        shared = count(text[after.start : before.end])
        assert before.start < after.start
        assert before.end < after.end
        assert overlap - plan.piece_tokens < shared <= overlap or shared == overlap == 0
    for one in done[:-1]:
        assert one.tokens > chunk_tokens - plan.piece_tokens


def test_text_without_spaces_is_cut_at_its_own_marks_and_else_anywhere():
    count, plan = counting(load_tokenizer(TOY)), AnalysisPlan(chunk_tokens=512, overlap=0)
    for text, marked in ((CHINESE, 0.9), ("x" * 3000, 0)):
        chunks = cut_document(text, plan, count)
        assert "".join(text[one.start : one.end] for one in chunks) == text
        assert max(one.tokens for one in chunks) <= 512
        ends = sum(text[one.end - 1] in STOP + COMMA for one in chunks)
        assert ends >= len(chunks) * marked
