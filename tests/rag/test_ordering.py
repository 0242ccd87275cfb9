from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from cacheblend_rag.rag.ordering import PassageOrder, Source, arranged
from cacheblend_rag.text.chunk import Chunk


def source(document, position, score):
    return Source(Chunk(f"{document}{position}", document), position, score)


@pytest.mark.parametrize(
    ("order", "texts"),
    [
        (PassageOrder.SCORE, ["b1", "a2", "b0", "a0"]),
        (PassageOrder.REVERSE, ["a0", "b0", "a2", "b1"]),
        (PassageOrder.DOCUMENT, ["b0", "b1", "a0", "a2"]),
    ],
)
def test_passages_stand_in_the_order_asked_for(order, texts):
    found = [source("b", 1, 0.9), source("a", 2, 0.8), source("b", 0, 0.7), source("a", 0, 0.6)]
    assert [source.chunk.text for source in arranged(found, order)] == texts


@pytest.mark.parametrize("seed", range(20))
def test_documents_are_kept_together_and_best_first(seed):
    """Passages are (document, position); None is no document, so that nothing stands with it."""
    rng = random.Random(seed)
    found = [(rng.choice(["a", "b", None]), rng.randrange(4)) for _ in range(9)]
    placed = PassageOrder.DOCUMENT.arrange(
        found,
        document_of=lambda passage: passage[0],
        positions_of=lambda together: [position for _, position in together],
    )
    assert Counter(placed) == Counter(found)
    named = [document for document, _ in placed if document]
    assert list(dict.fromkeys(named)) == list(dict.fromkeys(d for d, _ in found if d))
    changes = sum(one != other for one, other in pairwise(named))
    assert changes == len(set(named)) - 1
    for document in set(named):
        positions = [position for of, position in placed if of == document]
        assert positions == sorted(positions)
    alone = [passage for passage in placed if passage[0] is None]
    assert alone == [passage for passage in found if passage[0] is None]


def test_at_equal_positions_the_better_passage_stays_first():
    found = [("a", "best"), ("b", "second"), ("a", "third")]
    placed = PassageOrder.DOCUMENT.arrange(
        found,
        document_of=lambda passage: passage[0],
        positions_of=lambda together: [7 for _ in together],
    )
    assert placed == [("a", "best"), ("a", "third"), ("b", "second")]
