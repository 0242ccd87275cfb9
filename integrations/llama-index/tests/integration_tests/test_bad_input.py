"""What goes wrong says so in one line, or costs time and is told in the report."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from toy import TOY
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheblend_rag import Engine, open_engine
from cacheblend_rag.errors import (
    CacheBlendError,
    EngineUnavailableError,
    MissingExtraError,
    ModelLoadError,
    PromptError,
)
from llama_index.llms.cacheblend import CacheBlendLLM, CacheBlendPrecompute


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def one_line(error: Exception) -> bool:
    return bool(str(error)) and "\n" not in str(error)


@pytest.mark.parametrize("component", [CacheBlendLLM, CacheBlendPrecompute])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": "/no/such/model"}, ModelLoadError),
        ({"model": TOY, "engine": "vllm"}, MissingExtraError),
        ({"model": TOY, "engine": "server"}, EngineUnavailableError),
        ({"model": TOY, "engine": "onnx"}, CacheBlendError),
    ],
    ids=["model", "extra", "server", "engine"],
)
def test_what_cannot_be_opened_says_why(
    component: Any, fields: dict[str, Any], expected: type[CacheBlendError]
) -> None:
    if fields.get("engine") == "vllm" and find_spec("vllm"):
        pytest.skip("vllm is installed here")
    if fields.get("engine") == "server":
        fields = {**fields, "engine": f"http://127.0.0.1:{free_port()}"}
    with pytest.raises(expected) as raised:
        component(**fields).open()
    assert one_line(raised.value)


def test_an_empty_and_a_too_long_prompt(llm: CacheBlendLLM) -> None:
    for prompt in ("", "word " * 5000):
        with pytest.raises(PromptError) as raised:
            llm.complete(prompt, formatted=True)
        assert one_line(raised.value)


def node(text: str, **metadata: str) -> TextNode:
    source = RelatedNodeInfo(node_id="doc")
    return TextNode(text=text, metadata=metadata, relationships={NodeRelationship.SOURCE: source})


GEMMA = (
    "{{ raise_exception('System role not supported') if messages[0].role == 'system' }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
)


def templated(model: Path, template: str) -> Engine:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    return open_engine(model=AutoModelForCausalLM.from_pretrained(model), tokenizer=tokenizer)


def test_a_template_without_a_system_role_gets_the_instruction_from_the_user(
    random_model: Path,
) -> None:
    engine, seen = templated(random_model, GEMMA), list[str]()
    engine.after_answer(lambda request, answer: seen.append(request.prepared.text) or answer)
    index = VectorStoreIndex([node("Anna lives in Ulm.")], embed_model=MockEmbedding(8))
    llm = CacheBlendLLM(engine=engine, max_tokens=4)
    answer = str(index.as_query_engine(llm=llm, response_mode="compact").query("Where?"))
    assert answer != "Empty Response"
    (asked,) = seen
    assert asked.startswith("<user>You are an expert Q&A system")
    assert "Anna lives in Ulm." in asked
    assert asked.count("<user>") == 1
