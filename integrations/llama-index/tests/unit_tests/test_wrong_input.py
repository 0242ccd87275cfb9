"""What is refused in one line, naming the argument, before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import Document, PromptTemplate
from llama_index.core.llms import MockLLM
from llama_index.core.schema import TextNode
from pydantic import BaseModel

from cacheblend_rag import ConfigError
from llama_index.llms.cacheblend import (
    CacheBlendLLM,
    CacheBlendPrecompute,
    CacheBlendPromptHelper,
    CacheBlendVectorStore,
    cacheblend_chat_engine,
    cacheblend_query_engine,
    cacheblend_retriever_tool,
)
from llama_index.postprocessor.cacheblend import CacheBlendPostprocessor

ENGINES = (cacheblend_query_engine, cacheblend_chat_engine, cacheblend_retriever_tool)


class Fact(BaseModel):
    """An answer."""

    text: str


def llm() -> CacheBlendLLM:
    return CacheBlendLLM(model="no-such-model")


def refused(ask: Callable[[], Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ask()
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"llm": MockLLM()}, "llm must be an instance of CacheBlendLLM"),
        ({"source": "documents"}, "source must be an instance of"),
        ({"source": Document(text="text")}, "source must be an instance of"),
        ({"order": "best"}, "order must be 'score', 'document' or 'reverse'"),
        ({"similarity_top_k": 0}, "similarity_top_k must be greater than or equal to 1"),
        ({"transformations": ["split"]}, "transformations must be an instance of TransformCo"),
        ({"node_postprocessors": "rerank"}, "node_postprocessors must be a valid list"),
        ({"vector_store": "faiss"}, "vector_store must be an instance of BasePydanticVectorS"),
        ({"ordr": "score"}, "(did you mean 'order'?)"),
    ],
)
def test_arguments_of_all_engines(make: Any, given: dict[str, Any], told: str) -> None:
    arguments = {"source": [Document(text="A text.")], "llm": llm(), **given}
    refused(lambda: make(**arguments), told)


@pytest.mark.parametrize(
    ("make", "given", "told"),
    [
        (ENGINES[0], {"response_mode": "compct"}, "response_mode must be 'refine', 'compact'"),
        (ENGINES[0], {"text_qa_template": "Answer."}, "text_qa_template must be an instance of"),
        (
            ENGINES[0],
            {"text_qa_template": PromptTemplate("{query_str}")},
            "text_qa_template must take 'context_str', not only ['query_str']",
        ),
        (ENGINES[0], {"output_cls": "Fact"}, "output_cls must be a subclass of BaseModel"),
        (
            ENGINES[0],
            {"output_cls": Fact, "response_mode": "accumulate"},
            "output_cls needs a response_mode of refine, compact, tree_summarize",
        ),
        (ENGINES[0], {"output_cls": Fact, "streaming": True}, "an object is not streamed"),
        (ENGINES[1], {"chat_mode": "react"}, "chat_mode='react' must be one of context, conden"),
    ],
)
def test_arguments_of_one_engine(make: Any, given: dict[str, Any], told: str) -> None:
    refused(lambda: make([Document(text="A text.")], llm(), **given), told)


@pytest.mark.parametrize("nodes", ["nodes", TextNode(text="alone"), ["text"]])
def test_nodes(nodes: Any) -> None:
    refused(lambda: CacheBlendPrecompute(model="no-such-model")(nodes), "nodes")


def test_parts() -> None:
    refused(lambda: CacheBlendVectorStore(llm(), llm()), "vector_store must be an instance of")
    refused(lambda: CacheBlendPromptHelper.from_llm(MockLLM()), "llm is a MockLLM: give a Cache")
    hinting = CacheBlendPostprocessor
    refused(lambda: hinting(llm=MockLLM()), "llm is a MockLLM: give a CacheBlendLLM")
    refused(lambda: hinting(llm=llm(), order="best"), "order must be 'score', 'document' or")
    refused(lambda: hinting(llm=llm(), ordr="score"), "(did you mean 'order'?)")
    refused(hinting, "llm: Field required")
