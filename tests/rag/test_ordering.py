from __future__ import annotations

import pytest

from cacheblend_rag.rag.prompt import PassageOrder


@pytest.mark.parametrize(
    ("order", "texts"),
    [
        (PassageOrder.SCORE, ["b1", "a2", "b0", "a0"]),
        (PassageOrder.REVERSE, ["a0", "b0", "a2", "b1"]),
        (PassageOrder.DOCUMENT, ["b0", "b1", "a0", "a2"]),
    ],
)
def test_passages_stand_in_the_order_asked_for(order, texts):
    placed = order.arrange(
        ["b1", "a2", "b0", "a0"],
        document_of=lambda passage: passage[0],
        positions_of=lambda together: [int(passage[1]) for passage in together],
    )
    assert placed == texts


def test_no_document_is_one_of_that_passage_alone_and_equal_positions_stay():
    """Passages are (document, name)."""
    found = [("a", "best"), (None, "x"), ("b", "second"), (None, "y"), ("a", "third")]
    placed = PassageOrder.DOCUMENT.arrange(
        found,
        document_of=lambda passage: passage[0],
        positions_of=lambda together: [7 for _ in together],
    )
    assert placed == [("a", "best"), ("a", "third"), (None, "x"), ("b", "second"), (None, "y")]
