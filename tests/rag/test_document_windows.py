"""A long document's chunks hold all of its text, overlap as they were asked to, and fit."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.rag.document_windows import (
    AnalysisPlan,
    cut_document,
    cut_pieces,
    fitting_window,
)
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


def cut(text, plan, count, *, context=lambda tokens: 100):
    return cut_document(text, plan, count, context, document_id="one", collection="long")


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
    plan = AnalysisPlan(chunk_tokens, overlap)
    done = cut(text, plan, count)
    held = set()
    for one in done.chunks:
        assert text[one.start : one.end] == one.chunk.text
        assert one.tokens == count(one.chunk.text) <= chunk_tokens
        held.update(range(one.start, one.end))
    assert all(at in held or text[at].isspace() for at in range(len(text)))
    assert done.tokens == count(text)
    assert done.characters == len(text)
    for before, after in pairwise(done.chunks):
        shared = count(text[after.start : before.end])
        assert before.start < after.start
        assert before.end < after.end
        assert overlap - plan.piece_tokens < shared <= overlap or shared == overlap == 0
    for one in done.chunks[:-1]:
        assert one.tokens > chunk_tokens - plan.piece_tokens


def test_text_without_spaces_is_cut_at_its_own_marks_and_else_anywhere():
    count = counting(load_tokenizer(TOY))
    pieces = list(cut_pieces(CHINESE, 64, count))
    assert "".join(CHINESE[one.start : one.end] for one in pieces) == CHINESE
    assert sum(CHINESE[one.end - 1] in STOP + COMMA for one in pieces) > len(pieces) * 0.9
    solid = "x" * 3000
    pieces = list(cut_pieces(solid, 64, count))
    assert "".join(solid[one.start : one.end] for one in pieces) == solid
    assert max(one.tokens for one in pieces) <= 64


def test_a_chunk_refers_to_the_text_before_it_within_its_room():
    text, count = prose(60, 2), counting(make_tokenizer())
    done = cut(text, AnalysisPlan(64, 16), count, context=lambda tokens: 150 - tokens)
    pieces = {}
    for one in done.chunks:
        before = "".join(one.chunk.context)
        assert text[: one.start].endswith(before)
        assert count(before) <= 150 - one.tokens
        for piece in one.chunk.context:
            pieces.setdefault(piece, set()).add(id(piece))
    assert count("".join(done.chunks[-1].chunk.context)) > 150 - 64 - 4
    long = {piece: ids for piece, ids in pieces.items() if not piece.isspace()}
    assert all(len(ids) == 1 for ids in long.values()), "chunks share their pieces"


def test_windows_are_as_wide_as_the_longest_of_them_allows():
    sizes = [5, 5, 9, 9, 5, 5]
    assert fitting_window(sizes, 5, 100) == 5
    assert fitting_window(sizes, 9, 100) == 6
    assert fitting_window(sizes, 5, 27) == 3
    assert fitting_window(sizes, 5, 18) == 2
    assert fitting_window(sizes, 5, 9) == 1
    assert fitting_window(sizes, 5, 8) == 0


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"chunk_tokens": 15}, "chunk_tokens=15 must be a whole number of at least 16"),
        ({"chunk_tokens": 64.0}, "chunk_tokens=64.0 must be a whole number"),
        ({"overlap": -1}, "overlap=-1 must be"),
        ({"overlap": True}, "overlap=True must be"),
        ({"chunk_tokens": 64, "overlap": 33}, "overlap=33 must be at most half of chunk_tokens=64"),
        ({"window": 0}, "window=0 must be"),
        ({"combine": "vote"}, "combine='vote' must be one of map_reduce, refine"),
    ],
)
def test_wrong_sizes_are_one_line(sizes, said):
    with pytest.raises(ConfigError, match=said) as caught:
        AnalysisPlan(**sizes)
    assert "\n" not in str(caught.value)


def test_there_is_no_context_without_room():
    text, count = prose(20, 3), counting(make_tokenizer())
    done = cut(text, AnalysisPlan(64, 16), count, context=lambda tokens: 0)
    assert not any(one.chunk.context for one in done.chunks)
