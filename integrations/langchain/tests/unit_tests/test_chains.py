"""What create_cacheblend_chain refuses before a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest
from cacheblend_rag.errors import ConfigError
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_cacheblend import ChatCacheBlend, create_cacheblend_chain
from tests.models import toy_engine

EMBEDDING = DeterministicFakeEmbedding(size=4)
DOCUMENTS = [Document("The river is quiet.")]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"llm": FakeListChatModel(responses=[])}, "llm must be an instance of ChatCacheBlend"),
        ({"documents_or_retriever": ["text"]}, "documents_or_retriever must be an instance of"),
        ({"documents_or_retriever": []}, "documents_or_retriever holds no Document"),
        (
            {"documents_or_retriever": InMemoryVectorStore(EMBEDDING)},
            "documents_or_retriever must be an instance of Runnable",
        ),
        ({"embedding": None}, "embedding must be given together with Documents"),
        ({"embedding": "all-MiniLM-L6-v2"}, "embedding must be an instance of Embeddings"),
        ({"prompt": "{context}"}, "prompt must be an instance of BasePromptTemplate"),
        ({"prompt": ChatPromptTemplate.from_template("{input}")}, "prompt must take 'context'"),
        (
            {"document_prompt": PromptTemplate.from_template("{source}")},
            "document_prompt must take 'page_content', not only ['source']",
        ),
        ({"document_separator": 3}, "document_separator must be a valid string"),
        ({"order": "best"}, "order must be 'score', 'document' or 'reverse'"),
        ({"k": 0}, "k must be greater than or equal to 1"),
    ],
)
def test_a_wrong_argument_is_named(given: dict[str, Any], told: str) -> None:
    arguments = {
        "documents_or_retriever": DOCUMENTS,
        "llm": ChatCacheBlend(model="no-such-model"),
        "embedding": EMBEDDING,
    }
    with pytest.raises(ConfigError) as raised:
        create_cacheblend_chain(**{**arguments, **given})
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("question", [None, 3, {"question": "Where?"}, {"input": None}])
def test_a_chain_is_asked_a_question(question: Any) -> None:
    retriever = RunnableLambda(lambda _: DOCUMENTS)
    chain = create_cacheblend_chain(retriever, ChatCacheBlend(engine=toy_engine()))
    with pytest.raises(ConfigError, match="the chain takes a question, or a dict that holds it"):
        chain.invoke(question)
