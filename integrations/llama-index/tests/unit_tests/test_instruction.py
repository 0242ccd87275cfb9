from __future__ import annotations

from pathlib import Path

from llama_index.core import PromptTemplate
from toy import TOY
from transformers import AutoTokenizer

from llama_index.llms.cacheblend import CacheBlendLLM


def test_the_head_of_the_question_template_is_the_instruction() -> None:
    llm = CacheBlendLLM(model=TOY, is_chat_model=False, system_prompt="Be brief.")
    head = "Be brief.\n\nContext information is below.\n---------------------\n"
    assert llm.resolve_instruction() == head


def test_a_chat_models_instruction_is_rendered() -> None:
    instruction = CacheBlendLLM(model=TOY).resolve_instruction()
    assert instruction.startswith("<bos>You are an expert Q&A system")
    assert instruction.endswith("Context information is below.\n---------------------\n")


def test_a_template_of_ones_own() -> None:
    template = PromptTemplate("Read {context_str} and answer {query_str}.")
    llm = CacheBlendLLM(model=TOY, is_chat_model=False)
    assert llm.resolve_instruction(template) == "Read "
    question_first = PromptTemplate("No place for chunks: {query_str}")
    assert llm.resolve_instruction(question_first) == ""


def test_a_template_without_a_system_role_has_it_in_the_users_message(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    tokenizer.chat_template = (
        "{{ raise_exception('no') if messages[0].role == 'system' }}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path)
    instruction = CacheBlendLLM(model=tmp_path).resolve_instruction()
    assert instruction.startswith("<user>You are an expert Q&A system")
    assert "\n\nContext information is below." in instruction
